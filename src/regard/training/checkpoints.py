"""Checkpoints: safetensors and JSON, written whole or not at all.

A run's folder:

    recipe.json, tokens.json     what is trained, and on which tokens
    log.jsonl                    what happened
    checkpoints/00001200/        weights.safetensors, optimiser.safetensors, state.json
    lock                         held by the process that trains; it dies with it

A checkpoint is written under another name, flushed to the disk and renamed; state.json, written last, holds the
checksums of the others. So a folder with the right name and the right sums is a whole checkpoint.
"""

import hashlib
import json
import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..errors import FormatError, RegardError

STATE, PARTS = "state.json", ("weights.safetensors", "optimiser.safetensors")


def write(
    folder: Path,
    step: int,
    weights: dict[str, Tensor],
    optimiser: dict[str, Tensor],
    state: dict[str, Any],
    keep: int = 3,
) -> Path:
    """Write checkpoints/<step>, then forget all but the last `keep`."""
    home = folder / "checkpoints"
    home.mkdir(parents=True, exist_ok=True)
    final, temporary = home / f"{step:08d}", home / f".{step:08d}.{os.getpid()}"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        for name, tensors in zip(PARTS, (weights, optimiser), strict=True):
            save_file(_apart(tensors), temporary / name)
            _flush(temporary / name)
        sums = {name: checksum(temporary / name) for name in PARTS}
        (temporary / STATE).write_text(
            json.dumps({"format": 1, "step": step, "sums": sums, **state}, indent=1) + "\n"
        )
        _flush(temporary / STATE)
        _flush(temporary)
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
        _flush(home)
    except (OSError, SafetensorError) as e:
        shutil.rmtree(temporary, ignore_errors=True)
        there = steps(folder)
        safe = f"the last one written is step {there[-1]}" if there else "none was written before"
        raise RegardError(f"checkpoint {step} could not be written to {home}: {e}; {safe}") from e
    for old in steps(folder)[:-keep]:
        shutil.rmtree(home / f"{old:08d}", ignore_errors=True)
    return final


def steps(folder: Path) -> list[int]:
    """The checkpoints there are, oldest first."""
    home = folder / "checkpoints"
    names = [p.name for p in home.iterdir()] if home.is_dir() else []
    return sorted(int(n) for n in names if n.isdigit())


def read(
    folder: Path, step: int | None = None, device: torch.device | str = "cpu"
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """Weights, optimiser and state of a checkpoint, the newest unless one is named. A damaged one is refused."""
    there = steps(folder)
    if not there:
        raise FormatError(f"{folder} holds no checkpoint; train there first")
    step = there[-1] if step is None else step
    if step not in there:
        raise FormatError(f"{folder} has no checkpoint {step}; there are {', '.join(map(str, there))}")
    at = folder / "checkpoints" / f"{step:08d}"
    try:
        state = json.loads((at / STATE).read_text(encoding="utf-8"))
        if state.get("format") != 1:
            raise ValueError(f"its format is {state.get('format')!r}, not 1")
        for name in PARTS:
            if checksum(at / name) != state["sums"][name]:
                raise ValueError(f"{name} is damaged: its checksum is not the one written with it")
        weights, optimiser = (load_file(at / name, device=str(device)) for name in PARTS)
    except (OSError, ValueError, KeyError, AttributeError, SafetensorError) as e:
        before = [s for s in there if s < step]
        offer = f"; the one before it is step {before[-1]}" if before else "; there is none before it"
        raise FormatError(f"checkpoint {step} of {folder} cannot be read: {e}{offer}") from e
    return weights, optimiser, state


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def locked(folder: Path):
    """One run a folder. The lock is the operating system's, so it ends with the process, however that ends."""
    from filelock import FileLock, Timeout

    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / "lock", timeout=0):
            yield
    except Timeout as e:
        raise RegardError(f"another run is training in {folder}; give this one a folder of its own") from e


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous, and no two in one memory: safetensors stores no sharing."""
    seen: set[int] = set()
    out = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().contiguous()
        out[name] = tensor.clone() if tensor.data_ptr() in seen and tensor.numel() else tensor
        seen.add(tensor.data_ptr())
    return out


def _flush(path: Path) -> None:
    """To the disk, not only to the system's memory. Windows opens no folders; there the rename has to do."""
    if os.name == "nt" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

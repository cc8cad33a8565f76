"""Checkpoints: safetensors and JSON, written whole or not at all.

A run's folder:

    recipe.json, tokens.json     what is trained, and on which tokens
    log.jsonl                    what happened
    checkpoints/00001200/        weights.safetensors, optimiser.safetensors, state.json
    lock                         held by the process that trains; it dies with it

A checkpoint is written under another name, flushed to the disk and renamed; state.json, written last, holds the
checksums of the others. So a folder with the right name and the right sums is a whole checkpoint.

Ranks write a file each, side by side: shard-00001-….safetensors and so on, as torch.distributed.checkpoint lays them
out. Any number of ranks reads either kind. Nothing is pickled into them.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ...errors import FormatError, RegardError
from .ranks import ALONE, Ranks

T = TypeVar("T")
STATE, SUFFIX = "state.json", ".safetensors"


def write(
    folder: Path,
    step: int,
    weights: dict[str, Tensor],
    rest: dict[str, Tensor],
    state: dict[str, Any],
    *,
    keep: int = 3,
    every: int = 1,
    ranks: Ranks = ALONE,
) -> Path:
    """Write checkpoints/<step>, then forget all but the last `keep`, and those between multiples of `every`.

    All ranks call it together; each gives the tensors it holds, or its parts of them.
    """
    home = folder / "checkpoints"
    final, temporary = home / f"{step:08d}", home / f".{step:08d}"

    def begin() -> None:
        home.mkdir(parents=True, exist_ok=True)
        for left in home.glob(".*"):  # by a process that was killed while it wrote
            shutil.rmtree(left)
        temporary.mkdir()

    def end() -> None:
        told = {"format": 1, "step": step, "ranks": ranks.world, "sums": sums, **state}
        (temporary / STATE).write_text(json.dumps(told, indent=1) + "\n")
        _flush(temporary / STATE)
        _flush(temporary)
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
        _flush(home)

    try:
        ranks.first(lambda: _trying(begin))
        own = ranks.all(lambda: _trying(lambda: _put(temporary, weights, rest, ranks)))
        sums = {name: s for said in ranks.everyone(json.dumps(own)) for name, s in json.loads(said).items()}
        ranks.first(lambda: _trying(end))
    except RegardError as e:
        there = steps(folder)
        safe = f"the last one written is step {there[-1]}" if there else "none was written before"
        if ranks.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise RegardError(f"checkpoint {step} could not be written to {home}: {e}; {safe}") from e
    if ranks.rank == 0:
        _forget(folder, step, keep, every)
    return final


def _trying(act: Callable[[], T]) -> T:
    """What a disk or a library refuses, as an error of ours that ranks can tell one another."""
    try:
        return act()
    except (OSError, SafetensorError) as e:
        raise RegardError(str(e)) from e


def _put(at: Path, weights: dict[str, Tensor], rest: dict[str, Tensor], ranks: Ranks) -> dict[str, str]:
    """Write what is this rank's, to the disk; give the checksums."""
    if ranks.world > 1:
        from .sharded_checkpoints import save

        save(at, weights | rest)
        files = sorted(at.glob(f"shard-{ranks.rank + 1:05d}-*{SUFFIX}"))
    else:
        files = [at / f"{name}{SUFFIX}" for name in ("weights", "optimiser")]
        for file, tensors in zip(files, (weights, rest), strict=True):
            save_file(_apart(tensors), file)
    for file in files:
        _flush(file)
    return {file.name: checksum(file) for file in files}


def _forget(folder: Path, step: int, keep: int, every: int) -> None:
    there = steps(folder)
    kept = [s for s in there if s % every == 0 or s == step][-keep:]
    for old in set(there) - set(kept):
        shutil.rmtree(folder / "checkpoints" / f"{old:08d}", ignore_errors=True)


def steps(folder: Path) -> list[int]:
    """The checkpoints there are, oldest first."""
    home = folder / "checkpoints"
    names = [p.name for p in home.iterdir()] if home.is_dir() else []
    return sorted(int(n) for n in names if n.isdigit())


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was found whole: what it says, and tensors to be read."""

    path: Path
    state: dict[str, Any]
    ranks: Ranks = ALONE

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor in it, by name."""
        from .sharded_checkpoints import shapes

        return shapes(self.path)

    def fill(self, tensors: dict[str, Tensor]) -> None:
        """Give these their stored values, in place; each rank reads the parts it holds."""
        from .sharded_checkpoints import fill

        fill(self.path, tensors, self.ranks)


def read(folder: Path, step: int | None = None, ranks: Ranks = ALONE) -> Checkpoint:
    """A checkpoint, the newest unless one is named. A damaged one is refused. All ranks call it together."""
    there = steps(folder)
    if not there:
        raise FormatError(f"{folder} holds no checkpoint; train there first")
    step = there[-1] if step is None else step
    if step not in there:
        raise FormatError(f"{folder} has no checkpoint {step}; there are {', '.join(map(str, there))}")
    at = folder / "checkpoints" / f"{step:08d}"

    def checked() -> dict[str, Any]:
        try:
            return _checked(at, ranks)
        except (OSError, ValueError, KeyError, AttributeError, SafetensorError) as e:
            before = [s for s in there if s < step]
            offer = f"; the one before it is step {before[-1]}" if before else "; there is none before it"
            raise FormatError(f"checkpoint {step} of {folder} cannot be read: {e}{offer}") from e

    return Checkpoint(at, ranks.all(checked), ranks)


def _checked(at: Path, ranks: Ranks) -> dict[str, Any]:
    """The state of a checkpoint whose files are what was written; each rank looks at some of them."""
    state = json.loads((at / STATE).read_text(encoding="utf-8"))
    if state.get("format") != 1:
        raise ValueError(f"its format is {state.get('format')!r}, not 1")
    names = sorted(state["sums"])
    for name in names[ranks.rank :: ranks.world]:
        if checksum(at / name) != state["sums"][name]:
            raise ValueError(f"{name} is damaged: its checksum is not the one written with it")
    if foreign := {file.name for file in at.glob(f"*{SUFFIX}")} - set(names):
        raise ValueError(f"{min(foreign)} is not one of its files")
    return state


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

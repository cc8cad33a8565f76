"""Checkpoints: safetensors and JSON, written atomically.

A run's folder:

    recipe.json, tokens.json     the recipe and its tokenizer
    log.jsonl                    events
    checkpoints/00001200/        weights.safetensors, optimizer.safetensors, state.json
    best.safetensors             with `patience`: the weights of the best validation
    lock                         locked by the process that trains; released when it ends

A checkpoint is written under a temporary name, flushed to disk and renamed; state.json, written last, has the
checksums of the other files and of its own fields. So a folder with the final name and matching checksums is a
complete checkpoint.

Several ranks write one file each, shard-00001-….safetensors and so on, in the format of torch.distributed.checkpoint.
Any number of ranks reads either kind. Nothing is pickled.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ...errors import FormatError, RegardError
from ...files import checksum, flush, make_folder
from .ranks import ALONE, Ranks

T = TypeVar("T")
STATE, SUFFIX, BEST = "state.json", ".safetensors", "best.safetensors"


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay: the last `keep` of those at multiples of `every`, and the newest."""

    keep: int = 3
    every: int = 1


def write(
    folder: Path,
    step: int,
    weights: dict[str, Tensor],
    rest: dict[str, Tensor],
    state: dict[str, Any],
    retention: Retention = Retention(),
    ranks: Ranks = ALONE,
) -> Path:
    """Write checkpoints/<step>, then delete the older ones that `retention` does not keep.

    All ranks call it together; each passes its tensors, or its parts of them.
    """
    home = folder / "checkpoints"
    final, temporary = home / f"{step:08d}", home / f".{step:08d}"

    def begin() -> None:
        home.mkdir(parents=True, exist_ok=True)
        for left in home.glob(".*"):  # left by a process that was killed while writing
            if left.is_dir() and left.name[1:].isdecimal():
                shutil.rmtree(left)
        temporary.mkdir()

    def end() -> None:
        document = {"format": 1, "step": step, "ranks": ranks.world, "sums": sums, **state}
        document["own_sum"] = _own_sum(document)
        (temporary / STATE).write_text(json.dumps(document, indent=1) + "\n")
        flush(temporary / STATE)
        flush(temporary)
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
        flush(home)

    try:
        ranks.on_first(lambda: _as_regard_error(begin))
        own = ranks.on_all(lambda: _as_regard_error(lambda: _write_files(temporary, weights, rest, ranks)))
        sums = {name: s for text in ranks.gather(json.dumps(own)) for name, s in json.loads(text).items()}
        ranks.on_first(lambda: _as_regard_error(end))
    except RegardError as e:
        stored = steps(folder)
        safe = f"the last one written is step {stored[-1]}" if stored else "none was written before"
        if ranks.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise RegardError(f"checkpoint {step} could not be written to {home}: {e}; {safe}") from e
    if ranks.rank == 0:
        _delete_old(folder, step, retention)
    return final


def write_best(folder: Path, weights: dict[str, Tensor]) -> None:
    """Write the weights of the best validation so far."""
    temporary = folder / f".{BEST}"

    def act() -> None:
        save_file(weights, temporary)
        flush(temporary)
        temporary.rename(folder / BEST)

    _as_regard_error(act)


def read_best(folder: Path) -> dict[str, Tensor]:
    """The weights of the best validation."""
    try:
        return load_file(folder / BEST)
    except (OSError, SafetensorError) as e:
        raise FormatError(f"{folder / BEST}, the weights of the best validation, cannot be read: {e}") from e


def _as_regard_error(act: Callable[[], T]) -> T:
    """Turn an error of the disk or of safetensors into a RegardError, which ranks report to one another."""
    try:
        return act()
    except (OSError, SafetensorError) as e:
        raise RegardError(str(e)) from e


def _write_files(
    at: Path, weights: dict[str, Tensor], rest: dict[str, Tensor], ranks: Ranks
) -> dict[str, str]:
    """Write this rank's files and flush them to disk; returns their checksums."""
    if ranks.world > 1:
        from .sharded_checkpoints import save

        save(at, weights | rest)
        files = sorted(at.glob(f"shard-{ranks.rank + 1:05d}-*{SUFFIX}"))
    else:
        files = [at / f"{name}{SUFFIX}" for name in ("weights", "optimizer")]
        for file, tensors in zip(files, (weights, rest), strict=True):
            save_file(_unshared(tensors), file)
    for file in files:
        flush(file)
    return {file.name: checksum(file) for file in files}


def _delete_old(folder: Path, step: int, retention: Retention) -> None:
    stored = steps(folder)
    kept = [s for s in stored if s % retention.every == 0 or s == step][-retention.keep :]
    for old in set(stored) - set(kept):
        shutil.rmtree(folder / "checkpoints" / f"{old:08d}", ignore_errors=True)


def steps(folder: Path) -> list[int]:
    """The steps of the stored checkpoints, oldest first."""
    home = folder / "checkpoints"
    names = [p.name for p in home.iterdir()] if home.is_dir() else []
    return sorted(int(n) for n in names if n.isdecimal())


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: its state, and tensors that can be read."""

    path: Path
    state: dict[str, Any]
    ranks: Ranks = ALONE

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor, by name."""
        from .sharded_checkpoints import shapes

        return shapes(self.path)

    def fill(self, tensors: dict[str, Tensor]) -> None:
        """Read the stored values into these tensors, in place; each rank reads its own parts."""
        from .sharded_checkpoints import fill

        fill(self.path, tensors, self.ranks)


def read(folder: Path, step: int | None = None, ranks: Ranks = ALONE) -> Checkpoint:
    """A checkpoint, by default the newest. A damaged one is an error. All ranks call it together."""
    stored = steps(folder)
    if not stored:
        raise FormatError(f"{folder} contains no checkpoint; train there first")
    step = stored[-1] if step is None else step
    if step not in stored:
        raise FormatError(f"{folder} has no checkpoint {step}; there are {', '.join(map(str, stored))}")
    at = folder / "checkpoints" / f"{step:08d}"

    def checked() -> dict[str, Any]:
        try:
            return _checked(at, ranks)
        except (OSError, ValueError, KeyError, RecursionError, SafetensorError) as e:
            before = [s for s in stored if s < step]
            then = f"resume from the one before it, step {before[-1]}" if before else "train from the start"
            raise FormatError(
                f"checkpoint {step} of {folder} cannot be read: {e}; to {then}, delete {at}"
            ) from e

    return Checkpoint(at, ranks.on_all(checked), ranks)


def _checked(at: Path, ranks: Ranks) -> dict[str, Any]:
    """The state of a checkpoint after its checksums were verified; each rank verifies a part of the files."""
    state = json.loads((at / STATE).read_text(encoding="utf-8"))
    if not isinstance(state, dict):
        raise ValueError(f"{STATE} holds a {type(state).__name__}, where an object with the state is needed")
    if state.get("format") != 1:
        raise ValueError(f"its format is {state.get('format')!r}, not 1")
    if state.pop("own_sum", None) != _own_sum(state):
        raise ValueError(f"{STATE} is damaged or was changed: its checksum differs from the stored one")
    if state["step"] != int(at.name):
        raise ValueError(f"{STATE} is of step {state['step']}, and the folder of step {int(at.name)}")
    names = sorted(state["sums"])
    for name in names[ranks.rank :: ranks.world]:
        if checksum(at / name) != state["sums"][name]:
            raise ValueError(f"{name} is damaged: its checksum differs from the stored one")
    if foreign := {file.name for file in at.glob(f"*{SUFFIX}")} - set(names):
        raise ValueError(f"{min(foreign)} is not one of its files")
    return state


def _own_sum(state: dict[str, Any]) -> str:
    """The checksum of everything in state.json beside this checksum."""
    plain = json.loads(json.dumps(state))  # as it is read: every key a string
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


@contextmanager
def locked(folder: Path):
    """One run per folder. The operating system releases the lock when the process ends, however it ends."""
    from filelock import FileLock, Timeout

    make_folder(folder)
    lock = FileLock(folder / "lock", timeout=0)
    try:
        lock.acquire()
    except Timeout as e:
        raise RegardError(f"another process is training in {folder}; give this run another folder") from e
    except OSError as e:
        raise RegardError(f"cannot write to {folder}: {e.strerror or e}; choose another folder") from e
    try:
        yield
    finally:
        lock.release()


def _unshared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors without shared memory: safetensors does not store sharing."""
    seen: set[int] = set()
    out = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().contiguous()
        out[name] = tensor.clone() if tensor.data_ptr() in seen and tensor.numel() else tensor
        seen.add(tensor.data_ptr())
    return out

"""The log of a run: one JSON object a line; TensorBoard beside it where it is installed."""

import json
import math
import time
from pathlib import Path
from typing import Any


class Log:
    """Appends to log.jsonl; what a killed process left half-written at its end is cut off first."""

    def __init__(self, folder: Path, tensorboard: bool = False):
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "log.jsonl"
        _mend(self.path)
        self.file = self.path.open("a", encoding="utf-8")
        self.board = _board(folder) if tensorboard else None

    def write(self, event: str, step: int, **values: Any) -> dict[str, Any]:
        told = {"event": event, "step": step, "time": round(time.time(), 3), **values}
        self.file.write(json.dumps({k: _finite(v) for k, v in told.items()}) + "\n")
        self.file.flush()
        if self.board is not None:
            for name, value in values.items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    self.board.add_scalar(f"{event}/{name}", value, step)
        return told

    def close(self) -> None:
        self.file.close()
        if self.board is not None:
            self.board.close()


def read(folder: Path, event: str | None = None) -> list[dict[str, Any]]:
    """The events of a run, in order. Steps that were run again after a restart are told once, the later time."""
    last: dict[tuple[str, int], dict[str, Any]] = {}
    path = folder / "log.jsonl"
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            told = json.loads(line)
        except json.JSONDecodeError:  # the line a process was killed in
            continue
        last[told["event"], told["step"]] = told
    return [t for t in last.values() if event in (None, t["event"])]


def _finite(value: Any) -> Any:
    """JSON has no NaN: it is told as a word."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _mend(path: Path) -> None:
    if path.is_file() and (text := path.read_bytes()) and not text.endswith(b"\n"):
        path.write_bytes(text[: text.rfind(b"\n") + 1])


def _board(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder / "tensorboard"))

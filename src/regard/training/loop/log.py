"""The log of a run: one JSON object a line; and TensorBoard for those who ask for it."""

import json
import math
import time
from pathlib import Path
from typing import Any

from ...errors import RegardError


class Log:
    """Appends to log.jsonl; what a killed process left half-written at its end is cut off first."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "log.jsonl"
        _mend(self.path)
        self.file = self.path.open("a", encoding="utf-8")

    def write(self, event: str, step: int, **values: Any) -> dict[str, Any]:
        told = {"event": event, "step": step, "time": round(time.time(), 3), **values}
        self.file.write(json.dumps({k: _finite(v) for k, v in told.items()}) + "\n")
        self.file.flush()
        return told

    def close(self) -> None:
        self.file.close()


class Board:
    """A listener that tells TensorBoard every number of every event. It takes seconds to import."""

    def __init__(self, folder: Path):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError as e:
            raise RegardError(
                "the curves go to TensorBoard's files by tensorboard: pip install tensorboard"
            ) from e
        self.writer: Any = SummaryWriter(str(folder / "tensorboard"))

    def __call__(self, event: dict[str, Any]) -> None:
        for name, value in event.items():
            if (
                isinstance(value, int | float)
                and not isinstance(value, bool)
                and name not in ("step", "time")
            ):
                self.writer.add_scalar(f"{event['event']}/{name}", value, event["step"], event["time"])
        self.writer.flush()


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

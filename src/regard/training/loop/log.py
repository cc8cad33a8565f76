"""The log of a run: one JSON object per line; and TensorBoard's event files."""

import contextlib
import json
import math
import time
from pathlib import Path
from typing import Any

from ...errors import RegardError


class Log:
    """Appends to log.jsonl; an incomplete last line, left by a killed process, is removed first."""

    def __init__(self, folder: Path):
        self.path = folder / "log.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _remove_incomplete_line(self.path)
            self.file = self.path.open("a", encoding="utf-8")
        except OSError as e:
            raise RegardError(f"cannot write {self.path}: {e.strerror or e}") from e

    def write(self, event: str, step: int, **values: Any) -> dict[str, Any]:
        entry = {"event": event, "step": step, "time": round(time.time(), 3), **values}
        try:
            self.file.write(json.dumps({k: _finite(v) for k, v in entry.items()}) + "\n")
            self.file.flush()
        except OSError as e:  # a full disk, for one: the training cannot be recorded
            raise RegardError(
                f"cannot write {self.path}: {e.strerror or e}; the run continues from its last checkpoint when it is "
                "started again"
            ) from e
        return entry

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what could not be written was reported by `write`
            self.file.close()


class TensorBoardWriter:
    """A listener that writes every number of every event for TensorBoard, which takes seconds to import."""

    def __init__(self, folder: Path):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError as e:
            raise RegardError("writing TensorBoard's files needs tensorboard: pip install tensorboard") from e
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
    """The events of a run, in order. Of steps that were repeated after a restart only the later event is given."""
    last: dict[tuple[str, int], dict[str, Any]] = {}
    path = folder / "log.jsonl"
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        try:
            entry = json.loads(line)
            last[entry["event"], entry["step"]] = entry
        except (ValueError, TypeError, KeyError):  # incomplete: killed while writing it, or damaged
            continue
    return [entry for entry in last.values() if event in (None, entry["event"])]


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they are written as strings."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _remove_incomplete_line(path: Path) -> None:
    if path.is_file() and (text := path.read_bytes()) and not text.endswith(b"\n"):
        path.write_bytes(text[: text.rfind(b"\n") + 1])

"""A progress bar of a run on stderr: loss, speed, time left; and the messages of each event."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .loop.settings import Settings


def message(event: dict[str, Any]) -> str:
    """What to print for an event; an empty string for most of them."""
    match event["event"]:
        case "data":
            return "\n".join(_rows(event))
        case "preflight":
            return event["text"]
        case "resume":
            return f"resuming after update {event['step']:,}, from its checkpoint"
        case "valid":
            return f"update {event['step']:,}: validation loss {event['loss']:.3f}"
        case "evaluating":
            return f"evaluating on {event['rows']:,} test rows …"
        case "interrupted":
            return f"interrupted after update {event['step']:,}; run the same command again to resume"
    return ""


def _rows(event: dict[str, Any]) -> list[str]:
    lines = []
    if event["dropped"]:
        lines.append(f"{event['dropped']:,} training rows are too long and were dropped")
    if event["truncated"]:
        lines.append(f"{event['truncated']:,} training rows are too long and were truncated")
    return lines


@contextmanager
def waiting(
    text: str, silent: bool = False, *, first: int | float = 1.0, again: int | float = 10.0
) -> Iterator[None]:
    """Say on stderr what takes long: after `first` seconds, and then every `again` seconds with the time so far."""
    if silent:
        yield
        return
    done = threading.Event()
    began = time.monotonic()

    def report() -> None:
        if done.wait(first):
            return
        print(f"{text} …", file=sys.stderr, flush=True)
        while not done.wait(again):
            print(f"{text} … {time.monotonic() - began:.0f} s so far", file=sys.stderr, flush=True)

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


class ProgressBar:
    """A listener that shows a bar while the run trains; without `rich` it prints the messages alone."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.bar: Any = None
        self.line: Any = None

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, *error: Any) -> None:
        self._close()

    def __call__(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind in ("interrupted", "done"):
            self._close()
        elif kind == "train":
            self._show(event)
        if text := message(event):
            if self.bar is not None:
                self.bar.console.print(text, highlight=False, markup=False)
            else:
                print(text, file=sys.stderr)

    def _show(self, event: dict[str, Any]) -> None:
        if self.bar is None and not self._open():
            return
        done = event["seconds"] if self.settings.minutes else event["step"]
        text = f"loss {event['loss']:.3f}  {event['tokens_per_second']:,} tokens/s"
        self.bar.update(self.line, completed=done, description=text)

    def _open(self) -> bool:
        self.bar = _new_bar()
        if self.bar is None:
            return False
        s = self.settings
        self.bar.start()
        self.line = self.bar.add_task("training", total=60 * s.minutes if s.minutes else s.steps)
        return True

    def _close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


class LessonBar:
    """A listener that shows one bar per model of a lesson; without `rich` one line per trained model."""

    def __init__(self) -> None:
        self.bar: Any = None
        self.lines: dict[str, Any] = {}

    def __enter__(self) -> "LessonBar":
        self.bar = _new_bar()
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.bar is not None:
            self.bar.stop()

    def __call__(self, event: dict[str, Any]) -> None:
        if event["event"] == "train":
            self._show(event)
        elif event["event"] == "drawing" and self.bar is not None:
            self.bar.console.print(f"drawing {event['pictures']} pictures …", highlight=False)

    def _show(self, event: dict[str, Any]) -> None:
        name, text = event["model"], f"{event['model']}  loss {event['loss']:.3f}"
        if self.bar is None:
            if event["step"] == event["steps"]:
                print(text, file=sys.stderr)
            return
        if name not in self.lines:
            self.lines[name] = self.bar.add_task(text, total=event["steps"])
        self.bar.update(self.lines[name], completed=event["step"], description=text)


def _new_bar() -> Any:
    """A progress bar on stderr; None where `rich` is not installed."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    except ModuleNotFoundError:
        return None
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(file=sys.stderr))

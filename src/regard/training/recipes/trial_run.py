"""A trial run: a few timed updates of a copy of the model on real batches. The run itself is not changed."""

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..loop.ranks import ALONE
from ..loop.threads import Step
from ..loop.trainer import Trainer
from .base import Recipe

UPDATES = 3  # timed, after one that is not: it loads kernels and fills caches
MAX_SECONDS = 20.0  # after which no further update is begun


@dataclass(frozen=True)
class Speed:
    """Updates, seconds and predictions, and how they were measured or estimated."""

    updates: int
    seconds: int | float
    predicted: int | float
    method: str


def measure_speed(recipe: Recipe, rows: Any, model: nn.Module, device: torch.device) -> Speed | None:
    """Measured in one process and in eager mode, since compiling would take too long; None if memory runs out."""
    with random_state_kept(device), _peak_memory_reset(device):
        try:
            return _timed(recipe, rows, model, device)
        except (MemoryError, RuntimeError) as e:
            if isinstance(e, RuntimeError) and "memory" not in str(e):
                raise
    return None


def rehearsal(recipe: Recipe, rows: Any, model: nn.Module, device: torch.device) -> Step:
    """A function that makes one update of a copy and returns its number of predictions; the run is not changed."""
    trial = _trial(recipe, rows, model, device)

    def step() -> int:
        with random_state_kept(device):
            return next(iter(trial.timed(1, MAX_SECONDS)))[1]

    return step


def _trial(recipe: Recipe, rows: Any, model: nn.Module, device: torch.device) -> Trainer:
    task, settings = recipe.task(copy.deepcopy(model).to(device)), replace(recipe.settings, compile=False)
    return Trainer(task, rows, rows, settings, Path(), ALONE)


def _timed(recipe: Recipe, rows: Any, model: nn.Module, device: torch.device) -> Speed:
    measured = list(_trial(recipe, rows, model, device).timed(1 + UPDATES, MAX_SECONDS))
    counted = measured[1:] or measured
    seconds, predicted = sum(s for s, _ in counted), sum(p for _, p in counted)
    method = (
        f"from {len(counted)} update{'s' * (len(counted) > 1)} of a copy on real batches, {seconds:.2f} s"
    )
    return Speed(
        len(counted), seconds, predicted, method + (", not compiled" if recipe.settings.compile else "")
    )


def random_state_kept(device: torch.device) -> Any:
    """A context after which the random state is what it was before."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


@contextlib.contextmanager
def _peak_memory_reset(device: torch.device) -> Iterator[None]:
    """Reset the peak of the memory afterwards: the log reports that of the run, without the trial."""
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        else:
            with contextlib.suppress(OSError):  # only Linux lets a process reset its peak
                Path("/proc/self/clear_refs").write_text("5")

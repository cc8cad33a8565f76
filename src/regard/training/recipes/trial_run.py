"""A rehearsal: a few updates of a copy of the model on real batches, timed. The run itself stays as it was."""

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..loop.ranks import ALONE
from ..loop.trainer import Trainer
from .base import Recipe

UPDATES = 3  # that count, after one that does not: it loads kernels and fills caches
PATIENCE = 20.0  # seconds, after which no further update is begun


@dataclass(frozen=True)
class Pace:
    """So many updates in so many seconds, and how that is known."""

    updates: int
    seconds: int | float
    predicted: int | float
    how: str


def rehearse(recipe: Recipe, rows: Any, model: nn.Module, device: torch.device) -> Pace | None:
    """By one process, in eager, since compiling would take longer than a rehearsal should; None without memory."""
    with dice_kept(device), _peak_forgotten(device):
        try:
            return _rehearsed(recipe, rows, model, device)
        except (MemoryError, RuntimeError) as e:
            if isinstance(e, RuntimeError) and "memory" not in str(e):
                raise
    return None


def _rehearsed(recipe: Recipe, rows: Any, model: nn.Module, device: torch.device) -> Pace:
    task, settings = recipe.task(copy.deepcopy(model).to(device)), replace(recipe.settings, compile=False)
    found = list(Trainer(task, rows, rows, settings, Path(), ALONE).timed(1 + UPDATES, PATIENCE))
    counted = found[1:] or found
    seconds, predicted = sum(s for s, _ in counted), sum(p for _, p in counted)
    how = f"from {len(counted)} update{'s' * (len(counted) > 1)} of a copy on real batches, {seconds:.2f} s"
    return Pace(len(counted), seconds, predicted, how + (", not compiled" if recipe.settings.compile else ""))


def dice_kept(device: torch.device) -> Any:
    """Whatever is drawn inside, the run draws what it would have drawn."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


@contextlib.contextmanager
def _peak_forgotten(device: torch.device) -> Iterator[None]:
    """The log tells the most memory that the run held: what a rehearsal held is none of it."""
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        else:
            with contextlib.suppress(OSError):  # Linux alone lets a process forget its peak
                Path("/proc/self/clear_refs").write_text("5")

"""Averages of the weights over updates or checkpoints, which reduce the noise of the last steps."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ... import compat
from ...errors import SpecError
from . import checkpoints
from .ranks import Ranks, local_part


@dataclass(frozen=True)
class ema:
    """mean ← decay · mean + (1 − decay) · weights after each update; the decay is at most step / (step + 9)."""

    decay: int | float = 0.999

    def __post_init__(self):
        if not 0 <= self.decay < 1:
            raise SpecError(f"ema({self.decay}): the decay needs to be in [0, 1)")


@dataclass(frozen=True)
class last:
    """The mean of the current weights and those of the k − 1 checkpoints before, `save_every` updates apart."""

    k: int = 5

    def __post_init__(self):
        if self.k < 1:
            raise SpecError(f"last({self.k}): at least 1 is needed")


class RunningMean:
    """The exponential moving average of a model's weights; tied weights are averaged once."""

    def __init__(self, declared: ema, model: nn.Module):
        self.declared = declared
        self.live = dict(model.named_parameters())
        self.mean = {name: p.detach().clone() for name, p in self.live.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        decay = min(self.declared.decay, step / (step + 9))
        compat.foreach_lerp_(_parts(self.mean), _parts(self.live), 1 - decay)

    def state(self) -> dict[str, Tensor]:
        """The tensors to store in a checkpoint."""
        return self.mean

    @contextlib.contextmanager
    def swapped(self, step: int) -> Iterator[None]:
        """A context in which the model holds the average."""
        _swap(_parts(self.live), _parts(self.mean))
        try:
            yield
        finally:
            _swap(_parts(self.live), _parts(self.mean))


class CheckpointMean:
    """The average over checkpoints. They are read on demand, so training holds no copy of the weights."""

    def __init__(self, declared: last, model: nn.Module, folder: Path, every: int, ranks: Ranks):
        self.declared, self.folder, self.every, self.ranks = declared, folder, every, ranks
        self.live = dict(model.named_parameters())

    def update(self, step: int) -> None:
        """Nothing to do: the weights are in the checkpoints."""

    def state(self) -> dict[str, Tensor]:
        return {}

    @contextlib.contextmanager
    def swapped(self, step: int) -> Iterator[None]:
        mean = self._mean(step)
        _swap(_parts(self.live), _parts(mean))
        try:
            yield
        finally:
            _swap(_parts(self.live), _parts(mean))

    @torch.no_grad()
    def _mean(self, step: int) -> dict[str, Tensor]:
        # A checkpoint that is not a multiple of `every` was written by Ctrl-C; a run without it has to give the same.
        before = [s for s in checkpoints.steps(self.folder) if s < step and s % self.every == 0]
        mean = {name: p.detach().clone() for name, p in self.live.items()}
        read = {name: torch.empty_like(tensor) for name, tensor in mean.items()}
        for count, one in enumerate(before[len(before) - min(len(before), self.declared.k - 1) :], 2):
            checkpoints.read(self.folder, one, self.ranks).fill(read)
            compat.foreach_lerp_(_parts(mean), _parts(read), 1 / count)
        return mean


def _parts(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """The local part of each tensor; the mean of parts is a part of the mean."""
    return [local_part(t.detach()) for t in tensors.values()]


@torch.no_grad()
def _swap(one: list[Tensor], other: list[Tensor]) -> None:
    """Swap values, not tensors: references to the model's weights stay valid."""
    for a, b in zip(one, other, strict=True):
        a_before = a.clone()
        a.copy_(b)
        b.copy_(a_before)

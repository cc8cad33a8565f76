"""Averaged weights: what is left of the noise of the last steps."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import SpecError


@dataclass(frozen=True)
class ema:
    """mean ← decay · mean + (1 − decay) · weights, after each update; at first the decay is step / (step + 9)."""

    decay: int | float = 0.999

    def __post_init__(self):
        if not 0 <= self.decay < 1:
            raise SpecError(f"ema({self.decay}): the decay is not in [0, 1)")


class Mean:
    """The average of a model's weights, tied ones counted once."""

    def __init__(self, declared: ema, model: nn.Module):
        self.declared = declared
        self.live = dict(model.named_parameters())
        self.kept = {name: p.detach().clone() for name, p in self.live.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        decay = min(self.declared.decay, step / (step + 9))
        torch._foreach_lerp_(list(self.kept.values()), [p.detach() for p in self.live.values()], 1 - decay)

    @torch.no_grad()
    def swap(self) -> None:
        """The average in the model's place, and the model's weights in the average's; twice is nothing."""
        for name, p in self.live.items():
            p.data, self.kept[name] = self.kept[name], p.data

    def state(self) -> dict[str, Tensor]:
        return self.kept

    @torch.no_grad()
    def restore(self, kept: dict[str, Tensor]) -> None:
        for name, tensor in kept.items():
            self.kept[name].copy_(tensor)

"""What a lesson is: a small system, soon trained, whose claim a number decides."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...schedule import Schedule, warmup_cosine
from ..loop.optimizer import AdamW


@dataclass(frozen=True)
class Lesson:
    """What was claimed, what was measured, and whether the claim stands."""

    number: str
    claim: str
    measured: dict[str, Any]
    passed: bool

    def __str__(self) -> str:
        told = [f"  {name}: {_said(v)}" for name, v in self.measured.items()]
        return "\n".join([f"{self.number} {'stands' if self.passed else 'falls'}: {self.claim}", *told])


def _said(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{k} {_said(v)}" for k, v in value.items())
    return str(value)


def fit(
    model: nn.Module,
    loss: Callable[[int], Tensor],
    steps: int,
    rate: float | Schedule = 1e-3,
    *,
    clip: float | None = 1.0,
) -> list[float]:
    """Train on loss(step), which draws its own batch; the loss of each step."""
    schedule = rate if isinstance(rate, Schedule) else warmup_cosine(rate, max(steps // 10, 1), steps)
    optimiser = AdamW(betas=(0.9, 0.98)).build(model)
    model.train()
    curve = []
    for step in range(1, steps + 1):
        for group in optimiser.param_groups:
            group["lr"] = schedule(step)
        now = loss(step)
        now.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        curve.append(float(now.detach()))
    model.eval()
    return curve


def noise(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)

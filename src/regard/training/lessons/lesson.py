"""A lesson: a small model, quickly trained, and a claim that a measured number decides."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...schedule import Schedule, warmup_cosine
from ..loop.optimizer import AdamW


@dataclass(frozen=True)
class Lesson:
    """A claim, the measured numbers, and whether they support it."""

    number: str
    claim: str
    measured: dict[str, Any]
    passed: bool

    def __str__(self) -> str:
        lines = [f"  {name}: {_format(v)}" for name, v in self.measured.items()]
        return "\n".join([f"{self.number} {'passed' if self.passed else 'failed'}: {self.claim}", *lines])


def _format(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{k} {_format(v)}" for k, v in value.items())
    return str(value)


def fit(
    model: nn.Module,
    loss: Callable[[int], Tensor],
    steps: int,
    rate: float | Schedule = 1e-3,
    *,
    clip: float | None = 1.0,
) -> list[float]:
    """Train on loss(step), which samples its own batch; returns the loss of each step."""
    schedule = rate if isinstance(rate, Schedule) else warmup_cosine(rate, max(steps // 10, 1), steps)
    optimizer = AdamW(betas=(0.9, 0.98)).build(model)
    model.train()
    curve = []
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = schedule(step)
        value = loss(step)
        value.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        curve.append(float(value.detach()))
    model.eval()
    return curve


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)

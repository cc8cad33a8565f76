"""Learning-rate schedules: values that are functions of the step.

    >>> rate = warmup_cosine(0.001, warmup=4000, total=100000)
    >>> [round(rate(step), 6) for step in (2000, 4000, 28000, 100000)]
    [0.0005, 0.001, 0.000854, 0.0]

Steps count from 0, where a schedule with warm-up is 0: the first update of a trainer is step 1.
"""

import math
from dataclasses import dataclass

from .errors import SpecError


class Schedule:
    """A learning rate for each step. `repr` is source."""

    def __call__(self, step: int) -> float:
        if step < 0:
            raise SpecError(f"step={step} is negative; steps count from 0, and the first update is step 1")
        return self._rate(step)

    def _rate(self, step: int) -> float:
        raise NotImplementedError


@dataclass(frozen=True)
class warmup_cosine(Schedule):
    """lr_max · step/warmup, then lr_max · (1 + cos(π (step − warmup)/(total − warmup)))/2, and 0 past total.

    The rates of steps 0 … total add up to lr_max · total/2 for any warm-up above 0; without warm-up the decay starts
    at step 0. After `total` steps the rate stays 0.
    """

    lr_max: int | float
    warmup: int
    total: int

    def __post_init__(self):
        _require_rate("lr_max", self.lr_max)
        _require_steps("warmup", self.warmup, minimum=0)
        _require_steps("total", self.total, minimum=1)
        if self.warmup >= self.total:
            raise SpecError(
                f"warmup={self.warmup} leaves no step of total={self.total} for the decay; "
                f"use a warmup below {self.total}, or a total above {self.warmup}"
            )

    def _rate(self, step: int) -> float:
        if step < self.warmup:
            return self.lr_max * step / self.warmup
        left = max(self.total - step, 0) / (self.total - self.warmup)
        # (1 + cos π(1 − x))/2 = sin²(πx/2): near the end 1 + cos would cancel, this does not.
        return self.lr_max * math.sin(math.pi / 2 * left) ** 2


@dataclass(frozen=True)
class inverse_sqrt(Schedule):
    """d_model^(−1/2) · min(step^(−1/2), step · warmup^(−3/2)), as in the original Transformer.

    The peak is (d_model · warmup)^(−1/2), at step = warmup.
    """

    d_model: int
    warmup: int

    def __post_init__(self):
        _require_steps("d_model", self.d_model, minimum=1)
        _require_steps("warmup", self.warmup, minimum=1)

    def _rate(self, step: int) -> float:
        rising = step * self.warmup**-1.5
        return self.d_model**-0.5 * (rising if step < self.warmup else step**-0.5)


@dataclass(frozen=True)
class constant(Schedule):
    """lr · min(1, step/warmup); without warm-up lr at every step, including step 0."""

    lr: int | float
    warmup: int = 0

    def __post_init__(self):
        _require_rate("lr", self.lr)
        _require_steps("warmup", self.warmup, minimum=0)

    def _rate(self, step: int) -> float:
        return self.lr * step / self.warmup if step < self.warmup else self.lr


KINDS = (warmup_cosine, inverse_sqrt, constant)


def _require_rate(name: str, given: int | float) -> None:
    number = isinstance(given, int | float) and not isinstance(given, bool)
    if not (number and math.isfinite(given) and given > 0):
        raise SpecError(f"{name}={given!r} is not a positive finite learning rate")


def _require_steps(name: str, given: int, minimum: int) -> None:
    if not isinstance(given, int) or isinstance(given, bool) or given < minimum:
        raise SpecError(f"{name}={given!r} is not a {'positive' if minimum else 'non-negative'} integer")

"""What one case of a law measures: the size of an error, with a message that names the quantity."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import numpy as np  # torch.unravel_index takes as long as a small attention, to check its arguments
import torch
from torch import Tensor


class Measurement(NamedTuple):
    """The error of one case, in the units of the law's tolerance, and a message about the quantity measured."""

    error: float
    message: str

    @property
    def rank(self) -> float:
        """The error for comparisons; NaN counts as infinite."""
        return math.inf if math.isnan(self.error) else self.error


def worst(*measurements: Measurement) -> Measurement:
    """The measurement with the largest error."""
    return max(measurements, key=lambda m: m.rank)


def combine(*measurements: Measurement) -> Measurement:
    """The largest error, with the messages of all measurements that are above rounding error."""
    wrong = [m.message for m in measurements if m.rank > 1e-4]
    largest = worst(*measurements)
    return Measurement(largest.error, "; ".join(wrong)) if wrong else largest


def compare(quantity: str, got: Tensor, expected: Tensor, slack: float = 1.0) -> Measurement:
    """max|got − expected| / max(1, max|expected|) / slack.

    slack: the factor by which this quantity may exceed the law's tolerance; gradients err more than outputs.
    """
    got, expected = got.detach().double().cpu(), expected.detach().double().cpu()
    if (comparisons := _COMPARISONS.get()) is not None:
        comparisons.append((quantity, got, expected))
    if got.shape != expected.shape:
        message = f"{quantity}: got shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
        return Measurement(math.inf, message)
    if got.numel() == 0:
        return Measurement(0.0, quantity)
    if not bool(torch.isfinite(got).all()):
        same = (got == expected) | (got.isnan() & expected.isnan())
        if not bool(same[~torch.isfinite(got)].all()):
            return Measurement(math.nan, f"{quantity}: got {_not_finite(got)}, expected finite ones")
        got, expected = (torch.where(torch.isfinite(x), x, 0.0) for x in (got, expected))
    error = (got - expected).abs()
    finite = torch.isfinite(expected)
    size = expected[finite].abs().amax().item() if bool(finite.any()) else 0.0
    index = tuple(int(i) for i in np.unravel_index(int(error.argmax()), error.shape))
    at = f" at index {list(index)}" if index else ""
    message = f"{quantity}: {_got_expected(got[index].item(), expected[index].item())}{at}"
    return Measurement(error.amax().item() / max(1.0, size) / slack, message)


Comparison = tuple[str, Tensor, Tensor]  # a quantity, the result and what was expected
_COMPARISONS: ContextVar[list[Comparison] | None] = ContextVar("comparisons", default=None)


@contextmanager
def recorded() -> Iterator[list[Comparison]]:
    """Records the arguments of `compare` inside this block, to draw them."""
    comparisons: list[Comparison] = []
    token = _COMPARISONS.set(comparisons)
    try:
        yield comparisons
    finally:
        _COMPARISONS.reset(token)


def excess(message: str, amount: Tensor | float, slack: float = 1.0) -> Measurement:
    """An inequality: by how much it is violated, 0 if it holds."""
    largest = float(torch.as_tensor(amount, dtype=torch.float64).max())
    return Measurement(largest if math.isnan(largest) else max(0.0, largest) / slack, message)


def require(violation: str, ok: bool | Tensor) -> Measurement:
    """A statement that is true or false, without a tolerance; `violation` describes what is wrong if it is false."""
    return Measurement(0.0 if bool(torch.as_tensor(ok).all()) else math.inf, violation)


def gradients(o: Tensor, inputs: tuple[Tensor, ...], grad_output: Tensor) -> tuple[Tensor, ...]:
    """The gradient of ⟨o, grad_output⟩; an input that gets none gets zeros."""
    if not o.requires_grad:
        return tuple(torch.zeros_like(x) for x in inputs)
    grads = torch.autograd.grad((o * grad_output.to(o.dtype)).sum(), inputs, allow_unused=True)
    return tuple(torch.zeros_like(x) if g is None else g for g, x in zip(grads, inputs))


def _got_expected(got: float, expected: float) -> str:
    """Both numbers with six digits, or with as many as are needed to distinguish them."""
    digits = next((d for d in (6, 12) if f"{got:.{d}g}" != f"{expected:.{d}g}"), 6 if got == expected else 17)
    return f"got {got:.{digits}g}, expected {expected:.{digits}g}"


def _not_finite(x: Tensor) -> str:
    counts = ((int(x.isnan().sum()), "NaN"), (int(x.isinf().sum()), "infinite"))
    words = " and ".join(f"{count} {word}" for count, word in counts if count)
    return f"{words} of {x.numel()} values"

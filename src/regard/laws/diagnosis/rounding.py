"""Distinguishes rounding from a small error of the formula: a rounded function is constant between its steps."""

from collections.abc import Callable

import torch
from torch import Tensor

from .cause import Cause

SIXTEEN_BITS = 1e-5  # a change of an input far below the spacing of 16-bit dtypes, far above that of float32
THIRTY_TWO_BITS = 1e-9
# The share of a small change that is lost or wrong: 0.3 to 1 with rounded scores; about 0.02 with an error of 2 %.
STEP_SHARE = 0.15


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).abs().max()) / max(1.0, float(want.abs().max()))


def in_steps(
    got_of: Callable[[Tensor], Tensor], want_of: Callable[[Tensor], Tensor], x: Tensor, size: float
) -> bool:
    """Whether a change of x below the spacing of a dtype changes the output not at all, or by too much."""
    g = torch.Generator().manual_seed(0)
    moved = x + size * torch.randn(x.shape, generator=g, dtype=torch.float64).to(x.device, x.dtype)
    change = got_of(moved).double() - got_of(x).double()
    right = want_of(moved) - want_of(x)
    return float((change - right).abs().max()) > STEP_SHARE * float(right.abs().max())


def precision_lost(evidence: str, where: str = "", wrong: int = 1) -> Cause:
    fix = "compute in the dtype of the inputs, sums at least in float32"
    return Cause("precision is lost", "precision lost", fix, evidence, where, 0, wrong, exact=False)

"""How far a head with quadratic scores is from a shift, for every input (L26).

A head's weights a and a shift to key t are 1 − a_t apart in total variation. Its output differs from x_t by
Σ_j a_j (x_j − x_t), so by no more than (1 − a_t) times the range of x. With scores −α(δ − Δ)² along each axis the
weights are a product over the axes, and more keys only take weight from t: the sum over all whole δ bounds every
length and every image.
"""

from math import ceil, inf, log, sqrt

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import SpecError

_NOTHING = 746.0  # exp(−746) is 0 in float64
_SOFTEST, _SHARPEST = 1e-4, 1e6


def leak(centre: Float[Tensor, "h axes"], alpha: Float[Tensor, " h"]) -> Float[Tensor, " h"]:
    """1 − the weight of the key nearest to q + Δ, the most that it can be on any line or grid, in float64.

    >>> round(leak(torch.zeros(1, 2), torch.tensor([1.0])).item(), 4)  # on 7 × 7 cells 0.6817
    0.6818
    """
    return -torch.expm1(-_others(centre, alpha).log1p().sum(-1))


def _others(centre: Float[Tensor, "h axes"], alpha: Float[Tensor, " h"]) -> Float[Tensor, "h axes"]:
    """Σ exp(s_k − s_t) over the whole numbers k ≠ t, t the one nearest to Δ; ∞ where α is not above 0."""
    centre, alpha = centre.detach().double(), alpha.detach().double()
    soft = alpha <= 0
    alpha = alpha.masked_fill(soft, 1.0).clamp(min=_SOFTEST)
    reach = ceil(sqrt(_NOTHING / float(alpha.min()))) + 1
    steps = torch.arange(-reach, reach + 1, dtype=torch.float64, device=centre.device)
    from_nearest = (centre - centre.round())[..., None]
    gaps = (steps - from_nearest) ** 2 - from_nearest**2  # ≥ 0: t is the nearest
    shares = torch.exp(-alpha[:, None, None] * gaps).masked_fill(steps == 0, 0.0)
    return shares.sum(-1).masked_fill(soft[:, None], inf)


def sharpness(error: int | float, axes: int, weight: int | float = 1.0) -> float:
    """The least α (to 1e-6 of itself) at which heads at whole offsets leak so little that weight · leak ≤ error.

    weight: Σ∣tap∣ · range of the input for the error of a convolution's output; 1 for the leak itself.

    >>> round(sharpness(1e-6, axes=2), 3)
    15.202
    """
    if not error > 0:
        raise SpecError(f"error={error}: no finite sharpness is exact; leave sharpness out for the hard form")
    if weight * _leak_at(_SOFTEST, axes) <= error:
        return _SOFTEST
    low, high = log(_SOFTEST), log(_SHARPEST)
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (low, middle) if weight * _leak_at(_e(middle), axes) <= error else (middle, high)
    return _e(high) * (1 + 2**-22)  # so that rounding it to float32 does not fall below


def _leak_at(alpha: float, axes: int) -> float:
    return leak(torch.zeros(1, axes), torch.tensor([alpha], dtype=torch.float64)).item()


def _e(x: float) -> float:
    return torch.tensor(x, dtype=torch.float64).exp().item()

"""The distance between a head with quadratic scores and a shift, for every input (law L26).

The weights a of a head and a shift to key t have total variation distance 1 − a_t. The output differs from x_t by
Σ_j a_j (x_j − x_t), so by at most (1 − a_t) times the range of x. With scores −α(δ − Δ)² along each axis the weights
are a product over the axes, and more keys only take weight from t: the sum over all integers δ bounds every length
and every image.
"""

from math import ceil, inf, log, sqrt

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import SpecError

_EXP_UNDERFLOW = 746.0  # exp(−746) is 0 in float64
_MIN_ALPHA, _MAX_ALPHA = 1e-4, 1e6


def leak(center: Float[Tensor, "h axes"], alpha: Float[Tensor, " h"]) -> Float[Tensor, " h"]:
    """An upper bound on 1 − the weight of the key nearest to q + Δ, for any line or grid, in float64.

    >>> round(leak(torch.zeros(1, 2), torch.tensor([1.0])).item(), 4)  # on 7 × 7 cells 0.6817
    0.6818
    """
    return -torch.expm1(-_relative_weight_elsewhere(center, alpha).log1p().sum(-1))


def _relative_weight_elsewhere(
    center: Float[Tensor, "h axes"], alpha: Float[Tensor, " h"]
) -> Float[Tensor, "h axes"]:
    """Σ exp(s_k − s_t) over all integers k ≠ t, where t is nearest to Δ; ∞ if α ≤ 0."""
    center, alpha = center.detach().double(), alpha.detach().double()
    unbounded = alpha <= 0
    alpha = alpha.masked_fill(unbounded, 1.0).clamp(min=_MIN_ALPHA)
    reach = ceil(sqrt(_EXP_UNDERFLOW / float(alpha.min()))) + 1
    steps = torch.arange(-reach, reach + 1, dtype=torch.float64, device=center.device)
    from_nearest = (center - center.round())[..., None]
    gaps = (steps - from_nearest) ** 2 - from_nearest**2  # ≥ 0: t is the nearest
    shares = torch.exp(-alpha[:, None, None] * gaps).masked_fill(steps == 0, 0.0)
    return shares.sum(-1).masked_fill(unbounded[:, None], inf)


def sharpness(error: int | float, axes: int, weight: int | float = 1.0) -> float:
    """The smallest α (to a relative 1e-6) at which heads with integer offsets have weight · leak ≤ error.

    weight: Σ∣tap∣ · range of the input, for the error of a convolution's output; 1 for the leak itself.

    >>> round(sharpness(1e-6, axes=2), 3)
    15.202
    """
    if not error > 0:
        raise SpecError(
            f"error={error}: no finite sharpness is exact; leave sharpness out for hard attention"
        )
    if weight * _leak_at(_MIN_ALPHA, axes) <= error:
        return _MIN_ALPHA
    low, high = log(_MIN_ALPHA), log(_MAX_ALPHA)
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (low, middle) if weight * _leak_at(_exp(middle), axes) <= error else (middle, high)
    return _exp(high) * (1 + 2**-22)  # so that rounding to float32 does not go below it


def _leak_at(alpha: float, axes: int) -> float:
    return leak(torch.zeros(1, axes), torch.tensor([alpha], dtype=torch.float64)).item()


def _exp(x: float) -> float:
    return torch.tensor(x, dtype=torch.float64).exp().item()

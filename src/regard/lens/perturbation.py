"""How the output of an attention changes when a key is replaced, scaled or noisy: exactly and to first order."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import pi, sqrt

import numpy as np
import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor

from ..errors import ShapeError


@dataclass(frozen=True, eq=False)
class KeyChange:
    """The change of each output when one key is replaced by each of `s` others; `at` numbers them."""

    at: Float[Tensor, " s"]
    exact: Float[Tensor, "s n d_v"]
    first_order: Float[Tensor, "s n d_v"]


@dataclass(frozen=True, eq=False)
class KeyNoise:
    """Mean and deviation of the change of each output under noise N(0, σ² I) on one key, for each σ of `at`."""

    at: Float[Tensor, " s"]
    mean: Float[Tensor, "s n d_v"]
    deviation: Float[Tensor, "s n d_v"]
    mean_first_order: Float[Tensor, "s n d_v"]
    deviation_first_order: Float[Tensor, "s n d_v"]


@dataclass(frozen=True, eq=False)
class _Effect:
    """What a change of key i acts on: its weight a (n) and the direction v_i − h (n, d_v) of the output's change."""

    factor: int | float
    weight: Float[Tensor, " n"]
    direction: Float[Tensor, "n d_v"]

    def exact(self, delta: Float[Tensor, "*s n"]) -> Float[Tensor, "*s n"]:
        """(a′ − a)/(1 − a), a′ = a e^δ/(1 − a + a e^δ): how much of v_i − h is added when a score rises by δ."""
        a = self.weight
        return a * torch.expm1(delta) / (1 - a + a * delta.exp())


def _effect(
    q: Float[Tensor, "n d_k"],
    k: Float[Tensor, "m d_k"],
    v: Float[Tensor, "m d_v"],
    key: int,
    scale: int | float | None,
) -> _Effect:
    if not 0 <= key < len(k):
        raise ShapeError(f"key {key}: there are {len(k)} keys, 0 to {len(k) - 1}")
    factor = k.shape[-1] ** -0.5 if scale is None else scale
    weights = (factor * einsum(q, k, "n d, m d -> n m")).softmax(-1)
    return _Effect(factor, weights[:, key], v[key] - weights @ v)


def key_change(
    q: Float[Tensor, "n d_k"],
    k: Float[Tensor, "m d_k"],
    v: Float[Tensor, "m d_v"],
    key: int,
    becomes: Float[Tensor, "s d_k"],
    scale: int | float | None = None,
) -> KeyChange:
    """k_i → k_i′: exactly (a′ − a)/(1 − a) (v_i − h), to first order a δ (v_i − h); δ = scale q·(k_i′ − k_i)."""
    effect = _effect(q, k, v, key, scale)
    delta = effect.factor * einsum(becomes - k[key], q, "s d, n d -> s n")
    exact, first = effect.exact(delta), effect.weight * delta
    at = torch.arange(len(becomes), dtype=q.dtype, device=q.device)
    return KeyChange(at, *(x[..., None] * effect.direction for x in (exact, first)))


def key_length(
    q: Float[Tensor, "n d_k"],
    k: Float[Tensor, "m d_k"],
    v: Float[Tensor, "m d_v"],
    key: int,
    alphas: Sequence[float],
    scale: int | float | None = None,
) -> KeyChange:
    """k_i → α k_i for each α."""
    at = torch.tensor(alphas, dtype=q.dtype, device=q.device)
    return replace(key_change(q, k, v, key, at[:, None] * k[key], scale), at=at)


def key_noise(
    q: Float[Tensor, "n d_k"],
    k: Float[Tensor, "m d_k"],
    v: Float[Tensor, "m d_v"],
    key: int,
    sigmas: Sequence[float],
    scale: int | float | None = None,
    points: int = 64,
) -> KeyNoise:
    """k_i + N(0, σ² I): δ = scale q·ε is normal with deviation scale σ ‖q‖, so both moments are one integral each.

    They are computed by Gauss–Hermite quadrature. To leading order the mean is a(1 − 2a)(scale σ ‖q‖)²/2 (v_i − h)
    and the deviation a scale σ ‖q‖ |v_i − h|.
    """
    effect = _effect(q, k, v, key, scale)
    at = torch.tensor(sigmas, dtype=q.dtype, device=q.device)
    spread = abs(effect.factor) * rearrange(at, "s -> s 1") * q.norm(dim=-1)
    nodes, shares = (torch.as_tensor(x).to(q) for x in np.polynomial.hermite.hermgauss(points))
    moved = effect.exact(sqrt(2) * rearrange(nodes, "p -> p 1 1") * spread)
    mean = einsum(shares, moved, "p, p s n -> s n") / sqrt(pi)
    square = einsum(shares, (moved - mean) ** 2, "p, p s n -> s n") / sqrt(pi)
    a = effect.weight
    factors = (mean, a * (1 - 2 * a) * spread**2 / 2)
    means = [x[..., None] * effect.direction for x in factors]
    deviations = [x[..., None] * effect.direction.abs() for x in (square.sqrt(), a * spread)]
    return KeyNoise(at, means[0], deviations[0], means[1], deviations[1])

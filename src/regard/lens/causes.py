"""Cause beside correlation: what changes when a head or a key is taken away, or a key is moved.

A large weight is no proof of influence: its value may be small, or a later layer may undo it (S0.Q1b.5).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import pi, sqrt
from typing import Any

import numpy as np
import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor

from ..errors import RegardError, ShapeError
from .capture import Seen, watching
from .captured import Captured, Compared, Written
from .running import first_tensor, run
from .terms import Part

Loss = Callable[[Any], float | Tensor]
ROWS = 256  # queries whose weights are held at a time


def remove_head(model: Any, inputs: Any, layer: int, head: int, loss: Loss | None = None) -> float:
    """How far the output moves when one head gives zeros, ‖o′ − o‖ / ‖o‖; with a loss, by how much it rises."""
    return _effect(model, inputs, loss, lambda at, out, _: _without_head(out, head) if at == layer else out)


def remove_heads(
    model: Any, inputs: Any, calls: Sequence[Captured], loss: Loss | None = None
) -> dict[tuple[int, int], float]:
    """`remove_head` for every head of these calls: one forward pass each."""
    before = _run(model, inputs, None)
    effects = {}
    for call in calls:
        for head in range(call.heads):

            def change(at: int, out: Tensor, _: Any, layer: int = call.layer, head: int = head) -> Tensor:
                return _without_head(out, head) if at == layer else out

            effects[call.layer, head] = _difference(before, _run(model, inputs, change), loss)
    return effects


def remove_key(
    model: Any,
    inputs: Any,
    key: int,
    layer: int | None = None,
    head: int | None = None,
    loss: Loss | None = None,
) -> float:
    """The same when no query may look at a key any more: in one layer or all, in one head or all."""

    def change(at: int, out: Tensor, source: Compared | Written) -> Tensor:
        return _without_key(out, source, key, head) if layer is None or at == layer else out

    return _effect(model, inputs, loss, change)


Change = Callable[[int, Tensor, Any], Tensor]


def _effect(model: Any, inputs: Any, loss: Loss | None, change: Change) -> float:
    return _difference(_run(model, inputs, None), _run(model, inputs, change), loss)


def _run(model: Any, inputs: Any, change: Change | None) -> Any:
    """The output, each attention's own output changed on its way. PyTorch's fast path, which shows none, is off."""
    seen: list[Seen] = []
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), watching(model, seen.append, change):
            return run(model, inputs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _difference(before: Any, after: Any, loss: Loss | None) -> float:
    if loss is not None:
        return float(loss(after)) - float(loss(before))
    o, changed = first_tensor(before).double(), first_tensor(after).double()
    if o.shape != changed.shape:
        raise RegardError(
            f"the model is not the same from run to run: {tuple(o.shape)} and {tuple(changed.shape)}"
        )
    return float((changed - o).norm() / o.norm().clamp(min=1e-30))


def _without_head(o: Float[Tensor, "b h n d_v"], head: int) -> Float[Tensor, "b h n d_v"]:
    if not 0 <= head < o.shape[1]:
        raise ShapeError(f"head {head}: this attention has {o.shape[1]} heads, 0 to {o.shape[1] - 1}")
    o = o.clone()
    o[:, head] = 0
    return o


def _without_key(
    o: Float[Tensor, "b h n d_v"], source: Compared | Written, key: int, head: int | None
) -> Float[Tensor, "b h n d_v"]:
    """softmax over the other keys: their weights, scaled up to sum to 1; zeros where there is no other."""
    b, h, n, m = source.shape
    if not 0 <= key < m:
        raise ShapeError(f"key {key}: this attention has {m} keys, 0 to {m - 1}")
    if source.v is None:
        raise RegardError("the values of this attention were not seen, so a key cannot be taken out of it")
    heads = list(range(h)) if head is None else [head]
    o = o.clone()
    v = source.v.to(torch.float32) if source.v.dtype.itemsize < 4 else source.v
    for batch in range(b):
        values = v[batch, [g // (h // v.shape[1]) for g in heads]]
        for start in range(0, n, ROWS):
            rows = slice(start, min(start + ROWS, n))
            weights = source.weights(Part(batch, heads, rows, m)).to(values.dtype)
            weights[..., key] = 0
            left = weights.sum(-1, keepdim=True)
            mixed = torch.where(left > 0, weights / left.clamp(min=1e-30), 0.0) @ values
            o[batch, heads, rows] = mixed.to(o.dtype)
    return o


@dataclass(frozen=True, eq=False)
class KeyChange:
    """The change of each output when one key becomes each of some others; `at` says which, by a number."""

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
class _Pulled:
    """What a change of key i acts on: its weight a (n), and v_i − h (n, d_v)."""

    factor: int | float
    weight: Float[Tensor, " n"]
    towards: Float[Tensor, "n d_v"]

    def exact(self, delta: Float[Tensor, "*s n"]) -> Float[Tensor, "*s n"]:
        """(a′ − a)/(1 − a), a′ = a e^δ/(1 − a + a e^δ): how much of v_i − h is added when a score rises by δ."""
        a = self.weight
        return a * torch.expm1(delta) / (1 - a + a * delta.exp())


def _pulled(
    q: Float[Tensor, "n d_k"],
    k: Float[Tensor, "m d_k"],
    v: Float[Tensor, "m d_v"],
    key: int,
    scale: int | float | None,
) -> _Pulled:
    if not 0 <= key < len(k):
        raise ShapeError(f"key {key}: there are {len(k)} keys, 0 to {len(k) - 1}")
    factor = k.shape[-1] ** -0.5 if scale is None else scale
    weights = (factor * einsum(q, k, "n d, m d -> n m")).softmax(-1)
    return _Pulled(factor, weights[:, key], v[key] - weights @ v)


def key_change(
    q: Float[Tensor, "n d_k"],
    k: Float[Tensor, "m d_k"],
    v: Float[Tensor, "m d_v"],
    key: int,
    becomes: Float[Tensor, "s d_k"],
    scale: int | float | None = None,
) -> KeyChange:
    """k_i → k_i′: exactly (a′ − a)/(1 − a) (v_i − h), to first order a δ (v_i − h); δ = scale q·(k_i′ − k_i)."""
    pulled = _pulled(q, k, v, key, scale)
    delta = pulled.factor * einsum(becomes - k[key], q, "s d, n d -> s n")
    exact, first = pulled.exact(delta), pulled.weight * delta
    at = torch.arange(len(becomes), dtype=q.dtype, device=q.device)
    return KeyChange(at, *(x[..., None] * pulled.towards for x in (exact, first)))


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
    pulled = _pulled(q, k, v, key, scale)
    at = torch.tensor(sigmas, dtype=q.dtype, device=q.device)
    spread = abs(pulled.factor) * rearrange(at, "s -> s 1") * q.norm(dim=-1)
    nodes, shares = (torch.as_tensor(x).to(q) for x in np.polynomial.hermite.hermgauss(points))
    moved = pulled.exact(sqrt(2) * rearrange(nodes, "p -> p 1 1") * spread)
    mean = einsum(shares, moved, "p, p s n -> s n") / sqrt(pi)
    square = einsum(shares, (moved - mean) ** 2, "p, p s n -> s n") / sqrt(pi)
    a = pulled.weight
    factors = (mean, a * (1 - 2 * a) * spread**2 / 2)
    means = [x[..., None] * pulled.towards for x in factors]
    deviations = [x[..., None] * pulled.towards.abs() for x in (square.sqrt(), a * spread)]
    return KeyNoise(at, means[0], deviations[0], means[1], deviations[1])


def rollout(
    calls: Sequence[Captured], rows: list[int] | None = None, batch: int = 0, residual: float = 0.5
) -> Float[Tensor, "r n"]:
    """Π over the layers of (residual · I + (1 − residual) · mean over heads of the weights), for these queries.

    Taken from the top layer down, so that no n × n table is needed for a few rows.
    """
    if not calls:
        raise ShapeError("rollout needs at least one self-attention")
    n = calls[0].n
    if any(c.role != "self" or c.n != n or c.m != n for c in calls):
        raise ShapeError(
            "rollout multiplies layer by layer: give the self-attentions of one stack, "
            f"not {', '.join(f'{c.name} ({c.n} × {c.m})' for c in calls)}"
        )
    first = calls[-1].weights([0], [0], batch)
    reached = torch.eye(n, dtype=first.dtype, device=first.device)[slice(None) if rows is None else rows]
    for call in reversed(calls):
        through = torch.zeros_like(reached)
        for start in range(0, n, ROWS):
            some = list(range(start, min(start + ROWS, n)))
            through += reached[:, some] @ call.weights(None, some, batch).mean(0)
        reached = residual * reached + (1 - residual) * through
    return reached

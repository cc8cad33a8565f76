"""A plan on the CPU: each batch of tiles in one call of the fused op, joined by log-sum-exp; nothing is n × m.

Backward: with the joined o and lse, exp(score − lse) is the weight of a pair in the whole softmax, so each
batch gives its share of the exact gradients, and they add up.
"""

from math import frexp, inf
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from ..pattern import Pattern
from . import flash_cpu, twice
from .batch import Batch, Program, lanes, working
from .merge import join


def attend(
    q: Float[Tensor, "b h n d_k"],
    k: Float[Tensor, "b h_kv m d_k"],
    v: Float[Tensor, "b h_kv m d_v"],
    pattern: Pattern,
    ways: tuple[Program, ...],
    *,
    scale: float,
    lengths: Int[Tensor, " b"] | None = None,
) -> tuple[Float[Tensor, "b h n d_v"], Float[Tensor, "b h n"]]:
    """softmax(scale · q kᵀ) v over the pairs of a pattern, and ln Σ exp of each row; both differentiable.

    ways: one program for all batch rows, or one each. Keys from lengths on are never read. lse is float32 for half
    types.
    """
    dtype = working(q.dtype)
    o, lse = _Attend.apply(q.to(dtype), k.to(dtype), v.to(dtype), pattern, ways, scale, lengths)
    return o.to(q.dtype), lse.to(torch.promote_types(q.dtype, torch.float32))


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, pattern, ways, scale, lengths):
        o, lse = forward(q, k, v, ways, scale, lengths)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.asked = pattern, ways, scale, lengths
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx, grad, grad_lse):
        q, k, v, o, lse = ctx.saved_tensors
        pattern, ways, scale, lengths = ctx.asked
        if grad is None and grad_lse is None:
            return (None,) * 7
        if torch.is_grad_enabled():  # create_graph=True: these gradients will be differentiated again
            place = pattern, ways[0].start, ways[0].step, scale, lengths
            grads = twice.gradients(grad, grad_lse, q, k, v, *place)
        else:
            grad = torch.zeros_like(o) if grad is None else grad
            grads = backward(grad, grad_lse, q, k, v, o, lse, ways, scale, lengths)
        return *grads, None, None, None, None


def forward(
    q: Float[Tensor, "b h n d_k"],
    k: Float[Tensor, "b h_kv m d_k"],
    v: Float[Tensor, "b h_kv m d_v"],
    way: Program | tuple[Program, ...],
    scale: float,
    lengths: Int[Tensor, " b"] | None = None,
) -> tuple[Float[Tensor, "b h n d_v"], Float[Tensor, "b h n"]]:
    """o and lse, in float32 or float64."""
    q, scale, _ = _scaled(q, scale)
    d_v, d = v.shape[-1], max(q.shape[-1], v.shape[-1])
    q, k, v = (_flat(x, d) for x in (q, k, v))
    o, lse = q.new_zeros(q.shape), q.new_full(q.shape[:3], -inf)
    for left, rows, keys in lanes(way, lengths, (q, o, lse), (k, v)):
        for batch in left.calls():
            queries, out, logs = map(batch.rows_of, rows)
            k, v = map(batch.keys_of, keys)
            part, part_lse = flash_cpu.forward(queries, k, v, scale, **_mask(batch))
            join(out, logs, part, part_lse)
    return o[..., :d_v], lse


def backward(
    grad: Float[Tensor, "b h n d_v"],
    grad_lse: Float[Tensor, "b h n"] | None,
    q: Float[Tensor, "b h n d_k"],
    k: Float[Tensor, "b h_kv m d_k"],
    v: Float[Tensor, "b h_kv m d_v"],
    o: Float[Tensor, "b h n d_v"],
    lse: Float[Tensor, "b h n"],
    way: Program | tuple[Program, ...],
    scale: float,
    lengths: Int[Tensor, " b"] | None = None,
) -> tuple[Float[Tensor, "b h n d_k"], Float[Tensor, "b h_kv m d_k"], Float[Tensor, "b h_kv m d_v"]]:
    """The gradients of q, k and v from those of o and lse."""
    q, scale, outside = _scaled(q, scale)
    d_k, d_v = q.shape[-1], v.shape[-1]
    if grad_lse is not None:
        # The op takes δ = do·o off each do·v; one more column, v 0, o 1, do −dlse, makes that δ − dlse.
        v, o = F.pad(v, (0, 1)), F.pad(o, (0, 1), value=1.0)
        grad = torch.cat([grad, -rearrange(grad_lse, "b h n -> b h n 1")], -1)
    d = max(d_k, v.shape[-1])
    grad, q, k, v, o = (_flat(x, d) for x in (grad, q, k, v, o))
    lse = lse.masked_fill(lse == -inf, inf)  # exp(score − lse) is then 0 in an empty row, not NaN
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for left, rows, keys in lanes(way, lengths, (grad, q, o, lse, dq), (k, v, dk, dv)):
        for batch in left.calls(len(keys[0]) * d):
            do, queries, out, logs, into = map(batch.rows_of, rows)
            k, v = map(batch.keys_of, keys[:2])
            part = flash_cpu.backward(do, queries, k, v, out, logs, scale, **_mask(batch))
            into.add_(part[0])
            batch.add_to_keys(keys[2], part[1])
            batch.add_to_keys(keys[3], part[2])
    dq = dq if outside == 1.0 else dq.mul_(outside)
    return dq[..., :d_k], dk[..., :d_k], dv[..., :d_v]


def _mask(batch: Batch) -> dict[str, Any]:
    return {"triangle": True} if batch.triangle else {"allowed": batch.allowed}


def _scaled(q: Tensor, scale: float) -> tuple[Tensor, float, float]:
    """q and the scale to give the op, and what is left of the scale for dq.

    The op scales after the products forward and within them backward: unless the scale is a power of two, its
    scores differ in their last bit, and then exp(score − lse) is not the weight there was.
    """
    return (q, scale, 1.0) if abs(frexp(scale)[0]) == 0.5 else (q * scale, 1.0, scale)


def _flat(x: Tensor, d: int) -> Tensor:
    """x, d wide, with batch and heads one behind the other in memory."""
    return F.pad(x, (0, d - x.shape[-1])) if x.shape[-1] < d else x.contiguous()

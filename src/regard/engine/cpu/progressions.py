"""A plan on the CPU: each batch of tiles by products or by the fused op, joined by log-sum-exp; nothing is n × m.

Backward: with the joined o and lse, exp(score − lse) is the weight of a pair in the whole softmax, so each
batch gives its share of the exact gradients, and they add up.
"""

from collections.abc import Sequence
from math import frexp, inf
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from ...pattern import Pattern
from .. import double_backward
from ..merge import join
from . import flash_op as flash_cpu
from . import products
from .batch import Batch, Lane, Program, Step, lanes, working
from .pages import large
from .products import Room


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
            grads = double_backward.gradients((grad, grad_lse), (q, k, v), double_backward.Weighting(*place))
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
    q, scale, _ = _scaled(q, scale, way, lengths)
    q, k, v = (x.contiguous() for x in (q, k, v))
    o, lse = large(q.new_empty(*q.shape[:3], v.shape[-1])).zero_(), q.new_full(q.shape[:3], -inf)
    room = Room(q)
    for left, rows, keys in lanes(way, lengths, (q, o, lse), (k, v)):
        for step in left.fused:
            queries, out, logs = map(step.batch.rows_of, rows)
            k, v = map(step.batch.keys_of, keys)
            join(out, logs, *flash_cpu.forward(queries, k, v, scale, **_mask(step.batch)))
        views = {step: _cut(step, rows, keys) for step in left.steps if not step.batch.fused}
        for step, i in left.order(len(rows[0])):
            _piece_forward(step, [x[i] for x in views[step]], scale, room)
    return o, lse


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
    q, scale, outside = _scaled(q, scale, way, lengths)
    grad, q, k, v, o = (x.contiguous() for x in (grad, q, k, v, o))
    lse = lse.masked_fill(lse == -inf, inf)  # exp(score − lse) is then 0 in an empty row, not NaN
    dq, dk, dv = (large(torch.empty_like(x)).zero_() for x in (q, k, v))
    room = Room(q)
    delta = lse if all(step.alone for one in _each(way) for step in one.steps) else _dots(grad, o)
    of_rows = (grad, q, o, lse, delta, dq, *(() if grad_lse is None else (grad_lse,)))
    for left, rows, keys in lanes(way, lengths, of_rows, (k, v, dk, dv)):
        for step in left.fused:
            _fused_backward(step.batch, rows, keys, scale)
        mine = (step for step in left.steps if not step.batch.fused)
        views = {step: (*_cut(step, rows, keys[:2]), *_into(step, keys[2:])) for step in mine}
        for step, i in left.order(len(rows[0])):
            _piece_backward(step, [x[i] for x in views[step]], scale, room)
    return dq if outside == 1.0 else dq.mul_(outside), dk, dv


def _piece_forward(step: Step, views: Sequence[Tensor], scale: float, room: Room) -> None:
    """Joins a piece, run by products, to o and lse."""
    k, v, q, o, lse = views
    mask = step.batch.mask(q.dtype)
    if not step.fresh:
        join(o, lse, *products.forward(q, k, v, scale, mask, room))
        return
    direct = o.is_contiguous()
    part, part_lse = products.forward(q, k, v, scale, mask, room, o if direct else None)
    lse.copy_(part_lse)
    if not direct:
        o.copy_(part)


def _piece_backward(step: Step, views: Sequence[Any], scale: float, room: Room) -> None:
    """Adds the gradients of a piece by products."""
    k, v, do, q, _, lse, delta, dq, *dlse, dk, dv = views
    more = lse, None if step.alone else delta, dlse[0] if dlse else None
    mask = step.batch.mask(q.dtype), step.batch.hollow
    weights, ds = products.backward(do, q, k, v, *more, scale, *mask, room)
    if dq.is_contiguous():
        dq.baddbmm_(ds, k, alpha=scale)
    else:
        dq.add_(torch.bmm(ds, k, out=room("dq", *dq.shape)), alpha=scale)
    _add_to_keys(dk, ds, q, scale, room)
    _add_to_keys(dv, weights, do, 1.0, room)


def _cut(step: Step, rows: Lane, keys: Lane) -> list[list[Tensor]]:
    return [*map(step.keys_of, keys), *map(step.rows_of, rows)]


def _into(step: Step, keys: Lane) -> list[list]:
    """Where the gradients of the keys of each piece go: blocks of them where that is quick, else the lane."""
    return [step.blocks_of(x) or step.lanes_of(x) for x in keys]


def _add_to_keys(into: Any, of_pairs: Tensor, of_rows: Tensor, alpha: float, room: Room) -> None:
    """into[key l of tile t] += alpha · Σ_r of_pairs[t, r, l] · of_rows[t, r]."""
    if isinstance(into, list):
        for block, of_block in zip(into, of_pairs.mT.split(into[0].shape[1], 1)):
            block.baddbmm_(of_block, of_rows, alpha=alpha)
        return
    batch, x = into
    part = room("keys", len(of_pairs), of_pairs.shape[-1], of_rows.shape[-1])
    torch.baddbmm(part, of_pairs.mT, of_rows, beta=0, alpha=alpha, out=part)
    batch.add_to_keys(x, part.unflatten(0, (len(x), batch.tiles)))


def _dots(a: Tensor, b: Tensor) -> Tensor:
    """Σ a ∘ b over the last axis, some heads at a time: no third tensor of that size."""
    found = a.new_empty(a.shape[:-1])
    for x, y, into in zip(a.flatten(0, 1), b.flatten(0, 1), found.flatten(0, 1)):
        torch.sum(x * y, -1, out=into)
    return found


def _fused_backward(batch: Batch, rows: Lane, keys: Lane, scale: float) -> None:
    """The same of a batch by the fused op.

    It takes δ = do·o off each do·v; one more column, v 0, o 1, do −dlse, makes that δ − dlse.
    """
    do, q, o, lse, _, dq, *dlse = rows
    k, v, dk, dv = keys
    if dlse:
        do, v = torch.cat([do, -dlse[0][..., None]], -1), F.pad(v, (0, 1))
        o = F.pad(o, (0, 1), value=1.0)
    for some in batch.pieces(len(k) * max(k.shape[-1], v.shape[-1])):
        do_, q_, o_, lse_ = map(some.rows_of, (do, q, o, lse))
        k_, v_ = map(some.keys_of, (k, v))
        part = flash_cpu.backward(do_, q_, k_, v_, o_, lse_, scale, **_mask(some))
        some.rows_of(dq).add_(part[0])
        some.add_to_keys(dk, part[1])
        some.add_to_keys(dv, part[2][..., : dv.shape[-1]])


def _mask(batch: Batch) -> dict[str, Any]:
    return {"triangle": True} if batch.triangle else {"allowed": batch.allowed}


def _scaled(
    q: Tensor, scale: float, way: Program | tuple[Program, ...], lengths: Tensor | None
) -> tuple[Tensor, float, float]:
    """q and the scale to give the fused op, and what is left of the scale for dq.

    The op scales after the products forward and within them backward: unless the scale is a power of two, its
    scores differ in their last bit, and then exp(score − lse) is not the weight there was.
    """
    unfused = lengths is None and not any(one.fused for one in _each(way))
    same = unfused or abs(frexp(scale)[0]) == 0.5
    return (q, scale, 1.0) if same else (q * scale, 1.0, scale)


def _each(way: Program | tuple[Program, ...]) -> tuple[Program, ...]:
    return way if isinstance(way, tuple) else (way,)

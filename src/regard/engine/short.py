"""Short sequences on the CPU by products, some heads at a time: two forward, four backward, the weights kept between.

Up to some hundred positions this takes 0.7 to 1.05 of the time of PyTorch's fused op, whose blocks are then few.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from ..pattern import full
from . import twice
from .products import Room

LEARNED, SEEN = 1 << 21, 1 << 18  # scores up to which it is the quicker, with gradients and without
NEAR = 1 << 18  # scores at a time: 1 MiB in float32 stays in the caches


def attend(
    q: Float[Tensor, "b h n d_k"],
    k: Float[Tensor, "b h m d_k"],
    v: Float[Tensor, "b h m d_v"],
    mask: Float[Tensor, "n m"],
    scale: float,
) -> Float[Tensor, "b h n d_v"]:
    """softmax(scale · q kᵀ + mask) v; no row of the mask is all −∞."""
    return _Short.apply(q, k, v, mask, scale)


class _Short(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, mask, scale):
        q3, k3, v3 = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
        weights = q.new_empty(len(q3), *mask.shape)
        o = q.new_empty(*q.shape[:3], v.shape[-1])
        for q_, k_, v_, s, o_ in _some(q3, k3, v3, weights, o.flatten(0, 1)):
            torch.baddbmm(mask, q_, k_.mT, alpha=scale, out=s)
            torch.bmm(torch.softmax(s, -1, out=s), v_, out=o_)
        ctx.save_for_backward(q, k, v, mask, weights)
        ctx.scale = scale
        return o

    @staticmethod
    def backward(ctx, grad):
        q, k, v, mask, weights = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: these gradients will be differentiated again
            place = full(), 0, 1, ctx.scale, None
            return *twice.gradients(grad, None, q, k, v, *place, mask)[:3], None, None
        do, q3, k3, v3 = (x.reshape(-1, *x.shape[2:]) for x in (grad.contiguous(), q, k, v))
        grads = tuple(torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v))
        room = Room(q)
        for do_, q_, k_, v_, w, dq, dk, dv in _some(
            do, q3, k3, v3, weights, *(x.flatten(0, 1) for x in grads)
        ):
            ds = torch.bmm(do_, v_.mT, out=room("ds", *w.shape))
            torch.ops.aten._softmax_backward_data.out(ds, w, -1, ds.dtype, grad_input=ds)
            torch.baddbmm(dq, ds, k_, beta=0, alpha=ctx.scale, out=dq)
            torch.baddbmm(dk, ds.mT, q_, beta=0, alpha=ctx.scale, out=dk)
            torch.bmm(w.mT, do_, out=dv)
        return *grads, None, None


def _some(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same heads of each, so many that the largest holds about NEAR numbers."""
    some = max(NEAR // max(x[0].numel() for x in tensors), 2)
    if len(tensors[0]) <= some:
        return iter([tensors])
    return zip(*(x.split(some) for x in tensors))

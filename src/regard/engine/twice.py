"""Gradients that have gradients: what the fused ways give under create_graph=True.

Their backward is no differentiable operation, so it is taken through the formula instead, which is: exact, and as
dear as the formula in time and memory.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..pattern import Pattern
from . import plain
from .call import Call


def gradients(
    grad: Float[Tensor, "b h n d_v"] | None,
    grad_lse: Float[Tensor, "b h n"] | None,
    q: Float[Tensor, "b h n d_k"],
    k: Float[Tensor, "b h_kv m d_k"],
    v: Float[Tensor, "b h_kv m d_v"],
    pattern: Pattern,
    start: int,
    step: int,
    scale: float,
    lengths: Int[Tensor, " b"] | None,
    bias: Float[Tensor, "..."] | None = None,
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k and v, and of the bias where there is one, each with a graph of its own."""
    call = Call(q, k, v, pattern, None, lengths, bias, scale, "share", 0.0, (start, step), True)
    outputs = plain.attend(call.hide())
    pairs = [(y, dy) for y, dy in zip(outputs, (grad, grad_lse)) if dy is not None]
    inputs = [q, k, v] if bias is None else [q, k, v, bias]
    wanted = [x for x in inputs if x.requires_grad]
    found = iter(
        torch.autograd.grad(
            [y for y, _ in pairs], wanted, [dy.to(y.dtype) for y, dy in pairs], create_graph=True
        )
    )
    return tuple(next(found) if x.requires_grad else None for x in inputs)

"""Double backward of the fused executors: under create_graph=True their gradients come from the formula.

A fused backward is no differentiable operation. The formula is: exact, and as expensive in time and memory as the
reference backend.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..pattern import Pattern
from . import reference_backend
from .call import Call


class Weighting(NamedTuple):
    """What decides the weights beside q and k: softmax over the pairs of the pattern of scale · q·k + bias."""

    pattern: Pattern
    start: int  # query r is at position start + step · r
    step: int
    scale: float
    lengths: Int[Tensor, " b"] | None = None
    bias: Float[Tensor, "..."] | None = None


def gradients(
    grads: tuple[Float[Tensor, "b h n d_v"] | None, Float[Tensor, "b h n"] | None],
    inputs: tuple[Float[Tensor, "b h n d_k"], Float[Tensor, "b h_kv m d_k"], Float[Tensor, "b h_kv m d_v"]],
    by: Weighting,
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k and v, and of the bias where there is one, each with a graph of its own.

    grads: those of o and of the log-sum-exp. inputs: q, k, v.
    """
    q, k, v = inputs
    call = Call(
        q, k, v, by.pattern, None, by.lengths, by.bias, by.scale, "share", 0.0, (by.start, by.step), True
    )
    outputs = reference_backend.attend(call.hide())
    known = [(y, dy) for y, dy in zip(outputs, grads) if dy is not None]
    all_inputs = [*inputs] if by.bias is None else [*inputs, by.bias]
    wanted = [x for x in all_inputs if x.requires_grad]
    results = iter(
        torch.autograd.grad(
            [y for y, _ in known], wanted, [dy.to(y.dtype) for y, dy in known], create_graph=True
        )
    )
    return tuple(next(results) if x.requires_grad else None for x in all_inputs)

"""Attention over the progressions of a pattern, as one opaque operation.

A compiled graph holds the tensors and the pattern's text; the plan is looked up when the operation runs, so any
number of lengths share a graph. On the CPU it runs progressions.py, on CUDA the Triton kernels.
"""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ..pattern import Pattern
from . import progressions
from .batches import Program, of_plans, program, working
from .plan import NoPlan, Pass, Plan

TILE = 512  # queries at a time where every pair is visited


@lru_cache(maxsize=512)
def read(text: str) -> Pattern:
    return Pattern.from_json(text)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    start: int,
    step: int,
    scale: float,
    lengths: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """o and lse over the pairs of a pattern without data; both differentiable."""
    return walk(q, k, v, lengths, pattern.text, start, step, float(scale))


@torch.library.custom_op("regard::walk", mutates_args=())
def walk(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, pattern: str, start: int, step: int, scale: float
) -> tuple[Tensor, Tensor]:
    if q.is_cuda:
        from . import kernels

        o, lse = kernels.forward(q, k, v, kernels.task(q, v, read(pattern), start, step, scale), lengths)
    else:
        dtype = working(q.dtype)
        way = _program(q, k, pattern, start, step)
        o, lse = progressions.forward(q.to(dtype), k.to(dtype), v.to(dtype), way, scale, lengths)
    return _own(o.to(q.dtype)), _own(lse.to(_lse_dtype(q)))


@walk.register_fake
def _(q, k, v, lengths, pattern, start, step, scale):
    return q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(q.shape[:3], dtype=_lse_dtype(q))


@torch.library.custom_op("regard::walk_backward", mutates_args=())
def walk_backward(
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    lengths: Tensor | None,
    pattern: str,
    start: int,
    step: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    if q.is_cuda:
        from . import kernels

        task = kernels.task(q, v, read(pattern), start, step, scale)
        grads = kernels.backward(q, k, v, o, lse, grad.contiguous(), grad_lse, task, lengths)
    else:
        way, dtype = _program(q, k, pattern, start, step), working(q.dtype)
        grad_lse = None if grad_lse is None else grad_lse.to(dtype)
        q_, k_, v_, o, lse = (x.to(dtype) for x in (q, k, v, o, lse))
        grads = progressions.backward(grad.to(dtype), grad_lse, q_, k_, v_, o, lse, way, scale, lengths)
    return tuple(_own(g.to(x.dtype)) for g, x in zip(grads, (q, k, v)))  # type: ignore[return-value]


@walk_backward.register_fake
def _(grad, grad_lse, q, k, v, o, lse, lengths, pattern, start, step, scale):
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))


def _setup(ctx, inputs, output):
    q, k, v, lengths, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, *output, lengths)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, grad_lse):
    q, k, v, o, lse, lengths = ctx.saved_tensors
    if grad is None and grad_lse is None:
        return (None,) * 8
    grad = torch.zeros_like(o) if grad is None else grad
    grads = walk_backward(grad, grad_lse, q, k, v, o, lse, lengths, *ctx.rest)
    return *grads, None, None, None, None, None


walk.register_autograd(_backward, setup_context=_setup)


def _program(q: Tensor, k: Tensor, pattern: str, start: int, step: int) -> Program:
    n, m = q.shape[2], k.shape[2]
    try:
        return program(read(pattern), n, m, start, step)
    except NoPlan:  # met by compiled graphs alone, which choose before they know the sizes
        return _every_pair(read(pattern), n, m, start, step)


@lru_cache(maxsize=64)
def _every_pair(pattern: Pattern, n: int, m: int, start: int, step: int) -> Program:
    """All keys for all queries, masked: what is left where no progressions describe a pattern."""
    first = np.arange(0, n, TILE, dtype=np.int64)
    tiles = np.stack([first, np.ones_like(first), np.minimum(TILE, n - first)], 1)
    parts = np.tile(np.array([[0, 1, m, 0]], dtype=np.int64), (len(first), 1))
    whole = Pass(pattern, tiles, np.arange(len(first) + 1, dtype=np.int64), parts)
    return of_plans(Plan(pattern, n, m, start, step, (whole,) if n and m else ()))


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


def _own(x: Tensor) -> Tensor:
    """x in memory of its own, one element behind the other, as the fake result promises."""
    return x.contiguous()

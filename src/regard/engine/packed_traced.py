"""Packed documents inside a compiled graph: one opaque operation, which reads the ids when it runs.

A graph knows no ids, so whether each document's follow one another is found out at every call; a layout met before is
remembered by its ids.
"""

from collections.abc import Sequence
from functools import lru_cache, reduce
from operator import and_

import numpy as np
import torch
from torch import Tensor

from ..errors import BackendError
from ..pattern import At, Pattern, full, query_offset
from .cpu import packed, progressions
from .cpu.batch import Program, working
from .walk import read


def attend(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, at: At, scale: float, lengths: Tensor | None
) -> tuple[Tensor, Tensor]:
    """o and lse over `documents(ids) & rest`, in a trace; both differentiable."""
    ids, rest = packed.written(pattern)
    start, _ = query_offset(pattern, q.shape[2], k.shape[2], at)
    return run(q, k, v, ids, lengths, rest, start, float(scale))


@torch.library.custom_op("regard::packed", mutates_args=())
def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ids: Tensor,
    lengths: Tensor | None,
    rest: str,
    start: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    ways, dtype = _ways(ids, rest, q.shape[2], start), working(q.dtype)
    o, lse = progressions.forward(q.to(dtype), k.to(dtype), v.to(dtype), ways, scale, lengths)
    return o.to(q.dtype).contiguous(), lse.to(_wide(q)).contiguous()


@run.register_fake
def _(q, k, v, ids, lengths, rest, start, scale):
    return q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(q.shape[:3], dtype=_wide(q))


@torch.library.custom_op("regard::packed_backward", mutates_args=())
def run_backward(
    grad: Tensor,
    grad_lse: Tensor | None,
    saved: Sequence[Tensor],
    ids: Tensor,
    lengths: Tensor | None,
    rest: str,
    start: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """saved: q, k, v, o, lse."""
    kind, dtype = saved[0].dtype, working(saved[0].dtype)
    ways = _ways(ids, rest, saved[0].shape[2], start)
    q, k, v, o, lse = (x.to(dtype) for x in saved)
    grad_lse = None if grad_lse is None else grad_lse.to(dtype)
    given = grad.to(dtype), grad_lse, q, k, v, o, lse, ways, scale, lengths
    dq, dk, dv = progressions.backward(*given)
    return dq.to(kind).contiguous(), dk.to(kind).contiguous(), dv.to(kind).contiguous()


@run_backward.register_fake
def _(grad, grad_lse, saved, ids, lengths, rest, start, scale):
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in saved[:3])


def _setup(ctx, inputs, output):
    q, k, v, ids, lengths, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, *output, ids, lengths)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, grad_lse):
    if grad is None and grad_lse is None:
        return (None,) * 8
    *saved, ids, lengths = ctx.saved_tensors
    grad = torch.zeros_like(saved[3]) if grad is None else grad
    return *run_backward(grad, grad_lse, saved, ids, lengths, *ctx.rest), *(None,) * 5


run.register_autograd(_backward, setup_context=_setup)


def _ways(ids: Tensor, rest: str, n: int, start: int) -> tuple[Program, ...]:
    held = np.ascontiguousarray(ids.numpy())
    found = _remembered(held.tobytes(), held.dtype.str, held.shape, rest, n, start)
    if found is None:
        raise BackendError(
            "backend='packed' cannot run this: a document's ids do not follow one another; use backend='masked'"
        )
    return found


@lru_cache(maxsize=32)
def _remembered(
    held: bytes, kind: str, shape: tuple[int, ...], rest: str, n: int, start: int
) -> tuple[Program, ...] | None:
    ids = torch.from_numpy(np.frombuffer(held, dtype=kind).reshape(shape).copy())
    words = reduce(and_, map(read, rest.split("\n"))) if rest else full()
    return packed.layouts(ids, words, n, shape[-1], start)


def _wide(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)

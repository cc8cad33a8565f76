"""Attention over the progressions of a pattern: on the CPU by progressions.py, or by_distance.py where there is a
bias or dropout; on CUDA by the Triton kernels.

Run at once, it is a plain autograd function. Traced, it is one opaque operation: a compiled graph holds the tensors
and the pattern's text, and the plan is looked up when the operation runs, so any number of lengths share a graph.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ..errors import BackendError
from ..pattern import Pattern
from ..position import ByDistance
from .cpu import by_distance, progressions
from .cpu.batches import Program, of_plans, program, working
from .plan.planner import NoPlan, Pass, Plan

TILE = 512  # queries at a time where every pair is visited
SEEDS = 1 << 33, 1 << 62  # of dropout: all take 64 bits, so one compiled kernel serves any


@dataclass(frozen=True)
class Asked:
    """What is asked for, beside the tensors."""

    pattern: Pattern
    start: int
    step: int
    scale: float
    dropout_p: float = 0.0


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    start: int,
    step: int,
    scale: float,
    lengths: Tensor | None,
    bias: ByDistance | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """o and lse over the pairs of a pattern without data; both differentiable."""
    table, slopes = (None, None) if bias is None else (bias.table, bias.slopes)
    seed = None if not dropout_p else draw(_drawn) if torch.compiler.is_compiling() else _seed()
    if _traced(q, k, v):
        how = pattern.text, start, step, float(scale), dropout_p
        return walk(q, k, v, table, slopes, lengths, seed, *how)
    asked = Asked(pattern, start, step, float(scale), dropout_p)
    return _Walk.apply(q, k, v, table, slopes, lengths, seed, asked)


def _traced(*tensors: Tensor) -> bool:
    """Whether what looks on must see one operation: a compiler, a transform, a mode, another tensor type."""
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
        or any(type(x) is not Tensor and type(x) is not torch.nn.Parameter for x in tensors)
    )


class _Walk(torch.autograd.Function):
    """(q, k, v, table, slopes) → (o, lse)."""

    @staticmethod
    def forward(ctx, q, k, v, table, slopes, lengths, seed, asked):
        o, lse = forward(q, k, v, table, slopes, lengths, seed, asked)
        ctx.save_for_backward(q, k, v, table, slopes, o, lse, lengths, seed)
        ctx.asked = asked
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx, grad, grad_lse):
        if grad is None and grad_lse is None:
            return (None,) * 8
        if torch.is_grad_enabled():  # create_graph: these gradients will be differentiated again
            return *_twice(ctx, grad, grad_lse), None, None, None
        of_bias = ctx.needs_input_grad[3] or ctx.needs_input_grad[4]
        return *backward(grad, grad_lse, ctx.saved_tensors, ctx.asked, of_bias), None, None, None


def _twice(ctx, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients by operations that have gradients themselves."""
    from . import twice

    q, k, v, table, slopes, o, _, lengths, _ = ctx.saved_tensors
    a = ctx.asked
    if table is not None or slopes is not None or a.dropout_p:
        raise BackendError(
            "create_graph=True through bias by distance or dropout: the kernels' gradients have none of their own; "
            "use backend='masked'"
        )
    grad = torch.zeros_like(o) if grad is None else grad
    return *twice.gradients(grad, grad_lse, q, k, v, a.pattern, a.start, a.step, a.scale, lengths), None, None


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    slopes: Tensor | None,
    lengths: Tensor | None,
    seed: Tensor | None,
    asked: Asked,
) -> tuple[Tensor, Tensor]:
    """o in q's dtype, lse at least in float32."""
    if q.is_cuda:
        from . import cuda as kernels

        added = kernels.Added(table, slopes, SEEDS[0] if seed is None else int(seed))
        o, lse = kernels.forward(q, k, v, _task(q, v, added, asked), lengths, added)
    elif table is not None or slopes is not None or asked.dropout_p:
        o, lse = by_distance.run(q, k, v, _bias(table, slopes), _job(q, k, lengths, seed, asked))
    else:
        dtype = working(q.dtype)
        way = _program(q, k, asked)
        o, lse = progressions.forward(q.to(dtype), k.to(dtype), v.to(dtype), way, asked.scale, lengths)
    return _own(o.to(q.dtype)), _own(lse.to(_lse_dtype(q)))


def backward(
    grad: Tensor | None, grad_lse: Tensor | None, saved: Sequence[Tensor | None], asked: Asked, of_bias: bool
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v, table and slopes; of the last two only if `of_bias`.

    saved: q, k, v, table, slopes, o, lse, lengths, seed.
    """
    q, k, v, table, slopes, o, lse, lengths, seed = saved
    assert q is not None and k is not None and v is not None and o is not None and lse is not None
    grad = torch.zeros_like(o) if grad is None else grad
    grads: tuple[Tensor | None, ...]
    if q.is_cuda:
        from . import cuda as kernels

        added = kernels.Added(table, slopes, SEEDS[0] if seed is None else int(seed))
        task = _task(q, v, added, asked)
        grads = kernels.backward(q, k, v, o, lse, grad, grad_lse, task, lengths, added, of_bias)
    elif table is not None or slopes is not None or asked.dropout_p:
        job, bias = _job(q, k, lengths, seed, asked), _bias(table, slopes)
        grads = by_distance.run_backward(grad, grad_lse, (q, k, v, o, lse), bias, job, of_bias)
    else:
        way, dtype = _program(q, k, asked), working(q.dtype)
        grad_lse = None if grad_lse is None else grad_lse.to(dtype)
        q_, k_, v_, o, lse = (x.to(dtype) for x in (q, k, v, o, lse))
        given = grad.to(dtype), grad_lse, q_, k_, v_, o, lse, way, asked.scale, lengths
        grads = (*progressions.backward(*given), None, None)
    of = (q, k, v, table, slopes)
    return tuple(None if x is None or g is None else _own(g.to(x.dtype)) for g, x in zip(grads, of))


def _task(q: Tensor, v: Tensor, added, asked: Asked):
    from . import cuda as kernels

    return kernels.task(q, v, asked.pattern, asked.start, asked.step, asked.scale, added, asked.dropout_p)


def _bias(table: Tensor | None, slopes: Tensor | None) -> ByDistance | None:
    return None if table is None and slopes is None else ByDistance(table, slopes)


def _job(q: Tensor, k: Tensor, lengths: Tensor | None, seed: Tensor | None, asked: Asked) -> by_distance.Job:
    """The same call in tiles on the CPU."""
    drawn = 0 if seed is None else int(seed)
    return by_distance.Job(_program(q, k, asked), asked.scale, lengths, asked.dropout_p, drawn)


# The opaque operation


@lru_cache(maxsize=512)
def read(text: str) -> Pattern:
    return Pattern.from_json(text)


def _seed() -> Tensor:
    return torch.randint(*SEEDS, (), device="cpu")  # reading it waits for no GPU


_drawn = torch.zeros((), dtype=torch.int64, device="cpu")


@torch.library.custom_op("regard::draw", mutates_args=("drawn",))
def draw(drawn: Tensor) -> Tensor:
    """A seed from PyTorch's generator. As an operation of its own it needs no C++ compiler in a compiled graph; that
    it counts keeps two draws from being taken for one."""
    drawn += 1
    return _seed()


@draw.register_fake
def _(drawn):
    return torch.empty_like(drawn)


@torch.library.custom_op("regard::walk", mutates_args=())
def walk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    slopes: Tensor | None,
    lengths: Tensor | None,
    seed: Tensor | None,
    pattern: str,
    start: int,
    step: int,
    scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    asked = Asked(read(pattern), start, step, scale, dropout_p)
    return forward(q, k, v, table, slopes, lengths, seed, asked)


@walk.register_fake
def _(q, k, v, table, slopes, lengths, seed, pattern, start, step, scale, dropout_p):
    return q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(q.shape[:3], dtype=_lse_dtype(q))


@torch.library.custom_op("regard::walk_backward", mutates_args=())
def walk_backward(
    grad: Tensor,
    grad_lse: Tensor | None,
    saved: Sequence[Tensor | None],
    pattern: str,
    start: int,
    step: int,
    scale: float,
    dropout_p: float,
    of_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What has no gradient gets an empty tensor: an operation cannot return None."""
    asked = Asked(read(pattern), start, step, scale, dropout_p)
    grads = backward(grad, grad_lse, saved, asked, of_bias)
    return tuple(grad.new_empty(0) if g is None else g for g in grads)  # type: ignore[return-value]


@walk_backward.register_fake
def _(grad, grad_lse, saved, pattern, start, step, scale, dropout_p, of_bias):
    q, k, v, *bias = saved[:5]
    likes = (q, k, v, *(x if of_bias and x is not None else grad.new_empty(0) for x in bias))
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in likes)


def _setup(ctx, inputs, output):
    *of_pairs, lengths, seed = inputs[:7]
    ctx.rest = inputs[7:]
    ctx.save_for_backward(*of_pairs, *output, lengths, seed)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, grad_lse):
    if grad is None and grad_lse is None:
        return (None,) * 12
    grad = torch.zeros_like(ctx.saved_tensors[5]) if grad is None else grad
    of_bias = ctx.needs_input_grad[3] or ctx.needs_input_grad[4]
    grads = walk_backward(grad, grad_lse, ctx.saved_tensors, *ctx.rest, of_bias)
    return *(g if needed else None for g, needed in zip(grads, ctx.needs_input_grad)), *(None,) * 7


walk.register_autograd(_backward, setup_context=_setup)


def _program(q: Tensor, k: Tensor, asked: Asked) -> Program:
    n, m = q.shape[2], k.shape[2]
    try:
        return program(asked.pattern, n, m, asked.start, asked.step)
    except NoPlan:  # met by compiled graphs alone, which choose before they know the sizes
        return _every_pair(asked.pattern, n, m, asked.start, asked.step)


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

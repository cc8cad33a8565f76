"""Sparse attention as one opaque operation, for what must see PyTorch's operations: a compiler, a transform, a mode.

A compiled graph holds the tensors and the pattern's text; the plan is looked up when the operation runs, so any
number of lengths share a graph. The ids of packed documents are read then too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .. import compat
from ..errors import BackendError
from ..pattern import Pattern, query_offset, tree
from ..position import ByDistance
from .call import NO_SEED, SEEDS, Call, Extras, Options
from .cpu import documents, tiles
from .cpu.strided_layout import layout


def sparse_attention(call: Call) -> tuple[Tensor, Tensor]:
    """o and lse over the pairs of a pattern, or of `documents(ids)` and words of i − j; both differentiable."""
    bias = call.bias if isinstance(call.bias, ByDistance) else None
    table, slopes = (None, None) if bias is None else (bias.table, bias.slopes)
    seed = None
    if call.dropout_p:
        seed = sample_in_graph(_samples) if torch.compiler.is_compiling() else sample_seed()
    ids, pattern = None, call.pattern
    if pattern.has_data:
        split = documents.parts(pattern)
        assert split is not None and not isinstance(split[0], tree)  # which is refused under a compiler
        ids, pattern = split[0].ids, split[1]
    extras = [_present(x, call.q) for x in (table, slopes, call.lengths, seed, ids)]
    assert pattern.text is not None and not isinstance(call.at, Tensor)
    offset = [*query_offset(call.pattern, call.n, call.m, call.at)]
    options = pattern.text, offset, [call.factor, call.dropout_p, call.softcap or 0.0]
    if not torch.compiler.is_compiling() and compat.transforms_active():
        return _Transformed.apply(Constants(*options), call.q, call.k, call.v, *extras)
    return sparse(call.q, call.k, call.v, extras, *options)


def _present(x: Tensor | None, like: Tensor) -> Tensor:
    """A list of tensors has no None: an empty one means that there is none."""
    return like.new_empty(0) if x is None else x


def sample_seed() -> Tensor:
    return torch.randint(*SEEDS, (), device="cpu")  # reading it waits for no GPU


_samples = torch.zeros((), dtype=torch.int64, device="cpu")


@torch.library.custom_op("regard::sample_seed", mutates_args=("samples",))
def sample_in_graph(samples: Tensor) -> Tensor:
    """A seed from PyTorch's generator. As an operation of its own it needs no C++ compiler in a compiled graph; it
    changes its argument, so that a compiler does not merge two samples into one."""
    samples += 1
    return sample_seed()


@sample_in_graph.register_fake
def _(samples):
    return torch.empty_like(samples)


@torch.library.custom_op("regard::sparse_attention", mutates_args=())
def sparse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extras: Sequence[Tensor],
    pattern: str,
    offset: Sequence[int],
    factors: Sequence[float],
) -> tuple[Tensor, Tensor]:
    """extras: table, slopes, lengths, seed and ids, as Extras has them; pattern: its text; offset: start, step;
    factors: scale, dropout_p, softcap or 0."""
    given, options = extras_of(extras), options_of(pattern, offset, factors)
    if q.is_cuda:
        from .cuda import backend as triton

        o, lse = triton.forward((q, k, v), given, options)
        return o.contiguous(), lse
    o, lse = tiles.attend(q, k, v, _tiles(q, k, given, options), given.bias)
    return o.contiguous(), lse.contiguous()


@sparse.register_fake
def _(q, k, v, *options):
    lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty(*q.shape[:3], v.shape[-1]), lse


@torch.library.custom_op("regard::sparse_attention_backward", mutates_args=())
def sparse_backward(
    grads: Sequence[Tensor],
    saved: Sequence[Tensor],
    pattern: str,
    offset: Sequence[int],
    factors: Sequence[float],
    of_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v, table and slopes. grads: of o and lse; saved: q, k, v, o, lse, then the extras.

    What has no gradient gets an empty tensor: an operation cannot return None.
    """
    given, options = extras_of(saved[5:]), options_of(pattern, offset, factors)
    q, k, v, o, lse = saved[:5]
    grad, grad_lse = grads[0], grads[1] if grads[1].numel() else None
    results: tuple[Tensor | None, ...]
    if q.is_cuda:
        from .cuda import backend as triton

        results = triton.backward((grad, grad_lse), saved[:5], given, options, of_bias)
    else:
        of = tiles.Saved(q, k, v, o=o, lse=lse, grad_lse=grad_lse)
        results = tiles.attend_backward(grad, of, _tiles(q, k, given, options), given.bias, of_bias)
    likes = q, k, v, given.table, given.slopes
    return tuple(  # type: ignore[return-value]
        grad.new_empty(0) if g is None or x is None else g.to(x.dtype).contiguous()
        for g, x in zip(results, likes)
    )


@sparse_backward.register_fake
def _(grads, saved, pattern, offset, factors, of_bias):
    likes = (*saved[:3], *(x if of_bias else x.new_empty(0) for x in saved[5:7]))
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in likes)


def _setup(ctx, inputs, output):
    q, k, v, extras, *ctx.options = inputs
    ctx.of_bias = any(x.requires_grad for x in extras[:2])
    ctx.save_for_backward(q, k, v, *output, *extras)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, grad_lse):
    saved = ctx.saved_tensors
    none: list[Tensor | None] = [None] * 5
    if grad is None and grad_lse is None:
        return None, None, None, none, None, None, None
    grad = torch.zeros_like(saved[3]) if grad is None else grad
    grads = [grad, _present(grad_lse, grad)]
    dq, dk, dv, of_table, of_slopes = sparse_backward(grads, saved, *ctx.options, ctx.of_bias)
    if ctx.of_bias:
        none[:2] = (g if x.requires_grad else None for g, x in zip((of_table, of_slopes), saved[5:7]))
    needed = ctx.needs_input_grad
    of_qkv = (g if needs else None for g, needs in zip((dq, dk, dv), needed))
    return *of_qkv, none, None, None, None


sparse.register_autograd(_backward, setup_context=_setup)


def extras_of(tensors: Sequence[Tensor]) -> Extras:
    table, slopes, lengths, seed, ids = (x if x.numel() else None for x in tensors)
    return Extras(table, slopes, lengths, NO_SEED if seed is None else int(seed), ids=ids)


def options_of(pattern: str, offset: Sequence[int], factors: Sequence[float]) -> Options:
    (start, step), (scale, dropout_p, softcap) = offset, factors
    return Options(_pattern(pattern), start, step, scale, dropout_p, softcap or None)


@lru_cache(maxsize=512)
def _pattern(text: str) -> Pattern:
    return Pattern.from_json(text)


def _tiles(q: Tensor, k: Tensor, extras: Extras, options: Options) -> tiles.TileAttention:
    pattern, n, m, start = options.pattern, q.shape[2], k.shape[2], options.start
    layouts = None if extras.ids is None else documents.layouts_of_ids(extras.ids, pattern, n, start)
    if extras.ids is None:
        layouts = (layout(pattern, n, m, start, options.step),)
    if layouts is None:
        raise BackendError(
            "backend='tiles' cannot run this: the ids of a document do not follow one another; use backend='sdpa'"
        )
    terms = extras.lengths, options.dropout_p, extras.seed, True, options.softcap
    return tiles.TileAttention(layouts, options.scale, None, *terms)


# torch.func (grad, vjp, vmap) has no rules for custom operators: there each of the two is an autograd function with
# `setup_context`, which torch.func requires, and a loop as its rule for vmap.


@dataclass(frozen=True, eq=False)
class Constants:
    """The arguments of `sparse` that are not tensors, as one value that torch.func does not look into."""

    pattern: str
    offset: list[int]
    factors: list[float]


def _looped(
    function: Any, info: Any, in_dims: tuple, arguments: tuple
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """One call for each entry of the mapped axis."""
    results = []
    for entry in range(info.batch_size):
        given = (x if d is None else x.select(d, entry) for x, d in zip(arguments, in_dims))
        results.append(function.apply(*given))
    return tuple(map(torch.stack, zip(*results))), (0,) * len(results[0])


class _Transformed(torch.autograd.Function):
    @staticmethod
    def forward(options, q, k, v, *extras):
        return sparse(q, k, v, extras, *vars(options).values())

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.options = inputs[0]
        ctx.save_for_backward(*inputs[1:4], *output, *inputs[4:])

    @staticmethod
    def backward(ctx, grad, grad_lse):
        grads = _TransformedBackward.apply(ctx.options, grad, grad_lse, *ctx.saved_tensors)
        never = len(ctx.saved_tensors) - 7  # lengths, seed, ids
        return None, *(g if g.numel() else None for g in grads), *(None,) * never

    @staticmethod
    def vmap(info, in_dims, *arguments):
        return _looped(_Transformed, info, in_dims, arguments)


class _TransformedBackward(torch.autograd.Function):
    @staticmethod
    def forward(options, grad, grad_lse, *saved):
        of_bias = bool(saved[5].numel() or saved[6].numel())
        return sparse_backward([grad, grad_lse], saved, *vars(options).values(), of_bias)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grads):
        raise BackendError(
            "double backward of sparse attention is not supported under torch.func; use backend='reference'"
        )

    @staticmethod
    def vmap(info, in_dims, *arguments):
        return _looped(_TransformedBackward, info, in_dims, arguments)

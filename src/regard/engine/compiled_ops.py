"""Sparse attention as one opaque operation, for what must see PyTorch's operations: a compiler, a transform, a mode.

A compiled graph holds the tensors and the pattern's text; the plan is looked up when the operation runs, so any
number of lengths share a graph. The ids of packed documents are read then too.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .. import compat
from ..errors import DUAL_NUMBERS, BackendError
from ..pattern import Pattern, query_offset, tree
from ..position import ByDistance
from .call import NO_SEED, SEEDS, Call, Extras, Options, computed_in
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
        split = documents.split(pattern)
        assert split is not None and not isinstance(split[0], tree)  # which is refused under a compiler
        ids, pattern = split[0].ids, split[1]
    extras = [_present(x, call.q) for x in (table, slopes, call.lengths, seed, ids)]
    assert pattern.text is not None and not isinstance(call.at, Tensor)
    offset = [*query_offset(call.pattern, call.n, call.m, call.at)]
    options = pattern.text, offset, [call.factor, call.dropout_p, call.softcap or 0.0]
    if not torch.compiler.is_compiling() and compat.transforms_active():
        return _sparse_transformed((call.q, call.k, call.v, *extras), options)
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
    if compat.higher_derivatives():  # a graph is guarded by the transforms of torch.func, not by dual numbers
        raise BackendError(DUAL_NUMBERS)
    inputs, options = extras_of(extras), options_of(pattern, offset, factors)
    if q.is_cuda:
        from .cuda import backend as triton

        o, lse = triton.forward((q, k, v), inputs, options)
        return o.contiguous(), lse
    o, lse = tiles.attend(q, k, v, _tiles(q, k, inputs, options), inputs.bias)
    return o.contiguous(), lse.contiguous()


@sparse.register_fake
def _(q, k, v, *options):
    lse = q.new_empty(q.shape[:3], dtype=computed_in(q.dtype))
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
    inputs, options = extras_of(saved[5:]), options_of(pattern, offset, factors)
    q, k, v = saved[:3]
    grad, grad_lse = grads[0], grads[1] if grads[1].numel() else None
    results: tuple[Tensor | None, ...]
    if q.is_cuda:
        from .cuda import backend as triton

        results = triton.backward((grad, grad_lse), saved[:5], inputs, options, of_bias)
    else:
        call = _tiles(q, k, inputs, options)
        results = tiles.attend_backward((grad, grad_lse), saved[:5], call, inputs.bias, of_bias)
    differentiated = q, k, v, inputs.table, inputs.slopes
    return tuple(  # type: ignore[return-value]
        grad.new_empty(0) if g is None or x is None else g.to(x.dtype).contiguous()
        for g, x in zip(results, differentiated)
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
    """What needs no gradient gets one too, which autograd drops."""
    if grad is None and grad_lse is None:
        return None, None, None, [None] * 5, None, None, None
    saved = ctx.saved_tensors
    grad = torch.zeros_like(saved[3]) if grad is None else grad
    grads = [grad, _present(grad_lse, grad)]
    dq, dk, dv, *of_bias = sparse_backward(grads, saved, *ctx.options, ctx.of_bias)
    return dq, dk, dv, [*of_bias, None, None, None], None, None, None


sparse.register_autograd(_backward, setup_context=_setup)


def extras_of(tensors: Sequence[Tensor]) -> Extras:
    table, slopes, lengths, seed, ids = (x if x.numel() else None for x in tensors)
    return Extras(table, slopes, lengths, NO_SEED if seed is None else int(seed), ids=ids)


def options_of(pattern: str, offset: Sequence[int], factors: Sequence[float]) -> Options:
    (start, step), (scale, dropout_p, softcap) = offset, factors
    return Options(_pattern(pattern), start, step, scale, dropout_p, softcap or None)


_pattern = lru_cache(maxsize=512)(Pattern.from_json)


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


# torch.func (grad, vjp, vmap) has no rules for custom operators: there they run in an autograd function with
# `setup_context`, which torch.func requires, and with a loop as its rule for vmap.


def _sparse_transformed(tensors: Sequence[Tensor], options: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """`sparse` under torch.func. tensors: q, k, v, then the extras; options: its other arguments."""

    def forward(q, k, v, *extras):
        return sparse(q, k, v, extras, *options)

    def backward(grad, grad_lse, q, k, v, *saved):
        *extras, o, lse = saved
        of_bias = any(x.numel() for x in extras[:2])
        return sparse_backward([grad, grad_lse], [q, k, v, o, lse, *extras], *options, of_bias)

    def gradients(*tensors):
        grads = _Transformed.apply(backward, None, *tensors)
        return *(g if g.numel() else None for g in grads), None, None, None  # lengths, seed and ids have none

    return _Transformed.apply(forward, gradients, *tensors)


class _Transformed(torch.autograd.Function):
    """run(*tensors), whose gradients are gradients(*grads, *tensors, *results); None: it has none."""

    @staticmethod
    def forward(run, gradients, *tensors):
        return run(*tensors)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.gradients, *tensors = inputs
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx, *grads):
        if ctx.gradients is None:
            raise BackendError(
                "double backward of sparse attention is not supported under torch.func; use backend='reference'"
            )
        return None, None, *ctx.gradients(*grads, *ctx.saved_tensors)

    @staticmethod
    def vmap(info, in_dims, *arguments):
        """One call for each entry of the mapped axis."""
        results = []
        for entry in range(info.batch_size):
            of_entry = (x if d is None else x.select(d, entry) for x, d in zip(arguments, in_dims))
            results.append(_Transformed.apply(*of_entry))
        return tuple(map(torch.stack, zip(*results))), (0,) * len(results[0])

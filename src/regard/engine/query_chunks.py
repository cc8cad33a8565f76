"""Calls that hold a number for each pair, a chunk of queries at a time: forward, backward and, by the formula, double
backward. They need the memory of one chunk; a backward pass computes its chunk again.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import compat
from ..pattern import full, query_offset
from ..position import ByDistance
from .call import Call, Outputs, computed_in, needs_grad, replaced, without_autocast

PAIRS = 1 << 26  # of a mask
SCORES = 1 << 26  # of all heads, where each has scores of its own
MIN_QUERIES = 16  # fewer would leave a GPU idle

Run = Callable[[Call], tuple[Tensor, Tensor | None]]
Tensors = tuple[Tensor | None, ...]


class Job(NamedTuple):
    """How a call is computed, without its tensors, which autograd saves."""

    run: Run
    formula: Run  # differentiable any number of times
    settings: dict[str, Any]  # the fields of the call that are no tensors
    by_distance: bool  # the call has a bias by distance
    queries: int  # of a chunk

    def call(self, tensors: Tensors) -> Call:
        return Call(**{**self.settings, **_fields(tensors, self.by_distance)})

    def chunks(self, n: int) -> Iterator[slice]:
        return (slice(at, at + self.queries) for at in range(0, n, self.queries))


def _job(run: Run, formula: Run, call: Call, queries: int) -> Job:
    by_distance = isinstance(call.bias, ByDistance)
    tensors = _fields(_tensors(call), by_distance)
    settings = {name: getattr(call, name) for name in Call.__dataclass_fields__ if name not in tensors}
    return Job(run, formula, settings, by_distance, queries)


def by_queries(call: Call, run: Run, formula: Run, holds_scores: bool) -> Outputs:
    """run(call), in chunks if one call would hold a large table. holds_scores: one of scores for each head."""
    if not _repeatable(call) or (queries := queries_at_a_time(call, holds_scores)) >= call.n:
        return run(call)
    return _ByQueries.apply(_job(run, formula, call, queries), *_tensors(call))


def gradients_by_queries(grads: Tensors, call: Call, formula: Run) -> Tensors | None:
    """The gradients of q, k, v, table and slopes of a bias by distance, and sink, in chunks; they are differentiable.
    None: the call is short enough without chunks, or cannot be computed twice."""
    if not _repeatable(call) or (queries := queries_at_a_time(call, True)) >= call.n:
        return None
    return _Gradients.apply(_job(formula, formula, call, queries), *grads, *_tensors(call))


def queries_at_a_time(call: Call, holds_scores: bool) -> int:
    """As many as one chunk has; n or more: the call is not cut."""
    (b, h, n, _), m, by_distance = call.q.shape, call.m, isinstance(call.bias, ByDistance)
    added = [x for x in (call.table, call.bias) if isinstance(x, Tensor)]
    by_row = call.lengths is not None or isinstance(call.at, Tensor)
    shapes = (
        (b if by_row else 1, h if by_distance else 1),
        call.pattern.data_shape,
        *(x.shape[:-2] for x in added),
    )
    made = by_distance or not (isinstance(call.pattern, full) or any(x.shape[-2:] == (n, m) for x in added))
    queries = PAIRS // max(m * prod(torch.broadcast_shapes(*shapes)), 1) if made else n
    of_scores = SCORES // max(b * h * m, 1) if holds_scores else n
    return max(min(queries, of_scores), MIN_QUERIES)


def _repeatable(call: Call) -> bool:
    """Whether a second computation gives the same: nothing is drawn at random, no data could change meanwhile, and no
    transform, compiler or forward-mode derivative sees the operations."""
    observed = compat.sizes_are_symbols() or compat.transforms_active() or compat.higher_derivatives()
    learned = isinstance(call.bias, Tensor) and needs_grad(call.bias)  # its gradient has n × m numbers
    data_may_change = call.pattern.has_data and needs_grad(call.q, call.k, call.v, call.sink_logits)
    return not (call.dropout_p or observed or learned or data_may_change)


LEARNED = 6  # of the tensors of a call, those that have gradients


def _tensors(call: Call) -> Tensors:
    bias = call.bias
    of_distance = (bias.table, bias.slopes) if isinstance(bias, ByDistance) else (None, None)
    added, at = (x if isinstance(x, Tensor) else None for x in (bias, call.at))
    return call.q, call.k, call.v, *of_distance, call.sink_logits, added, call.table, call.lengths, at


def _fields(tensors: Tensors, by_distance: bool) -> dict[str, Any]:
    """The inverse of `_tensors`: fields of a call."""
    q, k, v, table, slopes, sink, added, allowed, lengths, at = tensors
    bias = ByDistance(table, slopes) if by_distance else added
    fields = {"q": q, "k": k, "v": v, "bias": bias, "sink_logits": sink, "table": allowed, "lengths": lengths}
    return fields if at is None else {**fields, "at": at}


def _with_tensors(call: Call, tensors: Tensors) -> Call:
    return replaced(call, **_fields(tensors, isinstance(call.bias, ByDistance)))


def _chunk(call: Call, rows: slice) -> Call:
    """The call of some of the queries."""
    bias = call.bias if isinstance(call.bias, ByDistance) else rows_of(call.bias, rows)
    if isinstance(call.at, Tensor):
        at: Any = call.at.long() + rows.start  # which may not fit into int8 or int16
    else:
        start, step = query_offset(call.pattern, call.n, call.m, call.at)
        at = start + step * rows.start, step
    return replaced(call, q=call.q[:, :, rows], table=rows_of(call.table, rows), bias=bias, at=at)


def rows_of(x: Tensor | None, rows: slice) -> Tensor | None:
    """These rows of a table that broadcasts to (b, h, n, m)."""
    return x if x is None or x.dim() < 2 or x.shape[-2] == 1 else x[..., rows, :]


class _ByQueries(torch.autograd.Function):
    """The tensors of a call → o, lse."""

    @staticmethod
    def forward(ctx, job, *tensors):
        ctx.set_materialize_grads(False)
        ctx.job = job
        # Lengths and offsets are often one buffer that every step overwrites.
        ctx.save_for_backward(*tensors[:-2], *(None if x is None else x.clone() for x in tensors[-2:]))
        call = job.call(tensors)
        o, lse = zip(*(job.run(_chunk(call, rows)) for rows in job.chunks(call.n)))
        return torch.cat(o, -2), None if lse[0] is None else torch.cat(lse, -1)

    @staticmethod
    def backward(ctx, *grads):
        tensors, needed = ctx.saved_tensors, ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():  # create_graph=True: these gradients will be differentiated again
            results = _Gradients.apply(ctx.job._replace(run=ctx.job.formula), *grads, *tensors)
        else:
            results = _gradients(ctx.job, tensors, grads, needed)
        return None, *_padded(results, needed)


class _Gradients(torch.autograd.Function):
    """The gradients of o and lse and the tensors of a call → those of its first tensors."""

    @staticmethod
    def forward(ctx, job, *inputs):
        ctx.set_materialize_grads(False)
        ctx.job = job
        ctx.save_for_backward(*inputs)
        return _gradients(job, inputs[2:], inputs[:2], ctx.needs_input_grad[3:])

    @staticmethod
    def backward(ctx, *grads):
        inputs, needed = ctx.saved_tensors, ctx.needs_input_grad[1:]
        results = _second_gradients(ctx.job, inputs, grads, needed, torch.is_grad_enabled())
        return None, *_padded(results, needed)


def _padded(grads: Tensors, needed: Sequence[bool]) -> Tensors:
    """One gradient for each input, None where it is not needed."""
    return tuple(x if need else None for x, need in zip_longest(grads, needed))


def _gradients(job: Job, tensors: Tensors, grads: Tensors, needed: Sequence[bool]) -> Tensors:
    """Those of the first tensors of a call, as far as they are needed."""
    call, sums = job.call(tensors), _Sums(_where(needed, tensors[:LEARNED]), by_query=1)
    for rows in job.chunks(call.n):
        with torch.enable_grad(), without_autocast(call.q):  # the forward pass had these dtypes
            chunk, leaves = _detached(_chunk(call, rows), needed)
            outputs = job.run(chunk)
            sums.add(rows, differentiate(outputs, leaves, _of_queries(grads, rows)))
    return sums.results


def _second_gradients(
    job: Job, inputs: Tensors, of_gradients: Tensors, needed: Sequence[bool], create_graph: bool
) -> Tensors:
    """Those of the inputs of `_Gradients`: of the gradients of o and lse, and of the first tensors of a call, as far
    as they are needed. create_graph: these are differentiated as well, and the call is one chunk."""
    call, grads, used = job.call(inputs[2:]), inputs[:2], [x is not None for x in of_gradients]
    sums = _Sums(_where(needed, inputs[: 2 + LEARNED]), by_query=3)
    queries = call.n if create_graph else max(job.queries // 4, MIN_QUERIES)  # each holds more
    for rows in job._replace(queries=queries).chunks(call.n):
        with torch.enable_grad():
            chunk, own = _chunk(call, rows), _of_queries(grads, rows)
            if create_graph:
                tensors, own = tuple(map(alias, _tensors(chunk))), tuple(map(alias, own))
                chunk, leaves = _with_tensors(chunk, tensors), tensors[:LEARNED]
            else:
                chunk, leaves = _detached(chunk, [a or b for a, b in zip(used, needed[2:])])
                own = tuple(x if x is None else x.detach().requires_grad_(a) for x, a in zip(own, needed))
            first = differentiate(job.formula(chunk), _where(used, leaves), own, create_graph=True)
            others = *_of_queries(of_gradients[:1], rows), *of_gradients[1:]
            sums.add(rows, differentiate(first, _where(needed, (*own, *leaves)), others, create_graph))
    return sums.results


def _where(needed: Sequence[bool], tensors: Tensors) -> Tensors:
    """None in place of those that are not needed."""
    return tuple(x if need else None for x, need in zip(tensors, needed))


def _detached(call: Call, needed: Sequence[bool]) -> tuple[Call, Tensors]:
    """The call with tensors of its own; and the first of them, None for those whose gradients are not needed."""
    tensors = tuple(None if x is None else x.detach() for x in _tensors(call))
    first = zip(tensors[:LEARNED], needed)
    leaves = tuple(x.requires_grad_() if need and x is not None else None for x, need in first)
    return _with_tensors(call, tensors), leaves


def alias(x: Tensor | None) -> Tensor | None:
    """The same tensor as another node of the graph, for partial derivatives: k may be computed from q, or be q, and a
    derivative with respect to q would include what q does to k."""
    return None if x is None else x.view_as(x)


def _of_queries(grads: Tensors, rows: slice) -> Tensors:
    return tuple(None if x is None else x[:, :, rows] for x in grads)


def differentiate(outputs: Tensors, inputs: Tensors, grads: Tensors, create_graph: bool = False) -> Tensors:
    """torch.autograd.grad, with None for an input that is None or that nothing depends on."""
    pairs = [(y, dy) for y, dy in zip(outputs, grads) if y is not None and dy is not None and y.requires_grad]
    wanted = [x for x in inputs if x is not None and x.requires_grad]
    if not pairs or not wanted:
        return (None,) * len(inputs)
    given, received = [y for y, _ in pairs], [dy.to(y.dtype) for y, dy in pairs]
    found = iter(torch.autograd.grad(given, wanted, received, create_graph=create_graph, allow_unused=True))
    return tuple(next(found) if x is not None and x.requires_grad else None for x in inputs)


class _Sums:
    """Gradients of all chunks; zeros where nothing depends on a tensor. Those of the first tensors have rows by query
    and are put together; others are added, in float32 or float64."""

    def __init__(self, like: Tensors, by_query: int):
        self.like, self.by_query = like, by_query
        self.totals: list[Any] = [[] if at < by_query else None for at in range(len(like))]

    def add(self, rows: slice, grads: Tensors) -> None:
        for at, (x, like) in enumerate(zip(grads, self.like)):
            if like is None:
                continue
            if at < self.by_query:
                self.totals[at].append(torch.zeros_like(like[:, :, rows]) if x is None else x)
            elif x is not None:
                x = x.to(computed_in(x.dtype))
                self.totals[at] = x if self.totals[at] is None else self.totals[at] + x

    @property
    def results(self) -> Tensors:
        return tuple(None if like is None else self._total(at, like) for at, like in enumerate(self.like))

    def _total(self, at: int, like: Tensor) -> Tensor:
        total = self.totals[at]
        if at < self.by_query:
            return torch.cat(total, 2)
        return torch.zeros_like(like) if total is None else total.to(like.dtype)

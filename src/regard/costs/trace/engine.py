"""This library's own attention under a trace: the choice of the real call, and its pairs, counted as a whole.

On the CPU the prepared code of the real call runs on meta tensors, and what it allocates is metered. On a GPU a
kernel is one operation, whose memory kernels.py knows; FlexAttention, which real calls compile, is a fused kernel.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from itertools import chain
from math import prod
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from ...compat import DispatchMode, can_read_flash_node, without_dispatch_modes, without_function_modes
from ...engine import attention as entry
from ...engine import call as engine_call
from ...engine import flex, fused_qkv, query_chunks, sdpa
from ...engine.backends import choose
from ...engine.call import Call, CallFacts, Outputs, Prepared, facts_of
from ...engine.cpu import kernels, layout, tiles
from ...nested import tensors_in
from ...nn import cached_rotation, position
from ...pattern import count_rows
from ...reference import repeat_heads
from . import attention
from .kernels import by_one_launch


@contextmanager
def _outside() -> Iterator[None]:
    """Nothing inside is traced."""
    with without_function_modes(), without_dispatch_modes():
        yield


@contextmanager
def traced_engine(trace: Any, fused: Any) -> Iterator[None]:
    """fused: in place of PyTorch's attention."""
    with _outside():
        can_read_flash_node()  # probed once in a process: what the probe allocates is not the model's
    with ExitStack() as stack:

        def put(*replaced: Any) -> None:
            stack.enter_context(patch.object(*replaced))

        # The operations of a plain call, not those for a compiler that traces it; data may be on the real device.
        for module, name in ((sdpa, "eager"), (fused_qkv, "eager"), (entry, "require_device")):
            put(module, name, lambda *_: True)
        put(sdpa, "_sdpa", fused)
        put(sdpa, "_without_plan", partial(_without_plan, fused))
        put(sdpa, "readable", trace.readable)
        for module in (position, engine_call):
            put(module, "readable", lambda x: x.is_cpu)
        put(engine_call, "_small", lambda _: True)  # keys and values are finite: none is copied
        for module, name in ((engine_call, "_dense"), (cached_rotation, "_cached_rotations")):
            put(module, name, lru_cache(maxsize=64)(getattr(module, name).__wrapped__))  # a cache of its own
        put(entry, "choose", lambda f, backend: _chosen(trace, f, backend))
        put(query_chunks, "Job", _FewChunks)
        put(flex, "_compiled", lambda kind: partial(attention.flex, trace))
        put(flex, "_block_mask", lambda call: _pairs(trace, flex.Flex().prepare(facts_of(call)), call))
        if trace.device == "cpu":
            put(entry, "without_defaults", partial(_without_defaults, trace, entry.without_defaults))
            put(entry, "facts_of", lambda call: _facts(trace, call))
            put(kernels, "_pool", [])
            allocate = kernels.Buffers._allocate
            put(kernels.Buffers, "_allocate", lambda *args: trace.keeping(allocate, *args))
            put(tiles, "Executor", _Executor)
            known: dict = {}
            pieces = layout.Layout.pieces
            put(layout.Layout, "pieces", lambda of, heads: _pieces(known, pieces, of, heads))
            for name in ("fused", "with_bias"):
                put(layout.Layout, name, property(partial(_groups, vars(layout.Layout)[name])))
            for name in ("allowed", "mask"):  # tables that are cached for real calls too
                put(layout.TileGroup, name, _outside()(getattr(layout.TileGroup, name)))
        yield


def _without_plan(
    fused: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> Tensor:
    """In place of the kernels that build no plan; the one with a mask takes no grouped heads."""
    if mask is not None:
        k, v = (repeat_heads(x, q.shape[1]) for x in (k, v))
    return fused(q, k, v, mask, is_causal=is_causal, scale=scale, enable_gqa=True, no_plan=True)


def _without_defaults(trace: Any, real: Any, q: Tensor, k: Tensor, *given: Any) -> tuple[Any, ...]:
    """In place of entry.without_defaults, which reads tensors on a CPU: it gets their values where they are known.

    given: pattern, lengths and at.
    """
    with _outside():
        known = [trace.values.get(x, x) if isinstance(x, Tensor) and x.is_meta else x for x in given]
        pattern, lengths, at = real(q, k, *known)
    if isinstance(lengths, Tensor):
        lengths = given[1] if lengths is known[1] else given[1][:, 1]
    return given[0] if pattern is known[0] else pattern, lengths, given[2] if at is known[2] else at


def _facts(trace: Any, call: Call) -> CallFacts:
    """Those of the same call on real tensors; where it would read values that are unknown, of an observed one."""
    facts, extras = facts_of(call), [x for x in call.row_extras()[:2] if x is not None]
    known = all(trace.value_of(x) is x for x in call.pattern.tensors())
    known = known and all(trace.value_of(x) is not None for x in extras)
    return replace(facts, device="cpu", observed=False) if known else facts


def _chosen(trace: Any, f: CallFacts, backend: str) -> Prepared:
    """The prepared call of a real one, with tables of its own; its pairs are counted."""
    prepared = choose(f, backend) if f.observed else trace.prepared.get((f, backend))
    if prepared is None:
        with _outside():
            prepared = choose(f, backend)
            if prepared.build is not None:
                with _Tables(trace):
                    attend = prepared.build()
                prepared = replace(prepared, build=None, run=lambda c: (attend(c.q, c.k, c.v), None))
        trace.prepared[f, backend] = prepared
    return replace(prepared, build=None, run=lambda call: _counted(trace, prepared, call))


# Where a call is computed a chunk of queries at a time, a trace runs the first chunk and the last ones.

# The caches of a trace hold the tables of this many chunks, up to so many queries: then tables are too large.
CACHED_CHUNKS, MAX_CACHED_QUERIES = 64, 1 << 18


class _FewChunks(query_chunks.Job):
    """In place of query_chunks.Job: the first chunk, then all but the last ones as one, and these."""

    def __new__(cls, run, formula, settings, by_distance, queries):
        run, formula = (partial(_run_chunk, x, queries, []) for x in (run, formula))
        return super().__new__(cls, run, formula, settings, by_distance, queries)

    def chunks(self, n):
        count, size = -(-n // self.queries), self.queries
        last = CACHED_CHUNKS if n <= MAX_CACHED_QUERIES else 2  # a complete one, and one that may be shorter
        if count <= last + 2:
            return super().chunks(n)
        begin = (count - last) * size
        later = (slice(at, at + size) for at in range(begin, n, size))
        return chain([slice(0, size), slice(size, begin)], later)


def _run_chunk(run: Any, queries: int, first: list[Outputs], call: Call) -> Outputs:
    """What it returns; for more queries than a chunk has, tensors of the right sizes."""
    if call.n > queries and first:
        learned = query_chunks._tensors(call)[: query_chunks.LEARNED]
        # Outputs that a backward pass computes again are freed with their chunk.
        stored = not torch.is_grad_enabled()
        o, lse = _Chunks.apply(first[0], call.n, stored, *(x for x in learned if x is not None))
        return o, lse
    outputs = run(call)
    if not first:
        o, lse = outputs
        first.append((_of_rows(o, 0, True), None if lse is None else _of_rows(lse, 0, True)))
    return outputs


def _of_rows(x: Tensor, n: int, stored: bool) -> Tensor:
    """A new tensor like x, with n queries."""
    shape = *x.shape[:2], n, *x.shape[3:]
    return x.new_empty(shape) if stored else x.new_empty(()).expand(shape)


class _Chunks(torch.autograd.Function):
    """Tensors as large as the outputs of many chunks; backward, as their gradients."""

    @staticmethod
    def forward(ctx, first, n, stored, *tensors):
        ctx.save_for_backward(*tensors)
        return tuple(None if x is None else _of_rows(x, n, stored) for x in first)

    @staticmethod
    def backward(ctx, *_):
        return None, None, None, *map(torch.empty_like, ctx.saved_tensors)


# A trace on the CPU needs one piece of each size: the others would allocate the same, or less, and free it again.


class _Executor(tiles.Executor):
    """Where weights are saved, each piece saves its own, and one of each size is computed."""

    @cached_property
    def computed(self) -> set[tuple]:
        return set()

    def forward(self, piece, rows, keys):
        if self._is_known(piece, prod(piece.score_shape) <= self.budget):
            self.save(piece.score_shape)
        else:
            super().forward(piece, rows, keys)

    def backward(self, piece, rows, keys, saved):
        if not self._is_known(piece, saved is not None):
            super().backward(piece, rows, keys, saved)

    def _is_known(self, piece: Any, saved: bool) -> bool:
        if not self.call.one_softmax or not isinstance(piece, layout.Piece):
            return False
        key = id(piece.group), piece.score_shape, saved
        known = key in self.computed
        self.computed.add(key)
        return known


def _pieces(known: dict, real: Any, of: layout.Layout, heads: int) -> list[layout.Piece]:
    """In place of Layout.pieces."""
    if of.concatenated:
        return real(of, heads)
    if (of, heads) not in known:
        with patch.object(layout, "cuts", _ends):
            pieces = real(replace(of), heads)  # a copy, so that real calls do not find these pieces
        known[of, heads] = _largest(pieces, lambda p: (p.subgroup, p.score_shape[0], p.fresh, p.alone))
    return known[of, heads]


def _ends(count: int, size: int) -> list[tuple[int, int]]:
    """In place of layout.cuts: one of the equal parts, and the last if it is smaller."""
    rest = count % size
    return [(0, size)] * (count >= size) + [(count - rest, rest)] * (rest > 0)


def _groups(real: Any, of: layout.Layout) -> tuple[layout.TileGroup, ...]:
    """In place of a cached property: groups that the fused op runs."""
    return tuple(_largest(real.__get__(of), lambda group: (group, group.tiles)))


def _largest(parts: Iterable[Any], shape: Callable[[Any], tuple]) -> list[Any]:
    """Without those that are in no size larger than another of their kind. Masks are kept: each group has its own.
    shape: (group, tiles, …)."""
    kinds: dict[tuple, dict[tuple[int, ...], Any]] = {}
    for part in parts:
        group, count, *more = shape(part)
        masked = (
            None if group.masked_by is None else (group.row, group.key, group.rows, group.keys, group.cycle)
        )
        kind = (
            masked,
            group.row_step,
            group.key_step,
            group.key_shift == 0,
            group.split,
            group.by_products,
            *more,
        )
        rows, keys = count * group.rows, count * group.keys
        kinds.setdefault(kind, {}).setdefault((rows * group.keys, rows, keys), part)
    return [sizes[size] for sizes in kinds.values() for size in _maxima(sizes)]


def _maxima(sizes: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for size in sorted(sizes, reverse=True):
        if not any(all(a <= b for a, b in zip(size, other)) for other in found):
            found.append(size)
    return found


class _Tables(DispatchMode):
    """What is made inside and still there at its end is a table that later calls find."""

    def __init__(self, trace: Any):
        super().__init__()
        self.trace, self.made = trace, list[weakref.ref]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.made += [weakref.ref(x.untyped_storage()) for x in tensors_in(out)]
        return out

    def __exit__(self, *failure):
        super().__exit__(*failure)
        for storage in filter(None, (made() for made in self.made)):
            self.trace.keep(torch.empty(0, dtype=torch.uint8).set_(storage))


def _counted(trace: Any, prepared: Prepared, call: Call) -> Outputs:
    """The pairs of the whole call, and none of the products that it consists of."""
    if call.table is not None or isinstance(call.bias, Tensor) or call.hard:
        return prepared(call)  # a mask is counted by its values; hard attention has no gradient of its scores
    name = attention.FUSED if prepared.backend == "sdpa" else "sparse_attention"
    pairs = _pairs(trace, prepared, call)
    whole = attention.Call(call.q, call.k, call.v, None, 0.0, False, *pairs, False, prepared.backend)
    return attention.counted(trace, name, whole, lambda: prepared(call))


def _pairs(trace: Any, prepared: Prepared, call: Call) -> attention.CallPairs:
    """The pairs of all heads and batch rows: those that the pattern and known lengths allow, and those computed."""
    pattern, (b, h, n), m = call.pattern, call.q.shape[:3], call.m
    if any(trace.value_of(x) is None for x in pattern.tensors()):
        return b * h * n * m, b * h * n * m, "a pattern with unknown values: all pairs are counted"
    lengths, at = trace.value_of(call.lengths), call.at
    if isinstance(at, Tensor) and (at := trace.value_of(at)) is None:
        at = max(m - n, 0)
    rows = tuple(x.flatten().tolist() if isinstance(x, Tensor) else x for x in (at, lengths))
    key = prepared.backend, pattern, b, h, n, m, repr(rows)
    if key not in trace.prepared:
        of_data, of_heads = pattern.data_shape
        pairs = count_rows(pattern, n, m, b, at, lengths), b * prepared.computed() // of_data
        trace.prepared[key] = *(h * x // of_heads for x in pairs), repr(pattern)
    return trace.prepared[key]


def _sparse(trace: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """Our kernels on a GPU leave o as q is: where heads are within positions, a model reads it without a copy."""
    o, lse = func(*args, **kwargs)
    if trace.device == "cuda" and attention.heads_within(args[0]):
        b, h, n, d = o.shape
        o = o.new_empty(b, n, h, d).transpose(1, 2)
    return o, lse


def _sparse_backward(trace: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """The gradients by one launch are laid out as their inputs."""
    grads, (q, k, v) = func(*args, **kwargs), args[1][:3]
    if trace.device != "cuda" or not by_one_launch(args):
        return grads
    return *(torch.empty_like(x) for x in (q, k, v)), *grads[3:]


OWN_HANDLERS = {
    torch.ops.regard.sparse_attention: _sparse,
    torch.ops.regard.sparse_attention_backward: _sparse_backward,
}

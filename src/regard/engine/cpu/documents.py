"""Packed sequences: each document attends to itself alone, so n positions cost Σ length², not n².

Contiguous ids divide the axis into spans. Neighbors of one length are a group of tiles; short ones of different
lengths share a tile, masked by their ids; a long one has the layout that it would have alone.

A tree is divided into chains, in which each position is the parent of the next. A chain attends to itself causally
and to the beginning of each chain above it: a triangle, and rectangles without a mask.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, reduce
from itertools import groupby
from operator import and_

import numpy as np
import torch
from torch import Tensor

from ... import compat
from ...pattern import At, Pattern, causal, documents, full, query_offset, tree
from ...pattern.clauses import conjuncts
from ...pattern.data import chains, spans
from .layout import Layout, TileGroup
from .strided_layout import layout, with_joined_rows

MAX_SHARED = 128  # keys of documents that share a tile: they are computed faster than one call for each takes
MAX_CACHED = 8  # layouts, each with its masks: those of a batch of ids, one for each pattern beside them
MAX_RECTANGLES = 256  # rectangles of a tree: one with more is faster by gathered keys
MAX_TILE = 512  # a longer document is planned, as it would be alone; a shorter one is one tile, masked
# Positions of a causal document that is divided: there the fused op takes up to a fifth less.
HALVED = range(384, 640)
Split = tuple[documents | tree, Pattern] | None


def parts(pattern: Pattern) -> Split:
    """`documents(ids) & rest`, where rest is the same wherever a document begins, or a tree; else None."""
    factors = conjuncts(pattern)
    words = [f for f in factors if isinstance(f, documents | tree)]
    rest = [f for f in factors if not isinstance(f, documents | tree)]
    if len(words) != 1 or any(f.shift_period != 1 for f in rest):  # a document may begin anywhere
        return None
    if isinstance(words[0], tree):  # whose pairs are all causal
        return (words[0], full()) if all(isinstance(f, causal | full) for f in rest) else None
    return words[0], reduce(and_, rest) if rest else full()


def layouts(pattern: Pattern, n: int, m: int, at: At = None) -> tuple[Layout, ...] | None:
    """One for all batch rows, or one each; None where documents are not contiguous, or a tree has many branches."""
    split = parts(pattern)
    if split is None or split[0].device.type != "cpu":
        return None
    word, rest = split
    word.fits(m)
    start, step = query_offset(pattern, n, m, at)
    data, beside = (word.parents, None) if isinstance(word, tree) else (word.ids, rest)
    return layouts_of_ids(data, beside, n, start) if step == 1 else None


def layouts_of_ids(ids: Tensor, rest: Pattern | None, n: int, start: int) -> tuple[Layout, ...] | None:
    """Cached by the contents, which may be another tensor at every call. rest: None if these are parents."""
    data = np.from_dlpack(ids)  # numpy() fails inside torch.func.grad
    return _layouts(data.tobytes(), data.dtype.str, data.shape, rest, n, start)


@lru_cache(maxsize=MAX_CACHED)
def _layouts(
    data: bytes, dtype: str, shape: tuple[int, ...], rest: Pattern | None, n: int, start: int
) -> tuple[Layout, ...] | None:
    m = shape[-1]
    rows = np.frombuffer(data, dtype=dtype).reshape(-1, m)
    if rest is None:
        trees = [_of_tree(row.tolist(), n, start) for row in rows]
        return None if None in trees else tuple(Layout(n, m, start, 1, x or ()) for x in trees)
    all_spans = [spans(row) for row in rows]
    if not all(all_spans):
        return None
    with compat.without_dispatch_modes():  # FakeTensorMode would leave its own tensors in the cache
        words = [documents(torch.from_numpy(row)) for row in rows.copy()]
    found = zip(all_spans, words)
    each = (tuple(_groups(_documents(of_row or [], n, start), word, rest)) for of_row, word in found)
    return tuple(Layout(n, m, start, 1, groups) for groups in each)


def _documents(of_row: list[tuple[int, int]], n: int, start: int) -> Iterator[TileGroup]:
    """A tile of each document without a mask. Those without a query are left out; a query past the last document has
    no allowed key."""
    for a, b in of_row:
        row, end = max(a - start, 0), min(b - start, n)
        if row < end:
            rows, keys = end - row, b - a
            yield TileGroup(1, row, rows, 1, rows, a, keys, 1, keys, None, start, 1)


def _shape(one: TileGroup) -> tuple[int, int]:
    return one.rows, one.keys


def _groups(each: Iterator[TileGroup], by_ids: documents, rest: Pattern) -> Iterator[TileGroup]:
    waiting: list[TileGroup] = []  # short ones, which will share a tile
    for (_, keys), equal in groupby(each, key=_shape):
        same = list(equal)
        if sum(one.keys for one in waiting) + len(same) * keys > MAX_SHARED:
            yield from _shared_tile(waiting, by_ids, rest)
            waiting = []
        if len(same) * keys > MAX_SHARED:
            yield from _own_tiles(replace(same[0], tiles=len(same)), rest)
        else:
            waiting += same
    yield from _shared_tile(waiting, by_ids, rest)


def _shared_tile(short: list[TileGroup], by_ids: documents, rest: Pattern) -> Iterator[TileGroup]:
    if len(short) == 1:
        yield from _own_tiles(short[0], rest)
    elif short:
        first, last = short[0], short[-1]
        rows, keys = last.row + last.rows - first.row, last.key + last.keys - first.key
        yield replace(first, row_shift=rows, rows=rows, key_shift=keys, keys=keys, masked_by=by_ids & rest)


def _of_tree(parents: list[int], n: int, start: int) -> tuple[TileGroup, ...] | None:
    """Triangles, and rectangles over the keys above; None where these are too many."""
    own, above = [], []
    for first, end, runs in chains(parents, range(start, start + n), MAX_RECTANGLES):
        for one in _documents([(first, end)], n, start):
            own.append(one)
            above += [replace(one, key=key, key_shift=stop - key, keys=stop - key) for key, stop in runs]
        if len(above) > MAX_RECTANGLES:
            return None
    above.sort(key=lambda one: (one.key, one.keys, one.row))
    equal = (list(same) for _, same in groupby(own, key=_shape))
    triangles = (part for same in equal for part in _causal_tiles(replace(same[0], tiles=len(same))))
    return *triangles, *with_joined_rows(above)


def _own_tiles(equal: TileGroup, rest: Pattern) -> Iterator[TileGroup]:
    """Documents of one length that follow one another."""
    if isinstance(rest, causal):
        yield from _causal_tiles(equal)
    elif isinstance(rest, full):
        yield equal
    elif equal.rows * equal.keys <= MAX_TILE**2:
        yield replace(equal, masked_by=rest)
    else:
        alone = layout(rest, equal.rows, equal.keys, equal.start + equal.row - equal.key, 1)
        for one in map(equal.tile, range(equal.tiles)):
            for group in alone.groups:
                yield replace(group, row=group.row + one.row, key=group.key + one.key, start=one.start)


def _causal_tiles(equal: TileGroup) -> Iterator[TileGroup]:
    """A triangle of each document, or two of half the size and the square between them."""
    group, half = replace(equal, masked_by=causal()), equal.rows // 2
    if not group.triangle or group.rows not in HALVED:
        yield group
        return
    later = replace(equal.some_rows(half, equal.rows - half), keys=half)
    yield replace(group.some_rows(0, half), keys=half)
    yield replace(later, key=equal.key + half, keys=later.rows, masked_by=group.masked_by)
    yield later

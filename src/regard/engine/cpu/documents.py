"""Packed sequences: each document attends to itself alone, so n positions cost Σ length², not n².

Contiguous ids divide the axis into spans. Neighbors of one length are a group of tiles; short ones of different
lengths share a tile, masked by their ids; a long one has the layout that it would have alone.

A tree is divided into chains, in which each position is the parent of the next. A chain attends to itself causally
and to the beginning of each chain above it: a triangle, and rectangles without a mask.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from ... import compat
from ...pattern import At, Pattern, causal, documents, full, query_offset, tree
from ...pattern.clauses import conjunction, parted
from ...pattern.data import chains
from ...pattern.packed import spans
from .layout import Layout, TileGroup
from .strided_layout import layout, with_joined_rows

MAX_SHARED = 128  # keys of documents that share a tile: they are computed faster than one call for each takes
MAX_CACHED = 8  # layouts, each with its masks: those of a batch of ids, one for each pattern beside them
MAX_RECTANGLES = 256  # rectangles of a tree: one with more is faster by gathered keys
MAX_TILE = 512  # a longer document is planned, as it would be alone; a shorter one is one tile, masked
# Positions of a causal document that is divided: there the fused op takes up to a fifth less.
HALVED = range(384, 640)
Split = tuple[documents | tree, Pattern] | None


def split(pattern: Pattern) -> Split:
    """(documents, inner) of `documents(ids, within) & others`, where others are the same wherever a document begins:
    inner is both, counted from there. (tree, full()) of a tree; else None."""
    words, others = parted(pattern, documents | tree)
    if len(words) != 1 or any(f.shift_period != 1 for f in others):  # a document may begin anywhere
        return None
    if isinstance(words[0], tree):  # whose pairs are all causal
        return (words[0], full()) if all(isinstance(f, causal | full) for f in others) else None
    return words[0], conjunction(*others, words[0].within)


def layouts(pattern: Pattern, n: int, m: int, at: At = None) -> tuple[Layout, ...] | None:
    """One for all batch rows, or one each; None where documents are not contiguous, or a tree has many branches."""
    if (found := split(pattern)) is None or found[0].device.type != "cpu":
        return None
    word, inner = found
    word.fits(m)
    start, step = query_offset(pattern, n, m, at)
    if step != 1:
        return None
    if isinstance(word, tree):
        return layouts_of_ids(word.parents, None, n, start)
    return layouts_of_ids(word.ids, inner, n, start)


def layouts_of_ids(ids: Tensor, inner: Pattern | None, n: int, start: int) -> tuple[Layout, ...] | None:
    """Cached by the contents, which may be another tensor at every call. inner: the pattern within a document; None
    if these are the parents of a tree."""
    data = np.from_dlpack(ids)  # numpy() fails inside torch.func.grad
    return _layouts(data.tobytes(), data.dtype.str, data.shape, inner, n, start)


@lru_cache(maxsize=MAX_CACHED)
def _layouts(
    data: bytes, dtype: str, shape: tuple[int, ...], inner: Pattern | None, n: int, start: int
) -> tuple[Layout, ...] | None:
    m = shape[-1]
    rows = np.frombuffer(data, dtype=dtype).reshape(-1, m)
    if inner is None:
        trees = [_tree_groups(row.tolist(), n, start) for row in rows]
        return None if None in trees else tuple(Layout(n, m, start, 1, x or ()) for x in trees)
    all_spans = [spans(row) for row in rows]
    if not all(all_spans):
        return None
    with compat.without_dispatch_modes():  # FakeTensorMode would leave its own tensors in the cache
        words = [documents(torch.from_numpy(row), inner) for row in rows.copy()]
    tiles = (_document_tiles(row_spans or [], n, start) for row_spans in all_spans)
    groups = (_groups(row_tiles, word) for row_tiles, word in zip(tiles, words))
    return tuple(Layout(n, m, start, 1, tuple(row_groups)) for row_groups in groups)


def _document_tiles(row_spans: list[tuple[int, int]], n: int, start: int) -> Iterator[TileGroup]:
    """A tile of each document without a mask. Those without a query are left out; a query past the last document has
    no allowed key."""
    for first, stop in row_spans:
        row, end = max(first - start, 0), min(stop - start, n)
        if row < end:
            rows, keys = end - row, stop - first
            yield TileGroup(1, row, rows, 1, rows, first, keys, 1, keys, None, start, 1)


def _shape(tile: TileGroup) -> tuple[int, int, int]:
    return tile.rows, tile.keys, tile.row - tile.key  # where its queries are in the document


def _groups(tiles: Iterator[TileGroup], word: documents) -> Iterator[TileGroup]:
    """Neighbors of one length as a group; short documents of different lengths in one tile."""
    waiting: list[TileGroup] = []  # short ones, which will share a tile
    for (_, keys, _), run in groupby(tiles, key=_shape):
        equal = list(run)
        if sum(tile.keys for tile in waiting) + len(equal) * keys > MAX_SHARED:
            yield from _shared_tile(waiting, word)
            waiting = []
        if len(equal) * keys > MAX_SHARED:
            yield from _own_tiles(replace(equal[0], tiles=len(equal)), word)
        else:
            waiting += equal
    yield from _shared_tile(waiting, word)


def _shared_tile(short: list[TileGroup], word: documents) -> Iterator[TileGroup]:
    if len(short) == 1:
        yield from _own_tiles(short[0], word)
    elif short:
        first, last = short[0], short[-1]
        rows, keys = last.row + last.rows - first.row, last.key + last.keys - first.key
        yield replace(first, row_shift=rows, rows=rows, key_shift=keys, keys=keys, masked_by=word)


def _tree_groups(parents: list[int], n: int, start: int) -> tuple[TileGroup, ...] | None:
    """Triangles, and rectangles over the keys above; None where these are too many."""
    chain_tiles, above = [], []
    for first, end, runs in chains(parents, range(start, start + n), MAX_RECTANGLES):
        for tile in _document_tiles([(first, end)], n, start):
            chain_tiles.append(tile)
            above += [replace(tile, key=key, key_shift=stop - key, keys=stop - key) for key, stop in runs]
        if len(above) > MAX_RECTANGLES:
            return None
    above.sort(key=lambda tile: (tile.key, tile.keys, tile.row))
    same_shape = (list(run) for _, run in groupby(chain_tiles, key=_shape))
    groups = (replace(equal[0], tiles=len(equal)) for equal in same_shape)
    triangles = (triangle for group in groups for triangle in _causal_tiles(group))
    return *triangles, *with_joined_rows(above)


def _own_tiles(equal: TileGroup, word: documents) -> Iterator[TileGroup]:
    """Documents of one length that follow one another."""
    if isinstance(inner := word.within, causal):
        yield from _causal_tiles(equal)
    elif isinstance(inner, full):
        yield equal
    elif equal.rows * equal.keys <= MAX_TILE**2:
        yield replace(equal, masked_by=_counted(inner, word))
    else:
        alone = layout(inner, equal.rows, equal.keys, equal.start + equal.row - equal.key, 1)
        for tile in map(equal.tile, range(equal.tiles)):
            for group in alone.groups:
                row, key, mask = group.row + tile.row, group.key + tile.key, _counted(group.masked_by, word)
                yield replace(group, row=row, key=key, start=tile.start, masked_by=mask)


def _counted(mask: Pattern | None, word: documents) -> Pattern | None:
    """The mask of a document by itself, where it is in its row."""
    return mask if mask is None or mask.shift_period == 1 else documents(word.ids, mask)


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

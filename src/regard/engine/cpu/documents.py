"""Packed sequences: each document attends to itself alone, so n positions cost Σ length², not n².

Contiguous ids divide the axis into spans. Neighbours of one length are a group of tiles; short ones of different
lengths share a tile, masked by their ids; a long one has the layout that it would have alone.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, reduce
from itertools import groupby
from operator import and_
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...pattern import At, Both, Pattern, causal, documents, full, query_offset
from ..parts import NoPlan
from .layout import Layout, TileGroup
from .strided_layout import layout

MAX_SHARED = 128  # keys of documents that share a tile: they are computed faster than one call for each takes
MAX_CACHED = 8  # layouts, each with its masks: those of a batch of ids, one for each pattern beside them
MAX_TILE = 512  # a longer document is planned, as it would be alone; a shorter one is one tile, masked

Span = tuple[int, int]  # the first key of a document, and the first past it


def parts(pattern: Pattern) -> tuple[documents, Pattern] | None:
    """`documents(ids) & rest`, where rest is the same wherever a document begins; else None."""
    factors = list(_factors(pattern))
    by_ids = [f for f in factors if isinstance(f, documents)]
    rest = [f for f in factors if not isinstance(f, documents)]
    if len(by_ids) != 1 or any(f.shift_period != 1 for f in rest):  # a document may begin anywhere
        return None
    return by_ids[0], reduce(and_, rest) if rest else full()


def as_text(pattern: Pattern) -> tuple[Tensor, str]:
    """The ids of `documents(ids) & rest`, and the factors of rest as text, one per line."""
    factors = list(_factors(pattern))
    ids = [f.ids for f in factors if isinstance(f, documents)]
    return ids[0], "\n".join([f.text for f in factors if f.text is not None])


def _factors(pattern: Pattern) -> Iterator[Pattern]:
    if isinstance(pattern, Both):
        yield from _factors(pattern.left)
        yield from _factors(pattern.right)
    else:
        yield pattern


def layouts(pattern: Pattern, n: int, m: int, at: At = None) -> tuple[Layout, ...] | None:
    """One layout for all batch rows, or one each; None where the ids of a document do not follow one another."""
    split = parts(pattern)
    if split is None or split[0].ids.device.type != "cpu":
        return None
    by_ids, rest = split
    by_ids.fits(m)
    start, step = query_offset(pattern, n, m, at)
    return layouts_of_ids(by_ids.ids, rest, n, start) if step == 1 else None


def layouts_of_ids(ids: Tensor, rest: Pattern, n: int, start: int) -> tuple[Layout, ...] | None:
    """Cached by the contents of the ids, which may be another tensor at every call."""
    data = np.from_dlpack(ids)  # numpy() fails inside torch.func.grad
    return _layouts(data.tobytes(), data.dtype.str, data.shape, rest, n, start)


@lru_cache(maxsize=MAX_CACHED)
def _layouts(
    data: bytes, dtype: str, shape: tuple[int, ...], rest: Pattern, n: int, start: int
) -> tuple[Layout, ...] | None:
    m = shape[-1]
    rows = np.frombuffer(data, dtype=dtype).reshape(-1, m)
    all_spans = [spans(row) for row in rows]
    if not all(all_spans):
        return None
    return tuple(
        Layout(n, m, start, 1, tuple(_groups(of_row, documents(torch.from_numpy(row)), rest, n, start)))
        for row, of_row in zip(rows.copy(), all_spans)
        if of_row is not None
    )


def spans(ids: np.ndarray) -> list[Span] | None:
    """Where each document begins and ends; None where one is in two places, or there are no keys."""
    if not len(ids):
        return None
    first = np.flatnonzero(np.append(True, ids[1:] != ids[:-1]))
    if len(np.unique(ids[first])) < len(first):
        return None
    return list(zip(first.tolist(), [*first[1:].tolist(), len(ids)]))


class Document(NamedTuple):
    """The queries and keys of one document."""

    row: int
    rows: int
    key: int
    keys: int


def _documents(of_row: list[Span], n: int, start: int) -> Iterator[Document]:
    """Documents without a query are left out; a query past the last document has no allowed key."""
    for a, b in of_row:
        row, end = max(a - start, 0), min(b - start, n)
        if row < end:
            yield Document(row, end - row, a, b - a)


def _groups(of_row: list[Span], by_ids: documents, rest: Pattern, n: int, start: int) -> Iterator[TileGroup]:
    waiting: list[Document] = []  # short ones, which will share a tile
    for (_, keys), equal in groupby(_documents(of_row, n, start), key=lambda one: (one.rows, one.keys)):
        group = list(equal)
        if sum(one.keys for one in waiting) + len(group) * keys > MAX_SHARED:
            yield from _shared_tile(waiting, by_ids, rest, start)
            waiting = []
        if len(group) * keys > MAX_SHARED:
            yield from _own_tiles(group[0], len(group), rest, start)
        else:
            waiting += group
    yield from _shared_tile(waiting, by_ids, rest, start)


def _shared_tile(short: list[Document], by_ids: documents, rest: Pattern, start: int) -> Iterator[TileGroup]:
    if len(short) == 1:
        yield from _own_tiles(short[0], 1, rest, start)
    elif short:
        first, last = short[0], short[-1]
        rows, keys = last.row + last.rows - first.row, last.key + last.keys - first.key
        yield _tiles(Document(first.row, rows, first.key, keys), 1, by_ids & rest, start)


def _own_tiles(one: Document, tiles: int, rest: Pattern, start: int) -> Iterator[TileGroup]:
    """Documents of one length that follow one another."""
    if isinstance(rest, full | causal) or one.rows * one.keys <= MAX_TILE**2:
        yield _tiles(one, tiles, None if isinstance(rest, full) else rest, start)
        return
    try:
        alone = layout(rest, one.rows, one.keys, start + one.row - one.key, 1)
    except NoPlan:
        yield _tiles(one, tiles, rest, start)
        return
    for t in range(tiles):
        for group in alone.groups:
            row, key = one.row + t * one.rows, one.key + t * one.keys
            yield replace(group, row=group.row + row, key=group.key + key, start=start)


def _tiles(one: Document, tiles: int, masked_by: Pattern | None, start: int) -> TileGroup:
    of_rows, of_keys = (one.row, one.rows, 1, one.rows), (one.key, one.keys, 1, one.keys)
    return TileGroup(tiles, *of_rows, *of_keys, masked_by, start, 1)

"""Packed sequences on the CPU: each document attends to itself alone, so n positions cost Σ length², not n².

Contiguous ids cut the axis into stretches. Neighbours of one length are a batch of tiles; short ones of different
lengths share a tile, masked by their ids; a long one is laid out as if it stood alone.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import reduce
from itertools import groupby
from operator import and_
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from torch import Tensor

from ...pattern import At, Both, Pattern, causal, documents, full, query_offset
from ..plan.planner import NoPlan
from .batch import Batch, Program
from .batches import program

SHARED = 128  # keys of documents that share a tile: so many are quicker computed than called one by one
ALONE = 512  # a longer document is planned, as it would be alone; a shorter one is one tile, masked

Stretch = tuple[int, int]  # the first key of a document, and the first past it


def parts(pattern: Pattern) -> tuple[documents, Pattern] | None:
    """`documents(ids) & rest`, where rest is the same wherever a document begins; else None."""
    factors = list(_factors(pattern))
    found = [f for f in factors if isinstance(f, documents)]
    rest = [f for f in factors if not isinstance(f, documents)]
    if len(found) != 1 or any(f.shift_period != 1 for f in rest):  # a document may begin anywhere
        return None
    return found[0], reduce(and_, rest) if rest else full()


def written(pattern: Pattern) -> tuple[Tensor, str]:
    """The ids of `documents(ids) & rest`, and the factors of rest as they are written, a line each."""
    factors = list(_factors(pattern))
    ids = [f.ids for f in factors if isinstance(f, documents)]
    return ids[0], "\n".join([f.text for f in factors if f.text is not None])


def _factors(pattern: Pattern) -> Iterator[Pattern]:
    if isinstance(pattern, Both):
        yield from _factors(pattern.left)
        yield from _factors(pattern.right)
    else:
        yield pattern


_made: WeakKeyDictionary[documents, dict] = WeakKeyDictionary()


def programs(pattern: Pattern, n: int, m: int, at: At = None) -> tuple[Program, ...] | None:
    """One program for all batch rows, or one each; None where the ids of a document do not follow one another.

    Remembered as long as the ids are there and unchanged.
    """
    split = parts(pattern)
    if split is None or split[0].ids.device.type != "cpu":
        return None
    which, rest = split
    which.fits(m)
    start, step = query_offset(pattern, n, m, at)
    if step != 1:
        return None
    if which.ids.is_inference():  # no version is counted there
        return layouts(which.ids, rest, n, m, start)
    key = (rest, n, m, start)
    made = _made.setdefault(which, {})
    if key not in made or made[key][0] != which.ids._version:
        made[key] = which.ids._version, layouts(which.ids, rest, n, m, start)
    return made[key][1]


def layouts(ids: Tensor, rest: Pattern, n: int, m: int, start: int) -> tuple[Program, ...] | None:
    rows = ids.reshape(-1, m)
    found = [stretches(row) for row in rows.numpy()]
    if not all(found):
        return None
    return tuple(
        Program(n, m, start, 1, tuple(_batches(some, documents(row), rest, n, start)))
        for row, some in zip(rows, found)
        if some is not None
    )


def stretches(ids: np.ndarray) -> list[Stretch] | None:
    """Where each document begins and ends; None where one is in two places, or there are no keys."""
    if not len(ids):
        return None
    first = np.flatnonzero(np.append(True, ids[1:] != ids[:-1]))
    if len(np.unique(ids[first])) < len(first):
        return None
    return list(zip(first.tolist(), [*first[1:].tolist(), len(ids)]))


class Piece(NamedTuple):
    """The queries and keys of one document."""

    row: int
    rows: int
    key: int
    keys: int


def _pieces(found: list[Stretch], n: int, start: int) -> Iterator[Piece]:
    """Documents without a query are left out; a query past the last document looks nowhere."""
    for a, b in found:
        row, end = max(a - start, 0), min(b - start, n)
        if row < end:
            yield Piece(row, end - row, a, b - a)


def _batches(found: list[Stretch], which: documents, rest: Pattern, n: int, start: int) -> Iterator[Batch]:
    held: list[Piece] = []  # short ones, which will share a tile
    for (_, keys), group in groupby(_pieces(found, n, start), key=lambda one: (one.rows, one.keys)):
        alike = list(group)
        if len(alike) * keys > SHARED:
            yield from _shared(held, which, rest, start)
            yield from _laid(alike[0], len(alike), rest, start)
            held = []
            continue
        if sum(one.keys for one in held) + len(alike) * keys > SHARED:
            yield from _shared(held, which, rest, start)
            held = []
        held += alike
    yield from _shared(held, which, rest, start)


def _shared(held: list[Piece], which: documents, rest: Pattern, start: int) -> Iterator[Batch]:
    if len(held) < 2:
        yield from (batch for one in held for batch in _laid(one, 1, rest, start))
        return
    first, last = held[0], held[-1]
    whole = Piece(first.row, last.row + last.rows - first.row, first.key, last.key + last.keys - first.key)
    yield _tile(whole, 1, which & rest, start)


def _laid(one: Piece, tiles: int, rest: Pattern, start: int) -> Iterator[Batch]:
    """Documents of one length that follow one another."""
    if isinstance(rest, full | causal) or one.rows * one.keys <= ALONE**2:
        yield _tile(one, tiles, None if isinstance(rest, full) else rest, start)
        return
    try:
        alone = program(rest, one.rows, one.keys, start + one.row - one.key, 1)
    except NoPlan:
        yield _tile(one, tiles, rest, start)
        return
    for t in range(tiles):
        for batch in alone.batches:
            row, key = one.row + t * one.rows, one.key + t * one.keys
            yield replace(batch, row=batch.row + row, key=batch.key + key, start=start)


def _tile(one: Piece, tiles: int, masked_by: Pattern | None, start: int) -> Batch:
    return Batch(tiles, one.row, one.rows, 1, one.rows, one.key, one.keys, 1, one.keys, masked_by, start, 1)

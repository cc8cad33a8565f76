"""From a pattern to batches: the plan's tiles that look alike, found without looking at each mask.

Tiles whose rows and keys advance by a constant are one batch if their masks are the same; a shift that keeps
every distance and residue in the pattern keeps the mask.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from math import gcd, lcm

import numpy as np

from ...pattern import Pattern, Relation, every
from ...progression import FAR, Ints
from ..plan.planner import Pass, Plan, plan
from ..plan.tiles import NoPlan, relations
from .batch import NARROW, WIDE, Batch, Program, lanes, working

MANY = 1024  # batches: so many are not laid out where a comb can stand apart, quicker wherever tried

__all__ = ["Batch", "Program", "alike", "lanes", "of_plans", "program", "ways", "working"]


@lru_cache(maxsize=64)
def program(
    pattern: Pattern, n: int, m: int, start: int, step: int, narrow: int = NARROW, wide: int = WIDE
) -> Program:
    """The quickest of a few ways to lay the tiles of a pattern without data."""
    found, reasons = [], []
    for tile in (narrow, wide):
        try:
            found += [way for _, way in ways(pattern, n, m, start, step, tile, wide)]
        except NoPlan as why:
            reasons.append(why)
    if not found:
        raise reasons[0]
    return min(found, key=lambda one: one.nanoseconds())


@lru_cache(maxsize=8)  # asked for twice in one choice: here, and by stretches.py
def ways(
    pattern: Pattern, n: int, m: int, start: int, step: int, tile: int, wide: int
) -> tuple[tuple[Plan, Program], ...]:
    """Tiles of the pattern as it is, or of what a comb leaves beside that comb; each with the plan of those tiles."""
    whole = plan(pattern, n, m, start, step, tile)
    found = []
    for comb in _combs(whole):
        try:
            teeth = plan(pattern & comb, n, m, start, step, wide)
            rest = plan(pattern - comb, n, m, start, step, tile)
        except NoPlan:
            continue
        found.append((rest, of_plans(teeth, rest)))
    if not found or _shapes(whole) <= MANY:
        found.insert(0, (whole, of_plans(whole)))
    return tuple(found)


def _shapes(whole: Plan) -> int:
    """How many batches there are at least."""
    return sum(len(np.unique(one.parts[:, 1:], axis=0)) for one in whole.passes)


def of_plans(*plans: Plan) -> Program:
    """Plans of disjoint sets of pairs, as batches."""
    batches = [
        batch for each in plans for one in each.passes for batch in _batches(one, each.start, each.step)
    ]
    first = plans[0]
    return Program(first.n, first.m, first.start, first.step, tuple(_together(batches)))


def _together(batches: list[Batch]) -> Iterator[Batch]:
    """Stretches of rows that see the same keys in full and follow one another, as one: the last tile is shorter."""
    stretches: dict[tuple[int, ...], list[Batch]] = defaultdict(list)
    for batch in batches:
        if batch.masked_by is None and batch.one_stretch:
            one = batch.as_one()
            stretches[one.key, one.key_step, one.keys, one.row_step].append(one)
        else:
            yield batch
    for alike in stretches.values():
        held, *others = sorted(alike, key=lambda one: one.row)
        for one in others:
            if held.row + held.rows * held.row_step == one.row:
                held = replace(held, rows=held.rows + one.rows)
            else:
                yield held
                held = one
        yield held


def _combs(whole: Plan) -> list[every]:
    """Every k-th key, where tiles of neighbours see those in full: apart from the rest they make one batch."""
    found = set()
    for one in whole.passes:
        hop = np.repeat(one.tiles[:, 1], np.diff(one.offsets))
        teeth = one.parts[(one.parts[:, 3] == 1) & (one.parts[:, 1] > 1) & (hop == 1)]
        first, k = teeth[:, 0], teeth[:, 1]
        found |= set(map(tuple, np.unique(np.column_stack([k, first % k]), axis=0).tolist()))
    return [every(k, offset) for k, offset in sorted(found)] if len(found) <= 2 else []


# From the parts of a pass to batches.


def _batches(one: Pass, start: int, step: int) -> Iterator[Batch]:
    groups: dict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
    alike: dict[tuple[int, ...], int] = defaultdict(int)
    for row, row_step, rows, key, key_step, keys, full in _segments(one):
        shape = (row_step, rows, key_step, keys, full)
        number = alike[row, *shape]  # parts of one tile never share a batch: rows are written once a call
        alike[row, *shape] += 1
        groups[*shape, number].append((row, key))
    for (row_step, rows, key_step, keys, full, _), corners in groups.items():
        for row, key, row_hop, key_hop, tiles in _runs(sorted(corners)):
            by = None if full else one.pattern
            batch = Batch(tiles, row, row_hop, row_step, rows, key, key_hop, key_step, keys, by, start, step)
            yield from [batch] if full or tiles == 1 else _alike(batch, one.pattern)


def _segments(one: Pass) -> Iterator[tuple[int, ...]]:
    """(row, row step, rows, key, key step, keys, full) of each part; parts that touch are one where that pays."""
    tile_of = np.repeat(np.arange(len(one.tiles)), np.diff(one.offsets))
    shapes = defaultdict(set)  # where in each tile full parts of one shape begin
    for t, (key, key_step, keys, full) in zip(tile_of.tolist(), one.parts.tolist()):
        if full:
            shapes[t, key_step, keys].add(key)

    def moves(t: int, key: int, key_step: int, keys: int) -> bool:
        """Whether a neighbouring tile has the same part further on: then one mask serves all tiles."""
        return any(other != key for s in (t - 1, t + 1) for other in shapes.get((s, key_step, keys), ()))

    tiles, parts = one.tiles.tolist(), one.parts.tolist()
    for t, (low, high) in enumerate(zip(one.offsets[:-1].tolist(), one.offsets[1:].tolist())):
        held: list[int] | None = None
        for key, key_step, keys, full in parts[low:high]:
            fixed = bool(full) and not moves(t, key, key_step, keys)
            if held and not fixed and held[1] == key_step and held[0] + key_step * held[2] == key:
                held[2] += keys
                held[3] &= full
                continue
            if held:
                yield *tiles[t], *held
            held = None if fixed else [key, key_step, keys, full]
            if fixed:
                yield *tiles[t], key, key_step, keys, full
        if held:
            yield *tiles[t], *held


def _runs(corners: list[tuple[int, int]]) -> Iterator[tuple[int, int, int, int, int]]:
    """(row, key, row hop, key hop, tiles): stretches of first rows and keys that advance by constants."""
    at: Ints = np.array(corners, dtype=np.int64)
    hops = np.diff(at, axis=0)
    same = np.ones(len(hops), dtype=bool)  # hop t is as hop t − 1
    same[1:] = (hops[1:] == hops[:-1]).all(axis=1)
    changes = np.append(np.flatnonzero(~same), len(hops)).tolist()
    low, c = 0, 0
    while low < len(at):
        row, key = at[low].tolist()
        if low == len(at) - 1 or hops[low, 1] < 0:  # a view cannot walk backwards
            yield row, key, 0, 0, 1
            low += 1
            continue
        while changes[c] <= low:
            c += 1
        high = changes[c] + 1
        yield row, key, *hops[low].tolist(), high - low
        low = high


# Tiles whose tables of allowed pairs are the same.


def _alike(batch: Batch, pattern: Pattern) -> Iterator[Batch]:
    """A batch masked by a pattern, cut into batches whose tiles all have the mask of their first."""
    for low, high, cycle in alike(batch, pattern):
        for phase in range(low, min(low + cycle, high)):
            yield batch.tile(phase, len(range(phase, high, cycle)), cycle)


def alike(batch: Batch, pattern: Pattern) -> Iterator[tuple[int, int, int]]:
    """(first, end, cycle): stretches of tiles in which tile t has the mask of tile t + cycle."""
    words = list(relations(pattern, by_keys=False).values())
    di, dj = batch.step * batch.row_hop, batch.key_hop
    period = lcm(*(_period(word, di, dj) for word in words))  # 0: no tile is like another
    cut = _cuts(batch, words) if period else range(batch.tiles)
    edges = sorted({0, batch.tiles, *cut, *(t + 1 for t in cut)})
    for low, high in pairwise(edges):
        yield low, high, min(max(period, 1), high - low)


def _period(word: Relation, di: int, dj: int) -> int:
    """The least p for which a shift by p·(di, dj) changes neither residue nor distance; 0: none does."""
    band = word.near > -FAR or word.far < FAR or word.blocks
    if band and di != dj:
        return 0
    steps = [
        (word.query_class[0], di),
        (word.key_class[0], dj),
        (word.divisor, di - dj),
        *((size, di) for size in word.blocks),
    ]
    return lcm(*(k // gcd(k, by) for k, by in steps))


def _cuts(batch: Batch, words: list[Relation]) -> Sequence[int]:
    """The tiles in which a word with a fixed end has that end between two rows or two keys, or that start there."""
    t = np.arange(batch.tiles)
    i = batch.start + batch.step * (batch.row + batch.row_hop * t)
    j = batch.key + batch.key_hop * t
    last_i = i + batch.step * batch.row_step * (batch.rows - 1)
    last_j = j + batch.key_step * (batch.keys - 1)
    inside = np.zeros(batch.tiles, dtype=bool)
    turned = np.zeros(batch.tiles, dtype=bool)
    for word in words:
        for end, first, last in ((word.query_below, i, last_i), (word.key_below, j, last_j)):
            inside |= (first < end) & (end <= last)
            turned[1:] |= (first[:-1] < end) != (first[1:] < end)
    return np.flatnonzero(inside | turned).tolist()

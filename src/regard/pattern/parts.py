"""The progressions of each tile: what the words of a pattern ask of the other axis, divided into parts.

A tile is a run of positions x on one axis; its keys (in a plan by keys, its query rows) are positions y on the other.
For a tile, a word gives an *outer* interval of y (allowed for some x of the tile), an *inner* one (for all), and
perhaps a residue. Relations are read with x as the query; a plan by keys transposes them first.

The ends of all intervals cut the other axis into cells in which every word is all, some or none. In each cell the
pattern's own expression is evaluated in three values, once for every outcome of the residue tests; what is not none
becomes progressions: full where all, partial where some. Neighboring cells are merged where that is cheaper.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import gcd, lcm

import numpy as np
from numpy.typing import NDArray

from ..progression import FAR, Ints, PerQuery, Progression, ranks, solve
from .algebra import Pattern
from .relation import Relation
from .word import Word

LIMITS = {
    "positions": 1 << 40,
    "tiles": 1 << 18,
    "cells": 1 << 23,
    "outcomes": 12,
    "residues": 1 << 17,
    "words": 16,
    "lines": 1 << 13,
    "bits": 31,
}


class NoPlan(Exception):
    """No short list of progressions describes this pattern; the message is the reason that `explain` gives."""


def limit(what: str, got: int, why: str) -> None:
    if got > LIMITS[what]:
        raise NoPlan(f"{why}: {got} {what}, and the planner stops at {LIMITS[what]}")


def relations(pattern: Pattern, by_keys: bool) -> dict[Pattern, Relation]:
    """The relation of each word of the pattern, in reading order; transposed in a plan by keys."""
    out: dict[Pattern, Relation] = {}
    for word in dict.fromkeys(pattern.leaves()):
        if not isinstance(word, Word):
            raise NoPlan(f"{word!r} carries data, so its keys are known only when it runs")
        relation = word.relation
        if relation.largest > LIMITS["positions"]:  # writing the word takes longer than the rest of this loop
            limit("positions", relation.largest, f"{word!r} reaches beyond any sequence")
        out[word] = relation.transposed() if by_keys else relation
    return out


def residue_period(relation: Relation) -> int:
    """The distance at which rows agree in every residue of x that the relation depends on."""
    return lcm(relation.query_class[0], relation.divisor)


def row_steps(pattern: Pattern, step: int, by_keys: bool) -> list[int]:
    """The steps between the rows of a tile that are worth trying: 1, or a step at which a word's residues agree.

    step: between the positions of two queries.
    """
    try:
        periods = {residue_period(relation) for relation in relations(pattern, by_keys).values()}
    except NoPlan:
        return [1]
    apart = 1 if by_keys else step
    return sorted({1, *(period // gcd(period, apart) for period in periods)})


def common_row_step(pattern: Pattern, step: int, by_keys: bool) -> int:
    """The step at which all rows of a tile agree in every residue; 1 where it is out of reach."""
    period = lcm(*(residue_period(r) for r in relations(pattern, by_keys).values()))
    return period // gcd(period, step) if period < FAR else 1


@dataclass(frozen=True)
class Axis:
    """Index r of count is at position start + step · r."""

    count: int
    start: int = 0
    step: int = 1

    def index(self, position: PerQuery) -> Ints:
        """The first index at or after a position, within 0 … count."""
        index = position - self.start if self.step == 1 else -((self.start - position) // self.step)
        return np.asarray(np.minimum(np.maximum(index, 0), self.count))


@dataclass(frozen=True, eq=False)
class Tiles:
    """Runs of rows of one axis: first row, one row step for all, number of rows."""

    axis: Axis
    row_step: int
    first: Ints
    rows: Ints

    @cached_property
    def low(self) -> Ints:
        return self.axis.start + self.axis.step * self.first

    @cached_property
    def high(self) -> Ints:
        return self.low + self.stride * (self.rows - 1)

    @property
    def stride(self) -> int:
        """From one position of a tile to the next; 0 where there is one row, which agrees with itself."""
        return self.axis.step * self.row_step if self.axis.count > 1 else 0

    def sample(self, max_tiles: int) -> "Tiles":
        by = -(-len(self.first) // max_tiles) or 1
        return replace(self, first=self.first[::by], rows=self.rows[::by])


def cut_tiles(axis: Axis, tile: int, row_step: int, cuts: Ints) -> Tiles:
    """Tiles of at most `tile` rows, all of one residue class mod row_step, none across a cut (a row index)."""
    edges = np.unique(np.concatenate([[0], cuts, [axis.count]]).astype(np.int64))
    classes = np.arange(min(row_step, axis.count), dtype=np.int64)
    limit("tiles", (len(edges) - 1) * len(classes), f"one residue class mod {row_step} per tile")
    begin, end = edges[:-1, None], edges[1:, None]
    first = begin + (classes - begin) % row_step
    count = np.maximum(-((first - end) // row_step), 0).ravel()
    tiles = -(-count // tile)
    limit("tiles", int(tiles.sum()), f"{axis.count} rows in tiles of {tile}, row step {row_step}")
    run = np.repeat(np.arange(len(tiles)), tiles)
    nth = ranks(tiles)
    first = first.ravel()[run] + nth * tile * row_step
    return Tiles(axis, row_step, first, np.minimum(count[run] - nth * tile, tile))


@dataclass(frozen=True, eq=False)
class Bounds:
    """A word for each tile: y in [lo, hi) of outer and inner, y ≡ residue mod modulus."""

    outer: tuple[Ints, Ints]
    inner: tuple[Ints, Ints]
    modulus: int
    residue: Ints

    def value(self, lo: Ints) -> NDArray[np.int8]:
        """ALL, SOME or NONE of the cells that start at lo, where the residue is right."""
        (a, b), (c, d) = self.outer, self.inner
        outer = (lo >= a[:, None]) & (lo < b[:, None])
        return outer.astype(np.int8) + ((lo >= c[:, None]) & (lo < d[:, None]))


def bounds(relation: Relation, tiles: Tiles, ys: Axis) -> Bounds:
    """Outer and inner interval, and the residue of y, of one word for every tile."""
    x0, x1 = tiles.low, tiles.high
    (first_lo, first_hi), (last_lo, last_hi) = relation.ends(x0), relation.ends(x1)
    some, each = x0 < relation.query_below, x1 < relation.query_below
    for size in relation.blocks:
        each = each & (x0 // size == x1 // size)
    if relation.query_class[0] > 1:
        nth, by, right = solve(x0, tiles.stride, *relation.query_class)
        some = some & right & (nth < tiles.rows)
        each = each & right & (nth == 0) & ((by == 1) | (tiles.rows == 1))
    keys = Progression(0, 0, relation.key_class[1], relation.key_class[0])
    if relation.divisor > 1:
        shared = gcd(tiles.stride, relation.divisor)  # what all rows of a tile agree on
        each = each & (shared == relation.divisor)
        keys &= Progression(0, 0, x0 % shared, shared)  # hi < lo where the residues contradict each other
        limit("positions", keys.step, "two residues of one word")
    residue, modulus = np.zeros_like(x0), 1
    if keys.step > 1:
        nth, modulus, right = solve(np.full_like(x0, ys.start), ys.step, keys.step, keys.residue)
        residue = np.where(right, nth, FAR).astype(np.int64) % modulus
        some = some & right
    some = some & (keys.lo <= keys.hi)
    outer = _indices(ys, first_lo, last_hi, some, 0)
    inner = _indices(ys, last_lo, first_hi, some & each, outer[0])
    return Bounds(outer, inner, modulus, residue)


def _indices(
    ys: Axis, lo: PerQuery, hi: PerQuery, real: NDArray[np.bool_], empty: Ints | int
) -> tuple[Ints, Ints]:
    """The indices of the positions lo … hi, as a half-open interval; where there are none, one at `empty`."""
    lo, hi = ys.index(lo), ys.index(hi + 1)
    real = real & (lo < hi)
    return np.where(real, lo, empty), np.where(real, hi, empty)


# Cells, and from cells to parts.

NONE, SOME, ALL = 0, 1, 2  # Kleene's three values, so that & is min, | is max and ~ is 2 − v
MASKED_PAIR_COST = 1.25  # of a masked pair, in pairs
PART_COST = 32  # of one more part, per row, in pairs: to start a call or a loop, to merge partial results
MAX_PERIOD = 1 << 16  # residues that are distinguished
MAX_PARTS = 8  # parts a tile may have before `auto` masks instead; the planner pays double beyond

Cover = tuple[tuple[int, int, bool], ...]  # residue, step, full: disjoint progressions without ends


@dataclass(frozen=True, eq=False)
class Residues:
    """Which residues of y make which words true: `kinds` of tiles, equal up to a shift."""

    shift: Ints  # (t,): what to add to a residue of the tile's kind
    kind: Ints  # (t,)
    outcome: Ints  # (kinds, period): for each residue, an index into truths
    truths: list[frozenset[Pattern]]  # for each outcome, the words whose residue is right

    @classmethod
    def of(cls, words: dict[Pattern, Bounds], tiles: int) -> "Residues":
        some = {w: r for w, r in words.items() if r.modulus > 1}
        if not some:
            zeros = np.zeros(tiles, dtype=np.int64)
            return cls(zeros, zeros, np.zeros((1, 1), dtype=np.int64), [frozenset(words)])
        plain = frozenset(words) - frozenset(some)
        period = lcm(*(r.modulus for r in some.values()))
        largest = max(words.values(), key=lambda r: r.modulus)
        relative = {w: (r.residue - largest.residue) % r.modulus for w, r in some.items()}
        code = np.zeros(tiles, dtype=np.int64)
        for w, r in some.items():
            _, code = np.unique(code * r.modulus + relative[w], return_inverse=True)
        _, example, kind = np.unique(code, return_index=True, return_inverse=True)
        limit("residues", len(example) * period, "the residues of " + ", ".join(map(repr, some)))
        y = np.arange(period)
        truth = np.zeros((len(example), period), dtype=np.int64)
        for bit, (w, r) in enumerate(some.items()):
            truth += (y % r.modulus == relative[w][example, None]).astype(np.int64) << bit
        codes, outcome = np.unique(truth, return_inverse=True)
        limit("outcomes", len(codes), f"{len(some)} words with residues")
        truths = [plain | {w for bit, w in enumerate(some) if int(c) >> bit & 1} for c in codes]
        return cls(largest.residue, kind, outcome.reshape(truth.shape), truths)


def cut(words: dict[Pattern, Bounds], m: int) -> tuple[Ints, Ints]:
    """The cells of every tile, (t, c) first and past-the-last index: between any two ends of intervals."""
    distinct = {e.tobytes(): e for r in words.values() for e in (*r.outer, *r.inner)}
    ends = [e for e in distinct.values() if np.any((e > 0) & (e < m))]
    t = len(next(iter(words.values())).residue)
    limit("cells", t * (len(ends) + 1), f"{t} tiles with {len(words)} words")
    table = np.stack([np.zeros(t, np.int64), *ends, np.full(t, m, np.int64)], axis=1)
    table.sort(axis=1)
    return table[:, :-1], table[:, 1:]


@lru_cache(maxsize=256)
def cover(values: bytes) -> Cover:
    """A greedy choice of few disjoint progressions that hold exactly the residues whose value is not NONE."""
    left = np.frombuffer(values, dtype=np.int8).copy()
    period, chosen = len(left), []
    for step in (np.flatnonzero(period % np.arange(1, period + 1) == 0) + 1).tolist():  # its divisors
        table = left.reshape(-1, step)
        for residue in np.flatnonzero(table.min(axis=0) > NONE):
            chosen.append((int(residue), step, bool(table[:, residue].min() == ALL)))
            table[:, residue] = NONE
    return tuple(sorted(chosen))


@dataclass(frozen=True, eq=False)
class CoverTable:
    """The covers that occur, with what each costs and the one progression (its hull) that contains it."""

    covers: list[Cover]
    step: Ints  # of the hull
    residue: Ints
    slope: NDArray[np.float64]  # cost = slope · length + base
    base: Ints

    @classmethod
    def of(cls, covers: list[Cover]) -> "CoverTable":
        step = [gcd(*(k for _, k, _ in c), *(r - c[0][0] for r, _, _ in c)) for c in covers]
        residue = [c[0][0] % k for c, k in zip(covers, step)]
        slope = [sum((1 if full else MASKED_PAIR_COST) / k for _, k, full in c) for c in covers]
        penalty = np.array([1 if len(c) <= MAX_PARTS else 2 for c in covers])
        base = PART_COST * np.array([len(c) for c in covers])
        return cls(covers, np.array(step), np.array(residue), penalty * slope, penalty * base)


@dataclass(frozen=True, eq=False)
class Spans:
    """One run of cells in each tile: a cover of the table, or (HULL) one partial progression."""

    lo: Ints
    hi: Ints
    cover: Ints
    step: Ints
    residue: Ints
    cost: NDArray[np.float64]

    def where(self, take: NDArray[np.bool_], other: "Spans") -> "Spans":
        """self where take, elsewhere other."""
        if take.all():
            return self
        if not take.any():
            return other
        mine, theirs = vars(self), vars(other)
        return Spans(**{name: np.where(take, mine[name], theirs[name]) for name in mine})


NOTHING, HULL = -2, -1


def spans(table: CoverTable, cover: Ints, lo: Ints, hi: Ints, step: Ints, residue: Ints) -> Spans:
    """Spans: each as its cover (−1: it has none) or, where that is cheaper, as its hull."""
    exact = np.where(cover < 0, np.inf, table.slope[cover] * (hi - lo) + table.base[cover])
    hull = MASKED_PAIR_COST * (hi - lo) / step + PART_COST
    cheaper = np.where(exact <= hull, cover, HULL)
    return Spans(lo, hi, cheaper, step, residue % step, np.minimum(exact, hull))


def cells(table: CoverTable, cover: Ints, lo: Ints, hi: Ints, shift: Ints) -> Iterator[Spans]:
    """The columns of cells, which are rows of these tables."""
    every = spans(table, cover, lo, hi, table.step[cover], table.residue[cover] + shift)
    every.cover[cover < 0] = NOTHING
    return (Spans(*column) for column in zip(*vars(every).values()))


def merged(table: CoverTable, a: Spans, b: Spans) -> tuple[NDArray[np.bool_], Spans]:
    """Where one span from the start of a to the end of b is cheaper than both; and that span."""
    step = np.gcd(np.gcd(a.step, b.step), a.residue - b.residue)
    same = (a.cover == b.cover) & (a.cover >= 0) & (a.hi == b.lo)
    union = spans(table, np.where(same, a.cover, -1), a.lo, b.hi, step, a.residue)
    return same | (union.cost < a.cost + b.cost), union


def merge(table: CoverTable, columns: Iterator[Spans]) -> Iterator[Spans]:
    """Merge neighboring spans, left to right, wherever that is cheaper."""
    open_ = next(columns)
    for cell in columns:
        if (cell.cover == NOTHING).all():
            continue
        there, idle = cell.cover != NOTHING, open_.cover == NOTHING
        take, union = merged(table, open_, cell)
        both = there & ~idle
        take &= both
        closed = both & ~take
        if closed.any():
            yield replace(open_, cover=np.where(closed, open_.cover, NOTHING))
        open_ = union.where(take, cell.where(there, open_))
    yield open_


def emit(table: CoverTable, columns: list[Spans], shift: Ints) -> tuple[Ints, Ints]:
    """offsets and parts: every progression of every span, tile by tile, from left to right."""
    found: list[tuple[Ints, Ints]] = []
    for s in columns:
        at = np.flatnonzero(s.cover == HULL)
        if len(at) or not found:
            found.append(_parts_of(s, at, s.step[at], s.residue[at], False))
        for cover, progressions in enumerate(table.covers):
            at = np.flatnonzero(s.cover == cover)
            for residue, step, full in progressions if len(at) else ():
                found.append(_parts_of(s, at, step, (residue + shift[at]) % step, full))
    tile = np.concatenate([owner for owner, _ in found])
    order = np.argsort(tile, kind="stable")
    count = np.bincount(tile, minlength=len(shift))
    parts = np.concatenate([part for _, part in found])[order]
    return np.concatenate([[0], np.cumsum(count)]).astype(np.int64), parts


def _parts_of(s: Spans, at: Ints, step: Ints | int, residue: Ints, full: bool) -> tuple[Ints, Ints]:
    """One progression in the spans of the tiles `at`: the tiles in which it has a member, and its parts there."""
    first = s.lo[at] + (residue - s.lo[at]) % step
    count = -((first - s.hi[at]) // step)
    real = count > 0
    parts = np.empty((len(at), 4), dtype=np.int64)
    parts[:, 0], parts[:, 1], parts[:, 2], parts[:, 3] = first, step, count, full
    return (at, parts) if real.all() else (at[real], parts[real])


def divide(pattern: Pattern, tiles: Tiles, ys: Axis, by_keys: bool) -> tuple[Ints, Ints]:
    """offsets and parts of every tile: where the pattern is ALL a full part, where SOME a partial one."""
    words = _bounded({w: bounds(r, tiles, ys) for w, r in relations(pattern, by_keys).items()})
    residues = Residues.of(words, len(tiles.first))
    lo, hi = cut(words, ys.count)
    values = {w: r.value(lo) for w, r in words.items()}
    nothing = np.zeros_like(lo, dtype=np.int8)
    code = np.zeros_like(lo)
    for truth in reversed(residues.truths):  # the first outcome is the last digit
        value = {w: v if w in truth else nothing for w, v in values.items()}
        code = 3 * code + pattern.fold(value.__getitem__, np.minimum, np.maximum, lambda v: ALL - v)
    code[lo == hi] = 0
    table, index = _covers(code, residues)
    columns = cells(table, index.T, lo.T, hi.T, residues.shift)
    return emit(table, list(merge(table, columns)), residues.shift)


def _bounded(words: dict[Pattern, Bounds]) -> dict[Pattern, Bounds]:
    """Drop residues, from the last words on, once their common period exceeds MAX_PERIOD: those words are masked, as
    no y is certain to be allowed for all rows."""
    period, out = 1, dict(words)
    for w, r in words.items():
        if (common := lcm(period, r.modulus)) <= MAX_PERIOD:
            period = common
        else:
            out[w] = Bounds(r.outer, (r.outer[0], r.outer[0]), 1, np.zeros_like(r.residue))
    return out


def _covers(code: Ints, residues: Residues) -> tuple[CoverTable, Ints]:
    """The table of all covers that occur, and the index of each cell's cover (−1: no key is allowed there)."""
    outcomes = len(residues.truths)
    pairs, index = np.unique(residues.kind[:, None] * 3**outcomes + code, return_inverse=True)
    known: dict[Cover, int] = {}
    numbers = np.empty(len(pairs), dtype=np.int64)
    for at, (kind, number) in enumerate(divmod(int(p), 3**outcomes) for p in pairs):
        digits = (number // 3 ** np.arange(outcomes) % 3).astype(np.int8)
        made = cover(digits[residues.outcome[kind]].tobytes())
        numbers[at] = known.setdefault(made, len(known)) if made else -1
    return CoverTable.of(list(known) or [((0, 1, False),)]), numbers[index].reshape(code.shape)

"""The other axis of a tile, cut into cells in which every word of the pattern is all, some or none.

The ends of all outer and inner intervals (tiles.py) cut the axis into cells. In each cell the pattern's
own expression is evaluated in three values, once for every outcome of the residue tests; what is not
none becomes progressions: full where all, partial where some. Neighboring cells are merged where that is cheaper.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd, isqrt, lcm

import numpy as np
from numpy.typing import NDArray

from ...pattern import Pattern
from ...progression import Ints
from .tiles import Axis, Bounds, Tiles, bounds, limit, relations

NONE, SOME, ALL = 0, 1, 2  # Kleene's three values, so that & is min, | is max and ~ is 2 − v
MASKED_PAIR_COST = 1.25  # of a masked pair, in pairs
PART_COST = 32  # of one more part, per row, in pairs: a call or a loop starts, partial results are merged
MAX_PERIOD = 1 << 16  # residues that are distinguished
MAX_PARTS = 8  # parts a tile may have before `auto` masks instead; the planner pays double beyond

Cover = tuple[tuple[int, int, bool], ...]  # residue, step, full: disjoint progressions without ends


def kleene(pattern: Pattern, values: dict[Pattern, NDArray[np.int8]]) -> NDArray[np.int8]:
    """The value of a pattern from those of its words, where SOME means: it depends on the pair."""
    return pattern.fold(values.__getitem__, np.minimum, np.maximum, lambda v: ALL - v)


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
        plain = frozenset(words) - frozenset(some)
        if not some:
            zero = np.zeros(tiles, dtype=np.int64)
            return cls(zero, zero, np.zeros((1, 1), dtype=np.int64), [plain])
        period = lcm(*(r.modulus for r in some.values()))
        largest = max(some.values(), key=lambda r: r.modulus)
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
    for step in _divisors(period):
        table = left.reshape(-1, step)
        for residue in np.flatnonzero(table.min(axis=0) > NONE):
            chosen.append((int(residue), step, bool(table[:, residue].min() == ALL)))
            table[:, residue] = NONE
    return tuple(sorted(chosen))


def _divisors(k: int) -> list[int]:
    small = [d for d in range(1, isqrt(k) + 1) if k % d == 0]
    return sorted({*small, *(k // d for d in small)})


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
        mine, theirs = vars(self), vars(other)
        return Spans(**{name: np.where(take, mine[name], theirs[name]) for name in mine})


NOTHING, HULL = -2, -1


def spans(table: CoverTable, cover: Ints, lo: Ints, hi: Ints, shift: Ints) -> Spans:
    """A column of cells: each as its cover or, where that is cheaper, as its hull."""
    step = table.step[cover]
    residue = (table.residue[cover] + shift) % step
    exact = table.slope[cover] * (hi - lo) + table.base[cover]
    hull = MASKED_PAIR_COST * (hi - lo) / step + PART_COST
    cover = np.where(cover < 0, NOTHING, np.where(exact <= hull, cover, HULL))
    return Spans(lo, hi, cover, step, residue, np.minimum(exact, hull))


def merged(table: CoverTable, a: Spans, b: Spans) -> tuple[NDArray[np.bool_], Spans]:
    """Where one span from the start of a to the end of b is cheaper than both; and that span."""
    step = np.gcd(np.gcd(a.step, b.step), a.residue - b.residue)
    hull = MASKED_PAIR_COST * (b.hi - a.lo) / step + PART_COST
    same = (a.cover == b.cover) & (a.cover >= 0) & (a.hi == b.lo)
    at = np.maximum(a.cover, 0)
    exact = np.where(same, table.slope[at] * (b.hi - a.lo) + table.base[at], np.inf)
    cover = np.where(exact <= hull, a.cover, HULL)
    cost = np.minimum(exact, hull)
    return same | (cost < a.cost + b.cost), Spans(a.lo, b.hi, cover, step, a.residue % step, cost)


def merge(table: CoverTable, columns: Iterator[Spans]) -> Iterator[Spans]:
    """Merge neighboring spans, left to right, wherever that is cheaper."""
    open_ = next(columns)
    for cell in columns:
        if (cell.cover == NOTHING).all():
            continue
        there, idle = cell.cover != NOTHING, open_.cover == NOTHING
        take, union = merged(table, open_, cell)
        take &= there & ~idle
        closed = there & ~take & ~idle
        if closed.any():
            yield replace(open_, cover=np.where(closed, open_.cover, NOTHING))
        open_ = union.where(take, cell.where(there, open_))
    yield open_


def emit(table: CoverTable, columns: list[Spans], shift: Ints) -> tuple[Ints, Ints]:
    """offsets and parts: every progression of every span, tile by tile, from left to right."""
    found = []
    for s in columns:
        at = np.flatnonzero(s.cover == HULL)
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
    return at[real], np.stack(np.broadcast_arrays(first, step, count, int(full)), axis=1)[real]


def divide(pattern: Pattern, tiles: Tiles, ys: Axis, by_keys: bool) -> tuple[Ints, Ints]:
    """offsets and parts of every tile: where the pattern is ALL a full part, where SOME a partial one."""
    words = _bounded({w: bounds(r, tiles, ys) for w, r in relations(pattern, by_keys).items()})
    residues = Residues.of(words, len(tiles.first))
    lo, hi = cut(words, ys.count)
    values = {w: r.value(lo) for w, r in words.items()}
    nothing = np.zeros_like(lo, dtype=np.int8)
    code = np.zeros_like(lo)
    for truth in reversed(residues.truths):  # the first outcome is the last digit
        code = 3 * code + kleene(pattern, {w: v if w in truth else nothing for w, v in values.items()})
    code[lo == hi] = 0
    table, index = _covers(code, residues)
    columns = (spans(table, index[:, c], lo[:, c], hi[:, c], residues.shift) for c in range(lo.shape[1]))
    return emit(table, list(merge(table, columns)), residues.shift)


def _bounded(words: dict[Pattern, Bounds]) -> dict[Pattern, Bounds]:
    """Drop residues, from the last words on, once their common period exceeds MAX_PERIOD: those words are masked."""
    period, out = 1, {}
    for w, r in words.items():
        common = lcm(period, r.modulus)
        out[w] = r if common <= MAX_PERIOD else r.without_residue()
        period = common if common <= MAX_PERIOD else period
    return out


def _covers(code: Ints, residues: Residues) -> tuple[CoverTable, Ints]:
    """The table of all covers that occur, and the index of each cell's cover (−1: no key is allowed there)."""
    outcomes = len(residues.truths)
    codes, nth = _distinct(code, 3**outcomes)
    pairs, index = _distinct(residues.kind[:, None] * len(codes) + nth, len(residues.outcome) * len(codes))
    known: dict[Cover, int] = {}
    numbers = np.empty(len(pairs), dtype=np.int64)
    for at, (kind, which) in enumerate(divmod(int(p), len(codes)) for p in pairs):
        digits = (codes[which] // 3 ** np.arange(outcomes) % 3).astype(np.int8)
        made = cover(digits[residues.outcome[kind]].tobytes())
        numbers[at] = known.setdefault(made, len(known)) if made else -1
    return CoverTable.of(list(known) or [((0, 1, False),)]), numbers[index]


def _distinct(values: Ints, below: int) -> tuple[Ints, Ints]:
    """np.unique with return_inverse for values in 0 … below − 1, without sorting."""
    distinct = np.flatnonzero(np.bincount(values.ravel(), minlength=below))
    number = np.zeros(below, dtype=np.int64)
    number[distinct] = np.arange(len(distinct))
    return distinct, number[values]

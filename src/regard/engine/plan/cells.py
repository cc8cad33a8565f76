"""The other axis of a tile, cut into cells in which every word of the pattern is all, some or none.

The ends of all outer and inner intervals (relations.py) cut the axis into cells. In each cell the pattern's
own expression is evaluated in three values, once for every way the residues can come out; what is not none
becomes progressions: full where all, ragged where some. Neighbouring cells join where that is cheaper.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd, isqrt, lcm

import numpy as np
from numpy.typing import NDArray

from ...pattern import Both, Either, Not, Pattern
from ...progression import Ints
from .tiles import Axis, Reading, Tiles, limit, read, relations

NONE, SOME, ALL = 0, 1, 2  # Kleene's values, so that & is min, | is max and ~ is 2 − v
RAGGED = 1.25  # what a masked pair costs, in pairs
PART = 32  # what one more part costs a row, in pairs: a call or a loop starts, partial results are joined
PERIOD = 1 << 16  # the most residues told apart
MOST = 8  # parts a tile may have before `auto` masks instead; the planner pays double to stay below

Cover = tuple[tuple[int, int, bool], ...]  # residue, step, full: disjoint progressions without ends


def kleene(pattern: Pattern, values: dict[Pattern, NDArray[np.int8]]) -> NDArray[np.int8]:
    """The value of a pattern from those of its words, where SOME means: it depends on the pair."""
    match pattern:
        case Both():
            return np.minimum(kleene(pattern.left, values), kleene(pattern.right, values))
        case Either():
            return np.maximum(kleene(pattern.left, values), kleene(pattern.right, values))
        case Not():
            return ALL - kleene(pattern.inner, values)
        case _:
            return values[pattern]


@dataclass(frozen=True, eq=False)
class Residues:
    """Which residues of y make which words true: `kinds` of tiles, alike up to a shift."""

    shift: Ints  # (t,): what to add to a residue of the tile's kind
    kind: Ints  # (t,)
    outcome: Ints  # (kinds, period): for each residue, an index into truths
    truths: list[frozenset[Pattern]]  # for each outcome, the words whose residue is right

    @classmethod
    def of(cls, readings: dict[Pattern, Reading], tiles: int) -> "Residues":
        some = {w: r for w, r in readings.items() if r.modulus > 1}
        whole = frozenset(readings) - frozenset(some)
        if not some:
            zero = np.zeros(tiles, dtype=np.int64)
            return cls(zero, zero, np.zeros((1, 1), dtype=np.int64), [whole])
        period = lcm(*(r.modulus for r in some.values()))
        widest = max(some.values(), key=lambda r: r.modulus)
        relative = {w: (r.residue - widest.residue) % r.modulus for w, r in some.items()}
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
        truths = [whole | {w for bit, w in enumerate(some) if int(c) >> bit & 1} for c in codes]
        return cls(widest.residue, kind, outcome.reshape(truth.shape), truths)


def cut(readings: dict[Pattern, Reading], m: int) -> tuple[Ints, Ints]:
    """The cells of every tile, (t, c) first and past-the-last index: between any two ends of intervals."""
    distinct = {e.tobytes(): e for r in readings.values() for e in (*r.outer, *r.inner)}
    ends = [e for e in distinct.values() if np.any((e > 0) & (e < m))]
    t = len(next(iter(readings.values())).residue)
    limit("cells", t * (len(ends) + 1), f"{t} tiles with {len(readings)} words")
    table = np.stack([np.zeros(t, np.int64), *ends, np.full(t, m, np.int64)], axis=1)
    table.sort(axis=1)
    return table[:, :-1], table[:, 1:]


@lru_cache(maxsize=256)
def cover(values: bytes) -> Cover:
    """As few disjoint progressions as greed finds that hold exactly the residues whose value is not NONE."""
    left = np.frombuffer(values, dtype=np.int8).copy()
    period, found = len(left), []
    for step in _divisors(period):
        table = left.reshape(-1, step)
        for residue in np.flatnonzero(table.min(axis=0) > NONE):
            found.append((int(residue), step, bool(table[:, residue].min() == ALL)))
            table[:, residue] = NONE
    return tuple(sorted(found))


def _divisors(k: int) -> list[int]:
    small = [d for d in range(1, isqrt(k) + 1) if k % d == 0]
    return sorted({*small, *(k // d for d in small)})


@dataclass(frozen=True, eq=False)
class Book:
    """The covers that occur, with what each costs and the one progression (its hull) that holds it."""

    covers: list[Cover]
    step: Ints  # of the hull
    residue: Ints
    slope: NDArray[np.float64]  # cost = slope · length + base
    base: Ints

    @classmethod
    def of(cls, covers: list[Cover]) -> "Book":
        step = [gcd(*(k for _, k, _ in c), *(r - c[0][0] for r, _, _ in c)) for c in covers]
        residue = [c[0][0] % k for c, k in zip(covers, step)]
        slope = [sum((1 if whole else RAGGED) / k for _, k, whole in c) for c in covers]
        dear = np.array([1 if len(c) <= MOST else 2 for c in covers])
        base = PART * np.array([len(c) for c in covers])
        return cls(covers, np.array(step), np.array(residue), dear * slope, dear * base)


@dataclass(frozen=True, eq=False)
class Segments:
    """One stretch of cells in each tile: a cover of the book, or (page HULL) one ragged progression."""

    lo: Ints
    hi: Ints
    page: Ints
    step: Ints
    residue: Ints
    cost: NDArray[np.float64]

    def where(self, take: NDArray[np.bool_], other: "Segments") -> "Segments":
        """self where take, elsewhere other."""
        mine, theirs = vars(self), vars(other)
        return Segments(**{name: np.where(take, mine[name], theirs[name]) for name in mine})


NOTHING, HULL = -2, -1


def segments(book: Book, page: Ints, lo: Ints, hi: Ints, shift: Ints) -> Segments:
    """A column of cells: each as its cover or, where that is cheaper, as its hull."""
    step = book.step[page]
    residue = (book.residue[page] + shift) % step
    exact = book.slope[page] * (hi - lo) + book.base[page]
    hull = RAGGED * (hi - lo) / step + PART
    page = np.where(page < 0, NOTHING, np.where(exact <= hull, page, HULL))
    return Segments(lo, hi, page, step, residue, np.minimum(exact, hull))


def joined(book: Book, a: Segments, b: Segments) -> tuple[NDArray[np.bool_], Segments]:
    """Where one stretch from the start of a to the end of b is cheaper than both; and that stretch."""
    step = np.gcd(np.gcd(a.step, b.step), a.residue - b.residue)
    hull = RAGGED * (b.hi - a.lo) / step + PART
    same = (a.page == b.page) & (a.page >= 0) & (a.hi == b.lo)
    at = np.maximum(a.page, 0)
    exact = np.where(same, book.slope[at] * (b.hi - a.lo) + book.base[at], np.inf)
    page = np.where(exact <= hull, a.page, HULL)
    cost = np.minimum(exact, hull)
    return same | (cost < a.cost + b.cost), Segments(a.lo, b.hi, page, step, a.residue % step, cost)


def merge(book: Book, columns: Iterator[Segments]) -> Iterator[Segments]:
    """Join neighbouring stretches, left to right, wherever that is cheaper."""
    open_ = next(columns)
    for cell in columns:
        if (cell.page == NOTHING).all():
            continue
        there, idle = cell.page != NOTHING, open_.page == NOTHING
        take, both = joined(book, open_, cell)
        take &= there & ~idle
        closed = there & ~take & ~idle
        if closed.any():
            yield replace(open_, page=np.where(closed, open_.page, NOTHING))
        open_ = both.where(take, cell.where(there, open_))
    yield open_


def emit(book: Book, found: list[Segments], shift: Ints) -> tuple[Ints, Ints]:
    """offsets and parts: every progression of every stretch, tile by tile, from left to right."""
    owner, parts = [], []

    def add(s: Segments, at: Ints, step: Ints | int, residue: Ints, whole: bool) -> None:
        first = s.lo[at] + (residue - s.lo[at]) % step
        count = -((first - s.hi[at]) // step)
        real = count > 0
        owner.append(at[real])
        parts.append(np.stack(np.broadcast_arrays(first, step, count, int(whole)), axis=1)[real])

    for s in found:
        at = np.flatnonzero(s.page == HULL)
        add(s, at, s.step[at], s.residue[at], False)
        for page, progressions in enumerate(book.covers):
            at = np.flatnonzero(s.page == page)
            for residue, step, whole in progressions if len(at) else ():
                add(s, at, step, (residue + shift[at]) % step, whole)
    tile = np.concatenate(owner)
    order = np.argsort(tile, kind="stable")
    many = np.bincount(tile, minlength=len(shift))
    return np.concatenate([[0], np.cumsum(many)]).astype(np.int64), np.concatenate(parts)[order]


def divide(pattern: Pattern, tiles: Tiles, ys: Axis, swap: bool) -> tuple[Ints, Ints]:
    """offsets and parts of every tile: where the pattern is ALL a full part, where SOME a ragged one."""
    readings = _bounded({w: read(relations(w, swap), tiles, ys) for w in dict.fromkeys(pattern.leaves())})
    residues = Residues.of(readings, len(tiles.first))
    lo, hi = cut(readings, ys.count)
    values = {w: r.value(lo) for w, r in readings.items()}
    nothing = np.zeros_like(lo, dtype=np.int8)
    code = np.zeros_like(lo)
    for truth in reversed(residues.truths):  # the first outcome is the last digit
        code = 3 * code + kleene(pattern, {w: v if w in truth else nothing for w, v in values.items()})
    code[lo == hi] = 0
    book, page = _pages(code, residues)
    columns = (segments(book, page[:, c], lo[:, c], hi[:, c], residues.shift) for c in range(lo.shape[1]))
    return emit(book, list(merge(book, columns)), residues.shift)


def _bounded(readings: dict[Pattern, Reading]) -> dict[Pattern, Reading]:
    """Forget residues, the last words' first, once all together repeat too late: those words are masked."""
    period, kept = 1, {}
    for w, r in readings.items():
        together = lcm(period, r.modulus)
        kept[w] = r if together <= PERIOD else r.without_residue()
        period = together if together <= PERIOD else period
    return kept


def _pages(code: Ints, residues: Residues) -> tuple[Book, Ints]:
    """The book of all covers that occur, and the page of each cell (−1: nothing there)."""
    outcomes = len(residues.truths)
    codes, nth = _distinct(code, 3**outcomes)
    pairs, index = _distinct(residues.kind[:, None] * len(codes) + nth, len(residues.outcome) * len(codes))
    pages: dict[Cover, int] = {}
    numbers = np.empty(len(pairs), dtype=np.int64)
    for at, (kind, which) in enumerate(divmod(int(p), len(codes)) for p in pairs):
        digits = (codes[which] // 3 ** np.arange(outcomes) % 3).astype(np.int8)
        found = cover(digits[residues.outcome[kind]].tobytes())
        numbers[at] = pages.setdefault(found, len(pages)) if found else -1
    return Book.of(list(pages) or [((0, 1, False),)]), numbers[index]


def _distinct(values: Ints, below: int) -> tuple[Ints, Ints]:
    """np.unique with return_inverse for values in 0 … below − 1, without sorting."""
    found = np.flatnonzero(np.bincount(values.ravel(), minlength=below))
    place = np.zeros(below, dtype=np.int64)
    place[found] = np.arange(len(found))
    return found, place[values]

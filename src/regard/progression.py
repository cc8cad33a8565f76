"""The keys of a query as an arithmetic progression, and sums over many queries without visiting each.

A word of the pattern grammar gives the query at position i one progression of keys:

    lo(i) ≤ j ≤ hi(i)   and   j ≡ residue(i)  (mod step)

The intersection of two progressions is one progression (the Chinese remainder theorem), so `&` stays in the family.
Counts along i are periodic: between two breaks (rows at which the active bound changes), c(i + period) − c(i) is
constant, so a sum over a million queries needs two periods of them.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import gcd
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
PerQuery = (
    NDArray[np.integer] | NDArray[np.object_] | np.integer | int
)  # one number per query, or one for all
FAR = 1 << 60  # beyond any position; small enough to add to without overflow
CHUNK = 1 << 15  # rows evaluated at a time: the arrays stay in the second-level cache
MAX_PERIOD = 1 << 22  # of rows of which one number each is held


def ranks(counts: Ints) -> Ints:
    """0, 1, …, count − 1 for each of these counts."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def distances(places: Ints, end: int) -> Ints:
    """From each place to the next, and from the last one to the end."""
    result = np.empty_like(places)
    result[:-1], result[-1:] = places[1:], end
    return result - places


@dataclass(frozen=True)
class Progression:
    """One progression of keys for each of many queries: bounds inclusive, one step for all.

    A bound or residue that does not depend on the query is one number; 0 ≤ residue < step.
    """

    lo: PerQuery
    hi: PerQuery
    residue: PerQuery = 0
    step: int = 1

    def __and__(self, other: "Progression") -> "Progression":
        """The intersection. Where the residues contradict each other it is empty: hi < lo."""
        lo, hi = later(self.lo, other.lo), sooner(self.hi, other.hi)
        if other.step == 1:
            return Progression(lo, hi, self.residue, self.step)
        if self.step == 1:
            return Progression(lo, hi, other.residue, other.step)
        residue = other.residue
        if max(self.step, other.step) * other.step > FAR:  # beyond int64: use Python's integers
            residue = np.asarray(residue, dtype=object)
        t, by, meet = solve(self.residue, self.step, other.step, residue)
        if by < other.step:  # else every two residues meet
            # As arrays: NumPy converts a Python integer to the other side's dtype, and FAR does not fit into int32.
            hi = np.where(meet, np.asarray(hi), np.asarray(lo - 1))
        return Progression(lo, hi, self.residue + self.step * t, by * self.step)

    def first(self) -> PerQuery:
        """The first key at or after lo."""
        return self.lo if self.step == 1 else self.lo + (self.residue - self.lo) % self.step

    def count(self) -> Ints:
        span = self.hi - self.first()
        return np.asarray(np.maximum(span if self.step == 1 else span // self.step, -1) + 1, dtype=np.int64)


def later(a: PerQuery, b: PerQuery) -> PerQuery:
    """max(a, b), where −FAR is no bound at all."""
    if isinstance(a, int) and a == -FAR:
        return b
    return a if isinstance(b, int) and b == -FAR else np.maximum(a, b)


def sooner(a: PerQuery, b: PerQuery) -> PerQuery:
    """min(a, b), where FAR is no bound at all."""
    if isinstance(a, int) and a == FAR:
        return b
    return a if isinstance(b, int) and b == FAR else np.minimum(a, b)


def solve(start: Any, step: int, k: int, residue: Any) -> tuple[Any, int, Any]:
    """(t, by, some): start + step · t ≡ residue (mod k) exactly for t, t + by, …, if `some`; else for no t.

    start and residue are numbers or arrays, one number per query.
    """
    g, some, quotient = gcd(step, k), True, residue - start
    if g > 1:
        some, quotient = quotient % g == 0, quotient // g
    by = k // g
    if by > 1 << 30 and isinstance(quotient, np.ndarray):  # beyond int64: use Python's integers
        quotient = quotient.astype(object)
    return quotient * pow(step // g, -1, by) % by, by, some


def total(count: Callable[[Ints], Ints], n: int, breaks: Iterable[int], slack: int, period: int) -> int:
    """Σ count(t) for t = 0 … n − 1, exactly, where count(t + period) − count(t) is constant between breaks.

    A break may be off by `slack`: rows that near are counted one by one.
    """

    def between(start: int, stop: int) -> int:
        return _periodic_sum(count, start, stop, period)

    return _by_breaks(partial(_sum, count), between, n, breaks, slack)


def _by_breaks(
    one_by_one: Callable[[int, int], int],
    between: Callable[[int, int], int],
    n: int,
    breaks: Iterable[int],
    slack: int,
) -> int:
    """A sum over 0 ≤ t < n: one by one near the breaks, `between` elsewhere."""
    breaks = list(breaks)
    edges = {min(max(at + s, 0), n) for at in breaks for s in (-slack, slack + 1)} | {0, n}
    result = 0
    for start, stop in pairwise(sorted(edges)):
        broken = any(start <= at + slack and at - slack < stop for at in breaks)
        result += one_by_one(start, stop) if broken else between(start, stop)
    return result


def zeros(count: Callable[[Ints], Ints], n: int, breaks: Iterable[int], slack: int, period: int) -> int:
    """For how many t = 0 … n − 1 count(t) is 0, exactly, where it is never negative; breaks as in `total`."""

    def is_zero(t: Ints) -> Ints:
        return np.asarray(count(t) == 0, dtype=np.int64)

    def between(start: int, stop: int) -> int:
        if stop - start <= 2 * period or period > MAX_PERIOD:
            return _sum(is_zero, start, stop)
        # In steps of a period count(t) is a line, never negative: 0 everywhere, at one of its ends, or nowhere.
        # (Both ends 0 is everywhere.)
        periods, rest = divmod(stop - start, period)
        first = _rows(is_zero, start, start + period)
        last = np.roll(_rows(is_zero, stop - period, stop), rest)
        numbers = periods + (np.arange(period) < rest)
        return int(np.where(first & last, numbers, first + last).sum())

    return _by_breaks(partial(_sum, is_zero), between, n, breaks, slack)


def _periodic_sum(count: Callable[[Ints], Ints], start: int, stop: int, period: int) -> int:
    """Σ count(t) over start ≤ t < stop without a break inside, from the first two periods."""
    if stop - start <= 2 * period:
        return _sum(count, start, stop)
    one = _rows(count, start, start + period)
    rise = _rows(count, start + period, start + 2 * period) - one
    periods, rest = divmod(stop - start, period)
    rises = periods * (periods - 1) // 2
    return (
        periods * int(one.sum())
        + rises * int(rise.sum())
        + int(one[:rest].sum())
        + periods * int(rise[:rest].sum())
    )


def _sum(count: Callable[[Ints], Ints], start: int, stop: int) -> int:
    chunks = range(start, stop, CHUNK)
    return sum(int(count(np.arange(a, min(a + CHUNK, stop))).sum()) for a in chunks)


def _rows(count: Callable[[Ints], Ints], start: int, stop: int) -> Ints:
    chunks = range(start, stop, CHUNK)
    return np.concatenate([count(np.arange(a, min(a + CHUNK, stop))) for a in chunks])

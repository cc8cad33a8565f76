"""The keys of a query as arithmetic progressions, and sums over many queries without visiting each.

A word of the pattern grammar gives the query at position i one progression of keys:

    lo(i) ≤ j ≤ hi(i)   and   j ≡ residue(i)  (mod step)

Two such progressions meet in one progression (the Chinese remainder theorem), so `&` stays in the family.
Counts along i repeat: between two places where the bounds change hands, c(i + period) − c(i) is constant,
so a sum over a million queries needs two periods of them.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from math import gcd, lcm

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
PerQuery = NDArray[np.integer] | NDArray[np.object_] | np.integer | int  # one a query, or one for all
FAR = 1 << 60  # past any key; small enough to add to without overflow


@dataclass(frozen=True)
class Keys:
    """One progression of keys for each of many queries: bounds inclusive, one step for all.

    A bound or residue that does not depend on the query is one number; 0 ≤ residue < step.
    """

    lo: PerQuery
    hi: PerQuery
    residue: PerQuery = 0
    step: int = 1

    def __and__(self, other: "Keys") -> "Keys":
        """Both progressions at once. Where the residues contradict each other, nothing: hi < lo."""
        lo, hi = _later(self.lo, other.lo), _sooner(self.hi, other.hi)
        if other.step == 1:
            return Keys(lo, hi, self.residue, self.step)
        if self.step == 1:
            return Keys(lo, hi, other.residue, other.step)
        g, step = gcd(self.step, other.step), lcm(self.step, other.step)
        apart = other.residue - self.residue
        if max(self.step, other.step) * other.step > FAR:  # past int64: count in Python's integers
            apart = np.asarray(apart, dtype=object)
        # j = residue + step·t with step·t ≡ apart (mod other.step); solvable where g divides apart
        inverse = pow(self.step // g, -1, other.step // g)
        if g > 1:
            hi = np.where(apart % g == 0, hi, lo - 1)
            apart = apart // g
        t = apart * inverse % (other.step // g)
        return Keys(lo, hi, self.residue + self.step * t, step)

    def first(self) -> PerQuery:
        """The first key at or after lo."""
        return self.lo if self.step == 1 else self.lo + (self.residue - self.lo) % self.step

    def count(self) -> Ints:
        span = self.hi - self.first()
        return np.asarray(np.maximum(span if self.step == 1 else span // self.step, -1) + 1, dtype=np.int64)


def _later(a: PerQuery, b: PerQuery) -> PerQuery:
    if isinstance(a, int) and a == -FAR:
        return b
    return a if isinstance(b, int) and b == -FAR else np.maximum(a, b)


def _sooner(a: PerQuery, b: PerQuery) -> PerQuery:
    if isinstance(a, int) and a == FAR:
        return b
    return a if isinstance(b, int) and b == FAR else np.minimum(a, b)


def total(count: Callable[[Ints], Ints], n: int, breaks: Iterable[int], slack: int, period: int) -> int:
    """Σ count(t) for t = 0 … n − 1, exactly, where count(t + period) − count(t) is constant between breaks.

    A break may be off by `slack`: rows that near are counted one by one.
    """
    breaks = list(breaks)
    edges = {min(max(at + s, 0), n) for at in breaks for s in (-slack, slack + 1)} | {0, n}

    def stretch(start: int, stop: int) -> int:
        broken = any(start <= at + slack and at - slack < stop for at in breaks)
        return _each(count, start, stop) if broken else _stretch(count, start, stop, period)

    return sum(stretch(a, b) for a, b in pairwise(sorted(edges)))


def _stretch(count: Callable[[Ints], Ints], start: int, stop: int, period: int) -> int:
    """Σ count(t) over start ≤ t < stop, a stretch without a break: two periods tell the rest."""
    if stop - start <= 2 * period:
        return _each(count, start, stop)
    one = _rows(count, start, start + period)
    rise = _rows(count, start + period, start + 2 * period) - one
    whole, rest = divmod(stop - start, period)
    grown = whole * (whole - 1) // 2
    return (
        whole * int(one.sum())
        + grown * int(rise.sum())
        + int(one[:rest].sum())
        + whole * int(rise[:rest].sum())
    )


PIECE = 1 << 15  # rows at a time: the arrays stay in the second-level cache


def _each(count: Callable[[Ints], Ints], start: int, stop: int) -> int:
    pieces = range(start, stop, PIECE)
    return sum(int(count(np.arange(a, min(a + PIECE, stop))).sum()) for a in pieces)


def _rows(count: Callable[[Ints], Ints], start: int, stop: int) -> Ints:
    pieces = range(start, stop, PIECE)
    return np.concatenate([count(np.arange(a, min(a + PIECE, stop))) for a in pieces])

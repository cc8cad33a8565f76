"""Is a whole block allowed, or none of it? Decided from its two progressions, without looking at pairs.

    all(a & b) = all(a) ∧ all(b)    none(a & b) ⊇ none(a) ∨ none(b)    all(~a) = none(a)

"No" is always a safe answer: the block is then masked.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...pattern import (
    Both,
    Either,
    Not,
    Pattern,
    blocks,
    causal,
    dilated,
    every,
    full,
    prefix,
    rows,
    sinks,
    strided,
    window,
)
from ...progression import Ints


@dataclass(frozen=True, eq=False)
class Run:
    """Progressions of positions, one a block."""

    first: Ints
    step: Ints
    count: Ints

    @property
    def last(self) -> Ints:
        return self.first + self.step * (self.count - 1)

    @property
    def hop(self) -> Ints:
        """The step, or 0 where there is but one position: what its residues repeat with."""
        return np.where(self.count > 1, self.step, 0)


class Verdict(NamedTuple):
    all: NDArray[np.bool_]
    none: NDArray[np.bool_]


def verdict(pattern: Pattern, i: Run, j: Run) -> Verdict:
    """For each block: every pair of i × j is allowed; no pair is."""
    match pattern:
        case full():
            return Verdict(i.first == i.first, i.first != i.first)
        case causal():
            return Verdict(j.last <= i.first, j.first > i.last)
        case window():
            return _band(i, j, pattern.before, pattern.ahead)
        case dilated(reach, step):
            return _both(_band(i, j, reach * step, reach * step), _residues(i, j, step))
        case every(k, offset):
            return _residue(j, k, offset)
        case rows(k, offset):
            return _residue(i, k, offset)
        case strided(k):
            return _residues(i, j, k)
        case sinks(m):
            return Verdict(j.last < m, j.first >= m)
        case prefix(m):
            return Verdict((i.last < m) & (j.last < m), (i.first >= m) | (j.first >= m))
        case blocks(size):
            return Verdict(
                np.maximum(i.last, j.last) // size == np.minimum(i.first, j.first) // size,
                (i.last // size < j.first // size) | (j.last // size < i.first // size),
            )
        case Both(left, right):
            return _both(verdict(left, i, j), verdict(right, i, j))
        case Either(left, right):
            a, b = verdict(left, i, j), verdict(right, i, j)
            return Verdict(a.all | b.all, a.none & b.none)
        case Not(inner):
            inside = verdict(inner, i, j)
            return Verdict(inside.none, inside.all)
    return Verdict(i.first != i.first, i.first != i.first)


def _both(a: Verdict, b: Verdict) -> Verdict:
    return Verdict(a.all & b.all, a.none | b.none)


def _band(i: Run, j: Run, before: int, after: int) -> Verdict:
    return Verdict(
        (i.last - j.first <= before) & (j.last - i.first <= after),
        (i.first - j.last > before) | (j.first - i.last > after),
    )


def _residue(x: Run, k: int, offset: int) -> Verdict:
    """x ≡ offset (mod k)."""
    g = np.gcd(x.hop, k)
    return Verdict((g == k) & (x.first % k == offset), (x.first - offset) % g != 0)


def _residues(i: Run, j: Run, k: int) -> Verdict:
    """i ≡ j (mod k)."""
    g = np.gcd(np.gcd(i.hop, j.hop), k)
    return Verdict((g == k) & ((i.first - j.first) % k == 0), (i.first - j.first) % g != 0)

"""How many pairs, exactly, without looking at each: inclusion and exclusion over words that progress."""

from collections.abc import Callable
from functools import cache, reduce
from math import gcd, lcm
from operator import and_
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import progression
from ..progression import FAR, Ints, Keys


class Countable:
    """A word as counting sees it: one progression of keys a query, between two lines."""

    @property
    def period(self) -> int:
        """Shifting i by this changes neither residues nor the distance to the bounds."""
        return 1

    @property
    def lines(self) -> tuple[tuple[int, int], ...]:
        """The bounds lo and hi, as (slope, constant): slope · i + constant."""
        return ()

    @property
    def wobble(self) -> int:
        """How far a bound strays from its line."""
        return 0

    @property
    def turns(self) -> tuple[int, ...]:
        """Positions i at which a bound changes its line."""
        return ()

    @property
    def queries(self) -> tuple[int, int] | None:
        """(offset, k) where all it asks is that i ≡ offset (mod k)."""
        return None

    @property
    def apart(self) -> tuple[int, int, int] | None:
        """(least, most, step) of i − j, which step divides, where that is all it asks; blocks ask their stair too."""
        return None

    @property
    def stair(self) -> int:
        """The size of blocks that a pair has to share; 0 if none."""
        return 0

    def along(self, d: Ints) -> Keys | None:
        """The positions i of the queries that may look d keys back, where they are a progression for each d."""
        return Keys(-FAR, FAR) if self.apart else None

    def keys(self, i: Ints) -> Keys:
        """lo, hi, residue and step for queries at positions i; bounds may lie past the last key."""
        raise NotImplementedError


Terms = dict[frozenset[Countable], int]  # an indicator as a polynomial; the empty set stands for 1


def plus(a: Terms, b: Terms, times: int = 1) -> Terms:
    out = dict(a)
    for words, c in b.items():
        out[words] = out.get(words, 0) + times * c
    return {words: c for words, c in out.items() if c}


def product(a: Terms, b: Terms) -> Terms:
    out: Terms = {}
    for wa, ca in a.items():
        for wb, cb in b.items():
            out[wa | wb] = out.get(wa | wb, 0) + ca * cb
    return {words: c for words, c in out.items() if c}


def row_counter(
    terms: Terms, m: int, start: int, step: int, dtype: type = np.int64
) -> Callable[[Ints], Ints]:
    """t ↦ how many keys query t may look at: Σ coefficient · |progression of the term|."""

    def count_rows(t: Ints) -> Ints:
        i: Ints = (start + step * t).astype(dtype)
        of = cache(lambda word: word.keys(i))
        total = np.zeros(i.shape, dtype=np.int64)
        for words, coefficient in terms.items():
            total += coefficient * reduce(and_, map(of, words), Keys(0, m - 1)).count()
        return total

    return count_rows


def count(terms: Terms, n: int, m: int, start: int, step: int) -> int:
    """How many pairs: Σ coefficient · |pairs that all words of the term allow|."""
    return sum(coefficient * _term(words, n, m, start, step) for words, coefficient in terms.items())


def _term(words: frozenset[Countable], n: int, m: int, start: int, step: int) -> int:
    """How many pairs all of these words allow."""
    for word in words:
        if word.queries:  # look at the queries it lets through, not at the others
            t, by = _solve(start, step, *word.queries)
            left = len(range(t, n, by)) if by else 0
            return _term(words - {word}, left, m, start + step * t, step * by) if left else 0
    period = lcm(*(w.period for w in words))
    distances = _distances(words, n, m, start, step)
    if len(distances) < min(n, 2 * period) and _runs_across(words, len(distances), n, step, 2 * period):
        return _across(words, distances, n, m, start, step)
    flat = {0, m - 1} | {c for w in words for slope, c in w.lines if slope == 0}
    steep = {c for w in words for slope, c in w.lines if slope == 1}
    turns = {b - a for a in steep for b in flat} | {t for w in words for t in w.turns}
    breaks = [(t - start) // step for t in turns]
    slack = sum(w.wobble for w in words) // step + 1
    rows = row_counter({words: 1}, m, start, step, _dtype(flat | steep | {start, start + step * n}, words))
    return progression.total(rows, n, breaks, slack, period // gcd(period, step))


def _distances(words: frozenset[Countable], n: int, m: int, start: int, step: int) -> range:
    """The distances i − j that a pair of this term may have."""
    asked = [w.apart for w in words if w.apart]
    by = lcm(*(k for _, _, k in asked))
    least = max(start - (m - 1), *(a for a, _, _ in asked), -FAR)
    most = min(start + step * (n - 1), *(b for _, b, _ in asked), FAR)
    return range(-(-least // by) * by, most + 1, by)


def _runs_across(words: frozenset[Countable], distances: int, n: int, step: int, visits: int) -> bool:
    """Whether each diagonal is a progression of queries, on stairs only where that costs less than the visits."""
    alongs = [w.along(np.zeros(1, dtype=np.int64)) for w in words]
    if None in alongs:
        return False
    by = lcm(step, *(a.step for a in alongs if a))
    stairs = sum(bool(w.stair) for w in words)
    return stairs == 0 or (stairs == 1 and by == 1) or distances * (n // by + 1) < min(visits, n) // 2


def _across(words: frozenset[Countable], distances: range, n: int, m: int, start: int, step: int) -> int:
    """The pairs of a term, diagonal by diagonal: for each distance, the queries are one progression."""
    last, total = start + step * (n - 1), 0
    for a in range(0, len(distances), progression.PIECE):
        some = distances[a : a + progression.PIECE]
        d = np.arange(some.start, some.stop, some.step, dtype=np.int64)
        inside = Keys(np.maximum(d, start), np.minimum(d + m - 1, last), start % step, step)
        queries = reduce(and_, (w.along(d) for w in words), inside)
        stairs = {w.stair for w in words if w.stair}
        total += int((queries.count() if not stairs else _on_stairs(queries, d, stairs)).sum())
    return total


def _on_stairs(queries: Keys, d: Ints, stairs: set[int]) -> Ints:
    """How many of the queries share a block of each size with the key d before them."""
    lo, hi, (size, *others) = np.asarray(queries.lo), np.asarray(queries.hi), sorted(stairs)
    if queries.step == 1 and not others:  # a query is d past its block's begin, or −d before its end
        low, width = np.maximum(d, 0), np.maximum(size - np.abs(d), 0)

        def up_to(x: NDArray[Any]) -> NDArray[Any]:
            return x // size * width + np.clip(x % size - low + 1, 0, width)

        return np.where(hi >= lo, up_to(hi) - up_to(lo - 1), 0)
    count = queries.count()
    which = np.repeat(np.arange(len(d)), count)
    along = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count)
    i = (queries.first() + np.zeros_like(d))[which] + queries.step * along
    together = [i // s == (i - d[which]) // s for s in stairs]
    return np.bincount(which, np.logical_and.reduce(together), len(d)).astype(np.int64)


def _dtype(numbers: set[int], words: frozenset[Countable]) -> type:
    """int32 where nothing can overflow it: its remainders take a third of the time."""
    steps = [w.keys(np.zeros(1, dtype=np.int64)).step for w in words]
    numbers = numbers | {w.wobble for w in words}
    small = (
        max(map(abs, numbers)) < 1 << 28 and max(steps, default=1) ** 2 < 1 << 30 and lcm(*steps) < 1 << 30
    )
    return np.int32 if small else np.int64


def _solve(start: int, step: int, offset: int, k: int) -> tuple[int, int]:
    """(t₀, by): start + step · t ≡ offset (mod k) exactly for t ≡ t₀ (mod by); by = 0 where no t does."""
    g = gcd(step, k)
    if (offset - start) % g:
        return 0, 0
    by = k // g
    return (offset - start) // g * pow(step // g, -1, by) % by, by

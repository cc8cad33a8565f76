"""How many pairs, exactly, without looking at each: inclusion and exclusion over words that progress."""

from collections.abc import Callable
from functools import cache, reduce
from math import gcd, lcm
from operator import and_

import numpy as np

from .. import progression
from ..progression import Ints, Keys


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


def row_counter(terms: Terms, m: int, start: int, step: int) -> Callable[[Ints], Ints]:
    """t ↦ how many keys query t may look at: Σ coefficient · |progression of the term|."""

    def count_rows(t: Ints) -> Ints:
        i = start + step * t
        of = cache(lambda word: word.keys(i))
        total = np.zeros_like(i)
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
    flat = {0, m - 1} | {c for w in words for slope, c in w.lines if slope == 0}
    steep = {c for w in words for slope, c in w.lines if slope == 1}
    turns = {b - a for a in steep for b in flat} | {t for w in words for t in w.turns}
    breaks = [(t - start) // step for t in turns]
    slack = sum(w.wobble for w in words) // step + 1
    rows = row_counter({words: 1}, m, start, step)
    return progression.total(rows, n, breaks, slack, period // gcd(period, step))


def _solve(start: int, step: int, offset: int, k: int) -> tuple[int, int]:
    """(t₀, by): start + step · t ≡ offset (mod k) exactly for t ≡ t₀ (mod by); by = 0 where no t does."""
    g = gcd(step, k)
    if (offset - start) % g:
        return 0, 0
    by = k // g
    return (offset - start) // g * pow(step // g, -1, by) % by, by

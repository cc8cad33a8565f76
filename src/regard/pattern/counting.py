"""How many pairs, exactly, without enumerating them: inclusion and exclusion over relations."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import gcd, lcm
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import progression
from ..progression import FAR, Ints, Progression, solve
from .relation import Relation

MAX_TERMS = 1 << 14  # counted in a second or two
MAX_ROWS = 1 << 28  # rows of single terms: five seconds or so

Terms = dict[Relation, int]  # an indicator as a polynomial: Σ coefficient · indicator of the relation


def plus(a: Terms, b: Terms, times: int = 1) -> Terms:
    """a + times · b."""
    out = dict(a)
    for relation, c in b.items():
        out[relation] = out.get(relation, 0) + times * c
    return {relation: c for relation, c in out.items() if c}


class TooManyTerms(Exception):
    """Inclusion and exclusion has up to 2^words terms."""


class TooManyRows(Exception):
    """The periods of the terms are so long that too many rows would be visited."""


class _Budget:
    """The rows that one count may still visit."""

    def __init__(self) -> None:
        self.left = MAX_ROWS

    def spend(self, rows: int) -> None:
        self.left -= rows
        if self.left < 0:
            raise TooManyRows

    def charged(self, rows: Callable[[Ints], Ints]) -> Callable[[Ints], Ints]:
        return partial(_charged, self, rows)


def _charged(budget: _Budget, rows: Callable[[Ints], Ints], t: Ints) -> Ints:
    budget.spend(t.size)
    return rows(t)


def product(a: Terms, b: Terms) -> Terms:
    """The product of two indicators, by the conjunctions of their relations."""
    out: Terms = {}
    for ra, ca in a.items():
        for rb, cb in b.items():
            both = ra & rb
            if not both.empty:
                out[both] = out.get(both, 0) + ca * cb
        if len(out) > MAX_TERMS:
            raise TooManyTerms
    return {relation: c for relation, c in out.items() if c}


def row_counter(
    terms: Terms, m: int, start: int, step: int, dtype: type = np.int64
) -> Callable[[Ints], Ints]:
    """t ↦ the number of keys that query t may attend to: Σ coefficient · |progression of the term|."""
    return partial(_count_rows, terms, m, (start, step), dtype)


def _count_rows(terms: Terms, m: int, offset: tuple[int, int], dtype: type, t: Ints) -> Ints:
    start, step = offset
    i: Ints = (start + step * t).astype(dtype)
    total = np.zeros(i.shape, dtype=np.int64)
    for relation, coefficient in terms.items():
        total += coefficient * (relation.keys(i) & Progression(0, m - 1)).count()
    return total


def count(terms: Terms, n: int, m: int, start: int, step: int) -> int:
    """How many pairs: Σ coefficient · |pairs of the relation|."""
    budget = _Budget()
    return sum(
        coefficient * _pairs(relation, n, m, start, step, budget) for relation, coefficient in terms.items()
    )


def _pairs(r: Relation, n: int, m: int, start: int, step: int, budget: _Budget) -> int:
    """How many pairs satisfy one relation: by keys, by rows, or by diagonals, whichever are fewest."""
    if not r.reads_query:
        return n * int(row_counter({r: 1}, m, start, step)(np.zeros(1, dtype=np.int64))[0])
    if r.query_class[0] > 1:  # count over the queries of that class alone
        t, by, some = solve(start, step, *r.query_class)
        left = len(range(t, n, by)) if some else 0
        rest = replace(r, query_class=(1, 0))
        return _pairs(rest, left, m, start + step * t, step * by, budget) if left else 0
    if r.key_class[0] > 1 and step == 1 and start % r.divisor == 0 and not (start and r.blocks):
        return _pairs(_by_keys(r, start), m, n, 0, 1, budget)  # over the keys of that class alone
    period = r.period
    differences = _differences(r, n, m, start, step)
    visits = _diagonal_visits(r, len(differences), n, step)
    if len(differences) < min(n, 2 * period) and visits < min(n, 2 * period) // 2:
        budget.spend(visits)
        return _by_diagonals(r, differences, n, m, start, step)
    breaks, slack, bounds = _breaks(r, m, start, step)
    rows = row_counter({r: 1}, m, start, step, _dtype(r, bounds | {start, start + step * n}))
    return progression.total(budget.charged(rows), n, breaks, slack, period // gcd(period, step))


def _breaks(r: Relation, m: int, start: int, step: int) -> tuple[set[int], int, set[int]]:
    """The rows at which another bound begins to matter, how far off they may be, and all bounds."""
    fixed = {0, m - 1} | ({r.key_below - 1} if r.key_below < FAR else set())  # bounds on j that stay
    moving = {-b for b in (r.near, r.far) if abs(b) < FAR} | (
        {0} if r.blocks else set()
    )  # those that move with i
    ends = {r.query_below} if r.query_below < FAR else set()
    breaks = {(x - start) // step for x in {b - a for a in moving for b in fixed} | ends}
    slack = sum(r.blocks) // step + 1  # the bounds of a block are a staircase along j = i
    return breaks, slack, fixed | moving | ends


def empty_rows(terms: Terms, n: int, m: int, start: int, step: int) -> int:
    """How many of the n queries have no key."""
    breaks, slack, period = set[int](), 0, 1
    for r in terms:
        own_breaks, own_slack, _ = _breaks(r, m, start, step)
        breaks, slack, period = breaks | own_breaks, max(slack, own_slack), lcm(period, r.period)
    return progression.zeros(
        row_counter(terms, m, start, step), n, breaks, slack, period // gcd(period, step)
    )


def _by_keys(r: Relation, start: int) -> Relation:
    """The relation of (j, i − start): keys as the rows, queries start, start + 1, … as the columns."""
    return replace(
        r.transposed(),
        near=start - r.far if r.far < FAR else -FAR,
        far=start - r.near if r.near > -FAR else FAR,
        key_below=r.query_below - start if r.query_below < FAR else FAR,
    )


def _differences(r: Relation, n: int, m: int, start: int, step: int) -> range:
    """The differences i − j that a pair of this relation may have."""
    near = max(start - (m - 1), r.near, *(1 - size for size in r.blocks))
    far = min(start + step * (n - 1), r.far, *(size - 1 for size in r.blocks))
    return range(-(-near // r.divisor) * r.divisor, far + 1, r.divisor)


def _diagonal_visits(r: Relation, differences: int, n: int, step: int) -> int:
    """How many queries counting by diagonals visits; without blocks a diagonal is one progression, and none is."""
    by = lcm(step, r.key_class[0])
    plain = not r.blocks or (len(r.blocks) == 1 and by == 1)
    return 0 if plain else differences * (n // by + 1)


def _by_diagonals(r: Relation, differences: range, n: int, m: int, start: int, step: int) -> int:
    """The pairs of a relation, difference by difference: for each, the queries are one progression."""
    last, total = start + step * (n - 1), 0
    for a in range(0, len(differences), progression.CHUNK):
        chunk = differences[a : a + progression.CHUNK]
        d = np.arange(chunk.start, chunk.stop, chunk.step, dtype=np.int64)
        inside = Progression(np.maximum(d, start), np.minimum(d + m - 1, last), start % step, step)
        queries = inside & r.queries(d)
        total += int((_sharing_blocks(queries, d, r.blocks) if r.blocks else queries.count()).sum())
    return total


def _sharing_blocks(queries: Progression, d: Ints, sizes: tuple[int, ...]) -> Ints:
    """How many of the queries share a block of each size with the key d before them."""
    lo, hi, (size, *others) = np.asarray(queries.lo), np.asarray(queries.hi), sizes
    if (
        queries.step == 1 and not others
    ):  # a query is at least d after its block's start, or −d before its end
        low, width = np.maximum(d, 0), np.maximum(size - np.abs(d), 0)

        def up_to(x: NDArray[Any]) -> NDArray[Any]:
            return x // size * width + np.clip(x % size - low + 1, 0, width)

        return np.where(hi >= lo, up_to(hi) - up_to(lo - 1), 0)
    count = queries.count()
    which = np.repeat(np.arange(len(d)), count)
    nth = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count)
    i = (queries.first() + np.zeros_like(d))[which] + queries.step * nth
    shared = [i // s == (i - d[which]) // s for s in sizes]
    return np.bincount(which, np.logical_and.reduce(shared), len(d)).astype(np.int64)


def _dtype(r: Relation, bounds: set[int]) -> type:
    """int32 where nothing can overflow it: its remainders take a third of the time."""
    steps = (r.key_class[0], r.divisor)
    small = (
        max(map(abs, (*bounds, *r.blocks))) < 1 << 28 and max(steps) ** 2 < 1 << 30 and lcm(*steps) < 1 << 30
    )
    return np.int32 if small else np.int64

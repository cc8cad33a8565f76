"""Counting: exact at every length, against tables where they fit and formulas worked by hand where not."""

from functools import reduce
from itertools import combinations
from operator import or_

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pattern_strategies import offsets, patterns
from regard.errors import SpecError
from regard.pattern import (
    algebra,
    blocks,
    causal,
    counting,
    dilated,
    every,
    full,
    prefix,
    rows,
    sinks,
    strided,
    window,
)
from regard.pattern.relation import Relation
from regard.progression import Progression, total

sizes = st.tuples(st.integers(0, 23), st.integers(0, 17)).map(lambda t: (t[0], t[0] + t[1]))


@given(patterns, sizes, offsets)
def test_the_count_is_the_sum_of_the_table(p, size, at):
    n, m = size
    table = p.allowed(n, m, at)
    assert p.count(n, m, at) == int(table.sum())
    assert p.row_counts(n, m, at).tolist() == table.sum(-1).tolist()


@given(patterns, st.integers(0, 29), st.integers(0, 11), st.integers(-5, 15), st.integers(1, 5))
def test_the_count_is_the_sum_of_the_table_for_more_queries_than_keys(p, n, m, start, step):
    assert p.count(n, m, (start, step)) == int(p.allowed(n, m, (start, step)).sum())


@pytest.mark.parametrize("n, m", [(1, 4), (3, 6), (5, 8), (9, 12), (3, 9)])
def test_blocks_and_a_class_of_keys_are_counted_where_queries_begin_at_a_later_block(n, m):
    p = blocks(3) & every(2)
    assert p.count(n, m) == int(p.allowed(n, m).sum())


def test_an_offset_is_a_start_with_step_one():
    p = causal() & (window(2) | every(3))
    assert p.count(7, 11, 2) == p.count(7, 11, (2, 1)) != p.count(7, 11)


# A million tokens: closed forms worked by hand. i runs over all queries, one row at a time.

N = 10**6
I = np.arange(N, dtype=np.int64)


def multiples_below(x, k, offset=0):
    """How many j in 0 ≤ j < x have j ≡ offset (mod k)."""
    return np.maximum(x - offset + k - 1, 0) // k


BY_HAND = [
    (full(), N * N),
    (causal(), N * (N + 1) // 2),
    (window(5, 3), N * 9 - 5 * 6 // 2 - 3 * 4 // 2),
    (dilated(3, 1000), sum(N - 1000 * abs(d) for d in range(-3, 4))),
    (every(7, 3), N * ((N - 3 + 6) // 7)),
    (strided(9), int(sum((len(range(r, N, 9))) ** 2 for r in range(9)))),
    (rows(11, 4), len(range(4, N, 11)) * N),
    (sinks(13), 13 * N),
    (prefix(1000), 1000**2),
    (blocks(300), (N // 300) * 300**2 + (N % 300) ** 2),
    (causal() | prefix(1000), N * (N + 1) // 2 + 1000 * 999 // 2),
    (causal() & every(7, 3), int(multiples_below(I + 1, 7, 3).sum())),
    (causal() & strided(9), int((I // 9 + 1).sum())),
    (causal() & rows(11, 4), int((I[4::11] + 1).sum())),
    (causal() & window(128), int(np.minimum(I + 1, 129).sum())),
    (causal() & blocks(300), int((I % 300 + 1).sum())),
    (causal() & dilated(3, 1000), int(np.minimum(I // 1000 + 1, 4).sum())),
    (causal() - window(128), int(np.maximum(I - 128, 0).sum())),
    (every(6) & every(10, 4), N * len(range(24, N, 30))),  # 24 is the first j ≡ 0 (mod 6) and ≡ 4 (mod 10)
    (every(6) & every(10, 5), 0),  # an even number is none
    (sinks(4) | every(64), N * (4 + len(range(64, N, 64)))),
    (
        causal() & (window(128) | every(64)),
        int((np.minimum(I + 1, 129) + multiples_below(I - 128, 64)).sum()),
    ),
    (
        causal() & (window(100) | every(64, 5) | sinks(3)),
        int((np.minimum(I + 1, 101) + multiples_below(I - 100, 64, 5) + np.clip(I - 100, 0, 3)).sum()),
    ),
]


@pytest.mark.parametrize(("p", "by_hand"), BY_HAND, ids=lambda x: "" if isinstance(x, int) else repr(x))
def test_the_count_at_a_million_tokens_is_the_formula_worked_by_hand(p, by_hand):
    assert p.count(N) == by_hand


# Jumping from period to period against visiting each row: all triples of words, sizes that share no factor.

WIDE = [
    full(),
    causal(),
    window(130, 17),
    dilated(11, 37),
    every(64, 5),
    strided(48),
    rows(36, 7),
    sinks(91),
    prefix(701),
    blocks(250),
]
TRIPLES = [c for size in (1, 2, 3) for c in combinations(WIDE, size)]


def joined(words):
    """x & (y | z): the shape of the patterns people write; & and | alone for two."""
    first, *rest = words
    return first & (rest[0] | rest[-1]) if rest else first


@pytest.mark.parametrize("at", [None, 777, (-50, 6)], ids=repr)
def test_jumping_over_periods_counts_as_visiting_each_row(at):
    n, m = 20_011, 20_021
    for words in TRIPLES:
        p = joined(words)
        assert p.count(n, m, at) == int(p.row_counts(n, m, at).sum()), repr(p)


@pytest.mark.parametrize("bound", [{"near": 0}, {"far": 0}], ids=repr)
@pytest.mark.parametrize("start, step", [(0, 1), (20, 1), (-50, 6)])
def test_residues_that_contradict_each_other_leave_no_key_where_one_side_has_no_bound(bound, start, step):
    """The bound of an open side does not fit into int32: NumPy 2.4 keeps its low half, NumPy 2.5 raises."""
    n, m, relation = 211, 223, Relation(**bound, divisor=6, key_class=(4, 1))
    i, j = start + step * np.arange(n)[:, None], np.arange(m)
    assert counting.count({relation: 1}, n, m, start, step) == int(relation.allows(i, j).sum())


@pytest.mark.long
@pytest.mark.parametrize("first", WIDE, ids=repr)
def test_at_a_million_tokens_jumping_counts_as_visiting_each_row(first):
    for words in TRIPLES:
        if words[0] == first:
            p = joined(words)
            assert p.count(N) == int(p.row_counts(N).sum()), repr(p)


# Lengths no table and no list of rows could hold.


def test_the_count_needs_neither_a_table_nor_a_list_of_rows():
    n = 10**12
    assert causal().count(n) == n * (n + 1) // 2
    assert window(2).count(n) == 5 * n - 6
    assert blocks(1000).count(n) == n * 1000
    assert (causal() | prefix(10**6)).count(n) == n * (n + 1) // 2 + 10**6 * (10**6 - 1) // 2
    assert every(64).count(n) == n * (n // 64)


def test_periodic_patterns_count_a_thousand_million_tokens():
    n = 10**9  # 64 divides n: exact sums without floors
    t = n // 64
    assert (causal() & every(64)).count(n) == 64 * t * (t + 1) // 2
    assert (causal() & strided(64)).count(n) == 64 * t * (t + 1) // 2
    assert (rows(64) & every(64)).count(n) == t * t
    assert (window(64) & strided(64)).count(n) == 3 * n - 2 * 64


def test_steps_that_meet_past_64_bits_are_counted_exactly():
    p = strided(999_983) & strided(1_000_003) & strided(1_000_033) & strided(1_000_037)
    assert p.count(5000) == 5000  # the first common multiple is past 10^23, so j = i alone
    assert (p & every(1_000_039, 4)).row_counts(7).tolist() == [0, 0, 0, 0, 1, 0, 0]


def test_many_words_are_counted_at_a_million_tokens():
    """Eleven words have 2047 terms; a key that several of them allow counts once per query."""
    primes = (7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43)
    p = reduce(or_, (every(k, k - 1) for k in primes))
    keys = np.logical_or.reduce([I % k == k - 1 for k in primes])
    assert p.count(N) == N * int(keys.sum())
    assert (causal() & p).count(N) == int((N - I[keys]).sum())


def test_a_class_of_few_keys_is_counted_without_a_list_of_rows():
    n, k = 10**9, 250_000_001
    keys = range(0, n, k)
    assert every(k).count(n) == len(keys) * n
    assert (causal() & every(k)).count(n) == sum(n - j for j in keys)
    assert (causal() & every(k) & window(100)).count(n) == sum(min(101, n - j) for j in keys)


def test_more_terms_than_are_counted_are_enumerated(monkeypatch):
    p = reduce(or_, (every(k, k - 1) for k in range(2, 19)))
    wanted = int(p.allowed(97).sum())
    monkeypatch.setattr(algebra, "CHUNK_PAIRS", 1000)  # more pairs than are enumerated at once
    assert p.count(97) == wanted
    monkeypatch.setattr(counting, "MAX_TERMS", 64)
    assert p.count(97) == wanted


def test_a_count_that_would_take_minutes_is_refused_with_the_limit_named(monkeypatch):
    p = reduce(or_, (every(k, k - 1) & blocks(k + 1) for k in (7, 11, 13)))
    wanted = int(p.allowed(5000).sum())
    assert p.count(5000) == wanted
    monkeypatch.setattr(counting, "MAX_ROWS", 100)
    with pytest.raises(SpecError, match=r"6 words at n = 5,000, m = 5,000 takes more than the 100 rows"):
        p.count(5000)
    monkeypatch.setattr(counting, "MAX_TERMS", 2)
    with pytest.raises(
        SpecError, match=r"more than 2 combinations of words, .* up to n · m = 1,000; count a"
    ):
        monkeypatch.setattr(algebra, "MAX_PAIRS", 1000)
        p.count(5000)


# The parts.

progressions = st.builds(
    lambda lo, span, residue, step: Progression(lo, lo + span, residue % step, step),
    st.integers(-9, 40),
    st.integers(-2, 60),
    st.integers(0, 30),
    st.integers(1, 30),
)


def members(keys):
    return {j for j in range(int(keys.lo), int(keys.hi) + 1) if (j - int(keys.residue)) % keys.step == 0}


@given(progressions, progressions)
def test_two_progressions_meet_in_one(a, b):
    both = a & b
    assert members(both) == members(a) & members(b)
    assert int(both.count()) == len(members(both))
    if members(both):
        assert int(both.first()) == min(members(both))


@given(st.data())
def test_the_total_jumps_over_periods_between_breaks(data):
    n, period = data.draw(st.integers(1, 97)), data.draw(st.integers(1, 7))
    slack = data.draw(st.integers(0, 3))
    breaks = sorted(data.draw(st.sets(st.integers(-9, 110), max_size=3)))
    numbers = st.lists(st.integers(-9, 9), min_size=period, max_size=period)
    stretches = [(data.draw(numbers), data.draw(numbers)) for _ in range(len(breaks) + 1)]
    true_breaks = [b + data.draw(st.integers(-slack, slack)) for b in breaks]

    def one(t):
        start, rise = stretches[sum(t >= b for b in true_breaks)]
        return start[t % period] + t // period * rise[t % period]

    def count(t):
        return np.array([one(int(x)) for x in t], dtype=np.int64)

    assert total(count, n, breaks, slack, period) == sum(one(t) for t in range(n))

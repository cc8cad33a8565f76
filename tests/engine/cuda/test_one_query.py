"""The keys of one query as formulas of its position: every allowed key is in one of the progressions."""

from functools import reduce
from operator import or_

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.pattern import (
    blocks,
    causal,
    dilated,
    documents,
    every,
    full,
    prefix,
    rows,
    sinks,
    strided,
    window,
)
from regard.pattern.clauses import MAX_CLAUSES
from regard.pattern.one_query import MAX_RUNS, keys_visited, neighbors_share_keys, run_formulas

WORDS = [
    full(), causal(), window(5), window(3, 9), dilated(4, 3), every(5, 2), strided(6), rows(4, 1), sinks(3),
    prefix(11), blocks(8),
]  # fmt: skip
NAMES = {"maximum": max, "minimum": min, "where": lambda condition, a, b: a if condition else b}


def progressions(pattern, p, m):
    found = [eval(text, {**NAMES, "p": p, "m": m}) for text in run_formulas(pattern)]
    return [range(*found[x : x + 3 : 2], found[x + 1]) for x in range(0, len(found), 3)]


@st.composite
def patterns(draw):
    pattern = draw(st.sampled_from(WORDS))
    for _ in range(draw(st.integers(0, 2))):
        other = draw(st.sampled_from(WORDS))
        pattern = draw(st.sampled_from([pattern & other, pattern | other, pattern - other]))
    return pattern


@given(patterns(), st.integers(-3, 40), st.integers(1, 40))
def test_every_allowed_key_is_in_a_progression_of_existing_keys(pattern, p, m):
    if run_formulas(pattern) is None:
        return
    inside = {j for run in progressions(pattern, p, m) for j in run}
    assert {j for j in range(m) if pattern.allows(p, j)} <= inside <= set(range(m))


@pytest.mark.parametrize(
    ("pattern", "visited"),
    [
        (causal() & (window(1024) | sinks(4)), 1025 + 4),
        (causal() & (window(128) | every(64)), 129 + 512),
        (causal() & strided(128), 256),
        (causal() & blocks(512), 512),
        (rows(64), 0),
        (window(3) & prefix(5) | sinks(4), 4),
    ],
    ids=repr,
)
def test_no_more_keys_are_read_than_the_clauses_need(pattern, visited):
    assert keys_visited(pattern, 32767, 32768) == visited


def test_a_clause_that_contradicts_itself_has_no_keys_and_no_large_numbers():
    for nothing in (
        every(2) & every(4, 3),
        rows(2) & rows(4, 1),
        strided(3) & every(3) & rows(3, 1) & rows(3, 2),
    ):
        runs = progressions(nothing | sinks(3), 7, 40)
        assert runs == [range(0), range(3)] and all(
            abs(x) < 2**31 for run in runs for x in (run.start, run.stop)
        )


def test_neighbors_share_keys_where_residues_do_not_depend_on_the_position():
    share = [
        window(5),
        causal() & (window(5) | every(8)),
        every(8) & strided(4),
        every(4, 1) & strided(4),
        rows(4, 1),
    ]
    differ = [
        strided(4),
        causal() & (window(5) | dilated(3, 2)),
        every(4) & strided(8),
        every(2) & strided(3),
    ]
    assert all(map(neighbors_share_keys, share)) and not any(map(neighbors_share_keys, differ))


def test_patterns_with_data_or_many_clauses_have_no_formulas():
    import torch

    assert run_formulas(documents(torch.zeros(5, dtype=torch.long))) is None
    many = window(1)
    for nth in range(MAX_RUNS):
        many = many | every(7, nth)
    assert run_formulas(many) is None
    assert run_formulas(causal() & reduce(or_, (every(17, nth) for nth in range(MAX_CLAUSES + 1)))) is None

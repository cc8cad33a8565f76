"""Relations: closed under `&`, and every reading of one is the same set of pairs."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pattern_strategies import offsets, patterns, words
from regard.errors import SpecError
from regard.pattern import (
    BlockGrid,
    Related,
    Relation,
    Run,
    causal,
    classification,
    classify,
    positions,
    window,
)
from regard.progression import FAR, Progression

residues = st.integers(1, 6).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, k - 1)))
# The relation itself is made in the test: the shape checker reads a random item of `blocks`, as no strategy may.
relation_fields = st.builds(
    dict,
    near=st.just(-FAR) | st.integers(-9, 9),
    far=st.just(FAR) | st.integers(-9, 12),
    divisor=st.integers(1, 5),
    query_below=st.just(FAR) | st.integers(-3, 20),
    key_below=st.just(FAR) | st.integers(-3, 20),
    query_class=st.just((1, 0)) | residues,
    key_class=st.just((1, 0)) | residues,
    blocks=st.sampled_from([(), (), (3,), (5,), (2, 7)]),
)


def holds(r: Relation, i: int, j: int) -> bool:
    """The definition, written out."""
    return (
        r.near <= i - j <= r.far
        and (i - j) % r.divisor == 0
        and i < r.query_below
        and j < r.key_below
        and i % r.query_class[0] == r.query_class[1]
        and j % r.key_class[0] == r.key_class[1]
        and all(i // size == j // size for size in r.blocks)
    )


def table(r: Relation, i: range, m: int) -> np.ndarray:
    return np.array([[holds(r, x, j) for j in range(m)] for x in i], dtype=bool).reshape(len(i), m)


@given(relation_fields, relation_fields)
def test_a_conjunction_of_relations_is_a_relation(a, b):
    a, b = Relation(**a), Relation(**b)
    i, m = range(-7, 25), 23
    assert np.array_equal(table(a & b, i, m), table(a, i, m) & table(b, i, m))
    assert not (a & b).empty or not table(a & b, i, m).any()


@given(relation_fields)
def test_everything_derived_from_a_relation_is_its_set_of_pairs(r):
    r = Relation(**r)
    i, m = range(-7, 25), 23
    want = table(r, i, m)
    x, y = np.array(i)[:, None], np.arange(m)
    assert np.array_equal(r.allows(x, y), want)
    assert torch.equal(r.allows(torch.tensor(x), torch.tensor(y)), torch.tensor(want))
    assert [[r.allows(a, b) for b in range(m)] for a in i] == want.tolist()
    keys = r.keys(np.array(i)) & Progression(0, m - 1)
    assert np.broadcast_to(keys.count(), len(i)).tolist() == want.sum(1).tolist()
    transposed = [[r.transposed().allows(b, a) for b in range(m)] for a in i]
    assert transposed == want.tolist()
    parts = [c.allows(x, y) for c in r.conditions()]
    assert np.array_equal(np.logical_and.reduce([np.ones_like(want), *parts]), want)
    if not r.reads_query:
        assert (want == want[:1]).all()
    if not r.reads_key:
        assert (want == want[:, :1]).all()
    if period := r.shift_period:
        moved = [[holds(r, a + period, b + period) for b in range(m)] for a in i]
        assert moved == want.tolist()


@given(relation_fields, st.integers(1, 30), st.integers(1, 23), st.integers(-9, 15), st.integers(1, 4))
def test_a_relation_is_counted_exactly(r, n, m, start, step):
    r = Relation(**r)
    want = table(r, range(start, start + step * n, step), m)
    assert Related(r).count(n, m, (start, step)) == int(want.sum())
    assert Related(r).row_counts(n, m, (start, step)).tolist() == want.sum(1).tolist()


runs = st.tuples(st.integers(-9, 30), st.integers(1, 7), st.integers(1, 9))


@given(relation_fields, st.lists(st.tuples(runs, runs), min_size=1, max_size=20))
def test_a_block_is_classified_as_its_pairs_are(r, blocks):
    r = Relation(**r)
    i, j = (Run(*np.array([block[axis] for block in blocks]).T) for axis in (0, 1))
    found = classify(Related(r), i, j)
    for (a, s, p), (b, t, q), whole, none in zip(*zip(*blocks), found.all, found.none):
        pairs = [holds(r, x, y) for x in range(a, a + s * p, s) for y in range(b, b + t * q, t)]
        assert not whole or all(pairs)
        assert not none or not any(pairs)


@given(words, st.integers(1, 40), st.integers(0, 20))
def test_blocks_of_neighbors_are_classified_exactly(word, n, start):
    """Where rows and keys are neighbors, one word leaves no block undecided that its pairs decide."""
    found = classify(
        word, *(Run(np.array([x]), np.array([1]), np.array([c])) for x, c in ((start, n), (3, 9)))
    )
    pairs = word.allowed(n, 12, start)[:, 3:]
    assert (bool(found.all[0]), bool(found.none[0])) == (bool(pairs.all()), not pairs.any())


@given(patterns, st.integers(1, 23), st.integers(1, 23), offsets)
def test_both_kinds_of_blocks_agree(pattern, n, m, at):
    """The blocks of FlexAttention and those of the Triton kernels, by the same code."""
    if at is None and n > m:
        at = 0
    before, classification.BLOCK = classification.BLOCK, 4
    try:
        i = positions(pattern, n, m, at)
        step = at[1] if isinstance(at, tuple) else 1
        grid = BlockGrid(i[None], m, step).classify(pattern)
    finally:
        classification.BLOCK = before
    for x in range(0, n, 4):
        for y in range(0, m, 4):
            rows, keys = min(4, n - x), min(4, m - y)
            i_run, j_run = (
                Run(np.array([int(i[x])]), step, np.array([rows])),
                Run(np.array([y]), 1, np.array([keys])),
            )
            one = classify(pattern, i_run, j_run)
            assert bool(grid.none[0, x // 4, y // 4]) == bool(one.none[0])
            assert bool(grid.all[0, x // 4, y // 4]) == (bool(one.all[0]) and rows == keys == 4)


def test_a_relation_prints_its_conditions():
    assert repr(Relation()) == "Relation()"
    assert repr(window(2, 3).relation & causal().relation) == "Relation(near=0, far=2)"


@pytest.mark.parametrize(
    "combine", [lambda a, b: a and b, lambda a, b: a or b, lambda a, b: not a, lambda a, b: 1 if a else 2]
)
def test_a_pattern_has_no_truth_value(combine):
    message = (
        r"^window\(2\) is a set of pairs, neither true nor false; "
        r"combine patterns with &, \| and ~, not with and, or and not$"
    )
    with pytest.raises(SpecError, match=message):
        combine(window(2), causal())

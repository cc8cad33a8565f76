"""Pairs of batch rows with offsets, lengths and data of their own: as many as a table of all of them has."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pattern_strategies import offsets, patterns
from regard.costs.entry import cost
from regard.pattern import (
    Pattern,
    causal,
    count_rows,
    counting,
    documents,
    empty_rows,
    every,
    full,
    lengths,
    per_head,
    query_offset,
    rows,
    selected,
    sinks,
    tree,
    window,
)
from regard.spec import Attention

N, M, ROWS = 7, 11, 3
OFFSETS, ENDS = torch.tensor([4, 0, 4]), torch.tensor([11, 5, 0])
SPANS = torch.tensor([[0, 11], [2, 5], [3, 3]])
PATTERNS = (full(), causal(), causal() & (window(2) | every(4)), window(1) | sinks(2))


def table(pattern, at, seen):
    """Which pairs are allowed, (rows, n, m)."""
    offsets = [at] * ROWS if not isinstance(at, torch.Tensor) else at.tolist()
    tables = [
        pattern.allowed(N, M, offset).expand(ROWS, 1, N, M)[row, 0] for row, offset in enumerate(offsets)
    ]
    keys, spans = torch.arange(M), torch.tensor([[0, M]] * ROWS) if seen is None else seen
    spans = torch.stack([torch.zeros_like(spans), spans], -1) if spans.dim() == 1 else spans
    return torch.stack(tables) & (keys >= spans[:, :1]).logical_and(keys < spans[:, 1:])[:, None]


@pytest.mark.parametrize("seen", [None, ENDS, SPANS], ids=["all", "ends", "spans"])
@pytest.mark.parametrize("at", [None, 2, OFFSETS], ids=["default", "one", "by row"])
@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_rows_are_counted_with_their_own_offset_and_keys(pattern, at, seen):
    assert count_rows(pattern, N, M, ROWS, at, seen) == int(table(pattern, at, seen).sum())


@pytest.mark.parametrize("seen", [None, ENDS, SPANS], ids=["all", "ends", "spans"])
@pytest.mark.parametrize("at", [None, 2, OFFSETS], ids=["default", "one", "by row"])
def test_data_by_row_are_counted_with_the_keys_and_the_offset_of_their_row(at, seen):
    ids = torch.tensor([[0] * 4 + [1] * 7, [0] * 9 + [1] * 2, [2] * 11])
    parents = torch.tensor([[-1, *range(10)], [-1] * 11, [-1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4]])
    blocks = torch.tensor([[[0], [1], [0]], [[2], [-1], [2]], [[0], [0], [0]]])
    words = (documents(ids), lengths(torch.tensor([9, 3, 11])), tree(parents), selected(blocks, size=4))
    for pattern in (*words, documents(ids) & window(2), ~documents(ids) | sinks(1)):
        assert count_rows(pattern, N, M, ROWS, at, seen) == int(table(pattern, at, seen).sum())


def test_data_of_all_rows_count_for_each():
    pattern = documents(torch.tensor([[0] * 4 + [1] * 7]))
    assert count_rows(pattern, N, M, ROWS) == ROWS * pattern.count(N, M)


def test_heads_without_data_count_in_every_batch_row_that_the_data_of_others_tell_apart():
    packed = documents(torch.tensor([[0] * 4 + [1] * 7, [0] * 9 + [1] * 2, [2] * 11]))
    heads = per_head([causal() & packed, window(2), packed])
    allowed = heads.allowed(N, M)
    assert allowed.shape == (ROWS, 3, N, M)
    assert heads.count(N, M) == int(allowed.sum())
    assert heads.row_counts(N, M).tolist() == allowed.sum((0, 1, 3)).tolist()


@given(patterns, st.integers(1, 700), st.integers(1, 700), offsets)
def test_rows_without_a_key_are_counted_from_two_periods(pattern, n, m, at):
    start, step = query_offset(pattern, n, m, 0 if at is None and n > m else at)
    empty = int((pattern.row_counts(n, m, (start, step)) == 0).sum())
    assert empty == empty_rows(pattern, n, m, start, step)
    assert empty == counting.empty_rows(pattern.terms(), n, m, start, step)


def test_rows_without_a_key_need_no_number_for_each_query(monkeypatch):
    n, spec = 10**8 + 7, Attention(8, pattern=causal() & (window(3) | every(64)))
    monkeypatch.setattr(Pattern, "row_counts", None)
    assert empty_rows(every(3, 2) & rows(4, 1), n, n, 0, 1) == n - -(-(n - 1) // 4)
    assert empty_rows(causal() & every(64, 63), n, n, 0, 1) == 63
    assert cost(spec, n=n).pairs[0].full == n * n

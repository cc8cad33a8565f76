"""Counts of patterns with data, and of patterns with too many words for a formula: block by block."""

import random

import pytest
import torch

import regard as rg
from regard.pattern import block_counts
from regard.pattern.algebra import Pattern


def plain(rng):
    words = (
        lambda: rg.causal(),
        lambda: rg.window(rng.randint(0, 150)),
        lambda: rg.every(rng.randint(1, 40)),
        lambda: rg.blocks(rng.randint(1, 200)),
        lambda: rg.strided(rng.randint(1, 30)),
        lambda: rg.rows(rng.randint(1, 30)),
        lambda: rg.prefix(rng.randint(0, 99)),
    )
    return rng.choice(words)()


def with_data(rng, g, m, batch):
    shape, lead = ((m,), ()) if batch == 1 else ((batch, m), (batch,))
    size = rng.randint(1, 200)
    blocks = -(-m // size)
    steps = torch.randint(0, rng.randint(2, 200), shape, generator=g)
    heads = rng.choice([(), (batch, 2)]) or lead
    words = (
        lambda: rg.documents((steps == 0).cumsum(-1)),
        lambda: rg.documents(steps % 3),
        lambda: rg.documents((steps == 0).cumsum(-1), plain(rng) | plain(rng)),
        lambda: rg.tree((torch.arange(m) - 1 - steps).clamp(min=-1)),
        lambda: rg.selected(torch.randint(-1, blocks, (*heads, blocks, 3), generator=g), size),
        lambda: rg.lengths(torch.randint(0, m + 1, (batch,), generator=g)),
        lambda: rg.where(lambda i, j: i * j % 3 == 0),
    )
    return rng.choice(words)()


def combined(rng, g, m, batch):
    pattern = with_data(rng, g, m, batch)
    for _ in range(rng.randint(0, 2)):
        other = rng.choice((lambda: plain(rng), lambda: with_data(rng, g, m, batch)))()
        pattern = rng.choice((pattern & other, pattern | other, pattern - other))
    return ~pattern if rng.random() < 0.2 else pattern


@pytest.mark.parametrize("seed", range(60))
def test_block_counts_are_those_of_the_table(seed, monkeypatch):
    rng, g = random.Random(seed), torch.Generator().manual_seed(seed)
    monkeypatch.setattr(block_counts, "MAX_BLOCKS", 4)  # several chunks of rows,
    monkeypatch.setattr(block_counts, "CHUNK_PAIRS", 3 << 14)  # and of blocks and pairs
    m, step = rng.randint(300, 400), rng.choice((1, 3))
    n = rng.choice((m, m - 131)) // step
    at = rng.randint(0, m - 1 - step * (n - 1)), step
    pattern = combined(rng, g, m, rng.choice((1, 2)))
    table = pattern.allowed(n, m, at)
    wanted = table.sum(-1).reshape(-1, n).sum(0).tolist()
    assert pattern.row_counts(n, m, at).tolist() == wanted
    assert pattern.count(n, m, at) == sum(wanted)


def test_more_words_than_a_formula_takes():
    pattern = rg.causal() & rg.window(190)
    for k in range(2, 14):
        pattern = pattern - (rg.every(k) & rg.rows(k))
    table = pattern.allowed(300, 331)
    assert pattern.row_counts(300, 331).tolist() == table.sum(-1).tolist()
    assert pattern.count(300, 331) == int(table.sum())


@pytest.mark.parametrize(
    "pattern, pairs",
    [
        (lambda n: rg.documents(torch.arange(n) // 1000) & rg.causal(), lambda n: n // 1000 * 500_500),
        (lambda n: rg.tree(torch.arange(n) - 1), lambda n: n * (n + 1) // 2),
        (lambda n: rg.selected(torch.arange(n // 64)[:, None], 64), lambda n: n * 64),
    ],
)
def test_a_long_sequence_is_counted_without_its_table(pattern, pairs, monkeypatch):
    n = 64_000

    def allowed(*_):
        raise AssertionError("a table of n × m pairs")

    monkeypatch.setattr(Pattern, "allowed", allowed)
    monkeypatch.setattr(block_counts, "_enumerated", allowed)
    assert pattern(n).count(n) == pairs(n)

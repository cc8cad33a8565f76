"""Neighborhoods on grids against their definition, position by position."""

import random
from itertools import product
from math import prod

import pytest
import torch
from torch.testing import assert_close

import regard as rg
from regard.errors import FormatError, ShapeError, SpecError
from regard.pattern import BlockGrid, parse_pattern
from regard.pattern.classification import BLOCK


def neighbors(x, length, kernel, step, border, causal):
    """The coordinates that x attends to along one axis, by the words of the docstring."""
    reachable = [z for z in range(length) if (z - x) % step == 0]
    at = reachable.index(x)
    if causal:
        return reachable[max(at - kernel + 1, 0) : at + 1]
    first = at - kernel // 2
    if border == "shifted":
        first = max(min(first, len(reachable) - kernel), 0)
    return reachable[max(first, 0) : first + kernel]


def table(grid, kernel, step, border, causal):
    size = prod(grid)
    out = torch.zeros(size, size, dtype=torch.bool)
    numbers = {place: number for number, place in enumerate(product(*map(range, grid)))}
    for place, i in numbers.items():
        axes = zip(place, grid, kernel, step, causal)
        for other in product(*(neighbors(x, l, k, s, border, c) for x, l, k, s, c in axes)):
            out[i, numbers[other]] = True
    return out


CASES = [
    ((9,), (4,), (1,), "clipped", (False,)),
    ((9,), (3,), (2,), "shifted", (False,)),
    ((5, 6), (3, 3), (1, 1), "clipped", (False, False)),
    ((7, 6), (3, 5), (1, 1), "shifted", (False, False)),
    ((8, 9), (3, 2), (2, 3), "clipped", (False, False)),
    ((6, 7), (3, 3), (2, 1), "shifted", (True, False)),
    ((3, 4, 5), (3, 1, 3), (1, 1, 2), "clipped", (True, False, False)),
    ((4, 4, 5), (2, 3, 3), (1, 1, 1), "shifted", (False, False, False)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_pairs_counts_and_texts_are_those_of_the_definition(case):
    pattern, right = rg.neighborhood(*case), table(*case)
    size = len(right)
    assert torch.equal(pattern.allowed(size), right)
    assert pattern.count(size) == int(right.sum())
    assert pattern.row_counts(size).tolist() == right.sum(1).tolist()
    assert pattern.count(2, size, at=3) == int(right[3:5].sum())
    assert pattern.allows(1, 0) == bool(right[1, 0]) and pattern.allows(size, 0) is False
    assert rg.Pattern.from_json(pattern.json()) == pattern
    assert parse_pattern(repr(pattern)) == pattern
    assert (pattern & rg.causal()).count(size) == int(right.tril().sum())


@pytest.mark.parametrize("case", CASES[2:], ids=str)
def test_it_runs_and_trains(case):
    pattern = rg.neighborhood(*case)
    size = pattern.size
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, 2, size, 4, generator=generator, dtype=torch.float64).requires_grad_() for _ in "qkv"
    )
    o, right = rg.attention(q, k, v, pattern), rg.attention(q, k, v, table(*case), backend="reference")
    assert_close(o, right)
    found, wanted = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (o, right))
    assert_close(found, wanted)


@pytest.mark.parametrize("part", range(3))
def test_blocks_are_classified_line_by_line_as_pair_by_pair(part):
    for seed in range(20 * part, 20 * part + 20):
        r = random.Random(seed)
        axes, border = r.choice([1, 2, 3]), r.choice(["clipped", "shifted"])
        grid = tuple(r.randint(1, {1: 700, 2: 33, 3: 9}[axes]) for _ in range(axes))
        step = tuple(r.randint(1, min(r.choice([3, 300]), length)) for length in grid)
        most = [length // s if border == "shifted" else 300 // axes**4 for length, s in zip(grid, step)]
        kernel = tuple(r.randint(1, x) for x in most)
        p = rg.neighborhood(grid, kernel, step, border, tuple(r.random() < 0.3 for _ in grid))
        n = r.choice([p.size, r.randint(1, p.size)])
        i = torch.arange(n) * r.choice([1, 2]) + r.choice([0, p.size - n])  # some queries may be outside
        blocks = BlockGrid(torch.stack([i, i + 2]), p.size)
        ours, exact = p.classify(blocks), blocks.enumerate(p.allows)
        assert torch.equal(ours.none, exact.none), (seed, p)
        rows, keys = n // BLOCK, p.size // BLOCK  # others are never allowed as a whole
        assert torch.equal(ours.all[:, :rows, :keys], exact.all[:, :rows, :keys]), (seed, p)


@pytest.mark.parametrize("grid", [(70,), (16, 16), (24, 7), (4, 8, 8), (2, 16, 5)], ids=str)
def test_the_lines_of_a_grid_hold_every_pair_once(grid):
    r = random.Random(str(grid))
    for border, rows, by_keys in product(("clipped", "shifted"), (8, 33), (False, True)):
        step = tuple(r.choice([1, 1, 2]) for _ in grid)
        kernel = tuple(r.randint(1, length // s) for length, s in zip(grid, step))
        p = rg.neighborhood(grid, kernel, step, border, tuple(r.random() < 0.3 for _ in grid))
        tiles, offsets, parts = p.tiles(rows, by_keys)
        held = torch.zeros(p.size, p.size, dtype=torch.int)
        for (first, _, count), begin, end in zip(tiles, offsets, offsets[1:]):
            for key, hop, keys, _ in parts[begin:end]:
                held[first : first + count, key : key + hop * keys : hop] += 1
        allowed = p.allowed(p.size)
        assert held.max() == 1 and not ((allowed.T if by_keys else allowed) & (held == 0)).any()
        i = torch.arange(p.size)
        assert torch.equal(eval(p.condition(), {"i": i[:, None], "j": i}), allowed), p.condition()


def test_one_number_serves_all_axes():
    assert rg.neighborhood((4, 5), 3) == rg.neighborhood((4, 5), (3, 3), (1, 1), "clipped", (False, False))
    assert repr(rg.neighborhood((4, 5), 3, step=2)) == "neighborhood((4, 5), (3, 3), step=2)"
    declared = rg.Attention(8, heads=2, pattern=rg.neighborhood((4, 5), 3))
    assert rg.from_json(declared.json()) == declared


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (
            lambda: rg.neighborhood((2, 2, 2, 2), 3),
            SpecError,
            "neighborhood: a grid of 4 axes; 1 to 3 are supported",
        ),
        (
            lambda: rg.neighborhood((4, 4), (3, 3, 3)),
            SpecError,
            "neighborhood: kernel=(3, 3, 3) for a grid of 2 axes; give one for each",
        ),
        (
            lambda: rg.neighborhood((4, 0), 3),
            SpecError,
            "neighborhood: grid has 0; whole numbers >= 1 are needed",
        ),
        (
            lambda: rg.neighborhood((4, 4), 3, causal=(True, 2)),
            SpecError,
            "neighborhood: causal has 2; True or False is needed",
        ),
        (
            lambda: rg.neighborhood((4, 4), 3, border="wrapped"),
            SpecError,
            "neighborhood: border='wrapped'; use 'clipped' or 'shifted'",
        ),
        (
            lambda: rg.neighborhood((4, 8), 3, step=2, border="shifted"),
            SpecError,
            "neighborhood: a kernel of 3 with step 2 does not fit axis 0 of 4, so it cannot be shifted inwards; "
            "use border='clipped'",
        ),
        (
            lambda: rg.neighborhood((4, 4), 3).allowed(17),
            ShapeError,
            "neighborhood((4, 4), (3, 3)) over 17 keys: a grid of 4 × 4 has 16 positions",
        ),
        (
            lambda: parse_pattern("neighborhood((4, x), 3)"),
            FormatError,
            "neighborhood((4, x), 3): malformed node or string on line 1",
        ),
    ],
)
def test_what_is_no_neighborhood_is_named(make, error, text):
    with pytest.raises(error) as refusal:
        make()
    assert str(refusal.value).startswith(text)

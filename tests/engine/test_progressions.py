"""Attention over a plan on the CPU: the formula, its gradients, nothing read that is hidden, the same bits twice."""

from math import inf, nan

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pattern_strategies import offsets, patterns
from regard.engine.cpu import batches
from regard.engine.cpu import flash_op as flash_cpu
from regard.engine.cpu.batches import Batch, of_plans, program
from regard.engine.plan.planner import NoPlan, plan
from regard.errors import BackendError
from regard.pattern import (
    blocks,
    causal,
    every,
    full,
    prefix,
    rows,
    sinks,
    strided,
    window,
)
from tile_cases import MIXED, WORDS, attend, check, formula, small, tensors, with_gradients


def covered(way):
    """How often each pair is visited and allowed."""
    seen = torch.zeros(way.n, way.m, dtype=torch.int)
    for batch in way.batches:
        for t in range(batch.tiles):
            row = batch.row + batch.row_hop * t + batch.row_step * torch.arange(batch.rows)
            key = batch.key + batch.key_hop * t + batch.key_step * torch.arange(batch.keys)
            seen[row[:, None], key] += 1 if batch.allowed is None else batch.allowed.int()
    return seen


# Which pairs

tiles = st.sampled_from([4, 5, 8, 24])


@given(patterns, st.integers(1, 70), st.integers(1, 70), offsets, tiles)
@example(window(4) - every(5), 70, 70, None, 4)  # masks that repeat with every fifth tile
@example(causal() & (window(9) | sinks(20)), 70, 70, None, 4)  # a fixed end within some tiles
@example(window(3) & ~prefix(30), 70, 70, None, 4)
@example(every(3) & (blocks(6) | rows(5)), 70, 70, None, 5)  # shared keys, masks that differ
@example(causal() & every(3), 70, 70, None, 4)
def test_batches_hold_each_allowed_pair_once_and_no_other(pattern, n, m, at, tile):
    if at is None and n > m:
        n, m = m, n
    try:
        way = small(pattern, n, m, at, tile)
    except NoPlan:
        return
    assert torch.equal(covered(way), pattern.allowed(n, m, at).int())
    assert way.computed >= pattern.count(n, m, at)
    for batch in way.batches:  # what a call writes to, it writes once
        rows = [
            batch.row + batch.row_hop * t + batch.row_step * r
            for t in range(batch.tiles)
            for r in range(batch.rows)
        ]
        assert len(set(rows)) == len(rows)


@given(patterns, st.integers(1, 70), st.integers(0, 70), tiles)
@example(window(3), 70, 41, 4)
@example(window(3), 70, 42, 4)
@example(window(3) | every(9), 70, 37, 4)
def test_a_length_hides_the_keys_from_it_on_and_no_other(pattern, n, length, tile):
    try:
        way = small(pattern, n, tile=tile)
    except NoPlan:
        return
    expected = pattern.allowed(n).int()
    expected[:, length:] = 0
    left = way.before(length)
    assert torch.equal(covered(left), expected[:, : left.m])
    assert left.m == min(length, n)


def test_a_long_pattern_of_many_shapes_is_laid_with_a_comb_apart_alone(monkeypatch):
    """Tiles that each see another number of teeth make as many batches; the comb beside the rest makes a few."""
    pattern, n = window(16) | every(8), 80_000
    batches.ways.cache_clear()
    short, long = (batches.ways(pattern, size, size, 0, 1, 64, 64) for size in (4_000, n))
    assert [len(found) for found in (short, long)] == [2, 1]
    assert long[0][0].pattern == pattern - every(8) and len(long[0][1].batches) < 10
    quick = batches.program(pattern, n, n, 0, 1)
    monkeypatch.setattr(batches, "MANY", 10**9)
    batches.ways.cache_clear()
    batches.program.cache_clear()
    other = batches.program(pattern, n, n, 0, 1)  # what was left out was not the quickest
    assert (other.computed, other.nanoseconds()) == (quick.computed, quick.nanoseconds())
    batches.ways.cache_clear()
    batches.program.cache_clear()


def test_tiles_that_look_alike_run_together():
    pattern = window(64) | every(64)
    for tile, waste in ((64, 1.35), (192, 2.0)):
        way = program(pattern, 4096, 4096, 0, 1, narrow=tile, wide=tile)
        assert len(way.batches) <= 5
        assert way.computed <= waste * pattern.count(4096)


def test_tiles_that_share_a_key_are_never_added_at_once():
    """Along a band, and interleaved: first keys 2 apart, step 3."""
    for hop, step, keys in ((4, 1, 9), (2, 3, 5), (3, 3, 1), (6, 4, 7), (1, 16, 4)):
        batch = Batch(12, 0, 1, 1, 1, 0, hop, step, keys, None, 0, 1)
        for phase in range(batch.phases):
            visited = [hop * t + step * l for t in range(phase, 12, batch.phases) for l in range(keys)]
            assert len(set(visited)) == len(visited)
        m = hop * 11 + step * (keys - 1) + 1
        part = torch.randn(2, 12, keys, 3, dtype=torch.float64)
        got, expected = torch.zeros(2, m, 3, dtype=torch.float64), torch.zeros(2, m, 3, dtype=torch.float64)
        batch.add_to_keys(got, part)
        for t in range(12):
            for l in range(keys):
                expected[:, hop * t + step * l] += part[:, t, l]
        torch.testing.assert_close(got, expected)


# The numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("pattern", WORDS + MIXED, ids=repr)
def test_every_word_gives_the_formula_and_its_gradients(pattern, dtype):
    check(small(pattern, 101), pattern.allowed(101), *tensors(dtype=dtype))


@given(patterns, st.integers(1, 40), st.integers(1, 40), offsets, st.integers(0, 99))
@settings(max_examples=200)
def test_any_composition_gives_the_formula_and_its_gradients(pattern, n, m, at, seed):
    """In float64 where no query sees four keys: with one, the gradient of its score is 0, which the fused op's
    do·v − do·o reaches to rounding only, while autograd's softmax gives 0."""
    if at is None and n > m:
        n, m = m, n
    try:
        way = small(pattern, n, m, at)
    except NoPlan:
        return
    d = (5, 16, 64)[seed % 3]
    dtype = torch.float32 if pattern.row_counts(n, m, at).max() >= 4 else torch.float64
    q, k, v = tensors(b=1, n=n, m=m, d_k=d, d_v=d, dtype=dtype, seed=seed)
    check(way, pattern.allowed(n, m, at), q, k, v, scale=d**-0.5)


@pytest.mark.parametrize(
    "pattern", [window(64) | every(64), causal() & (window(40) | every(32)), strided(24)]
)
def test_the_tiles_of_the_sizes_a_cpu_likes_give_the_formula(pattern):
    n = 701
    q, k, v = tensors(b=1, n=n, d_k=8, d_v=8, dtype=torch.float32)
    check(program(pattern, n, n, 0, 1), pattern.allowed(n), q, k, v)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_computed_in_float32(dtype):
    pattern = window(8) | every(16)
    q, k, v = tensors(d_k=16, d_v=16, dtype=dtype)
    check(small(pattern, 101), pattern.allowed(101), q, k, v, scale=0.25)
    assert attend(q, k, v, small(pattern, 101), scale=0.25)[1].dtype == torch.float32


@pytest.mark.parametrize("d_k, d_v", [(5, 3), (3, 5), (4, 4), (1, 7)])
@pytest.mark.parametrize("h, h_kv", [(6, 6), (6, 2), (4, 1)])
def test_grouped_heads_and_any_widths(h, h_kv, d_k, d_v):
    pattern = causal() & (window(9) | every(8))
    check(small(pattern, 53), pattern.allowed(53), *tensors(h=h, h_kv=h_kv, n=53, d_k=d_k, d_v=d_v))


@pytest.mark.parametrize("n, m", [(1, 1), (1, 37), (2, 37), (17, 37), (37, 1)])
@pytest.mark.parametrize("pattern", WORDS + MIXED, ids=repr)
def test_a_few_queries_over_a_cache_and_one_of_either(pattern, n, m):
    at = 0 if n > m else None
    check(small(pattern, n, m, at), pattern.allowed(n, m, at), *tensors(n=n, m=m))


@pytest.mark.parametrize("n, m", [(0, 7), (7, 0), (0, 0)])
def test_no_queries_or_no_keys_give_zeros(n, m):
    q, k, v = tensors(n=n, m=m)
    o, lse = attend(q, k, v, program(causal(), n, m, 0, 1), scale=1.0)
    assert o.shape == (2, 2, n, 3) and not o.any() and (lse == -inf).all()
    for grad, x in zip(torch.autograd.grad(o.sum(), (q, k, v)), (q, k, v)):
        assert grad.shape == x.shape and not grad.any()


@pytest.mark.parametrize(
    "pattern, empty",
    [
        (every(7) & ~(window(200) & rows(3)), slice(0, None, 3)),
        (causal() - window(5), slice(0, 6)),  # in a tile with rows that see something
        (window(9) & ~(causal() & rows(2)) & causal(), slice(0, None, 2)),
    ],
    ids=repr,
)
def test_a_query_that_sees_nothing_gets_zeros_and_finite_gradients(pattern, empty):
    q, k, v = tensors()
    way = program(pattern, 101, 101, 0, 1)
    o, lse, *grads = with_gradients(lambda *x: attend(*x, way, scale=1.0), q, k, v)
    assert not o[:, :, empty].any() and (lse[:, :, empty] == -inf).all()
    assert o[:, :, 7].all() and all(g.isfinite().all() for g in grads)
    assert not grads[0][:, :, empty].any()


@pytest.mark.parametrize("seed", range(1, 5))
def test_a_scale_that_is_no_power_of_two_costs_no_precision(seed):
    """The op scales in one place forward and in another backward; in large scores that would show."""
    q, k, v = tensors(b=1, n=2, m=17, d_k=16, d_v=16, dtype=torch.float32, seed=seed)
    check(small(full(), 2, 17), full().allowed(2, 17), q, k, v, scale=0.4)


@pytest.mark.parametrize("scale", [0.0, -0.7, 3.0])
def test_the_scale_is_the_one_given(scale):
    pattern = window(8) | every(16)
    check(small(pattern, 53), pattern.allowed(53), *tensors(n=53), scale=scale)


def test_gradients_hold_to_second_differences():
    q, k, v = tensors(b=1, h=2, h_kv=1, n=13, d_k=3, d_v=2)
    for pattern in (window(2) | every(8), causal() & strided(4), causal() - window(1)):
        way = small(pattern, 13)

        def both(*x, way=way):
            o, lse = attend(*x, way, scale=0.6)
            return o, lse[..., 2:]  # the first rows may be empty

        assert torch.autograd.gradcheck(both, (q, k, v))


def test_the_gradient_of_the_log_sum_exp_alone():
    q, k, v = tensors(n=53, d_k=4, d_v=4)
    pattern = window(8) | every(16)
    lse = attend(q, k, v, small(pattern, 53), scale=0.4)[1]
    got = torch.autograd.grad(lse.square().sum(), (q, k, v))
    ref = torch.autograd.grad(formula(q, k, v, pattern.allowed(53), 0.4)[1].square().sum(), (q, k))
    torch.testing.assert_close(got[:2], ref)
    assert not got[2].any()


def test_two_runs_agree_bit_for_bit():
    pattern = window(70) | every(16)
    way = program(pattern, 1009, 1009, 0, 1)
    q, k, v = tensors(n=1009, d_k=16, d_v=16, dtype=torch.float32)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        runs = [with_gradients(lambda *x: attend(*x, way, scale=0.25), q, k, v) for _ in range(3)]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other))


def test_any_memory_layout():
    pattern = window(8) | every(16)
    q, k, v = tensors(n=53)
    got = attend(
        *(x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)),
        small(pattern, 53),
        scale=1.0,
    )
    flipped = (x.detach().mT.contiguous().mT for x in (q, k, v))
    for other in (got, attend(*flipped, small(pattern, 53), scale=1.0)):
        for a, b in zip(other, attend(q, k, v, small(pattern, 53), scale=1.0)):
            torch.testing.assert_close(a, b)


# Lengths


@pytest.mark.parametrize("pattern", WORDS + MIXED, ids=repr)
def test_lengths_hide_keys_for_each_batch_row(pattern):
    n, lengths = 53, torch.tensor([53, 0, 20, 1])
    allowed = pattern.allowed(n) & (torch.arange(n) < lengths[:, None, None, None])
    check(small(pattern, n), allowed, *tensors(b=4, h=4, n=n), lengths=lengths)


@pytest.mark.parametrize("poison", [nan, inf, -inf])
def test_what_stands_in_hidden_keys_reaches_nothing(poison):
    pattern, lengths = window(8) | every(16), torch.tensor([30, 5])
    way = small(pattern, 53)
    q, k, v = tensors(n=53)
    clean = with_gradients(lambda *x: attend(*x, way, scale=1.0, lengths=lengths), q, k, v)
    hidden = (torch.arange(53) >= lengths[:, None])[:, None, :, None]
    k, v = (x.detach().masked_fill(hidden, poison) for x in (k, v))
    dirty = with_gradients(lambda *x: attend(*x, way, scale=1.0, lengths=lengths), q, k, v)
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty))


# The op


def test_another_schema_is_refused_by_name(monkeypatch):
    monkeypatch.setitem(flash_cpu.SCHEMAS, flash_cpu.NAME, "aten::other(Tensor query) -> Tensor")
    flash_cpu.op.cache_clear()
    try:
        with pytest.raises(BackendError) as refused:
            flash_cpu.op(flash_cpu.NAME)
    finally:
        flash_cpu.op.cache_clear()
    text = str(refused.value)
    assert text.startswith(
        "backend='tiles' runs aten::_scaled_dot_product_flash_attention_for_cpu on the CPU, "
        f"and torch {torch.__version__} has another one: found aten::_scaled_dot_product_flash_attention_for_cpu("
    )
    assert text.endswith("need aten::other(Tensor query) -> Tensor; use backend='sdpa'")


def test_an_op_that_is_gone_is_refused_by_name(monkeypatch):
    monkeypatch.setitem(flash_cpu.SCHEMAS, "_no_such_op", "aten::_no_such_op() -> ()")
    with pytest.raises(BackendError, match="found nothing, need aten::_no_such_op"):
        flash_cpu.op("_no_such_op")


def test_the_op_as_it_is_mended_here():
    """An empty row has −∞ and zeros; no queries and no keys do not end the process."""
    q, k, v = tensors(n=3)
    allowed = torch.tensor([[True, True, False], [False] * 3, [True] * 3])
    o, lse = flash_cpu.forward(q, k, v, 1.0, allowed)
    assert (lse[:, :, 1] == -inf).all() and not o[:, :, 1].any() and lse[:, :, ::2].isfinite().all()
    assert flash_cpu.forward(q, k[:, :, :0], v[:, :, :0], 1.0)[0].shape == (2, 2, 3, 3)
    for got, x in zip(
        flash_cpu.backward(o[:, :, :0], q[:, :, :0], k, v, o[:, :, :0], lse[:, :, :0], 1.0), "qkv"
    ):
        assert not got.any(), x


def test_plans_of_disjoint_pairs_make_one_program():
    n, a, b = 53, window(4), every(8) - window(4)
    way = of_plans(plan(a, n, n, 0, 1, 16), plan(b, n, n, 0, 1, 16))
    assert torch.equal(covered(way), (a | b).allowed(n).int())

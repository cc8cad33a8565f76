"""Tiles by products: the formula and its gradients, however they are cut."""

from math import inf

import pytest
import torch

from regard.engine.cpu import batch as batches_of
from regard.engine.cpu import pages, products
from regard.engine.cpu.batch import Batch
from regard.engine.cpu.batches import program
from regard.pattern import causal, dilated, every, full, sinks, strided, window
from tile_cases import MIXED, WORDS, attend, check, formula, tensors

f64 = torch.float64


def randn(*shape, seed=0, dtype=f64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=f64).to(dtype)


def fresh(pattern, n, tile=8):
    """A program that no other test has run, as it remembers how it was cut."""
    return program.__wrapped__(pattern, n, n, 0, 1, tile, tile)


# How a batch is cut


@pytest.mark.parametrize("scores, lane", [(1, 1), (130, 1), (300, 1 << 17), (1 << 19, 1), (1 << 19, 1 << 17)])
@pytest.mark.parametrize(
    "pattern", [window(8) | every(16), causal() & strided(8), MIXED[1], every(7)], ids=repr
)
def test_however_a_batch_is_cut_it_gives_the_formula(pattern, scores, lane, monkeypatch):
    """One tile a piece and one row, several, a lane by itself, several lanes; the fused op for none of them."""
    monkeypatch.setattr(batches_of, "SCORES", scores)
    monkeypatch.setattr(batches_of, "LANE", lane)
    monkeypatch.setattr(Batch, "fused", False)
    check(fresh(pattern, 101), pattern.allowed(101), *tensors(h=4, h_kv=2))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("pattern", WORDS + MIXED, ids=repr)
def test_products_and_the_fused_op_give_the_formula(pattern, fused, monkeypatch):
    monkeypatch.setattr(Batch, "fused", fused)
    check(fresh(pattern, 101), pattern.allowed(101), *tensors(dtype=torch.float32), scale=0.25)


@pytest.mark.parametrize("pattern", WORDS + MIXED, ids=repr)
def test_a_step_knows_whether_others_share_its_rows(pattern):
    seen, way = torch.zeros(101, dtype=torch.int), fresh(pattern, 101)
    for step in way.steps:
        rows = torch.from_numpy(step.batch.row_numbers)
        assert step.fresh == (not seen[rows].any())
        seen[rows] += 1
    for step in way.steps:
        assert step.alone == bool((seen[torch.from_numpy(step.batch.row_numbers)] == 1).all())


@pytest.mark.parametrize("n", [101, 1024])
@pytest.mark.parametrize("pattern", [window(32) | every(32), causal() & (window(9) | sinks(20))], ids=repr)
def test_what_is_written_first_is_run_first(pattern, n):
    """Pieces of several lanes run before those of one, whatever the order of the plan."""
    seen, way = torch.zeros(n, dtype=torch.int), fresh(pattern, n, 64)
    run = dict.fromkeys([*way.fused, *(step for step, _ in way.order(8))])
    for step in run:
        rows = torch.from_numpy(step.batch.row_numbers)
        assert step.fresh == (not seen[rows].any())
        seen[rows] += 1
    assert len(run) == len(way.steps)


def test_every_piece_of_every_lane_runs_once(monkeypatch):
    monkeypatch.setattr(batches_of, "SCORES", 200)
    way = fresh(window(8) | every(16), 101)
    for lanes in (1, 3, 8):
        order = way.order(lanes)
        assert len(set(order)) == len(order)
        for step in way.steps:
            pieces = step.rows_of(torch.arange(lanes * 101.0).view(lanes, 101))
            assert sum(one is step for one, _ in order) in (0, len(pieces))
            held = torch.cat([piece.flatten() for piece in pieces])
            assert len(held) == lanes * len(step.batch.row_numbers) == len(held.unique())


def test_a_narrow_band_is_run_by_products_and_a_large_triangle_by_the_fused_op():
    """So that no more than SCORES scores are held, and half of a triangle is skipped."""
    assert not any(step.batch.fused for step in program(window(64) | every(64), 4096, 4096, 0, 1).steps)
    triangle = Batch(1, 0, 0, 1, 4096, 0, 0, 1, 4096, causal(), 0, 1)
    assert triangle.fused and triangle.triangle
    tall = Batch(1, 0, 0, 1, 4096, 0, 0, 1, 4096, window(7), 0, 1)
    assert tall.fused and not Batch(1, 0, 0, 1, 4096, 0, 0, 64, 64, None, 0, 1).fused


def test_rows_without_a_mask_are_cut_so_that_few_scores_are_held(monkeypatch):
    monkeypatch.setattr(Batch, "fused", False)
    way = fresh(full(), 3000, 3000)
    (step,) = way.steps
    assert max(piece.shape[1] for piece in step.rows_of(torch.zeros(2, 3000, 1))) * 3000 <= batches_of.SCORES


# The numbers


def test_a_query_that_sees_one_key_has_no_gradient_of_its_score(monkeypatch):
    """ds = weights ∘ (do·v − δ): with δ = do·o it is only 0 to rounding, with δ = Σ weights ∘ do·v exactly."""
    monkeypatch.setattr(Batch, "fused", False)
    q, k, v = tensors(n=37, d_k=16, d_v=16, dtype=torch.float32)
    for pattern in (window(0), dilated(0, 3), causal() & window(0)):
        o, _ = attend(q, k, v, fresh(pattern, 37), scale=2.0)
        dq, dk, dv = torch.autograd.grad(o, (q, k, v), c := randn(*o.shape, seed=3, dtype=torch.float32))
        assert not dq.any() and not dk.any()
        assert torch.equal(dv, c) and torch.equal(o, v)


@pytest.mark.parametrize("dlse", [True, False])
@pytest.mark.parametrize("alone", [True, False])
def test_one_piece_is_the_formula(alone, dlse):
    q, k, v, do = (randn(3, n, d, seed=s) for s, (n, d) in enumerate(((7, 5), (11, 5), (11, 2), (7, 2))))
    allowed = randn(7, 11, seed=5) > 0
    allowed[2] = False
    mask = torch.zeros(7, 11, dtype=f64).masked_fill_(~allowed, -inf)
    grad = randn(3, 7, seed=6) if dlse else None
    room = products.Room(q)
    o, lse = (x.clone() for x in products.forward(q, k, v, 0.4, mask, room))
    expected, logs = formula(q[None], k[None], v[None], allowed, 0.4)
    torch.testing.assert_close(o, expected[0])
    torch.testing.assert_close(lse, logs[0])
    lse = lse.masked_fill(lse == -inf, inf)
    delta = None if alone else (do * o).sum(-1)
    weights, ds = products.backward(do, q, k, v, lse, delta, grad, 0.4, mask, True, room)
    table = (q @ k.mT * 0.4 + mask).softmax(-1).nan_to_num(0.0)
    torch.testing.assert_close(weights, table)
    less = (do * o).sum(-1, keepdim=True) - (0.0 if grad is None else grad[..., None])
    torch.testing.assert_close(ds, table * (do @ v.mT - less))


def test_a_room_gives_the_same_memory_until_more_is_asked_for():
    room = products.Room(torch.zeros(1))
    first = room("s", 2, 3)
    assert room("s", 2, 3) is first and room("s", 6).data_ptr() == first.data_ptr()
    assert room("ds", 2, 3).data_ptr() != first.data_ptr()
    assert room("s", 7, 3).shape == (7, 3) and room("s", 2, 3).data_ptr() == room("s", 7, 3).data_ptr()


LONG = [
    window(34) | every(32),
    causal() & (window(34) | every(32)),
    window(137),
    dilated(8, 8),
    causal() & strided(32),
    causal() & (window(68) | sinks(4)),
]


@pytest.mark.parametrize("pattern", LONG, ids=repr)
def test_a_thousand_positions_give_the_formula(pattern):
    """Batches of several lanes and of one, products and the fused op, as the plan has them."""
    q, k, v = tensors(b=1, h=3, h_kv=3, n=1100, d_k=8, d_v=8, dtype=torch.float32)
    check(program(pattern, 1100, 1100, 0, 1), pattern.allowed(1100), q, k, v, scale=0.3)


@pytest.mark.parametrize("advise", [None, lambda first, size, how: asked.append((first, size, how)) or -1])
def test_large_pages_are_asked_for_large_tensors_and_never_needed(advise, monkeypatch):
    """Whole pages inside the tensor; where there are none to ask for, or the answer is no, nothing changes."""
    asked.clear()
    monkeypatch.setattr(pages, "_advise", lambda: advise)
    small, big = torch.empty(100), torch.empty((1 << 19) + 300)
    assert pages.large(small) is small and pages.large(big) is big
    for first, size, how in asked:
        assert first % 4096 == size % 4096 == 0 and how == 14
        assert big.data_ptr() <= first < first + size <= big.data_ptr() + 4 * big.numel()
    assert len(asked) == (advise is not None)


asked: list[tuple[int, int, int]] = []


def test_the_fused_op_and_products_join_in_one_program():
    """A triangle too large for products beside a comb of other keys."""
    pattern = causal() | every(50)
    way = program.__wrapped__(pattern, 700, 700, 0, 1, 700, 700)
    q, k, v = tensors(b=1, n=700, d_k=8, d_v=8, dtype=torch.float32)
    check(way, pattern.allowed(700), q, k, v, scale=0.3)

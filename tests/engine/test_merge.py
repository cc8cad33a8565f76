"""Partial attentions joined: the softmax over a union of keys from the softmax over each part."""

from math import inf

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard.engine.cpu.kernels import join
from regard.engine.merge import merge
from regard.errors import ShapeError

N, M, D = 7, 11, 3


def attend(scores, v, allowed):
    """o and lse of one part; an empty row is zeros and −∞, without gradient."""
    empty = ~allowed.any(-1, keepdim=True)
    scores = scores.masked_fill(~(allowed | empty), -inf)
    o = scores.softmax(-1).masked_fill(empty, 0.0) @ v
    return o, scores.logsumexp(-1).masked_fill(empty.squeeze(-1), -inf)


def setting(parts, seed=0):
    """Scores, values, and a split of the keys that leaves some rows empty in some parts, row 2 in all."""
    g = torch.Generator().manual_seed(seed)
    scores = torch.randn(2, N, M, generator=g, dtype=torch.float64) * 3
    v = torch.randn(2, M, D, generator=g, dtype=torch.float64)
    of = torch.randint(parts, (N, M), generator=g)
    of[2] = -1
    return scores, v, [of == p for p in range(parts)]


@given(st.integers(1, 5), st.integers(0, 50))
def test_merging_parts_is_attending_to_all_their_keys(parts, seed):
    scores, v, split = setting(parts, seed)
    o, lse = merge([attend(scores, v, allowed) for allowed in split])
    o_all, lse_all = attend(scores, v, torch.stack(split).any(0))
    torch.testing.assert_close(o, o_all)
    torch.testing.assert_close(lse, lse_all)
    assert not o[:, 2].any() and (lse[:, 2] == -inf).all()


@given(st.integers(1, 4), st.integers(0, 50))
def test_gradients_reach_every_part_as_if_there_were_one(parts, seed):
    scores, v, split = setting(parts, seed)
    scores.requires_grad_(), v.requires_grad_()

    def total(o, lse):
        return (o.sin() * 2).sum() + lse.masked_fill(lse == -inf, 0.0).square().sum()

    got = torch.autograd.grad(total(*merge([attend(scores, v, a) for a in split])), (scores, v))
    ref = torch.autograd.grad(total(*attend(scores, v, torch.stack(split).any(0))), (scores, v))
    torch.testing.assert_close(got, ref)
    assert not got[0][:, 2].any()


def test_merge_holds_to_second_differences():
    g = torch.Generator().manual_seed(1)
    o = [torch.randn(N, D, generator=g, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    lse = [torch.randn(N, generator=g, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradcheck(lambda *x: merge(list(zip(x[:3], x[3:]))), (*o, *lse))


def test_an_empty_row_has_finite_gradients_in_every_part():
    o = [torch.zeros(N, D, requires_grad=True) for _ in range(2)]
    lse = [torch.full((N,), -inf, requires_grad=True) for _ in range(2)]
    joined, total = merge(list(zip(o, lse)))
    grads = torch.autograd.grad(joined.sum() + total.masked_fill(total == -inf, 0.0).sum(), (*o, *lse))
    assert not joined.any() and (total == -inf).all()
    assert all(g.isfinite().all() for g in grads)


def test_large_scores_do_not_overflow():
    o, lse = merge(
        [(torch.ones(N, D), torch.full((N,), 900.0)), (torch.zeros(N, D), torch.full((N,), 900.0))]
    )
    torch.testing.assert_close(o, torch.full((N, D), 0.5))
    torch.testing.assert_close(lse, torch.full((N,), 900.0) + torch.tensor(2.0).log())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_outputs_keep_their_type_and_lse_its_own(dtype):
    o, lse = merge(
        [(torch.ones(N, D, dtype=dtype), torch.zeros(N)), (torch.zeros(N, D, dtype=dtype), torch.zeros(N))]
    )
    assert o.dtype == dtype and lse.dtype == torch.float32
    torch.testing.assert_close(o, torch.full((N, D), 0.5, dtype=dtype))


@given(st.integers(1, 5), st.integers(0, 50))
def test_joining_in_place_is_merging(parts, seed):
    scores, v, split = setting(parts, seed)
    each = [attend(scores, v, allowed) for allowed in split]
    o, lse = torch.zeros(2, N, D, dtype=torch.float64), torch.full((2, N), -inf, dtype=torch.float64)
    for part in each:
        join(o, lse, *part)
    torch.testing.assert_close((o, lse), merge(each))


def test_a_number_that_is_not_one_is_not_hidden():
    o, lse = torch.zeros(1, D), torch.zeros(1)
    join(o, lse, torch.full((1, D), float("nan")), torch.zeros(1))
    assert o.isnan().all()


def test_parts_that_do_not_fit_are_refused():
    with pytest.raises(ShapeError, match=r"^merge\(\) of no parts; give at least one \(o, lse\)$"):
        merge([])
    parts = [(torch.zeros(N, D), torch.zeros(N)), (torch.zeros(N, D + 1), torch.zeros(N))]
    with pytest.raises(ShapeError) as refused:
        merge(parts)
    assert str(refused.value) == (
        "merge: o (7, 4) and lse (7,) do not fit o (7, 3); "
        "every o needs one shape (…, n, d_v), and its lse the same without d_v"
    )

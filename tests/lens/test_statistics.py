"""Head statistics from a stream equal those of the whole table, and hold no table."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import regard as rg
from lens_models import captured
from regard.lens.calls import QueryKeyScores, StoredWeights
from regard.lens.head_similarity import agreement, head_angles, principal_angles
from regard.lens.patch_grid import Grid, square_grid
from regard.lens.score_mods import CausalMask, MaskOrBias
from regard.lens.statistics import MULTIPLES, head_statistics
from regard.lens.token_matches import numbered


def random_call(seed, b=2, h=3, n=13, m=13, d=5, score_mods=(), scale=1.0, role="self", valid=None):
    g = torch.Generator().manual_seed(seed)
    q, k = torch.randn(b, h, n, d, generator=g), torch.randn(b, h, m, d, generator=g)
    return captured(QueryKeyScores(q, k, k, scale, tuple(score_mods)), role, valid)


def dense(call):
    return torch.stack([call.weights(batch=b) for b in range(call.b)]).double()


def mean(x, counted):
    """Over the counted queries of (b, h, n)."""
    return (x * counted).sum((0, 2)) / counted.sum((0, 2))


HIDDEN = torch.rand(2, 1, 13, 13, generator=torch.Generator().manual_seed(5)) > 0.3
SCORE_MODS = {
    "all": (),
    "causal": (CausalMask(),),
    "hidden": (MaskOrBias(HIDDEN),),
    "rows without an allowed key": (MaskOrBias(HIDDEN & (torch.arange(13) != 4)[:, None]),),
    "a bias": (MaskOrBias(torch.randn(3, 13, 13, generator=torch.Generator().manual_seed(6))),),
    "float's lowest": (MaskOrBias(torch.where(HIDDEN, 0.0, torch.finfo(torch.float32).min)),),
}


@pytest.mark.ledger("S0.Q1b.4")
@pytest.mark.parametrize("scale", [0.4, 60.0])
@pytest.mark.parametrize("score_mods", SCORE_MODS)
def test_statistics_by_blocks_equal_those_of_the_full_table(score_mods, scale):
    call = random_call(1, score_mods=SCORE_MODS[score_mods], scale=scale)
    s = head_statistics(call, size=40)  # blocks of 3 queries
    w, i = dense(call), torch.arange(13)
    counted = w.sum(-1) > 0
    allowed = torch.stack([call.allowed(batch=b) for b in range(2)]).sum(-1)
    entropy = torch.special.entr(w).sum(-1)
    away = (i[:, None] - i).abs()
    close = {"atol": 2e-6, "rtol": 1e-5}
    assert torch.allclose(s.entropy, mean(entropy, counted), **close)
    assert torch.allclose(
        s.entropy_share, mean(entropy / allowed.clamp(min=2).log(), counted & (allowed > 1)), **close
    )
    assert torch.allclose(s.top, mean(w.amax(-1), counted), **close)
    assert torch.allclose(s.distance, mean((w * away).sum(-1), counted), **close)
    assert torch.allclose(s.on_first, mean(w[..., 0], counted), **close)
    assert torch.allclose(
        s.by_key, (w * counted[..., None]).sum((0, 2)) / counted.sum((0, 2))[:, None], **close
    )
    for k, got in s.multiples.items():
        assert torch.allclose(got, mean(w[..., ::k].sum(-1), counted), **close)
    for k, got in s.strides.items():
        assert torch.allclose(got, mean((w * (away % k == 0)).sum(-1), counted), **close)
    for t, got in zip(s.offsets, s.by_offset.T):
        assert torch.allclose(got, mean((w * (i[:, None] - i == t)).sum(-1), counted), **close)
    within = torch.stack([mean((w * (away <= t)).sum(-1), counted) for t in i])
    assert torch.equal(s.span, (within >= 0.9).double().argmax(0).double())


def test_previous_next_and_self_are_means_over_queries_that_have_such_a_key():
    call = random_call(2)
    s, w = head_statistics(call, size=40), dense(call)
    for got, offset in ((s.on_self, 0), (s.on_previous, -1), (s.on_next, 1)):
        assert torch.allclose(got, w.diagonal(offset, -2, -1).mean((0, 2)), atol=1e-6)
    assert torch.isnan(head_statistics(random_call(2, score_mods=(CausalMask(),))).on_next).all()


def test_padding_is_not_counted():
    valid = torch.ones(2, 13, dtype=torch.bool)
    valid[0, 9:] = False
    call = random_call(3, valid=valid)
    s, w = head_statistics(call, size=40), dense(call)
    assert torch.allclose(
        s.entropy, mean(torch.special.entr(w).sum(-1), valid[:, None].expand(-1, 3, -1)), atol=1e-6
    )
    assert s.queries == 22


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.booleans(), st.integers(1, 90))
def test_the_size_of_a_block_changes_nothing(n, m, causal, size):
    call = random_call(n, n=n, m=m, score_mods=(CausalMask(),) if causal else (), role="cross")
    whole, parts = head_statistics(call), head_statistics(call, size=size)
    for name in ("entropy", "distance", "by_key", "by_offset", "shift", "span", "top"):
        assert torch.allclose(getattr(whole, name), getattr(parts, name), atol=1e-6)
    assert torch.allclose(whole.by_offset.sum(-1), torch.ones(3, dtype=torch.float64), atol=1e-6)


def test_stored_weights_have_the_same_statistics():
    call = random_call(4)
    s, t = head_statistics(call), head_statistics(captured(StoredWeights(dense(call).float())))
    for name in ("entropy", "entropy_share", "distance", "by_key", "by_offset", "shift_weight", "top"):
        assert torch.allclose(getattr(s, name), getattr(t, name), atol=1e-5)


WORDS = (("the", "cat", "the", "dog", "the", "cat", "a"), ("a", "a", "b", "the", "a", "b", "the"))


@pytest.mark.parametrize("causal", [False, True])
def test_equal_tokens_and_what_followed_them(causal):
    call = random_call(5, n=7, m=7, score_mods=(CausalMask(),) if causal else ())
    s = head_statistics(call, numbered(WORDS, WORDS, ("the",)), size=20)
    w = dense(call)
    same, after = torch.zeros(2, 7, 7), torch.zeros(2, 7, 7)
    for b, row in enumerate(WORDS):
        for i in range(7):
            for j in range(7):
                same[b, i, j] = row[i] == row[j] and (j < i if causal else j != i)
                after[b, i, j] = 0 < j <= i and row[j - 1] == row[i]
    for got, pairs in ((s.on_same, same), (s.induction, after)):
        has = pairs.any(-1)[:, None].expand(-1, 3, -1)
        assert torch.allclose(got, mean((w * pairs[:, None]).sum(-1), has), atol=1e-6)
    separates = torch.tensor([[t == "the" for t in row] for row in WORDS])[:, None, None]
    every = torch.ones(2, 3, 7, dtype=torch.bool)
    assert torch.allclose(s.on_separator, mean((w * separates).sum(-1), every), atol=1e-6)
    assert torch.isnan(head_statistics(call).on_same).all()


@pytest.mark.ledger("S2.4.2.2", "S2.4.2.5")
def test_on_a_grid_the_center_the_spread_and_the_nearest_shift():
    grid = Grid(3, 4, skip=1)
    call = random_call(6)
    on = head_statistics(call, grid=grid, size=40).grid
    w = dense(call)[:, :, 1:, 1:]
    y, x = torch.arange(12) // 4, torch.arange(12) % 4
    dy, dx = (y - y[:, None]).double(), (x - x[:, None]).double()
    share = w / w.sum((2, 3), keepdim=True)
    share = w.sum((0,)) / w.sum((0, 2, 3))[:, None, None]
    center = torch.stack([(share * dy).sum((1, 2)), (share * dx).sum((1, 2))], -1)
    assert torch.allclose(on.center, center, atol=1e-6)
    spread = (
        (share * ((dy - center[:, 0, None, None]) ** 2 + (dx - center[:, 1, None, None]) ** 2))
        .sum((1, 2))
        .sqrt()
    )
    assert torch.allclose(on.spread, spread, atol=1e-5)
    assert torch.allclose(on.by_offset.sum((1, 2)), torch.ones(3, dtype=torch.float64))
    assert torch.allclose(
        on.by_offset[:, 2 - 1, 3 + 2], (share * ((dy == -1) & (dx == 2))).sum((1, 2)), atol=1e-6
    )


@pytest.mark.ledger("S2.4.2.6", "S2.3.2.1")
def test_a_head_that_shifts_on_a_grid_is_at_distance_0_from_its_shift():
    place = torch.arange(12)
    y, x = place // 4 - 1, place % 4 + 1  # one up, one to the right
    inside = (y >= 0) & (x < 4)
    table = torch.full((12, 12), 1 / 12)
    table[inside] = 0.0
    table[inside, (y * 4 + x)[inside]] = 1.0
    on = head_statistics(captured(StoredWeights(table[None, None])), grid=Grid(3, 4)).grid
    assert on.shift[0].tolist() == [-1, 1] and on.shift_weight[0] > 0.9


def test_a_one_dimensional_shift_has_error_0():
    table = torch.zeros(1, 2, 9, 9)
    for i in range(9):
        table[0, 0, i, max(i - 3, 0)] = 1.0  # three back; the first three sit on key 0
        table[0, 1, i, min(i + 2, 8)] = 1.0
    s = head_statistics(captured(StoredWeights(table)))
    assert s.shift.tolist() == [3, -2] and s.shift_error.abs().max() < 1e-12
    assert s.keys.tolist() == pytest.approx([1, 1])


@pytest.mark.ledger("S2.4.2.1")
def test_a_fresh_head_is_near_uniform_and_not_local():
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 4, 1024, 64, generator=g)
    s = head_statistics(captured(QueryKeyScores(q, k, None, 64**-0.5)), grid=Grid(32, 32))
    assert s.entropy.mean() == pytest.approx(6.43, abs=0.02)
    assert s.uniform["entropy"] == pytest.approx(6.9315, abs=1e-4)
    assert s.grid.distance.mean() == pytest.approx(16.67, abs=0.1)


class Largest(TorchDispatchMode):
    """The most numbers that one operation made."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [
            x.untyped_storage().nbytes()
            for x in (out if isinstance(out, tuple) else (out,))
            if isinstance(x, torch.Tensor)
        ]
        self.most = max([self.most, *sizes])
        return out


def test_no_full_table_is_allocated():
    call = random_call(7, b=1, h=1, n=2048, m=2048, d=8)
    with Largest() as seen:
        s = head_statistics(call, size=1 << 15)
    assert seen.most < 2048**2 * 4 / 25 and s.queries == 2048
    assert set(s.multiples) == set(MULTIPLES)
    with Largest() as seen:
        call.weights([0])
    assert seen.most >= 2048**2 * 4


def test_agreement_is_the_cosine_of_the_maps():
    call = random_call(8)
    flat = dense(call).permute(1, 0, 2, 3).flatten(1)
    truth = torch.nn.functional.cosine_similarity(flat[:, None], flat[None], -1)
    assert torch.allclose(agreement(call, call), truth, atol=1e-6)
    with pytest.raises(
        rg.ShapeError, match=r"maps of 13 × 13 \(layer\) and of 13 × 11 \(layer\) cannot be compared"
    ):
        agreement(call, random_call(8, m=11))


@pytest.mark.ledger("S0.Q2c.2")
def test_principal_angles_of_known_spans():
    e = torch.eye(7, dtype=torch.float64)
    turned = torch.stack([e[0], (e[1] + 1e-9 * e[2]), (e[2] + e[4]) / 2**0.5], 1)
    angles = principal_angles(e[:, :2], turned[:, :2])
    assert angles.tolist() == pytest.approx([0, 1e-9], abs=1e-15)  # arccos alone would say 0 or 1e-8
    assert principal_angles(e[:, 2:3], turned[:, 2:]).tolist() == pytest.approx([torch.pi / 4])
    for angle in (0.3, 0.5, 1.2):  # from the sine, and from the cosine
        turned_by = torch.tensor(angle, dtype=torch.float64)
        other = turned_by.cos() * e[:, :1] + turned_by.sin() * e[:, 3:4]
        assert principal_angles(e[:, :1], other).tolist() == pytest.approx([angle])
    assert principal_angles(e[:, :2], e[:, 2:5]).tolist() == pytest.approx([torch.pi / 2] * 2)
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 11, 3, generator=g, dtype=torch.float64)
    mixed = a @ torch.randn(3, 3, generator=g, dtype=torch.float64)
    assert principal_angles(a, mixed).abs().max() < 1e-12
    assert torch.allclose(principal_angles(a, b), principal_angles(b, a))


def test_heads_with_the_same_projection_have_angle_0():
    g = torch.Generator().manual_seed(0)
    q = torch.randn(1, 3, 23, 5, generator=g)
    q[:, 1] = q[:, 0] @ torch.randn(5, 5, generator=g)
    call = captured(QueryKeyScores(q, q, None, 1.0))
    angles = head_angles(call, "query")
    assert angles[0, 1].max() < 1e-5 and angles[0, 2].max() > 0.5
    with pytest.raises(rg.ShapeError, match=r"13 tokens for heads of width 7: .* use at least 14 tokens"):
        head_angles(random_call(1, b=1, d=7))
    with pytest.raises(
        rg.RegardError, match="is eager attention: only its weights were recorded, not q and k"
    ):
        head_angles(captured(StoredWeights(torch.ones(1, 1, 3, 3) / 3)))


@pytest.mark.parametrize(
    ("tokens", "height", "width", "grid"),
    [
        (197, 224, 224, Grid(14, 14, 1)),
        (16, 32, 32, Grid(4, 4, 0)),
        (33, 32, 64, Grid(4, 8, 1)),
        (201, 224, 224, Grid(14, 14, 5)),
        (23, 32, 48, None),
    ],
)
def test_the_grid_of_an_image_is_inferred(tokens, height, width, grid):
    assert square_grid(tokens, height, width) == grid


@pytest.mark.parametrize("stored", [True, False])
def test_a_query_whose_weights_are_nan_is_not_counted(stored):
    """One masked query made every statistic NaN, and the head a window with confidence 1."""
    call = random_call(3)
    rows = [i for i in range(13) if i != 4]
    source = replace(call.source, q=call.source.q.index_fill(2, torch.tensor([4]), torch.nan))
    if stored:
        source = StoredWeights(torch.stack([captured(source).weights(batch=b) for b in range(call.b)]))
    s, w = head_statistics(captured(source), size=40), dense(call)[:, :, rows]
    assert s.queries == 12 * call.b
    torch.testing.assert_close(s.by_key, w.mean((0, 2)), atol=1e-6, rtol=0)
    torch.testing.assert_close(s.top, w.amax(-1).mean((0, 2)), atol=1e-6, rtol=0)
    torch.testing.assert_close(s.entropy, torch.special.entr(w).sum(-1).mean((0, 2)), atol=1e-5, rtol=0)


def test_weights_that_are_all_nan_are_refused():
    call = random_call(1)
    with pytest.raises(rg.ShapeError, match="the weights of a head are NaN for every query, so it has no"):
        head_statistics(captured(replace(call.source, k=call.source.k * torch.nan)))


def test_a_call_without_allowed_pairs_is_refused():
    call = random_call(1, score_mods=(MaskOrBias(torch.zeros(13, 13, dtype=torch.bool)),))
    with pytest.raises(
        rg.ShapeError, match=r"layer 0 \(layer\): no query has an allowed key, so it has no statistics"
    ):
        head_statistics(call)

"""Attention as a convolution: which heads are replaced, the error, and what stays attention."""

import json
from math import inf

import pytest
import torch
from torch import nn

import regard as rg
from convolution_cases import inputs_for, random_convolution
from regard.convolution import (
    Certificate,
    Head,
    by_offset,
    leak,
    lift,
    lower,
    lower_all,
    nearest_shifts,
    spread,
    total_variation,
)
from regard.convolution.split_heads import SplitHeads

f64 = torch.float64
GRID = (5, 7)


def quadratic_layer(center, alpha, *, grid=GRID, **named) -> nn.Module:
    """An attention whose heads look at these offsets, this sharply."""
    given = {"score": "position", "d_k": 3, "d_v": 5, **named}
    layer = rg.Attention(6, heads=len(alpha), position=rg.quadratic(grid=grid), **given).build().double()
    with torch.no_grad():
        layer.position.center.copy_(torch.tensor(center, dtype=f64))
        layer.position.alpha.copy_(torch.tensor(alpha, dtype=f64))
    return layer.eval()


def tokens(n=35, d=6, b=3, seed=0, dtype=f64):
    return torch.randn(b, n, d, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.ledger("S2.3.2.5", "S2.3.2.6")
def test_lowering_a_lifted_convolution_gives_it_back():
    """Weights, bias, kernel, stride, padding, groups; bench/convolution_exact.py has 200."""
    for seed in range(40):
        conv = random_convolution(seed)
        found = lower(lift(conv), inputs_for(conv, 1, seed))
        back = found.convolution
        assert type(back) is type(conv) and found.rest is None
        assert torch.allclose(back.weight, conv.weight, rtol=0, atol=1e-6), seed
        assert (back.kernel_size, back.stride, back.groups) == (conv.kernel_size, conv.stride, conv.groups)
        assert (back.bias is None) == (conv.bias is None)
        assert found.certificate.certified == 0 and found.certificate.measured <= 1e-12


def test_a_narrow_lifted_convolution_comes_back_as_its_product():
    conv = random_convolution(3)
    assert torch.allclose(lower(lift(conv, d_v=min(conv.weight.shape[:2]))).convolution.weight, conv.weight)


@pytest.mark.ledger("S2.4.2.6")
def test_hard_heads_lower_exactly_with_the_nearest_key_past_the_border():
    layer = quadratic_layer([[0, 1], [-1, 2], [2.2, -0.9]], [1.0, 1.0, 1.0], scale=inf)
    found = lower(layer, tolerance=0.0)
    assert [h.offset for h in found.certificate.heads] == [(0, 1), (-1, 2), (2, -1)]
    assert found.certificate.heads[1].shift == (1, -2)
    assert [h.kind for h in found.certificate.heads] == ["shift"] * 3
    assert found.rest is None and found.kernels is None and found.certificate.certified == 0
    x = tokens()
    assert torch.allclose(found(x), layer(x), atol=1e-12)


def test_a_hard_head_between_two_keys_is_a_kernel_of_both():
    layer = quadratic_layer([[0.0, 0.5]], [1.0], scale=inf)
    found = lower(layer, tolerance=0.0)
    assert found.certificate.heads[0].kind == "kernel"
    assert torch.allclose(found(tokens()), layer(tokens()), atol=1e-12)


@pytest.mark.parametrize(
    "position", [rg.relative_table(3), rg.t5_buckets(8, 12), rg.quadratic(), rg.alibi()], ids=repr
)
def test_windowed_heads_with_position_only_scores_are_lowered_exactly(position):
    """The kernel is as long as the window; the border is divided as softmax does."""
    spec = rg.Attention(6, heads=3, d_k=3, d_v=5, position=position, score="position", pattern=rg.window(2))
    layer = spec.build().double()
    with torch.no_grad():
        for p in layer.position.parameters():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)).abs())
    found = lower(layer, size=13, tolerance=0.0)
    assert found.rest is None and {h.kind for h in found.certificate.heads} <= {"shift", "kernel"}
    x = tokens(13)
    assert torch.allclose(found(x), layer(x), atol=1e-12)
    assert found.certificate.certified < 1e-10
    x = tokens(29)  # longer than it was lowered on: the window is the same
    assert torch.allclose(found(x), layer(x), atol=1e-12)


@pytest.mark.ledger("S2.4.2.6", "S2.3.2.1")
@pytest.mark.parametrize("tolerance", [0.3, 0.05, 1e-3])
def test_the_error_of_soft_heads_is_within_what_is_certified_for_all_inputs(tolerance):
    layer = quadratic_layer([[0, 1], [-2, 0], [0.3, -0.4], [1, 1]], [6.0, 4.0, 0.8, 0.05])
    found = lower(layer, tolerance=tolerance, kernel=5)
    certificate = found.certificate
    assert all(h.worst <= tolerance + 1e-12 for h in certificate.heads if h.kind != "attention")
    assert certificate.heads[3].kind == "attention"  # wider than 5
    for seed in range(20):
        x = tokens(seed=seed) * 10 ** (seed % 3)
        span = (x.amax(1) - x.amin(1)).max().item()
        assert (found(x) - layer(x)).abs().max().item() <= certificate.certified * span
    extreme = tokens(seed=1).sign()
    assert (found(extreme) - layer(extreme)).abs().max().item() <= certificate.certified * 2


def test_a_shift_is_preferred_where_it_is_near_enough_and_a_kernel_where_not():
    layer = quadratic_layer([[0, 1], [0, 1]], [6.0, 2.0])
    assert [h.kind for h in lower(layer, tolerance=0.05).certificate.heads] == ["shift", "kernel"]
    loose = lower(layer, tolerance=0.5).certificate
    assert [h.kind for h in loose.heads] == ["shift", "shift"]
    missed = leak(layer.position.center, layer.position.alpha)
    assert [h.worst for h in loose.heads] == pytest.approx(
        missed.tolist(), rel=1e-6
    )  # the interior is the worst


CONTENT = {
    "dot": {"score": "dot"},
    "grouped": {"score": "dot", "kv_heads": 2},
    "biases": {"score": "dot", "biases": "all"},
    "no biases": {"score": "dot", "biases": "none"},
    "no output": {"score": "dot", "output": False},
    "position": {"score": "position"},
}


@pytest.mark.parametrize("named", CONTENT.values(), ids=CONTENT)
def test_what_stays_attention_is_what_it_was(named):
    """Two heads sharp enough to be exact in float64, two that look at content or far: only the first two go."""
    layer = quadratic_layer([[0, 1], [2, 1], [-1, 0], [0, -1]], [400.0, 0.01, 400.0, 0.01], **named)
    x = tokens()
    found = lower(layer, x, tolerance=0.01, kernel=2)
    assert found.certificate.lowered == (0, 2) and found.rest.spec.heads == 2
    assert torch.allclose(found(x), layer(x), atol=1e-10)
    other = tokens(seed=9)
    assert torch.allclose(found(other), layer(other), atol=1e-10)
    assert (found.certificate.certified is None) == (named["score"] == "dot")


@pytest.mark.parametrize(
    "position", [rg.rope(), rg.shaw(3), rg.relative_table(4), rg.t5_buckets(8, 12)], ids=repr
)
def test_heads_of_other_positions_that_stay_keep_their_own_rows(position):
    """Their weights are the same, and two parts of an attention add up to it."""
    layer = rg.Attention(6, heads=3, d_k=4, d_v=5, position=position).build().double().eval()
    x = tokens(11)
    _, weights = layer(x, return_weights=True)
    split = SplitHeads(layer)
    rest = split.keep([0, 2], (11,), keep_bias=True)
    assert torch.allclose(rest(x, return_weights=True)[1], weights[:, [0, 2]], atol=1e-12)
    gone = split.keep([1], (11,), keep_bias=False)
    assert torch.allclose(rest(x) + gone(x), layer(x), atol=1e-12)


@pytest.mark.parametrize("position", [rg.relative_table(4), rg.t5_buckets(8, 12), rg.alibi()], ids=repr)
def test_a_causal_head_of_the_previous_token_goes_and_its_neighbors_stay(position):
    """One head's bias singles out a key; under a causal pattern the first query has itself alone."""
    layer = rg.Attention(6, heads=3, d_k=3, d_v=5, position=position, score="position", pattern=rg.causal())
    layer = layer.build().double().eval()
    with torch.no_grad():
        for p in layer.position.parameters():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(0)))
            p[1, p.shape[1] // 2 - 1 if isinstance(position, rg.relative_table) else 1] = 400.0
    found = lower(layer, size=11, tolerance=0.01, kernel=2)
    if not isinstance(position, rg.alibi):
        assert found.certificate.lowered == (1,) and found.certificate.heads[1].offset == (-1,)
    x = tokens(11)
    assert torch.allclose(found(x), layer(x), atol=1e-10)


def test_fewer_alibi_heads_keep_their_slopes():
    """Slopes follow from the number of heads; those that stay hold theirs."""
    layer = (
        rg.Attention(6, heads=2, d_k=3, d_v=5, position=rg.alibi(), pattern=rg.causal())
        .build()
        .double()
        .eval()
    )
    x = tokens(11)
    with torch.no_grad():
        layer.w_q.weight[:3] = 0.0  # the first head depends only on distance, slope 1/16
        layer.w_q.bias[:3] = 0.0
        layer.w_q.weight[3:] *= 5.0
    found = lower(layer, x, tolerance=0.02, kernel=11)
    assert found.certificate.lowered == (0,) and isinstance(found.rest.spec.position, rg.relative_table)
    weights = layer(x, return_weights=True)[1][:, 1:]
    assert torch.allclose(found.rest(x, return_weights=True)[1], weights, atol=1e-7)  # slopes are float32


@pytest.mark.ledger("S2.4.2.6")
def test_a_content_dependent_head_is_measured_on_the_data():
    layer = quadratic_layer([[0, 1], [0, 0]], [30.0, 0.0], score="dot")
    x = tokens()
    certificate = lower(layer, x, tolerance=0.05).certificate
    assert [h.kind for h in certificate.heads] == ["shift", "attention"]
    assert certificate.certified is None and certificate.measured_on == "the data"
    weights = layer(x, return_weights=True)[1]
    keys = torch.arange(35).reshape(GRID)
    keys = torch.cat([keys[:, 1:], keys[:, -1:]], 1).flatten()
    apart = 1 - weights[:, 0, torch.arange(35), keys]
    assert certificate.heads[0].worst == pytest.approx(apart.max().item(), abs=1e-12)
    assert certificate.heads[0].mean == pytest.approx(apart.mean().item(), abs=1e-12)


def no_positions():
    return rg.Attention(6, heads=2).build()


def shaw_values():
    return rg.Attention(6, heads=2, position=rg.shaw(2, values=True)).build()


def cross():
    return rg.Attention(6, heads=2, d_context=4, position=rg.alibi()).build()


@pytest.mark.parametrize(
    ("layer", "named", "text"),
    [
        (no_positions, {}, "the scores of an attention without a position encoding depend only on content; declare "
         "one, for example position=rg.quadratic(), or pass data= if positions are added to its input"),
        (lambda: quadratic_layer([[0, 1]], [9.0], score="dot"), {}, "score='dot' depends on content, so no distance "
         "holds for all inputs; pass data= to measure it, or declare score='position'"),
        (lambda: quadratic_layer([[0, 1]], [9.0], score="dot"), {"data": tokens(), "tolerance": 0.0},
         "tolerance=0 is not possible with score='dot', which depends on content; use a positive tolerance, or "
         "declare score='position'"),
        (lambda: rg.Attention(6, heads=2, position=rg.alibi(), score="position").build(), {},
         "the length of the sequence does not follow from position=alibi(); pass size=n"),
        (shaw_values, {}, "shaw(2, values=True) adds vectors to the values, which a convolution cannot express; "
         "use values=False"),
        (cross, {}, "d_context=4 differs from d_model=6; only self-attention can be lowered"),
        (lambda: nn.Linear(2, 2), {}, "Linear cannot be lowered; pass a layer built by rg.Attention or returned "
         "by rg.lift, or use lower_all for all layers of a model"),
        (no_positions, {"tolerance": 1.0}, "tolerance=1.0 is not a total variation distance in [0, 1)"),
    ],
)  # fmt: skip
def test_what_cannot_be_lowered_is_refused_with_what_is_missing(layer, named, text):
    with pytest.raises(rg.SpecError) as e:
        lower(layer(), **named)
    assert str(e.value) == text


def test_an_attention_without_positions_may_be_measured_where_the_input_has_them():
    """Position vectors in the input, one-hot: a head that attends to the previous position."""
    n = 7
    layer = rg.Attention(2 * n, heads=1, d_k=n, d_v=3, biases="none", pattern=rg.causal()).build().double()
    with torch.no_grad():
        layer.w_q.weight.copy_(torch.cat([torch.eye(n).roll(1, 1), torch.zeros(n, n)], 1) * 99)
        layer.w_k.weight.copy_(torch.cat([torch.eye(n), torch.zeros(n, n)], 1))
    x = torch.cat([torch.eye(n, dtype=f64).expand(2, n, n), torch.randn(2, n, n, dtype=f64)], -1)
    certificate = lower(layer, x, tolerance=0.01).certificate
    assert certificate.heads[0].kind == "shift" and certificate.heads[0].offset == (-1,)


def test_a_lowered_layer_refuses_calls_that_it_was_not_lowered_for():
    near = torch.ones(35, 35, dtype=torch.bool).tril(8).triu(-8)
    layer = quadratic_layer([[0, 1]], [40.0])
    plain, windowed = lower(layer), lower(layer, pattern=near)
    x = tokens()
    assert torch.allclose(windowed(x, pattern=near.clone()), layer(x, pattern=near), atol=1e-9)
    assert torch.allclose(plain(x, lengths=None, return_weights=False), layer(x), atol=1e-9)
    with pytest.raises(
        rg.ShapeError, match="this attention was lowered with another pattern; lower it again"
    ):
        plain(x, pattern=near)
    with pytest.raises(rg.ShapeError, match="another pattern"):
        windowed(x)
    with pytest.raises(
        rg.ShapeError,
        match="a lowered attention is fixed to a grid of 5 × 7 and does not support lengths; call",
    ):
        plain(x, lengths=torch.tensor([3, 3, 3]))
    with pytest.raises(rg.ShapeError, match="34 positions on a grid of 5 × 7; expected 35"):
        plain(x[:, 1:])
    with pytest.raises(rg.ShapeError, match=r"data has 34 positions on a grid of \(5, 7\); expected 35"):
        lower(layer, x[:, 1:])


def test_a_lifted_layer_that_learned_is_lowered_head_by_head():
    """Offsets that moved are rounded; one that is now between two keys stays attention, with the rest's values."""
    conv = nn.Conv1d(2, 3, 3, padding=1, groups=1, dtype=f64)
    lifted = lift(conv, sharpness=9.0)
    with torch.no_grad():
        lifted.center[0] += 0.1  # (−0.9): still nearest to −1
        lifted.center[2] -= 0.5  # between 0 and 1
    x = torch.randn(4, 2, 11, dtype=f64)
    found = lower(lifted, x, tolerance=0.05)
    certificate = found.certificate
    assert certificate.lowered == (0, 1) and certificate.size is None and certificate.heads[0].offset == (-1,)
    span = (x.amax(-1).clamp(min=0) - x.amin(-1).clamp(max=0)).max().item()
    assert (found(x) - lifted(x)).abs().max().item() <= certificate.certified * span
    assert certificate.heads[0].worst == pytest.approx(lifted.leak()[0].item())
    assert lower(lifted, x, tolerance=0.0).certificate.lowered == ()
    with torch.no_grad():
        lifted.center[1] = 2.0  # past the window: there is no such tap
    assert 1 not in lower(lifted, x).certificate.lowered


def test_groups_come_back_only_while_they_are_apart():
    conv = nn.Conv2d(4, 6, 3, groups=2, dtype=f64)
    lifted = lift(conv)
    assert lower(lifted).convolution.groups == 2
    with torch.no_grad():
        lifted.w_v.weight += 0.1
    grown = lower(lifted).convolution
    x = torch.randn(1, 4, 5, 5, dtype=f64)
    assert grown.groups == 1 and torch.allclose(grown(x), lifted(x), atol=1e-12)


def test_the_nearest_shift_of_known_weights():
    weights = torch.zeros(2, 2, 6, 6, dtype=f64)
    weights[:, 0] = torch.eye(6).roll(1, 1)
    weights[:, 0, 5] = torch.eye(6)[5]  # past the end: the last key
    weights[:, 1, 1:, :-1] = torch.eye(5)  # the previous key; query 0 has no allowed key
    near = nearest_shifts(weights, (6,))
    assert near.offset == ((1,), (-1,)) and near.border == ("replicate", "zeros")
    assert near.worst.tolist() == [0.0, 0.0]
    weights[1, 0] = 1 / 6
    near = nearest_shifts(weights, (6,))
    assert near.worst[0].item() == pytest.approx(5 / 6) and near.mean[0].item() == pytest.approx(5 / 12)
    with pytest.raises(
        rg.ShapeError, match="weights of 6 queries over 6 keys do not fit a grid of 2 × 4; both must be 8"
    ):
        nearest_shifts(weights, (2, 4))


def test_offsets_of_a_long_sequence_are_narrowed_down_by_their_diagonals():
    n = 700  # 1,399 offsets, more than are tried
    weights = torch.eye(n)[(torch.arange(n) - 17).clamp(min=0)][None, None]
    assert nearest_shifts(weights, (n,)).offset == ((-17,),)


@pytest.mark.ledger("S2.4.2.5")
def test_weights_by_offset_sum_to_one_and_give_center_and_spread():
    layer = quadratic_layer([[0, 1], [-1, -2]], [500.0, 0.5], grid=(9, 11))
    weights = layer(tokens(99), return_weights=True)[1]
    share = by_offset(weights, (9, 11))
    assert share.shape == (2, 17, 21)
    assert share.sum((1, 2)).tolist() == pytest.approx([1.0, 1.0])
    assert share[0, 8, 11].item() == pytest.approx(10 / 11)  # the last column attends to itself
    found = spread(weights, (9, 11))
    assert found.center[0].tolist() == pytest.approx([0.0, 10 / 11])
    assert found.entropy[0].item() == pytest.approx(0.0, abs=1e-9)
    assert found.spread[0].item() == pytest.approx((10 / 11 - (10 / 11) ** 2) ** 0.5)  # E‖δ‖² − ‖center‖²
    w = weights.detach()[0, 1].double()
    y, x = torch.arange(99) // 11, torch.arange(99) % 11
    delta = torch.stack([y - y[:, None], x - x[:, None]], -1).double()
    center = (w[..., None] * delta).sum((0, 1)) / 99
    away = (w * (delta - center).square().sum(-1)).sum() / 99
    assert found.center[1].tolist() == pytest.approx(center.tolist())
    assert found.spread[1].item() == pytest.approx(float(away) ** 0.5) and found.spread[1] > 0.9
    assert found.entropy[1].item() == pytest.approx(float(-(w * w.log()).nan_to_num(0.0).sum() / 99))
    assert found.content.tolist() == pytest.approx([0.0, 0.0], abs=1e-9)
    one, other = torch.eye(99, dtype=f64), torch.full((99, 99), 1 / 99, dtype=f64)
    both = torch.stack([one, other])[:, None]
    assert spread(both, (9, 11)).content.item() == pytest.approx((1 - 1 / 99) / 2)


def test_total_variation_counts_what_a_row_lacks_as_weight_on_a_zero_key():
    rows = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 0.0]], dtype=f64)
    others = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]], dtype=f64)
    assert total_variation(rows, others).tolist() == [0.5, 1.0]


def test_a_certificate_prints_as_a_table_and_writes_json():
    heads = (Head(0, "shift", (0, 1), 1, 0.002, 0.001), Head(1, "attention", (-1, 2), 0, 0.7, 0.5))
    certificate = Certificate(heads, 0.05, (8, 8), "replicate", 0.0125, 0.01, "the data", 11.96)
    assert str(certificate).splitlines() == [
        "head  nearest shift s  kind       taps  worst TV  mean TV",
        "   0  (0, -1)          shift         1     0.002    0.001",
        "   1  (+1, -2)         attention     0       0.7      0.5",
        "1 of 2 heads lowered at tolerance 0.05; 8 × 8, border of replicate",
        "error: certified 0.013 · range; measured 0.01 on the data; 12.0 × as fast",
    ]
    assert json.loads(certificate.json())["heads"][1]["offset"] == [-1, 2]
    assert certificate.lowered == (0,)


def test_every_attention_of_a_model_is_lowered_on_its_inputs():
    attention = rg.Attention(6, heads=2, d_k=3, d_v=3, position=rg.quadratic(grid=GRID))
    model = (
        rg.Encoder(rg.Block(attention, rg.FeedForward(12)), 2, head=rg.ClassifierHead(4))
        .build()
        .double()
        .eval()
    )
    with torch.no_grad():
        for block in model.blocks:
            block.attention.position.center.copy_(torch.tensor([[0.0, 1.0], [-1.0, 0.0]]))
            block.attention.position.alpha.fill_(60.0)
        model.blocks[1].attention.position.alpha[1] = 0.0
    x = tokens()
    lowered, certificates = lower_all(model, x)
    assert list(certificates) == ["blocks.0.attention", "blocks.1.attention"]
    assert certificates["blocks.0.attention"].lowered == (0, 1) and certificates[
        "blocks.1.attention"
    ].lowered == (0,)
    assert torch.allclose(lowered(x), model(x), atol=1e-8)
    assert "heads [0] of 2 lowered" in repr(lowered)


class OwnThenCross(nn.Module):
    """An attention, then a decoder with cross-attention to the input."""

    def __init__(self):
        super().__init__()
        self.own = rg.Attention(6, heads=2, position=rg.quadratic(), score="position").build()
        past, cross = rg.Attention(6, heads=2, pattern=rg.causal()), rg.Attention(6, heads=2)
        self.stack = rg.Decoder(rg.Block(past, None, cross=cross), 1).build()

    def forward(self, x):
        return self.stack(self.own(x), x)


def test_attention_to_a_context_or_with_a_shared_bias_stays_in_a_lowered_model():
    x = tokens(11, dtype=torch.float32)
    lowered, certificates = lower_all(OwnThenCross(), x)
    assert list(certificates) == ["own", "stack.blocks.0.attention"] and lowered(x).shape == x.shape
    shared = rg.Encoder(rg.Block(rg.Attention(6, heads=2), None), 1, position=rg.alibi()).build()
    assert lower_all(shared, x)[1] == {}


WINDOWS = [rg.window(34), rg.window(9), rg.full(), rg.window(2)]  # of 35 positions


@pytest.mark.parametrize("called", [None, rg.per_head(WINDOWS), rg.per_head(WINDOWS).allowed(35)], ids=type)
def test_heads_that_stay_attention_keep_their_patterns(called):
    alpha, center = [50.0, 0.05, 50.0, 0.05], [[0.0, 1.0], [0.0, 0.0], [1.0, 0.0], [0.0, 0.0]]
    layer = quadratic_layer(center, alpha, pattern=WINDOWS if called is None else rg.full())
    x = tokens()
    lowered = lower(layer, x, tolerance=0.05, pattern=called)
    assert lowered.certificate.lowered == (0, 2)
    kept = rg.per_head(WINDOWS[1::2])
    assert lowered.rest.spec.pattern == (kept if called is None else rg.full())
    expected = layer(x, pattern=called)
    assert torch.allclose(lowered(x, pattern=called), expected, atol=1e-9)
    assert not torch.allclose(layer(x, pattern=rg.window(0)), expected, atol=1e-2)

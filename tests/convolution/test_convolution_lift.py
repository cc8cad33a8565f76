"""A convolution as attention: exact when hard, bounded when soft, refused where it does not fit."""

import math

import pytest
import torch
from torch import nn

import regard as rg
from convolution_cases import inputs_for, random_convolution
from ledger_cases import agrees, case, cases
from regard.convolution import (
    Lifted,
    head_readings,
    leak,
    lift,
    lifting,
    sharpness,
    sharpness_for,
    shift_heads,
    tap_of,
)

f64 = torch.float64
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even")


@pytest.mark.ledger("S2.3.0.1", "S2.3.2.2", "S2.3.2.3", "S2.3.2.5", "S2.3.3.1", "S2.3.3.2")
@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 1e-5), (f64, 1e-12)])
def test_lifted_convolutions_are_the_convolutions(dtype, within):
    """L25, L27: any kernel, dilation, stride, groups and padding, 1-D and 2-D; bench/convolution_exact.py has 200."""
    for seed in range(60):
        conv = random_convolution(seed, dtype)
        x = inputs_for(conv, 2, seed)
        with torch.no_grad():
            gap = (lift(conv)(x) - conv(x)).abs().max()
        assert gap <= within, (seed, conv)


def test_the_layout_is_the_convolution_s_also_without_a_batch():
    conv = nn.Conv2d(3, 5, (3, 2), stride=(2, 1), padding=1, dtype=f64)
    x = torch.randn(3, 7, 11, dtype=f64)
    assert torch.allclose(lift(conv)(x), conv(x), atol=1e-12)
    with pytest.raises(rg.ShapeError, match=r"shape \(2, 4, 7, 11\); expected \(batch, 3, height, width\)"):
        lift(conv)(torch.randn(2, 4, 7, 11, dtype=f64))
    with pytest.raises(rg.ShapeError, match=r"shape \(7,\); expected \(batch, 3, length\)"):
        lift(nn.Conv1d(3, 5, 3))(torch.randn(7))
    with pytest.raises(
        rg.ShapeError,
        match=r"of size 3 along axis 0, .* is smaller than a window of 5; use a size of at least 5",
    ):
        lift(nn.Conv1d(3, 5, 5))(torch.randn(1, 3, 3))


def test_an_even_kernel_with_padding_same_is_aligned_like_in_pytorch():
    for conv in (
        nn.Conv1d(2, 3, 4, padding="same", dtype=f64),
        nn.Conv2d(2, 3, (2, 4), padding="same", dtype=f64),
    ):
        x = inputs_for(conv, 2, 0)
        assert torch.allclose(lift(conv)(x), conv(x), atol=1e-12)


def test_a_long_sequence_is_read_window_by_window():
    """More queries than the hard form takes at a time, with a stride across the seams."""
    conv = nn.Conv1d(2, 3, 3, stride=2, dilation=5, padding=7, dtype=f64)
    x = torch.randn(1, 2, 5 * lifting.QUERY_CHUNK + 13, dtype=f64)
    assert torch.allclose(lift(conv)(x), conv(x), atol=1e-12)


@pytest.mark.ledger("S2.3.2.1")
@pytest.mark.parametrize("dtype", [torch.float32, f64])
def test_the_soft_form_stays_within_its_bound_and_the_bound_is_near(dtype):
    """L26 on 200 random inputs for each convolution; on the worst of them the bound is within 10 ×."""
    ulp = torch.finfo(dtype).eps
    for seed in range(12):
        conv = random_convolution(seed, dtype)
        x = inputs_for(conv, 200, seed)
        span = (x.max().clamp(min=0) - x.min().clamp(max=0)).item()  # a border of zeros counts
        slack = 16 * ulp * conv.weight.detach().abs().flatten(1).sum(1).max().item() * span
        for alpha in (0.7, 3.0, 8.0):
            lifted = lift(conv, sharpness=alpha)
            with torch.no_grad():
                error, bound = (lifted(x) - conv(x)).abs().flatten(2).amax(-1), lifted.bound(x)
            assert (error <= bound + slack).all(), (seed, alpha)
            assert bound.max() <= lifted.bound_over(span) * (1 + 1e-12)
            worst = error.amax(-1).argmax()
            if bound[worst].max() > 1e-4:
                assert bound[worst].max() <= 10 * error[worst].max(), (seed, alpha)


@pytest.mark.ledger("S2.3.2.1", "S2.4.1.1")
def test_a_3_x_3_kernel_on_a_6_x_6_image_needs_alpha_46_to_be_exact_to_1e_13():
    """L26's own numbers, and its control: α = 1 is not exact."""
    conv = nn.Conv2d(1, 1, 3, padding=1, dtype=f64)
    rng = torch.Generator().manual_seed(0)
    x = torch.rand(1, 1, 6, 6, dtype=f64, generator=rng)
    error = {alpha: (lift(conv, sharpness=alpha)(x) - conv(x)).abs().max() for alpha in (1, 10, 20, 46)}
    assert error[10] < 1e-2 and error[20] < 1e-6 and error[46] < 1e-13
    assert error[1] > 1e-2 and error[10] > 1e-8


@pytest.mark.ledger("S2.4.1.1")
@pytest.mark.parametrize("c", cases("attention.quadratic_head"), ids=lambda c: c["id"])
def test_the_leak_bounds_the_ledger_s_heads_whatever_the_size(c):
    given, missed = c["inputs"], c["expected"]["one_minus_p_max"]
    found = leak(torch.tensor([given["shift"]], dtype=f64), torch.tensor([given["alpha"]], dtype=f64)).item()
    assert found >= missed * (1 - 1e-12)
    if given["alpha"] >= 5 and c["expected"]["target_inside"]:  # there the rest of the plane adds nothing
        assert found == pytest.approx(missed, rel=1e-11)


def test_the_leak_of_a_head_between_two_keys_is_half_and_of_a_flat_one_all():
    center = torch.tensor([[0.5], [3.0], [2.0]])
    assert leak(center, torch.tensor([50.0, 0.0, -1.0])).tolist() == pytest.approx([0.5, 1.0, 1.0])


def test_the_sharpness_for_an_error_is_the_least_that_keeps_it():
    conv = random_convolution(4)
    x = torch.rand(20, *inputs_for(conv, 1, 0).shape[1:], dtype=f64)  # in [0, 1], and so is the zero border
    for wanted in (0.3, 1e-3, 1e-7):
        alpha = sharpness_for(conv, wanted)
        assert (lift(conv, sharpness=alpha)(x) - conv(x)).abs().max() <= wanted
        assert lift(conv, sharpness=alpha).bound_over(1.0) <= wanted
        assert lift(conv, sharpness=alpha * 0.999).bound_over(1.0) > wanted
    assert sharpness(1e-6, axes=2) == pytest.approx(sharpness(1e-3, axes=2, weight=1e3))
    assert sharpness(2.0, axes=1) == 1e-4  # anything does
    with pytest.raises(rg.SpecError, match=r"error=0: no finite sharpness is exact; leave sharpness out"):
        sharpness_for(conv, 0)


@pytest.mark.ledger("S2.3.2.2", "S2.3.2.4", "S2.3.3.1", "S2.3.3.2")
@pytest.mark.parametrize("c", cases("conv.shift_heads"), ids=lambda c: c["id"])
def test_any_map_of_heads_to_shifts_gives_the_ledger_s_numbers(c):
    given = c["inputs"]
    x, taps = torch.tensor(given["x"], dtype=f64), torch.tensor(given["W"], dtype=f64)
    bias = torch.tensor(given["bias"], dtype=f64) if "bias" in given else None
    layer = shift_heads(given["shifts"], taps, bias, stride=given.get("stride", 1))
    assert layer.geometry.shifts == tuple((s,) for s in given["shifts"])
    assert agrees(layer(x.mT[None])[0].mT.tolist(), c["expected"], c["compare"])


@pytest.mark.ledger("S2.3.2.4", "S2.3.2.5")
def test_shifts_are_the_flipped_kernel_and_unflipped_is_off_by_the_size_of_the_numbers():
    """The output is Σ x[q − s] W_s: law L25 with its control, on a grid."""
    conv = nn.Conv2d(3, 5, 3, padding=1, bias=False, dtype=f64)
    x = torch.randn(2, 3, 7, 11, dtype=f64)
    taps = conv.weight.detach().flatten(2).permute(2, 1, 0)
    offsets = lift(conv).geometry.offsets
    flipped = shift_heads([tuple(-o for o in offset) for offset in offsets], taps)
    assert torch.allclose(flipped(x), conv(x), atol=1e-12)
    assert (shift_heads(offsets, taps)(x) - conv(x)).abs().max() > 0.1
    assert offsets[5] == (0, 1) and tap_of(5, (3, 3)) == (1, 2)  # head 5 is the tap right of the middle


@pytest.mark.ledger("S2.3.3.2")
def test_strided_queries_are_computed_directly(monkeypatch):
    """L27: as many queries as outputs reach the engine; averaging instead of subsampling is another map."""
    seen, true = [], lifting.engine.attention
    spy = lambda q, *a, **k: seen.append((q.shape[2], k["at"])) or true(q, *a, **k)  # noqa: E731
    monkeypatch.setattr(lifting.engine, "attention", spy)
    conv = nn.Conv2d(1, 1, 3, stride=(3, 2), padding=1, dtype=f64)
    x = torch.randn(1, 1, 10, 11, dtype=f64)
    dense = nn.functional.conv2d(x, conv.weight, conv.bias, padding=1)
    assert torch.allclose(lift(conv)(x), dense[..., ::3, ::2], atol=1e-12)
    assert seen == [(4, (1, 3)), (6, (1, 2))]
    pooled = nn.functional.avg_pool2d(dense, (3, 2), ceil_mode=True)
    assert (lift(conv)(x) - pooled).abs().max() > 0.1


def test_the_weights_are_one_hot_and_mix_the_values_into_the_output():
    conv = nn.Conv2d(3, 5, 3, padding=1, stride=2, dtype=f64)
    x = torch.randn(1, 3, 7, 5, dtype=f64)
    for lifted, hot in ((lift(conv), True), (lift(conv, sharpness=0.8), False)):
        weights = lifted.weights((7, 5))
        assert weights.shape == (9, 4 * 3, 9 * 7)
        assert torch.allclose(weights.sum(-1), torch.ones(9, 12, dtype=f64))
        assert bool(((weights == 0) | (weights == 1)).all()) == hot
        padded = nn.functional.pad(x, (1, 1, 1, 1))[0].flatten(1)
        mixed = torch.einsum("hnm,cm,hoc->on", weights, padded, lifted.taps) + conv.bias[:, None]
        assert torch.allclose(mixed, lifted(x)[0].flatten(1), atol=1e-12)


def as_attention(lifted: Lifted, size: tuple[int, ...]) -> nn.Module:
    """The declared attention with the lifted module's numbers in it."""
    layer = lifted.declare(size).build().double()
    with torch.no_grad():
        layer.w_v.weight.copy_(lifted.w_v.weight)
        layer.w_o.load_state_dict(lifted.w_o.state_dict())
        layer.position.center.copy_(lifted.center)
        layer.position.alpha.copy_(lifted.alpha)
    return layer


@pytest.mark.parametrize("alpha", [None, 1.3])
def test_it_is_the_library_s_own_attention_over_the_padded_input(alpha):
    line = nn.Conv1d(3, 5, 3, padding=2, stride=2, dilation=2, dtype=f64)
    x = torch.randn(2, 3, 11, dtype=f64)
    lifted = lift(line, sharpness=alpha)
    keys = nn.functional.pad(x, (2, 2)).mT
    n = lifted(x).shape[-1]
    o = as_attention(lifted, (11,))(keys[:, :n], keys, at=(2, 2))
    assert torch.allclose(o.mT, lifted(x), atol=1e-12)

    grid = nn.Conv2d(3, 5, 3, padding=1, dtype=f64)
    x = torch.randn(2, 3, 5, 7, dtype=f64)
    lifted = lift(grid, sharpness=alpha)
    o = as_attention(lifted, (5, 7))(nn.functional.pad(x, (1, 1, 1, 1)).flatten(2).mT)
    inner = o.mT.unflatten(2, (7, 9))[..., 1:-1, 1:-1]
    assert torch.allclose(inner, lifted(x), atol=1e-12)


def test_soft_attention_trains_its_offsets_and_hard_attention_only_its_values():
    conv = nn.Conv2d(2, 3, 3, padding=1)
    x = torch.randn(2, 2, 5, 7)
    soft, hard = lift(conv, sharpness=1.0), lift(conv)
    for layer in (soft, hard):
        layer(x).square().sum().backward()
        assert layer.w_v.weight.grad.abs().sum() > 0 and layer.w_o.weight.grad.abs().sum() > 0
    assert soft.center.grad.abs().min() > 0 and soft.alpha.grad.abs().min() > 0
    assert hard.center.grad is None and not hard.center.requires_grad
    assert "hard, 9 heads" in repr(hard) and "soft" in repr(soft) and "border of zeros" in repr(hard)


@pytest.mark.ledger("S2.3.2.2")
def test_a_tap_with_a_rank_above_d_v_is_an_error_that_names_it():
    """L28."""
    conv = nn.Conv2d(5, 7, 3, dtype=f64)
    with torch.no_grad():
        conv.weight.copy_(
            torch.einsum("ok,kcyx->ocyx", torch.randn(7, 2).double(), torch.randn(2, 5, 3, 3).double())
        )
    x = torch.randn(2, 5, 6, 6, dtype=f64)
    narrow = lift(conv, d_v=2)
    assert narrow.w_v.out_features == 9 * 2 and torch.allclose(narrow(x), conv(x), atol=1e-12)
    with torch.no_grad():
        conv.weight[:, :, 1, 2] = torch.randn(7, 5).double()
    with pytest.raises(rg.SpecError) as e:
        lift(conv, d_v=2)
    assert str(e.value) == (
        "the tap at offset (1, 2) (head 5) has rank 5, which does not fit d_v=2; use d_v=5"
    )
    for d_v in (5, 6, 8):  # as wide as it needs, and wider
        assert torch.allclose(lift(conv, d_v=d_v)(x), conv(x), atol=1e-12)


def test_fewer_heads_than_offsets_are_an_error_and_more_heads_add_nothing():
    conv = nn.Conv2d(2, 3, 3, padding=1, dtype=f64)
    with pytest.raises(rg.SpecError) as e:
        lift(conv, heads=4)
    assert (
        str(e.value) == "heads=4 is less than the 9 taps of a kernel of 3 × 3; use heads=9, or leave it out"
    )
    with pytest.raises(rg.SpecError, match="heads=2 is less than the number of shifts; use heads=3"):
        shift_heads([-1, 0, 1], torch.randn(3, 2, 2), heads=2)
    with pytest.raises(rg.SpecError, match="3 shifts and 2 taps; pass one tap per shift"):
        shift_heads([-1, 0, 1], torch.randn(2, 2, 2))
    far = nn.Conv1d(2, 3, 1, padding=2, dtype=f64)  # no offset 0 at all
    for one, x in ((conv, torch.randn(1, 2, 5, 7, dtype=f64)), (far, torch.randn(1, 2, 7, dtype=f64))):
        spare = lift(one, heads=12)
        assert spare.heads == 12 and torch.allclose(spare(x), one(x), atol=1e-12)


@pytest.mark.parametrize(
    ("conv", "named", "text"),
    [
        (
            nn.Conv3d(1, 1, 3),
            {},
            "Conv3d cannot be lifted; use an nn.Conv1d, nn.Conv2d, nn.AvgPool1d or nn.AvgPool2d",
        ),
        (nn.ConvTranspose1d(1, 1, 3), {}, "ConvTranspose1d cannot be lifted; use an nn.Conv1d"),
        (nn.LazyConv1d(3, 3), {}, "LazyConv1d has no weights yet; call it once before lifting it"),
        (
            nn.Conv1d(1, 1, 3, dtype=torch.complex64),
            {},
            "the kernel has dtype torch.complex64; lift its real and imaginary parts separately",
        ),
        (nn.Conv1d(1, 1, 3), {"sharpness": 0}, "sharpness=0 is not a positive finite number; leave it out"),
        (nn.Conv1d(1, 1, 3), {"sharpness": math.inf}, "sharpness=inf is not a positive finite number"),
        (nn.AvgPool1d(3, ceil_mode=True), {}, "ceil_mode=True allows windows that extend past the end"),
        (
            nn.AvgPool2d(3, divisor_override=2),
            {},
            "divisor_override=2: attention weights sum to 1; scale the result",
        ),
    ],
)
def test_what_cannot_be_lifted_is_refused_with_the_reason(conv, named, text):
    with pytest.raises(rg.SpecError, match=text):
        lift(conv, **named)


@pytest.mark.ledger("S4.1.3c.1")
def test_a_pointwise_convolution_is_the_diagonal():
    """L17: a kernel of 1 gives weights of I, and the layer is x W_V W_O at each position."""
    conv = nn.Conv2d(3, 5, 1, dtype=f64)
    lifted = lift(conv)
    assert torch.equal(lifted.weights((4, 3))[0], torch.eye(12, dtype=f64))
    x = torch.randn(2, 3, 4, 3, dtype=f64)
    at_each = torch.einsum("bcyx,oc->boyx", x, lifted.taps[0]) + conv.bias[:, None, None]
    assert torch.allclose(lifted(x), at_each, atol=1e-12)
    assert (lift(conv, sharpness=1.0).weights((4, 3))[0] - torch.eye(12, dtype=f64)).abs().max() > 0.1


@pytest.mark.ledger("S4.1.3e.1")
@pytest.mark.parametrize("counted", [True, False])
def test_average_pooling_is_attention_with_equal_scores(counted):
    """L18, 1-D and 2-D: a border of zero keys where they count, none where they do not."""
    line = nn.AvgPool1d(5, stride=2, padding=2, count_include_pad=counted)
    x = torch.randn(2, 3, 11, dtype=f64)
    assert torch.allclose(lift(line)(x), line(x), atol=1e-14)
    grid = nn.AvgPool2d((3, 2), stride=(1, 2), padding=(1, 1), count_include_pad=counted)
    x = torch.randn(2, 3, 7, 5, dtype=f64)
    assert torch.allclose(lift(grid)(x), grid(x), atol=1e-14)
    assert torch.allclose(lift(grid)(x[0]), grid(x[0]), atol=1e-14)
    other = nn.AvgPool2d((3, 2), stride=(1, 2), padding=(1, 1), count_include_pad=not counted)
    assert (lift(grid)(x) - other(x)).abs().max() > 1e-2
    assert ("zeros" if counted else "renormalized") in repr(lift(grid))


@pytest.mark.ledger("S4.1.3e.1")
@pytest.mark.parametrize("name", ["conv.average3.zero", "conv.average3.renormalised"])
def test_the_ledger_s_averages_of_three(name):
    c = case(name)
    pool = nn.AvgPool1d(3, stride=1, padding=1, count_include_pad=c["inputs"]["border"] == "zero")
    y = lift(pool)(torch.tensor(c["inputs"]["x"], dtype=f64)[None])
    assert agrees(y[0].tolist(), c["expected"], {**c["compare"], "abs": 1e-14})


@pytest.mark.ledger("S4.1.2b.1", "S2.3.2.6")
def test_a_head_is_a_position_of_the_kernel_exactly_and_a_filter_only_by_analogy():
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 5, 3, padding=1, dtype=f64)
    both = head_readings(conv)
    assert both.by_position.heads == 9 and both.by_filter.heads == 5
    assert [tap_of(h, (2, 3)) for h in range(6)] == [(y, x) for y in range(2) for x in range(3)]  # row by row
    assert both.by_position.error < 1e-12 and both.by_position.exact
    filters = conv.weight.detach().flatten(2).mT
    beyond = torch.linalg.svdvals(filters)[:, 1:].norm() / filters.norm()  # no matrix of rank one is nearer
    assert float(beyond) <= both.by_filter.error < 1 and not both.by_filter.exact
    with torch.no_grad():  # one distribution over the neighbors times one vector: this filter one head can be
        conv.weight.copy_(torch.rand(5, 1, 3, 3) * torch.randn(5, 3, 1, 1))
        assert head_readings(conv).by_filter.exact
        conv.weight.copy_(torch.randn(5, 1, 3, 3) * torch.randn(5, 3, 1, 1))  # weights are not negative
        assert head_readings(conv).by_filter.error > 0.3
    table = str(both).splitlines()
    assert table[1].split() == ["number", "of", "heads", "9", "5"]
    assert table[0].split() == ["head", "=", "position", "of", "the", "kernel", "head", "=", "filter"]
    assert table[-1].split()[-3:] == ["exact", "an", "analogy"]

"""The convolutional baselines against loops over positions, and what it can see against autodiff."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ledger_cases import case, cases
from regard.errors import ShapeError
from regard.nn.convolutional import ConvolutionalModel, image_classifier, reach
from regard.spec import Convolutional
from regard.training.data.datasets import Digits

N, D_MODEL, VOCAB = 7, 5, 13

specs = st.builds(
    lambda layers, half, dilation, causal, separable: Convolutional(
        D_MODEL,
        layers=layers,
        kernel=2 * half + 1,
        dilation=dilation,
        causal=causal,
        separable=separable,
    ),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
)
KINDS = {
    "conv": Convolutional(D_MODEL, kernel=3),
    "conv_causal": Convolutional(D_MODEL, kernel=3, causal=True),
    "conv_dilated": Convolutional(D_MODEL, kernel=3, dilation=3),
    "conv_dilated_causal": Convolutional(D_MODEL, kernel=3, dilation=3, causal=True),
}


def built(spec, seed=0):
    torch.manual_seed(seed)
    return ConvolutionalModel(spec).double().eval()


def vectors(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def support(model, n):
    """(n, n): whether output i has a gradient towards input j, by autodiff."""
    x = vectors(n, D_MODEL).repeat(n, 1, 1).requires_grad_()  # copy i is asked about output i
    each = torch.arange(n)
    (gradient,) = torch.autograd.grad(model(x)[each, each].sum(), x)
    return gradient.abs().sum(-1) > 0


def by_loops(model, x):
    """The formula, position by position: x_i + gelu(W_pointwise Σ_t W_t x_(i + (t − middle)·step) + b)."""
    spec = model.spec
    for l, layer in enumerate(model.layers):
        weight = layer.convolution.weight  # (out, in / groups, kernel)
        if spec.separable:
            weight = torch.stack([torch.diag(weight[:, 0, t]) for t in range(spec.kernel)], -1)
        middle = spec.kernel - 1 if spec.causal else spec.kernel // 2
        rows = []
        for i in range(len(x)):
            total = torch.zeros(spec.d_model, dtype=x.dtype)
            for t in range(spec.kernel):
                j = i + (t - middle) * spec.dilation**l
                if 0 <= j < len(x):
                    total = total + weight[:, :, t] @ x[j]
            if spec.separable:
                total = layer.pointwise.weight[:, :, 0] @ total + layer.pointwise.bias
            else:
                total = total + layer.convolution.bias
            rows.append(x[i] + F.gelu(total))
        x = torch.stack(rows)
    return x


@given(specs, st.integers(1, N))
@settings(max_examples=40, deadline=None)
def test_it_is_the_sum_over_taps_at_every_position(spec, n):
    model, x = built(spec), vectors(2, n, D_MODEL)
    expected = torch.stack([by_loops(model, row) for row in x])
    assert (model(x) - expected).abs().max() < 1e-12


@pytest.mark.ledger("S1.Q2a.2", "S1.Q6b.1", "S3.Q2a.1")
@given(specs, st.integers(1, 12))
@settings(max_examples=30, deadline=None)
def test_the_gradient_reaches_exactly_the_inputs_it_says_it_sees(spec, n):
    model = built(spec)
    assert torch.equal(support(model, n), model.dependence(n))
    assert model.dependence(n).sum(-1).max() <= min(n, model.receptive_field)


@pytest.mark.ledger("S1.Q2a.2")
def test_far_from_the_ends_the_bound_is_reached_unless_the_dilation_leaves_gaps():
    full = ConvolutionalModel(Convolutional(2, layers=3, kernel=3, dilation=3))
    assert full.receptive_field == 27 and full.dependence(53).sum(-1).max() == 27
    gaps = ConvolutionalModel(Convolutional(2, layers=2, kernel=3, dilation=4))
    assert gaps.receptive_field == 11 and gaps.dependence(53).sum(-1).max() == 9


def least_depth(kind, n, margin):
    """Layers until n neighbors, with `margin` more positions on either side, all see one another, by autodiff."""
    wanted = torch.ones(n, n, dtype=torch.bool)
    if kind.causal:
        wanted = wanted.tril()
    for depth in range(1, 2 * n):
        model = built(replace(kind, layers=depth))
        seen = support(model, n + 2 * margin)
        assert torch.equal(seen, model.dependence(n + 2 * margin))
        among = seen[margin : margin + n, margin : margin + n]
        assert not (among & ~wanted).any()
        if torch.equal(among, wanted):
            return depth
    return None


@pytest.mark.ledger("S1.Q2a.1", "S1.Q2a.2", "S1.Q6b.1")
@pytest.mark.parametrize(
    "kind, margin", [("conv", 0), ("conv_causal", 0), ("conv_dilated_causal", 0), ("conv_dilated", 40)]
)
def test_the_least_depth_that_joins_all_sixteen_positions_is_the_ledgers(kind, margin):
    c = case("compare.16.512.k3.w2")
    assert c["inputs"]["k"] == KINDS[kind].kernel
    assert least_depth(KINDS[kind], c["inputs"]["n"], margin) == c["expected"][kind]["layers_to_connect_all"]


@pytest.mark.ledger("S1.Q2a.2")
def test_between_two_ends_a_centered_dilated_stack_never_joins_all_positions():
    """The ledger's 4 layers need paths past the ends: 15 = 27 − 9 − 3 starts to the left of position 0."""
    assert least_depth(KINDS["conv_dilated"], 16, margin=0) is None
    deep = ConvolutionalModel(replace(KINDS["conv_dilated"], layers=60))  # 3^59 is past 2^63
    assert torch.equal(
        deep.dependence(16), ConvolutionalModel(replace(KINDS["conv_dilated"], layers=3)).dependence(16)
    )
    assert not deep.dependence(16)[15, 0]


@pytest.mark.ledger("S1.Q2a.1", "S1.Q2a.2", "S1.Q6b.1")
@pytest.mark.parametrize("c", cases("compare.layers"), ids=lambda c: c["id"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_reach_gives_the_depth_of_every_case(c, kind):
    n, k = c["inputs"]["n"], c["inputs"]["k"]
    spec = replace(KINDS[kind], kernel=k, dilation=k if KINDS[kind].dilation > 1 else 1)
    depth = c["expected"][kind]["layers_to_connect_all"]
    assert reach(replace(spec, layers=depth))[0] >= n - 1
    assert depth == 1 or reach(replace(spec, layers=depth - 1))[0] < n - 1


def test_the_future_does_not_reach_a_causal_stack():
    model = built(Convolutional(D_MODEL, layers=3, kernel=4, dilation=2, causal=True))
    x = vectors(1, 11, D_MODEL)
    for t in range(11):
        changed = x.clone()
        changed[:, t] = 7.0
        assert torch.equal(model(changed)[:, :t], model(x)[:, :t])
        assert not torch.equal(model(changed)[:, t], model(x)[:, t])


@given(specs)
@settings(max_examples=25, deadline=None)
def test_padding_reaches_nothing_and_rows_equal_each_alone(spec):
    model, lengths = built(spec), torch.tensor([7, 3, 0, 1])
    x = vectors(4, N, D_MODEL)
    padding = torch.arange(N) >= lengths[:, None]
    out = model(x, lengths)
    assert torch.equal(out, model(x.masked_fill(padding[..., None], torch.nan), lengths))
    assert out[padding].eq(0).all()
    for row, length in enumerate(lengths.tolist()):
        if length:
            assert (out[row, :length] - model(x[row : row + 1, :length])[0]).abs().max() < 1e-12


def test_padding_gets_no_gradient_and_gives_none():
    model = built(Convolutional(D_MODEL, layers=2))
    x = vectors(1, N, D_MODEL).requires_grad_()
    model(x, torch.tensor([3])).square().sum().backward()
    assert x.grad[0, 3:].eq(0).all() and x.grad[0, :3].ne(0).all()


def test_with_a_vocabulary_ids_go_in_and_logits_come_out():
    model = built(Convolutional(D_MODEL, layers=2, vocab=VOCAB))
    ids = torch.randint(VOCAB, (2, N), generator=torch.Generator().manual_seed(0))
    logits = model(ids, torch.tensor([N, 3]))
    assert logits.shape == (2, N, VOCAB)
    bare = built(Convolutional(D_MODEL, layers=2))
    bare.layers.load_state_dict(model.layers.state_dict())
    assert torch.equal(logits, model.head(bare(model.embedding(ids), torch.tensor([N, 3]))))
    assert torch.equal(logits[1, 3], model.head.bias)
    ids[1, 3:] = -100  # an id that is no token, where none is read
    assert torch.equal(model(ids, torch.tensor([N, 3])), logits)


@pytest.mark.ledger("S1.Q2a.3")
def test_a_separable_kernel_has_k_d_plus_d_squared_weights():
    whole = ConvolutionalModel(Convolutional(D_MODEL, layers=1, kernel=3))
    apart = ConvolutionalModel(Convolutional(D_MODEL, layers=1, kernel=3, separable=True))
    assert sum(p.numel() for p in whole.parameters()) == 3 * D_MODEL**2 + D_MODEL
    assert sum(p.numel() for p in apart.parameters()) == 3 * D_MODEL + D_MODEL**2 + D_MODEL


def test_a_dilation_far_past_the_sequence_costs_nothing_and_adds_nothing():
    deep = built(Convolutional(D_MODEL, layers=30, dilation=3))  # 3^29 zeros a side would fill any memory
    x = vectors(1, N, D_MODEL)
    assert (deep(x)[0] - by_loops(deep, x[0])).abs().max() < 1e-12


def test_dropout_acts_in_training_alone():
    model = built(Convolutional(D_MODEL, layers=2, dropout=0.5))
    x = vectors(1, N, D_MODEL)
    assert torch.equal(model(x), model(x))
    model.train()
    assert not torch.equal(model(x), model(x))


@pytest.mark.parametrize(
    "vocab, x, lengths, message",
    [
        (
            None,
            torch.zeros(2, 7, 4),
            None,
            "input of shape (2, 7, 4); (batch, positions, d_model=5) is needed",
        ),
        (
            13,
            torch.zeros(2, 7, 5),
            None,
            "input of shape (2, 7, 5) and torch.float32 to a model with vocab=13; "
            "token ids (batch, positions) are needed",
        ),
        (
            None,
            torch.zeros(2, 7, 5),
            torch.tensor([1, 2, 3]),
            "lengths has shape (3,); one per batch row is needed: (2,)",
        ),
    ],
)
def test_an_input_that_does_not_fit_gets_an_error_that_names_what_does(vocab, x, lengths, message):
    model = ConvolutionalModel(Convolutional(5, vocab=vocab))
    with pytest.raises(ShapeError) as e:
        model._check(x, lengths)  # forward itself is stopped earlier by the shape checker of the test run
    assert str(e.value) == message


def test_a_layer_shows_the_pairs_it_joins():
    model = ConvolutionalModel(Convolutional(5, layers=2, dilation=3, causal=True))
    assert "pattern=causal() & dilated(2, 3)" in repr(model)


@pytest.mark.ledger("S4.1.5a.1")
def test_a_small_convolutional_classifier_is_the_baseline_of_a_vision_transformer():
    """A hierarchy of convolutions: each half the size, each pixel seeing its neighbors; it learns digits quickly."""
    torch.manual_seed(0)
    model = image_classifier((8, 8), 10, widths=(8, 16))
    sizes = []
    for layer in model:
        if isinstance(layer, nn.Conv2d | nn.MaxPool2d | nn.Linear):
            layer.register_forward_hook(lambda _, __, out: sizes.append(tuple(out.shape[1:])))
    image = torch.randn(1, 1, 8, 8)
    assert model(image).shape == (1, 10)
    assert sizes == [(8, 8, 8), (8, 4, 4), (16, 4, 4), (16, 2, 2), (10,)]
    first = torch.autograd.functional.jacobian(model[0], image)[0, 0, 3, 4, 0, 0].abs() > 0
    assert first.nonzero().tolist() == [
        [y, x] for y in (2, 3, 4) for x in (3, 4, 5)
    ]  # 3 × 3 around the pixel
    data = Digits().load(Path())
    images, labels = data.train.inputs, data.train.labels
    adam, g = torch.optim.Adam(model.parameters(), 1e-2), torch.Generator().manual_seed(0)
    for _ in range(30):
        rows = torch.randint(0, len(labels), (64,), generator=g)
        adam.zero_grad()
        nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
        adam.step()
    with torch.no_grad():
        right = (model(data.test.inputs).argmax(-1) == data.test.labels).double().mean()
    assert right > 0.7
    with pytest.raises(
        ShapeError, match=r"an image of 6 × 8 cannot be halved 2 times; use sides divisible by 4"
    ):
        image_classifier((6, 8), 10)

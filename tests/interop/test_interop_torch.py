"""PyTorch's own modules and ours, loaded into one another: the same outputs, the same gradients."""

import copy
import re
import runpy
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import regard as rg
from regard.interop import from_torch, to_torch
from regard.nn.attention import MultiHeadAttention
from regard.nn.block import Block
from regard.nn.stack import EncoderDecoder, Stack

f32, f64 = torch.float32, torch.float64
TOLERANCE = {f32: 1e-5, f64: 1e-10}
B, N, M, HEADS, D, D_FF, D_CONTEXT = 3, 7, 11, 3, 15, 13, 17
N_LENGTHS, M_LENGTHS = torch.tensor([7, 4, 1]), torch.tensor([5, 11, 2])

dtypes = pytest.mark.parametrize("dtype", [f32, f64], ids=["float32", "float64"])
biases = pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
norm_places = pytest.mark.parametrize("norm_first", [True, False], ids=["pre", "post"])
batch_orders = pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "time first"])
modes = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
# Two switches that do not touch each other are turned together: half the runs, the same sights.
biases_and_modes = pytest.mark.parametrize(
    "bias, training", [(True, True), (False, False)], ids=["bias, train", "no bias, eval"]
)


# --- helpers ---


def stirred(module: nn.Module, dtype: torch.dtype = f64, seed: int = 0) -> nn.Module:
    """Every weight random: norms and biases too, so that no two parts can be confused."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.normal_(std=0.4, generator=g)
    return module.to(dtype)


def vectors(*shape: int, dtype: torch.dtype = f64, seed: int = 1) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def padding(lengths: Tensor, m: int) -> Tensor:
    """PyTorch's key_padding_mask: True = leave out."""
    return torch.arange(m) >= lengths[:, None]


def future(n: int) -> Tensor:
    """PyTorch's attn_mask: True = leave out."""
    return torch.ones(n, n, dtype=torch.bool).triu(1)


def turn(x: Tensor, batch_first: bool) -> Tensor:
    return x if batch_first else rearrange(x, "b n d -> n b d")


RENAMED = [
    (r"\bself_attn\b", "attention"),
    (r"\bmultihead_attn\b", "cross"),
    (r"\bout_proj\b", "w_o"),
    (r"\b([qkv])_proj_weight\b", r"w_\1.weight"),
    (r"\bbias_([kv])\b", r"extra_\1"),
    (r"\blinear1\b", "feed_forward.w_in"),
    (r"\blinear2\b", "feed_forward.w_out"),
    (r"\bnorm1\b", "attention_norm"),
    (r"\bnorm3\b", "feed_forward_norm"),
    (r"\blayers\b", "blocks"),
]


def in_our_names(theirs: nn.Module) -> dict[str, Tensor]:
    """The gradients of a PyTorch module, by the names that ours give the same weights."""
    found = {}
    for path, p in theirs.named_parameters():
        owner = theirs.get_submodule(path.rpartition(".")[0].rpartition(".norm")[0])
        second = "cross_norm" if isinstance(owner, nn.TransformerDecoderLayer) else "feed_forward_norm"
        name = re.sub(r"\bnorm2\b", second, path)
        for old, new in RENAMED:
            name = re.sub(old, new, name)
        if "in_proj_" in name:
            for part, grad in zip("qkv", p.grad.chunk(3)):
                found[name.replace("in_proj_", f"w_{part}.")] = grad
        else:
            found[name] = p.grad
    return found


def close(got: Tensor, expected: Tensor, what: str) -> None:
    worst = (got - expected).abs().max()
    assert worst <= TOLERANCE[got.dtype] * max(1.0, expected.abs().max().item()), (
        f"{what}: off by {worst:.1e}"
    )


def agree(
    ours: nn.Module,
    theirs: nn.Module,
    call_ours: Callable[..., Tensor],
    call_theirs: Callable[..., Tensor],
    *inputs: Tensor,
    real: Tensor | None = None,
) -> None:
    """Outputs on the real rows, gradients of the inputs and of every weight."""
    results = []
    for module, call in ((ours, call_ours), (theirs, call_theirs)):
        module.zero_grad()
        given = [x.clone().requires_grad_() for x in inputs]
        out = call(module, *given)
        kept = out if real is None else out[real]
        (kept * vectors(*kept.shape, dtype=kept.dtype, seed=5)).sum().backward()
        results.append((kept, [x.grad for x in given]))
    (o, grads), (expected, expected_grads) = results
    assert expected.abs().max() > 0.1
    close(o, expected, "output")
    for i, (got, want) in enumerate(zip(grads, expected_grads, strict=True)):
        close(got, want, f"gradient of input {i}")
    named = in_our_names(theirs)
    assert sorted(named) == sorted(name for name, _ in ours.named_parameters())
    for name, p in ours.named_parameters():
        close(p.grad, named[name], f"gradient of {name}")


def both_ways(theirs: nn.Module, pattern: rg.Pattern | None, *calls, **named) -> None:
    """Theirs in ours, and ours back in theirs, compute the same; the way there and back changes no bit."""
    ours = from_torch(theirs, pattern=pattern)
    agree(ours, theirs, *calls, **named)
    first = next(m for m in theirs.modules() if isinstance(m, nn.MultiheadAttention)).batch_first
    back = to_torch(ours, batch_first=first)
    agree(ours, back, *calls, **named)
    assert type(back) is type(theirs)
    assert back.training == ours.training == theirs.training
    before, after = theirs.state_dict(), back.state_dict()
    assert list(before) == list(after)
    for name in before:
        assert before[name].dtype == after[name].dtype and torch.equal(before[name], after[name]), name


# --- nn.MultiheadAttention ---


@pytest.mark.ledger("S3.Q2.1", "S3.Q2.2", "S4.1.4b.1", "S4.1.4c.1", "S0.Q2b.11")
@dtypes
@biases
@batch_orders
@pytest.mark.parametrize("mask", ["none", "causal", "padding", "both"])
def test_self_attention_is_the_same_in_both(dtype, bias, batch_first, mask):
    theirs = stirred(nn.MultiheadAttention(D, HEADS, bias=bias, batch_first=batch_first), dtype)
    causal, padded = mask in ("causal", "both"), mask in ("padding", "both")

    def call_theirs(module, x):
        x = turn(x, batch_first)
        hide = {"attn_mask": future(N) if causal else None}
        hide["key_padding_mask"] = padding(N_LENGTHS, N) if padded else None
        return turn(module(x, x, x, **hide, need_weights=False)[0], batch_first)

    def call_ours(module, x):
        return module(x, lengths=N_LENGTHS if padded else None)

    pattern = rg.causal() if causal else None
    real = ~padding(N_LENGTHS, N) if padded else None
    both_ways(theirs, pattern, call_ours, call_theirs, vectors(B, N, D, dtype=dtype), real=real)


@pytest.mark.ledger("S3.Q2.1", "S3.Q2.2", "S4.1.4c.1")
@dtypes
@biases
@batch_orders
@pytest.mark.parametrize("d_context", [D, D_CONTEXT])
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
def test_attention_to_a_context_is_the_same_in_both(dtype, bias, batch_first, d_context, padded):
    wide = {"kdim": d_context, "vdim": d_context}
    theirs = stirred(nn.MultiheadAttention(D, HEADS, bias=bias, batch_first=batch_first, **wide), dtype)
    assert (theirs.in_proj_weight is None) == (d_context != D)  # three separate weights

    def call_theirs(module, x, context):
        x, context = turn(x, batch_first), turn(context, batch_first)
        hide = padding(M_LENGTHS, M) if padded else None
        o, _ = module(x, context, context, key_padding_mask=hide, need_weights=False)
        return turn(o, batch_first)

    def call_ours(module, x, context):
        return module(x, context, lengths=M_LENGTHS if padded else None)

    x, context = vectors(B, N, D, dtype=dtype), vectors(B, M, d_context, dtype=dtype, seed=2)
    both_ways(theirs, None, call_ours, call_theirs, x, context)


@pytest.mark.ledger("S3.Q2.1")
def test_the_weights_of_each_head_are_the_same():
    theirs = stirred(nn.MultiheadAttention(D, HEADS, batch_first=True))
    x, context = vectors(B, N, D), vectors(B, M, D, seed=2)
    hide = padding(M_LENGTHS, M)
    _, expected = theirs(x, context, context, key_padding_mask=hide, average_attn_weights=False)
    _, weights = from_torch(theirs)(x, context, lengths=M_LENGTHS, return_weights=True)
    assert weights.shape == expected.shape == (B, HEADS, N, M)
    close(weights, expected, "weights")


@pytest.mark.ledger("S3.Q2.2")
def test_a_row_of_padding_alone_is_nan_in_pytorch_and_zeros_in_ours():
    theirs = stirred(nn.MultiheadAttention(D, HEADS, bias=False, batch_first=True))
    x, lengths = vectors(B, N, D), torch.tensor([N, 0, 2])
    expected, _ = theirs(x, x, x, key_padding_mask=padding(lengths, N))  # zeros too with need_weights=False
    o = from_torch(theirs)(x, lengths=lengths)
    assert expected[1].isnan().all()
    assert (o[1] == 0).all()
    close(o[::2], expected[::2], "output")


# --- layers ---


def run_encoder(module: nn.Module, x: Tensor, batch_first=True, causal=False, padded=False) -> Tensor:
    hide = {"src_key_padding_mask": padding(N_LENGTHS, N) if padded else None}
    mask = "mask" if isinstance(module, nn.TransformerEncoder) else "src_mask"
    return turn(module(turn(x, batch_first), **{mask: future(N) if causal else None}, **hide), batch_first)


def run_decoder(module: nn.Module, x: Tensor, context: Tensor, batch_first=True, padded=False) -> Tensor:
    hide = {"tgt_mask": future(N)}
    if padded:
        hide["tgt_key_padding_mask"] = padding(N_LENGTHS, N)
        hide["memory_key_padding_mask"] = padding(M_LENGTHS, M)
    return turn(module(turn(x, batch_first), turn(context, batch_first), **hide), batch_first)


@pytest.mark.ledger("S3.Q3.0", "S4.1.4e.2", "S4.1.4d.1", "S3.Q2.2", "S0.Q2b.11")
@dtypes
@norm_places
@biases_and_modes
@pytest.mark.parametrize("causal, padded", [(False, False), (False, True), (True, True)])
def test_an_encoder_layer_is_a_block(dtype, norm_first, bias, training, causal, padded):
    options = {"dropout": 0.0, "layer_norm_eps": 1e-3, "norm_first": norm_first, "bias": bias}
    theirs = nn.TransformerEncoderLayer(D, HEADS, D_FF, batch_first=True, **options)
    theirs = stirred(theirs, dtype).train(training)
    both_ways(
        theirs,
        rg.causal() if causal else None,
        lambda module, x: module(x, lengths=N_LENGTHS if padded else None),
        partial(run_encoder, causal=causal, padded=padded),
        vectors(B, N, D, dtype=dtype),
        real=~padding(N_LENGTHS, N) if padded else None,
    )


@pytest.mark.ledger("S1.Q5a.5", "S3.Q3.0", "S4.1.4e.2", "S4.1.4d.1", "S3.Q2.2", "S0.Q2b.11")
@dtypes
@norm_places
@biases_and_modes
@pytest.mark.parametrize("batch_first, padded", [(True, False), (True, True), (False, True)])
def test_a_decoder_layer_is_a_causal_block_with_cross(dtype, norm_first, bias, batch_first, training, padded):
    options = {"dropout": 0.0, "layer_norm_eps": 1e-3, "norm_first": norm_first, "bias": bias}
    theirs = nn.TransformerDecoderLayer(D, HEADS, D_FF, batch_first=batch_first, **options)
    theirs = stirred(theirs, dtype).train(training)
    given = {"lengths": N_LENGTHS, "context_lengths": M_LENGTHS} if padded else {}
    both_ways(
        theirs,
        None,
        lambda module, x, context: module(x, context, **given),
        partial(run_decoder, batch_first=batch_first, padded=padded),
        vectors(B, N, D, dtype=dtype),
        vectors(B, M, D, dtype=dtype, seed=2),
        real=~padding(N_LENGTHS, N) if padded else None,
    )


def test_a_decoder_layer_looks_ahead_where_the_pattern_says_so():
    theirs = stirred(nn.TransformerDecoderLayer(D, HEADS, D_FF, 0.0, batch_first=True))
    x, context = vectors(B, N, D), vectors(B, M, D, seed=2)
    assert from_torch(theirs).spec.attention.pattern == rg.causal()
    close(from_torch(theirs, pattern=rg.full())(x, context), theirs(x, context), "output")
    allowed = (rg.causal() & rg.window(2)).allowed(N)
    ours = from_torch(theirs, pattern=rg.causal() & rg.window(2))
    close(ours(x, context), theirs(x, context, tgt_mask=~allowed), "output")


@pytest.mark.ledger("S4.1.4d.1")
@pytest.mark.parametrize(
    "activation, name",
    [
        ("relu", "relu"),
        (F.relu, "relu"),
        (torch.relu, "relu"),
        (nn.ReLU(), "relu"),
        ("gelu", "gelu"),
        (F.gelu, "gelu"),
        (nn.GELU(), "gelu"),
        (nn.GELU("tanh"), "gelu_tanh"),
        (partial(F.gelu, approximate="tanh"), "gelu_tanh"),
        (F.silu, "silu"),
        (nn.SiLU(), "silu"),
        (torch.tanh, "tanh"),
        (nn.Sigmoid(), "sigmoid"),
        (F.leaky_relu, "leaky_relu"),
        (nn.ReLU6(inplace=True), "relu6"),
        (nn.ELU(), "elu"),
        (F.selu, "selu"),
        (nn.Mish(), "mish"),
        (nn.Softplus(), "softplus"),
        (F.hardswish, "hardswish"),
    ],
)
def test_an_activation_is_known_however_it_is_given(activation, name):
    theirs = nn.TransformerEncoderLayer(D, HEADS, D_FF, 0.0, activation, batch_first=True)
    theirs = stirred(theirs).eval()
    x = vectors(B, N, D)
    ours = from_torch(theirs)
    assert ours.spec.feed_forward.activation == name
    close(ours(x), theirs(x), "output")
    close(to_torch(ours)(x), ours(x), "output")


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
@norm_places
def test_the_fast_path_of_pytorch_gives_the_same(activation, norm_first):
    """It is taken in eval mode, without gradients, for an even number of heads."""
    block = rg.Block(
        rg.Attention(10, heads=2),
        rg.FeedForward(D_FF, activation=activation),
        norm_at="pre" if norm_first else "post",
    )
    ours = stirred(rg.Encoder(block, 2, final_norm=True).build()).eval()
    x = vectors(B, N, 10)
    with torch.no_grad():
        theirs = to_torch(ours)(x, src_key_padding_mask=padding(N_LENGTHS, N))
        o = ours(x, lengths=N_LENGTHS)
    real = ~padding(N_LENGTHS, N)
    close(o[real], theirs[real], "output")


@norm_places
def test_rms_norms_are_carried(norm_first):
    """In training mode: the fast path of PyTorch asks every norm for a bias."""
    theirs = nn.TransformerEncoderLayer(D, HEADS, D_FF, 0.0, batch_first=True, norm_first=norm_first)
    theirs.norm1, theirs.norm2 = nn.RMSNorm(D), nn.RMSNorm(D)
    theirs = stirred(theirs)
    ours = from_torch(theirs)
    assert (ours.spec.norm, ours.spec.eps) == ("rms", torch.finfo(torch.float64).eps)
    agree(ours, theirs, lambda m, x: m(x), lambda m, x: m(x), vectors(B, N, D))


@pytest.mark.parametrize("padded", [False, True])
def test_a_key_of_zeros_is_a_sink_of_logit_zero(padded):
    theirs = stirred(nn.MultiheadAttention(D, HEADS, add_zero_attn=True, batch_first=True))
    ours = from_torch(theirs)
    assert ours.spec.sink_logits and not ours.sink_logits.requires_grad
    x = vectors(B, N, D)
    given = {"key_padding_mask": padding(N_LENGTHS, N)} if padded else {}
    expected, weights = theirs(x, x, x, average_attn_weights=False, **given)
    o, found = ours(x, lengths=N_LENGTHS if padded else None, return_weights=True)
    close(o, expected, "output")
    close(found, weights[..., :-1], "weights")
    assert weights[..., -1].mean() > 0.01


@pytest.mark.parametrize("zero_too", [False, True])
@pytest.mark.parametrize("masked", ["", "causal", "padding"])
def test_a_learned_key_beside_those_of_the_input_is_carried(masked, zero_too):
    """add_bias_kv: every query sees it, whatever the mask says of the others."""
    theirs = stirred(
        nn.MultiheadAttention(D, HEADS, add_bias_kv=True, add_zero_attn=zero_too, batch_first=True)
    )
    ours = from_torch(theirs, pattern=rg.causal() if masked == "causal" else None)
    assert ours.spec.extra_key and rg.cost(ours.spec, n=N).parameters == sum(
        p.numel() for p in ours.parameters()
    )
    x, more, lengths = vectors(B, N, D), {"need_weights": False}, None
    if masked == "causal":
        more["attn_mask"] = ~rg.causal().allowed(N)
    if masked == "padding":
        more["key_padding_mask"], lengths = padding(N_LENGTHS, N), N_LENGTHS
    calls = lambda m, x: m(x, lengths=lengths), lambda m, x: m(x, x, x, **more)[0]
    if zero_too:
        close(calls[0](ours, x), calls[1](theirs, x), "output")
    else:
        both_ways(theirs, rg.causal() if masked == "causal" else None, *calls, x)
    _, expected = theirs(x, x, x, average_attn_weights=False, **(more | {"need_weights": True}))
    _, found = ours(x, lengths=lengths, return_weights=True)
    close(found, expected[..., :N], "weights")


def test_keys_and_values_of_two_inputs_are_carried():
    theirs = stirred(nn.MultiheadAttention(D, HEADS, kdim=D_CONTEXT, vdim=8, batch_first=True))
    assert from_torch(theirs).spec.d_values == 8
    both_ways(
        theirs, None, lambda m, x, k, v: m(x, k, values=v), lambda m, x, k, v: m(x, k, v, need_weights=False)[0],
        vectors(B, N, D), vectors(B, M, D_CONTEXT, seed=2), vectors(B, M, 8, seed=3),
    )  # fmt: skip
    with pytest.raises(rg.ShapeError, match=f"has width {D_CONTEXT}; declared is d_values=8: pass values=…"):
        from_torch(theirs)(vectors(B, N, D), vectors(B, M, D_CONTEXT))
    with pytest.raises(rg.ShapeError, match="11 keys and 7 values; each key has one value"):
        from_torch(theirs)(vectors(B, 3, D), vectors(B, 11, D_CONTEXT), values=vectors(B, 7, 8))


@norm_places
def test_each_norm_has_its_eps(norm_first):
    layer = nn.TransformerDecoderLayer(D, HEADS, D_FF, 0.0, batch_first=True, norm_first=norm_first)
    layer.norm1.eps, layer.norm2.eps, layer.norm3.eps = 0.1, 0.5, 2.0
    theirs = stirred(nn.TransformerDecoder(layer, 2, nn.LayerNorm(D, 4.0)))
    ours = from_torch(theirs, pattern=rg.full())
    assert (ours.spec.block.eps, ours.spec.final_eps) == ((0.1, 0.5, 2.0), 4.0)
    assert rg.from_json(ours.spec.json()) == ours.spec
    x, context = vectors(B, N, D), vectors(B, M, D, seed=2)
    agree(ours, theirs, lambda m, x, c: m(x, c), lambda m, x, c: m(x, c), x, context)
    close(to_torch(ours)(x, context), theirs(x, context), "output")


# --- stacks ---


def test_a_decoder_without_a_causal_mask_is_the_same_in_both():
    """As in models that decode boxes: nothing is written token by token."""
    theirs = nn.TransformerDecoder(nn.TransformerDecoderLayer(D, HEADS, D_FF, 0.0, batch_first=True), 2)
    theirs = stirred(theirs)
    x, context = vectors(B, N, D), vectors(B, M, D, seed=2)
    ours = from_torch(theirs, pattern=rg.full())
    assert isinstance(ours.spec, rg.Decoder)
    agree(ours, theirs, lambda m, x, c: m(x, c), lambda m, x, c: m(x, c), x, context)
    whole = stirred(nn.Transformer(10, 2, 1, 1, D_FF, 0.0, batch_first=True))
    source, target = vectors(B, M, 10), vectors(B, N, 10, seed=2)
    close(from_torch(whole, pattern=rg.full())(source, target), whole(source, target), "output")


@pytest.mark.ledger("S3.Q3.0", "S4.1.4e.2")
@dtypes
@norm_places
@pytest.mark.parametrize(
    "normed, bias, causal", [(True, True, False), (True, False, True), (False, True, True)]
)
def test_an_encoder_is_a_stack(dtype, norm_first, bias, normed, causal):
    layer = nn.TransformerEncoderLayer(
        D, HEADS, D_FF, 0.0, batch_first=True, norm_first=norm_first, bias=bias
    )
    norm = nn.LayerNorm(D, bias=bias) if normed else None
    theirs = stirred(nn.TransformerEncoder(layer, 2, norm, enable_nested_tensor=False), dtype)
    both_ways(
        theirs,
        rg.causal() if causal else None,
        lambda module, x: module(x, lengths=N_LENGTHS),
        partial(run_encoder, causal=causal, padded=True),
        vectors(B, N, D, dtype=dtype),
        real=~padding(N_LENGTHS, N),
    )


@pytest.mark.ledger("S3.Q3.0", "S4.1.4e.2")
@dtypes
@norm_places
@pytest.mark.parametrize("batch_first, normed", [(True, True), (False, False)])
def test_a_decoder_is_a_stack(dtype, norm_first, batch_first, normed):
    layer = nn.TransformerDecoderLayer(D, HEADS, D_FF, 0.0, batch_first=batch_first, norm_first=norm_first)
    theirs = stirred(nn.TransformerDecoder(layer, 2, nn.LayerNorm(D) if normed else None), dtype)
    both_ways(
        theirs,
        None,
        lambda module, x, context: module(x, context, lengths=N_LENGTHS, context_lengths=M_LENGTHS),
        partial(run_decoder, batch_first=batch_first, padded=True),
        vectors(B, N, D, dtype=dtype),
        vectors(B, M, D, dtype=dtype, seed=2),
        real=~padding(N_LENGTHS, N),
    )


def transformer(**given) -> nn.Transformer:
    options = {"d_model": D, "nhead": HEADS, "num_encoder_layers": 2, "num_decoder_layers": 1}
    with warnings.catch_warnings():  # PyTorch warns that it will not use nested tensors here
        warnings.simplefilter("ignore")
        return nn.Transformer(**{**options, "dim_feedforward": D_FF, "dropout": 0.0, **given})


@pytest.mark.ledger("S3.Q3.0", "S4.1.4e.2", "S3.Q2.2", "S0.Q2b.11")
@dtypes
@norm_places
@batch_orders
@biases_and_modes
def test_a_transformer_is_an_encoder_and_a_decoder(dtype, norm_first, batch_first, bias, training):
    theirs = transformer(norm_first=norm_first, batch_first=batch_first, bias=bias, layer_norm_eps=1e-3)
    theirs = stirred(theirs, dtype).train(training)

    def call_theirs(module, source, target):
        hidden = padding(M_LENGTHS, M)
        o = module(
            turn(source, batch_first),
            turn(target, batch_first),
            tgt_mask=future(N),
            src_key_padding_mask=hidden,
            tgt_key_padding_mask=padding(N_LENGTHS, N),
            memory_key_padding_mask=hidden,
        )
        return turn(o, batch_first)

    def call_ours(module, source, target):
        return module(source, target, source_lengths=M_LENGTHS, target_lengths=N_LENGTHS)

    source, target = vectors(B, M, D, dtype=dtype), vectors(B, N, D, dtype=dtype, seed=2)
    both_ways(theirs, None, call_ours, call_theirs, source, target, real=~padding(N_LENGTHS, N))


@pytest.mark.ledger("S3.Q2b.3")
def test_padding_at_the_end_of_a_target_needs_no_mask():
    theirs = stirred(transformer(batch_first=True))
    source, target = vectors(B, M, D), vectors(B, N, D, seed=2)
    hide = padding(M_LENGTHS, M)
    hidden = {"src_key_padding_mask": hide, "memory_key_padding_mask": hide}
    hidden["tgt_key_padding_mask"] = padding(N_LENGTHS, N)
    expected = theirs(source, target, tgt_mask=future(N), **hidden)
    o = from_torch(theirs)(source, target, source_lengths=M_LENGTHS)
    real = ~padding(N_LENGTHS, N)
    close(o[real], expected[real], "output")


# --- declarations ---

sizes = st.tuples(st.integers(1, 4), st.integers(1, 5))


@settings(max_examples=12)
@given(
    sizes,
    st.integers(1, 7),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from(["post", "pre"]),
    st.sampled_from(["relu", "gelu", "gelu_tanh", "silu"]),
    st.booleans(),
)
def test_a_declaration_comes_back_from_pytorch(size, d_ff, layers, bias, norm_at, activation, crosses):
    heads, d_k = size
    words = "all" if bias else "none"
    looks = rg.Attention(heads * d_k, heads=heads, biases=words, dropout=0.1)
    block = rg.Block(
        replace(looks, pattern=rg.causal() if crosses else rg.full()),
        rg.FeedForward(d_ff, activation=activation, bias=bias, dropout=0.2),
        cross=replace(looks, heads=1) if crosses else None,
        norm_at=norm_at,
        norm_bias=bias,
        eps=1e-4,
        dropout=0.3,
    )
    declared = (rg.Decoder if crosses else rg.Encoder)(block, layers, final_norm=bias)
    ours = declared.build()
    again = from_torch(to_torch(ours))
    assert again.spec == declared
    assert list(again.state_dict()) == list(ours.state_dict())
    for name, weight in ours.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name])


def test_each_module_becomes_the_one_that_is_declared_so():
    layer = nn.TransformerEncoderLayer(D, HEADS, D_FF)
    attention = from_torch(nn.MultiheadAttention(D, HEADS, dropout=0.2))
    assert isinstance(attention, MultiHeadAttention)
    assert attention.spec == rg.Attention(D, heads=HEADS, dropout=0.2)
    block = from_torch(layer)
    assert isinstance(block, Block)
    inside = rg.Attention(D, heads=HEADS, dropout=0.1)
    assert block.spec == rg.Block(inside, rg.FeedForward(D_FF, dropout=0.1), dropout=0.1)
    encoder = from_torch(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    assert isinstance(encoder, Stack)
    assert encoder.spec == rg.Encoder(block.spec, 2, final_norm=False)
    whole = from_torch(transformer(), pattern=rg.causal() & rg.window(3))
    assert isinstance(whole, EncoderDecoder)
    assert whole.spec.encoder.block.attention.pattern == rg.full()
    assert whole.spec.decoder.block.attention.pattern == rg.causal() & rg.window(3)
    assert whole.spec.encoder.final_norm and whole.spec.decoder.final_norm


@norm_places
def test_a_decoder_without_cross_is_an_encoder_in_pytorch(norm_first):
    """PyTorch's decoder layer always looks at a context; a causal stack without one is its encoder."""
    looks = rg.Attention(D, heads=HEADS, pattern=rg.causal())
    block = rg.Block(looks, rg.FeedForward(D_FF), norm_at="pre" if norm_first else "post")
    ours = stirred(rg.Decoder(block, 2).build())
    theirs = to_torch(ours)
    assert type(theirs) is nn.TransformerEncoder
    assert (theirs.norm is not None) == norm_first  # a final norm where the blocks are pre-norm
    x = vectors(B, N, D)
    close(ours(x), theirs(x, mask=future(N)), "output")


def test_rates_changed_by_hand_are_carried_each():
    layer = nn.TransformerDecoderLayer(D, HEADS, D_FF, 0.1)
    layer.self_attn.dropout, layer.multihead_attn.dropout, layer.dropout.p = 0.2, 0.3, 0.4
    block = from_torch(layer).spec
    assert (block.attention.dropout, block.cross.dropout) == (0.2, 0.3)
    assert (block.feed_forward.dropout, block.dropout) == (0.4, 0.1)
    back = to_torch(from_torch(layer))
    assert (back.self_attn.dropout, back.multihead_attn.dropout, back.dropout.p) == (0.2, 0.3, 0.4)
    assert back.dropout1.p == back.dropout2.p == back.dropout3.p == 0.1


def test_a_memory_of_another_width_is_carried():
    layer = nn.TransformerDecoderLayer(D, HEADS, D_FF, 0.0, batch_first=True)
    layer.multihead_attn = nn.MultiheadAttention(D, 5, kdim=D_CONTEXT, vdim=D_CONTEXT, batch_first=True)
    both_ways(
        stirred(layer),
        None,
        lambda module, x, context: module(x, context),
        run_decoder,
        vectors(B, N, D),
        vectors(B, M, D_CONTEXT, seed=2),
    )


# --- what else is kept ---


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, f32, f64])
@modes
def test_mode_dtype_and_frozen_weights_are_kept(dtype, training):
    theirs = nn.TransformerEncoderLayer(D, HEADS, D_FF, dtype=dtype).train(training)
    theirs.self_attn.in_proj_weight.requires_grad_(False)
    theirs.norm2.requires_grad_(False)
    ours = from_torch(theirs)
    assert {p.dtype for p in ours.parameters()} == {dtype}
    assert {m.training for m in ours.modules()} == {training}
    frozen = {name for name, p in ours.named_parameters() if not p.requires_grad}
    three = {f"attention.w_{c}.weight" for c in "qkv"}
    assert frozen == three | {"feed_forward_norm.weight", "feed_forward_norm.bias"}
    back = to_torch(ours)
    assert {p.dtype for p in back.parameters()} == {dtype}
    assert {m.training for m in back.modules()} == {training}
    for (name, p), (_, q) in zip(theirs.named_parameters(), back.named_parameters(), strict=True):
        assert p.requires_grad == q.requires_grad, name


def test_the_device_is_kept():
    theirs = nn.TransformerEncoderLayer(D, HEADS, D_FF)
    theirs.norm1 = nn.LayerNorm(D, device="meta")  # a second device that every machine has
    ours = from_torch(theirs)
    away = {name for name, p in ours.named_parameters() if p.device.type == "meta"}
    assert away == {"attention_norm.weight", "attention_norm.bias"}
    back = to_torch(ours)
    assert [p.device for p in back.parameters()] == [p.device for p in theirs.parameters()]


def test_weights_are_copies_and_no_random_number_is_used():
    theirs = transformer()
    before = copy.deepcopy(theirs.state_dict())
    state = torch.get_rng_state()
    ours = from_torch(theirs)
    back = to_torch(ours)
    assert torch.equal(torch.get_rng_state(), state)
    held = {p.untyped_storage().data_ptr() for m in (theirs, ours, back) for p in m.parameters()}
    assert len(held) == sum(len(list(m.parameters())) for m in (theirs, ours, back))
    with torch.no_grad():
        for p in ours.parameters():
            p.zero_()
    for m in (theirs, back):
        assert all(torch.equal(before[name], weight) for name, weight in m.state_dict().items())


def test_the_example_runs(capsys):
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "from_pytorch.py"))
    printed = capsys.readouterr().out
    assert "Transformer with 1,158,400 parameters, bit for bit" in printed
    assert "500,500 → 3,994" in printed

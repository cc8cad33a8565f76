"""What cannot be carried between PyTorch's modules and ours is refused, and the message names it."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import regard as rg
from regard.errors import SpecError
from regard.interop import from_torch, to_torch

D, HEADS, D_FF = 15, 3, 13
ALL = "relu, gelu, gelu_tanh, silu, tanh, sigmoid, leaky_relu, relu6, elu, selu, mish, softplus, hardswish"


def layer(**changed) -> nn.TransformerEncoderLayer:
    made = nn.TransformerEncoderLayer(D, HEADS, D_FF, 0.1, batch_first=True)
    for name, part in changed.items():
        setattr(made, name, part)
    return made


def encoder(*layers: nn.Module, norm: nn.Module | None = None) -> nn.TransformerEncoder:
    made = nn.TransformerEncoder(layer(), 1, norm, enable_nested_tensor=False)
    made.layers = nn.ModuleList(layers)
    return made


def refusal(module: nn.Module, **given) -> str:
    with pytest.raises(SpecError) as caught:
        from_torch(module, **given)
    return str(caught.value)


class Mine(nn.MultiheadAttention):
    pass


class MineToo(nn.TransformerEncoderLayer):
    pass


# --- from PyTorch ---


@pytest.mark.parametrize(
    "activation, called",
    [
        (torch.sin, "sin"),
        (nn.LeakyReLU(0.2), "LeakyReLU(negative_slope=0.2)"),
        (nn.functional.celu, "celu"),
    ],
)
def test_an_unknown_activation_is_refused(activation, called):
    assert refusal(layer(activation=activation)) == (
        f"activation {called} is not supported by regard; supported: {ALL}"
    )


def test_parts_of_one_layer_that_differ_are_refused():
    assert refusal(layer(dropout2=nn.Dropout(0.5))) == (
        "dropout1, dropout2, … drop [0.1, 0.5]; ours has one rate for all branches"
    )
    assert refusal(layer(norm2=nn.LayerNorm(D, bias=False))) == (
        "some norms have a bias and some have none; ours has one norm_bias for all"
    )


@pytest.mark.parametrize(
    "norm", [nn.Identity(), nn.BatchNorm1d(D), nn.LayerNorm(D, elementwise_affine=False)]
)
def test_another_norm_is_refused(norm):
    assert refusal(layer(norm1=norm)) == (
        f"{norm} in place of a norm; it needs to be nn.LayerNorm(d_model) or nn.RMSNorm(d_model), with its "
        "learned scale"
    )
    assert refusal(layer(norm1=nn.RMSNorm(D))) == (
        "nn.LayerNorm and nn.RMSNorm in one block; ours has one norm for all"
    )


def test_layers_that_differ_or_are_none_are_refused():
    other = layer(norm_first=True, self_attn=nn.MultiheadAttention(D, 5, 0.1))
    assert refusal(encoder(layer(), layer(), other)) == (
        "layers 0 and 2 differ in attention, norm_at; ours declares one block for all"
    )
    assert refusal(encoder()) == (
        "a TransformerEncoder without layers gives back what it is given; at least 1 is needed"
    )


def test_other_classes_are_refused_and_subclasses_too():
    takes = (
        "from_torch takes MultiheadAttention, TransformerEncoderLayer, TransformerDecoderLayer, "
        "TransformerEncoder, TransformerDecoder or Transformer, not "
    )
    tail = " (nor a subclass: it may compute something else)"
    assert refusal(nn.LSTM(3, 5)) == f"{takes}LSTM{tail}"
    assert refusal(Mine(D, HEADS)) == f"{takes}Mine{tail}"
    assert refusal(encoder(layer(), MineToo(D, HEADS))) == (
        "a MineToo among the layers of a TransformerEncoder; it takes nn.TransformerEncoderLayer"
    )
    custom = nn.Transformer(10, 2, 1, 1, 3, custom_encoder=nn.Identity(), batch_first=True)
    assert refusal(custom) == (
        "an nn.Transformer made with a custom Identity; an nn.TransformerEncoder is needed"
    )


def test_a_module_half_in_training_is_refused():
    half = layer()
    half.self_attn.eval()
    assert refusal(half) == (
        "some parts are in training mode and some are not; call train() or eval() on the whole"
    )


def test_weights_without_a_counterpart_are_refused():
    no_ordinary = "is not an ordinary parameter (left out, pruned or parametrized); the copy needs one there"
    normed = layer(linear1=parametrizations.weight_norm(nn.Linear(D, D_FF)))
    assert refusal(normed) == f"ParametrizedLinear.weight {no_ordinary}"
    assert refusal(layer(linear2=nn.Linear(D_FF, D, bias=False))) == f"Linear.bias {no_ordinary}"
    no_place = "the copy has no place for this; take it off first"
    assert refusal(layer(linear1=nn.Linear(D, D_FF, bias=False))) == f"linear2.bias: {no_place}"
    assert refusal(layer(extra=nn.Parameter(torch.zeros(3)))) == f"extra: {no_place}"
    assert refusal(layer(linear2=nn.Linear(7, D))) == (
        "Linear.weight takes (15, 13), and the weight to copy is (15, 7)"
    )


def test_a_layer_used_twice_is_refused_and_its_copy_is_not():
    once = layer()
    weight = "MultiheadAttention.in_proj_weight"
    assert refusal(encoder(once, once)) == (
        f"{weight} and {weight} are one shared weight, and the copy would hold two; untie them"
    )
    assert from_torch(encoder(once, copy.deepcopy(once))).spec.layers == 2


# --- to PyTorch ---

LOOKS, NETWORK = rg.Attention(D, heads=HEADS), rg.FeedForward(D_FF)
PAST = replace(LOOKS, pattern=rg.causal())
BY_HEAD = rg.per_head([rg.causal(), *[rg.window(2)] * (HEADS - 1)])
PLAIN = rg.Block(LOOKS, NETWORK)
CROSS = rg.Block(PAST, NETWORK, cross=LOOKS)


def refusal_to(declared: rg.Spec) -> str:
    with pytest.raises(SpecError) as caught:
        to_torch(declared.build())
    return str(caught.value)


@pytest.mark.parametrize(
    "changed, has",
    [
        ({"kv_heads": 1}, "kv_heads=3"),
        ({"d_k": 4}, "d_k=5"),
        ({"d_v": 4}, "d_v=5"),
        ({"d_out": 4}, "d_out=15"),
    ],
)
def test_sizes_that_pytorch_ties_are_refused_by_name(changed, has):
    [(name, given)] = changed.items()
    expected = f"{name}={given}: nn.MultiheadAttention with d_model=15 and heads=3 has {has}"
    assert refusal_to(replace(LOOKS, **changed)) == expected
    if name != "d_out":  # a block needs its own width back
        assert refusal_to(replace(PLAIN, attention=replace(LOOKS, **changed))) == f"attention.{expected}"
        assert refusal_to(replace(CROSS, cross=replace(LOOKS, **changed))) == f"cross.{expected}"
        deep = rg.Encoder(replace(PLAIN, attention=replace(LOOKS, **changed)), 2)
        assert refusal_to(deep) == f"block.attention.{expected}"


def test_heads_that_do_not_divide_are_refused():
    assert refusal_to(replace(LOOKS, heads=2, d_k=4, d_v=4)) == (
        "d_k=4: nn.MultiheadAttention with d_model=15 and heads=2 has d_k=7.5"
    )


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"position": rg.alibi()}, "position=alibi(): {} has no such option; it needs position=None"),
        ({"score": "additive"}, "score='additive': {} has no such option; it needs score='dot'"),
        ({"softcap": 2.0}, "softcap=2.0: {} has no such option; it needs softcap=None"),
        ({"sink_logits": True}, "sink_logits=True: {} has no such option; it needs sink_logits=False"),
        ({"output": False}, "output=False: {} has no such option; it needs output=True"),
        ({"scale": 1.0}, "scale=1.0: {} scales scores by 1/√d_k = 0.447214; leave it out"),
        ({"temperature": 0.0}, "scale=inf: {} scales scores by 1/√d_k = 0.447214; leave it out"),
        ({"biases": "output"}, "biases='output': {} has all biases or none; use 'all' or 'none'"),
        (
            {"pattern": BY_HEAD},
            f"pattern={BY_HEAD!r}: {{}} attends to all keys unless a call passes a mask; declare rg.full() "
            "and give each call attn_mask=~pattern.allowed(n).repeat(b, 1, 1)",
        ),
        (
            {"pattern": rg.window(2)},
            "pattern=window(2): {} attends to all keys unless a call passes a mask; "
            "declare rg.full() and give each call attn_mask=~pattern.allowed(n)",
        ),
    ],
)
def test_an_attention_that_pytorch_has_not_is_refused_by_its_field(changed, message):
    assert refusal_to(replace(LOOKS, **changed)) == message.format("nn.MultiheadAttention")


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"norm": "rms"}, "norm='rms': {} has no such option; it needs norm='layer'"),
        ({"norm": "none"}, "norm='none': {} has no such option; it needs norm='layer'"),
        ({"residual": False}, "residual=False: {} has no such option; it needs residual=True"),
        ({"feed_forward": None}, "feed_forward=None: {} always has one"),
        (
            {"feed_forward": replace(NETWORK, activation="swiglu")},
            "feed_forward.activation='swiglu': {} has no gate; use one of " + ALL,
        ),
    ],
)
def test_a_block_that_pytorch_has_not_is_refused_by_its_field(changed, message):
    assert refusal_to(replace(PLAIN, **changed)) == message.format("nn.TransformerEncoderLayer")
    assert refusal_to(replace(CROSS, **changed)) == message.format("nn.TransformerDecoderLayer")


def test_biases_in_some_parts_are_refused():
    some = replace(PLAIN, feed_forward=replace(NETWORK, bias=False))
    assert refusal_to(some) == (
        "nn.TransformerEncoderLayer has biases everywhere or nowhere, but "
        "norm_bias, attention.biases has one and feed_forward.bias has none"
    )
    some = rg.Decoder(replace(CROSS, cross=replace(LOOKS, biases="none")), 1)
    assert refusal_to(some) == (
        "nn.TransformerDecoderLayer has biases everywhere or nowhere, but "
        "block.norm_bias, block.feed_forward.bias, block.attention.biases has one and block.cross.biases has none"
    )


@pytest.mark.parametrize(
    "given, shown",
    [
        ({"head": rg.Pooler()}, "head=Pooler()"),
        ({"embedding": rg.Embedding(5, D)}, "embedding=Embedding(5, 15)"),
        ({"position": rg.alibi()}, "position=alibi()"),
    ],
)
def test_the_ends_of_a_model_are_refused_by_name(given, shown):
    [name] = given
    tail = f"has no such option; it needs {name}=None"
    assert refusal_to(rg.Encoder(PLAIN, 1, **given)) == f"{shown}: nn.TransformerEncoder {tail}"
    assert refusal_to(rg.Decoder(CROSS, 1, **given)) == f"{shown}: nn.TransformerDecoder {tail}"
    whole = rg.EncoderDecoder(rg.Encoder(PLAIN, 1), rg.Decoder(CROSS, 1, **given))
    assert refusal_to(whole) == f"decoder.{shown}: nn.TransformerDecoder {tail}"


def test_two_widths_in_one_transformer_are_refused():
    source = rg.Encoder(rg.Block(rg.Attention(17, heads=1), NETWORK), 1)
    target = rg.Decoder(replace(CROSS, cross=replace(LOOKS, d_context=17)), 1)
    assert refusal_to(rg.EncoderDecoder(source, target)) == (
        "an encoder 17 wide and a decoder 15 wide; nn.Transformer has one d_model"
    )


def test_to_torch_takes_our_modules_alone():
    with pytest.raises(SpecError) as caught:
        to_torch(nn.Linear(2, 3))
    assert str(caught.value) == (
        "to_torch takes MultiHeadAttention, Block, Stack or EncoderDecoder, not Linear "
        "(nor a subclass: it may compute something else)"
    )


def test_a_half_frozen_projection_does_not_fit_in_one_weight():
    ours = LOOKS.build()
    ours.w_k.requires_grad_(False)
    with pytest.raises(SpecError) as caught:
        to_torch(ours)
    assert str(caught.value) == (
        "w_q, w_k and w_v become one MultiheadAttention.in_proj_weight, and only some are frozen; "
        "freeze all three or none"
    )


def test_a_weight_that_ours_share_is_refused():
    ours = rg.Encoder(PLAIN, 2).build()
    ours.blocks[1] = ours.blocks[0]
    with pytest.raises(SpecError) as caught:
        to_torch(ours)
    assert str(caught.value) == (
        "Linear.weight and Linear.weight are one shared weight, and the copy would hold two; untie them"
    )

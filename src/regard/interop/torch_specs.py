"""The declaration of a PyTorch module, and the PyTorch module of a declaration, without weights."""

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from math import isclose
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import spec
from ..errors import SpecError
from ..pattern import Pattern, causal, full
from ..spec.base import require

# A partial for tanh: on the fast path of nn.TransformerEncoderLayer nn.GELU("tanh") runs as plain GELU.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "leaky_relu": F.leaky_relu,
    "relu6": F.relu6,
    "elu": F.elu,
    "selu": F.selu,
    "mish": F.mish,
    "softplus": F.softplus,
    "hardswish": F.hardswish,
}
# Modules of an activation, with the parameters that ours have.
MODULES: dict[str, nn.Module] = {
    "relu": nn.ReLU(), "silu": nn.SiLU(), "gelu": nn.GELU(), "gelu_tanh": nn.GELU("tanh"), "tanh": nn.Tanh(),
    "sigmoid": nn.Sigmoid(), "leaky_relu": nn.LeakyReLU(), "relu6": nn.ReLU6(), "elu": nn.ELU(), "selu": nn.SELU(),
    "mish": nn.Mish(), "softplus": nn.Softplus(), "hardswish": nn.Hardswish(),
}  # fmt: skip
OTHERS: dict[Any, str] = {torch.relu: "relu", F.tanh: "tanh", F.sigmoid: "sigmoid", torch.selu: "selu"}


def declare(module: nn.Module, pattern: Pattern | None) -> spec.Spec:
    """The declaration of a PyTorch module whose type is in READERS."""
    return READERS[type(module)](module, pattern)


def empty(declared: spec.Spec, batch_first: bool) -> nn.Module:
    """The PyTorch module of a declaration, weights not set; what PyTorch cannot express is refused."""
    match declared:
        case spec.Attention():
            return _write_attention(declared, batch_first)
        case spec.Block():
            return _write_layer(declared, batch_first)
        case spec.Encoder() | spec.Decoder():
            return _write_stack(declared, batch_first)
        case spec.EncoderDecoder():
            return _write_transformer(declared, batch_first)
    raise AssertionError(f"{declared!r} was not refused before")


# --- from theirs ---


def _read_attention(module: nn.MultiheadAttention, pattern: Pattern | None) -> spec.Attention:
    return spec.Attention(
        module.embed_dim,
        heads=module.num_heads,
        d_context=None if module.kdim == module.embed_dim else module.kdim,
        d_values=None if module.vdim == module.kdim else module.vdim,
        pattern=full() if pattern is None else pattern,
        biases="none" if module.in_proj_bias is None else "all",
        # One more key and value of zeros: its score is 0, and it adds nothing to the sum.
        sink_logits=bool(module.add_zero_attn),
        extra_key=module.bias_k is not None,
        dropout=float(module.dropout),
    )


def _read_layer(layer: Any, pattern: Pattern | None) -> spec.Block:
    crosses = isinstance(layer, nn.TransformerDecoderLayer)
    if crosses and pattern is None:
        pattern = causal()
    branches = 3 if crosses else 2
    norm, eps, norm_bias = _read_norms([getattr(layer, f"norm{i + 1}") for i in range(branches)])
    rates = [float(getattr(layer, f"dropout{i + 1}").p) for i in range(branches)]
    require(len(set(rates)) == 1, f"dropout1, dropout2, … drop {rates}; ours has one rate for all branches")
    return spec.Block(
        _read_attention(layer.self_attn, pattern),
        spec.FeedForward(
            layer.linear1.out_features,
            activation=_read_activation(layer.activation),
            bias=layer.linear1.bias is not None,
            dropout=float(layer.dropout.p),
        ),
        cross=_read_attention(layer.multihead_attn, None) if crosses else None,
        norm=norm,
        norm_at="pre" if layer.norm_first else "post",
        norm_bias=norm_bias,
        eps=eps[0] if len(set(eps)) == 1 else tuple(eps),
        dropout=rates[0],
    )


def _read_norms(norms: list[Any]) -> tuple[str, list[float], bool]:
    """The kind, eps of each, and whether there is a shift: the same in all of them."""
    for norm in norms:
        require(
            type(norm) in (nn.LayerNorm, nn.RMSNorm) and norm.weight is not None,
            f"{norm} in place of a norm; it needs to be nn.LayerNorm(d_model) or nn.RMSNorm(d_model), with its "
            f"learned scale",
        )
    require(
        len({type(n) for n in norms}) == 1,
        "nn.LayerNorm and nn.RMSNorm in one block; ours has one norm for all",
    )
    if type(norms[0]) is nn.RMSNorm:
        # PyTorch's default is the resolution of the inputs' dtype, which is that of the weights.
        return "rms", [torch.finfo(n.weight.dtype).eps if n.eps is None else n.eps for n in norms], True
    shifts = {n.bias is not None for n in norms}
    require(len(shifts) == 1, "some norms have a bias and some have none; ours has one norm_bias for all")
    return "layer", [n.eps for n in norms], shifts.pop()


def _read_activation(given: Any) -> str:
    """Its name. PyTorch holds an activation as a function or as a module."""
    if isinstance(given, partial) and (given.func, given.args) == (F.gelu, ()):
        if given.keywords == {"approximate": "tanh"}:
            return "gelu_tanh"
    elif isinstance(given, nn.Module):
        for name, module in MODULES.items():
            if type(given) is type(module) and _parameters(given) == _parameters(module):
                return name
    for name, known in (*ACTIVATIONS.items(), *((word, function) for function, word in OTHERS.items())):
        if given is known:
            return name
    called = getattr(given, "__name__", repr(given))
    raise SpecError(f"activation {called} is not supported by regard; supported: {', '.join(ACTIVATIONS)}")


def _parameters(activation: nn.Module) -> dict[str, Any]:
    """What the module was made with; whether it works in place changes no result."""
    return {
        k: v
        for k, v in vars(activation).items()
        if not k.startswith("_") and k not in ("inplace", "training")
    }


def _read_stack(stack: Any, pattern: Pattern | None) -> spec.Encoder | spec.Decoder:
    crosses = isinstance(stack, nn.TransformerDecoder)
    wanted = nn.TransformerDecoderLayer if crosses else nn.TransformerEncoderLayer
    whose = type(stack).__name__
    require(
        len(stack.layers) > 0, f"a {whose} without layers gives back what it is given; at least 1 is needed"
    )
    for layer in stack.layers:
        require(
            type(layer) is wanted,
            f"a {type(layer).__name__} among the layers of a {whose}; it takes nn.{wanted.__name__}",
        )
    first, *rest = [_read_layer(layer, pattern) for layer in stack.layers]
    for number, block in enumerate(rest, 1):
        differ = [f.name for f in fields(first) if getattr(first, f.name) != getattr(block, f.name)]
        require(
            not differ,
            f"layers 0 and {number} differ in {', '.join(differ)}; ours declares one block for all",
        )
    last = None
    if stack.norm is not None:
        last = _read_norms([stack.layers[0].norm1, stack.norm])[1][1]
        last = None if last == first.epsilons[-1] else last
    stack_spec = spec.Decoder if crosses else spec.Encoder
    return stack_spec(first, len(stack.layers), final_norm=stack.norm is not None, final_eps=last)


def _read_transformer(module: nn.Transformer, pattern: Pattern | None) -> spec.EncoderDecoder:
    for part, wanted in ((module.encoder, nn.TransformerEncoder), (module.decoder, nn.TransformerDecoder)):
        require(
            type(part) is wanted,
            f"an nn.Transformer made with a custom {type(part).__name__}; an nn.{wanted.__name__} is needed",
        )
    encoder: Any = _read_stack(module.encoder, None)
    decoder: Any = _read_stack(module.decoder, pattern)
    return spec.EncoderDecoder(encoder, decoder)


READERS: dict[type, Callable[[Any, Pattern | None], spec.Spec]] = {
    nn.MultiheadAttention: _read_attention,
    nn.TransformerEncoderLayer: _read_layer,
    nn.TransformerDecoderLayer: _read_layer,
    nn.TransformerEncoder: _read_stack,
    nn.TransformerDecoder: _read_stack,
    nn.Transformer: _read_transformer,
}


# To PyTorch's modules. `field` is the path of a part in the declaration, for error messages.


def _write_attention(declared: spec.Attention, batch_first: bool, field: str = "") -> nn.MultiheadAttention:
    size, theirs = declared.sizes, "nn.MultiheadAttention"
    _require_only(
        theirs, declared, field, score="dot", position=None, output=True, softcap=None, sink_logits=False
    )
    width = size.d_model / size.heads
    for name, only in {"kv_heads": size.heads, "d_k": width, "d_v": width, "d_out": size.d_model}.items():
        require(
            getattr(size, name) == only,
            f"{field}{name}={getattr(size, name)}: {theirs} with d_model={size.d_model} and "
            f"heads={size.heads} has {name}={only:g}",
        )
    usual = size.d_k**-0.5
    require(
        declared.factor is None or isclose(declared.factor, usual, rel_tol=1e-12),
        f"{field}scale={declared.factor}: {theirs} scales scores by 1/√d_k = {usual:.6g}; leave it out",
    )
    require(
        declared.biases != "output",
        f"{field}biases='output': {theirs} has all biases or none; use 'all' or 'none'",
    )
    by_head = declared.pattern.differs_by_head  # PyTorch's mask has one axis for batch rows and heads
    table = "~pattern.allowed(n).repeat(b, 1, 1)" if by_head else "~pattern.allowed(n)"
    require(
        declared.pattern in (full(), causal()),
        f"{field}pattern={declared.pattern!r}: {theirs} attends to all keys unless a call passes a mask; "
        f"declare rg.full() and give each call attn_mask={table}",
    )
    usual_widths = size.d_context == size.d_values == size.d_model
    return nn.MultiheadAttention(
        size.d_model,
        size.heads,
        dropout=declared.dropout,
        bias=declared.biases == "all",
        add_bias_kv=declared.extra_key,
        kdim=None if usual_widths else size.d_context,
        vdim=None if usual_widths else size.d_values,
        batch_first=batch_first,
    )


def _write_layer(declared: spec.Block, batch_first: bool, field: str = "") -> nn.Module:
    make = nn.TransformerEncoderLayer if declared.cross is None else nn.TransformerDecoderLayer
    theirs, network = f"nn.{make.__name__}", declared.feed_forward
    if network is None:
        raise SpecError(f"{field}feed_forward=None: {theirs} always has one")
    _require_only(theirs, declared, field, norm="layer", residual=True)
    require(
        not network.gated,
        f"{field}feed_forward.activation={network.activation!r}: {theirs} has no gate; "
        f"use one of {', '.join(ACTIVATIONS)}",
    )
    _require_one_bias(theirs, declared, field)
    layer: Any = make(
        declared.d_model,
        declared.attention.heads,
        network.d_ff,
        declared.dropout,
        ACTIVATIONS[network.activation],
        declared.epsilons[0],
        batch_first,
        declared.norm_at == "pre",
        declared.norm_bias,
    )
    for number, eps in enumerate(declared.epsilons, 1):
        getattr(layer, f"norm{number}").eps = eps
    layer.dropout.p = network.dropout  # PyTorch has one argument for it and one attribute for each part
    layer.self_attn = _write_attention(declared.attention, batch_first, f"{field}attention.")
    if declared.cross is not None:
        layer.multihead_attn = _write_attention(declared.cross, batch_first, f"{field}cross.")
    return layer


def _require_one_bias(theirs: str, declared: spec.Block, field: str) -> None:
    """PyTorch has one switch; its fast path fails on a layer with some biases."""
    asked = {f"{field}norm_bias": declared.norm_bias}
    if declared.feed_forward is not None:
        asked[f"{field}feed_forward.bias"] = declared.feed_forward.bias
    for name in ("attention", "cross"):
        part = getattr(declared, name)
        if part is not None:
            asked[f"{field}{name}.biases"] = part.biases != "none"
    some, none = [n for n in asked if asked[n]], [n for n in asked if not asked[n]]
    require(
        not some or not none,
        f"{theirs} has biases everywhere or nowhere, but {', '.join(some)} has one and {', '.join(none)} has none",
    )


def _write_stack(declared: spec.Encoder | spec.Decoder, batch_first: bool, field: str = "") -> nn.Module:
    block, crosses = declared.block, declared.block.cross is not None
    theirs = "nn.TransformerDecoder" if crosses else "nn.TransformerEncoder"
    _require_only(theirs, declared, field, embedding=None, position=None, head=None)
    layer: Any = _write_layer(block, batch_first, f"{field}block.")
    norm = (
        nn.LayerNorm(block.d_model, declared.norm_eps, bias=block.norm_bias)
        if declared.has_final_norm
        else None
    )
    if crosses:
        return nn.TransformerDecoder(layer, declared.layers, norm)
    # Nested tensors are a prototype that warns, and they turn the states of padding into zeros.
    return nn.TransformerEncoder(layer, declared.layers, norm, enable_nested_tensor=False)


def _write_transformer(declared: spec.EncoderDecoder, batch_first: bool) -> nn.Transformer:
    source, target = declared.encoder.d_model, declared.decoder.d_model
    require(
        source == target,
        f"an encoder {source} wide and a decoder {target} wide; nn.Transformer has one d_model",
    )
    return nn.Transformer(
        source,
        declared.encoder.block.attention.heads,
        custom_encoder=_write_stack(declared.encoder, batch_first, "encoder."),
        custom_decoder=_write_stack(declared.decoder, batch_first, "decoder."),
        batch_first=batch_first,
    )


def _require_only(theirs: str, declared: Any, field: str, **wanted: Any) -> None:
    for name, only in wanted.items():
        given = getattr(declared, name)
        require(
            given == only, f"{field}{name}={given!r}: {theirs} has no such option; it needs {name}={only!r}"
        )

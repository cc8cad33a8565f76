"""torch.nn.TransformerEncoder, TransformerDecoder, their layers, and Transformer."""

import warnings
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from ..target import Model
from .seeded import seeded
from .torch_attention import Masks

IMPORTS = "from regard.laws import adapters"
CLAIMS = {"mask", "causal", "lengths", "left padding", "float32", "float64", "grad"}
NO_POSITIONS = {"positions", "relative positions"}


def transformer_encoder(
    module: nn.TransformerEncoder | None = None,
    *,
    d_model: int = 16,
    heads: int = 4,
    layers: int = 2,
    d_ff: int = 32,
    norm_first: bool = False,
    **more: Any,
) -> Model:
    """PyTorch's encoder; in evaluation without gradients it uses its fast path."""
    source = None
    if module is None:
        layer: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": norm_first}
        module = seeded(
            lambda: _quietly(
                lambda: nn.TransformerEncoder(
                    nn.TransformerEncoderLayer(d_model, heads, d_ff, **layer), layers, **more
                )
            )
        )
        source = (
            f"adapters.transformer_encoder(d_model={d_model}, heads={heads}, layers={layers}, d_ff={d_ff}, "
            f"norm_first={norm_first}{_extra_arguments(more)})"
        )
    return _stack(module, _encode, "encoder", CLAIMS, source)


def transformer_decoder(
    module: nn.TransformerDecoder | None = None,
    *,
    d_model: int = 16,
    heads: int = 4,
    layers: int = 2,
    d_ff: int = 32,
    norm_first: bool = False,
) -> Model:
    """PyTorch's decoder with a context; causal if it is given the mask."""
    source = None
    if module is None:
        layer: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": norm_first}
        module = seeded(
            lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(d_model, heads, d_ff, **layer), layers)
        )
        source = (
            f"adapters.transformer_decoder(d_model={d_model}, heads={heads}, layers={layers}, d_ff={d_ff}, "
            f"norm_first={norm_first})"
        )
    return _stack(module, _decode, "decoder", CLAIMS | {"context", "context lengths"}, source)


def transformer_encoder_layer(module: nn.TransformerEncoderLayer | None = None, **sizes: Any) -> Model:
    """One layer of PyTorch's encoder."""
    if module is None:
        return transformer_encoder(**sizes, layers=1)
    return _stack(module, _encode, "encoder", CLAIMS, None)


def transformer_decoder_layer(module: nn.TransformerDecoderLayer | None = None, **sizes: Any) -> Model:
    """One layer of PyTorch's decoder."""
    if module is None:
        return transformer_decoder(**sizes, layers=1)
    return _stack(module, _decode, "decoder", CLAIMS | {"context", "context lengths"}, None)


def _layers(module: Any) -> list[Any]:
    """The layers of a stack; a layer is a stack of itself."""
    return list(getattr(module, "layers", [module]))


def _stack(module: Any, call: Any, of: str, claims: set[str], source: str | None) -> Model:
    """A stack of PyTorch's layers, or one layer; the branches of a pre-norm stack can be set to 0."""
    first, count = _layers(module)[0], len(_layers(module))
    pre = first.norm_first and getattr(module, "norm", None) is None
    return Model(
        f"torch.nn.{type(module).__name__} (norm_first={first.norm_first})",
        module,
        call,
        architecture=of,
        d_model=first.self_attn.embed_dim,
        heads=first.self_attn.num_heads,
        layers=count,
        zero_branches=zero_branches if pre else None,
        claims=claims | ({"pre-norm"} if pre else set()),
        lacks=NO_POSITIONS,
        source=source,
        imports=IMPORTS,
    )


def transformer(
    module: nn.Transformer | None = None,
    *,
    d_model: int = 16,
    heads: int = 4,
    layers: int = 2,
    d_ff: int = 32,
    norm_first: bool = False,
) -> Model:
    """PyTorch's encoder-decoder; x is the target sequence, the context is the source."""
    source = None
    if module is None:
        module = seeded(
            lambda: _quietly(
                lambda: nn.Transformer(
                    d_model, heads, layers, layers, d_ff, 0.0, batch_first=True, norm_first=norm_first
                )
            )
        )
        source = (
            f"adapters.transformer(d_model={d_model}, heads={heads}, layers={layers}, d_ff={d_ff}, "
            f"norm_first={norm_first})"
        )
    return Model(
        f"torch.nn.Transformer (norm_first={module.encoder.layers[0].norm_first})",
        module,
        _transform,
        architecture="encoder-decoder",
        d_model=module.d_model,
        heads=module.nhead,
        layers=len(module.decoder.layers),
        claims=CLAIMS | {"context", "context lengths"},
        lacks=NO_POSITIONS,
        source=source,
        imports=IMPORTS,
    )


def _encode(
    module: nn.Module,
    x: Float[Tensor, "b n d"],
    context: None = None,
    **options: Any,
) -> Float[Tensor, "b n d"]:
    first = _layers(module)[0]
    attention, masks = first.self_attn, Masks(**options)
    arguments = {
        "src_mask" if first is module else "mask": masks.attn_mask(x, x, attention.num_heads),
        "src_key_padding_mask": masks.padding(x),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a warning about nested tensors in every call
        return _in_order(attention.batch_first, lambda x: module(x, **arguments), x)


def _decode(
    module: nn.Module,
    x: Float[Tensor, "b n d"],
    context: Float[Tensor, "b m d"],
    **options: Any,
) -> Float[Tensor, "b n d"]:
    first = _layers(module)[0]
    masks = Masks(**options)
    arguments = {
        "tgt_mask": masks.attn_mask(x, x, first.self_attn.num_heads),
        "tgt_key_padding_mask": masks.padding(x),
        "memory_key_padding_mask": masks.context_padding(context),
    }
    return _in_order(first.self_attn.batch_first, lambda x, c: module(x, c, **arguments), x, context)


def _transform(
    module: nn.Module,
    x: Float[Tensor, "b n d"],
    context: Float[Tensor, "b m d"],
    **options: Any,
) -> Float[Tensor, "b n d"]:
    assert isinstance(module, nn.Transformer)
    masks = Masks(**options)
    source_padding = masks.context_padding(context)
    arguments = {
        "tgt_mask": masks.attn_mask(x, x, module.nhead),
        "tgt_key_padding_mask": masks.padding(x),
        "src_key_padding_mask": source_padding,
        "memory_key_padding_mask": source_padding,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return _in_order(module.batch_first, lambda x, c: module(c, x, **arguments), x, context)


def zero_branches(module: nn.Module) -> None:
    """Set the output of every residual branch to 0."""
    with torch.no_grad():
        for layer in module.modules():
            last: list[Any] = []
            if isinstance(layer, nn.MultiheadAttention):
                last = [layer.out_proj]
            elif isinstance(layer, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
                last = [layer.linear2]
            for linear in last:
                linear.weight.zero_()
                if linear.bias is not None:
                    linear.bias.zero_()


def _in_order(batch_first: bool, run, *sequences: Tensor) -> Tensor:
    if batch_first:
        return run(*sequences)
    return rearrange(run(*(rearrange(s, "b n d -> n b d") for s in sequences)), "n b d -> b n d")


def _quietly(build):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # norm_first turns nested tensors off, with a warning
        return build()


def _extra_arguments(more: dict[str, Any]) -> str:
    return "".join(f", {name}={value!r}" for name, value in more.items())

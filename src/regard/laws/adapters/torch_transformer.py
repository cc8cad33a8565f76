"""torch.nn.TransformerEncoder, TransformerDecoder and Transformer."""

import warnings
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ..target import Model
from .seeded import seeded
from .torch_attention import hidden_keys, hidden_pairs

IMPORTS = "from regard.laws import adapters"
SAID = {"mask", "causal", "lengths", "left padding", "float32", "float64", "grad"}
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
    """PyTorch's encoder; in evaluation without gradients it takes its own fast path."""
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
            f"norm_first={norm_first}{_named(more)})"
        )
    return _stack(module, _encode, "encoder", SAID, source)


def transformer_decoder(
    module: nn.TransformerDecoder | None = None,
    *,
    d_model: int = 16,
    heads: int = 4,
    layers: int = 2,
    d_ff: int = 32,
    norm_first: bool = False,
) -> Model:
    """PyTorch's decoder, looking at a context; causal where it is given the mask."""
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
    return _stack(module, _decode, "decoder", SAID | {"context", "context lengths"}, source)


def _stack(module: Any, call: Any, of: str, claims: set[str], source: str | None) -> Model:
    """A stack of PyTorch's layers, whose branches can be silenced where they are pre-norm."""
    first = module.layers[0]
    pre = first.norm_first and module.norm is None
    return Model(
        f"torch.nn.{type(module).__name__} (norm_first={first.norm_first})",
        module,
        call,
        of=of,
        d_model=first.self_attn.embed_dim,
        heads=first.self_attn.num_heads,
        layers=len(module.layers),
        silence=silence if pre else None,
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
    """PyTorch's encoder-decoder; x is the target, the context its source."""
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
        of="encoder-decoder",
        d_model=module.d_model,
        heads=module.nhead,
        layers=len(module.decoder.layers),
        claims=SAID | {"context", "context lengths"},
        lacks=NO_POSITIONS,
        source=source,
        imports=IMPORTS,
    )


def _encode(
    module: nn.Module,
    x: Float[Tensor, "b n d"],
    context: None = None,
    *,
    allowed: Bool[Tensor, "..."] | None = None,
    causal: bool = False,
    lengths: Int[Tensor, " b"] | None = None,
    pads: Int[Tensor, " b"] | None = None,
) -> Float[Tensor, "b n d"]:
    first: Any = module.layers[0]  # type: ignore[index]
    b, n, attention = len(x), x.shape[1], first.self_attn
    given = {
        "mask": hidden_pairs(b, attention.num_heads, n, n, allowed, causal, x.device),
        "src_key_padding_mask": hidden_keys(n, lengths, pads),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # nested tensors are a prototype, it says each time
        return _in_order(attention.batch_first, lambda x: module(x, **given), x)


def _decode(
    module: nn.Module,
    x: Float[Tensor, "b n d"],
    context: Float[Tensor, "b m d"],
    *,
    allowed: Bool[Tensor, "..."] | None = None,
    causal: bool = False,
    lengths: Int[Tensor, " b"] | None = None,
    context_lengths: Int[Tensor, " b"] | None = None,
    pads: Int[Tensor, " b"] | None = None,
) -> Float[Tensor, "b n d"]:
    b, n, m = len(x), x.shape[1], context.shape[1]
    first: Any = module.layers[0]  # type: ignore[index]
    mask = hidden_pairs(b, first.self_attn.num_heads, n, n, allowed, causal, x.device)
    given = {
        "tgt_mask": mask,
        "tgt_key_padding_mask": hidden_keys(n, lengths, pads),
        "memory_key_padding_mask": hidden_keys(m, context_lengths),
    }
    return _in_order(first.self_attn.batch_first, lambda x, c: module(x, c, **given), x, context)


def _transform(
    module: nn.Module,
    x: Float[Tensor, "b n d"],
    context: Float[Tensor, "b m d"],
    *,
    allowed: Bool[Tensor, "..."] | None = None,
    causal: bool = False,
    lengths: Int[Tensor, " b"] | None = None,
    context_lengths: Int[Tensor, " b"] | None = None,
    pads: Int[Tensor, " b"] | None = None,
) -> Float[Tensor, "b n d"]:
    assert isinstance(module, nn.Transformer)
    b, n, m = len(x), x.shape[1], context.shape[1]
    hidden = hidden_keys(m, context_lengths)
    given = {
        "tgt_mask": hidden_pairs(b, module.nhead, n, n, allowed, causal, x.device),
        "tgt_key_padding_mask": hidden_keys(n, lengths, pads),
        "src_key_padding_mask": hidden,
        "memory_key_padding_mask": hidden,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return _in_order(module.batch_first, lambda x, c: module(c, x, **given), x, context)


def silence(module: nn.Module) -> None:
    """0 for what every branch of a layer adds."""
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
        warnings.simplefilter("ignore", UserWarning)  # "nested tensor is off because norm_first"
        return build()


def _named(more: dict[str, Any]) -> str:
    return "".join(f", {name}={value!r}" for name, value in more.items())

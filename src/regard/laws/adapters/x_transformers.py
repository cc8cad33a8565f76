"""x-transformers: its Attention, its layers (Encoder, Decoder, CrossAttender) and its TransformerWrapper."""

from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from ...errors import SpecError
from ..target import Model
from .seeded import seeded

IMPORTS = "import x_transformers\nfrom regard.laws import adapters"
NO_FLOAT64 = {"float64"}  # its softmax computes in float32 for every input dtype


def x_transformers(module: nn.Module | None = None, *, kind: str = "encoder", **sizes: Any) -> Model:
    """A module of x-transformers, or a small one of this kind: "attention", "encoder", "decoder" or "tokens".

    "tokens" is a causal language model: a TransformerWrapper around a Decoder with rotary positions.
    """
    source = None
    if module is None:
        arguments = "".join(f", {name}={value!r}" for name, value in sizes.items())
        module, source = (
            seeded(lambda: _build(kind, **sizes)),
            f"adapters.x_transformers(kind={kind!r}{arguments})",
        )
    from x_transformers.x_transformers import Attention, AttentionLayers, TransformerWrapper

    match module:
        case TransformerWrapper():
            return _wrapper(module, source)
        case AttentionLayers():
            return _layers(module, source)
        case Attention():
            return _attention(module, source)
    raise SpecError(
        f"{type(module).__name__} of x-transformers: expected Attention, Encoder, Decoder or TransformerWrapper"
    )


def _build(kind: str, *, d_model: int = 16, heads: int = 4, layers: int = 2, **more: Any) -> nn.Module:
    from x_transformers import Decoder, Encoder, TransformerWrapper
    from x_transformers.x_transformers import Attention

    width = d_model // heads
    stack = {"dim": d_model, "depth": layers, "heads": heads, "attn_dim_head": width, **more}
    match kind:
        case "attention":
            return Attention(dim=d_model, heads=heads, dim_head=width, **more)
        case "encoder":
            return Encoder(**stack)
        case "decoder":
            return Decoder(**stack)
        case "tokens":
            stack |= {
                "attn_dim_head": 32,
                "rotary_pos_emb": True,
                "rotary_emb_dim": 32,
            }  # the smallest that it accepts
            return TransformerWrapper(
                num_tokens=61, max_seq_len=64, attn_layers=Decoder(**stack), use_abs_pos_emb=False
            )
    raise SpecError(f"kind={kind!r}; use attention, encoder, decoder or tokens")


def _attention(module: Any, source: str | None) -> Model:
    def call(module, x, context=None, *, allowed=None, lengths=None, context_lengths=None, left_padding=None):
        arguments: dict[str, Any] = {"attn_mask": _with_heads(allowed)}
        if context is None:
            arguments["mask"] = padding_mask(x.shape[1], lengths, left_padding)
        else:
            arguments |= {"context": context, "context_mask": padding_mask(context.shape[1], context_lengths)}
        return module(x, **arguments)

    claims = {"mask", "lengths", "left padding", "float32", "grad", "context", "context lengths"}
    if module.causal:
        claims = (claims - {"context", "context lengths"}) | {"always causal"}
    return Model(
        f"x_transformers Attention{' (causal)' if module.causal else ''}",
        module.eval(),
        call,
        architecture="attention",
        d_model=module.to_q.in_features,
        heads=module.heads,
        layers=1,
        claims=claims,
        lacks=NO_FLOAT64 | ({"relative positions"} if module.causal else {"positions", "relative positions"}),
        source=source,
        imports=IMPORTS,
    )


def _layers(module: Any, source: str | None) -> Model:
    causal = bool(module.causal)
    rotary = module.rotary_pos_emb is not None
    claims = {"lengths", "left padding", "float32", "grad"} | ({"mask"} if not causal else set())
    if causal:
        claims |= {"always causal"}
    if rotary:
        claims |= {"positions", "relative positions"}

    def call(module, x, context=None, *, allowed=None, lengths=None, left_padding=None):
        return module(x, mask=padding_mask(x.shape[1], lengths, left_padding), attn_mask=_with_heads(allowed))

    return Model(
        f"x_transformers {type(module).__name__}",
        module.eval(),
        call,
        architecture="decoder" if causal else "encoder",
        d_model=module.dim,
        layers=module.depth,
        claims=claims,
        lacks=NO_FLOAT64 | (set() if rotary or causal else {"positions", "relative positions"}),
        source=source,
        imports=IMPORTS,
    )


def _wrapper(module: Any, source: str | None) -> Model:
    causal = bool(module.attn_layers.causal)
    claims = {"lengths", "float32", "grad", "positions"}
    if causal:
        claims |= {"always causal", "cache"}

    def call(module, x, context=None, *, lengths=None):
        return module(x, mask=padding_mask(x.shape[1], lengths))

    return Model(
        f"x_transformers {type(module).__name__} of {type(module.attn_layers).__name__}",
        module.eval(),
        call,
        architecture="decoder" if causal else "encoder",
        vocab=module.num_tokens,
        max_length=min(64, module.max_seq_len),
        layers=module.attn_layers.depth,
        make_cache=(lambda module, b, context=None: {}) if causal else None,
        decode=_decode if causal else None,
        claims=claims,
        lacks=NO_FLOAT64,
        source=source,
        imports=IMPORTS,
    )


def _decode(module: nn.Module, x: Int[Tensor, "b n"], cache: dict[str, Any]) -> Tensor:
    """The outputs of new tokens; the first call creates the cache."""
    arguments: dict[str, Any] = {}
    if cache:
        arguments = {"cache": cache["cache"], "input_not_include_cache": True, "cache_age": x.shape[1]}
    with torch.no_grad():
        logits, cache["cache"] = module(x, return_intermediates=True, **arguments)
    return logits


def _with_heads(allowed: Bool[Tensor, "..."] | None) -> Bool[Tensor, "..."] | None:
    return allowed if allowed is None or allowed.dim() == 2 else allowed[:, None]


def padding_mask(
    n: int, lengths: Int[Tensor, " b"] | None, left_padding: Int[Tensor, " b"] | None = None
) -> Bool[Tensor, "b n"] | None:
    """The mask of x-transformers: True = a real position."""
    if lengths is None and left_padding is None:
        return None
    device = lengths.device if lengths is not None else left_padding.device  # type: ignore[union-attr]
    j = torch.arange(n, device=device)
    inside = j < lengths[:, None] if lengths is not None else j >= 0
    return inside if left_padding is None else inside & (j >= left_padding[:, None])

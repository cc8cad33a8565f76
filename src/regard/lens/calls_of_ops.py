"""What an attention operation of PyTorch was given → what it compared."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from .captured import Compared, Way
from .terms import Causal, Masked, Modified, Term

aten = torch.ops.aten


def from_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Compared:
    """The call of F.scaled_dot_product_attention; dropout comes after the weights and is left out."""
    lead = query.shape[:-2]
    factor = query.shape[-1] ** -0.5 if scale is None else float(scale)
    terms: list[Term] = [Causal()] if is_causal else []
    if attn_mask is not None:
        terms.append(Masked(_as_heads(attn_mask, lead)))
    q, k, v = (_as_heads(x, x.shape[:-2]) for x in (query, key, value))
    return Compared(q, k, v, factor, tuple(terms))


def _as_heads(x: Tensor, lead: tuple[int, ...]) -> Float[Tensor, "b h n d"] | Tensor:
    """(…, n, d) as (b, h, n, d): no axis before n is one head of one row, one is the batch, two are both."""
    if len(lead) > 2:
        x = x.expand(*lead, *x.shape[-2:]).flatten(0, len(lead) - 2)
    elif len(lead) == 1 and x.dim() == 3:
        x = rearrange(x, "b n d -> b 1 n d")
    while x.dim() < 4:
        x = x[None]
    return x


def from_aten_sdpa(given: dict[str, Any]) -> Compared:
    mask = given.get("attn_mask", given.get("attn_bias"))
    return from_sdpa(
        given["query"],
        given["key"],
        given["value"],
        mask,
        is_causal=given["is_causal"],
        scale=given.get("scale"),
    )


def from_native_mha(given: dict[str, Any]) -> Compared | None:
    """nn.MultiheadAttention's fast path: one operation from x to the output. The projections are made again."""
    if not (given["query"] is given["key"] is given["value"]):
        return None
    return _projected(given["query"], given["num_head"], given)


def from_encoder_layer(given: dict[str, Any]) -> Compared:
    """nn.TransformerEncoderLayer's fast path: a whole layer in one operation."""
    src = given["src"]
    if given["norm_first"]:
        x, lengths = _padded(src)
        norm = (given["norm_weight_1"], given["norm_bias_1"], given["eps"])
        return _projected(F.layer_norm(x, x.shape[-1:], *norm), given["num_heads"], given, lengths)
    return _projected(src, given["num_heads"], given)


def _projected(x: Tensor, heads: int, given: dict[str, Any], lengths: Tensor | None = None) -> Compared:
    if lengths is None:
        x, lengths = _padded(x)
    packed = F.linear(x, given["qkv_weight"], given["qkv_bias"])
    q, k, v = rearrange(packed, "b n (qkv h d) -> qkv b h n d", qkv=3, h=heads)
    terms: list[Term] = []
    if lengths is not None:
        keys = torch.arange(x.shape[1], device=x.device)
        terms.append(Masked((keys < lengths[:, None])[:, None, None, :]))
    if (mask := given["mask"]) is not None:
        terms.append(Masked(~_blocked(mask, given["mask_type"], heads)))
    return Compared(q, k, v, q.shape[-1] ** -0.5, tuple(terms))


def _blocked(mask: Tensor, kind: int | None, heads: int) -> Tensor:
    """True = may not look, (b | 1, h | 1, n | 1, m)."""
    mask = mask != 0
    if kind == 1:
        return rearrange(mask, "b m -> b 1 1 m")
    if mask.dim() == 3:
        return rearrange(mask, "(b h) n m -> b h n m", h=heads)
    return mask if mask.dim() == 4 else mask[None, None]


def _padded(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """A nested tensor with zeros at the end of its short rows, and how long each row is."""
    if not x.is_nested:
        return x, None
    lengths = torch.tensor([len(row) for row in x.unbind()], device=x.device)
    return torch.nested.to_padded_tensor(x, 0.0), lengths


def from_flex(args: tuple[Any, ...]) -> Compared:
    """flex_attention's operator: (q, k, v, score_mod, block mask, scale, …); the mask's last is its function."""
    q, k, v, score_mod, block_mask, scale = args[:6]
    term = Modified(score_mod, block_mask[-1], q.shape[1])
    return Compared(q, k, v, float(scale), (term,))


Reader = Callable[[dict[str, Any]], Compared | None]

READERS: dict[Any, tuple[Way, Reader]] = {
    aten._native_multi_head_attention: ("fast path", from_native_mha),
    aten._transformer_encoder_layer_fwd: ("fast path", from_encoder_layer),
    aten._scaled_dot_product_flash_attention_for_cpu: ("sdpa", from_aten_sdpa),
    aten._scaled_dot_product_flash_attention: ("sdpa", from_aten_sdpa),
    aten._scaled_dot_product_efficient_attention: ("sdpa", from_aten_sdpa),
    aten._scaled_dot_product_cudnn_attention: ("sdpa", from_aten_sdpa),
    aten._scaled_dot_product_fused_attention_overrideable: ("sdpa", from_aten_sdpa),
}


def by_name(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an operation by the names of its schema, with its defaults."""
    given = {}
    for place, arg in enumerate(func._schema.arguments):
        given[arg.name] = args[place] if place < len(args) else kwargs.get(arg.name, arg.default_value)
    return given

"""The arguments of PyTorch's attention operators → the scores that they compute."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from ..compat import aten_operator, aten_operators, operator_arguments
from .calls import Implementation, QueryKeyScores
from .score_mods import CausalMask, FlexFunctions, MaskOrBias, ScoreMod


class SdpaArguments(NamedTuple):
    """The arguments of F.scaled_dot_product_attention, with its defaults."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


def from_sdpa(given: SdpaArguments) -> QueryKeyScores:
    """A call of F.scaled_dot_product_attention; dropout acts after the weights and is left out."""
    lead = given.query.shape[:-2]
    scale = given.query.shape[-1] ** -0.5 if given.scale is None else float(given.scale)
    score_mods: list[ScoreMod] = [CausalMask()] if given.is_causal else []
    if given.attn_mask is not None:
        score_mods.append(MaskOrBias(_as_heads(given.attn_mask, lead)))
    q, k, v = (_as_heads(x, x.shape[:-2]) for x in given[:3])
    return QueryKeyScores(q, k, v, scale, tuple(score_mods))


def _as_heads(x: Tensor, lead: tuple[int, ...]) -> Float[Tensor, "b h n d"] | Tensor:
    """(…, n, d) as (b, h, n, d): of the axes before n, one is the batch, two are batch and heads."""
    if len(lead) > 2:
        x = x.expand(*lead, *x.shape[-2:]).flatten(0, len(lead) - 2)
    elif len(lead) == 1 and x.dim() == 3:
        x = rearrange(x, "b n d -> b 1 n d")
    while x.dim() < 4:
        x = x[None]
    return x


def from_aten_sdpa(given: dict[str, Any]) -> QueryKeyScores:
    mask = given.get("attn_mask", given.get("attn_bias"))
    causal, scale = given["is_causal"], given.get("scale")
    qkv = (given["query"], given["key"], given["value"])
    return from_sdpa(SdpaArguments(*qkv, attn_mask=mask, is_causal=causal, scale=scale))


def from_native_mha(given: dict[str, Any]) -> QueryKeyScores | None:
    """nn.MultiheadAttention's fast path: one operator from x to the output. The projections are recomputed."""
    q, *others = (given[name] for name in ("query", "key", "value"))
    if not all(x is q or _is_same(x, q) for x in others):
        return None
    return _projected(given["query"], given["num_head"], given)


def _is_same(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are one, which torch.vmap hands on as two."""
    strided = not x.is_nested and not y.is_nested and x.shape == y.shape and x.stride() == y.stride()
    return strided and x.data_ptr() == y.data_ptr()


def from_encoder_layer(given: dict[str, Any]) -> QueryKeyScores:
    """nn.TransformerEncoderLayer's fast path: the layer is one operator."""
    src = given["src"]
    if given["norm_first"]:
        x, lengths = _padded(src)
        norm = (given["norm_weight_1"], given["norm_bias_1"], given["eps"])
        return _projected(F.layer_norm(x, x.shape[-1:], *norm), given["num_heads"], given, lengths)
    return _projected(src, given["num_heads"], given)


def _projected(x: Tensor, heads: int, given: dict[str, Any], lengths: Tensor | None = None) -> QueryKeyScores:
    if lengths is None:
        x, lengths = _padded(x)
    packed = F.linear(x, given["qkv_weight"], given["qkv_bias"])
    q, k, v = rearrange(packed, "b n (qkv h d) -> qkv b h n d", qkv=3, h=heads)
    score_mods: list[ScoreMod] = []
    if lengths is not None:
        inside = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
        score_mods.append(MaskOrBias((inside[:, :, None] & inside[:, None, :])[:, None]))
    if (mask := given["mask"]) is not None:
        score_mods.append(MaskOrBias(~_blocked(mask, given["mask_type"], heads)))
    return QueryKeyScores(q, k, v, q.shape[-1] ** -0.5, tuple(score_mods))


def _blocked(mask: Tensor, kind: int | None, heads: int) -> Tensor:
    """True = not allowed, (b | 1, h | 1, n | 1, m)."""
    mask = mask != 0
    if kind == 1:
        return rearrange(mask, "b m -> b 1 1 m")
    if mask.dim() == 3:
        return rearrange(mask, "(b h) n m -> b h n m", h=heads)
    return mask if mask.dim() == 4 else mask[None, None]


def _padded(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """A nested tensor padded with zeros, and the length of each row."""
    if not x.is_nested:
        return x, None
    lengths = torch.tensor([len(row) for row in x.unbind()], device=x.device)
    return torch.nested.to_padded_tensor(x, 0.0), lengths


def from_flex(args: tuple[Any, ...]) -> QueryKeyScores:
    """flex_attention's operator: (q, k, v, score_mod, block mask, scale, …); the mask ends with mask_mod."""
    q, k, v, score_mod, block_mask, scale = args[:6]
    functions = FlexFunctions(score_mod, block_mask[-1], q.shape[1])
    return QueryKeyScores(q, k, v, float(scale), (functions,))


SDPA_KERNELS = aten_operators(
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
Reader = Callable[[dict[str, Any]], QueryKeyScores | None]

READERS: dict[Any, tuple[Implementation, Reader]] = {
    aten_operator("_native_multi_head_attention"): ("fast path", from_native_mha),
    aten_operator("_transformer_encoder_layer_fwd"): ("fast path", from_encoder_layer),
    **dict.fromkeys(SDPA_KERNELS, ("sdpa", from_aten_sdpa)),
}


def arguments_by_name(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an operator by the names in its schema, with defaults."""
    return {
        name: args[index] if index < len(args) else kwargs.get(name, default)
        for index, (name, default) in enumerate(operator_arguments(func))
    }

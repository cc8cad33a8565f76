"""torch.nn.functional.scaled_dot_product_attention."""

from math import inf

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from ..target import Function

DTYPES = {"float64", "float32", "float16", "bfloat16"}


def sdpa() -> Function:
    """PyTorch's attention: `attn_mask` True = may attend; `is_causal` is aligned top-left; not both."""
    return Function(
        "torch.nn.functional.scaled_dot_product_attention",
        _call,
        claims={"mask", "causal", "scale", "bias", "dropout", "grad", "grouped", "n≠m", "d_v≠d_k", *DTYPES},
        lacks={"mask and causal"},  # documented: an error is thrown if both are set
        alignment="top-left",
        source="adapters.sdpa()",
        imports="from regard.laws import adapters",
    )


def sdpa_finfo_min() -> Function:
    """The same with masked pairs set to the smallest finite number, as in much model code."""
    return Function(
        "scaled_dot_product_attention with a mask of finfo.min",
        _call_finfo_min,
        claims={"mask", "float32", "float64", "grad", "grouped", "n≠m", "d_v≠d_k"},
        lacks={"mask and causal"},
        source="adapters.sdpa_finfo_min()",
        imports="from regard.laws import adapters",
    )


def _call(
    q: Float[Tensor, "b h n d_k"],
    k: Float[Tensor, "b h_kv m d_k"],
    v: Float[Tensor, "b h_kv m d_v"],
    *,
    allowed: Bool[Tensor, "..."] | None = None,
    bias: Float[Tensor, "..."] | None = None,
    causal: bool = False,
    **options: float,
) -> Float[Tensor, "b h n d_v"]:
    """options: scale and dropout_p, which have the same names in PyTorch."""
    mask = allowed if bias is None else bias if allowed is None else bias.masked_fill(~allowed, -inf)
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped, **options
    )


def _call_finfo_min(
    q: Float[Tensor, "b h n d_k"],
    k: Float[Tensor, "b h_kv m d_k"],
    v: Float[Tensor, "b h_kv m d_v"],
    *,
    allowed: Bool[Tensor, "..."] | None = None,
) -> Float[Tensor, "b h n d_v"]:
    mask = None
    if allowed is not None:
        mask = torch.zeros_like(allowed, dtype=q.dtype).masked_fill(~allowed, torch.finfo(q.dtype).min)
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=q.shape[1] != k.shape[1])

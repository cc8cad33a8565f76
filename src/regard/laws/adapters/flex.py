"""torch.nn.attention.flex_attention, with masks as its block masks and biases as its score function."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..target import Function

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (b, h, i, j) → True = may attend


def flex() -> Function:
    """FlexAttention without torch.compile; on a CPU it has no gradients."""
    return Function(
        "torch.nn.attention.flex_attention",
        _call,
        claims={
            *{"mask", "causal", "mask and causal", "scale", "bias", "lengths", "documents", "window", "lse"},
            *{"grouped", "n≠m", "d_v≠d_k", "float32"},
        },
        lacks=set() if torch.cuda.is_available() else {"grad", "double backward"},
        alignment="top-left",  # of the mask functions below; users write their own
        device="cuda" if torch.cuda.is_available() else "cpu",
        sizes={"b": (2, 3), "h": (2, 4), "n": (2, 3, 5, 7), "m": (2, 3, 5, 7), "d_k": (4, 5), "d_v": (4, 5)},
        seconds=5.0,  # per law: a call takes 50 ms, and each new size of 1 would be compiled again
        source="adapters.flex()",
        imports="from regard.laws import adapters",
    )


def _call(
    q: Float[Tensor, "b h n d_k"],
    k: Float[Tensor, "b h_kv m d_k"],
    v: Float[Tensor, "b h_kv m d_v"],
    *,
    bias: Float[Tensor, "..."] | None = None,
    scale: float | None = None,
    lse: bool = False,
    **masks: Any,
) -> Any:
    """masks: allowed, causal, lengths, documents and window, as in `_mask_function`."""
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    size = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    mask = _mask_function(size, **masks)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that it runs without torch.compile
        block_mask = None if mask is None else create_block_mask(mask, *size, device=q.device.type)
        arguments: dict[str, Any] = {
            "block_mask": block_mask,
            "scale": scale,
            "enable_gqa": size[1] != k.shape[1],
        }
        if bias is not None:
            table = bias.expand(size)
            arguments["score_mod"] = lambda score, b, h, i, j: score + table[b, h, i, j]
        if not lse:
            return flex_attention(q, k, v, **arguments)
        o, aux = flex_attention(q, k, v, return_aux=AuxRequest(lse=True), **arguments)
        return o, aux.lse


def _mask_function(
    size: tuple[int, int, int, int],
    *,
    allowed: Bool[Tensor, "..."] | None = None,
    causal: bool = False,
    lengths: Int[Tensor, " b"] | None = None,
    documents: Int[Tensor, "b n"] | None = None,
    window: tuple[int, int] | None = None,
) -> MaskFunction | None:
    """All masks of a call as one mask function."""
    parts: list[MaskFunction] = []
    if allowed is not None:
        table = allowed.expand(size)
        parts.append(lambda b, h, i, j: table[b, h, i, j])
    if causal:
        parts.append(lambda b, h, i, j: i >= j)
    if lengths is not None:
        parts.append(lambda b, h, i, j: j < lengths[b])
    if documents is not None:
        parts.append(lambda b, h, i, j: documents[b, i] == documents[b, j])
    if window is not None:
        before, after = window
        parts.append(lambda b, h, i, j: (i - j <= before) & (j - i <= after))
    if not parts:
        return None
    if len(parts) == 1:
        return parts[0]
    from torch.nn.attention.flex_attention import and_masks

    return and_masks(*parts)

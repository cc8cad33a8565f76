"""PyTorch's fused CPU attention with its log-sum-exp, forward and backward.

    o = softmax(scale · q kᵀ + mask) v        lse = ln Σ exp(scale · q·k + mask)

The op is private and reached through compat.py. Corrected here is what it does on torch 2.11 and 2.13: an empty row
has lse 0, not −∞; a bool mask is silently wrong in the backward; no queries or no keys end the process; d_v has to
equal d_k.
"""

from math import inf
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from ... import compat


class Forward(NamedTuple):
    """The inputs and results of a forward pass. o and lse may be those of a larger set of pairs."""

    q: Float[Tensor, "b h n d_k"]
    k: Float[Tensor, "b h_kv m d_k"]
    v: Float[Tensor, "b h_kv m d_v"]
    o: Float[Tensor, "b h n d_v"]
    lse: Float[Tensor, "b h n"]  # +∞ in a row without any key, so that exp(score − lse) is 0 in it


def forward(
    q: Float[Tensor, "b h n d_k"],
    k: Float[Tensor, "b h_kv m d_k"],
    v: Float[Tensor, "b h_kv m d_v"],
    scale: float,
    allowed: Bool[Tensor, "n m"] | None = None,
    bias: Float[Tensor, "#b #h n m"] | None = None,
    triangle: bool = False,
) -> tuple[Float[Tensor, "b h n d_v"], Float[Tensor, "b h n"]]:
    """o and lse over the allowed pairs, a bias added to the scores; a row without pairs has zeros and −∞.

    triangle: row r has keys 0 … r, of as many; the pairs beyond are skipped, not masked.
    """
    d = max(q.shape[-1], v.shape[-1])
    if not (q.numel() and k.numel()):
        return q.new_zeros(*q.shape[:3], v.shape[-1]), q.new_full(q.shape[:3], -inf)
    mask = _additive(allowed, bias, q.dtype)
    padded = (_padded(x, d) for x in (q, k, v))
    o, lse = compat.flash_forward(*padded, 0.0, triangle, attn_mask=mask, scale=scale)
    if allowed is not None:
        lse = lse.masked_fill(~allowed.any(-1), -inf)
    return o[..., : v.shape[-1]], lse


def backward(
    grad: Float[Tensor, "b h n d_v"],
    of: Forward,
    scale: float,
    allowed: Bool[Tensor, "n m"] | None = None,
    triangle: bool = False,
) -> tuple[Float[Tensor, "b h n d_k"], Float[Tensor, "b h_kv m d_k"], Float[Tensor, "b h_kv m d_v"]]:
    """The gradients of q, k and v."""
    q, k, v, o, lse = of
    d_k, d_v = q.shape[-1], v.shape[-1]
    if not (q.numel() and k.numel()):
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    padded = [_padded(x, max(d_k, d_v)) for x in (grad, q, k, v, o)]
    mask = _additive(allowed, None, q.dtype)
    dq, dk, dv = compat.flash_backward(*padded, lse, 0.0, triangle, attn_mask=mask, scale=scale)
    return dq[..., :d_k], dk[..., :d_k], dv[..., :d_v]


def padded_output(q, k, v, mask, is_causal: bool, scale: float) -> Tensor:
    """o, as wide as the wider of q and v, with an additive mask that leaves no row empty: (b or 1, h or 1, n, m),
    of q's dtype."""
    d = max(q.shape[-1], v.shape[-1])
    padded = (_padded(x, d) for x in (q, k, v))
    return compat.flash_forward(*padded, 0.0, is_causal, attn_mask=mask, scale=scale)[0]


def _additive(allowed: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """What is added to the scores: a bias that is a view stays one, as long as its keys are neighbours in memory."""
    if bias is not None:
        bias = bias if allowed is None else bias.masked_fill(~allowed, -inf)
        return bias if bias.stride(-1) == 1 else bias.contiguous()
    return None if allowed is None else torch.zeros(allowed.shape, dtype=dtype).masked_fill_(~allowed, -inf)


def _padded(x: Tensor, d: int) -> Tensor:
    """x with zeros up to width d, and the width as its innermost stride."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x if x.shape[-1] == d else F.pad(x, (0, d - x.shape[-1]))

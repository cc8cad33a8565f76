"""PyTorch's fused CPU attention with its log-sum-exp, forward and backward: the only file that reaches these ops.

    o = softmax(scale · q kᵀ + mask) v        lse = ln Σ exp(scale · q·k + mask)

They are private, so their schema is compared first. What they do on torch 2.11 and 2.13, and is mended here:
an empty row has lse 0, not −∞; a bool mask is silently wrong in the backward; no queries or no keys end the
process; d_v has to equal d_k.
"""

from collections.abc import Callable
from functools import cache
from math import inf

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from ...errors import BackendError

NAME = "_scaled_dot_product_flash_attention_for_cpu"
SCHEMAS = {
    NAME: (
        f"aten::{NAME}(Tensor query, Tensor key, Tensor value, float dropout_p=0., bool is_causal=False, *, "
        "Tensor? attn_mask=None, float? scale=None) -> (Tensor output, Tensor logsumexp)"
    ),
    f"{NAME}_backward": (
        f"aten::{NAME}_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, "
        "Tensor logsumexp, float dropout_p, bool is_causal, *, Tensor? attn_mask=None, float? scale=None) "
        "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value)"
    ),
}


@cache
def op(name: str):
    """The op of this name, if it is the one this file was written for; else a BackendError."""
    found = getattr(getattr(torch.ops.aten, name, None), "default", None)
    schema = "nothing" if found is None else str(found._schema)
    if schema != SCHEMAS[name]:
        raise BackendError(
            f"backend='tiles' runs aten::{name} on the CPU, and torch {torch.__version__} has another one: "
            f"found {schema}, need {SCHEMAS[name]}; use backend='sdpa'"
        )
    return found


@cache
def quick() -> Callable[..., tuple[Tensor, Tensor]]:
    """The forward op without the dispatcher's Python, which takes a tenth of a short call. It mends nothing."""
    op(NAME)
    return getattr(torch, NAME)


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

    triangle: row r sees keys 0 … r, of as many; what lies beyond is skipped, not masked.
    """
    d = max(q.shape[-1], v.shape[-1])
    if not (q.numel() and k.numel()):
        return q.new_zeros(*q.shape[:3], v.shape[-1]), q.new_full(q.shape[:3], -inf)
    o, lse = op(NAME)(
        *(_wide(x, d) for x in (q, k, v)),
        0.0,
        triangle,
        attn_mask=_added(allowed, bias, q.dtype),
        scale=scale,
    )
    if allowed is not None:
        lse = lse.masked_fill(~allowed.any(-1), -inf)
    return o[..., : v.shape[-1]], lse


def backward(
    grad: Float[Tensor, "b h n d_v"],
    q: Float[Tensor, "b h n d_k"],
    k: Float[Tensor, "b h_kv m d_k"],
    v: Float[Tensor, "b h_kv m d_v"],
    o: Float[Tensor, "b h n d_v"],
    lse: Float[Tensor, "b h n"],
    scale: float,
    allowed: Bool[Tensor, "n m"] | None = None,
    triangle: bool = False,
) -> tuple[Float[Tensor, "b h n d_k"], Float[Tensor, "b h_kv m d_k"], Float[Tensor, "b h_kv m d_v"]]:
    """The gradients of q, k and v. o and lse may be those of a larger set of pairs, of which these are a part.

    A row that sees nothing at all has lse = +∞ here, so that exp(score − lse) is 0 in it.
    """
    d_k, d_v = q.shape[-1], v.shape[-1]
    d = max(d_k, d_v)
    if not (q.numel() and k.numel()):
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    wide = [_wide(x, d) for x in (grad, q, k, v, o)]
    mask = _added(allowed, None, q.dtype)
    dq, dk, dv = op(f"{NAME}_backward")(*wide, lse, 0.0, triangle, attn_mask=mask, scale=scale)
    return dq[..., :d_k], dk[..., :d_k], dv[..., :d_v]


def of_all(q, k, v, mask, is_causal: bool, scale: float) -> Tensor:
    """o, as wide as the widest of q and v, with a mask that is added and leaves no row empty: (b or 1, h or 1, n, m),
    of q's dtype."""
    d = max(q.shape[-1], v.shape[-1])
    return op(NAME)(_wide(q, d), _wide(k, d), _wide(v, d), 0.0, is_causal, attn_mask=mask, scale=scale)[0]


def _added(allowed: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """What is added to the scores: a mask that is a view stays one, as long as its keys are neighbours in memory."""
    if bias is not None:
        bias = bias if allowed is None else bias.masked_fill(~allowed, -inf)
        return bias if bias.stride(-1) == 1 else bias.contiguous()
    return None if allowed is None else torch.zeros(allowed.shape, dtype=dtype).masked_fill_(~allowed, -inf)


def _wide(x: Tensor, d: int) -> Tensor:
    """x with zeros up to width d, and the width as its innermost stride."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x if x.shape[-1] == d else F.pad(x, (0, d - x.shape[-1]))

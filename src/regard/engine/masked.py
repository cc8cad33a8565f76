"""Any pattern, by a table of allowed pairs: right everywhere, and as dear as full attention."""

from contextlib import nullcontext
from math import inf

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from .. import reference
from .call import Call

ROWS = 1 << 22  # scores of one head held at a time by the plain loop


def attend(call: Call) -> Float[Tensor, "b h n d_v"]:
    """softmax(scale · q kᵀ + bias) v over the allowed pairs, by SDPA with a mask."""
    allowed, bias = call.allowed(), call.dense_bias()
    mask, empty = allowed, None
    # What SDPA gives for a row of −∞ differs by backend: let such a row look everywhere, then clear it.
    if bias is not None:
        mask = bias if allowed is None else bias.masked_fill(~allowed, -inf)
        empty = (mask == -inf).all(-1, keepdim=True)  # a bias may forbid by itself, as an additive mask
        mask = mask.masked_fill(empty, 0.0)
    elif allowed is not None and call.may_be_empty():
        empty = ~allowed.any(-1, keepdim=True)
        mask = allowed | empty
    if mask is not None and mask.dim() < 2:
        mask = mask.expand(1, call.m)  # SDPA reads the last two axes
    o = F.scaled_dot_product_attention(
        call.q, call.k, call.v, mask, call.dropout_p, scale=call.factor, enable_gqa=call.grouped
    )
    return o if empty is None else o.masked_fill(empty, 0.0)


def attend_plainly(call: Call) -> tuple[Float[Tensor, "b h n d_v"], Float[Tensor, "b h n"]]:
    """The formula itself, a stretch of queries at a time: for hard attention and for the log-sum-exp.

    16-bit inputs are computed in float32, as the log-sum-exp is of that dtype on every way.
    """
    kind = call.q.device.type  # meta has no autocast to switch off
    with nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False):
        return _plainly(call, torch.promote_types(call.q.dtype, torch.float32))


def _plainly(call: Call, wide: torch.dtype) -> tuple[Float[Tensor, "b h n d_v"], Float[Tensor, "b h n"]]:
    q = call.q.to(wide)
    k, v = (reference.repeat_heads(x.to(wide), q.shape[1]) for x in (call.k, call.v))
    allowed, bias = call.allowed(), call.dense_bias()
    outs, lses = [], []
    rows = max(1, ROWS // max(1, call.m))
    for a in range(0, max(1, call.n), rows):
        some = slice(a, a + rows)
        got = reference.attend(
            q[..., some, :],
            k,
            v,
            _rows(allowed, some),
            bias=_rows(bias, some),
            scale=call.scale,
            ties=call.ties,
        )
        outs.append(F.dropout(got.weights, call.dropout_p) @ v if call.dropout_p else got.o)
        lses.append(got.lse)
    return torch.cat(outs, -2).to(call.q.dtype), torch.cat(lses, -1)


def _rows(x: Tensor | None, some: slice) -> Tensor | None:
    return x if x is None or x.dim() < 2 or x.shape[-2] == 1 else x[..., some, :]

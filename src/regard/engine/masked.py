"""Any pattern, by a table of allowed pairs: right everywhere, and as dear as full attention."""

from math import inf
from typing import Any

from jaxtyping import Float
from torch import Tensor

from . import whole
from .call import Call, readable


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
    if empty is not None and readable(empty) and not bool(empty.any()):
        empty = None
    if mask is not None and mask.dim() < 2:
        mask = mask.expand(1, call.m)  # SDPA reads the last two axes
    more: dict[str, Any] = {"scale": call.factor, "enable_gqa": call.grouped}
    o = whole.attend(call.q, call.k, call.v, mask, dropout_p=call.dropout_p, **more)
    return o if empty is None else o.masked_fill(empty, 0.0)

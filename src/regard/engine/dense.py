"""Full or causal without bias: PyTorch's own attention, as it is, at no cost."""

from jaxtyping import Float
from torch import Tensor

from ..pattern import causal
from . import whole
from .call import Call


def attend(call: Call) -> Float[Tensor, "b h n d_v"]:
    """softmax(scale · q kᵀ) v over all keys, or over those up to the query where n = m."""
    is_causal = isinstance(call.pattern, causal)
    if call.n == 1:  # one query at the end sees every key; an `if`, as n may be a symbol
        is_causal = False
    return whole.attend(
        call.q,
        call.k,
        call.v,
        dropout_p=call.dropout_p,
        is_causal=is_causal,
        scale=call.factor,
        enable_gqa=call.grouped,
    )

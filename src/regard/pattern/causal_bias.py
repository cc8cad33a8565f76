"""PyTorch's torch.nn.attention.bias.CausalBias, a tensor without values, as a pattern and a query offset."""

import sys
from typing import Any

from torch import Tensor

from ..errors import ShapeError, SpecError
from .words import causal


def is_causal_bias(mask: Any) -> bool:
    return isinstance(mask, getattr(sys.modules.get("torch.nn.attention.bias"), "CausalBias", ()))


def causal_and_offset(mask: Any, q: Tensor, k: Tensor, at: Any = None) -> tuple[causal, int]:
    """`causal_upper_left` aligns the first query with the first key, `causal_lower_right` the last ones."""
    if at is not None:
        raise SpecError(
            f"at={at!r} beside a CausalBias, which states the query offset; use rg.causal() with at="
        )
    n, m = (x.shape[-2] if x.dim() > 1 else 1 for x in (q, k))
    if (mask.seq_len_q, mask.seq_len_kv) != (n, m):
        sizes = f"{mask.seq_len_q} queries and {mask.seq_len_kv} keys"
        raise ShapeError(
            f"a CausalBias for {sizes}, and there are {n} and {m}; make it for these, or use rg.causal()"
        )
    return causal(), 0 if mask.variant.name == "UPPER_LEFT" else m - n


def read_causal_bias(pattern: Any, at: Any, bias: Any, q: Tensor, k: Tensor) -> tuple[Any, Any]:
    """The pattern and the query offset of a call, where the pattern may be a CausalBias."""
    if is_causal_bias(bias):
        raise SpecError("a CausalBias has no values to add; give it as pattern=, or use rg.causal()")
    return causal_and_offset(pattern, q, k, at) if is_causal_bias(pattern) else (pattern, at)

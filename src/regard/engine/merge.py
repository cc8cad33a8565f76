"""Partial attentions into one: softmax over a union of disjoint sets of keys, from the softmax over each.

lse = ln Σ_p exp(lse_p)        o = Σ_p exp(lse_p − lse) · o_p
"""

from collections.abc import Sequence
from math import inf

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from ..errors import ShapeError

Part = tuple[Float[Tensor, "*b n d_v"], Float[Tensor, "*b n"]]


def merge(parts: Sequence[Part]) -> Part:
    """(o, lse) over all keys from the (o, lse) of disjoint sets of keys; gradients reach every o and lse.

    A row that saw nothing in a part has o = 0 and lse = −∞ there; one that saw nothing in any part has both
    here, and its gradients are zeros.
    """
    if not parts:
        raise ShapeError("merge() of no parts; give at least one (o, lse)")
    for o, lse in parts:
        if o.shape != parts[0][0].shape or lse.shape != o.shape[:-1]:
            raise ShapeError(
                f"merge: o {tuple(o.shape)} and lse {tuple(lse.shape)} do not fit o {tuple(parts[0][0].shape)}; "
                f"every o needs one shape (…, n, d_v), and its lse the same without d_v"
            )
    logs = torch.stack([lse for _, lse in parts])
    # An empty row is −∞ in every part: shift it by 0, so that exp gives 0 and no gradient is ∞ − ∞.
    max_lse = logs.detach().amax(0)
    max_lse = max_lse.masked_fill(max_lse == -inf, 0.0)
    weights = (logs - max_lse).exp()
    total = weights.sum(0)
    has_keys = total > 0
    shares = weights / torch.where(has_keys, total, 1.0)
    lse = torch.where(has_keys, torch.where(has_keys, total, 1.0).log() + max_lse, -inf)
    shares = rearrange(shares, "p ... -> p ... 1").to(parts[0][0].dtype)
    return sum(share * o for share, (o, _) in zip(shares, parts)), lse


def merge_sink(
    o: Float[Tensor, "b h n d_v"], lse: Float[Tensor, "b h n"], sink_logits: Float[Tensor, " h"]
) -> tuple[Float[Tensor, "b h n d_v"], Float[Tensor, "b h n"]]:
    """(o, lse) with one more key per head in the softmax, of the score sink_logits[h], without a value.

    lse' = ln(exp(lse) + exp(sink))        o' = o · exp(lse − lse') = o · sigmoid(lse − sink)
    """
    sink = sink_logits.to(lse.dtype)[:, None]
    empty = lse == -inf  # such a row is zeros already; −∞ − (−∞) would be NaN
    finite = lse.masked_fill(empty, 0.0)
    share = torch.sigmoid(finite - sink).masked_fill(empty, 0.0)
    total = torch.where(empty, sink, torch.logaddexp(finite, sink))
    return (o * share[..., None]).to(o.dtype), total

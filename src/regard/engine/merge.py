"""Partial attentions into one: softmax over a union of disjoint sets of keys, from the softmax over each.

lse = ln Σ_p exp(lse_p)        o = Σ_p exp(lse_p − lse) · o_p

And all heads from those of each pattern, where heads have patterns of their own.
"""

from collections.abc import Callable, Sequence
from math import inf

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from ..errors import ShapeError
from ..pattern.heads import launches
from ..position import ByDistance
from .call import Bias, Call, Outputs, replaced

Part = tuple[Float[Tensor, "*b n d_v"], Float[Tensor, "*b n"]]


def merge(parts: Sequence[Part]) -> Part:
    """(o, lse) over all keys from the (o, lse) of disjoint sets of keys; gradients reach every o and lse.

    A row without an allowed key in a part has o = 0 and lse = −∞ there. A row without an allowed key in any part has
    the same in the result, and zero gradients.
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


# A pattern per head: heads with equal patterns run as one call of theirs, and the results are put in order.


def by_heads(call: Call, run: Callable[[Call], Outputs]) -> Outputs:
    """The results of all heads, in the order of the heads. run: for a call of some heads with one pattern."""
    order: list[int] = []
    results: list[Outputs] = []
    for pattern, heads, kv_heads in launches(call.pattern, call.q.shape[1], call.k.shape[1]):
        part = replaced(
            call, pattern=pattern, table=_broadcast_heads(call.table, heads), bias=_bias(call.bias, heads),
            q=_heads(call.q, heads, 1), k=_heads(call.k, kv_heads, 1), v=_heads(call.v, kv_heads, 1),
            sink_logits=None if call.sink_logits is None else _heads(call.sink_logits, heads, 0),
        )  # fmt: skip
        order += heads
        results.append(run(part))
    back = sorted(range(len(order)), key=order.__getitem__)
    o = _heads(torch.cat([o for o, _ in results], 1), back, 1)
    logs = [lse for _, lse in results if lse is not None]
    return o, _heads(torch.cat(logs, 1), back, 1) if len(logs) == len(results) else None


def _heads(x: Tensor, heads: list[int], axis: int) -> Tensor:
    """These heads: a view if they are evenly spaced. Their numbers stay on the host: a CUDA graph can capture it."""
    step = heads[1] - heads[0] if len(heads) > 1 else 1
    if step > 0 and heads == list(range(heads[0], heads[-1] + 1, step)):
        return x[(slice(None),) * axis + (slice(heads[0], heads[-1] + 1, step),)]
    return torch.stack(list(map(x.unbind(axis).__getitem__, heads)), axis)


def _broadcast_heads(x: Tensor | None, heads: list[int]) -> Tensor | None:
    """The heads of a tensor that broadcasts to (b, h, n, m)."""
    return x if x is None or x.dim() < 3 or x.shape[-3] == 1 else _heads(x, heads, x.dim() - 3)


def _bias(bias: Bias, heads: list[int]) -> Bias:
    if not isinstance(bias, ByDistance):
        return _broadcast_heads(bias, heads)
    table, slopes = (None if x is None else _heads(x, heads, 0) for x in (bias.table, bias.slopes))
    return ByDistance(table, slopes)

"""The attention weights of one head for consecutive queries, one block at a time."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .calls import AttentionCall, QueryKeyScores, Source, StoredWeights, tensors_of
from .score_mods import CausalMask, MaskOrBias, Region

LOWEST = -1e4  # replaces −∞: exp(LOWEST) is 0, and 0 · LOWEST is 0, whereas 0 · −∞ is NaN
SAFE = 40.0  # scores within ±40 need no shift before exp: e⁴⁰ and e⁻⁴⁰ are normal numbers in float32


@dataclass(frozen=True, eq=False)
class WeightBlock:
    """exp(scores) of one head for the queries `rows` and the first `keys` keys; a weight is exp(score) / mass.

    `table` and `skewed` are two views of one buffer. The rows of `skewed` are one element longer, so that all pairs
    of one of its columns have the same offset j − i.
    """

    batch: int
    head: int
    rows: slice
    n: int
    query_offset: int  # the key position of query 0
    table: Float[Tensor, "r keys"]
    skewed: Float[Tensor, "r o"]
    mass: Float[Tensor, " r"]
    entropy: Float[Tensor, " r"]
    top: Float[Tensor, " r"]
    allowed: Float[Tensor, " r"]
    counted: Bool[Tensor, " r"]  # queries that are not padding and have weights, none of them NaN
    share: Float[Tensor, " r"]  # the factor from exp(scores) to weights: 1 / mass, 0 for a query not counted

    @property
    def keys(self) -> int:
        return self.table.shape[-1]

    def weights(self) -> Float[Tensor, "r keys"]:
        return self.table * self.share[:, None]

    def by_key(self) -> Float[Tensor, " keys"]:
        """Σ over the queries of the weight on each key."""
        return self.share @ self.table

    def by_offset(self) -> tuple[int, Float[Tensor, " o"]]:
        """Σ over the queries of the weight at each offset, and the index of the first in n − 1, n − 2, … ."""
        sums = (self.share @ self.skewed)[1:]  # column r + j − i; column 0 holds no pair
        first = self.n - 1 - (self.rows.start + len(self.mass) - 1)
        return first, sums

    def at(self, pairs: "Pairs") -> tuple[Float[Tensor, ""], Int[Tensor, ""]]:
        """Σ of the weights at these pairs, and the number of counted queries that have such a pair."""
        r, device = len(self.mass), self.table.device
        flat = self.skewed.as_strided((r * self.skewed.stride(0),), (1,))
        weight = flat.index_select(0, pairs.indices.to(device)) @ self.share.index_select(
            0, pairs.i.to(device)
        )
        return weight, (pairs.has_pair.to(device) & self.counted).sum()


class Pairs(NamedTuple):
    """Pairs of a block: their queries, counted from its first; their indices in the buffer; which rows have one."""

    i: Int[Tensor, " p"]
    indices: Int[Tensor, " p"]
    has_pair: Bool[Tensor, " r"]


def pairs(i: Int[Tensor, " p"], j: Int[Tensor, " p"], r: int, keys: int) -> Pairs:
    """The pairs (i, j) of a block of r queries and `keys` keys."""
    has_pair = torch.zeros(r, dtype=torch.bool).index_fill_(0, i, True)
    return Pairs(i, i * (r + keys) + r + j, has_pair)


def blocks(call: AttentionCall, batch: int, size: int) -> Iterator[WeightBlock]:
    """The blocks of one batch row, about `size` weights each: for each range of queries, one block per head."""
    source = call._require_source()
    if isinstance(source, QueryKeyScores) and not source.k.is_contiguous():
        source = replace(source, k=source.k.contiguous())  # it is read once per block
    rows_per_block = max(1, min(call.n, size // max(call.m, 1)))
    device = tensors_of(source)[0].device
    buffer = torch.zeros(rows_per_block * (rows_per_block + call.m + 1), device=device, dtype=_dtype(source))
    safe = [_is_safe(source, batch, h) for h in range(call.heads)]
    for start in range(0, call.n, rows_per_block):
        rows = slice(start, min(start + rows_per_block, call.n))
        keys = min(call.m, rows.stop) if source.top_left_causal else call.m
        r = rows.stop - rows.start
        buffer.zero_()  # the gaps between rows must be 0, and their positions depend on the number of rows
        table, skewed = _views(buffer, r, keys)
        valid = torch.ones(r, dtype=torch.bool, device=device)
        if call.valid is not None:
            valid = call.valid[batch, rows].to(device)
        for head in range(call.heads):
            sums = _fill(source, Region(batch, slice(head, head + 1), rows, keys), table, safe[head])
            if bool((undefined := sums[0].isnan()).any()):  # a softmax over no key, or NaN in the model
                for x in (table, *sums):
                    x[undefined] = 0
            counted = valid & (sums[0] > 0)
            share = torch.where(counted, sums[0].reciprocal(), 0.0)
            yield WeightBlock(
                batch, head, rows, call.n, call.query_offset, table, skewed, *sums, counted, share
            )


def _views(buffer: Tensor, r: int, keys: int) -> tuple[Float[Tensor, "r keys"], Float[Tensor, "r o"]]:
    """The two views of the buffer: pair (i, j) is in column j of the one and r + j − i of the other."""
    stride = r + keys
    buffer = buffer[: r * (stride + 1)]
    return buffer.as_strided((r, keys), (stride, 1), r), buffer.view(r, stride + 1)[:, :stride]


def _fill(
    source: Source, region: Region, table: Float[Tensor, "r keys"], safe: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Write exp(scores) into the table; per row, their sum, the entropy, the largest weight and the allowed keys."""
    if isinstance(source, StoredWeights) or source.scale == inf or source.sink_logits is not None:
        table.copy_(source.weights(region)[0])
        mass = table.sum(-1)
        entropy = torch.special.entr(table).sum(-1)
        return mass, entropy, table.amax(-1), (table > 0).sum(-1).to(mass.dtype)
    scores = source.scores(region)[0]
    masks = [mod for mod in source.score_mods if not isinstance(mod, CausalMask)]
    if source.score_mods:
        scores = scores.clamp_(min=LOWEST)  # −∞ · 0 is NaN
    if masks:
        allowed = (scores > LOWEST / 2).sum(-1).to(scores.dtype)
    else:
        allowed = _keys_allowed(source, region, scores)
    if not safe:
        top = scores.amax(-1, keepdim=True)
        scores = scores.sub_(torch.where(top > LOWEST / 2, top, 0.0)).clamp_(min=LOWEST)
    torch.exp(scores, out=table)
    mass = table.sum(-1)
    positive = mass.clamp(min=torch.finfo(mass.dtype).tiny)
    mean = scores.mul_(table).sum(-1) / positive
    return mass, (positive.log() - mean).clamp(min=0.0), table.amax(-1) / positive, allowed


def _keys_allowed(source: QueryKeyScores, region: Region, like: Tensor) -> Float[Tensor, " r"]:
    i = region.query_indices(like.device).to(like.dtype)
    return (i + 1).clamp(max=region.keys) if source.top_left_causal else torch.full_like(i, region.keys)


def _is_safe(source: Source, batch: int, head: int) -> bool:
    """Whether every score of a head is within ±SAFE: |q·k| ≤ ‖q‖ ‖k‖."""
    if not isinstance(source, QueryKeyScores) or source.scale == inf:
        return False
    if not all(isinstance(mod, CausalMask) or _is_bool_mask(mod) for mod in source.score_mods):
        return False
    k = source.k[batch, head // (source.shape[1] // source.kv_heads)]
    largest = source.q[batch, head].float().norm(dim=-1).max() * k.float().norm(dim=-1).max()
    return bool(largest * abs(source.scale) <= SAFE)


def _is_bool_mask(mod: object) -> bool:
    return isinstance(mod, MaskOrBias) and mod.table.dtype == torch.bool


def _dtype(source: Source) -> torch.dtype:
    return torch.promote_types(tensors_of(source)[0].dtype, torch.float32)

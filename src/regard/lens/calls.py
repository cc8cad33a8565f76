"""One intercepted attention call, and its weights, computed only for the requested heads and rows.

A call is stored as the input of its softmax: q, k, the scale and what modifies the scores. That is O(n · d)
memory, whatever kernel ran. For an eager call, which computes its weights as a tensor, the weights are stored.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from operator import index
from typing import Literal, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from ..compat import version
from ..errors import RegardError, ShapeError
from ..reference import Ties, hardmax, softmax, with_sink
from .products import Product, Rows
from .score_mods import ByHeads, CausalMask, Heads, Region, ScoreMod
from .score_mods import Rows as RowIndices

Implementation = Literal["sdpa", "flex", "fast path", "eager", "regard"]
Role = Literal["self", "cross"]
MASKED = torch.finfo(torch.float32).min / 2  # many models mask with their dtype's lowest number


@dataclass(frozen=True, eq=False)
class QueryKeyScores:
    """scale · q kᵀ, modified by each of `score_mods` in turn."""

    q: Float[Tensor, "b h n d_k"]
    k: Float[Tensor, "b h_kv m d_k"]
    v: Float[Tensor, "b h_kv m d_v"] | None
    scale: float
    score_mods: tuple[ScoreMod, ...] = ()
    ties: Ties = "share"  # used where the scale is ∞
    sink_logits: Float[Tensor, " h"] | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (*self.q.shape[:3], self.k.shape[2])

    @property
    def kv_heads(self) -> int:
        return self.k.shape[1]

    @property
    def top_left_causal(self) -> bool:
        """Whether the call has is_causal=True: query i attends to no key after i, from the first key on."""
        return any(isinstance(mod, CausalMask) for mod in self.score_mods)

    def scores(self, region: Region) -> Float[Tensor, "h r m"]:
        precise = torch.promote_types(self.q.dtype, torch.float32)
        factor = self.q.shape[-1] ** -0.5 if self.scale == inf else self.scale
        q = self.q[region.batch, region.heads][:, region.rows].to(precise) * factor
        k = self.k[region.batch, :, : region.keys].to(precise)
        with torch.autocast(q.device.type, enabled=False):  # it would round the products to 16 bits
            scores = _products(q, k, region.heads, self.q.shape[1])
            for mod in self.score_mods:
                scores = mod.apply(scores, region)
        return scores

    def weights(self, region: Region) -> Float[Tensor, "h r m"]:
        scores = self.scores(region)
        if self.scale == inf:
            return hardmax(scores, ties=self.ties)
        if self.sink_logits is None:
            return softmax(scores)
        return softmax(with_sink(scores, None, self.sink_logits[region.heads])[0])[..., :-1]


def joined_heads(
    q: Float[Tensor, "b h n d_k"],
    k: Float[Tensor, "b h_kv m d_k"],
    v: Float[Tensor, "b h_kv m d_v"],
    parts: Sequence[tuple[list[int], QueryKeyScores]],
) -> QueryKeyScores:
    """One call of all heads from calls of some of them each: the heads of each part, and its call."""
    (_, first), sinks = parts[0], None
    if first.sink_logits is not None:
        sinks = first.sink_logits.new_empty(q.shape[1])
        for heads, part in parts:
            assert part.sink_logits is not None  # all heads of a layer have one, or none
            sinks[heads] = part.sink_logits
    mods = (ByHeads(tuple((tuple(heads), part.score_mods) for heads, part in parts)),)
    return QueryKeyScores(q, k, v, first.scale, mods, first.ties, sinks)


def _products(
    q: Float[Tensor, "h r d_k"], k: Float[Tensor, "h_kv m d_k"], heads: Heads, all_heads: int
) -> Float[Tensor, "h r m"]:
    """q·k; query heads g·c … g·c + c − 1 share key head g."""
    group = all_heads // len(k)
    if group == 1:
        return q @ rearrange(k[heads], "h m d -> h d m")
    if heads == slice(0, all_heads):  # one product per key head, without repeating the keys
        scores = rearrange(q, "(g c) r d -> g (c r) d", c=group) @ rearrange(k, "g m d -> g d m")
        return rearrange(scores, "g (c r) m -> (g c) r m", c=group)
    key_head = torch.arange(all_heads, device=k.device)[heads] // group
    return q @ rearrange(k[key_head], "h m d -> h d m")


@dataclass(frozen=True, eq=False)
class StoredWeights:
    """The weights as the model computed them; product: how it multiplies them with the values."""

    table: Float[Tensor, "b h n m"]
    v: Float[Tensor, "b h_kv m d_v"] | None = None
    product: Product | None = None
    scale = None
    top_left_causal = False

    @property
    def shape(self) -> tuple[int, int, int, int]:
        b, h, n, m = self.table.shape
        return b, h, n, m

    @property
    def kv_heads(self) -> int:
        return self.table.shape[1]

    def scores(self, region: Region) -> Float[Tensor, "h r m"]:
        """ln weights: the scores up to a constant per row; −∞ where the weight is 0."""
        return self.weights(region).log()

    def weights(self, region: Region) -> Float[Tensor, "h r m"]:
        precise = torch.promote_types(self.table.dtype, torch.float32)
        return self.table[region.batch, region.heads][:, region.rows, : region.keys].to(precise)


Source = QueryKeyScores | StoredWeights


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One attention call: where in the model it ran, and what its weights are.

    layer: its number in running order, from 0. name: the path of its module ("#2" for its second run).
    implementation: which function or operator ran. queries, keys: the tokens of both sides, one tuple per batch row.
    causal: no query attends to a later key. query_offset: the key position of query 0. valid: which queries are not
    padding; None means all.
    """

    layer: int
    name: str
    role: Role
    implementation: Implementation
    source: Source | None
    shape: tuple[int, int, int, int]
    versions: tuple[int | None, ...] = ()
    causal: bool = False
    query_offset: int = 0
    queries: tuple[tuple[str, ...], ...] = ()
    keys: tuple[tuple[str, ...], ...] = ()
    valid: Bool[Tensor, "b n"] | None = None

    @property
    def b(self) -> int:
        return self.shape[0]

    @property
    def heads(self) -> int:
        return self.shape[1]

    @property
    def n(self) -> int:
        return self.shape[2]

    @property
    def m(self) -> int:
        return self.shape[3]

    @property
    def kv_heads(self) -> int:
        return self.heads if self.source is None else self.source.kv_heads

    @property
    def scale(self) -> float | None:
        return None if self.source is None else self.source.scale

    def weights(
        self, heads: list[int] | None = None, rows: list[int] | None = None, batch: int = 0
    ) -> Float[Tensor, "h r m"]:
        """softmax(scores) of these heads and rows, all if None."""
        return self._require_source().weights(self.region(heads, rows, batch))

    def scores(
        self, heads: list[int] | None = None, rows: list[int] | None = None, batch: int = 0
    ) -> Float[Tensor, "h r m"]:
        """scale · q kᵀ + bias, −∞ at pairs that are not allowed. For an eager call: ln weights."""
        return self._require_source().scores(self.region(heads, rows, batch))

    def allowed(self, rows: list[int] | None = None, batch: int = 0) -> Bool[Tensor, "h r m"]:
        """Which pairs are allowed; for an eager call, which weights are above 0."""
        return self.scores(None, rows, batch) > MASKED

    def values(self, heads: list[int] | None = None, batch: int = 0) -> Float[Tensor, "h m d_v"] | None:
        """The values that the weights average, one matrix per query head."""
        v = self._require_source().v
        if v is None:
            return None
        chosen = self.region(heads, None, batch).heads
        key_head = torch.arange(self.heads, device=v.device)[chosen] // (self.heads // v.shape[1])
        return v[batch, key_head]

    def region(self, heads: Heads | None = None, rows: RowIndices | None = None, batch: int = 0) -> Region:
        """The region of these heads and rows; an index out of range raises an error that names the range."""
        if not is_index(batch, self.b):
            raise ShapeError(f"batch row {batch!r} of {self.name}: it has {_range(self.b, 'row')}")
        for indices, count, what in ((heads, self.heads, "head"), (rows, self.n, "query")):
            wrong = [i for i in indices if not is_index(i, count)] if isinstance(indices, list) else []
            if wrong:
                raise ShapeError(
                    f"{what} {wrong[0]!r} of layer {self.layer} ({self.name}): it has {_range(count, what)}"
                )
        return Region(batch, heads or slice(0, self.heads), rows or slice(0, self.n), self.m)

    def _require_source(self) -> Source:
        if self.source is None:
            raise RegardError(
                f"layer {self.layer} ({self.name}) was recorded with keep=False: it has statistics, but its queries "
                f"and keys were not stored; use keep=True for maps"
            )
        if tuple(version(x) for x in tensors_of(self.source)) != self.versions:
            raise RegardError(
                f"the tensors of layer {self.layer} ({self.name}) were overwritten in place after the call "
                f"(a static cache?), so its weights cannot be recomputed; use keep='copy'"
            )
        return self.source


class Positions(NamedTuple):
    """Which positions of their sequences the queries and the keys of a call are; None if unknown."""

    queries: Rows | None = None
    keys: Rows | None = None

    @property
    def offset(self) -> int | None:
        """The key position of query 0 where a model calls attention on parts of one sequence; else None."""
        q, k = self
        if q is None or k is None or q.length != k.length or (q.size == q.length and k.size == k.length):
            return None
        return q.start - k.start


def query_offset(source: Source, role: Role, positions: Positions) -> int:
    """The key position of query 0; 0 except in self-attention with a cache, or on some of the queries.

    With a cache the last query is at the last key that it may attend to: slots after it are not filled yet.
    """
    _, h, n, m = source.shape
    if role == "cross":
        return 0
    if positions.offset is not None:
        return positions.offset
    if source.top_left_causal:
        return 0
    if not 0 < n < m:
        return m - n
    allowed = (source.scores(Region(0, slice(0, h), [n - 1], m)) > MASKED).flatten(0, -2).any(0).nonzero()
    return (int(allowed[-1]) if len(allowed) else m - 1) - (n - 1)


def is_causal_call(source: Source, role: Role, offset: int) -> bool:
    """Whether no query gives weight to a later key, by whatever mask; tested on the first and the middle query."""
    _, h, n, m = source.shape
    if role == "cross" or m < 2 or n > m:
        return False
    rows = sorted({0, (n - 1) // 2})
    device = tensors_of(source)[0].device
    later = torch.arange(m, device=device) > torch.tensor(rows, device=device)[:, None] + offset
    weights = source.weights(Region(0, slice(0, h), rows, m))
    return bool(later.any()) and not bool((weights * later).any())


def tensors_of(source: Source) -> list[Tensor]:
    """The tensors that the weights are computed from."""
    return [source.q, source.k] if isinstance(source, QueryKeyScores) else [source.table]


def is_index(i: object, count: int) -> bool:
    """Whether i is a whole number from 0 to count − 1, of Python, numpy or PyTorch."""
    return hasattr(i, "__index__") and 0 <= index(i) < count


def _range(count: int, what: str) -> str:
    plural = {"query": "queries", "head": "heads", "row": "rows"}[what]
    return f"1 {what}, number 0" if count == 1 else f"{count} {plural}, 0 to {count - 1}"

"""One head's weights for a run of queries, one block after the other."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .captured import Captured, Compared, Written, held
from .terms import Causal, Masked, Part

LOWEST = -1e4  # exp of it is 0, and 0 · it is 0, which 0 · −∞ is not
SAFE = 40.0  # scores within ±40 need no shift before exp: e⁴⁰ and e⁻⁴⁰ are normal numbers in float32


@dataclass(frozen=True, eq=False)
class Block:
    """exp(scores) of one head, its queries `rows` and the first `keys` keys; a weight is one of them / mass.

    table is a view into `skewed`, where each query is one longer than its row of keys: read with that length,
    the keys of one column have one offset from their query.
    """

    batch: int
    head: int
    rows: slice
    n: int
    start: int  # where query 0 stands among the keys
    table: Float[Tensor, "r keys"]
    skewed: Float[Tensor, "r o"]
    mass: Float[Tensor, " r"]
    entropy: Float[Tensor, " r"]
    top: Float[Tensor, " r"]
    allowed: Float[Tensor, " r"]
    counted: Bool[Tensor, " r"]
    share: Float[Tensor, " r"]  # what turns a row into weights: 1 / mass, 0 for a query that is not counted

    @property
    def keys(self) -> int:
        return self.table.shape[-1]

    def weights(self) -> Float[Tensor, "r keys"]:
        return self.table * self.share[:, None]

    def by_key(self) -> Float[Tensor, " keys"]:
        """Σ over the queries of the weight on each key."""
        return self.share @ self.table

    def by_offset(self) -> tuple[int, Float[Tensor, " o"]]:
        """Σ over the queries of the weight at each offset, and the place of the first in n − 1, n − 2, … ."""
        sums = (self.share @ self.skewed)[1:]  # column r + j − i; column 0 holds no pair
        first = self.n - 1 - (self.rows.start + len(self.mass) - 1)
        return first, sums

    def at(self, pairs: "Pairs") -> tuple[Float[Tensor, ""], Int[Tensor, ""]]:
        """Σ of the weights at these pairs, and how many of the queries that have one are counted."""
        r, device = len(self.mass), self.table.device
        flat = self.skewed.as_strided((r * self.skewed.stride(0),), (1,))
        got = flat.index_select(0, pairs.places.to(device)) @ self.share.index_select(0, pairs.i.to(device))
        return got, (pairs.there.to(device) & self.counted).sum()


class Pairs(NamedTuple):
    """Some pairs of a block: their queries, counted from its first; where they lie in its space; who has one."""

    i: Int[Tensor, " p"]
    places: Int[Tensor, " p"]
    there: Bool[Tensor, " r"]


def pairs(i: Int[Tensor, " p"], j: Int[Tensor, " p"], r: int, keys: int) -> Pairs:
    """The pairs (i, j) of a block of r queries and `keys` keys."""
    there = torch.zeros(r, dtype=torch.bool).index_fill_(0, i, True)
    return Pairs(i, i * (r + keys) + r + j, there)


def blocks(call: Captured, batch: int, size: int) -> Iterator[Block]:
    """The blocks of one batch row, `size` weights each: a run of queries, then the next head."""
    source = call._kept()
    if isinstance(source, Compared) and not source.k.is_contiguous():
        source = replace(source, k=source.k.contiguous())  # it is read once a block
    run = max(1, min(call.n, size // max(call.m, 1)))
    device = held(source)[0].device
    space = torch.zeros(run * (run + call.m + 1), device=device, dtype=_dtype(source))
    safe = [_is_safe(source, batch, h) for h in range(call.heads)]
    for start in range(0, call.n, run):
        rows = slice(start, min(start + run, call.n))
        keys = min(call.m, rows.stop) if source.top_left else call.m
        r = rows.stop - rows.start
        space.zero_()  # what lies between the rows has to be 0, and they lie elsewhere now
        table, skewed = _layout(space, r, keys)
        real = torch.ones(r, dtype=torch.bool, device=device)
        if call.real is not None:
            real = call.real[batch, rows].to(device)
        for head in range(call.heads):
            facts = _fill(source, Part(batch, slice(head, head + 1), rows, keys), table, safe[head])
            counted = real & (facts[0] > 0)
            share = torch.where(counted, facts[0].reciprocal(), 0.0)
            yield Block(batch, head, rows, call.n, call.start, table, skewed, *facts, counted, share)


def _layout(space: Tensor, r: int, keys: int) -> tuple[Float[Tensor, "r keys"], Float[Tensor, "r o"]]:
    """The two readings of the space: pair (i, j) is in column j of the one and r + j − i of the other."""
    long = r + keys
    space = space[: r * (long + 1)]
    return space.as_strided((r, keys), (long, 1), r), space.view(r, long + 1)[:, :long]


def _fill(
    source: Compared | Written, part: Part, table: Float[Tensor, "r keys"], safe: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """exp(scores) into the table; their sum, the entropy, the largest weight and the keys allowed, by row."""
    if isinstance(source, Written) or source.scale == inf:
        table.copy_(source.weights(part)[0])
        mass = table.sum(-1)
        entropy = torch.special.entr(table).sum(-1)
        return mass, entropy, table.amax(-1), (table > 0).sum(-1).to(mass.dtype)
    scores = source.scores(part)[0]
    hides = [t for t in source.terms if not isinstance(t, Causal)]
    if source.terms:
        scores = scores.clamp_(min=LOWEST)  # −∞ · 0 has no value
    if hides:
        allowed = (scores > LOWEST / 2).sum(-1).to(scores.dtype)
    else:
        allowed = _keys_allowed(source, part, scores)
    if not safe:
        top = scores.amax(-1, keepdim=True)
        scores = scores.sub_(torch.where(top > LOWEST / 2, top, 0.0)).clamp_(min=LOWEST)
    torch.exp(scores, out=table)
    mass = table.sum(-1)
    some = mass.clamp(min=torch.finfo(mass.dtype).tiny)
    mean = scores.mul_(table).sum(-1) / some
    return mass, (some.log() - mean).clamp(min=0.0), table.amax(-1) / some, allowed


def _keys_allowed(source: Compared, part: Part, like: Tensor) -> Float[Tensor, " r"]:
    places = part.places(like.device).to(like.dtype)
    return (places + 1).clamp(max=part.keys) if source.top_left else torch.full_like(places, part.keys)


def _is_safe(source: Compared | Written, batch: int, head: int) -> bool:
    """Whether every score of a head is within ±SAFE: |q·k| ≤ ‖q‖ ‖k‖."""
    if not isinstance(source, Compared) or source.scale == inf:
        return False
    if not all(isinstance(t, Causal) or _only_hides(t) for t in source.terms):
        return False
    k = source.k[batch, head // (source.shape[1] // source.kv_heads)]
    most = source.q[batch, head].float().norm(dim=-1).max() * k.float().norm(dim=-1).max()
    return bool(most * abs(source.scale) <= SAFE)


def _only_hides(term: object) -> bool:
    return isinstance(term, Masked) and term.table.dtype == torch.bool


def _dtype(source: Compared | Written) -> torch.dtype:
    return torch.promote_types(held(source)[0].dtype, torch.float32)

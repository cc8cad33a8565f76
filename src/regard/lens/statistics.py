"""Statistics of each head, computed block by block: O(n · block) memory, no n × m table.

A block contains the weights of one head for consecutive queries. Nearly all statistics are linear in the weights, so
two sums over the queries suffice: the weight on each key, and the weight at each offset i − j (the diagonals).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import nan

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import ShapeError
from .calls import AttentionCall, tensors_of
from .patch_grid import Grid, GridStatistics, grid_statistics
from .token_matches import Tokens
from .weight_blocks import Pairs, WeightBlock, blocks

MULTIPLES = (2, 3, 4, 8, 16, 32, 64)
SPAN = 0.9  # the share of the weight within the span


@dataclass(frozen=True, eq=False)
class HeadStatistics:
    """Means over the queries that are not padding and have weights, none of them NaN; NaN where one does not apply.

    entropy: of a row, in nats; entropy_share: relative to ln(allowed keys). keys: exp(entropy), the effective number
    of keys. top: the largest weight. distance: |i − j|. span: the smallest w with 90 % of the weight at |i − j| ≤ w.
    on_same: the weight on other occurrences of the query's token; induction: on the token after an earlier one.
    multiples[k], strides[k]: the weight on keys j ≡ 0, and on offsets i − j ≡ 0, mod k.
    shift: the offset i − j with the largest weight; shift_weight: the weight there, over the queries that have such a
    key; shift_error: 1 − shift_weight, the total variation distance to a head that only shifts.
    by_key: the weight on each key. by_offset: the weight at each of `offsets`, i − j.
    uniform: the same statistics of a uniform head, as a baseline.
    relations: for each relation that View.mark was given, the weight on the related keys, over the queries with one.
    """

    entropy: Float[Tensor, " h"]
    entropy_share: Float[Tensor, " h"]
    keys: Float[Tensor, " h"]
    top: Float[Tensor, " h"]
    distance: Float[Tensor, " h"]
    span: Float[Tensor, " h"]
    on_self: Float[Tensor, " h"]
    on_previous: Float[Tensor, " h"]
    on_next: Float[Tensor, " h"]
    on_first: Float[Tensor, " h"]
    on_same: Float[Tensor, " h"]
    on_separator: Float[Tensor, " h"]
    induction: Float[Tensor, " h"]
    shift: Float[Tensor, " h"]
    shift_weight: Float[Tensor, " h"]
    shift_error: Float[Tensor, " h"]
    by_key: Float[Tensor, "h m"]
    by_offset: Float[Tensor, "h o"]
    offsets: Int[Tensor, " o"]
    queries: int  # the number of queries that were counted
    multiples: Mapping[int, Float[Tensor, " h"]] = field(default_factory=dict)
    strides: Mapping[int, Float[Tensor, " h"]] = field(default_factory=dict)
    uniform: Mapping[str, float] = field(default_factory=dict)
    grid: GridStatistics | None = None
    relations: Mapping[str, Float[Tensor, " h"]] = field(default_factory=dict)

    @property
    def center(self) -> Float[Tensor, "h 2"] | None:
        return None if self.grid is None else self.grid.center

    @property
    def spread(self) -> Float[Tensor, " h"] | None:
        return None if self.grid is None else self.grid.spread

    @property
    def shift_2d(self) -> Float[Tensor, "h 2"] | None:
        return None if self.grid is None else self.grid.shift

    @property
    def shift_2d_weight(self) -> Float[Tensor, " h"] | None:
        return None if self.grid is None else self.grid.shift_weight

    @property
    def by_offset_2d(self) -> Float[Tensor, "h dy dx"] | None:
        return None if self.grid is None else self.grid.by_offset

    def numbers(self, head: int) -> dict[str, float]:
        """Every statistic of one head, by name."""
        names = (n for n, kind in self.__annotations__.items() if n not in _NOT_A_NUMBER)
        given = {name: float(getattr(self, name)[head]) for name in names}
        for k, each in self.multiples.items():
            given[f"multiples_of_{k}"] = float(each[head])
        given |= {name: float(each[head]) for name, each in self.relations.items()}
        if self.grid is not None:
            given |= self.grid.numbers(head)
        return given


_NOT_A_NUMBER = {
    "by_key",
    "by_offset",
    "offsets",
    "queries",
    "multiples",
    "strides",
    "uniform",
    "grid",
    "relations",
}


class Sums:
    """The sums over blocks, one row per head; per query where the mean is taken later."""

    def __init__(self, call: AttentionCall, grid: Grid | None):
        b, h, n, m = call.shape
        self.by_key, self.by_offset = _zeros(h, m), _zeros(h, n + m - 1)
        self.entropy, self.top, self.allowed, self.counted = (_zeros(h, b, n) for _ in range(4))
        self.separator = _zeros(h)
        self.same, self.induction = _zeros(2, h), _zeros(2, h)  # the weight, and the number of queries
        self.grid = None if grid is None else _zeros(h, *grid.offsets)

    def add(self, block: WeightBlock, is_separator: Float[Tensor, "b m"] | None) -> None:
        at = (block.head, block.batch, block.rows)
        self.entropy[at], self.top[at] = block.entropy, block.top
        self.allowed[at], self.counted[at] = block.allowed, block.counted
        by_key = block.by_key().cpu()
        self.by_key[block.head, : block.keys] += by_key
        if is_separator is not None:
            self.separator[block.head] += by_key.double() @ is_separator[block.batch, : block.keys]
        first, weights = block.by_offset()
        self.by_offset[block.head, first : first + len(weights)] += weights.cpu()


def _zeros(*shape: int) -> Float[Tensor, "..."]:
    return torch.zeros(shape, dtype=torch.float64)


def head_statistics(
    call: AttentionCall, tokens: Tokens | None = None, grid: Grid | None = None, size: int | None = None
) -> HeadStatistics:
    """The statistics of every head of a call; about `size` weights are in memory at a time."""
    size = max(1 << 19, 64 * call.m) if size is None else size  # a product of fewer than 64 queries is slow
    if grid is not None and not (call.n == call.m == grid.tokens):
        grid = None  # a cross-attention, or another stage of the model
    sums = Sums(call, grid)
    is_separator = None if tokens is None else tokens.is_separator.double()
    for batch in range(call.b):
        for block in blocks(call, batch, size):
            sums.add(block, is_separator)
            if tokens is not None:
                _add(sums.same, block, tokens.same(block, call.role, call.causal))
                _add(sums.induction, block, tokens.after_same(block, call.role))
            if grid is not None and sums.grid is not None:
                sums.grid[block.head] += grid.by_offset(block)
    return _finish(call, sums, tokens, grid)


def _add(sums: Float[Tensor, "2 h"], block: WeightBlock, pairs: Pairs | None) -> None:
    """Add the weight on these pairs, gathered one by one: few tokens are equal."""
    if pairs is not None and len(pairs.i):
        weight, counted = block.at(pairs)
        sums[0, block.head] += weight.cpu()
        sums[1, block.head] += counted.cpu()


def _finish(call: AttentionCall, sums: Sums, tokens: Tokens | None, grid: Grid | None) -> HeadStatistics:
    rows = sums.counted.sum((1, 2))
    if int(rows.min()) == 0:
        given = () if call.source is None else tensors_of(call.source)
        finite = all(bool(x.isfinite().all()) for x in given)
        why = "no query has an allowed key" if finite else "the weights of a head are NaN for every query"
        raise ShapeError(f"layer {call.layer} ({call.name}): {why}, so it has no statistics")

    def mean(
        x: Float[Tensor, "h b n"], counted: Float[Tensor, "h b n"] = sums.counted
    ) -> Float[Tensor, " h"]:
        return _ratio((x * counted).sum((1, 2)), counted.sum((1, 2)))

    entropy, none = mean(sums.entropy), torch.full_like(rows, nan)
    several = sums.counted * (sums.allowed > 1)
    offsets = torch.arange(call.n - 1, -call.m, -1)  # i − j, from the largest on
    by_count = sums.counted.mean(0).sum(0)
    queries_at = _queries_with_key_at(by_count, offsets, call.m)
    offsets = offsets + call.query_offset
    by_key, by_offset = sums.by_key / rows[:, None], sums.by_offset / rows[:, None]
    best = by_offset.argmax(-1)
    weight = (sums.by_offset.gather(1, best[:, None])[:, 0] / queries_at[best]).clamp(max=1.0)

    def at(offset: int) -> Float[Tensor, " h"]:
        index = int(offsets[0]) - offset
        applies = call.role == "self" and 0 <= index < len(offsets) and queries_at[index] > 0
        return sums.by_offset[:, index] / queries_at[index] if applies else none

    return HeadStatistics(
        entropy=entropy,
        entropy_share=mean(sums.entropy / sums.allowed.clamp(min=2).log(), several),
        keys=entropy.exp(),
        top=mean(sums.top),
        distance=by_offset @ offsets.abs().double(),
        span=_span(by_offset, offsets),
        on_self=at(0),
        on_previous=at(1),
        on_next=none if call.causal else at(-1),
        on_first=by_key[:, 0],
        on_same=_ratio(*sums.same),
        on_separator=none if tokens is None or not tokens.is_separator.any() else sums.separator / rows,
        induction=_ratio(*sums.induction),
        shift=offsets[best].double(),
        shift_weight=weight,
        shift_error=1 - weight,
        by_key=by_key,
        by_offset=by_offset,
        offsets=offsets,
        queries=int(rows[0]),
        multiples={k: by_key[:, ::k].sum(-1) for k in MULTIPLES if 2 * k <= call.m},
        strides={k: by_offset[:, offsets % k == 0].sum(-1) for k in MULTIPLES if 2 * k <= call.m},
        uniform=_uniform_statistics(call, by_count, offsets, queries_at),
        grid=None if grid is None or sums.grid is None else grid_statistics(sums.grid, grid),
    )


def _queries_with_key_at(
    by_count: Float[Tensor, " n"], offsets: Int[Tensor, " o"], m: int
) -> Float[Tensor, " o"]:
    """The number of counted queries that have a key at each offset i − j: those with 0 ≤ i − offset < m."""
    before = torch.cat([by_count.new_zeros(1), by_count.cumsum(0)])
    n = len(by_count)
    return before[(offsets + m).clamp(0, n)] - before[offsets.clamp(0, n)]


def _span(by_offset: Float[Tensor, "h o"], offsets: Int[Tensor, " o"]) -> Float[Tensor, " h"]:
    """The smallest w with SPAN of the weight at |offset| ≤ w."""
    distance = offsets.abs()
    within = by_offset.new_zeros(len(by_offset), int(distance.max()) + 1).index_add_(1, distance, by_offset)
    reached = within.cumsum(-1) >= SPAN * within.sum(-1, keepdim=True) - 1e-12
    return reached.double().argmax(-1).double()


def _uniform_statistics(
    call: AttentionCall,
    by_count: Float[Tensor, " n"],
    offsets: Int[Tensor, " o"],
    queries_at: Float[Tensor, " o"],
) -> dict[str, float]:
    """The statistics of equal weights on all keys (on all earlier ones, if causal)."""
    pairs = queries_at * (offsets >= 0) if call.causal else queries_at
    share = pairs / pairs.sum().clamp(min=1)
    allowed = torch.arange(call.n) + call.query_offset + 1 if call.causal else torch.full((call.n,), call.m)
    keys = allowed.clamp(min=1).double()
    rows = by_count.sum().clamp(min=1)
    return {
        "distance": float(share @ offsets.abs().double()),
        "span": float(_span(share[None], offsets)[0]),
        "one_key": float((by_count / keys).sum() / rows),
        "entropy": float((by_count * keys.log()).sum() / rows),
    }


def _ratio(value: Float[Tensor, " h"], count: Float[Tensor, " h"]) -> Float[Tensor, " h"]:
    return torch.where(count > 0, value / count.clamp(min=1), nan)

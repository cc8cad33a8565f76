"""Is a whole block of pairs allowed, or none of it? Decided from the ends and residues of its positions.

    all(a & b) = all(a) ∧ all(b)    none(a & b) ⊇ none(a) ∨ none(b)    all(~a) = none(a)

"Neither" is always a safe answer: the block is then masked. The same code serves numpy arrays, for the blocks that
Triton kernels and the CPU read, and tensors, for the blocks of 128 × 128 pairs that FlexAttention skips.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from math import gcd
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from ..progression import FAR, Ints
from .algebra import Pattern
from .relation import EVERYTHING, Relation, Residue

BLOCK = 128  # queries and keys of a block of FlexAttention
CHUNK_PAIRS = 1 << 24  # pairs enumerated at a time


@dataclass(frozen=True, eq=False)
class Run:
    """Arithmetic progressions of positions, one per block: arrays or tensors."""

    first: Any
    step: Any
    count: Any

    @cached_property
    def last(self) -> Any:
        return self.first + self.step * (self.count - 1)

    @cached_property
    def stride(self) -> Any:
        """The step, or 0 where there is but one position: all differences are multiples of it."""
        return self.step if isinstance(self.step, int) else np.where(self.count > 1, self.step, 0)


class Classes(NamedTuple):
    """For each block: every pair is allowed; no pair is."""

    all: Any
    none: Any


def classify(pattern: Pattern, i: Run, j: Run) -> Classes:
    """The blocks i × j of query and key positions. A word with data says nothing about any of them."""
    unknown = i.first != i.first

    def of_word(word: Any) -> Classes:
        return Classes(unknown, unknown) if word.has_data else of_relation(word.relation, i, j)

    return pattern.fold(of_word, both, either, negated)


def both(a: Classes, b: Classes) -> Classes:
    return Classes(a.all & b.all, a.none | b.none)


def either(a: Classes, b: Classes) -> Classes:
    return Classes(a.all | b.all, a.none & b.none)


def negated(a: Classes) -> Classes:
    return Classes(a.none, a.all)


def of_relation(r: Relation, i: Run, j: Run) -> Classes:
    """All of what the relation asks, condition by condition."""
    found: list[Classes] = []
    if not (r.reads_query and r.reads_key):  # so that the result has the shape of i and j together
        everywhere = (i.first == i.first) & (j.first == j.first)
        found.append(Classes(everywhere, everywhere ^ everywhere))
    if r.compares:
        low, high = i.first - j.last, i.last - j.first  # of i − j
    if r.near > -FAR:
        found.append(Classes(low >= r.near, high < r.near))
    if r.far < FAR:
        found.append(Classes(high <= r.far, low > r.far))
    if r.divisor > 1:
        # i − j is first + a multiple of g; the largest multiple of the divisor up to `high` may be below `low`.
        g, first = _gcd(_gcd(i.stride, j.stride), r.divisor), i.first - j.first
        none = (first % g != 0) | (high // r.divisor * r.divisor < low)
        found.append(Classes((g == r.divisor) & (first % r.divisor == 0), none))
    for run, below, residue in ((i, r.query_below, r.query_class), (j, r.key_below, r.key_class)):
        if below < FAR:
            found.append(Classes(run.last < below, run.first >= below))
        if residue[0] > 1:
            found.append(_of_class(residue, run))
    for size in r.blocks:
        (a, b), (c, d) = ((x.first // size, x.last // size) for x in (i, j))
        found.append(Classes((a == b) & (c == d) & (a == c), (b < c) | (d < a)))
    return reduce(both, found)


def _of_class(residue: Residue, x: Run) -> Classes:
    """x ≡ r (mod k)."""
    k, r = residue
    g = _gcd(x.stride, k)
    none = ((x.first - r) % g != 0) | (x.last - (x.last - r) % k < x.first)
    return Classes((g == k) & (x.first % k == r), none)


def intervals(pattern: Pattern, i: Ints, m: int) -> tuple[Ints, Ints] | None:
    """The first and the last key of each query, if its keys are one interval; an empty one ends before it begins."""

    def of_word(word: Any) -> tuple[Ints, Ints] | None:
        if word.has_data:
            return None
        r = word.relation
        bounds = replace(EVERYTHING, near=r.near, far=r.far, query_below=r.query_below, key_below=r.key_below)
        if r != bounds:
            return None
        keys = r.keys(i)
        low, high = np.maximum(keys.lo, 0), np.minimum(keys.hi, m - 1)
        return np.broadcast_to(low, i.shape), np.broadcast_to(high, i.shape)

    def both(a: Any, b: Any) -> tuple[Ints, Ints] | None:
        return None if a is None or b is None else (np.maximum(a[0], b[0]), np.minimum(a[1], b[1]))

    def either(a: Any, b: Any) -> tuple[Ints, Ints] | None:
        if a is None or b is None:
            return None
        no_a, no_b = a[0] > a[1], b[0] > b[1]
        apart = np.maximum(a[0], b[0]) > np.minimum(a[1], b[1]) + 1
        if (apart & ~no_a & ~no_b).any():
            return None
        low = np.where(no_a, b[0], np.where(no_b, a[0], np.minimum(a[0], b[0])))
        return low, np.where(no_a, b[1], np.where(no_b, a[1], np.maximum(a[1], b[1])))

    return pattern.fold(of_word, both, either, lambda a: None)


def _gcd(a: Any, b: Any) -> Any:
    return gcd(a, b) if isinstance(a, int) and isinstance(b, int) else np.gcd(a, b)


@dataclass(frozen=True, eq=False)
class BlockGrid:
    """Neighboring queries and keys in blocks of 128, in each batch row or in all: (1 or b, x, y) blocks."""

    positions: Int[Tensor, "#b n"]  # of the queries
    m: int  # keys
    step: int = 1  # between the positions of two queries

    @property
    def queries(self) -> Run:
        return self._run(self.positions[:, ::BLOCK, None], self.step, self.positions.shape[-1])

    @property
    def keys(self) -> Run:
        return self._run(torch.arange(0, self.m, BLOCK, device=self.positions.device), 1, self.m)

    def _run(self, first: Tensor, step: int, length: int) -> Run:
        begins = torch.arange(0, length, BLOCK, device=first.device)
        count = (length - begins).clamp(max=BLOCK)
        return Run(first, step, count[:, None] if first.dim() == 3 else count)

    def classify(self, pattern: Pattern) -> Classes:
        """The blocks of a pattern; one that ends beyond the last query or key is never allowed as a whole."""
        i, j = self.queries, self.keys

        def of_word(word: Any) -> Classes:
            return word.classify(self) if word.has_data else of_relation(word.relation, i, j)

        every, none = pattern.fold(of_word, both, either, negated)
        return Classes(every & (i.count == BLOCK) & (j.count == BLOCK), none)

    def keys_below(self, lengths: Int[Tensor, " b"]) -> Classes:
        """j < length of the batch row."""
        j, i = self.keys, self.queries.first
        bound = lengths[:, None, None]
        return Classes((j.last < bound) & (i == i), (j.first >= bound) & (i == i))

    def equal(self, of_queries: Int[Tensor, "b n"], of_keys: Int[Tensor, "b m"]) -> Classes:
        """Pairs of equal labels, by the range of the labels in each block."""
        (i, i_last), (j, j_last) = (_extremes(x) for x in (of_queries, of_keys))
        i, i_last, j, j_last = i[..., None], i_last[..., None], j[:, None], j_last[:, None]
        return Classes((i == i_last) & (j == j_last) & (i == j), (i > j_last) | (j > i_last))

    def within(
        self, of_queries: Int[Tensor, "b n"], first: Int[Tensor, "b m"], end: Int[Tensor, "b m"]
    ) -> Classes:
        """Pairs where the query's number is in the interval [first, end) of the key."""
        (i, i_last), (a, a_last), (e, e_last) = (_extremes(x) for x in (of_queries, first, end))
        i, i_last = i[..., None], i_last[..., None]
        every = (i >= a_last[:, None]) & (i_last < e[:, None])
        return Classes(every, (i_last < a[:, None]) | (i >= e_last[:, None]))

    def of_queries(self, holds: Bool[Tensor, "b n"]) -> Classes:
        """What depends on the query alone."""
        low, high = _extremes(holds.int())
        return Classes(low[..., None] > 0, high[..., None] == 0)

    def enumerate(self, allows: Callable[[Any, Any], Any]) -> Classes:
        """Any pattern that is the same for all heads, pair by pair, a chunk of rows at a time."""
        j = torch.arange(self.m, device=self.positions.device)
        missing = -self.m % BLOCK
        step = max(CHUNK_PAIRS // (self.m + missing) // BLOCK, 1) * BLOCK
        every: list[Tensor] = []
        none: list[Tensor] = []
        for i in self.positions.split(step, dim=1):
            table = torch.as_tensor(allows(i[:, None, :, None], j), device=j.device)
            shape = torch.broadcast_shapes(table.shape, (len(i), 1, i.shape[1], self.m))
            table = table.broadcast_to(shape)[:, 0]
            for into, fill in ((every, True), (none, False)):
                padded = F.pad(table, (0, missing, 0, -i.shape[-1] % BLOCK), value=fill)
                cells = padded.unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK))
                into.append(cells.all(-1).all(2) if fill else ~cells.any(-1).any(2))
        return Classes(torch.cat(every, 1), torch.cat(none, 1))


def _extremes(x: Int[Tensor, "b n"]) -> tuple[Int[Tensor, "b x"], Int[Tensor, "b x"]]:
    """The smallest and the largest of each BLOCK neighbors."""
    missing = -x.shape[-1] % BLOCK
    if missing:
        x = torch.cat([x, x[:, -1:].expand(-1, missing)], -1)
    return x.unflatten(-1, (-1, BLOCK)).aminmax(dim=-1)

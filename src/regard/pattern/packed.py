"""Packed documents: several texts in one row, which do not attend to one another."""

from math import prod
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ..errors import ShapeError, SpecError, not_a_pattern
from ..progression import Ints
from .algebra import Pattern
from .classification import BlockGrid, Classes, Run, both, either, negated, of_relation
from .data import Data, composed_row_mask, kept, require_rows, require_whole, without_gaps
from .words import full


class documents(Data):
    """ids[i] = ids[j]: packed sequences do not attend to one another. ids is (m,) or (b, m), one per position.

    within: the pattern inside each document. Its positions count from where the document begins, so `sinks(1)` is the
    first key of each; those of a pattern that is combined with `&` count from the beginning of the row.

    >>> from regard.pattern import causal, sinks, window
    >>> print(documents(torch.tensor([7, 7, 7, 2, 2, 2]), causal() & (window(0) | sinks(1))).draw(6))
    ■ · · · · ·
    ■ ■ · · · ·
    ■ · ■ · · ·
    · · · ■ · ·
    · · · ■ ■ ·
    · · · ■ · ■
    """

    ids: Int[Tensor, "*b m"]
    within: Pattern = None  # type: ignore[assignment]  # full(), which a compiler does not take as a default

    def __post_init__(self):
        if self.within is None:
            object.__setattr__(self, "within", full())
        require_whole("documents", "ids", self.ids)
        require_rows("documents", "ids", self.ids)
        if not isinstance(self.within, Pattern):
            raise not_a_pattern(self.within, where="documents: within=")
        if self.within.differs_by_head:
            raise SpecError(
                "documents: within= is for all heads; use rg.per_head([rg.documents(ids, p) for p in …])"
            )
        if self.within.has_data:
            raise SpecError(
                f"documents: within={self.within!r} carries data, and data have positions of the row; combine them "
                "with &: rg.documents(ids, …) & …"
            )

    @property
    def positions(self) -> Int[Tensor, "*b m"]:
        """The position of each position within its document."""
        return document_positions(self.ids) if self.ids.is_meta else kept(self, self.ids, document_positions)

    @property
    def device(self):
        return self.ids.device

    @property
    def varies(self):
        return prod(self.ids.shape[:-1]), 1

    def allows(self, i, j):
        ids, within, last = self.ids, self.within, self.ids.shape[-1] - 1
        if isinstance(i, int):
            if not 0 <= i <= last or not bool((ids[..., i] == ids[..., j]).all()):
                return False
            places = self.positions.reshape(-1, last + 1)[:, [i, j]].tolist()
            return all(within.allows(*pair) for pair in places)
        inside = (i >= 0) & (i <= last)  # a query beyond the ids is in no document: it has no allowed key
        if last < 0:
            return inside & (j == j)  # no ids, no pairs
        at: tuple[Any, ...] = ()
        if ids.dim() > 1:
            at = (torch.arange(ids.shape[0], device=ids.device)[:, None, None, None],)
        i = i.clamp(0, last)
        same = (ids[*at, i] == ids[*at, j]) & inside
        if isinstance(within, full):
            return same
        return same & within.allows(self.positions[*at, i], self.positions[*at, j])

    def row_mask(self, inside):
        ids, last, one_row = without_gaps(self.ids), self.ids.shape[-1] - 1, self.varies[0] == 1
        ids = ids.reshape(-1) if one_row else ids

        def same(b, i, j):
            return ids[i] == ids[j] if one_row else ids[b, i] == ids[b, j]

        def in_range(b, i, j):
            return same(b, i.clamp(0, last), j) & (i >= 0) & (i <= last)

        if isinstance(self.within, full):
            return same if inside else in_range
        of_pair, places = composed_row_mask(self.within, True), self.positions
        places = places.reshape(-1) if one_row else places

        def allows(b, i, j):
            query = i if inside else i.clamp(0, last)
            pair = (places[query], places[j]) if one_row else (places[b, query], places[b, j])
            return (same if inside else in_range)(b, i, j) & of_pair(b, *pair)

        return allows

    def classify(self, grid):
        """By the smallest and the largest id of each block; and within, where blocks are parts of one document."""
        ids = self.ids.reshape(-1, self.ids.shape[-1])
        last = ids.shape[-1] - 1
        i = grid.positions.clamp(0, last).expand(max(len(ids), len(grid.positions)), -1)
        equal = grid.equal(ids.expand(len(i), -1).gather(1, i), ids)
        inside = grid.of_queries((grid.positions >= 0) & (grid.positions <= last))
        same = Classes(equal.all & inside.all, equal.none | inside.none)
        return same if isinstance(self.within, full) else both(same, self._classify_within(grid, i))

    def _classify_within(self, grid: BlockGrid, i: Int[Tensor, "b n"]) -> Classes:
        places = self.positions.reshape(-1, self.ids.shape[-1])
        queries, keys = grid.queries, grid.keys
        q_first, q_known = _in_blocks(places.expand(len(i), -1).gather(1, i), queries)
        k_first, k_known = _in_blocks(places, keys)
        q_run, k_run = (
            Run(x, r.step, r.count) for x, r in ((q_first[..., None], queries), (k_first[:, None], keys))
        )
        every, none = self.within.fold(lambda x: of_relation(x.relation, q_run, k_run), both, either, negated)
        known = q_known[..., None] & k_known[:, None]
        return Classes(every & known, none & known)

    def fits(self, m: int, last: int = -1) -> None:
        if self.ids.shape[-1] != m:
            raise ShapeError(f"{self!r} over {m} keys: one id per key is needed, ({m},) or (b, {m})")

    def __repr__(self):
        within = "" if isinstance(self.within, full) else f", {self.within!r}"
        return f"documents(<{'×'.join(map(str, self.ids.shape))} ids>{within})"


def _in_blocks(places: Int[Tensor, "b n"], blocks: Run) -> tuple[Int[Tensor, "b x"], Bool[Tensor, "b x"]]:
    """The place of each block's first position, and whether the others are in the same document, one by one."""
    count = blocks.count.flatten()
    first = count.cumsum(0) - count
    ends = places[:, first], places[:, first + count - 1]
    return ends[0], ends[1] - ends[0] == blocks.step * (count - 1)


def document_positions(ids: Int[Tensor, "*b m"]) -> Int[Tensor, "*b m"]:
    """The position of each token within its document; one that is in several places begins anew in each.

    >>> document_positions(torch.tensor([[4, 4, 4, 7, 9, 9]])).tolist()
    [[0, 1, 2, 0, 0, 1]]
    """
    index = torch.arange(ids.shape[-1], device=ids.device).expand_as(ids)
    first = torch.ones_like(ids, dtype=torch.bool)
    first[..., 1:] = ids[..., 1:] != ids[..., :-1]
    return index - index.where(first, 0).cummax(-1).values


def spans(ids: Ints) -> list[tuple[int, int]] | None:
    """Where each document begins and ends; None where one is in two places, or there are no keys."""
    if not len(ids):
        return None
    first = np.flatnonzero(np.append(True, ids[1:] != ids[:-1]))
    if len(np.unique(ids[first])) < len(first):
        return None
    return list(zip(first.tolist(), [*first[1:].tolist(), len(ids)]))

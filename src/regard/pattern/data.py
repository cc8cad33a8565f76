"""Patterns that tensors or a function decide. Compared by identity; refused in specs and JSON."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, dataclass_transform

import torch
from jaxtyping import Int
from torch import Tensor

from ..errors import ShapeError
from .algebra import Pattern, register
from .classification import BlockGrid, Classes


@dataclass_transform(eq_default=False, frozen_default=True)
class Data(Pattern):
    """A word with data states `allows`, `row_mask` and, where it can do better than enumerate, `classify`.

    A subclass becomes a frozen dataclass.
    """

    has_data = True
    reads_query = True
    reads_key = True
    shift_period = 0
    refuses_json = "carries data, so it has no JSON; pass it to the call (rg.attention, the module) instead"

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, eq=False, repr=False)(cls)
        register(cls)

    def terms(self):
        raise ShapeError(f"{self!r} carries data: there is no formula for it")

    def classify(self, grid: BlockGrid) -> Classes:
        """Which blocks of the grid it allows as a whole, and which not at all; "neither" is always a safe answer."""
        return grid.enumerate(self.allows)


class documents(Data):
    """ids[i] = ids[j]: packed sequences do not attend to one another. ids is (m,) or (b, m), one per position."""

    ids: Int[Tensor, "*b m"]

    @property
    def device(self):
        return self.ids.device

    def allows(self, i, j):
        ids, last = self.ids, self.ids.shape[-1] - 1
        if isinstance(i, int):
            return 0 <= i <= last and bool((ids[..., i] == ids[..., j]).all())
        inside = (i >= 0) & (i <= last)  # a query beyond the ids is in no document: it has no allowed key
        if last < 0:
            return inside & (j == j)  # no ids, no pairs
        i = i.clamp(0, last)
        if ids.dim() == 1:
            return (ids[i] == ids[j]) & inside
        b = torch.arange(len(ids), device=ids.device)[:, None, None, None]
        return (ids[b, i] == ids[b, j]) & inside

    def row_mask(self, inside):
        ids, last = self.ids, self.ids.shape[-1] - 1
        if inside and ids.dim() == 1:
            return lambda b, i, j: ids[i] == ids[j]
        if inside:
            return lambda b, i, j: ids[b, i] == ids[b, j]
        if ids.dim() == 1:
            return lambda b, i, j: (ids[i.clamp(0, last)] == ids[j]) & (i >= 0) & (i <= last)
        return lambda b, i, j: (ids[b, i.clamp(0, last)] == ids[b, j]) & (i >= 0) & (i <= last)

    def classify(self, grid):
        """By the smallest and the largest id of each block."""
        ids = self.ids.reshape(-1, self.ids.shape[-1])
        last = ids.shape[-1] - 1
        i = grid.positions.clamp(0, last).expand(max(len(ids), len(grid.positions)), -1)
        equal = grid.equal(ids.expand(len(i), -1).gather(1, i), ids)
        inside = grid.of_queries((grid.positions >= 0) & (grid.positions <= last))
        return Classes(equal.all & inside.all, equal.none | inside.none)

    def fits(self, m: int) -> None:
        if self.ids.shape[-1] != m:
            raise ShapeError(f"{self!r} over {m} keys: one id per key is needed, ({m},) or (b, {m})")

    def __repr__(self):
        return f"documents(<{'×'.join(map(str, self.ids.shape))} ids>)"


class lengths(Data):
    """j < l: hides the keys beyond the length of each batch row, never the queries. l is (b,)."""

    l: Int[Tensor, " b"]

    reads_query = False

    @property
    def device(self):
        return self.l.device

    def allows(self, i, j):
        if isinstance(j, int):
            return bool((j < self.l).all())
        return (j < self.l[:, None, None, None]) & (i == i)

    def row_mask(self, inside):
        l = self.l
        return lambda b, i, j: j < l[b]

    def classify(self, grid):
        return grid.keys_below(self.l)

    def __repr__(self):
        return f"lengths(<{len(self.l)} lengths>)"


class where(Data):
    """fn(i, j), any function of integer tensors that broadcast, made of tensor operations."""

    fn: Callable[[Any, Any], Any]

    def allows(self, i, j):
        return self.fn(i, j)

    def row_mask(self, inside):
        fn = self.fn
        return lambda b, i, j: fn(i, j)

    def __repr__(self):
        return f"where({getattr(self.fn, '__name__', self.fn)})"

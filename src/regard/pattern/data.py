"""What tensors or a function decide. Compared by identity; refused in specs and JSON."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from .. import value
from ..errors import ShapeError
from .algebra import KINDS, Pattern


class Data(Pattern):
    reads_query = True
    refuses_json = "carries data, so it has no JSON; pass it to the call (rg.attention, the module) instead"

    def terms(self):
        raise ShapeError(f"{self!r} carries data: there is no formula for it")


@dataclass(frozen=True, eq=False, repr=False)
class documents(Data):
    """ids[i] = ids[j]: packed sequences do not see one another. ids is (m,) or (b, m), one a position."""

    ids: Int[Tensor, "*b m"]

    def allows(self, i, j):
        ids, last = self.ids, self.ids.shape[-1] - 1
        if isinstance(i, int):
            return 0 <= i <= last and bool((ids[..., i] == ids[..., j]).all())
        inside = (i >= 0) & (i <= last)  # a query past the ids stands in no document: it looks nowhere
        if last < 0:
            return inside & (j == j)  # no ids, no pairs
        i = i.clamp(0, last)
        if ids.dim() == 1:
            return (ids[i] == ids[j]) & inside
        b = torch.arange(len(ids), device=ids.device)[:, None, None, None]
        return (ids[b, i] == ids[b, j]) & inside

    def fits(self, m: int) -> None:
        if self.ids.shape[-1] != m:
            raise ShapeError(f"{self!r} over {m} keys: one id a key is needed, ({m},) or (b, {m})")

    def __repr__(self):
        return f"documents(<{'×'.join(map(str, self.ids.shape))} ids>)"


@dataclass(frozen=True, eq=False, repr=False)
class lengths(Data):
    """j < l: hides the keys past the length of each batch row, never the queries. l is (b,)."""

    l: Int[Tensor, " b"]

    reads_query = False

    def allows(self, i, j):
        if isinstance(j, int):
            return bool((j < self.l).all())
        return (j < self.l[:, None, None, None]) & (i == i)

    def __repr__(self):
        return f"lengths(<{len(self.l)} lengths>)"


@dataclass(frozen=True, eq=False, repr=False)
class where(Data):
    """fn(i, j), any function of integer tensors that broadcast, made of tensor operations."""

    fn: Callable[[Any, Any], Any]

    def allows(self, i, j):
        return self.fn(i, j)

    def __repr__(self):
        return f"where({getattr(self.fn, '__name__', self.fn)})"


KINDS.update(value.table(documents, lengths, where))

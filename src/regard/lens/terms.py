"""What decides, with q·k, how much a query looks at a key: masks, biases, patterns, functions of a pair."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..engine.call import Call
from ..pattern import full, positions

Heads = slice | list[int]
Rows = slice | list[int]


@dataclass(frozen=True, eq=False)
class Part:
    """A part of a call's table: one batch row, some heads, some queries, the first `keys` keys."""

    batch: int
    heads: Heads
    rows: Rows
    keys: int

    def places(self, device: torch.device) -> Int[Tensor, " r"]:
        """The query indices."""
        if isinstance(self.rows, slice):
            return torch.arange(self.rows.start, self.rows.stop, device=device)
        return torch.tensor(self.rows, device=device, dtype=torch.long)

    def cut(self, table: Tensor) -> Tensor:
        """This part out of a table that broadcasts to (b, h, n, m)."""
        while table.dim() < 4:
            table = table[None]
        table = self._of_heads(table)
        table = table[:, self.rows] if table.shape[1] > 1 else table
        return table[..., : self.keys] if table.shape[-1] > 1 else table

    def _of_heads(self, table: Tensor) -> Tensor:
        table = table[self.batch if table.shape[0] > 1 else 0]
        return table[self.heads] if table.shape[0] > 1 else table


@runtime_checkable
class Term(Protocol):
    """Changes the scores of a part, in place where it can; −∞ is "may not look"."""

    def change(self, scores: Float[Tensor, "h r m"], part: Part) -> Float[Tensor, "h r m"]: ...


@dataclass(frozen=True)
class Causal:
    """j ≤ i, counted from the first query and the first key, as PyTorch's is_causal does."""

    def change(self, scores: Float[Tensor, "h r m"], part: Part) -> Float[Tensor, "h r m"]:
        keys = torch.arange(part.keys, device=scores.device)
        return scores.masked_fill_(keys > part.places(scores.device)[:, None], -inf)


@dataclass(frozen=True, eq=False)
class Masked:
    """A tensor that broadcasts to (b, h, n, m): bool says who may look, float is added to the scores."""

    table: Tensor

    def change(self, scores: Float[Tensor, "h r m"], part: Part) -> Float[Tensor, "h r m"]:
        own = part.cut(self.table)
        return scores.masked_fill_(~own, -inf) if own.dtype == torch.bool else scores.add_(own)


@dataclass(frozen=True, eq=False)
class Declared:
    """The pattern, the lengths and the bias of a call of regard's own engine."""

    call: Call

    def change(self, scores: Float[Tensor, "h r m"], part: Part) -> Float[Tensor, "h r m"]:
        call, rows = self.call, part.places(scores.device)
        keys = torch.arange(part.keys, device=scores.device)
        at = positions(call.pattern, call.n, call.m, call.at, scores.device)
        at = (at[part.batch] if at.dim() > 1 else at)[rows]
        if isinstance(call.bias, Tensor):
            scores.add_(part.cut(call.bias))
        elif call.bias is not None:
            scores.add_(call.bias.dense(at, keys)[part.heads])
        if not isinstance(call.pattern, full):
            allowed = call.pattern.allows(at[:, None], keys[None, :])
            scores.masked_fill_(~(part._of_heads(allowed) if allowed.dim() == 4 else allowed), -inf)
        if call.table is not None:
            scores.masked_fill_(~part.cut(call.table), -inf)
        if call.lengths is not None:
            scores.masked_fill_(keys >= call.lengths[part.batch], -inf)
        return scores


@dataclass(frozen=True, eq=False)
class Modified:
    """flex_attention's functions of one pair: score_mod changes a score, mask_mod says who may look."""

    score_mod: Callable[..., Tensor] | None
    mask_mod: Callable[..., Tensor] | None
    heads: int

    def change(self, scores: Float[Tensor, "h r m"], part: Part) -> Float[Tensor, "h r m"]:
        device = scores.device
        batch = torch.full((), part.batch, device=device)
        heads = torch.arange(self.heads, device=device)[part.heads]
        pairs = (batch, heads, part.places(device), torch.arange(part.keys, device=device))
        if self.score_mod is not None:
            scores = _over_pairs(self.score_mod, scored=True)(scores, *pairs)
        if self.mask_mod is not None:
            scores = scores.masked_fill(~_over_pairs(self.mask_mod, scored=False)(*pairs), -inf)
        return scores


def _over_pairs(fn: Callable[..., Tensor], scored: bool) -> Callable[..., Tensor]:
    """fn(score, b, h, i, j) of numbers, over heads, queries and keys: such a function may index with them."""
    score = (0,) if scored else ()
    for place in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None)):  # keys innermost
        fn = torch.vmap(fn, in_dims=(*score, *place))
    return fn

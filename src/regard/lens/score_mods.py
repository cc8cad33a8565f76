"""What modifies the scores q·k before the softmax: masks, biases, patterns, functions of a pair."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..engine.call import Call
from ..pattern import full, positions
from ..reference import softcapped

Heads = slice | list[int]
Rows = slice | list[int]


@dataclass(frozen=True, eq=False)
class Region:
    """A region of a call's (b, h, n, m) table: one batch row, these heads and rows, the first `keys` keys."""

    batch: int
    heads: Heads
    rows: Rows
    keys: int

    def query_indices(self, device: torch.device) -> Int[Tensor, " r"]:
        """The indices of the rows."""
        if isinstance(self.rows, slice):
            return torch.arange(self.rows.start, self.rows.stop, device=device)
        return torch.tensor(self.rows, device=device, dtype=torch.long)

    def take(self, table: Tensor) -> Tensor:
        """This region of a table that broadcasts to (b, h, n, m)."""
        while table.dim() < 4:
            table = table[None]
        table = self.take_heads(table)
        table = table[:, self.rows] if table.shape[1] > 1 else table
        return table[..., : self.keys] if table.shape[-1] > 1 else table

    def take_heads(self, table: Tensor) -> Tensor:
        table = table[self.batch if table.shape[0] > 1 else 0]
        return table[self.heads] if table.shape[0] > 1 else table


@runtime_checkable
class ScoreMod(Protocol):
    """Modifies the scores of a region, in place where possible; −∞ means that a pair is not allowed."""

    def apply(self, scores: Float[Tensor, "h r m"], region: Region) -> Float[Tensor, "h r m"]: ...


@dataclass(frozen=True)
class CausalMask:
    """j ≤ i, counted from the first query and the first key, as PyTorch's is_causal does."""

    def apply(self, scores: Float[Tensor, "h r m"], region: Region) -> Float[Tensor, "h r m"]:
        keys = torch.arange(region.keys, device=scores.device)
        return scores.masked_fill_(keys > region.query_indices(scores.device)[:, None], -inf)


@dataclass(frozen=True, eq=False)
class MaskOrBias:
    """A tensor that broadcasts to (b, h, n, m): a bool tensor is True for allowed pairs, a float tensor is added."""

    table: Tensor

    def apply(self, scores: Float[Tensor, "h r m"], region: Region) -> Float[Tensor, "h r m"]:
        own = region.take(self.table)
        return scores.masked_fill_(~own, -inf) if own.dtype == torch.bool else scores.add_(own)


@dataclass(frozen=True, eq=False)
class RegardArguments:
    """The softcap, the bias, the pattern and the lengths of a call of rg.attention."""

    call: Call

    def apply(self, scores: Float[Tensor, "h r m"], region: Region) -> Float[Tensor, "h r m"]:
        call, rows = self.call, region.query_indices(scores.device)
        keys = torch.arange(region.keys, device=scores.device)
        at = positions(call.pattern, call.n, call.m, call.at, scores.device)
        at = (at[region.batch] if at.dim() > 1 else at)[rows]
        scores = softcapped(scores, call.softcap)
        if isinstance(call.bias, Tensor):
            scores.add_(region.take(call.bias))
        elif call.bias is not None:
            scores.add_(call.bias.dense(at, keys)[region.heads])
        if not isinstance(call.pattern, full):
            allowed = call.pattern.allows(at[:, None], keys[None, :])
            allowed = allowed[None] if allowed.dim() == 3 else allowed  # one for each head
            scores.masked_fill_(~(region.take_heads(allowed) if allowed.dim() == 4 else allowed), -inf)
        if call.table is not None:
            scores.masked_fill_(~region.take(call.table), -inf)
        if (visible := call.visible()) is not None:
            scores.masked_fill_(~visible[region.batch, : region.keys], -inf)
        return scores


@dataclass(frozen=True, eq=False)
class ByHeads:
    """Each part of the heads has modifications of its own, which number these heads from 0."""

    parts: tuple[tuple[tuple[int, ...], tuple[ScoreMod, ...]], ...]

    def apply(self, scores: Float[Tensor, "h r m"], region: Region) -> Float[Tensor, "h r m"]:
        count = sum(len(heads) for heads, _ in self.parts)
        wanted = list(range(count))[region.heads] if isinstance(region.heads, slice) else region.heads
        for heads, mods in self.parts:
            at = [i for i, head in enumerate(wanted) if head in heads]
            if not at:
                continue
            own, part = replace(region, heads=[heads.index(wanted[i]) for i in at]), scores[at]
            for mod in mods:
                part = mod.apply(part, own)
            scores[at] = part
        return scores


@dataclass(frozen=True, eq=False)
class FlexFunctions:
    """flex_attention's functions of one pair: score_mod modifies its score, mask_mod is True if it is allowed."""

    score_mod: Callable[..., Tensor] | None
    mask_mod: Callable[..., Tensor] | None
    heads: int

    def apply(self, scores: Float[Tensor, "h r m"], region: Region) -> Float[Tensor, "h r m"]:
        device = scores.device
        batch = torch.full((), region.batch, device=device)
        heads = torch.arange(self.heads, device=device)[region.heads]
        pairs = (batch, heads, region.query_indices(device), torch.arange(region.keys, device=device))
        if self.score_mod is not None:
            scores = _vectorized(self.score_mod, takes_score=True)(scores, *pairs)
        if self.mask_mod is not None:
            scores = scores.masked_fill(~_vectorized(self.mask_mod, takes_score=False)(*pairs), -inf)
        return scores


def _vectorized(fn: Callable[..., Tensor], takes_score: bool) -> Callable[..., Tensor]:
    """fn(score, b, h, i, j) of numbers, mapped over heads, queries and keys; fn may index tensors with them."""
    score = (0,) if takes_score else ()
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None)):  # keys innermost
        fn = torch.vmap(fn, in_dims=(*score, *dims))
    return fn

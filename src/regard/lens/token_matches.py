"""The tokens of queries and keys: which are equal, and which are separators."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from .calls import Role
from .weight_blocks import Pairs, WeightBlock, pairs

SEPARATORS = ("[SEP]", "</s>", "<eos>", "<|endoftext|>", ".", ",", ";", ":", "!", "?")


@dataclass(frozen=True, eq=False)
class Tokens:
    """Numbers for the tokens of one call, equal where the tokens are equal; and which keys are separators."""

    queries: Int[Tensor, "b n"]
    keys: Int[Tensor, "b m"]
    is_separator: Bool[Tensor, "b m"]

    def same(self, block: WeightBlock, role: Role, causal: bool) -> Pairs:
        """The pairs of equal tokens; in self-attention, at two different positions."""
        return _equal(self, _Window.of(block), "any" if role == "cross" else "earlier" if causal else "other")

    def after_same(self, block: WeightBlock, role: Role) -> Pairs | None:
        """The pairs (i, j) where token j − 1 is an earlier occurrence of token i."""
        return None if role == "cross" else _equal(self, _Window.of(block), "earlier", step=1)


class _Window(NamedTuple):
    """The queries and keys of a block; the same for every head, so that their pairs are computed once."""

    batch: int
    start: int
    stop: int
    keys: int
    query_offset: int

    @classmethod
    def of(cls, block: WeightBlock) -> "_Window":
        return cls(block.batch, block.rows.start, block.rows.stop, block.keys, block.query_offset)


@lru_cache(maxsize=4)
def _equal(
    tokens: Tokens, window: _Window, which: Literal["any", "earlier", "other"], step: int = 0
) -> Pairs:
    """The pairs (i, j + step) with equal tokens at i and j, i counted from the first query of the window."""
    batch, start, stop, keys, query_offset = window
    q, k = tokens.queries[batch, start:stop], tokens.keys[batch, : max(keys - step, 0)]
    in_order, order = k.sort()
    first = torch.searchsorted(in_order, q)
    count = torch.searchsorted(in_order, q, right=True) - first
    i = torch.arange(stop - start).repeat_interleave(count)
    within = (
        torch.arange(len(i)) - (count.cumsum(0) - count)[i]
    )  # the number of j among the keys equal to query i
    j = order[first[i] + within]
    if which != "any":
        position = i + (start + query_offset)
        selected = j < position if which == "earlier" else j != position
        i, j = i[selected], j[selected]
    return pairs(i, j + step, stop - start, keys)


def numbered(
    queries: tuple[tuple[str, ...], ...],
    keys: tuple[tuple[str, ...], ...],
    separators: tuple[str, ...] = SEPARATORS,
) -> Tokens:
    """Numbered tokens from their names."""
    numbers: dict[str, int] = {}
    as_numbers: list[Any] = [
        torch.tensor([[numbers.setdefault(t, len(numbers)) for t in row] for row in side])
        for side in (queries, keys)
    ]
    is_separator = torch.tensor([[t.strip() in separators for t in row] for row in keys])
    return Tokens(as_numbers[0], as_numbers[1], is_separator)

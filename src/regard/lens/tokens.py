"""The tokens of the two sides of a call: their names, which are equal, which separate."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from .blocks import Block, Pairs, pairs
from .captured import Role

SEPARATORS = ("[SEP]", "</s>", "<eos>", "<|endoftext|>", ".", ",", ";", ":", "!", "?")


@dataclass(frozen=True, eq=False)
class Tokens:
    """Numbers for the tokens of one call, equal where the tokens are equal; and which keys are separators."""

    queries: Int[Tensor, "b n"]
    keys: Int[Tensor, "b m"]
    separates: Bool[Tensor, "b m"]

    def same(self, block: Block, role: Role, causal: bool) -> Pairs:
        """The pairs of equal tokens; at two places, if of one sequence."""
        which = "any" if role == "cross" else "earlier" if causal else "other"
        return _equal(self, block.batch, block.rows.start, block.rows.stop, block.keys, block.start, which, 0)

    def after_same(self, block: Block, role: Role) -> Pairs | None:
        """The pairs (i, j) where token j − 1 is an earlier one equal to token i."""
        if role == "cross":
            return None
        return _equal(
            self, block.batch, block.rows.start, block.rows.stop, block.keys, block.start, "earlier", 1
        )


@lru_cache(maxsize=4)  # the same for every head of a block
def _equal(
    tokens: Tokens, batch: int, start: int, stop: int, keys: int, stands: int, which: str, step: int
) -> Pairs:
    """The pairs (i, j + step) with equal tokens at i and j, i counted from `start`."""
    q, k = tokens.queries[batch, start:stop], tokens.keys[batch, : max(keys - step, 0)]
    in_order, order = k.sort()
    first = torch.searchsorted(in_order, q)
    count = torch.searchsorted(in_order, q, right=True) - first
    i = torch.arange(stop - start).repeat_interleave(count)
    within = torch.arange(len(i)) - (count.cumsum(0) - count)[i]  # which of the keys equal to query i
    j = order[first[i] + within]
    if which != "any":
        place = i + (start + stands)
        kept = j < place if which == "earlier" else j != place
        i, j = i[kept], j[kept]
    return pairs(i, j + step, stop - start, keys)


def numbered(
    queries: tuple[tuple[str, ...], ...],
    keys: tuple[tuple[str, ...], ...],
    separators: tuple[str, ...] = SEPARATORS,
) -> Tokens:
    """Tokens by their names."""
    numbers: dict[str, int] = {}
    as_numbers: list[Any] = [
        torch.tensor([[numbers.setdefault(t, len(numbers)) for t in row] for row in side])
        for side in (queries, keys)
    ]
    separates = torch.tensor([[t.strip() in separators for t in row] for row in keys])
    return Tokens(as_numbers[0], as_numbers[1], separates)

"""How many keys each query may attend to, where no formula says it: block by block, 128 queries × 128 keys.

A block that is allowed as a whole has 128 keys for each of its queries. Pairs are enumerated only in the blocks where
words meet, and in all blocks if the pattern has a function (`where`).
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from ..progression import Ints
from .algebra import Both, Either, Not, Pattern, positions
from .classification import BLOCK, BlockGrid
from .data import Data, composed_row_mask

MAX_BLOCKS = 1 << 20  # classified at a time
CHUNK_PAIRS = 1 << 24  # enumerated at a time


def row_counts(pattern: Pattern, n: int, m: int, at: tuple[int, int]) -> Ints:
    """Of each query, summed over the batch rows and heads of the data."""
    pattern.check_data(m, n, at)
    counts = np.zeros(n, dtype=np.int64)
    for one in _heads(pattern):
        i = positions(one, n, m, at, one.device or "cpu")
        if any(type(leaf).classify is Data.classify for leaf in one.leaves() if isinstance(leaf, Data)):
            chunk = max(CHUNK_PAIRS // max(m, 1), 1)
            each = [_enumerated(one, rows, m) for rows in i.split(chunk)]
        else:
            chunk = max(MAX_BLOCKS // max(-(-m // BLOCK), 1), 1) * BLOCK
            each = [_by_blocks(one, rows, m, at[1]) for rows in i.split(chunk)]
        counts += torch.cat(each).cpu().numpy()
    return counts


def _heads(pattern: Pattern) -> Iterator[Pattern]:
    """The pattern of each head of the data."""
    for head in range(pattern.data_shape[1]):
        yield pattern.fold(lambda word, head=head: _of_head(word, head), Both, Either, Not)


def _of_head(word: Any, head: int) -> Pattern:
    return word if word.varies[1] == 1 else replace(word, indices=word.indices[:, head])


def _enumerated(pattern: Pattern, i: Int[Tensor, " n"], m: int) -> Int[Tensor, " n"]:
    j = torch.arange(m, device=i.device)
    table = torch.as_tensor(pattern.allows(i[:, None], j), device=i.device)
    rows = table.expand(*table.shape[:-2], len(i), m).sum(-1)
    return rows.reshape(-1, len(i)).sum(0)


def _by_blocks(pattern: Pattern, i: Int[Tensor, " n"], m: int, step: int) -> Int[Tensor, " n"]:
    every, none = BlockGrid(i[None], m, step).classify(pattern)
    whole = every.sum((0, 2)) * BLOCK
    counts = whole.repeat_interleave(BLOCK)[: len(i)]
    allows, inside = composed_row_mask(pattern, False), torch.arange(BLOCK, device=i.device)
    for blocks in (~every & ~none).nonzero().split(CHUNK_PAIRS // BLOCK**2):
        b, x, y = blocks[..., None, None].unbind(1)
        row, key = BLOCK * x + inside[:, None], BLOCK * y + inside
        exists = (row < len(i)) & (key < m)
        row = row.clamp(max=len(i) - 1)
        pairs = allows(b, i[row], key.clamp(max=m - 1)) & exists
        counts.index_add_(0, row.flatten(), pairs.sum(-1).flatten())
    return counts

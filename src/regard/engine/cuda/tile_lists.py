"""Tiles and blocks as lists of members: both sides of the gradients of a short call, for one launch.

A plan of few pairs may have several passes, each a launch. Where the GPU waits for the CPU, the number of launches
counts, not the work: so members with the same partners share a tile, whatever their positions are, found in the table
of allowed pairs. No atomics: each gradient is written once, by the program that adds it up.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...pattern import Pattern
from ...progression import Ints
from ..parts import row_steps
from .schedule import ITEM

EMPTY_PLACE = -1  # marks an empty place in a tile or a block
HEAVY = 1.5  # members with so many times the median number of partners get tiles of their own

Table = NDArray[np.bool_]


@lru_cache(maxsize=256)
def tables(
    pattern: Pattern, size: tuple[int, int], place: tuple[int, int], tile: tuple[int, int], device: torch.device
) -> tuple[tuple[Tensor, Tensor, Tensor], int]:  # fmt: skip
    """Items, members and blocks of the tiles of keys, then of those of queries; and how many are of keys.

    size: n, m. place: start, step of the queries. tile: members of a tile, of a block.
    """
    (n, m), (_, step) = size, place
    allowed = pattern.allowed(n, m, place, torch.device("cpu")).numpy()
    keys = tile_lists(np.ascontiguousarray(allowed.T), row_steps(pattern, step, True), *tile)
    queries = tile_lists(allowed, row_steps(pattern, step, False), *tile)
    queries.items[:, 3:6] += len(keys.blocks)
    items, members, blocks = (
        torch.from_numpy(np.concatenate(both).astype(np.int32)).to(device) for both in zip(keys, queries)
    )
    return (items, members, blocks), len(keys.items)


class TileLists(NamedTuple):
    """Tiles, the longest first. Of the blocks of a tile, those allowed for every member come first."""

    items: Ints  # (t, 8), as in Schedule; the members of a tile are listed, and no tile is split
    members: Ints  # (t, R)
    blocks: Ints  # (x, B)


def tile_lists(allowed: Table, hops: list[int], tile: int, block: int) -> TileLists:
    """The cheapest assignment of members (rows of the table) to tiles; each tile costs one more block."""
    bits = np.packbits(allowed, axis=1)  # eight pairs at a time
    tilings = [_tiles(order, tile) for order in _orders(allowed, hops)]
    met = [_met(bits, one, allowed.shape[1], by_all=False) for one in tilings]
    cost = [int((-(-x.sum(1) // block) + 1).sum()) for x in met]
    best = cost.index(min(cost))
    return _cut(tilings[best], met[best], _met(bits, tilings[best], allowed.shape[1], by_all=True), block)


def _orders(allowed: Table, hops: list[int]) -> Iterator[list[Ints]]:
    """Candidate orders of all members, in groups that share no tile."""
    degree = allowed.sum(1)
    heavy = degree > HEAVY * np.median(degree)
    for hop in hops:
        order = np.concatenate([np.arange(c, len(allowed), hop) for c in range(min(hop, len(allowed)))])
        yield [order]
        if heavy.any() and not heavy.all():
            yield [order[heavy[order]], order[~heavy[order]]]


def _tiles(groups: list[Ints], tile: int) -> Ints:
    filled = [np.pad(group, (0, -len(group) % tile), constant_values=EMPTY_PLACE) for group in groups]
    return np.concatenate(filled).reshape(-1, tile)


def _met(bits: NDArray[np.uint8], tiles: Ints, others: int, by_all: bool) -> Table:
    """The partners of each tile: those of any member, or those of all members."""
    neutral = np.full((1, bits.shape[1]), 255 if by_all else 0, dtype=np.uint8)  # row −1, the neutral element
    rows = np.concatenate([bits, neutral])[tiles]
    found = (np.bitwise_and if by_all else np.bitwise_or).reduce(rows, axis=1)
    return np.unpackbits(found, axis=1, count=others).astype(bool)


def _cut(tiles: Ints, by_some: Table, by_all: Table, block: int) -> TileLists:
    """The blocks of each tile."""
    items, blocks, at = [], [], 0
    length = -(-by_some.sum(1) // block)
    order = np.argsort(-length, kind="stable")
    for t in order:
        whole = np.flatnonzero(by_all[t])
        whole = whole[: len(whole) // block * block]
        by_some[t, whole] = False
        met = np.concatenate([whole, np.flatnonzero(by_some[t])])
        items.append((0, 0, 0, at, at + len(whole) // block, at + length[t], *[-1] * (ITEM - 6)))
        blocks.append(np.pad(met, (0, length[t] * block - len(met)), constant_values=EMPTY_PLACE))
        at += length[t]
    shape = max(at, 1), block  # one block at least: a kernel is given a table
    full = np.full(shape, EMPTY_PLACE, dtype=np.int64)
    full[:at] = np.concatenate(blocks).reshape(-1, block)
    return TileLists(np.array(items), tiles[order], full)

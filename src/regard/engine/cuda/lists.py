"""A short call as lists: tiles of members, and for each tile all that some member of it meets, in blocks.

Where n · m is small the table of allowed pairs can be looked at as a whole. Then nothing has to be a progression, and
no member is visited in two passes: its gradient is finished by the one program that begins it.

Members are queries and meet keys, or the other way round.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...progression import Ints

NOBODY = -1  # an empty place in a tile or a block
HEAVY = 1.5  # a member that meets so many times the median may have its like for company
ITEM = 4  # int32 words an item takes; 3 are used

Table = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Lists:
    """Tiles, the longest first. Of its blocks those that every member of the tile meets in full come first."""

    items: Ints  # (t, 4): first block, first masked block, end
    members: Ints  # (t, R)
    blocks: Ints  # (x, B)


def lists(allowed: Table, hops: list[int], tile: int, block: int) -> Lists:
    """The cheapest way to put the members, the rows of the table, into tiles: a tile counts as a block more."""
    bits = np.packbits(allowed, axis=1)  # eight pairs at a time
    ways = [_tiles(order, tile) for order in _orders(allowed, hops)]
    met = [_met(bits, way, allowed.shape[1], by_all=False) for way in ways]
    cost = [int((-(-x.sum(1) // block) + 1).sum()) for x in met]
    best = cost.index(min(cost))
    return _cut(ways[best], met[best], _met(bits, ways[best], allowed.shape[1], by_all=True), block)


def _orders(allowed: Table, hops: list[int]) -> Iterator[list[Ints]]:
    """All members, in groups that share no tile."""
    degree = allowed.sum(1)
    heavy = degree > HEAVY * np.median(degree)
    for hop in hops:
        order = np.concatenate([np.arange(c, len(allowed), hop) for c in range(min(hop, len(allowed)))])
        yield [order]
        if heavy.any() and not heavy.all():
            yield [order[heavy[order]], order[~heavy[order]]]


def _tiles(groups: list[Ints], tile: int) -> Ints:
    out = []
    for group in groups:
        full = np.full(-(-len(group) // tile) * tile, NOBODY, dtype=np.int64)
        full[: len(group)] = group
        out.append(full.reshape(-1, tile))
    return np.concatenate(out)


def _met(bits: NDArray[np.uint8], tiles: Ints, others: int, by_all: bool) -> Table:
    """Whom the members of each tile meet: some of them, or all."""
    nobody = np.full(
        (1, bits.shape[1]), 255 if by_all else 0, dtype=np.uint8
    )  # row −1, which changes nothing
    rows = np.concatenate([bits, nobody])[tiles]
    found = (np.bitwise_and if by_all else np.bitwise_or).reduce(rows, axis=1)
    return np.unpackbits(found, axis=1, count=others).astype(bool)


def _cut(tiles: Ints, by_some: Table, by_all: Table, block: int) -> Lists:
    """The blocks of each tile."""
    items, blocks, at = [], [], 0
    length = -(-by_some.sum(1) // block)
    order = np.argsort(-length, kind="stable")
    for t in order:
        whole = np.flatnonzero(by_all[t])
        whole = whole[: len(whole) // block * block]
        by_some[t, whole] = False
        met = np.concatenate([whole, np.flatnonzero(by_some[t])])
        own = np.full(length[t] * block, NOBODY, dtype=np.int64)
        own[: len(met)] = met
        items.append((at, at + len(whole) // block, at + length[t], 0))
        blocks.append(own)
        at += length[t]
    shape = max(at, 1), block  # one block at least: a kernel is given a table
    full = np.full(shape, NOBODY, dtype=np.int64)
    full[:at] = np.concatenate(blocks).reshape(-1, block)
    return Lists(np.array(items), tiles[order], full)


def joined(first: Lists, second: Lists) -> Lists:
    """Both in one table, the first before the second."""
    moved = second.items.copy()
    moved[:, :3] += len(first.blocks)
    parts = (first.items, moved), (first.members, second.members), (first.blocks, second.blocks)
    return Lists(*(np.concatenate(pair) for pair in parts))

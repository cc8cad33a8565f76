"""Tiles and blocks as lists of members, for short calls and for grids; and passes with the masks of their blocks.

Both sides of the gradients of a short call, for one launch. A plan of few pairs may have several passes, each a
launch. If the GPU waits for the CPU, the number of launches matters, not the work. So members with the same partners,
found in the table of allowed pairs, share a tile, whatever their positions are. No atomics: each gradient is written
once, by the program that sums it.
"""

from collections.abc import Iterator
from functools import lru_cache, reduce
from itertools import accumulate, product
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...pattern import Pattern, neighborhood
from ...pattern.grid import Axis
from ...pattern.parts import row_steps
from ...progression import Ints, ranks
from ..call import Place
from .call import Config
from .mask import MASK_WORDS, MEMBERS, Masks, distinct_rows, mask_words
from .schedule import (
    BEGINS,
    ITEM,
    TESTED,
    WIDTH,
    Blocks,
    DevicePass,
    DevicePasses,
    HopperSchedule,
    Sides,
    device_passes,
    indices_of_blocks,
    scheduled,
    to_device,
)

NO_MEMBER = -1  # marks an empty entry of a tile or a block
HEAVY = 1.5  # members with so many times the median number of partners get tiles of their own

Table = NDArray[np.bool_]


@lru_cache(maxsize=256)
def one_launch_tables(
    place: Place, tile: tuple[int, int], device: torch.device
) -> tuple[tuple[Tensor, Tensor, Tensor], int]:
    """Items, members and blocks of the tiles of keys, then of the tiles of queries; and the number of tiles of keys.

    tile: members of a tile, of a block.
    """
    pattern, n, m, start, step = place
    allowed = pattern.allowed(n, m, (start, step), torch.device("cpu")).numpy()
    keys = tile_lists(np.ascontiguousarray(allowed.T), row_steps(pattern, step, True), *tile)
    queries = tile_lists(allowed, row_steps(pattern, step, False), *tile)
    queries.items[:, 3:6] += len(keys.blocks)
    items, members, blocks = to_device([np.concatenate(both) for both in zip(keys, queries)], device)
    return (items, members, blocks), len(keys.items)


class TileLists(NamedTuple):
    """Tiles, the longest first. In a tile, blocks that are allowed for every member come first."""

    items: Ints  # (t, 8), as in Schedule; the members of a tile are listed, and no tile is split
    members: Ints  # (t, R)
    blocks: Ints  # (x, B)


def tile_lists(allowed: Table, hops: list[int], tile: int, block: int) -> TileLists:
    """The cheapest assignment of members (rows of the table) to tiles; each tile costs one more block."""
    bits = np.packbits(allowed, axis=1)  # eight pairs at a time
    tilings = [_tiles(order, tile) for order in _orders(allowed, hops)]
    partners = [_partners(bits, tiles, allowed.shape[1], by_all=False) for tiles in tilings]
    cost = [int((-(-x.sum(1) // block) + 1).sum()) for x in partners]
    best = cost.index(min(cost))
    of_all = _partners(bits, tilings[best], allowed.shape[1], by_all=True)
    return _cut_into_blocks(tilings[best], partners[best], of_all, block)


def _orders(allowed: Table, hops: list[int]) -> Iterator[list[Ints]]:
    """Candidate orders of all members, in groups that share no tile."""
    degree = allowed.sum(1)
    heavy = degree > HEAVY * np.median(degree)
    for hop in hops:
        order = np.argsort(np.arange(len(allowed)) % hop, kind="stable")
        yield [order]
        if heavy.any() and not heavy.all():
            yield [order[heavy[order]], order[~heavy[order]]]


def _tiles(groups: list[Ints], tile: int) -> Ints:
    sizes = [-(-len(group) // tile) * tile for group in groups]
    filled = np.full(sum(sizes), NO_MEMBER)
    for group, end, size in zip(groups, accumulate(sizes), sizes):
        filled[end - size : end - size + len(group)] = group
    return filled.reshape(-1, tile)


def _partners(bits: NDArray[np.uint8], tiles: Ints, others: int, by_all: bool) -> Table:
    """The partners of each tile: those of any member, or those of all members."""
    neutral = np.full((1, bits.shape[1]), 255 if by_all else 0, dtype=np.uint8)  # row −1, the neutral element
    rows = np.concatenate([bits, neutral])[tiles]
    result = (np.bitwise_and if by_all else np.bitwise_or).reduce(rows, axis=1)
    return np.unpackbits(result, axis=1, count=others).astype(bool)


def _cut_into_blocks(tiles: Ints, of_any: Table, of_all: Table, block: int) -> TileLists:
    """The blocks of each tile."""
    length = -(-of_any.sum(1) // block)
    order = np.argsort(-length, kind="stable")
    tiles, of_any, of_all, length = tiles[order], of_any[order], of_all[order], length[order]
    nth = np.cumsum(of_all, axis=1)
    complete = nth[:, -1] // block * block
    first = of_all & (nth <= complete[:, None])
    begin = np.cumsum(length) - length
    shape = max(int(length.sum()), 1), block  # one block at least: a kernel is given a table
    table = np.full(shape, NO_MEMBER, dtype=np.int64)
    for partners, at in ((first, block * begin), (of_any & ~first, block * begin + complete)):
        counts = partners.sum(1)
        table.ravel()[np.repeat(at, counts) + ranks(counts)] = partners.nonzero()[1]
    items = np.full((len(tiles), ITEM), -1)
    items[:, :3], items[:, 3:6] = 0, np.stack([begin, begin + complete // block, begin + length], axis=1)
    return TileLists(items, tiles, table)


# The passes of the Hopper kernels, with a mask for each block that has to be tested.

TILES = Config(MEMBERS, MEMBERS, 4, 1)  # of all Hopper kernels; their other numbers do not matter here
HOST = torch.device("cpu")
# Masks that are computed at a time: on a GPU if there are more, 4 MB of truth values; on the host, in its cache.
AT_A_TIME, ON_HOST = 1024, 128


@lru_cache(maxsize=256)
def with_masks(place: Place, by_keys: bool, device: torch.device) -> DevicePasses:
    """The passes of the plan, or of the transposed plan (by_keys), with the masks of their blocks; forward and dq
    share them. The passes without masks are not kept."""
    sides = Sides(*place[3:], by_keys)
    return scheduled(place, TILES, by_keys, lambda blocks: _masked(blocks, sides, device))


def _masked(source: Blocks, sides: Sides, device: torch.device) -> HopperSchedule:
    period = source.pattern.shift_period if sides.step == 1 else 0
    blocks, tested = source.table, source.tested
    words = blocks[tested]
    words[:, 9] = 0  # marks and number of rows do not matter
    for at in (2, 5):  # 0: there is no such segment
        words[:, at : at + 3] *= words[:, at : at + 1] < MEMBERS
    if period:  # tiles are shifted to the first period, so that equal blocks have equal words
        shift = words[:, 10:11] // period * period
        words[:, [0, 10]] -= shift
        words[:, [3, 6]] -= shift * (words[:, [2, 5]] > 0)
    distinct, nth_distinct = distinct_rows(words)
    chunks: Any = np.split(distinct, range(ON_HOST, len(distinct), ON_HOST))
    if len(distinct) > AT_A_TIME and device.type == "cuda":
        chunks = torch.from_numpy(distinct).to(device).split(AT_A_TIME)
    computed = [mask_words(_allowed(source.pattern, x, sides)) for x in chunks]
    masks, nth_mask = distinct_rows(np.concatenate(computed))
    blocks[tested, 8] += 256 * (1 + nth_mask[nth_distinct])
    all_masks = np.zeros((1 + len(masks), MASK_WORDS), dtype=np.int32)
    all_masks[1:] = masks
    on_host, on_device = torch.from_numpy(blocks.astype(np.int32)), torch.from_numpy(all_masks).to(device)
    sizes = np.bincount(source.owner)
    return HopperSchedule(on_host, sizes, Masks(on_device), source.segments, bool(tested.any()))


def _allowed(pattern: Pattern, words: Any, sides: Sides) -> Any:
    """Which pairs of a member of the tile and a column are allowed, in each block: (x, MEMBERS, MEMBERS). By NumPy
    or, if the words of the blocks are a tensor, by PyTorch."""
    xp, on_gpu = (torch, {"device": words.device}) if isinstance(words, Tensor) else (np, {})
    a, b, c1, a1, b1, c2, a2, b2, end, _, first, hop = words.T[:, :, None]
    c = xp.arange(MEMBERS, **on_gpu)
    other = xp.where((c1 > 0) & (c >= c1), a1 + b1 * c, a + b * c)
    other = xp.where((c2 > 0) & (c >= c2), a2 + b2 * c, other)
    own, other = (first + hop * c)[:, :, None], other[:, None, :]
    rows, j = (other, own) if sides.by_keys else (own, other)
    allowed = xp.asarray(pattern.allows(sides.start + sides.step * rows, j), **on_gpu)
    return xp.broadcast_to(allowed & (c < end)[:, None], (len(words), MEMBERS, MEMBERS))


# Tiles of grids as boxes, for the Hopper kernels. With a kernel of 7 × 7, 64 pixels in a line have 7 × 64 keys, a box
# of 4 × 16 pixels has 10 × 22. Such keys are not a few progressions, so they are listed, as offsets from the first
# one of a block: those that all queries of the tile may attend to come first, and their blocks need no mask.

MAX_LISTS = 1 << 18  # blocks, of one tile of each kind; the 185,868 of a video have 4 MB of lists and masks
EVERY_QUERY = ~np.uint64(0)


class Cut(NamedTuple):
    """An axis, cut into intervals of as many coordinates, `step` apart; the last one of a residue class may begin
    earlier, so that it ends with the axis. The partners of a coordinate are the keys of a query, or the queries of a
    key."""

    first: Ints  # of each interval, its first coordinate
    shared: Ints  # how many of its coordinates are also in the interval before it, to which they belong
    partner: Ints  # the first partner of its coordinates
    kind: Ints
    kinds: list[tuple[Ints, Table]]  # the partners as offsets from the first one; which coordinate has which


def in_boxes(place: Place, by_keys: bool, device: torch.device) -> DevicePasses | None:
    """The pass of a grid in boxes, if that has fewer blocks than its pass in lines; otherwise None."""
    if not isinstance(place[0], neighborhood):
        return None
    lines = device_passes(place, TILES, by_keys, HOST)
    work = _boxes(place[0], by_keys, len(lines.steps[0].work.blocks), device)
    return None if work is None else DevicePasses((DevicePass(work, None, False, False),), True)


@lru_cache(maxsize=64)
def _boxes(grid: neighborhood, by_keys: bool, below: int, device: torch.device) -> HopperSchedule | None:
    """Queries, or keys, in the boxes of 33 to 64 members that have the fewest blocks; None if these are not fewer
    than `below`, or if the grid is smaller than any such box."""
    cuts = [{s: _intervals(axis, s, by_keys) for s in _interval_sizes(axis)} for axis in grid.axes]
    fit = (box for box in product(*cuts) if MEMBERS // 2 < prod(box) <= MEMBERS)
    boxes = {box: [cut[s] for cut, s in zip(cuts, box)] for box in fit}
    best = min(boxes, key=lambda box: _count(boxes[box]), default=None)
    if best is None or _count(boxes[best]) >= below or _count(boxes[best], once=True) > MAX_LISTS:
        return None
    return _box_schedule(grid, best, boxes[best], device)


def _count(cuts: list[Cut], once: bool = False) -> int:
    """The number of blocks of all tiles; once: of one tile of each kind."""
    keys = tiles = np.ones(1, dtype=np.int64)
    for cut in cuts:
        size = np.array([len(partners) for partners, _ in cut.kinds])
        many = np.ones_like(size) if once else np.bincount(cut.kind)
        keys, tiles = np.multiply.outer(keys, size), np.multiply.outer(tiles, many)
    return int((-(-keys // MEMBERS) * tiles).sum())


def _interval_sizes(axis: Axis) -> list[int]:
    """The sizes of intervals to try: powers of two, and all that the shortest residue class has."""
    longest = max(axis.length // axis.step, 1)
    return sorted({min(1 << x, longest) for x in range(7)})


def _intervals(axis: Axis, side: int, by_keys: bool) -> Cut:
    (low, high), step = axis.ends(by_keys), axis.step
    classes = [np.arange(residue, axis.length, step) for residue in range(min(step, axis.length))]
    regular = [np.arange(0, len(x), side) for x in classes]
    begins = [np.minimum(y, len(x) - side) for x, y in zip(classes, regular)]
    first = np.concatenate([x[y] for x, y in zip(classes, begins)])
    number_of: dict[tuple[bytes, bytes], int] = {}
    kinds: list[tuple[Ints, Table]] = []
    partner, kind = [], []
    for begin in first:
        own = begin + step * np.arange(side)[:, None]
        candidates = np.arange(low[own].min(), high[own].max() + 1, step)
        allowed = axis.allows(candidates, own) if by_keys else axis.allows(own, candidates)
        partners, allowed = candidates[allowed.any(0)], allowed[:, allowed.any(0)]
        key = (partners - partners[0]).tobytes(), allowed.tobytes()
        if key not in number_of:
            number_of[key] = len(kinds)
            kinds.append((partners - partners[0], allowed))
        partner.append(partners[0])
        kind.append(number_of[key])
    shared = np.concatenate(regular) - np.concatenate(begins)
    return Cut(first, shared, np.array(partner), np.array(kind), kinds)


def _columns(axes: list[tuple[Ints, Table]], strides: list[int]) -> tuple[Ints, NDArray[np.uint64]]:
    """The keys of one kind of tile, in blocks, −1 behind the last; and for each, one bit per query of the tile."""
    keys, allowed = np.zeros(1, dtype=np.int64), np.array([EVERY_QUERY])
    for at, (partners, is_partner) in enumerate(axes):
        outer, inner = (prod(len(rows) for _, rows in x) for x in (axes[:at], axes[at + 1 :]))
        queries = np.tile(np.repeat(is_partner, inner, axis=0), (outer, 1))
        queries = np.pad(queries, ((0, MEMBERS - len(queries)), (0, 0)), constant_values=True)
        bits = np.packbits(queries, axis=0, bitorder="little").T.copy().view("<u8").ravel()
        keys = np.add.outer(keys, partners * strides[at]).ravel()
        allowed = np.bitwise_and.outer(allowed, bits).ravel()
    order, padding = np.argsort(allowed != EVERY_QUERY, kind="stable"), (0, -len(keys) % MEMBERS)
    keys = np.pad(keys[order], padding, constant_values=NO_MEMBER)
    return keys.reshape(-1, MEMBERS), np.pad(allowed[order], padding).reshape(-1, MEMBERS)


def _box_schedule(
    grid: neighborhood, box: tuple[int, ...], cuts: list[Cut], device: torch.device
) -> HopperSchedule:
    strides = [prod(grid.grid[at + 1 :]) for at in range(len(box))]

    def of_tiles(numbers: Any) -> Ints:
        """The sum of a number per interval of each axis, for every tile."""
        return reduce(np.add.outer, numbers).ravel()

    radix = [prod(len(cut.kinds) for cut in cuts[at + 1 :]) for at in range(len(box))]
    distinct, kind = np.unique(of_tiles(cut.kind * x for cut, x in zip(cuts, radix)), return_inverse=True)
    of_axes = zip(*np.unravel_index(distinct, [len(cut.kinds) for cut in cuts]))
    columns = [_columns([cut.kinds[x] for cut, x in zip(cuts, kinds)], strides) for kinds in of_axes]
    size = np.array([len(keys) for keys, _ in columns])
    keys, allowed = (np.concatenate(x) for x in zip(*columns))
    counts = (keys != NO_MEMBER).sum(1)
    lists, nth_list = distinct_rows(np.where(keys == NO_MEMBER, 0, keys - keys[:, :1]))
    tested: Table = (allowed != EVERY_QUERY).any(1)
    masks, nth_mask = distinct_rows(allowed[tested].view(np.int64))
    pairs = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little").reshape(-1, MEMBERS, MEMBERS)
    bits = mask_words(pairs.swapaxes(1, 2))
    words = np.concatenate([np.zeros(MASK_WORDS, dtype=np.int64), bits.ravel(), lists.ravel()])

    sizes = size[kind]
    tile, at = np.repeat(np.arange(len(kind)), sizes), indices_of_blocks(size, kind)
    mask = np.zeros(len(tested), dtype=np.int64)
    mask[tested] = 1 + nth_mask
    blocks = np.zeros((len(tile), WIDTH), dtype=np.int64)
    blocks[:, 0] = of_tiles(cut.partner * x for cut, x in zip(cuts, strides))[tile] + keys[at, 0]
    blocks[:, 1] = (MASK_WORDS * (1 + len(masks)) + MEMBERS * nth_list)[at]
    blocks[:, 8] = (counts + 256 * mask)[at]
    blocks[:, 9] = TESTED * tested[at] + BEGINS * (ranks(sizes) == 0) + 256 * prod(box)
    blocks[:, 10] = of_tiles(cut.first * x for cut, x in zip(cuts, strides))[tile]
    blocks[:, 11] = of_tiles(cut.shared << 6 * at for at, cut in enumerate(cuts))[tile]
    axes = [_coordinate(side, prod(box[at + 1 :])) for at, side in enumerate(box)]
    distances = [stride * step for stride, step in zip(strides, grid.step)]
    spread = " + ".join(f"{x} * {stride}" for x, stride in zip(axes, distances))
    shared = (at for at, cut in enumerate(cuts) if cut.shared.any())
    tests = (f"({axes[at]} >= ((hop >> {6 * at}) & 63))" for at in shared)

    on_host, on_device = (torch.from_numpy(x.astype(np.int32)) for x in (blocks, words))
    all_masks = Masks(
        on_device.to(device), spread, " & ".join(tests) or None, MEMBERS * int(counts[at].sum())
    )
    return HopperSchedule(on_host, sizes, all_masks, segments=2)


def _coordinate(side: int, inner: int) -> str:
    """Source code of a coordinate of member a of a box: of `side` there are, each with `inner` members."""
    if side & (side - 1) == inner & (inner - 1) == 0:
        return f"((a >> {inner.bit_length() - 1}) & {side - 1})"
    return f"((a // {inner}) % {side})"

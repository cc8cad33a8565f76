"""The blocks of a schedule, assigned to the programs of the Hopper kernels.

Tiles are assigned whole where that balances the load. In a pass by keys, a tile that very many queries may attend to
is cut into pieces, at the same rows as other tiles; the results of its pieces are added in order afterwards.
"""

import heapq
import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...progression import Ints, ranks
from .call import Layout, as_one_head
from .mask import MEMBERS, Masks
from .schedule import (
    BEGINS,
    ITEM,
    MIN_SPLIT,
    TESTED,
    WIDTH,
    DevicePass,
    DevicePasses,
    HopperSchedule,
    indices_of_blocks,
)

MIN_EXCESS = 4  # blocks by which a tile that is split exceeds a program's share of the tiles that are not
MAX_BLOCKS = 1 << 18  # of one table: 12 MiB
MAX_CHAINED = 1 << 20  # the same of chained passes: 48 MiB
MAX_IN_TILE = 8  # blocks of a tile of chained passes: with more, reading rows again matters less than waiting
MIN_RUN = 256  # blocks of a program where heads take turns: a program's first product waits for memory
PIECE = 8  # blocks of one piece of a split tile
# Documents: programs of a head, so that rounding loses little; blocks of a program.
MIN_OF_HEAD, MIN_BLOCKS = 8, 16
# By how much sharing tiles has to pay, and how many blocks take as long as merging their parts, by estimate.
MIN_GAIN, MERGING = 1.2, 8
# Neighboring tiles that are sorted by length: so many for each program. By how much the most work of a program may
# exceed that of all tiles sorted by length; blocks of the longest tile (with long ones, balance matters more).
ROUNDS, MAX_IMBALANCE, MAX_NEAR = (1, 3), 1.08, 64
CACHE = 40 << 20  # bytes of the GPU's second-level cache (50 MiB on an H200) that rows may use


@dataclass(frozen=True, eq=False)
class WorkSplit:
    """The blocks of a pass, assigned to programs. A tile that several programs share has a slot for each."""

    blocks: Tensor  # (x, 12), as visited; with grouped heads, 65536 × the query head is added to the marks
    chunks: Tensor  # (k, 16): first block and end of each program's run; from the fifth word on, that block
    slot: Tensor  # (x,): where the results of a block's tile go; −1: the tile is not split
    joins: Tensor  # (y, 8), as in Schedule
    slots: int
    masks: Tensor  # the words of tile_lists.Masks
    rows: int = 1  # batch rows with chunks of their own, as many of each, one row after the other

    @property
    def tables(self) -> tuple[Tensor, ...]:
        """As the kernels take them."""
        return self.chunks, self.blocks, self.slot, self.masks

    @property
    def programs(self) -> int:
        """Of one head."""
        return len(self.chunks) // self.rows


def by_size(route: DevicePasses, programs: int) -> DevicePasses:
    """Tiles that have more blocks than a program's share are split, and are a pass of their own: otherwise every tile
    would be cut where those are. programs: those of a head that run at the same time."""
    steps: list[DevicePass] = []
    for step in route.steps:
        size = step.work.sizes
        long = size < 0
        while (longer := ~long & (size > max(size[~long].sum() / programs + MIN_EXCESS, MIN_SPLIT))).any():
            long |= longer
        steps += [
            replace(step, work=_of_tiles(step.work, tiles, is_long))
            for tiles, is_long in ((long, True), (~long, False))
            if tiles.any()
        ]
    return replace(route, steps=tuple(steps))


def _of_tiles(work: HopperSchedule, tiles: NDArray[np.bool_], split: bool) -> HopperSchedule:
    """The blocks of some of the tiles; split: whether programs share these."""
    if tiles.all():
        return work if split == work.split else replace(work, split=split)
    indices = torch.from_numpy(indices_of_blocks(work.sizes, np.flatnonzero(tiles)))
    return replace(work, blocks=work.blocks[indices], sizes=work.sizes[tiles], split=split)


def heads_at_a_time(work: HopperSchedule, heads: int, others: Layout, programs: int) -> int:
    """How many heads run at the same time: all, or if the rows of the other side (two tensors like `others`) do not
    fit into the cache, as few as leave every program enough blocks. If programs share tiles, all do."""
    rows = 2 * 2 * math.prod(others.shape)  # bytes
    if work.split or work.rows > 1 or rows <= CACHE:
        return heads
    divisors = (x for x in range(1, heads + 1) if heads % x == 0)
    return next(x for x in divisors if x == heads or x * work.sizes.sum() >= MIN_RUN * programs)


def split_work(
    work: HopperSchedule,
    heads: int,
    programs: int,
    group: int = 1,
    multiple: int = 1,
    dynamic_share: float = 0.0,
    backwards: bool = False,
) -> WorkSplit:
    """Assign the blocks to the programs of a head; `programs` programs of all heads together run at the same time.

    A tile, or a piece of it where tiles are split, is one run of blocks, repeated for each query head of a group.
    multiple: empty blocks are added until the length of each program's run is a multiple of it.
    dynamic_share: the part of the work that is kept for programs that finish early, `multiple` tiles at a time.
    backwards: tiles from the last to the first, so that rows still in the cache are read first.
    """
    size, table = group * work.sizes, work.blocks.numpy()
    k = min(max(programs // heads, 1), int(size.sum()) if work.split else len(size))
    if work.rows and work.split:
        return _in_order(work, table, _equal_pieces(size, k), group, multiple)
    if work.split:
        table = table[np.lexsort((table[:, 0], np.repeat(np.arange(len(size)), work.sizes)))]
        pieces = _aligned_pieces(table[:, 0].astype(np.int64), work.sizes, k, group)
        return _in_order(work, table, pieces.T, group, multiple)
    per_row = 0
    if work.rows:
        program_of, per_row = _by_rows(work, size, heads, programs, dynamic_share, multiple)
    elif not work.ordered and work.masks.spread is None and (table[:, 11] > 1).any():
        program_of = _in_rounds(size, k, dynamic_share, multiple, backwards)
    elif work.ordered:
        program_of = _in_turn(np.arange(len(size)), size, k, dynamic_share, multiple)
    else:
        program_of = _balanced(size, k, dynamic_share, multiple)
    # Tiles in order, or backwards: those that run at the same time are of one head and share keys in the cache.
    order = np.arange(len(size))[:: -1 if backwards else 1]
    tile = order[np.argsort(program_of[order], kind="stable")]
    uncut = np.stack([tile, np.zeros_like(tile), size[tile], program_of[tile]])
    return _in_order(work, table, uncut, group, multiple, per_row)


def _in_order(
    work: HopperSchedule, table: NDArray[Any], pieces: Ints, group: int, multiple: int, per_row: int = 0
) -> WorkSplit:
    """The blocks in the order of execution. pieces: tile, first and end of its blocks, program; by program.

    per_row: if batch rows differ, the number of programs of each. A row has empty ones after its own: a block without
    members, of a tile without members, writes nothing.
    """
    (tile, begin, end, program_of), sizes = pieces, work.sizes
    parts = np.bincount(tile, minlength=len(sizes))[tile]
    in_tile = np.lexsort((begin, tile)) if work.split else tile[:0]
    in_tile = in_tile[parts[in_tile] > 1]
    slot = np.full(len(tile), -1, dtype=np.int32)
    slot[in_tile] = np.arange(len(in_tile))

    # The last block of a run may be repeated, without members.
    runs = np.flatnonzero(np.append(True, program_of[1:] != program_of[:-1]))
    last, length = np.append(runs[1:], len(tile)) - 1, end - begin
    repeats = -np.add.reduceat(length, runs) % multiple
    length[last] += repeats
    ends = np.cumsum(length)
    starts, total, first = ends - length, int(ends[-1]), in_tile[begin[in_tile] == 0]

    idle, count = multiple if per_row else 0, work.rows * per_row or len(runs)
    shapes = (total + idle, WIDTH), (count, 4 + WIDTH), (len(first), ITEM), (total,)
    numbers = [math.prod(x) for x in shapes]
    # By one copy. All but the last table have rows of 32 bytes or more, so each begins at a multiple of 16.
    flat = torch.from_numpy(np.zeros(sum(numbers), dtype=np.int32))
    blocks, chunks, joins, slots = (x.view(y).numpy() for x, y in zip(flat.split(numbers), shapes))
    slots[:] = np.repeat(slot, length)
    first_block = (np.cumsum(sizes) - sizes)[tile % (len(sizes) // work.heads)]
    at, empty = np.arange(total), np.repeat(ends[last], repeats) - 1 - ranks(repeats)
    at += np.repeat(first_block + begin - starts, length)
    at[empty] = np.repeat(at[ends[last] - repeats - 1], repeats)
    if group > 1:
        size = np.repeat(sizes[tile], length)
        head = (at - np.repeat(first_block, length)) // size
        at -= head * size
    table = table.copy()
    table[:, 9] &= ~BEGINS
    np.take(table, at, 0, blocks[:total], mode="clip")  # by "raise", it would be copied
    if group > 1:
        blocks[:total, 9] += (65536 * head).astype(np.int32)
    if work.heads > 1:
        shift = np.repeat((tile // (len(sizes) // work.heads) * work.distance).astype(np.int32), length)
        for word in (0, 3, 6, 10):
            blocks[:, word] += shift
    blocks[starts, 9] |= BEGINS
    blocks[empty, 8], blocks[empty, 9] = 0, blocks[empty, 9] & ~255 | TESTED  # the mask without a pair
    of_first = blocks[starts[first]]
    joins[:, :2], joins[:, 2] = of_first[:, 10:], of_first[:, 9] >> 8 & 255
    joins[:, 3], joins[:, 4] = slot[first], parts[first]

    blocks[total:, 9] = TESTED
    blocks[total : total + 1, 9] |= BEGINS
    chunk, begins = program_of[runs] if per_row else np.arange(len(runs)), starts[runs]
    chunks[:, :4], chunks[:, 4:] = [total, total + multiple] * 2, blocks[total : total + 1].sum(0)
    chunks[chunk, 0], chunks[chunk, 1] = begins, np.append(begins[1:], total)
    chunks[chunk, 4:] = blocks[begins]
    chunks[:, 2:4] = chunks[:, :2]
    views = [x.view(y) for x, y in zip(flat.to(work.masks.words.device).split(numbers), shapes)]
    rows = work.rows if per_row else 1
    return WorkSplit(views[0], views[1], views[3], views[2], len(in_tile), work.masks.words, rows)


# Packed documents, whose heads stay apart: new ids come at every step, and with all heads in one table preparing them
# took 40 ms.


def shares_tiles(work: HopperSchedule, heads: int, programs: int) -> bool:
    """Whether programs share tiles: if otherwise the longest takes so much more than its share that merging pays."""
    size = np.sort(work.sizes)[::-1]
    if work.rows > 1 or size[0] < MIN_SPLIT:
        return False
    k = int(_programs_of_rows(work, heads, programs)[0])
    every_kth = size[::k] + 1  # of the k · x + 1 longest tiles, one program has x + 1
    longest = (every_kth * np.arange(1, len(every_kth) + 1)).max()
    return bool(longest > MIN_GAIN * (size + 1).sum() / k + MERGING)


def _programs_of_rows(work: HopperSchedule, heads: int, programs: int) -> Ints:
    """Of the heads of each batch row, by its share of the blocks."""
    blocks = np.bincount(work.row, work.sizes, work.rows).astype(np.int64)
    turns = -(-MIN_OF_HEAD * heads // programs)  # in which programs run, one after the other
    share = turns * programs * blocks // (heads // work.rows * len(work.blocks))
    return np.minimum(share, np.maximum(blocks // MIN_BLOCKS, programs // heads)).clip(1)


def _by_rows(work: HopperSchedule, size: Ints, heads: int, programs: int, *rule: Any) -> tuple[Ints, int]:
    """The program of each tile, those of a batch row after those of the one before; and if there are several rows,
    how many programs each of them has."""
    program_of, k = [], _programs_of_rows(work, heads, programs)
    for row, (a, b) in enumerate(pairwise(work.row.searchsorted(np.arange(work.rows + 1)).tolist())):
        program_of.append(_balanced(size[a:b], min(int(k[row]), b - a), *rule))
    per_row = 1 + max(int(x.max(initial=-1)) for x in program_of)
    return np.concatenate(program_of) + per_row * work.row, per_row if work.rows > 1 else 0


def _equal_pieces(size: Ints, programs: int) -> Ints:
    """Pieces of tiles, in order, where all programs have as much work, and writing the results of a piece counts as
    one block: tile, first and end of its blocks, program."""
    ends, blocks = np.cumsum(size + 1), np.cumsum(size)
    cuts = ends[-1] * np.arange(1, programs) // programs
    of = np.searchsorted(ends, cuts, side="right")
    inside = cuts - (ends - size - 1)[of]
    # No piece has fewer than two blocks.
    inside = np.where(inside < 2, 0, np.where(inside > size[of] - 2, size[of], inside))
    cuts = (blocks - size)[of] + inside
    first = np.union1d(blocks - size, cuts[cuts < blocks[-1]])
    tile = np.searchsorted(blocks, first, side="right")
    begin = first - (blocks - size)[tile]
    program = np.unique(np.searchsorted(cuts, first, side="right"), return_inverse=True)[1]
    return np.stack([tile, begin, begin + np.diff(first, append=blocks[-1]), program])


def _balanced(size: Ints, programs: int, *rule: Any) -> Ints:
    """The program of each tile: the longest tiles first among neighbors, so that all programs are at about the same
    rows at any time and read them from the cache. If a program has much more work by that, the longest of all first.

    32 documents of 512 take 0.67 of the time forward by that, 21 drawn calls 0.98 in the mean (gpu_experiments).
    """
    program_of = _in_turn(np.argsort(-size, kind="stable"), size, programs, *rule)
    if not 1 < size.max(initial=0) <= MAX_NEAR or (size == size[0]).all():
        return program_of
    before_last, most = np.arange(len(size))[::-1], np.bincount(program_of, size + 1).max()
    for rounds in ROUNDS:
        order = np.lexsort((-size, -(before_last // (rounds * programs))))
        near = _in_turn(order, size, programs, *rule)
        if np.bincount(near, size + 1).max() <= MAX_IMBALANCE * most:
            return near
    return program_of


def _in_turn(order: Ints, size: Ints, programs: int, dynamic_share: float, tiles_each: int) -> Ints:
    """The program of each tile: in this order, each tile is assigned to the program with the least work so far, where
    finishing a tile counts as one block. The last tiles are the dynamic share.

    If tiles are sorted by length and equally long, program p of k gets tiles p, p + k, ….
    """
    assigned = np.searchsorted(np.cumsum(size[order] + 1), (1 - dynamic_share) * (size + 1).sum())
    assigned = min(max(int(assigned) + 1, programs), len(size))
    program_of = np.zeros(len(size), dtype=np.int64)
    program_of[order[assigned:]] = programs + np.arange(len(size) - assigned) // tiles_each
    # As one number each: the work of a program, times the number of programs, plus its number.
    load, more = list(range(programs)), (programs * (size[order[:assigned]] + 1)).tolist()
    least = [heapq.heapreplace(load, load[0] + x) for x in more]
    program_of[order[:assigned]] = np.array(least) % programs
    return program_of


def _in_rounds(size: Ints, programs: int, dynamic_share: float, tiles_each: int, backwards: bool) -> Ints:
    """The same for tiles of residue classes: those of one class share all their keys, so they run at the same time.

    A round has as many tiles as there are programs; its longest tile is assigned to the program with the least work.
    The last tiles are the dynamic share.
    """
    order = np.arange(len(size))[:: -1 if backwards else 1]
    program_of, load = np.zeros(len(size), dtype=np.int64), np.zeros(programs, dtype=np.int64)
    assigned = max(int((1 - dynamic_share) * len(size)), min(programs, len(size)))
    for at in range(0, assigned, programs):
        tiles = order[at : min(at + programs, assigned)]
        tiles = tiles[np.argsort(-size[tiles], kind="stable")]
        idle = np.argsort(load, kind="stable")[: len(tiles)]
        program_of[tiles] = idle
        load[idle] += size[tiles]
    program_of[order[assigned:]] = programs + np.arange(len(size) - assigned) // tiles_each
    return program_of


def _aligned_pieces(row: Ints, sizes: Ints, programs: int, group: int) -> Ints:
    """Pieces of tiles in the order of execution, program by program: tile, first and end of its blocks, program.

    Tiles are cut at the same rows, in pieces of one program's length, so that programs read the same rows at the same
    time; shorter pieces are assigned to the remaining programs, one after the other.
    row: where the blocks of each tile begin, in order.
    """
    share = -(-group * int(sizes.sum()) // programs)
    row_count = int(row.max()) + 1
    rows = np.split(row, np.cumsum(sizes)[:-1])
    keys = [np.add.outer(np.arange(group) * row_count, x).ravel() for x in rows]
    longest = keys[int(np.argmax(sizes))]
    candidates = [
        _cut_at(keys, longest[at::share], share) for at in {0, len(longest) % share}
    ]  # from either end
    tile, begin, end = max(candidates, key=lambda x: int((x[2] - x[1] >= share).sum()))
    complete = end - begin >= share
    assigned = np.column_stack([tile, begin, end, np.cumsum(complete) - 1])[complete]
    tile, begin, end = tile[~complete], begin[~complete], end[~complete]
    idle, stop = programs - len(assigned), np.cumsum(end - begin)
    if not len(tile):
        return assigned
    cut = np.union1d(stop - (end - begin), np.arange(idle) * stop[-1] // idle)
    of = np.searchsorted(stop, cut, side="right")
    size = np.diff(cut, append=stop[-1])
    first = cut - (stop - end)[of]
    program_of = len(assigned) + np.searchsorted(np.arange(idle) * stop[-1] // idle, cut, side="right") - 1
    return np.concatenate([assigned, np.column_stack([tile[of], first, first + size, program_of])])


def _cut_at(keys: list[Ints], cuts: Ints, max_length: int) -> tuple[Ints, Ints, Ints]:
    """The pieces of each tile between the cuts: tile, first and end. keys: of the blocks of each tile, in order."""
    at = [np.unique(np.concatenate([[0], np.searchsorted(x, cuts), [len(x)]])) for x in keys]
    at = [np.concatenate([np.arange(*x, max_length) for x in pairwise(y)] + [y[-1:]]) for y in at]
    tile = np.repeat(np.arange(len(keys)), [len(x) - 1 for x in at])
    return tile, np.concatenate([x[:-1] for x in at]), np.concatenate([x[1:] for x in at])


# Chained passes: gradient passes that continue from earlier ones, in one launch. All passes over a section of rows
# ("stretch") run at nearly the same time, so that its rows are read from memory once and then from the cache. Before
# a tile adds to earlier results, it waits until all earlier tiles of its section are written. There is no deadlock:
# all programs run at the same time and visit their tiles in one common order, and a tile waits only for earlier ones.


def chain_passes(
    passes: DevicePasses, layouts: tuple[Layout, ...], programs: int
) -> tuple[DevicePass, tuple[Layout, ...], int] | None:
    """All passes of all heads as one, the layouts of flattened heads, and the number of sections; None if one launch
    cannot contain them, or if a section does not fit into the cache.

    Words 4 to 6 of a block: the counter of its tile, the value that this must have reached, and whether a later tile
    waits for it.
    """
    b, h, n, d = layouts[0].shape
    one_head, works = as_one_head(layouts), [x.work for x in passes.steps]
    plain = all(x.keep is None and x.work.segments == 1 and not x.work.split for x in passes.steps)
    if one_head is None or not (passes.accumulate and plain):
        return None
    size = np.concatenate([x.sizes for x in works])
    if size.max() > MAX_IN_TILE or b * h * size.sum() > MAX_CHAINED:
        return None
    tables = [x.blocks.numpy().astype(np.int64) for x in works]
    masks = [x.masks.words for x in works]
    for table, before in zip(tables, np.cumsum([0, *map(len, masks)])):
        table[:, 8] += 256 * before
    table = np.concatenate(tables)
    begin = np.cumsum(size) - size
    of_pass = np.repeat(np.arange(len(tables)), [len(x.sizes) for x in works])
    all_rows, count = _stretches(table[begin], n)
    stretch = all_rows[table[begin, 10]]
    # A pass is behind the one before it by most of the tiles that run at a time, so that tiles seldom wait.
    lag = -(-7 * programs * count // (10 * len(size)))
    live = (2 + lag * (len(tables) - 1)) * np.bincount(all_rows).max() * (len(layouts) + 1) * 2 * d
    read = all_rows[np.minimum(table[:, [0, 0]] + table[:, [1, 1]] * np.array([0, MEMBERS - 1]), n - 1)]
    if live > CACHE or (np.abs(read - np.repeat(stretch, size)[:, None]) > 1).any():
        return None
    written = np.zeros((len(tables) + 1, count), dtype=np.int64)
    np.add.at(written, (of_pass + 1, stretch), 1)
    written = np.cumsum(written, axis=0)  # before each pass, and in the end
    awaited = np.where(np.array([x.accumulates for x in passes.steps])[of_pass], written[of_pass, stretch], 0)
    counts = written[-1, stretch] > written[of_pass + 1, stretch]
    table[:, 4:7] = np.repeat(np.column_stack([stretch, awaited, counts]), size, axis=0)

    heads = b * h
    head, tile = np.repeat(np.arange(heads), len(size)), np.tile(np.arange(len(size)), heads)
    order = np.lexsort((of_pass[tile], head * count + stretch[tile] + lag * of_pass[tile]))
    head, tile = head[order], tile[order]
    table = np.take(table.astype(np.int32), indices_of_blocks(size, tile), 0)
    of_head = np.repeat(head.astype(np.int32), size[tile])
    for word, distance in ((0, n), (10, n), (4, count)):
        table[:, word] += distance * of_head
    blocks, all_masks = torch.from_numpy(table), Masks(torch.cat(masks))
    work = replace(works[0], blocks=blocks, sizes=size[tile], ordered=True, chained=True, masks=all_masks)
    return DevicePass(work, None, True, False), one_head, heads * count


def _stretches(tiles: Ints, n: int) -> tuple[Ints, int]:
    """The section ("stretch") of each row, and the number of sections: no tile has rows of two of them."""
    first = tiles[:, 10]
    last = first + tiles[:, 11] * ((tiles[:, 9] >> 8 & 255) - 1)
    begin, end = (np.bincount(x + 1, minlength=n + 1) for x in (first, last))
    cuts = np.cumsum(np.cumsum(begin - end)[:n] == 0)  # no tile is on both sides of such a row's beginning
    return cuts - 1, int(cuts[-1])


# Global rows, whose few tiles have every key, and tiles with few keys, in one launch in the order of their keys: both
# read a key from memory once. (Longformer: separately, global rows would be bound by memory, the others by compute.)


def interleave(
    passes: DevicePasses, layouts: tuple[Layout, ...], step: int, programs: int, dynamic_share: float
) -> tuple[DevicePass, DevicePass, tuple[Layout, ...], WorkSplit] | None:
    """Two passes that write different rows, of which the first is split into pieces that need no test: the first, the
    second with flattened heads (the kernel is compiled for its segments), its layouts, the blocks of both; or None.

    Word 7 of a block is the slot of its piece, over all heads; −1: its tile is not split.
    """
    if not passes.overlap or len(passes.steps) > 2:
        return None
    pieces, others = sorted(passes.steps, key=lambda x: not x.work.split)
    flat, one_head = flatten_heads(others, step, layouts)
    plain = not (pieces.work.ragged or pieces.keep is not None or flat is others)
    if not (plain and pieces.work.split and pieces.work.segments <= others.work.segments <= 2):
        return None
    (b, h, n, _), work = layouts[0].shape, pieces.work
    heads, per_tile = b * h, work.sizes
    table = work.blocks.numpy()
    tile = np.repeat(np.arange(len(per_tile)), per_tile)
    table = table[np.lexsort((table[:, 0], tile))]
    begin = np.flatnonzero(ranks(per_tile) % PIECE == 0)
    size, count = np.diff(begin, append=len(tile)), -(-per_tile // PIECE)
    table[:, 7] = np.repeat(heads * np.arange(len(begin)), size)
    head = table[np.cumsum(per_tile) - per_tile]
    joins = np.zeros((len(per_tile), ITEM), dtype=np.int64)
    joins[:, :5] = np.column_stack([head[:, 10:], head[:, 9] >> 8 & 255, np.cumsum(count) - count, count])

    both = _repeated(table, heads, n)
    both[:, 7] += np.repeat(np.arange(heads), len(table))
    other_blocks = _repeated(others.work.blocks.numpy(), heads, n)
    other_blocks[:, 7] = -1
    size = np.concatenate([np.tile(size, heads), flat.work.sizes])
    both, first = np.concatenate([both, other_blocks]), np.cumsum(size) - size
    row = np.where(both[first, 7] < 0, both[first, 10], both[first, 0])  # of a tile, of the keys of a piece
    order = np.argsort(row, kind="stable")
    blocks, device = torch.from_numpy(both[indices_of_blocks(size, order)]), work.masks.words.device
    interleaved = replace(others.work, blocks=blocks, sizes=size[order], ordered=True)
    cut = split_work(interleaved, 1, programs, dynamic_share=dynamic_share)
    slot, device_joins = cut.blocks[:, 7].contiguous(), torch.from_numpy(joins.astype(np.int32)).to(device)
    return pieces, flat, one_head, replace(cut, slot=slot, joins=device_joins, slots=len(begin))


def flatten_heads(
    one_pass: DevicePass, step: int, layouts: tuple[Layout, ...]
) -> tuple[DevicePass, tuple[Layout, ...]]:
    """All heads as one long sequence, if the memory layout allows it; otherwise the pass and layouts unchanged.

    With 16 heads and 396 programs a head has 24 programs, and 12 are idle. Flattened, every program has work and the
    long tiles of all heads start first. Row r of head h becomes row h·n + r.
    If programs share tiles, heads stay apart, so that the programs of a head read the same rows at the same time.
    step: between the positions of two members of tiles.
    """
    b, h, n, _ = layouts[0].shape
    heads, work = b * h, one_pass.work
    if heads == 1 or work.split or work.rows or heads * len(work.blocks) > MAX_BLOCKS:
        return one_pass, layouts
    flat = as_one_head(layouts)
    # The members whose results count must be the same when all shift by n, and a kernel computes their positions in
    # 32 bits; the masks do not depend on positions.
    period = 1 if one_pass.keep is None else one_pass.keep.shift_period
    if flat is None or period == 0 or step * n % period or (period > 1 and step * n * heads >= 2**31):
        return one_pass, layouts
    of_all = replace(work, sizes=np.tile(work.sizes, heads), heads=heads, distance=n)
    return replace(one_pass, work=of_all), flat


def _repeated(table: NDArray[Any], heads: int, distance: int) -> NDArray[Any]:
    """The blocks of all heads, `distance` positions from one to the next."""
    blocks = np.tile(table, (heads, 1))
    blocks[:, [0, 3, 6, 10]] += distance * np.repeat(np.arange(heads), len(table))[:, None].astype(np.int32)
    return blocks

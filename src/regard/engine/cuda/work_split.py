"""The blocks of a schedule, assigned to the programs of the Hopper kernels.

Whole tiles, where that balances the load. By keys, a tile that very many queries may attend to is cut into pieces, at
the same rows as other tiles; the results of its pieces are added in order afterwards.
"""

import heapq
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...pattern import Pattern
from ...progression import Ints
from .call import Layout, exceeds_int32
from .schedule import BEGINS, ITEM, DevicePass, Schedule, repeated

MAX_BLOCKS = 1 << 18  # of one table: 12 MiB
MAX_POSITION = 1 << 28  # the kernels take larger positions for "no bound"


@dataclass(frozen=True, eq=False)
class WorkSplit:
    """The blocks of a pass, assigned to programs. A tile that several programs share has a slot for each."""

    blocks: (
        Tensor  # (x, 12), as visited; of grouped heads, the number of the query head × 65536 joins the marks
    )
    chunks: Tensor  # (k, 16): first block and end of each program's run; from the fifth word on, that block
    slot: Tensor  # (x,): where the results of a block's tile go; −1: the tile is not split
    joins: Tensor  # (y, 8), as in Schedule
    slots: int


def split_work(
    work: Schedule,
    heads: int,
    programs: int,
    group: int = 1,
    multiple: int = 1,
    dynamic_share: float = 0.0,
    backwards: bool = False,
) -> WorkSplit:
    """Assign the blocks to the programs of a head; `programs` of all heads run at a time.

    A tile, or a piece of it where tiles are split, is one run of blocks, repeated for each query head of a group.
    multiple: empty blocks are added until the length of each program's run is a multiple of it.
    dynamic_share: the part of the work that is kept for programs that finish early, `multiple` tiles at a time.
    backwards: tiles from the last to the first, so that rows still in the cache are read first.
    """
    per_tile, split = np.diff(work.ends, prepend=0), work.slots > 0
    size, table = group * per_tile, work.blocks.cpu().numpy()
    k = min(max(programs // heads, 1), int(size.sum()) if split else len(size))
    if split:
        table = table[np.lexsort((table[:, 0], np.repeat(np.arange(len(per_tile)), per_tile)))]
        tile, begin, end, program_of = _aligned_pieces(
            table[:, 0].astype(np.int64), work.ends, per_tile, k, group
        ).T
    else:
        assign = _in_rounds if (table[:, 11] > 1).any() else _by_length
        program_of = assign(size, k, dynamic_share, multiple, backwards)
        tile, begin, end, program_of = _whole_tiles(size, program_of, backwards).T
    length = end - begin
    starts, total = np.cumsum(length) - length, int(length.sum())
    parted = np.bincount(tile, minlength=len(size))[tile] > 1
    in_tile = np.lexsort((begin, tile))
    slot = np.full(len(tile), -1)
    slot[in_tile] = np.where(parted[in_tile], np.cumsum(parted[in_tile]) - 1, -1)

    of = np.repeat(np.arange(len(tile)), length)
    nth = begin[of] + np.arange(total) - starts[of]
    blocks = table[(work.ends - per_tile)[tile[of]] + nth % per_tile[tile[of]]]
    blocks[:, 9] = (blocks[:, 9] & ~BEGINS) + 65536 * (nth // per_tile[tile[of]])
    blocks[starts, 9] |= BEGINS
    heads_of = in_tile[parted[in_tile] & (begin[in_tile] == 0)]
    head, pieces = blocks[starts[heads_of]], np.bincount(tile)[tile[heads_of]]
    padding = np.zeros((len(heads_of), ITEM - 5), dtype=np.int64)
    joins = np.column_stack([head[:, 10:], head[:, 9] >> 8 & 255, slot[heads_of], pieces, padding])

    def move(x: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(x, dtype=np.int32)).to(work.blocks.device)

    each = slot[of]
    cuts = starts[np.flatnonzero(np.diff(program_of, prepend=-1))]
    ends = np.append(cuts[1:], total)
    more = (cuts - ends) % multiple
    repeats = np.ones(total, dtype=np.int64)
    repeats[ends - 1] += more  # the last block of a run, repeated without members
    blocks, each, ends = np.repeat(blocks, repeats, axis=0), np.repeat(each, repeats), ends + np.cumsum(more)
    empty = np.concatenate([np.arange(e - x, e) for e, x in zip(ends, more)])
    blocks[empty, 8], blocks[empty, 9] = 0, blocks[empty, 9] & ~255 | 1
    begins = np.append(0, ends[:-1])
    runs = np.column_stack([begins, ends, begins, ends, blocks[begins]])
    return WorkSplit(move(blocks), move(runs), move(each), move(joins), int(parted.sum()))


def _whole_tiles(size: Ints, program_of: Ints, backwards: bool) -> Ints:
    """Whole tiles in the order of execution, program by program: tile, 0, its size, its program.

    Each program runs its tiles in order, or backwards, so that tiles that run at the same time are of one head and
    share keys in the cache.
    """
    order = np.arange(len(size))[:: -1 if backwards else 1]
    order = order[np.argsort(program_of[order], kind="stable")]
    return np.column_stack([order, np.zeros_like(order), size[order], program_of[order]])


def _by_length(size: Ints, programs: int, dynamic_share: float, tiles_each: int, backwards: bool) -> Ints:
    """The program of each tile: the longest are assigned first, each to the program with the least work; of equal
    ones, program p of k takes p, p + k, …. Finishing a tile counts as a block. The shortest are the dynamic share."""
    load = [(0, p) for p in range(programs)]
    program_of = np.zeros(len(size), dtype=np.int64)
    by_length = np.argsort(-size, kind="stable")
    assigned = np.searchsorted(np.cumsum(size[by_length] + 1), (1 - dynamic_share) * (size + 1).sum())
    assigned = min(max(int(assigned) + 1, programs), len(size))
    for tile in by_length[:assigned]:
        work, program = load[0]
        program_of[tile] = program
        heapq.heapreplace(load, (work + int(size[tile]) + 1, program))
    program_of[by_length[assigned:]] = programs + np.arange(len(size) - assigned) // tiles_each
    return program_of


def _in_rounds(size: Ints, programs: int, dynamic_share: float, tiles_each: int, backwards: bool) -> Ints:
    """The same for tiles of residue classes: those of one class share all their keys, so they run at the same time.

    Of each round of as many tiles as programs, the longest goes to the program with the least work. The last are the
    dynamic share.
    """
    order = np.arange(len(size))[:: -1 if backwards else 1]
    program_of, load = np.zeros(len(size), dtype=np.int64), np.zeros(programs, dtype=np.int64)
    assigned = max(int((1 - dynamic_share) * len(size)), min(programs, len(size)))
    for at in range(0, assigned, programs):
        tiles = order[at : min(at + programs, assigned)]
        tiles = tiles[np.argsort(-size[tiles], kind="stable")]
        idle = np.argsort(load, kind="stable")[: len(tiles)]
        program_of[tiles] = idle
        load[idle] += size[tiles] + 1
    program_of[order[assigned:]] = programs + np.arange(len(size) - assigned) // tiles_each
    return program_of


def _aligned_pieces(row: Ints, ends: Ints, per_tile: Ints, programs: int, group: int) -> Ints:
    """Pieces of tiles in the order of execution, program by program: tile, first and end of its blocks, program.

    Tiles are cut at the same rows, in pieces of one program's length, so that programs read the same rows at the same
    time; shorter pieces are assigned to the remaining programs, one after the other.
    row: where the blocks of each tile begin, in order.
    """
    share = -(-group * int(per_tile.sum()) // programs)
    apart = int(row.max()) + 1
    keys = [np.add.outer(np.arange(group) * apart, row[e - x : e]).ravel() for e, x in zip(ends, per_tile)]
    longest = keys[int(np.argmax(per_tile))]
    candidates = [
        _cut_at(keys, longest[at::share], share) for at in {0, len(longest) % share}
    ]  # from either end
    tile, begin, end = max(candidates, key=lambda x: int((x[2] - x[1] >= share).sum()))
    whole = end - begin >= share
    full = np.column_stack([tile, begin, end, np.cumsum(whole) - 1])[whole]
    tile, begin, end = tile[~whole], begin[~whole], end[~whole]
    left, stop = programs - len(full), np.cumsum(end - begin)
    if not len(tile):
        return full
    cut = np.union1d(stop - (end - begin), np.arange(left) * stop[-1] // left)
    of = np.searchsorted(stop, cut, side="right")
    size = np.diff(cut, append=stop[-1])
    first = cut - (stop - end)[of]
    program_of = len(full) + np.searchsorted(np.arange(left) * stop[-1] // left, cut, side="right") - 1
    return np.concatenate([full, np.column_stack([tile[of], first, first + size, program_of])])


def _cut_at(keys: list[Ints], cuts: Ints, max_length: int) -> tuple[Ints, Ints, Ints]:
    """The pieces of each tile between the cuts: tile, first and end. keys: of the blocks of each tile, in order."""
    at = [np.unique(np.concatenate([[0], np.searchsorted(x, cuts), [len(x)]])) for x in keys]
    at = [np.concatenate([np.arange(*x, max_length) for x in pairwise(y)] + [y[-1:]]) for y in at]
    tile = np.repeat(np.arange(len(keys)), [len(x) - 1 for x in at])
    return tile, np.concatenate([x[:-1] for x in at]), np.concatenate([x[1:] for x in at])


def flatten_heads(
    one: DevicePass, step: int, layouts: tuple[Layout, ...]
) -> tuple[DevicePass, tuple[Layout, ...]]:
    """All heads as one long sequence, where mask and memory allow it; else the pass and layouts as they are.

    With 16 heads and 396 programs a head has 24 programs, and 12 are idle. Flattened, every program has work and the
    long tiles of all heads start first. Row r of head h becomes row h·n + r, and so does its position in the mask.
    step: between the positions of two queries; those of two keys are 1 apart, so it must be 1.
    """
    b, h, n, d = layouts[0].shape
    times = b * h
    if times == 1 or step != 1 or times * len(one.work.blocks) > MAX_BLOCKS or times * n > MAX_POSITION:
        return one, layouts
    words = [p for p in (one.work.pattern, one.keep) if p is not None]
    long = tuple(x._replace(shape=(1, 1, times * n, d)) for x in layouts)
    contiguous_heads = all(x.shape == layouts[0].shape and _heads_are_contiguous(x) for x in layouts)
    if not contiguous_heads or exceeds_int32(*long) or not all(is_shift_invariant(p, n) for p in words):
        return one, layouts
    return replace(one, work=repeated(one.work, times, n)), long


def _heads_are_contiguous(x: Layout) -> bool:
    b, h, n, _ = x.shape
    return (h == 1 or x.stride[1] == n * x.stride[2]) and (b == 1 or x.stride[0] == h * n * x.stride[2])


def is_shift_invariant(pattern: Pattern, n: int) -> bool:
    """Whether the pattern allows the same pairs when i and j both shift by n."""
    return pattern.shift_period > 0 and n % pattern.shift_period == 0

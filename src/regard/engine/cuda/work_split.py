"""The blocks of a schedule, dealt to the programs of the streaming kernels.

Whole tiles where that is even enough. By keys, a tile that very many queries see is cut in pieces, at the same
rows as the others, whose results are added in order afterwards.
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
from .schedule import BEGINS, ITEM, DevicePasses, Schedule, repeated

MOST = 1 << 18  # blocks in one table: 12 MiB
MAX_POSITION = 1 << 28  # positions that the kernels tell apart from "no bound"


@dataclass(frozen=True, eq=False)
class WorkSplit:
    """The blocks of a pass, dealt to programs. A tile that several programs share has a slot for each."""

    blocks: (
        Tensor  # (x, 12), as visited; of grouped heads, the number of the query head × 65536 joins the marks
    )
    chunks: Tensor  # (k, 16): first block and end of each program's run; from the fifth word on, that block
    slot: Tensor  # (x,): where the results of a block's tile go; −1: they are whole
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
    """Deal the blocks to the programs of a head: `programs` of all heads run at a time.

    A tile, or a piece of it where tiles are to be split, is run through without a pause, for each of a group.
    Blocks of no member are added until the length of each run is such a multiple.
    late: the share of the work that is left for whichever programs are through first, `multiple` tiles at a time.
    backwards: whole tiles from the last to the first, so that what was read last by the kernel before is read first.
    """
    once, split = np.diff(work.ends, prepend=0), work.slots > 0
    size, table = group * once, work.blocks.cpu().numpy()
    k = min(max(programs // heads, 1), int(size.sum()) if split else len(size))
    if split:
        table = table[np.lexsort((table[:, 0], np.repeat(np.arange(len(once)), once)))]
        tile, begin, end, whose = _aligned_pieces(table[:, 0].astype(np.int64), work.ends, once, k, group).T
    else:
        tile, begin, end, whose = _whole_tiles(size, k, dynamic_share, multiple, backwards).T
    length = end - begin
    starts, total = np.cumsum(length) - length, int(length.sum())
    parted = np.bincount(tile, minlength=len(size))[tile] > 1
    in_tile = np.lexsort((begin, tile))
    slot = np.full(len(tile), -1)
    slot[in_tile] = np.where(parted[in_tile], np.cumsum(parted[in_tile]) - 1, -1)

    of = np.repeat(np.arange(len(tile)), length)
    nth = begin[of] + np.arange(total) - starts[of]
    blocks = table[(work.ends - once)[tile[of]] + nth % once[tile[of]]]
    blocks[:, 9] = (blocks[:, 9] & ~BEGINS) + 65536 * (nth // once[tile[of]])
    blocks[starts, 9] |= BEGINS
    heads_of = in_tile[parted[in_tile] & (begin[in_tile] == 0)]
    head, pieces = blocks[starts[heads_of]], np.bincount(tile)[tile[heads_of]]
    nothing = np.zeros((len(heads_of), ITEM - 5), dtype=np.int64)
    joins = np.column_stack([head[:, 10:], head[:, 9] >> 8 & 255, slot[heads_of], pieces, nothing])

    def move(x: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(x, dtype=np.int32)).to(work.blocks.device)

    each = slot[of]
    cuts = starts[np.flatnonzero(np.diff(whose, prepend=-1))]
    ends = np.append(cuts[1:], total)
    more = (cuts - ends) % multiple
    again = np.ones(total, dtype=np.int64)
    again[ends - 1] += more  # the last block of a run once more, with nobody in it
    blocks, each, ends = np.repeat(blocks, again, axis=0), np.repeat(each, again), ends + np.cumsum(more)
    empty = np.concatenate([np.arange(e - x, e) for e, x in zip(ends, more)])
    blocks[empty, 8], blocks[empty, 9] = 0, blocks[empty, 9] & ~255 | 1
    begins = np.append(0, ends[:-1])
    runs = np.column_stack([begins, ends, begins, ends, blocks[begins]])
    return WorkSplit(move(blocks), move(runs), move(each), move(joins), int(parted.sum()))


def _whole_tiles(size: Ints, programs: int, dynamic_share: float, few: int, backwards: bool) -> Ints:
    """Whole tiles in the order they are run in, program by program: tile, 0, its size, whose it is.

    The longest are dealt first, each to the program with the least to do; of equal ones, program p of k takes
    p, p + k …. Each program runs its own in their order, or backwards, so that those that run at one time are of one
    head, and share keys in the cache. Closing a tile counts as a block. The shortest are left for late programs of a
    few tiles each.
    """
    load = [(0, p) for p in range(programs)]
    whose = np.zeros(len(size), dtype=np.int64)
    by_length = np.argsort(-size, kind="stable")
    dealt = np.searchsorted(np.cumsum(size[by_length] + 1), (1 - dynamic_share) * (size + 1).sum())
    dealt = min(max(int(dealt) + 1, programs), len(size))
    for tile in by_length[:dealt]:
        work, program = load[0]
        whose[tile] = program
        heapq.heapreplace(load, (work + int(size[tile]) + 1, program))
    whose[by_length[dealt:]] = programs + np.arange(len(size) - dealt) // few
    order = np.arange(len(size))[:: -1 if backwards else 1]
    order = order[np.argsort(whose[order], kind="stable")]
    return np.column_stack([order, np.zeros_like(order), size[order], whose[order]])


def _aligned_pieces(row: Ints, ends: Ints, once: Ints, programs: int, group: int) -> Ints:
    """Pieces of tiles in the order they are run in, program by program: tile, first and end of its blocks, whose.

    Tiles are cut at the same rows, in pieces of one program's length, so that programs read the same rows at the same
    time; what is shorter than that, one after the other, is dealt to the programs that are left.
    row: where the blocks of each tile begin, in order.
    """
    share = -(-group * int(once.sum()) // programs)
    apart = int(row.max()) + 1
    keys = [np.add.outer(np.arange(group) * apart, row[e - x : e]).ravel() for e, x in zip(ends, once)]
    longest = keys[int(np.argmax(once))]
    ways = [_pieces(keys, longest[at::share], share) for at in {0, len(longest) % share}]  # from either end
    tile, begin, end = max(ways, key=lambda x: int((x[2] - x[1] >= share).sum()))
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
    whose = len(full) + np.searchsorted(np.arange(left) * stop[-1] // left, cut, side="right") - 1
    return np.concatenate([full, np.column_stack([tile[of], first, first + size, whose])])


def _pieces(keys: list[Ints], cuts: Ints, most: int) -> tuple[Ints, Ints, Ints]:
    """Of each tile, whose blocks have these keys in order, the pieces between the cuts: tile, first and end."""
    at = [np.unique(np.concatenate([[0], np.searchsorted(x, cuts), [len(x)]])) for x in keys]
    at = [np.concatenate([np.arange(*x, most) for x in pairwise(y)] + [y[-1:]]) for y in at]
    tile = np.repeat(np.arange(len(keys)), [len(x) - 1 for x in at])
    return tile, np.concatenate([x[:-1] for x in at]), np.concatenate([x[1:] for x in at])


def flatten_heads(
    way: DevicePasses, step: int, given: tuple[Layout, ...]
) -> tuple[DevicePasses, tuple[Layout, ...]]:
    """The route and the layouts of all heads as one, where that can be; else as they are.

    step: between the positions of two queries; those of two keys are 1 apart, so it must be 1.
    """
    b, h, n, d = given[0].shape
    times = b * h
    size = times * sum(len(one.work.blocks) for one in way.steps)
    if times == 1 or step != 1 or size > MOST or times * n > MAX_POSITION:
        return way, given
    words = [p for one in way.steps for p in (one.work.pattern, one.keep_pattern) if p is not None]
    long = tuple(x._replace(shape=(1, 1, times * n, d)) for x in given)
    alike = all(x.shape == given[0].shape and _heads_are_contiguous(x) for x in given)
    if not alike or exceeds_int32(*long) or not all(is_shift_invariant(p, n) for p in words):
        return way, given
    return replace(
        way, steps=tuple(replace(one, work=repeated(one.work, times, n)) for one in way.steps)
    ), long


def _heads_are_contiguous(x: Layout) -> bool:
    b, h, n, _ = x.shape
    return (h == 1 or x.stride[1] == n * x.stride[2]) and (b == 1 or x.stride[0] == h * n * x.stride[2])


def is_shift_invariant(pattern: Pattern, n: int) -> bool:
    """Whether the pattern allows the same pairs when i and j both move by n."""
    return pattern.shift_period > 0 and n % pattern.shift_period == 0

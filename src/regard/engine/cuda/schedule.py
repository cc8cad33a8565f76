"""A pass of a plan, cut into blocks of exactly B keys, as a kernel reads it.

The progressions of a tile are cut every B keys; the remainders are concatenated and cut again, so that a block may
hold keys of up to three progressions and only the last block of a tile can have empty columns. Full blocks (B keys
that every query of the tile may attend to) come first and need no mask; all others are masked. A tile with very many
blocks is cut into items that write partial results, which are added in order afterwards: no atomics, the same bits
every time.

Roles swap for a transposed plan: tiles are of keys, blocks hold query rows.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import and_
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...pattern import Pattern, Run, classify
from ...pattern.clauses import conjuncts, narrowed, without_certain_words
from ...progression import Ints, distances, ranks
from ..call import Place
from ..plan import Pass, plan
from .call import Config
from .mask import Masks

SEGMENTS = 3  # progressions a block may hold; its row in `blocks` is a, b | c, a, b | c, a, b | end
WIDTH = 12  # int32 words per block: those, then marks + 256 × count, first and step of its tile
TESTED, BEGINS = 1, 8  # marks of a block: it needs a mask; it is the first one of its tile
ITEM = 8  # int32 words per item; 7 are used
FULL, RAGGED, EMPTY = 0, 1, 2  # kinds of blocks
MIN_SPLIT = 16  # blocks; shorter tiles are never split
TARGET_ITEMS = 64  # items per head that keep a GPU busy: a tile with more blocks than that share is split


@dataclass(frozen=True, eq=False)
class Schedule:
    """Device arrays of one pass. Column c of a block holds a + b·c of the last segment that begins at or before c."""

    pattern: Pattern  # what is to be tested in a masked block
    items: Tensor  # (w, 8): first, step, count of the tile; first block, first masked block, end; partial slot or −1
    blocks: Tensor  # (x, 12)
    joins: Tensor  # (y, 8): first, step, count of a split tile; its first slot, its number of slots
    segments: int  # the largest number in any block
    ragged: bool  # some block needs a mask
    slots: int
    split: bool  # some tile is split


@dataclass(frozen=True, eq=False)
class HopperSchedule:
    """The blocks of one pass for the Hopper kernels, which work_split.py assigns to programs."""

    blocks: Tensor  # as in Schedule, but on the host, to be put in order
    sizes: Ints  # the number of blocks of each tile
    masks: Masks
    segments: int = 1
    ragged: bool = True
    split: bool = False  # programs share tiles
    ordered: bool = False  # tiles of several passes, in the order in which they run (work_split.py)
    chained: bool = False  # … and wait for one another
    rows: int = 0  # of documents: how many batch rows have tiles of their own, 1 if all have the same
    row: Any = None  # … and the row of each tile
    # So many heads have the same blocks, which are given once; sizes are of the tiles of one after the other.
    heads: int = 1
    distance: int = 0  # positions from one head to the next


class Sides(NamedTuple):
    """The positions of the queries, and whether tiles are of keys."""

    start: int
    step: int
    by_keys: bool

    def runs(self, tiles: Ints, parts: Ints) -> tuple[Run, Run]:
        """The positions of queries and those of keys; of each, (x, 3): first, step, count."""
        rows, keys = (parts, tiles) if self.by_keys else (tiles, parts)
        first, hop, count = rows.T
        return Run(self.start + self.step * first, self.step * hop, count), Run(*keys.T)


class Blocks(NamedTuple):
    """The blocks of a pass, on the host."""

    pattern: Pattern  # what is to be tested in a masked block
    tiles: Ints  # (t, 3): first, step, count
    table: Ints  # (x, 12), tile by tile; of each the full blocks come first
    owner: Ints  # (x,): the tile of each block
    tested: NDArray[np.bool_]  # (x,): those that need a mask
    segments: int  # the largest number in any block


def blocks_of(source: Pass, block: int, sides: Sides) -> Blocks:
    """Cut the parts of each tile into blocks; tiles that turn out to have no allowed pair are left out."""
    tile = np.repeat(np.arange(len(source.tiles)), np.diff(source.offsets))
    single, remainders = _cut_single(*_merged_parts(tile, source.parts[:, :3]), block)
    concatenated = _cut_concatenated(remainders[:, 0], remainders[:, 1:], block)
    concatenated[:, 1] += 1 << 40  # after the blocks of `single`
    segments = np.concatenate([single, concatenated])
    kind = _kinds(source, segments, block, sides)
    order = np.argsort(2 * segments[:, 0] + kind, kind="stable")  # tile, kind; blocks stay in order
    order = order[kind[order] != EMPTY]
    segments, kind = segments[order], kind[order]
    runs = sides.runs(source.tiles[tile], source.parts[:, :3])
    pattern = narrowed(without_certain_words(source.pattern, *runs))
    used = np.bincount(segments[:, 0], minlength=len(source.tiles)) > 0
    segments[:, 0] = (np.cumsum(used) - 1)[segments[:, 0]]
    table, start, max_segments = _table(segments)
    owner, tested, tiles = segments[start, 0], kind[start] == RAGGED, source.tiles[used]
    table[:, 9] = TESTED * tested + BEGINS * _differs_from_previous(owner[:, None], 1)
    table[:, 9] += 256 * tiles[owner, 2]
    table[:, 10:] = tiles[owner, :2]
    return Blocks(pattern, tiles, table, owner, tested, max_segments)


def schedule(blocks: Blocks, device: torch.device) -> Schedule:
    """With items ordered by length, longest first."""
    longest = max(MIN_SPLIT, -(-len(blocks.table) // TARGET_ITEMS))
    items, joins = _items(blocks, longest)

    def padded(rows: Ints) -> Ints:
        """With one row at least: a kernel is given a table."""
        result = np.zeros((max(len(rows), 1), ITEM), dtype=np.int64)
        result[: len(rows), : rows.shape[1]] = rows
        return result

    of_items, of_blocks, of_joins = to_device((padded(items), blocks.table, padded(joins)), device)
    return Schedule(
        pattern=blocks.pattern,
        items=of_items[: len(items)],
        blocks=of_blocks,
        joins=of_joins[: len(joins)],
        segments=blocks.segments,
        ragged=bool(blocks.tested.any()),
        slots=int(joins[:, 4].sum()),
        split=len(joins) > 0,
    )


def to_device(tables: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Tables of 32-bit integers, by one copy. Their rows have multiples of 16 bytes, so each begins at such a one."""
    flat = np.concatenate([x.ravel() for x in tables], dtype=np.int32, casting="unsafe")
    parts = torch.from_numpy(flat).to(device).split([x.size for x in tables])
    return [part.view(x.shape) for part, x in zip(parts, tables)]


def _kinds(source: Pass, segments: Ints, block: int, sides: Sides) -> Ints:
    """FULL, RAGGED or EMPTY for the block of each segment."""
    outcome = classify(source.pattern, *sides.runs(source.tiles[segments[:, 0]], segments[:, 3:]))
    first = np.flatnonzero(_differs_from_previous(segments, 2))
    count = np.add.reduceat(segments[:, 5], first)
    all_allowed = np.logical_and.reduceat(outcome.all, first) & (count == block)
    none_allowed = np.logical_and.reduceat(outcome.none, first)
    kind = np.where(all_allowed, FULL, np.where(none_allowed, EMPTY, RAGGED))
    return np.repeat(kind, distances(first, len(segments)))


def indices_of_blocks(sizes: Ints, tiles: Ints) -> Ints:
    """Where the blocks of these tiles are in a table of all blocks; sizes: the number of blocks of each tile."""
    counts = sizes[tiles]
    return np.arange(counts.sum()) + np.repeat(
        (np.cumsum(sizes) - sizes)[tiles] - (np.cumsum(counts) - counts), counts
    )


def _differs_from_previous(rows: Ints, columns: int) -> NDArray[np.bool_]:
    """True in each row whose first columns differ from those of the row before, and in the first one."""
    result = np.ones(len(rows), dtype=bool)
    np.any(rows[1:, :columns] != rows[:-1, :columns], axis=1, out=result[1:])
    return result


def _merged_parts(tile: Ints, parts: Ints) -> tuple[Ints, Ints]:
    """The parts of each tile, by key; a part that continues the previous one is merged with it."""
    order = np.lexsort((parts[:, 0], parts[:, 0] % parts[:, 1], parts[:, 1], tile))
    tile, (first, step, count) = tile[order], parts[order].T
    begins = _differs_from_previous(np.column_stack([tile, step]), 2)
    begins[1:] |= first[1:] != (first + step * count)[:-1]
    begin = np.flatnonzero(begins)
    return tile[begin], np.column_stack([first[begin], step[begin], np.add.reduceat(count, begin)])


def _cut_concatenated(tile: Ints, parts: Ints, block: int) -> Ints:
    """Segments (tile, block of the tile, first column, first, step, count) of concatenated parts, tile by tile."""
    counts = parts[:, 2]
    if not len(tile):
        return np.zeros((0, 6), dtype=np.int64)
    first_parts = np.flatnonzero(_differs_from_previous(tile[:, None], 1))  # of each tile
    total = np.add.reduceat(counts, first_parts)
    columns = -(-total // block) * block
    parts_of_tile, within = distances(first_parts, len(tile)), np.cumsum(counts) - counts
    base = np.repeat(np.cumsum(columns) - columns, parts_of_tile)
    within -= np.repeat(within[first_parts], parts_of_tile)
    begin = base + within  # where each part begins on one long line on which every block is aligned

    block_starts = np.arange(0, int(columns.sum()), block)
    column = np.concatenate([begin, block_starts])
    order = np.argsort(column, kind="stable")  # two sorted runs: one merge
    part = np.cumsum(order < len(begin)) - 1
    column = column[order]
    final = np.append(column[1:] != column[:-1], True)
    column, part = column[final], part[final]
    end = begin + counts
    inside = column < end[part]  # not in the empty columns after the last part of a tile
    column, part = column[inside], part[inside]
    count = np.minimum(end[part], (column // block + 1) * block) - column
    first = parts[part, 0] + parts[part, 1] * (column - begin[part])
    of_tile = (column - base[part]) // block
    segments = np.column_stack([tile[part], of_tile, column % block, first, parts[part, 1], count])
    return _at_most_three(segments, block)


def _at_most_three(segments: Ints, block: int) -> Ints:
    """Renumber blocks so that none holds more than SEGMENTS segments."""
    new = _differs_from_previous(segments, 2)
    rank = np.arange(len(segments)) - np.maximum.accumulate(np.where(new, np.arange(len(segments)), 0))
    overfull = (rank % SEGMENTS == 0) & (rank > 0)
    if not overfull.any():
        return segments
    result = segments.copy()
    result[:, 1] = segments[:, 1] * block + rank // SEGMENTS  # any increasing number will do
    start = np.maximum.accumulate(np.where(new | overfull, np.arange(len(segments)), 0))
    result[:, 2] -= segments[start, 2]
    return result


def _cut_single(tile: Ints, parts: Ints, block: int) -> tuple[Ints, Ints]:
    """Segments of the blocks that one part fills, and the remainders (tile, first, step, count), by tile and key.

    A window is cut from its first key on, so that a bound cuts two of its blocks and all others are full.
    """
    pieces = -(-parts[:, 2] // block)
    part, nth = np.repeat(np.arange(len(parts)), pieces), block * ranks(pieces)
    first, step, count = parts[part].T
    segments = np.zeros((len(part), 6), dtype=np.int64)
    segments[:, 0], segments[:, 1] = tile[part], np.arange(len(part))
    segments[:, 3], segments[:, 4] = first + step * nth, step
    segments[:, 5] = np.minimum(count - nth, block)
    remainders = segments[segments[:, 5] < block][:, [0, 3, 4, 5]]
    return segments[segments[:, 5] == block], remainders[np.lexsort((remainders[:, 1], remainders[:, 0]))]


def _table(segments: Ints) -> tuple[Ints, Ints, int]:
    """One row per block (see SEGMENTS), the first segment of each, and the largest number of segments."""
    place, first, step, count = segments[:, 2:].T
    new = _differs_from_previous(segments, 2)
    start = np.flatnonzero(new)
    rank = ranks(distances(start, len(segments)))
    block = np.cumsum(new) - 1
    table = np.zeros((len(start), WIDTH), dtype=np.int64)
    table[:, 2] = table[:, 5] = np.iinfo(np.int32).max  # a segment that never begins
    table[block, 3 * rank] = first - step * place
    table[block, 3 * rank + 1] = step
    later = np.flatnonzero(rank)
    table[block[later], 3 * rank[later] - 1] = place[later]
    table[:, 8] = np.add.reduceat(count, start)
    return table, start, int(rank.max(initial=0)) + 1


def _items(blocks: Blocks, longest: int) -> tuple[Ints, Ints]:
    """Items (tile, block range, slot), longest first, and the joins of split tiles."""
    tiles, owner = blocks.tiles, blocks.owner
    end = np.cumsum(np.bincount(owner, minlength=len(tiles)))
    begin = np.append(0, end[:-1])
    masked = end - np.bincount(owner[blocks.tested], minlength=len(tiles))
    pieces = np.maximum(-(-(end - begin) // longest), 1)
    tile = np.repeat(np.arange(len(tiles)), pieces)
    nth = ranks(pieces)
    length = (end - begin)[tile]
    lo = begin[tile] + length * nth // pieces[tile]
    hi = begin[tile] + length * (nth + 1) // pieces[tile]
    split = pieces[tile] > 1
    slot = np.where(split, np.cumsum(split) - 1, -1)
    items = np.column_stack([tiles[tile], lo, np.clip(masked[tile], lo, hi), hi, slot])
    split_tiles = np.flatnonzero(pieces > 1)
    first_slot = slot[np.searchsorted(tile, split_tiles)]
    joins = np.column_stack([tiles[split_tiles], first_slot, pieces[split_tiles]])
    return items[np.argsort(lo - hi, kind="stable")], joins


@dataclass(frozen=True, eq=False)
class DevicePass:
    """One pass, ready to launch."""

    work: Any  # Schedule, or HopperSchedule
    keep: Pattern | None  # the tile members whose results count: it reads members only; None: all
    accumulates: bool  # some of its results are added to those of an earlier pass
    covered: bool  # all of them are


@dataclass(frozen=True, eq=False)
class DevicePasses:
    """The passes of one direction."""

    steps: tuple[DevicePass, ...]
    covers: bool  # every member is written before it is read, so outputs need no initial value

    @property
    def accumulate(self) -> bool:
        return any(step.accumulates for step in self.steps)

    @property
    def overlap(self) -> bool:
        """Whether several passes may run at the same time: each writes different rows, at most one writes parts."""
        split = sum(step.work.split for step in self.steps)
        return len(self.steps) > 1 and not self.accumulate and split <= 1


@lru_cache(maxsize=256)
def device_passes(place: Place, config: Config, by_keys: bool, device: torch.device) -> DevicePasses:
    """The passes of the plan, or of the transposed plan (by_keys), on a device."""
    return scheduled(place, config, by_keys, lambda blocks: schedule(blocks, device))


def scheduled(place: Place, config: Config, by_keys: bool, schedule: Callable[[Blocks], Any]) -> DevicePasses:
    """The passes of the plan, or of the transposed plan (by_keys), each with the schedule of its blocks."""
    _, n, m, start, step = place
    sides = Sides(start, step, by_keys)
    written = np.zeros(m if by_keys else n, dtype=bool)
    steps: list[DevicePass] = []
    for source, keep in _without_own_conditions(place, config.tile, by_keys):
        blocks = blocks_of(source, config.block, sides)
        if not len(blocks.tiles):
            continue
        before = written[members := _written_members(blocks.tiles, keep, sides)]
        steps.append(DevicePass(schedule(blocks), keep, bool(before.any()), bool(before.all())))
        written[members] = True
    covers = bool(written.all()) and all(x.covered or not x.accumulates for x in steps)
    return DevicePasses(tuple(steps), covers)


def _without_own_conditions(place: Place, tile: int, by_keys: bool) -> Iterator[tuple[Pass, Pattern | None]]:
    """The passes of a plan without the conditions on a tile's own members, and those conditions.

    `window(128) - every(64)` by tiles of keys is a window of which every 64th key is computed and discarded:
    otherwise each block would need a mask for a key or two, which costs more than computing those keys.
    """
    for source in plan(*place, tile, by_keys).passes:
        conditions = conjuncts(source.pattern)
        others = [x for x in conditions if (x.reads_query if by_keys else x.reads_key)]
        own_conditions = [x for x in conditions if x not in others]
        if own_conditions and others:
            core = plan(reduce(and_, others), *place[1:], tile, by_keys)
            if len(core.passes) == 1 and core.computed <= 1.1 * source.computed:
                yield core.passes[0], reduce(and_, own_conditions)
                continue
        yield source, None


def _written_members(tiles: Ints, keep: Pattern | None, sides: Sides) -> Ints:
    """The members whose results a pass with these tiles writes."""
    first, hop, count = tiles.T
    place = np.arange(int(count.max(initial=0)))
    members = (first[:, None] + hop[:, None] * place)[place < count[:, None]]
    if keep is None:
        return members
    at = members if sides.by_keys else sides.start + sides.step * members
    return members[keep.allows(at, at)]

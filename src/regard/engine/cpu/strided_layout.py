"""From a pattern to groups of tiles: the plan's tiles that have the same shape and mask, without comparing the masks.

Tiles whose rows and keys advance by a constant are one group if their masks are the same; a shift that keeps every
distance and residue of the pattern keeps the mask. Two kinds of layout come out of a plan: `merged_layouts`, whose
groups are merged by log-sum-exp, and `concatenated_layouts`, where the keys of a tile are in one softmax.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import groupby, pairwise
from math import gcd, lcm

import numpy as np

from ...pattern import Pattern, Relation, every
from ...pattern.parts import NoPlan, relations
from ...progression import FAR
from ..call import has_empty_row
from ..plan import Pass, Plan, plan
from .layout import MAX_CONCATENATED, NARROW, WIDE, Layout, TileGroup

MAX_GROUPS = 1024  # more are not considered if a comb can be a group: that was always faster
MASKED_ROWS = 512  # queries of a tile where every pair is visited
MAX_CONCATENATED_GROUPS = 64  # each is about twenty operations


@lru_cache(maxsize=64)
def layout(
    pattern: Pattern, n: int, m: int, start: int, step: int, narrow: int = NARROW, wide: int = WIDE
) -> Layout:
    """The fastest of the merged layouts of a pattern without data. Without a plan, every pair, masked: a call may be
    chosen before its sizes or offsets are known."""
    candidates: list[Layout] = []
    for tile in (narrow, wide) if n > narrow else (narrow,):
        with suppress(NoPlan):  # there are more narrow tiles, perhaps too many
            candidates += [each for _, each in merged_layouts(pattern, n, m, start, step, tile, wide)]
    if candidates:
        return min(candidates, key=lambda candidate: candidate.nanoseconds())
    firsts = range(0, n, MASKED_ROWS) if m else ()
    of_keys = 0, 0, 1, m, pattern, start, step
    tiles = (TileGroup(1, r, 0, 1, min(MASKED_ROWS, n - r), *of_keys) for r in firsts)
    return Layout(n, m, start, step, tuple(tiles))


@lru_cache(maxsize=8)  # read twice in one choice: by `layout` and by `concatenated_layouts`
def merged_layouts(
    pattern: Pattern, n: int, m: int, start: int, step: int, tile: int, wide: int
) -> tuple[tuple[Plan, Layout], ...]:
    """Tiles of the pattern as it is, or of what a comb leaves, beside that comb; each with the plan of its tiles."""
    complete = plan(pattern, n, m, start, step, tile)
    layouts = []
    for comb in _combs(complete) if n > tile else ():  # one tile reads a comb at once anyway
        try:
            teeth = plan(pattern & comb, n, m, start, step, wide)
            remaining = plan(pattern - comb, n, m, start, step, tile)
        except NoPlan:
            continue
        layouts.append((remaining, from_plans(teeth, remaining)))
    least_groups = sum(len(np.unique(tile_pass.parts[:, 1:], axis=0)) for tile_pass in complete.passes)
    if not layouts or least_groups <= MAX_GROUPS:
        layouts.insert(0, (complete, from_plans(complete)))
    return tuple(layouts)


def from_plans(*plans: Plan) -> Layout:
    """Plans of disjoint sets of pairs as one layout."""
    first, passes = plans[0], [tile_pass for planned in plans for tile_pass in planned.passes]
    groups = [group for tile_pass in passes for group in _groups(tile_pass, first.start, first.step)]
    return Layout(first.n, first.m, first.start, first.step, tuple(with_joined_rows(groups)))


def with_joined_rows(groups: list[TileGroup]) -> Iterator[TileGroup]:
    """Rows that have the same keys in full and follow one another, as one tile: the last tile may be shorter."""
    same_keys: dict[tuple[int, ...], list[TileGroup]] = defaultdict(list)
    for group in groups:
        if group.mergeable:
            tile = group.as_one()
            same_keys[tile.key, tile.key_step, tile.keys, tile.row_step].append(tile)
        else:
            yield group
    for tiles in same_keys.values():
        current, *later = sorted(tiles, key=lambda tile: tile.row)
        for tile in later:
            if current.row + current.rows * current.row_step == tile.row:
                current = replace(current, rows=current.rows + tile.rows)
            else:
                yield current
                current = tile
        yield current


def _combs(complete: Plan) -> list[every]:
    """Combs (every k-th key) that tiles of neighboring queries see in full: each is one group of its own."""
    combs = set()
    for tile_pass in complete.passes:
        row_step = np.repeat(tile_pass.tiles[:, 1], np.diff(tile_pass.offsets))
        teeth = tile_pass.parts[(tile_pass.parts[:, 3] == 1) & (tile_pass.parts[:, 1] > 1) & (row_step == 1)]
        first, k = teeth[:, 0], teeth[:, 1]
        combs |= set(map(tuple, np.unique(np.column_stack([k, first % k]), axis=0).tolist()))
    return [every(k, offset) for k, offset in sorted(combs)] if len(combs) <= 2 else []


# From the parts of a pass to groups.


def _groups(tile_pass: Pass, start: int, step: int) -> Iterator[TileGroup]:
    by_shape: dict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
    repeated: dict[tuple[int, ...], int] = defaultdict(int)
    for row, row_step, rows, key, key_step, keys, full in _segments(tile_pass):
        shape = (row_step, rows, key_step, keys, full)
        number = repeated[row, *shape]  # parts of one tile never share a group: it writes to each row once
        repeated[row, *shape] += 1
        by_shape[*shape, number].append((row, key))
    for (*sizes, full, _), corners in by_shape.items():
        masked_by = None if full else tile_pass.pattern
        for group in _runs(sorted(corners), sizes, masked_by, start, step):
            # Tiles with a mask are cut into groups whose tiles all have the mask of their first.
            for low, high, cycle in _cycles(group):
                for phase in range(low, low + cycle):
                    yield group.tile(phase, len(range(phase, high, cycle)), cycle)


def _segments(tile_pass: Pass) -> Iterator[tuple[int, ...]]:
    """(row, row step, rows, key, key step, keys, full) of each part; parts that touch are one where that pays."""
    tile_of = np.repeat(np.arange(len(tile_pass.tiles)), np.diff(tile_pass.offsets))
    shapes = defaultdict(set)  # where in each tile full parts of one shape begin
    for t, (key, key_step, keys, full) in zip(tile_of.tolist(), tile_pass.parts.tolist()):
        if full:
            shapes[t, key_step, keys].add(key)
    tiles, parts = tile_pass.tiles.tolist(), tile_pass.parts.tolist()
    for t, (low, high) in enumerate(zip(tile_pass.offsets[:-1].tolist(), tile_pass.offsets[1:].tolist())):
        joined: list[list[int]] = []  # with whether they are fixed
        for key, key_step, keys, full in parts[low:high]:
            # Where a neighboring tile has the same part further on, one mask serves all tiles.
            neighbors = (first for s in (t - 1, t + 1) for first in shapes.get((s, key_step, keys), ()))
            fixed = bool(full) and all(first == key for first in neighbors)
            last = joined[-1] if joined else [0, 0, 0, 0, True]
            if not fixed and not last[4] and last[1] == key_step and last[0] + key_step * last[2] == key:
                last[2:4] = last[2] + keys, last[3] & full
            else:
                joined.append([key, key_step, keys, full, fixed])
        yield from ((*tiles[t], *part[:4]) for part in joined)


def _runs(
    corners: list[tuple[int, int]], sizes: list[int], masked_by: Pattern | None, start: int, step: int
) -> Iterator[TileGroup]:
    """Runs of tiles of these sizes whose first rows and keys, the corners, advance by constants."""
    row_step, rows, key_step, keys = sizes
    shifts = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(corners)]
    low = 0
    while low < len(corners):
        (row, key), high, shift = corners[low], low + 1, (0, 0)
        if low < len(shifts) and shifts[low][1] >= 0:  # a view has no negative stride
            shift = shifts[low]
            while high <= len(shifts) and shifts[high - 1] == shift:
                high += 1
        of_rows, of_keys = (row, shift[0], row_step, rows), (key, shift[1], key_step, keys)
        yield TileGroup(high - low, *of_rows, *of_keys, masked_by, start, step)
        low = high


# Tiles whose masks are the same.


def _cycles(group: TileGroup) -> Iterator[tuple[int, int, int]]:
    """(first, end, cycle): runs of tiles in which tile t has the mask of tile t + cycle."""
    if group.masked_by is None or group.tiles == 1:
        yield 0, group.tiles, 1
        return
    words = list(relations(group.masked_by, by_keys=False).values())
    di, dj = group.step * group.row_shift, group.key_shift
    period = lcm(*(_period(word, di, dj) for word in words))  # 0: no two tiles have the same mask
    cut = _cuts(group, words) if period else range(group.tiles)
    edges = sorted({0, group.tiles, *cut, *(t + 1 for t in cut)})
    for low, high in pairwise(edges):
        yield low, high, min(max(period, 1), high - low)


def _period(word: Relation, di: int, dj: int) -> int:
    """The least p for which a shift by p·(di, dj) changes neither residue nor distance; 0: none does."""
    band = word.near > -FAR or word.far < FAR or word.blocks
    if band and di != dj:
        return 0
    steps = [(word.query_class[0], di), (word.key_class[0], dj), (word.divisor, di - dj)]
    return lcm(*(k // gcd(k, by) for k, by in [*steps, *((size, di) for size in word.blocks)]))


def _cuts(group: TileGroup, words: list[Relation]) -> Sequence[int]:
    """The tiles in which a word with a fixed end has that end between two rows or two keys, or that start there."""
    t = np.arange(group.tiles)
    i = group.start + group.step * (group.row + group.row_shift * t)
    j = group.key + group.key_shift * t
    last_i = i + group.step * group.row_step * (group.rows - 1)
    last_j = j + group.key_step * (group.keys - 1)
    inside = np.zeros(group.tiles, dtype=bool)
    turned = np.zeros(group.tiles, dtype=bool)
    for word in words:
        for end, first, last in ((word.query_below, i, last_i), (word.key_below, j, last_j)):
            inside |= (first < end) & (end <= last)
            turned[1:] |= (first[:-1] < end) != (first[1:] < end)
    return np.flatnonzero(inside | turned).tolist()


# Layouts in which the keys of a tile are concatenated. Under `window(64) | every(64)` a tile has the band that the
# window gives it, which moves from tile to tile, and every 64th key, which all tiles share. Both are progressions, so
# they are read as views.


@lru_cache(maxsize=64)
def concatenated_layouts(
    pattern: Pattern, n: int, m: int, start: int, step: int, rows: int = NARROW, wide: int = WIDE
) -> tuple[Layout, ...]:
    """Of a pattern without data: as it is, or with a comb as a pass of its own; often there are none."""
    if has_empty_row(pattern, n, m, start, step):  # a softmax over no keys has no value
        return ()
    try:
        merged = merged_layouts(pattern, n, m, start, step, rows, wide)
    except NoPlan:
        return ()
    candidates = [(layout, _concatenated(layout, moving, rows)) for moving, layout in merged]
    return tuple(replace(layout, groups=groups) for layout, groups in candidates if groups)


def _concatenated(merged: Layout, moving: Plan, rows: int) -> tuple[TileGroup, ...] | None:
    """The tiles of one pass in the order of their rows, each with the keys that it shares; None where some parts are
    neither. A tile's parts that are not shared make one band, with the keys between them."""
    if len(moving.passes) != 1:
        return None
    shared = [group.as_one() for group in merged.groups if _is_shared(group, rows)]
    bands = [group for group in merged.groups if not _is_shared(group, rows)]
    tiles = _band_tiles(bands)
    if not tiles or not all(b[0] == a[0] + a[1] for a, b in pairwise([(0, 0), *tiles, (merged.n, 0)])):
        return None
    masked_by = None if all(group.masked_by is None for group in bands) else moving.passes[0].pattern
    groups, runs = list[TileGroup](), list[TileGroup]()
    for (count, keys), equal_tiles in groupby(tiles, key=lambda tile: tile[1::2]):  # neighbors of one size
        sizes = [1, count, bands[0].key_step, keys]
        runs += _runs([tile[::2] for tile in equal_tiles], sizes, masked_by, merged.start, merged.step)
    for run in runs:
        for low, high, cycle in _cycles(run):
            end = high - (high - low) % cycle  # then come fewer tiles than a cycle
            complete = replace(run.tile(low, end - low), cycle=cycle)
            for band in (complete, *map(run.tile, range(end, high))):
                shared_keys = _shared_by(band, shared)
                too_large = band.rows * band.keys > MAX_CONCATENATED or len(groups) == MAX_CONCATENATED_GROUPS
                if shared_keys is None or too_large:
                    return None
                groups.append(replace(band, shared=shared_keys, concatenated=True))
    return tuple(groups)


def _is_shared(group: TileGroup, rows: int) -> bool:
    """Whether more rows than a tile has attend to the same keys, all of them."""
    return group.mergeable and group.row_step == 1 and group.tiles * group.rows > rows


def _shared_by(band: TileGroup, shared: list[TileGroup]) -> tuple[TileGroup, ...] | None:
    """The keys that all rows of a band share; None if some are shared by a part of its rows."""
    last = band.row + band.row_shift * (band.tiles - 1) + band.rows
    touching = [part for part in shared if part.row < last and band.row < part.row + part.rows]
    by_all = all(part.row <= band.row and last <= part.row + part.rows for part in touching)
    return tuple(touching) if by_all else None


def _band_tiles(bands: list[TileGroup]) -> list[tuple[int, int, int, int]]:
    """(row, rows, key, keys) of each tile; none where their rows are not neighbors or their keys differ in step."""
    keys_of: dict[tuple[int, int], tuple[int, int]] = {}
    steps = {group.key_step for group in bands}
    if len(steps) != 1 or any(group.row_step != 1 for group in bands):
        return []
    (step,) = steps
    for group in bands:
        for t in range(group.tiles):
            rows = group.row + group.row_shift * t, group.rows
            first = group.key + group.key_shift * t
            last = first + step * group.keys
            low, high = keys_of.get(rows, (first, last))
            if (low - first) % step:
                return []
            keys_of[rows] = min(low, first), max(high, last)
    return [(*rows, low, (high - low) // step) for rows, (low, high) in sorted(keys_of.items())]

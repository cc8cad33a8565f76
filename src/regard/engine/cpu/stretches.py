"""Stretches of rows that tiles cover one behind the other: a band of keys moves with the tile, other keys are shared.

Under `window(64) | every(64)` the band is what the window shows a tile, and all tiles share every 64th key. Both are
progressions, so they are read where they lie, and side by side they make one row of scores (abreast.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from math import inf

import torch
from jaxtyping import Float
from torch import Tensor

from ...pattern import Pattern
from ..call import has_empty_row
from ..plan.planner import Plan
from ..plan.tiles import NoPlan
from .batch import NARROW, WIDE, Batch, Program
from .batches import alike, ways

FEWEST = 8  # tiles of a band that are worth a piece of their own for each lane
CYCLE = 64  # masks that a band may have in turn
MOST = 64  # stretches of a pattern: each is some twenty steps
# Scores at a time: 4 MiB in float32. Smaller pieces would stay nearer to the cores, but in each step one core waits
# for the other, and that costs more.
NEAR = 1 << 20
KEPT = 1 << 24  # weights kept for the backward pass, at most: 64 MiB in float32


@dataclass(frozen=True, eq=False)
class Stretch:
    """Tiles of neighbouring rows, one behind the other, and the keys that all their rows share."""

    band: Batch
    cycle: int  # tile t has the mask of tile t mod cycle
    shared: tuple[Batch, ...]  # one tile each, without a mask

    @property
    def keys(self) -> int:
        """Of one row: those of its band, then the shared."""
        return self.band.keys + sum(part.keys for part in self.shared)

    @property
    def pairs(self) -> int:
        return self.band.tiles * self.band.rows * self.keys

    def masks(self, dtype: torch.dtype) -> Float[Tensor, "c r l"] | None:
        """What is added to the scores of the bands of a cycle: 0 where a pair is allowed, else −∞."""
        if self.band.masked_by is None:
            return None
        if dtype not in self._masks:
            with torch.device("cpu"), torch.inference_mode(False):
                some = [self.band.tile(t).allowed for t in range(self.cycle)]
                hidden = ~torch.stack([each for each in some if each is not None])
                self._masks[dtype] = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -inf)
        return self._masks[dtype]

    @cached_property
    def _masks(self) -> dict[torch.dtype, Tensor]:
        return {}

    def pieces(self, lanes: int) -> Iterator["Piece"]:
        """Some tiles of one lane, or one tile of some lanes."""
        tiles, most = self.band.tiles, max(NEAR // (self.band.rows * self.keys), 1)
        if tiles < FEWEST:
            for t in range(tiles):
                for lane in range(0, lanes, most):
                    yield Piece(self, t, self.band.tile(t), slice(lane, min(lane + most, lanes)))
        else:
            some = -(-tiles // -(-tiles // most))  # pieces of one size
            some = -(-some // self.cycle) * self.cycle
            for lane in range(lanes):
                for t in range(0, tiles, some):
                    yield Piece(self, t, self.band.tile(t, min(some, tiles - t)), slice(lane, lane + 1))


@dataclass(frozen=True, eq=False)
class Piece:
    """What is computed at once: several tiles of one lane, or the same tile of several lanes."""

    of: Stretch
    first: int  # tile of the stretch
    band: Batch
    lanes: slice

    @cached_property
    def scores(self) -> tuple[int, int, int]:
        """Tiles, rows, keys."""
        return self.band.tiles * (self.lanes.stop - self.lanes.start), self.band.rows, self.of.keys

    def masks(self, dtype: torch.dtype) -> Float[Tensor, "c r l"] | None:
        """What is added to the scores of the band, to one tile after the other in turn."""
        masks, t = self.of.masks(dtype), self.first % self.of.cycle
        return masks if masks is None else masks[t : t + self.band.tiles]

    def rows_of(self, x: Float[Tensor, "lanes n d"]) -> Float[Tensor, "t r d"]:
        return self.band.rows_of(x[self.lanes]).flatten(0, 1)

    def keys_of(self, x: Float[Tensor, "lanes m d"]) -> list[Float[Tensor, "_ l d"]]:
        """Those of the band for each tile, then the shared for each lane, all as views."""
        return [part.keys_of(x[self.lanes]).flatten(0, 1) for part in (self.band, *self.of.shared)]


@dataclass(frozen=True, eq=False)
class Lay:
    """The stretches of all rows, from the first to the last."""

    program: Program
    stretches: tuple[Stretch, ...]

    @cached_property
    def computed(self) -> int:
        return sum(each.pairs for each in self.stretches)

    @property
    def rows(self) -> int:
        """Of its usual tile."""
        return max(each.band.rows for each in self.stretches)

    def pieces(self, lanes: int) -> tuple[Piece, ...]:
        if lanes not in self._pieces:
            self._pieces[lanes] = tuple(piece for each in self.stretches for piece in each.pieces(lanes))
        return self._pieces[lanes]

    @cached_property
    def _pieces(self) -> dict[int, tuple[Piece, ...]]:
        return {}

    def nanoseconds(self, heads: int, grad: bool, kept: int) -> float:
        """About the time of a call on two cores, in the measure of Program.nanoseconds: its pairs, more for weights
        that are not kept but made again; its rows, and again for each shared part; its stretches; the call."""
        rows = [each.band.tiles * each.band.rows for each in self.stretches]
        more = sum(r * len(each.shared) for r, each in zip(rows, self.stretches))
        if not grad:
            of_head = self.computed * 2.3 + sum(rows) * 60.0 + more * 60.0
            return heads * of_head + len(rows) * 1e5 + 7e5
        of_head = self.computed * 8.2 + sum(rows) * 100.0 + more * 400.0
        again = max(heads * self.computed - kept, 0)
        return heads * of_head + again * 4.0 + len(rows) * 3e5 + 3e6


@lru_cache(maxsize=64)
def lays(
    pattern: Pattern, n: int, m: int, start: int, step: int, rows: int = NARROW, wide: int = WIDE
) -> tuple[Lay, ...]:
    """The ways to lay a pattern without data like this: as it is, or a comb apart; often there are none."""
    if has_empty_row(pattern, n, m, start, step):  # a softmax over no keys has no value
        return ()
    try:
        found = ways(pattern, n, m, start, step, rows, wide)
    except NoPlan:
        return ()
    laid = [(way, _stretches(way, moving, rows)) for moving, way in found]
    return tuple(Lay(way, stretches) for way, stretches in laid if stretches)


def quickest(
    pattern: Pattern, n: int, m: int, start: int, step: int, heads: int, grad: bool, kept: int
) -> tuple[Lay, float] | None:
    """The quickest of these ways, and its nanoseconds."""
    times = [(lay, lay.nanoseconds(heads, grad, kept)) for lay in lays(pattern, n, m, start, step)]
    return min(times, key=lambda pair: pair[1], default=None)


def _stretches(way: Program, moving: Plan, rows: int) -> tuple[Stretch, ...] | None:
    """The bands of one pass of tiles in the order of their rows, each with what is shared; None where that is not all
    there is. A tile's parts that are not shared make one band, with what lies between them."""
    if len(moving.passes) != 1:
        return None
    shared = [batch.as_one() for batch in way.batches if _is_shared(batch, rows)]
    bands = [batch for batch in way.batches if not _is_shared(batch, rows)]
    tiles = _tiles(bands)
    if not tiles or not all(b[0] == a[0] + a[1] for a, b in pairwise([(0, 0), *tiles, (way.n, 0)])):
        return None
    by = None if all(batch.masked_by is None for batch in bands) else moving.passes[0].pattern
    found: list[Stretch] = []
    for batch in _runs(tiles, bands[0].key_step, by, way):
        for low, high, cycle in [(0, batch.tiles, 1)] if by is None else alike(batch, by):
            band = batch.tile(low, high - low)
            mine = _shared_by(band, shared)
            if mine is None or cycle > CYCLE or band.rows * band.keys > NEAR:
                return None
            found.append(Stretch(band, cycle, mine))
            if len(found) > MOST:
                return None
    return tuple(found)


def _is_shared(batch: Batch, rows: int) -> bool:
    """Whether more rows than a tile has see the same keys, all of them."""
    several = batch.tiles * batch.rows > rows
    return batch.masked_by is None and batch.one_stretch and batch.row_step == 1 and several


def _shared_by(band: Batch, shared: list[Batch]) -> tuple[Batch, ...] | None:
    """What all rows of a band share; None if some of them share it alone."""
    last = band.row + band.tiles * band.rows
    some = [part for part in shared if part.row < last and band.row < part.row + part.rows]
    whole = all(part.row <= band.row and last <= part.row + part.rows for part in some)
    return tuple(some) if whole else None


def _tiles(bands: list[Batch]) -> list[tuple[int, int, int, int]]:
    """(row, rows, key, keys) of each tile; none where their keys or rows are no neighbours of one kind."""
    found: dict[tuple[int, int], tuple[int, int]] = {}
    steps = {batch.key_step for batch in bands}
    if len(steps) != 1 or any(batch.row_step != 1 for batch in bands):
        return []
    (step,) = steps
    for batch in bands:
        for t in range(batch.tiles):
            place = batch.row + batch.row_hop * t, batch.rows
            first = batch.key + batch.key_hop * t
            last = first + step * batch.keys
            low, high = found.get(place, (first, last))
            if (low - first) % step:
                return []
            found[place] = min(low, first), max(high, last)
    return [(*place, low, (high - low) // step) for place, (low, high) in sorted(found.items())]


def _runs(
    tiles: list[tuple[int, int, int, int]], key_step: int, by: Pattern | None, way: Program
) -> Iterator[Batch]:
    """Tiles of one size, one behind the other, whose keys advance by a constant."""
    low = 0
    while low < len(tiles):
        row, rows, key, keys = tiles[low]
        high, hop = low + 1, 0
        while high < len(tiles) and tiles[high][1::2] == (rows, keys):
            by_this = tiles[high][2] - tiles[high - 1][2]
            if by_this <= 0 or by_this != (hop or by_this):
                break
            high, hop = high + 1, by_this
        yield Batch(high - low, row, rows, 1, rows, key, hop, key_step, keys, by, way.start, way.step)
        low = high

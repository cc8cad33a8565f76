"""A plan for wide machines: tiles that look alike, run together.

Tiles whose rows and keys advance by a constant, and whose allowed pairs are the same table, are one batch:

    row  r of tile t   is query  row + row_hop·t + row_step·r
    key  l of tile t   is key    key + key_hop·t + key_step·l        key_hop = 0: all tiles share their keys

so that a batch is a strided (perhaps overlapping) view of q, k and v, and one small table of allowed pairs.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from math import gcd, lcm

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..pattern import Pattern, every
from ..progression import FAR, Ints
from .plan import Pass, Plan, plan
from .relations import NoPlan, Relations, relations

NARROW, WIDE = 64, 192  # rows of a tile: a narrow one wastes less of a band, a wide one is faster a pair
HELD = 1 << 23  # numbers in the keys of one call: where tiles overlap much, fewer of them run at a time


@dataclass(frozen=True, eq=False)
class Batch:
    """`tiles` tiles of `rows` queries over `keys` keys each."""

    tiles: int
    row: int
    row_hop: int
    row_step: int
    rows: int
    key: int
    key_hop: int
    key_step: int
    keys: int
    masked_by: Pattern | None  # None: every pair of the batch is allowed
    start: int  # query r stands at start + step · r
    step: int

    @property
    def pairs(self) -> int:
        return self.tiles * self.rows * self.keys

    @property
    def allowed(self) -> Bool[Tensor, "r l"] | None:
        """The allowed pairs of every tile, which are those of the first; None: all."""
        if self.masked_by is None:
            return None
        if self.rows * self.keys > 1 << 20:  # too large to keep
            return self._look(self.masked_by)
        return self._allowed

    @cached_property
    def _allowed(self) -> Bool[Tensor, "r l"] | None:
        return None if self.masked_by is None else self._look(self.masked_by)

    def _look(self, pattern: Pattern) -> Bool[Tensor, "r l"]:
        i = self.start + self.step * (self.row + self.row_step * torch.arange(self.rows))
        j = self.key + self.key_step * torch.arange(self.keys)
        return torch.broadcast_to(pattern.allows(i[:, None], j), (self.rows, self.keys))

    @property
    def one_stretch(self) -> bool:
        """Whether the tiles are one tile: the same keys, no mask, and rows that follow one another."""
        return self.tiles == 1 or (
            self.masked_by is None and self.key_hop == 0 and self.row_hop == self.rows * self.row_step
        )

    @property
    def phases(self) -> int:
        """Tiles t, t + phases, t + 2·phases … have no key in common."""
        apart = self.key_step // gcd(self.key_step, self.key_hop)  # tiles this far apart agree in the residue
        shift = apart * self.key_hop // self.key_step
        return 1 if shift >= self.keys else apart * -(-self.keys // shift)

    def tile(self, first: int, count: int = 1, apart: int = 1) -> "Batch":
        """Tiles first, first + apart, … of this batch, as a batch."""
        return replace(
            self,
            tiles=count,
            row=self.row + self.row_hop * first,
            key=self.key + self.key_hop * first,
            row_hop=self.row_hop * apart,
            key_hop=self.key_hop * apart,
        )

    def some_rows(self, first: int, count: int) -> "Batch":
        """Rows first, first + 1, … of each tile; the mask is no longer that of the first row."""
        return replace(self, row=self.row + self.row_step * first, rows=count)

    def as_one(self) -> "Batch":
        """A batch that is one stretch, as one tile."""
        return replace(self, tiles=1, rows=self.tiles * self.rows)

    def pieces(self, width: int) -> Iterator["Batch"]:
        """The batch, some tiles at a time, so that their keys hold at most HELD numbers of `width` a key."""
        some = max(HELD // (self.keys * width), 1)
        for t in range(0, self.tiles, some):
            yield self if some >= self.tiles else self.tile(t, min(some, self.tiles - t))

    def rows_of(self, x: Float[Tensor, "lanes n *d"]) -> Float[Tensor, "lanes t r *d"]:
        """The rows of each tile, as a view."""
        return _view(x, self.tiles, self.rows, self.row, self.row_hop, self.row_step)

    def keys_of(self, x: Float[Tensor, "lanes m *d"]) -> Float[Tensor, "lanes t l *d"]:
        """The keys of each tile, as a view in which tiles may overlap."""
        return _view(x, self.tiles, self.keys, self.key, self.key_hop, self.key_step)

    def add_to_keys(self, into: Float[Tensor, "lanes m d"], part: Float[Tensor, "lanes t l d"]) -> None:
        """into[key l of tile t] += part[t, l], in one order only: tiles without a common key at once."""
        if self.key_hop == 0:
            self.tile(0).keys_of(into).add_(part.sum(1, keepdim=True))
            return
        for phase in range(min(self.phases, self.tiles)):
            some = part[:, phase :: self.phases]
            self.tile(phase, some.shape[1], self.phases).keys_of(into).add_(some)

    def before(self, m: int) -> Iterator["Batch"]:
        """What is left of this batch if the keys from m on are hidden."""
        last = self.key + self.key_step * (self.keys - 1)
        if self.key_hop:
            whole = min(max((m - 1 - last) // self.key_hop + 1, 0), self.tiles)
        else:
            whole = self.tiles if last < m else 0
        if whole:
            yield self.tile(0, whole)
        for t in range(whole, self.tiles):
            one = self.tile(t)
            if one.key < m:
                yield replace(one, keys=min(one.keys, -((one.key - m) // one.key_step)))


def _view(x: Tensor, tiles: int, count: int, first: int, hop: int, step: int) -> Tensor:
    lane, s, *inner = x.stride()
    shape, strides = (len(x), tiles, count, *x.shape[2:]), (lane, s * hop, s * step, *inner)
    return x.as_strided(shape, strides, x.storage_offset() + s * first)


@dataclass(frozen=True, eq=False)
class Program:
    """The batches of a pattern over n queries and m keys; their sets of pairs are disjoint."""

    n: int
    m: int
    start: int  # query r stands at start + step · r
    step: int
    batches: tuple[Batch, ...]

    @cached_property
    def computed(self) -> int:
        return sum(batch.pairs for batch in self.batches)

    def before(self, m: int) -> "Program":
        """The same with the keys from m on hidden."""
        if m >= self.m:
            return self
        return replace(self, m=m, batches=tuple(left for batch in self.batches for left in batch.before(m)))

    def calls(self, width: int) -> Iterator[Batch]:
        """The batches as they are run, with `width` numbers for each key."""
        for batch in self.batches:
            yield from (batch.as_one() if batch.one_stretch else batch).pieces(width)

    def nanoseconds(self, heads: int = 8, grad: bool = True) -> float:
        """About what it takes on two cores, for heads of 64 in float32; constants from bench/cpu_patterns.py."""
        return sum((_nanoseconds(batch, heads, grad) for batch in self.batches), 0.0)


def _nanoseconds(batch: Batch, heads: int, grad: bool) -> float:
    rows = batch.rows * batch.tiles if batch.one_stretch else batch.rows
    forward, backward = (1.5, 3.9) if rows >= 192 else (1.7, 5.2)  # a pair
    joins = 40.0 * batch.tiles * batch.rows + (20.0 * batch.tiles * batch.keys if grad else 0.0)
    a_pair = forward + backward if grad else forward
    return heads * (batch.pairs * a_pair + joins) + (150e3 if grad else 60e3)


def working(dtype: torch.dtype) -> torch.dtype:
    """What a call on the CPU is computed in: half types in float32, which is as quick here and exact."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@lru_cache(maxsize=64)
def program(
    pattern: Pattern, n: int, m: int, start: int, step: int, narrow: int = NARROW, wide: int = WIDE
) -> Program:
    """The quickest of a few ways to lay the tiles of a pattern without data."""
    found, reasons = [], []
    for tile in (narrow, wide):
        try:
            whole = plan(pattern, n, m, start, step, tile)
            found.append(of_plans(whole))
            for comb in _combs(whole):
                teeth = plan(pattern & comb, n, m, start, step, wide)
                rest = plan(pattern - comb, n, m, start, step, tile)
                found.append(of_plans(teeth, rest))
        except NoPlan as why:
            reasons.append(why)
    if not found:
        raise reasons[0]
    return min(found, key=lambda one: one.nanoseconds())


def of_plans(*plans: Plan) -> Program:
    """Plans of disjoint sets of pairs, as batches."""
    batches = [
        batch for each in plans for one in each.passes for batch in _batches(one, each.start, each.step)
    ]
    first = plans[0]
    return Program(first.n, first.m, first.start, first.step, tuple(batches))


def _combs(whole: Plan) -> list[every]:
    """Every k-th key, where tiles of neighbours see those in full: apart from the rest they make one batch."""
    found = set()
    for one in whole.passes:
        hop = np.repeat(one.tiles[:, 1], np.diff(one.offsets))
        teeth = one.parts[(one.parts[:, 3] == 1) & (one.parts[:, 1] > 1) & (hop == 1)]
        found |= {(int(k), int(first) % int(k)) for first, k, _, _ in np.unique(teeth, axis=0)}
    return [every(k, offset) for k, offset in sorted(found)] if len(found) <= 2 else []


# From the parts of a pass to batches.


def _batches(one: Pass, start: int, step: int) -> Iterator[Batch]:
    groups: dict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
    for row, row_step, rows, key, key_step, keys, full in _segments(one):
        groups[row_step, rows, key_step, keys, full].append((row, key))
    for (row_step, rows, key_step, keys, full), corners in groups.items():
        for row, key, row_hop, key_hop, tiles in _runs(sorted(corners)):
            by = None if full else one.pattern
            batch = Batch(tiles, row, row_hop, row_step, rows, key, key_hop, key_step, keys, by, start, step)
            yield from [batch] if full or tiles == 1 else _alike(batch, one.pattern)


def _segments(one: Pass) -> Iterator[tuple[int, ...]]:
    """(row, row step, rows, key, key step, keys, full) of each part; parts that touch are one where that pays."""
    tile_of = np.repeat(np.arange(len(one.tiles)), np.diff(one.offsets))
    shapes = defaultdict(set)  # where in each tile full parts of one shape begin
    for t, (key, key_step, keys, full) in zip(tile_of.tolist(), one.parts.tolist()):
        if full:
            shapes[t, key_step, keys].add(key)

    def moves(t: int, key: int, key_step: int, keys: int) -> bool:
        """Whether a neighbouring tile has the same part further on: then one mask serves all tiles."""
        return any(other != key for s in (t - 1, t + 1) for other in shapes.get((s, key_step, keys), ()))

    tiles, parts = one.tiles.tolist(), one.parts.tolist()
    for t, (low, high) in enumerate(zip(one.offsets[:-1].tolist(), one.offsets[1:].tolist())):
        held: list[int] | None = None
        for key, key_step, keys, full in parts[low:high]:
            fixed = bool(full) and not moves(t, key, key_step, keys)
            if held and not fixed and held[1] == key_step and held[0] + key_step * held[2] == key:
                held[2] += keys
                held[3] &= full
                continue
            if held:
                yield *tiles[t], *held
            held = None if fixed else [key, key_step, keys, full]
            if fixed:
                yield *tiles[t], key, key_step, keys, full
        if held:
            yield *tiles[t], *held


def _runs(corners: list[tuple[int, int]]) -> Iterator[tuple[int, int, int, int, int]]:
    """(row, key, row hop, key hop, tiles): stretches of first rows and keys that advance by constants."""
    at: Ints = np.array(corners, dtype=np.int64)
    hops = np.diff(at, axis=0)
    same = np.ones(len(hops), dtype=bool)  # hop t is as hop t − 1
    same[1:] = (hops[1:] == hops[:-1]).all(axis=1)
    changes = np.append(np.flatnonzero(~same), len(hops)).tolist()
    low, c = 0, 0
    while low < len(at):
        row, key = at[low].tolist()
        if low == len(at) - 1 or hops[low, 1] < 0:  # a view cannot walk backwards
            yield row, key, 0, 0, 1
            low += 1
            continue
        while changes[c] <= low:
            c += 1
        high = changes[c] + 1
        yield row, key, *hops[low].tolist(), high - low
        low = high


# Tiles whose tables of allowed pairs are the same.


def _alike(batch: Batch, pattern: Pattern) -> Iterator[Batch]:
    """A batch masked by a pattern, cut into batches whose tiles all have the mask of their first."""
    words = [relations(word, False) for word in dict.fromkeys(pattern.leaves())]
    di, dj = batch.step * batch.row_hop, batch.key_hop
    period = lcm(*(_period(word, di, dj) for word in words))  # 0: no tile is like another
    cut = _cuts(batch, words) if period else range(batch.tiles)
    edges = sorted({0, batch.tiles, *cut, *(t + 1 for t in cut)})
    for low, high in pairwise(edges):
        for phase in range(low, min(low + max(period, 1), high)):
            yield batch.tile(phase, len(range(phase, high, max(period, 1))), max(period, 1))


def _period(word: Relations, di: int, dj: int) -> int:
    """The least p for which a shift by p·(di, dj) changes neither residue nor distance; 0: none does."""
    band = word.near > -FAR or word.far < FAR or word.block
    if band and di != dj:
        return 0
    steps = [
        (word.x_class[0], di),
        (word.y_class[0], dj),
        (word.apart, di - dj),
        (word.block or 1, di),
    ]
    return lcm(*(k // gcd(k, by) for k, by in steps))


def _cuts(batch: Batch, words: list[Relations]) -> Sequence[int]:
    """The tiles in which a word with a fixed end has that end between two rows or two keys, or that start there."""
    t = np.arange(batch.tiles)
    i = batch.start + batch.step * (batch.row + batch.row_hop * t)
    j = batch.key + batch.key_hop * t
    last_i = i + batch.step * batch.row_step * (batch.rows - 1)
    last_j = j + batch.key_step * (batch.keys - 1)
    inside = np.zeros(batch.tiles, dtype=bool)
    turned = np.zeros(batch.tiles, dtype=bool)
    for word in words:
        for end, first, last in ((word.x_below, i, last_i), (word.y_below, j, last_j)):
            inside |= (first < end) & (end <= last)
            turned[1:] |= (first[:-1] < end) != (first[1:] < end)
    return np.flatnonzero(inside | turned).tolist()

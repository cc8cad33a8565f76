"""Tiles that look alike, as one batch: strided, perhaps overlapping views of q, k and v, and one small mask.

row  r of tile t   is query  row + row_hop·t + row_step·r
key  l of tile t   is key    key + key_hop·t + key_step·l        key_hop = 0: all tiles share their keys
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import gcd

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..pattern import Pattern, causal

NARROW, WIDE = 64, 192  # rows of a tile: a narrow one wastes less of a band, a wide one is faster a pair
BLOCK = 256  # rows of the fused op's blocks, the last of which it masks in a triangle
HELD = 1 << 21  # numbers in the gradients of the keys of one call: 8 MiB in float32 stay near the cores


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
        keys = min(self.keys, (self.keys + BLOCK) // 2) if self.triangle else self.keys
        return self.tiles * self.rows * keys

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
    def triangle(self) -> bool:
        """Whether row r sees keys 0 … r: the fused op knows that mask, and skips what it hides."""
        first = self.start + self.step * self.row
        steps = self.step * self.row_step == self.key_step
        return isinstance(self.masked_by, causal) and steps and first == self.key and self.rows == self.keys

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
        return self if self.tiles == 1 else replace(self, tiles=1, rows=self.tiles * self.rows)

    def pieces(self, width: int) -> Iterator["Batch"]:
        """The batch, some tiles at a time, so that their keys, `width` numbers each, are at most HELD numbers."""
        some = max(HELD // max(self.keys * width, 1), 1)
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
            self.tile(0).keys_of(into).add_(part if self.tiles == 1 else part.sum(1, keepdim=True))
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

    def calls(self, width: int = 0) -> Iterator[Batch]:
        """The batches as they are run; with a width, each call holds `width` numbers for every key."""
        for batch in self.batches:
            yield from (batch.as_one() if batch.one_stretch else batch).pieces(width)

    def nanoseconds(self, heads: int = 8, grad: bool = True) -> float:
        """About what it takes on two cores, for heads of 64 in float32, where a pair of full SDPA takes 1.8, with
        gradients 6.4, and a pair of masked SDPA 2.2 and 7.1. Fitted to bench/cpu_patterns.py --group small."""
        start = 1.5e6 if grad else 0.5e6
        return start + sum((_nanoseconds(batch, heads, grad) for batch in self.batches), 0.0)


def _nanoseconds(batch: Batch, heads: int, grad: bool) -> float:
    """What a row costs and what a pair, which is less in the op's larger blocks; what joining costs; a call."""
    rows = batch.tiles * batch.rows
    wide = (rows if batch.one_stretch else batch.rows) >= WIDE
    seen = batch.pairs / rows
    forward = 210.0 + 2.1 * seen if wide else 255.0 + 3.4 * seen
    backward = 180.0 + 5.6 * seen if wide else 325.0 + 9.1 * seen
    keys = batch.keys if batch.one_stretch else batch.tiles * batch.keys
    each = rows * forward + (rows * backward + keys * 110.0 if grad else 0.0)
    return heads * each + (300e3 if grad else 120e3)


Lane = tuple[Tensor, ...]


def lanes(
    way: Program | tuple[Program, ...], lengths: Tensor | None, queries: Lane, keys: Lane
) -> Iterator[tuple[Program, Lane, Lane]]:
    """(program, (b·h_kv, …) of each of `queries`, which have b and h in front, the same of `keys`), as views.

    One lane for each query head of a group, as they share their keys; for each batch row too, if rows differ in
    their lengths or programs.
    """
    b, group = len(queries[0]), queries[0].shape[1] // keys[0].shape[1]
    ways = way if isinstance(way, tuple) else (way,)
    if lengths is None and len(ways) == 1:
        rows = [(slice(None), ways[0])]
    else:
        each = ways * b if len(ways) == 1 else ways
        kept = [one.m for one in each] if lengths is None else lengths.tolist()
        rows = [(slice(r, r + 1), _before(one, m)) for r, (one, m) in enumerate(zip(each, kept))]
    for some, left in rows:
        for member in range(group):
            yield (
                left,
                tuple(x[some, member::group].flatten(0, 1) for x in queries),
                tuple(x[some].flatten(0, 1) for x in keys),
            )


@lru_cache(maxsize=256)
def _before(way: Program, m: int) -> Program:
    return way.before(m)


def working(dtype: torch.dtype) -> torch.dtype:
    """What a call on the CPU is computed in: half types in float32, which is as quick here and exact."""
    return torch.float64 if dtype == torch.float64 else torch.float32

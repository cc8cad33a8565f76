"""Tiles that look alike, as one batch: strided, perhaps overlapping views of q, k and v, and one small mask.

row  r of tile t   is query  row + row_hop·t + row_step·r
key  l of tile t   is key    key + key_hop·t + key_step·l        key_hop = 0: all tiles share their keys
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import gcd, inf

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ...pattern import Pattern, causal
from ...progression import Ints

NARROW, WIDE = 64, 192  # rows of a tile: a narrow one wastes less of a band, a wide one is faster a pair
BLOCK = 256  # rows of the fused op's blocks, the last of which it masks in a triangle
HELD = 1 << 21  # numbers in the gradients of the keys of one call: 8 MiB in float32 stay near the cores
SCORES = 1 << 19  # scores of one call
LANE = 1 << 17  # scores from which on a head is run by itself: its q, k and v then stay in the caches


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

    def mask(self, dtype: torch.dtype) -> Float[Tensor, "r l"] | None:
        """What is added to the scores of every tile: 0 where a pair is allowed, else −∞."""
        if self.masked_by is None:
            return None
        if dtype not in self._masks:
            allowed = self._look(self.masked_by)
            self._masks[dtype] = torch.zeros(allowed.shape, dtype=dtype).masked_fill_(~allowed, -inf)
        return self._masks[dtype]

    @cached_property
    def hollow(self) -> bool:
        """Whether some row of its tiles sees nothing in them."""
        return self.masked_by is not None and not bool(self._look(self.masked_by).any(-1).all())

    @cached_property
    def _masks(self) -> dict[torch.dtype, Tensor]:
        return {}

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

    @cached_property
    def fused(self) -> bool:
        """Whether the fused op runs it, which holds no scores and skips half of a triangle; else products."""
        much = self.masked_by is not None and self.rows * self.keys > SCORES
        half = self.triangle and self.rows > BLOCK
        return much or half or _by_op(self, 8, True) < _by_products(self, 8, True)

    @cached_property
    def by_lane(self) -> bool:
        """Whether a piece is of one lane, whose q, k and v then stay in the caches from step to step."""
        return self.tiles > 8 or self.tiles * self.rows * self.keys >= LANE

    @cached_property
    def some(self) -> int:
        """Tiles of a piece, or rows where there is one tile; lanes where pieces hold several."""
        size = self.keys if self.by_rows else self.keys * self.rows
        return max(SCORES // size, 1)

    @cached_property
    def by_rows(self) -> bool:
        """Whether a piece is some rows of the one tile of a lane."""
        return self.by_lane and self.tiles == 1 and self.masked_by is None

    def pieces_of(self, lanes: int) -> int:
        """The pieces of one lane, or of all lanes if they are not by lane."""
        if not self.by_lane:
            return self.tiles * -(-lanes // self.some)
        return -(-(self.rows if self.by_rows else self.tiles) // self.some)

    @cached_property
    def row_numbers(self) -> Ints:
        tiles = self.row + self.row_hop * np.arange(self.tiles)
        return (tiles[:, None] + self.row_step * np.arange(self.rows)).ravel()

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
        if self.tiles <= apart:
            return 1
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
class Step:
    """A batch as products run it, in pieces of about SCORES scores: tiles of one lane, or one tile of some lanes.

    A piece is a view of three axes. All pieces of a tensor are made at once: one by one they take ten times as long.
    """

    batch: Batch
    fresh: bool  # no step before it writes to its rows
    alone: bool  # no other step does

    def order(self, lanes: int) -> list[list[int]]:
        """The numbers of the pieces of each lane; all in one list if they are not by lane."""
        each = self.batch.pieces_of(lanes)
        if not self.batch.by_lane:
            return [list(range(each))]
        return [list(range(lane * each, (lane + 1) * each)) for lane in range(lanes)]

    def rows_of(self, x: Float[Tensor, "lanes n *d"]) -> list[Float[Tensor, "t r *d"]]:
        return self._cut(self.batch.rows_of(x), self.batch.by_rows)

    def keys_of(self, x: Float[Tensor, "lanes m *d"]) -> list[Float[Tensor, "t l *d"]]:
        return self._cut(self.batch.keys_of(x), False)

    def lanes_of(self, x: Float[Tensor, "lanes m d"]) -> list[tuple[Batch, Float[Tensor, "some m d"]]]:
        """The lanes of each piece as they are, with the tiles that it has of them."""
        at = self.batch
        if not self.batch.by_lane:
            some = [x] if len(x) <= self.batch.some else x.split(self.batch.some)
            return [(at.tile(t), each) for t in range(at.tiles) for each in some]
        if at.tiles == 1:
            return [(at, lane) for lane in x.split(1) for _ in range(at.pieces_of(1))]
        pieces = [at.tile(t, min(self.batch.some, at.tiles - t)) for t in range(0, at.tiles, self.batch.some)]
        return [(piece, lane) for lane in x.split(1) for piece in pieces]

    def blocks_of(self, x: Float[Tensor, "lanes m d"]) -> list[list[Float[Tensor, "t l d"]]] | None:
        """The keys of a piece in blocks without a common key, if each block is one stretch of memory."""
        at, hop = self.batch, self.batch.key_hop
        if not (self.batch.by_lane and at.tiles > 1 and hop and at.key_step == 1 and at.keys % hop == 0):
            return None
        blocks = (_view(x, at.tiles, hop, at.key + l, hop, 1) for l in range(0, at.keys, hop))
        return [list(each) for each in zip(*(self._cut(block, False) for block in blocks))]

    def _cut(self, x: Float[Tensor, "lanes t r *d"], rows: bool) -> list[Tensor]:
        along = 0 if self.batch.by_lane else 1
        axis = 1 if rows else 0
        each = x.unbind(along)
        if self.batch.by_rows and not rows:
            return [lane for lane in each for _ in range(self.batch.pieces_of(1))]
        if each[0].shape[axis] <= self.batch.some:  # split() takes as long as a product
            return list(each)
        return [piece for one in each for piece in one.split(self.batch.some, axis)]


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

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The batches in the order in which they run: the fused op's, those of several lanes, the others."""
        runs = sorted(self._as_run, key=lambda batch: (not batch.fused, batch.by_lane))
        times = np.zeros(self.n, dtype=np.int64)
        for batch in runs:
            times[batch.row_numbers] += 1
        seen, steps = np.zeros(self.n, dtype=bool), []
        for batch in runs:
            at = batch.row_numbers
            steps.append(Step(batch, not seen[at].any(), bool((times[at] == 1).all())))
            seen[at] = True
        return tuple(steps)

    @cached_property
    def _as_run(self) -> list[Batch]:
        return [batch.as_one() if batch.one_stretch else batch for batch in self.batches]

    @cached_property
    def fused(self) -> tuple[Step, ...]:
        return tuple(step for step in self.steps if step.batch.fused)

    def order(self, lanes: int) -> list[tuple[Step, int]]:
        """The pieces that products run: those of several lanes, then lane by lane the others."""
        if lanes not in self._orders:
            rest = [(step, step.order(lanes)) for step in self.steps if not step.batch.fused]
            few = [(step, i) for step, order in rest if not step.batch.by_lane for i in order[0]]
            each = [(step, order) for step, order in rest if step.batch.by_lane]
            many = [(step, i) for lane in range(lanes) for step, order in each for i in order[lane]]
            self._orders[lanes] = few + many
        return self._orders[lanes]

    @cached_property
    def _orders(self) -> dict[int, list[tuple[Step, int]]]:
        return {}

    def calls(self, width: int = 0) -> Iterator[Batch]:
        """The batches as they are run; with a width, each call holds `width` numbers for every key."""
        for batch in self._as_run:
            yield from batch.pieces(width)

    def nanoseconds(self, heads: int = 8, grad: bool = True) -> float:
        """About what it takes on two cores, for heads of 64 in float32, where a pair of full SDPA takes 1.8, with
        gradients 6.4, and a pair of masked SDPA 2.2 and 7.1. Fitted to bench/cpu_patterns.py --group small."""
        start = 1.5e6 if grad else 0.5e6
        each = ((_by_op if batch.fused else _by_products)(batch, heads, grad) for batch in self._as_run)
        return start + sum(each, 0.0)


def _by_products(batch: Batch, heads: int, grad: bool) -> float:
    """What a pair costs, less in tiles that are not narrow; a row and a key, more if they are no neighbours, as a
    product writes to neighbours only; a piece."""
    rows, keys = batch.tiles * batch.rows, batch.tiles * batch.keys
    slow, apart = (1.0 if batch.rows >= 64 else 1.3), (1.0 if batch.row_step == 1 else 2.0)
    pieces = batch.pieces_of(heads) * (heads if batch.by_lane else 1)
    forward = slow * rows * batch.keys * 2.8 + apart * rows * 60.0
    backward = slow * rows * batch.keys * 6.2 + apart * (rows * 120.0 + keys * 40.0)
    return heads * (forward + grad * backward) + pieces * (400e3 if grad else 120e3)


def _by_op(batch: Batch, heads: int, grad: bool) -> float:
    """The same of the fused op, which is quicker by the pair in its larger blocks, where one call is enough."""
    rows = batch.tiles * batch.rows
    wide = (rows if batch.one_stretch else batch.rows) >= 192
    forward = rows * 210.0 + batch.pairs * 2.1 if wide else rows * 255.0 + batch.pairs * 3.4
    backward = rows * 180.0 + batch.pairs * 5.6 if wide else rows * 325.0 + batch.pairs * 9.1
    keys = batch.keys if batch.one_stretch else batch.tiles * batch.keys
    return heads * (forward + grad * (backward + keys * 110.0)) + (300e3 if grad else 120e3)


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

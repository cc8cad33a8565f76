"""Layouts: groups of tiles with the same shape and the same mask, and the pieces of them that are computed at once.

    row r of tile t is query   row + row_shift·t + row_step·r
    key l of tile t is key     key + key_shift·t + key_step·l        key_shift = 0: all tiles have the same keys

The rows and keys of a group are strided views of q, k and v, which may overlap. A group may have further keys that
all its rows share. Its scores are then one row over all of them, with one softmax; otherwise the groups that have a
row in common are merged by log-sum-exp.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd, inf

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ...pattern import Pattern, causal
from ...progression import Ints
from .memory import MAX_SAVED_WEIGHTS, Buffers, SavedWeights

# Rows of a tile: a narrow tile wastes less of a band, a wide one takes less time per pair.
NARROW, WIDE = 64, 192
# Rows of the fused op's blocks; of a triangle it masks the last block and skips what follows.
FUSED_BLOCK = 256
MAX_SCORES = 1 << 19  # scores of one piece
# Scores from which on a piece is of one head: its q, k and v then stay in the caches.
ONE_HEAD_SCORES = 1 << 17
# Scores of one piece where all keys of a tile are concatenated: 4 MiB in float32. Smaller pieces would stay nearer to
# the cores, but in each step one core waits for the other, and that costs more.
MAX_CONCATENATED = 1 << 20
MIN_TILES = 8  # concatenated tiles from which on a piece is of one head
MAX_SPLIT = 1 << 18, 1 << 21  # with bias or dropout: scores of a tile that is split by rows, and of one piece
MIN_SPLIT_ROWS = 64  # rows of such a tile: products of fewer rows are slow
MAX_CACHED_MASK = 1 << 20  # pairs of a mask that is kept between calls
# Up to so many scores a group runs by products. The backward pass of the fused op weighs by exp(s − lse), with lse
# rounded: in small groups that can err by more than twice what autograd's softmax does.
MIN_FUSED_SCORES = 1 << 13


@dataclass(frozen=True, eq=False)
class TileGroup:
    """`tiles` tiles of `rows` queries over `keys` keys each."""

    tiles: int
    row: int
    row_shift: int
    row_step: int
    rows: int
    key: int
    key_shift: int
    key_step: int
    keys: int
    masked_by: Pattern | None  # None: every pair of the group is allowed
    start: int  # query r is at position start + step · r
    step: int
    cycle: int = 1  # tile t has the mask of tile t mod cycle
    shared: tuple["TileGroup", ...] = ()  # further keys of all rows: one tile each, without a mask
    concatenated: bool = False  # no other group has its rows, and its weights may be saved
    by_products: bool = False  # never by the fused op, as with bias and dropout
    split: bool = False  # a part of a tile that was too large

    @property
    def all_keys(self) -> int:
        """The keys of one row: its own, then the shared ones."""
        return self.keys + sum(part.keys for part in self.shared)

    @property
    def pairs(self) -> int:
        keys = min(self.keys, (self.keys + FUSED_BLOCK) // 2) if self.triangle else self.all_keys
        return self.tiles * self.rows * keys

    # Masks.

    @property
    def allowed(self) -> Bool[Tensor, "c r l"] | None:
        """The allowed pairs of tile after tile in turn; None: all."""
        large = self.cycle * self.rows * self.keys > MAX_CACHED_MASK
        return None if self.masked_by is None else self._evaluate() if large else self._allowed

    @cached_property
    def _allowed(self) -> Bool[Tensor, "c r l"]:
        return self._evaluate()

    def _evaluate(self) -> Bool[Tensor, "c r l"]:
        assert self.masked_by is not None
        t, r = torch.arange(self.cycle)[:, None, None], torch.arange(self.rows)[:, None]
        i = self.start + self.step * (self.row + self.row_shift * t + self.row_step * r)
        j = self.key + self.key_shift * t + self.key_step * torch.arange(self.keys)
        return torch.broadcast_to(self.masked_by.allows(i, j), (self.cycle, self.rows, self.keys))

    def mask(self, dtype: torch.dtype) -> Float[Tensor, "c r l"] | None:
        """What is added to the scores of tile after tile in turn: 0 where a pair is allowed, else −∞."""
        if self.masked_by is None or dtype in self._masks:
            return self._masks.get(dtype)
        with torch.device("cpu"), torch.inference_mode(False):
            hidden = ~self._evaluate()
            mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -inf)
        if not self.split:
            self._masks[dtype] = mask
        return mask

    @cached_property
    def _masks(self) -> dict[torch.dtype, Tensor]:
        return {}

    @cached_property
    def has_empty_row(self) -> bool:
        """Whether some row of its tiles has no allowed key in them."""
        return self.masked_by is not None and not self.shared and not self._evaluate().any(-1).all()

    @property
    def triangle(self) -> bool:
        """Whether row r has keys 0 … r: the fused op knows that mask, and skips the pairs that it hides."""
        first = self.start + self.step * self.row
        steps = self.step * self.row_step == self.key_step
        return isinstance(self.masked_by, causal) and steps and first == self.key and self.rows == self.keys

    # How it runs.

    @cached_property
    def fused(self) -> bool:
        """Whether the fused op runs it, which holds no scores and skips half of a triangle; else products."""
        if self.concatenated or self.by_products:
            return False
        if self.tiles * self.rows * self.keys <= MIN_FUSED_SCORES:
            return False
        large = self.masked_by is not None and self.rows * self.keys > MAX_SCORES
        half = self.triangle and self.rows > FUSED_BLOCK
        return large or half or fused_nanoseconds(self, 8, True) < products_nanoseconds(self, 8, True)

    @cached_property
    def by_head(self) -> bool:
        """Whether a piece is of one head, whose q, k and v then stay in the caches from group to group."""
        if self.concatenated:
            return self.tiles >= MIN_TILES
        return not self.split and (self.tiles > 8 or self.tiles * self.rows * self.keys >= ONE_HEAD_SCORES)

    @cached_property
    def by_rows(self) -> bool:
        """Whether a piece is some rows of the one tile of a head."""
        return self.by_head and self.tiles == 1 and self.masked_by is None and not self.concatenated

    @cached_property
    def chunk(self) -> int:
        """Tiles of a piece, or rows where there is one tile; heads where a piece has several."""
        limit = MAX_CONCATENATED if self.concatenated else MAX_SPLIT[1] if self.split else MAX_SCORES
        size = self.keys if self.by_rows else self.all_keys * self.rows
        chunk = max(limit // size, 1)
        if not self.by_head or self.by_rows:
            return chunk
        even = -(-self.tiles // -(-self.tiles // chunk))  # pieces of one size
        return -(-even // self.cycle) * self.cycle

    def pieces_of(self, heads: int) -> int:
        """The pieces of one head, or of all heads if they are not by head."""
        if not self.by_head:
            return self.tiles * -(-heads // self.chunk)
        return -(-(self.rows if self.by_rows else self.tiles) // self.chunk)

    @cached_property
    def row_numbers(self) -> Ints:
        tiles = self.row + self.row_shift * np.arange(self.tiles)
        return (tiles[:, None] + self.row_step * np.arange(self.rows)).ravel()

    @property
    def mergeable(self) -> bool:
        """Whether its tiles can be one tile: the same keys, no mask, and rows that follow one another."""
        return self.tiles == 1 or (
            self.masked_by is None and self.key_shift == 0 and self.row_shift == self.rows * self.row_step
        )

    @property
    def phases(self) -> int:
        """Tiles t, t + phases, t + 2·phases … have no key in common."""
        apart = self.key_step // gcd(
            self.key_step, self.key_shift
        )  # tiles this far apart agree in the residue
        if self.tiles <= apart:
            return 1
        shift = apart * self.key_shift // self.key_step
        return 1 if shift >= self.keys else apart * -(-self.keys // shift)

    # Parts of it, as groups.

    def tile(self, first: int, count: int = 1, apart: int = 1) -> "TileGroup":
        """Tiles first, first + apart, … of this group, as a group."""
        return replace(
            self,
            tiles=count,
            row=self.row + self.row_shift * first,
            key=self.key + self.key_shift * first,
            row_shift=self.row_shift * apart,
            key_shift=self.key_shift * apart,
        )

    def some_rows(self, first: int, count: int) -> "TileGroup":
        """Rows first, first + 1, … of each tile."""
        return replace(self, row=self.row + self.row_step * first, rows=count)

    def as_one(self) -> "TileGroup":
        """A mergeable group as one tile."""
        return self if self.tiles == 1 else replace(self, tiles=1, rows=self.tiles * self.rows)

    def small_tiles(self) -> Iterator["TileGroup"]:
        """The group in tiles of at most MAX_SPLIT[0] scores, each group at one distance: for bias and dropout."""
        group = replace(self, by_products=True)
        if self.rows * self.keys > MAX_SPLIT[0]:
            rows = max(MAX_SPLIT[0] // self.keys, MIN_SPLIT_ROWS)
            for t in range(self.tiles):
                for r in range(0, self.rows, rows):
                    part = group.tile(t).some_rows(r, min(rows, self.rows - r))
                    keys = min(self.keys, r + part.rows) if self.triangle else self.keys
                    yield replace(part, keys=keys, split=True)
        elif self.tiles > 1 and self.key_shift != self.step * self.row_shift:
            yield from (group.tile(t) for t in range(self.tiles))
        else:
            yield group

    def before(self, m: int) -> Iterator["TileGroup"]:
        """What is left of this group if the keys from m on are hidden."""
        last = self.key + self.key_step * (self.keys - 1)
        if self.key_shift:
            complete = min(max((m - 1 - last) // self.key_shift + 1, 0), self.tiles)
        else:
            complete = self.tiles if last < m else 0
        if complete:
            yield self.tile(0, complete)
        for t in range(complete, self.tiles):
            one = self.tile(t)
            if one.key < m:
                yield replace(one, keys=min(one.keys, -((one.key - m) // one.key_step)))

    # Views.

    def rows_of(self, x: Float[Tensor, "heads n *d"]) -> Float[Tensor, "heads t r *d"]:
        """The rows of each tile."""
        return _view(x, self.tiles, self.rows, self.row, self.row_shift, self.row_step)

    def keys_of(self, x: Float[Tensor, "heads m *d"]) -> Float[Tensor, "heads t l *d"]:
        """The keys of each tile, without the shared ones; tiles may overlap."""
        return _view(x, self.tiles, self.keys, self.key, self.key_shift, self.key_step)

    def add_to_keys(self, into: Float[Tensor, "heads m d"], part: Float[Tensor, "heads t l d"]) -> None:
        """into[key l of tile t] += part[t, l], always in the same order: tiles without a common key at once."""
        if self.key_shift == 0:
            self.tile(0).keys_of(into).add_(part if self.tiles == 1 else part.sum(1, keepdim=True))
            return
        for phase in range(min(self.phases, self.tiles)):
            apart = part[:, phase :: self.phases]
            self.tile(phase, apart.shape[1], self.phases).keys_of(into).add_(apart)

    def pieces(self, heads: int) -> list[tuple[int, "TileGroup", slice]]:
        """(first tile, tiles, heads) of each piece."""
        if not self.by_head:
            chunks = [slice(h, min(h + self.chunk, heads)) for h in range(0, heads, self.chunk)]
            return [(t, self.tile(t), chunk) for t in range(self.tiles) for chunk in chunks]
        if self.by_rows:
            firsts = range(0, self.rows, self.chunk)
            parts = [(0, self.some_rows(r, min(self.chunk, self.rows - r))) for r in firsts]
        else:
            firsts = range(0, self.tiles, self.chunk)
            parts = [(t, self.tile(t, min(self.chunk, self.tiles - t))) for t in firsts]
        return [(t, part, slice(h, h + 1)) for h in range(heads) for t, part in parts]


def _view(x: Tensor, tiles: int, count: int, first: int, shift: int, step: int) -> Tensor:
    head, s, *inner = x.stride()
    shape, strides = (len(x), tiles, count, *x.shape[2:]), (head, s * shift, s * step, *inner)
    return x.as_strided(shape, strides, x.storage_offset() + s * first)


@dataclass(frozen=True, eq=False)
class Piece:
    """What is computed at once: tiles of one head, rows of its one tile, or one tile of several heads.

    Its views have three axes. It is read and written where it is; see gathered_layout.py for one that is copied.
    """

    group: TileGroup
    first: int  # the tile of its group with which it begins
    tiles: TileGroup  # its tiles alone
    heads: slice
    fresh: bool  # no group before its own writes to its rows
    alone: bool  # no other group does

    @cached_property
    def scores(self) -> tuple[int, int, int]:
        """Tiles of all its heads, rows, keys."""
        return self.tiles.tiles * (self.heads.stop - self.heads.start), self.tiles.rows, self.tiles.all_keys

    def mask(self, dtype: torch.dtype) -> Float[Tensor, "c r l"] | None:
        """What is added to the scores of its own keys, to tile after tile in turn."""
        mask, cycle = self.group.mask(dtype), self.group.cycle
        if mask is None or cycle == 1:
            return mask
        t = self.first % cycle
        return mask[t : t + self.tiles.tiles]

    @property
    def has_empty_row(self) -> bool:
        return self.group.has_empty_row

    def rows_of(self, x: Float[Tensor, "heads n *d"]) -> Float[Tensor, "t r *d"]:
        tiles = self.tiles
        return self._view(x, tiles.rows, tiles.row, tiles.row_shift, tiles.row_step)

    def keys_of(self, x: Float[Tensor, "heads m *d"]) -> list[Float[Tensor, "_ l *d"]]:
        """The keys of its tiles, then the shared keys of its heads."""
        tiles = self.tiles
        own = self._view(x, tiles.keys, tiles.key, tiles.key_shift, tiles.key_step)
        return [own, *(part.keys_of(x[self.heads])[:, 0] for part in tiles.shared)]

    def _view(self, x: Tensor, count: int, first: int, shift: int, step: int) -> Tensor:
        head, s, *inner = x.stride()
        outer = s * shift if self.tiles.tiles > 1 else head
        shape, strides = (self.scores[0], count, *x.shape[2:]), (outer, s * step, *inner)
        return x.as_strided(shape, strides, x.storage_offset() + head * self.heads.start + s * first)

    def load_rows(self, x: Tensor, name: str, buffers: Buffers) -> Float[Tensor, "t r d"]:
        return self.rows_of(x)

    def load_keys(self, x: Tensor, name: str, buffers: Buffers) -> list[Tensor]:
        return self.keys_of(x)

    def output(self, x: Tensor, name: str, buffers: Buffers) -> Float[Tensor, "t r d"]:
        """Contiguous memory for what `store` brings to x, its rows of a result: x itself where it can be."""
        return x if x.is_contiguous() else buffers(name, *x.shape)

    def store(self, x: Tensor, value: Tensor) -> None:
        if value is not x:
            x.copy_(value)


@dataclass(frozen=True, eq=False)
class Layout:
    """The groups of a pattern over n queries and m keys; their sets of pairs are disjoint."""

    n: int
    m: int
    start: int  # query r is at position start + step · r
    step: int
    groups: tuple[TileGroup, ...]

    @cached_property
    def computed(self) -> int:
        return sum(group.pairs for group in self.groups)

    @property
    def concatenated(self) -> bool:
        """Whether all keys of a tile are in one softmax, and every row is in exactly one group."""
        return bool(self.groups) and self.groups[0].concatenated

    @property
    def tile_rows(self) -> int:
        """The rows of its usual tile."""
        return max((group.rows for group in self.groups), default=0)

    def before(self, m: int) -> "Layout":
        """The same with the keys from m on hidden."""
        if m >= self.m:
            return self
        return replace(self, m=m, groups=tuple(left for group in self.groups for left in group.before(m)))

    @cached_property
    def unfused(self) -> "Layout":
        """The same for bias and dropout: small tiles, each group at one distance, all by products."""
        return replace(self, groups=tuple(part for group in self._as_run for part in group.small_tiles()))

    @cached_property
    def with_bias(self) -> tuple[TileGroup, ...]:
        """The groups that the fused op runs with a bias: complete where nothing but a view of the bias is read."""
        groups: list[TileGroup] = []
        for group in self._as_run:
            one_distance = group.tiles == 1 or group.key_shift == group.step * group.row_shift
            view = group.masked_by is None and group.key_step == 1 and one_distance
            groups += [group] if view else group.small_tiles()
        return tuple(groups)

    @cached_property
    def steps(self) -> list[tuple[TileGroup, bool, bool]]:
        """(group, fresh, alone) in running order: the fused op's groups, those of several heads, the others.

        fresh: no group before it writes to its rows; alone: no other group does.
        """
        groups = sorted(self._as_run, key=lambda group: (not group.fused, group.by_head))
        times = np.zeros(self.n, dtype=np.int64)
        for group in groups:
            times[group.row_numbers] += 1
        written, steps = np.zeros(self.n, dtype=bool), []
        for group in groups:
            at = group.row_numbers
            steps.append((group, not written[at].any(), bool((times[at] == 1).all())))
            written[at] = True
        return steps

    @cached_property
    def _as_run(self) -> list[TileGroup]:
        return [group.as_one() if group.mergeable else group for group in self.groups]

    @cached_property
    def all_alone(self) -> bool:
        return all(alone for _, _, alone in self.steps)

    @cached_property
    def fused(self) -> tuple[TileGroup, ...]:
        return tuple(group for group, _, _ in self.steps if group.fused)

    def pieces(self, heads: int) -> list[Piece]:
        """The pieces that products run: those of several heads, then the others head by head."""
        if heads not in self._pieces:
            pieces = [
                Piece(group, first, tiles, of_heads, fresh, alone)
                for group, fresh, alone in self.steps
                if not group.fused
                for first, tiles, of_heads in group.pieces(heads)
            ]
            self._pieces[heads] = sorted(pieces, key=lambda p: p.heads.start if p.group.by_head else -1)
        return self._pieces[heads]

    def saved_weights(self, q: Tensor, k: Tensor, v: Tensor) -> SavedWeights:
        """Memory for at most as many weights as q, k, v and o have numbers together."""
        return SavedWeights(q, max_saved(q, k, v))

    @cached_property
    def _pieces(self) -> dict[int, list[Piece]]:
        return {}

    def nanoseconds(self, heads: int = 8, grad: bool = True, saved: int = 0) -> float:
        """An estimate on two cores, for heads of 64 in float32, where a pair of full SDPA takes 1.8, with
        gradients 6.4, and a pair of masked SDPA 2.2 and 7.1. Fitted to bench/cpu_patterns.py --group small.
        saved: how many weights are saved for the backward pass."""
        if self.concatenated:
            return self._concatenated_nanoseconds(heads, grad, saved)
        start = 1.5e6 if grad else 0.5e6
        costs = (
            (fused_nanoseconds if group.fused else products_nanoseconds)(group, heads, grad)
            for group in self._as_run
        )
        return start + sum(costs, 0.0)

    def _concatenated_nanoseconds(self, heads: int, grad: bool, saved: int) -> float:
        """Pairs, more for weights that are computed a second time; rows, more for each shared part; groups."""
        rows = [group.tiles * group.rows for group in self.groups]
        shared = sum(r * len(group.shared) for r, group in zip(rows, self.groups))
        if not grad:
            per_head = self.computed * 2.3 + sum(rows) * 60.0 + shared * 60.0
            return heads * per_head + len(rows) * 1e5 + 7e5
        per_head = self.computed * 8.2 + sum(rows) * 100.0 + shared * 400.0
        recomputed = max(heads * self.computed - saved, 0)
        return heads * per_head + recomputed * 4.0 + len(rows) * 3e5 + 3e6


def max_saved(q: Tensor, k: Tensor, v: Tensor) -> int:
    """How many weights are saved for the backward pass at most: as many numbers as q, k, v and o have together."""
    o = q.numel() // max(q.shape[-1], 1) * v.shape[-1]
    return min(q.numel() + k.numel() + v.numel() + o, MAX_SAVED_WEIGHTS)


# Estimates, fitted to bench/cpu_patterns.py --group small.


def products_nanoseconds(group: TileGroup, heads: int, grad: bool) -> float:
    """A group by products: its pairs, which cost less in tiles that are not narrow; its rows and keys, more if they
    are not neighbours, as a product writes to contiguous memory only; its pieces."""
    rows, keys = group.tiles * group.rows, group.tiles * group.keys
    slow, apart = (1.0 if group.rows >= 64 else 1.3), (1.0 if group.row_step == 1 else 2.0)
    pieces = group.pieces_of(heads) * (heads if group.by_head else 1)
    forward = slow * rows * group.keys * 2.8 + apart * rows * 60.0
    backward = slow * rows * group.keys * 6.2 + apart * (rows * 120.0 + keys * 40.0)
    return heads * (forward + grad * backward) + pieces * (400e3 if grad else 120e3)


def fused_nanoseconds(group: TileGroup, heads: int, grad: bool) -> float:
    """The same by the fused op, which takes less time per pair in its larger blocks."""
    rows = group.tiles * group.rows
    wide = (rows if group.mergeable else group.rows) >= 192
    forward = rows * 210.0 + group.pairs * 2.1 if wide else rows * 255.0 + group.pairs * 3.4
    backward = rows * 180.0 + group.pairs * 5.6 if wide else rows * 325.0 + group.pairs * 9.1
    keys = group.keys if group.mergeable else group.tiles * group.keys
    return heads * (forward + grad * (backward + keys * 110.0)) + (300e3 if grad else 120e3)

"""Layouts: groups of tiles with the same shape and the same mask, and the pieces of them that are computed at once.

    row r of tile t is query   row + row_shift·t + row_step·r
    key l of tile t is key     key + key_shift·t + key_step·l        key_shift = 0: all tiles have the same keys

The rows and keys of a group are strided views of q, k and v, which may overlap. A group may have further keys that
all its rows share. Its scores are then one row over all of them, with one softmax; otherwise the groups that have a
row in common are merged by log-sum-exp.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import gcd, inf, prod

import numpy as np
import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from ...pattern import Pattern, causal
from ...progression import Ints
from .kernels import Buffers, product

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
# Up to this many scores a group runs by products. The backward pass of the fused op weighs by exp(s − lse), with lse
# rounded: in small groups that can err by more than twice what autograd's softmax does.
MIN_FUSED_SCORES = 1 << 13
# Nanoseconds per pair, row and key of a head, and per call: forward; forward and backward. On two cores, for heads of
# 64 in float32, where a pair of SDPA takes 1.6 and 5.6. Fitted to bench/cpu_patterns.py --group small, then all by
# one factor to calls drawn by bench/auto_choice.py.
Cost = tuple[float, float, float, float]
PRODUCTS: tuple[Cost, Cost] = (1.9, 41.0, 0.0, 82e3), (6.1, 122.0, 27.0, 272e3)
FUSED: tuple[Cost, Cost] = (1.43, 143.0, 0.0, 82e3), (5.2, 265.0, 75.0, 204e3)
FUSED_NARROW: tuple[Cost, Cost] = (2.3, 173.0, 0.0, 82e3), (8.5, 394.0, 75.0, 204e3)
CONCATENATED: tuple[Cost, Cost] = (1.56, 41.0, 41.0, 68e3), (5.6, 68.0, 272.0, 204e3)
MERGED_CALL, RECOMPUTED = (40e3, 150e3), 2.7  # of a call; per weight that the backward pass computes again


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
    cycle: int = 1  # tile t has the mask of tile t mod cycle; the tiles are a multiple of it
    shared: tuple["TileGroup", ...] = ()  # further keys of all rows: one tile each, without a mask
    concatenated: bool = False  # no other group has its rows, and its weights may be saved
    # Never by the fused op, and rows are loaded from the last to the first: a bias by distance is a view then.
    by_products: bool = False
    split: bool = False  # a part of a tile that was too large
    _masks: dict[torch.dtype, Tensor] = field(default_factory=dict, init=False, repr=False)

    @property
    def all_keys(self) -> int:
        """The keys of one row: its own, then the shared ones."""
        return self.keys + sum(part.keys for part in self.shared)

    @property
    def pairs(self) -> int:
        keys = min(self.keys, (self.keys + FUSED_BLOCK) // 2) if self.triangle else self.all_keys
        return self.tiles * self.rows * keys

    # Masks.

    def allowed(self) -> Bool[Tensor, "c r l"]:
        """The allowed pairs of tile after tile in turn."""
        assert self.masked_by is not None
        with torch.device("cpu"), torch.inference_mode(False):
            t, r = torch.arange(self.cycle)[:, None, None], torch.arange(self.rows)[:, None]
            r = r.flip(0) if self.by_products else r
            i = self.start + self.step * (self.row + self.row_shift * t + self.row_step * r)
            j = self.key + self.key_shift * t + self.key_step * torch.arange(self.keys)
            return torch.broadcast_to(self.masked_by.allows(i, j), (self.cycle, self.rows, self.keys))

    def mask(self, dtype: torch.dtype) -> Float[Tensor, "c r l"] | None:
        """What is added to the scores of tile after tile in turn, 0 or −∞; None: every pair is allowed."""
        if self.masked_by is None or dtype in self._masks:
            return self._masks.get(dtype)
        with torch.inference_mode(False):
            hidden = ~self.allowed()
            mask = torch.zeros(hidden.shape, dtype=dtype, device="cpu").masked_fill_(hidden, -inf)
        if mask.numel() <= MAX_CACHED_MASK and not self.split:
            self._masks[dtype] = mask
        return mask

    @cached_property
    def empty_rows(self) -> Bool[Tensor, " r"] | None:
        """The rows that have no allowed key in a tile; None: there are none."""
        if self.masked_by is None or self.shared:
            return None
        empty = ~self.allowed().any(-1).all(0)
        return empty if empty.any() else None

    @property
    def triangle(self) -> bool:
        """Whether row r has keys 0 … r: the fused operator has an option for that mask and skips hidden pairs."""
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
        return large or half or self.nanoseconds(8, True, fused=True) < self.nanoseconds(8, True, fused=False)

    @cached_property
    def by_head(self) -> bool:
        """Whether a piece is of one head, whose q, k and v then stay in the caches from group to group."""
        if self.concatenated:
            return self.tiles >= MIN_TILES or self.cycle > 1
        return not self.split and (self.tiles > 8 or self.tiles * self.rows * self.keys >= ONE_HEAD_SCORES)

    def nanoseconds(self, heads: int, grad: bool, fused: bool, pair_time: float = 1.0) -> float:
        """An estimate for the fused op or for products. pair_time: see `kernels.pair_time`."""
        pairs, rows, keys, calls = float(self.pairs), self.tiles * self.rows, self.tiles * self.keys, 1
        if self.concatenated:
            costs, keys = CONCATENATED, rows * len(self.shared)  # a cost per row for each shared part
        elif fused:
            costs = FUSED if self.rows >= 192 else FUSED_NARROW  # the op has larger blocks from there on
        else:
            costs, calls = PRODUCTS, self.piece_count(heads)
            pairs = rows * self.keys * (1.0 if self.rows >= 64 else 1.3)  # products of few rows are slow
            if self.row_step > 1:  # what a product writes is contiguous, and copied from there
                rows, keys = 2 * rows, 2 * keys
        pair, row, key, call = costs[grad]
        return heads * (pairs * pair + rows * row + keys * key) * pair_time + calls * call

    @cached_property
    def row_numbers(self) -> Ints:
        tiles = self.row + self.row_shift * np.arange(self.tiles)
        return (tiles[:, None] + self.row_step * np.arange(self.rows)).ravel()

    @property
    def mergeable(self) -> bool:
        """Whether its tiles can be one tile: the same keys, no mask, and rows that follow one another."""
        follow = self.key_shift == 0 and self.row_shift == self.rows * self.row_step
        return self.masked_by is None and (self.tiles == 1 or follow)

    @property
    def phases(self) -> int:
        """Tiles t, t + phases, t + 2·phases … have no key in common."""
        period = self.key_step // gcd(self.key_step, self.key_shift)  # tiles that agree in the residue
        if self.tiles <= period:
            return 1
        shift = period * self.key_shift // self.key_step
        return 1 if shift >= self.keys else period * -(-self.keys // shift)

    # Parts of it, as groups.

    def tile(self, first: int, count: int = 1, every: int = 1) -> "TileGroup":
        """Tiles first, first + apart, … of this group, as a group."""
        return replace(
            self,
            tiles=count,
            row=self.row + self.row_shift * first,
            key=self.key + self.key_shift * first,
            row_shift=self.row_shift * every,
            key_shift=self.key_shift * every,
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

    def within(self, low: int, high: int) -> Iterator["TileGroup"]:
        """What is left of this group if only the keys low … high − 1 are visible."""
        first = self.key + self.key_shift * np.arange(self.tiles)
        hidden = np.clip(-((first - low) // self.key_step), 0, self.keys)  # at the beginning of each tile
        visible = np.clip(-((first - high) // self.key_step), hidden, self.keys) - hidden
        complete = np.flatnonzero(visible == self.keys)  # tiles that follow one another
        if len(complete):
            yield self.tile(int(complete[0]), len(complete))
        for t in np.flatnonzero((visible > 0) & (visible < self.keys)).tolist():
            key = int(first[t] + self.key_step * hidden[t])
            yield replace(self.tile(t), key=key, keys=int(visible[t]))

    # Views.

    def rows_of(self, x: Float[Tensor, "heads n *d"]) -> Float[Tensor, "heads t r *d"]:
        """The rows of each tile."""
        return _view(x, self.tiles, self.rows, self.row, self.row_shift, self.row_step)

    def keys_of(self, x: Float[Tensor, "heads m *d"]) -> Float[Tensor, "heads t l *d"]:
        """The keys of each tile, without the shared ones; tiles may overlap."""
        return _view(x, self.tiles, self.keys, self.key, self.key_shift, self.key_step)

    def bias_of(self, e: Float[Tensor, "heads x"], smallest: int) -> Float[Tensor, "heads r l"]:
        """The bias by distance of the first tile, rows from the last to the first: entry x of e is that at distance
        x + smallest."""
        first, a, c = self.diagonals(smallest)
        return e[:, first:].as_strided((len(e), self.rows, self.keys), (e.stride(0), a, c))

    def diagonals(self, smallest: int) -> tuple[int, int, int]:
        """first, a, c: entry first + a·r + c·l of e is the bias of row r, counted from the last, and key l."""
        last = self.start + self.step * (self.row + self.row_step * (self.rows - 1))
        return self.key - last - smallest, self.step * self.row_step, self.key_step

    def add_to_keys(self, into: Float[Tensor, "heads m d"], part: Float[Tensor, "heads t l d"]) -> None:
        """into[key l of tile t] += part[t, l], always in the same order: tiles without a common key at once."""
        if self.key_shift == 0:
            self.tile(0).keys_of(into).add_(part if self.tiles == 1 else part.sum(1, keepdim=True))
            return
        for phase in range(min(self.phases, self.tiles)):
            of_phase = part[:, phase :: self.phases]
            self.tile(phase, of_phase.shape[1], self.phases).keys_of(into).add_(of_phase)

    def pieces(self, heads: int) -> list[tuple["TileGroup", slice]]:
        """The tiles and the heads of each piece: a tile of some heads, or some tiles or rows of one head."""
        r, t, h = self._piece_size
        parts = [self.tile(*x).some_rows(*y) for x in cuts(self.tiles, t) for y in cuts(self.rows, r)]
        of_heads = [slice(first, first + count) for first, count in cuts(heads, h)]
        if self.by_head:
            return [(part, x) for x in of_heads for part in parts]
        return [(part, x) for part in parts for x in of_heads]

    def piece_count(self, heads: int) -> int:
        """The number of `pieces`, which may be millions."""
        return prod(-(-a // b) for a, b in zip((self.rows, self.tiles, heads), self._piece_size))

    @property
    def _piece_size(self) -> tuple[int, int, int]:
        """Rows, tiles and heads of a piece."""
        limit = MAX_CONCATENATED if self.concatenated else MAX_SPLIT[1] if self.split else MAX_SCORES
        chunk = max(limit // (self.all_keys * self.rows), 1)
        if not self.by_head:
            return self.rows, 1, chunk
        if self.tiles == 1 and self.masked_by is None and not self.concatenated:
            return max(limit // self.keys, 1), 1, 1
        even = -(-self.tiles // -(-self.tiles // chunk))  # pieces of one size
        return self.rows, -(-even // self.cycle) * self.cycle, 1


def cuts(count: int, size: int) -> list[tuple[int, int]]:
    """(first, number) of parts of this size; the last may be smaller."""
    return [(first, min(size, count - first)) for first in range(0, count, size)]


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
    subgroup: TileGroup  # its tiles alone
    heads: slice
    fresh: bool  # no group before its own writes to its rows
    alone: bool  # no other group does

    @cached_property
    def score_shape(self) -> tuple[int, int, int]:
        """Tiles of all its heads, rows, keys."""
        heads, group = self.heads.stop - self.heads.start, self.subgroup
        return group.tiles * heads, group.rows, group.all_keys

    def mask(self, dtype: torch.dtype) -> Float[Tensor, "c r l"] | None:
        return self.group.mask(dtype)

    @property
    def has_empty_row(self) -> bool:
        return self.group.empty_rows is not None

    def rows_of(self, x: Float[Tensor, "heads n *d"]) -> Float[Tensor, "t r *d"]:
        group = self.subgroup
        return self._view(x, group.rows, group.row, group.row_shift, group.row_step)

    def _view(self, x: Tensor, count: int, first: int, shift: int, step: int) -> Tensor:
        head, s, *inner = x.stride()
        outer = s * shift if self.subgroup.tiles > 1 else head
        shape, strides = (self.score_shape[0], count, *x.shape[2:]), (outer, s * step, *inner)
        return x.as_strided(shape, strides, x.storage_offset() + head * self.heads.start + s * first)

    def load_rows(self, x: Tensor, name: str, buffers: Buffers) -> Float[Tensor, "t r *d"]:
        return self.in_order(self.rows_of(x))

    def in_order(self, x: Float[Tensor, "t r *d"]) -> Float[Tensor, "t r *d"]:
        """From the order of the rows to that in which they are loaded, and back."""
        return x.flip(1) if self.group.by_products else x

    def load_keys(self, x: Shaped[Tensor, "heads m *d"], name: str, buffers: Buffers) -> list[Tensor]:
        """The keys of its tiles, then the shared keys of its heads."""
        group = self.subgroup
        tile_keys = self._view(x, group.keys, group.key, group.key_shift, group.key_step)
        return [tile_keys, *(part.keys_of(x[self.heads])[:, 0] for part in group.shared)]

    def output(self, x: Tensor, name: str, buffers: Buffers) -> Float[Tensor, "t r d"]:
        """Contiguous memory for what `store` brings to x, its rows of a result: x itself where it can be."""
        direct = self.fresh and x.is_contiguous() and not self.group.by_products
        return x if direct else buffers(name, *x.shape)

    def store(self, x: Tensor, value: Tensor) -> None:
        """Added to x where a group before its own wrote to these rows."""
        if not self.fresh:
            x.add_(self.in_order(value))
        elif value is not x:
            x.copy_(self.in_order(value))

    def add_to_keys(
        self,
        grads: dict[str, Tensor],
        name: str,
        of_pairs: Float[Tensor, "t r keys"],
        of_rows: Float[Tensor, "t r d"],
        alpha: float,
        buffers: Buffers,
    ) -> None:
        """grads[name][key l of tile t] += alpha · Σ_r of_pairs[t, r, l] · of_rows[t, r], always in the same order."""
        grad, column = grads[name][self.heads], self.subgroup.keys
        self._add_to_own_keys(grad, of_pairs[..., :column].mT, of_rows, alpha, buffers)
        for part in self.subgroup.shared:
            into, columns = part.keys_of(grad)[:, 0], of_pairs[..., column : column + part.keys]
            if len(into) == 1:
                into[0].addmm_(columns.flatten(0, 1).mT, of_rows.flatten(0, 1), alpha=alpha)
            else:
                into.add_(torch.bmm(columns.mT, of_rows, out=buffers("part", *into.shape)), alpha=alpha)
            column += part.keys

    def _add_to_own_keys(
        self, grad: Tensor, of_pairs: Float[Tensor, "t l r"], of_rows: Tensor, alpha: float, buffers: Buffers
    ) -> None:
        """Where the keys are a multiple of the shift, tiles that far apart fill contiguous memory without a gap."""
        group, l, d = self.subgroup, self.subgroup.keys, grad.shape[-1]
        if group.split or len(of_rows) == 1:  # so large that one head after the other is as fast, or one
            for into, x, y in zip(group.keys_of(grad)[:, 0], of_pairs, of_rows):
                into.addmm_(x, y, alpha=alpha)
        elif len(grad) == 1 and group.key_step == 1 and group.key_shift and l % group.key_shift == 0:
            phases = l // group.key_shift
            for phase in range(min(phases, group.tiles)):
                phase_rows = of_rows[phase::phases]
                first = group.key + phase * group.key_shift
                into = grad[0, first : first + len(phase_rows) * l].view(-1, l, d)
                into.baddbmm_(of_pairs[phase::phases], phase_rows, alpha=alpha)
        else:
            part = product(of_pairs, of_rows, alpha, buffers("part", len(of_rows), l, d))
            group.add_to_keys(grad, part.unflatten(0, (len(grad), group.tiles)))


@dataclass(frozen=True, eq=False)
class Layout:
    """The groups of a pattern over n queries and m keys; their sets of pairs are disjoint."""

    n: int
    m: int
    start: int  # query r is at position start + step · r
    step: int
    groups: tuple[TileGroup, ...]
    _pieces: dict[int, list[Piece]] = field(default_factory=dict, init=False, repr=False)  # by heads
    _times: dict[tuple[int, bool, int, float], float] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def computed(self) -> int:
        return sum(group.pairs for group in self.groups)

    @property
    def concatenated(self) -> bool:
        """Whether all keys of a tile are in one softmax, and every row is in exactly one group."""
        return bool(self.groups) and self.groups[0].concatenated

    @lru_cache(maxsize=256)  # noqa: B019 — of all layouts together: the oldest is dropped first
    def within(self, low: int, high: int) -> "Layout":
        """The same with none but the keys low … high − 1 visible."""
        if low <= 0 and high >= self.m:
            return self
        groups = tuple(part for group in self.groups for part in group.within(low, high))
        return replace(self, m=min(high, self.m), groups=groups)

    @cached_property
    def unfused(self) -> "Layout":
        """The same for bias and dropout: small tiles, each group at one distance, all by products."""
        return replace(self, groups=tuple(part for group in self.groups for part in group.small_tiles()))

    @cached_property
    def with_bias(self) -> tuple[TileGroup, ...]:
        """The groups that the fused op runs with a bias: complete where nothing but a view of the bias is read."""
        groups: list[TileGroup] = []
        for group in self.groups:
            one_distance = group.tiles == 1 or group.key_shift == group.step * group.row_shift
            view = group.masked_by is None and group.key_step == 1 and one_distance
            groups += [group] if view else group.small_tiles()
        return tuple(groups)

    @cached_property
    def steps(self) -> list[tuple[TileGroup, bool, bool]]:
        """(group, fresh, alone) in running order: the fused op's groups, those of several heads, the others.

        fresh: no group before it writes to its rows; alone: no other group does.
        """
        groups = sorted(self.groups, key=lambda group: (not group.fused, group.by_head))
        writers = np.zeros(self.n, dtype=np.int64)
        for group in groups:
            writers[group.row_numbers] += 1
        written, steps = np.zeros(self.n, dtype=bool), []
        for group in groups:
            rows = group.row_numbers
            steps.append((group, not written[rows].any(), bool((writers[rows] == 1).all())))
            written[rows] = True
        return steps

    @cached_property
    def overwrites(self) -> bool:
        """Whether products are the first to write to each row: it needs no zeros before."""
        first = (group for group, fresh, _ in self.steps if fresh and not group.fused)
        return sum(group.tiles * group.rows for group in first) == self.n

    @cached_property
    def fused(self) -> tuple[TileGroup, ...]:
        return tuple(group for group, _, _ in self.steps if group.fused)

    def pieces(self, heads: int) -> list[Piece]:
        """The pieces that products run: those of several heads, then the others head by head."""
        if heads not in self._pieces:
            pieces = [
                Piece(group, *piece, fresh, alone)
                for group, fresh, alone in self.steps
                if not group.fused
                for piece in group.pieces(heads)
            ]
            self._pieces[heads] = sorted(pieces, key=lambda p: p.heads.start if p.group.by_head else -1)
        return self._pieces[heads]

    def nanoseconds(self, heads: int = 8, grad: bool = True, saved: int = 0, pair_time: float = 1.0) -> float:
        """An estimate. saved: how many weights of concatenated keys the backward pass does not compute again."""
        if (time := self._times.get((heads, grad, saved, pair_time))) is None:
            time = sum(group.nanoseconds(heads, grad, group.fused, pair_time) for group in self.groups)
            again = max(heads * self.computed - saved, 0) if grad else 0
            time += RECOMPUTED * pair_time * again if self.concatenated else MERGED_CALL[grad]
            self._times[heads, grad, saved, pair_time] = time
        return time

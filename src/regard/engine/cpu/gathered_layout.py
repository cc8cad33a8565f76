"""Tiles of queries with the keys gathered that any of them attends to: index tables, made once per set of shapes.

A tile of 64 queries under `window(16) | every(32)` has some hundred keys, wherever they are. Copied one after the
other they make one batch of small dense products; only the masks differ from tile to tile. For short sequences this
is the fastest layout: PyTorch's fused op works in blocks of 32 or 64 queries there, and visits every key.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ... import compat
from ...pattern import BlockGrid, Pattern, neighborhood
from ...pattern.classification import BLOCK
from ...pattern.parts import row_steps
from ..call import Place
from .kernels import SAVED_WEIGHTS, Buffers, pair_time, product

MAX_PAIRS = 1 << 20  # pairs of a head that are evaluated to choose the tiles
KEY_MULTIPLE = 16  # keys of a tile come in multiples of this, where there are as many: MKL is slow on others
MIN_ROWS = 32  # queries of a tile
DATA_ROWS = 64  # queries of a tile where data decide
MAX_DATA_PAIRS = 1 << 28  # pairs that are enumerated for it; those of all blocks may be 64 × as many
DATA_SIZES = 8  # different numbers of keys that such tiles may have: those of one number are computed at once
MAX_SCORES = 1 << 18  # scores of one piece: 1 MiB in float32 stays in the caches
MAX_L2_NUMBERS = 1 << 18  # numbers of all queries that the L2 cache holds, also where their rows are apart


class Shape(NamedTuple):
    """`tiles` tiles of `rows` queries over `keys` keys each. The queries of a tile are `row_step` apart; where one
    residue class ends within a tile, the next one follows."""

    row_step: int
    tiles: int
    rows: int
    keys: int

    @property
    def pairs(self) -> int:
        return self.tiles * self.rows * self.keys


def nanoseconds(shape: Shape, n: int, heads: int, d: int, dtype: torch.dtype, grad: bool) -> float:
    """An estimate on two cores: pairs, queries, the rows that are copied, the call itself."""
    row_step, tiles, rows, keys = shape
    copied = (6 if grad else 2) * tiles * keys * (tiles > 1)
    copied += (5 if grad else 2) * n * (row_step > 1 or tiles * rows > n)
    pair, query, call = (5.4, 25.0, 1e5) if grad else (1.5, 25.0, 3e4)
    pair *= 1.2 if keys > 3 * rows else 1.0  # products of few rows are slow
    pair *= 1.3 if grad and heads * shape.pairs > SAVED_WEIGHTS[0] else 1.0  # some are computed a second time
    row = (18.0 if row_step > 1 and heads * n * d > MAX_L2_NUMBERS else 6.0) * d / 64 * dtype.itemsize / 4
    per_head = shape.pairs * pair * pair_time(d, d, dtype) + n * query + copied * row
    return heads * per_head + call


@lru_cache(maxsize=256)
def shapes(pattern: Pattern, n: int, m: int, start: int, step: int) -> tuple[Shape, ...]:
    """Divisions of the queries into tiles: neighbors, or those of the same residues mod row_step."""
    allowed = pattern.allowed(n, m, (start, step), torch.device("cpu"))
    bits = np.packbits(allowed.numpy(), axis=1)  # eight keys in a byte
    candidates = []
    for row_step in row_steps(pattern, step, by_keys=False):
        if row_step > 1 and row_step >= n:
            break
        order, tiles = _order(n, row_step), 1
        while tiles == 1 or n >= MIN_ROWS * tiles:
            rows = -(-n // tiles)
            of_tiles = bits[_padded(order, tiles * rows).numpy()].reshape(tiles, rows, -1)
            needed = np.unpackbits(np.bitwise_or.reduce(of_tiles, axis=1), axis=1).sum(1, dtype=np.int64)
            keys = max(-(-int(needed.max()) // KEY_MULTIPLE), 1) * KEY_MULTIPLE
            candidates.append(Shape(row_step, tiles, rows, min(keys, m)))
            tiles *= 2
    return tuple(candidates)


class Gathering(NamedTuple):
    """The queries and keys of tiles that all have the same number of keys."""

    rows: Int[Tensor, "t r"]  # the last query is repeated to fill the last tile
    keys: Int[Tensor, "t l"]  # with padding, to which no row attends
    table: Bool[Tensor, "t r l"]

    @classmethod
    def of(cls, rows: Int[Tensor, "t r"], tiles: list[tuple[Tensor, Tensor]], size: int) -> "Gathering":
        """tiles: the keys of each, and its table of allowed pairs. Key 0 is the padding, which the table hides."""
        keys = torch.zeros(len(tiles), size, dtype=torch.long, device="cpu")
        pairs = torch.zeros(*rows.shape, size, dtype=torch.bool, device="cpu")
        for t, (tile_keys, table) in enumerate(tiles):
            keys[t, : len(tile_keys)], pairs[t, :, : len(tile_keys)] = tile_keys, table
        return cls(rows, keys, pairs)

    @property
    def shape(self) -> Shape:
        return Shape(1, *self.table.shape)


def gathered(place: Place, shape: Shape) -> Gathering:
    """The tiles of this shape."""
    (row_step, count, r, l), (pattern, n, m, start, step) = shape, place
    allowed = pattern.allowed(n, m, (start, step), torch.device("cpu"))
    rows = _padded(_order(n, row_step), count * r).view(count, r)
    tables = allowed[rows]
    keys = [torch.arange(m, device="cpu") if l == m else table.any(0).nonzero().view(-1) for table in tables]
    return Gathering.of(rows, [(j, table[:, j]) for j, table in zip(keys, tables)], l)


def gathered_by_rows(place: Place) -> tuple[Gathering, ...] | None:
    """Tiles of a pattern with data, enumerated in the blocks that may hold pairs; None if data differ by batch row.

    Cached for the tensors as they are: a change in place has another version, unless it is unknown.
    """
    versions = tuple(map(compat.version, place[0].tensors()))
    make = _gathered_by_rows.__wrapped__ if None in versions else _gathered_by_rows
    return make(place, versions)


@lru_cache(maxsize=16)
def _gathered_by_rows(place: Place, versions: tuple[int | None, ...]) -> tuple[Gathering, ...] | None:
    pattern, n, m, start, step = place
    if pattern.data_shape != (1, 1) or n * m > 64 * MAX_DATA_PAIRS:
        return None
    # Queries of one block of a grid follow one another, as they have most keys in common.
    grids = [leaf for leaf in pattern.leaves() if isinstance(leaf, neighborhood) and leaf.size == n]
    by_blocks = grids and (start, step) == (0, 1)
    order = grids[0].by_blocks(DATA_ROWS) if by_blocks else torch.arange(n, device="cpu")
    rows = _padded(order, -(-n // DATA_ROWS) * DATA_ROWS).view(-1, DATA_ROWS)
    i, tiles = start + step * torch.arange(n, device="cpu"), []
    empty = BlockGrid(i[None], m, step).classify(pattern).none[0]
    blocks = [~empty[tile // BLOCK].all(0) for tile in rows]
    if sum(int(visited.sum()) for visited in blocks) * BLOCK * DATA_ROWS > MAX_DATA_PAIRS:
        return None
    for tile, visited in zip(rows, blocks):
        j = visited.repeat_interleave(BLOCK)[:m].nonzero().view(-1)
        table = torch.as_tensor(pattern.allows(i[tile][:, None], j), device="cpu")
        table = table.broadcast_to(1, 1, DATA_ROWS, len(j))[0, 0]
        tile_keys = table.any(0).nonzero().view(-1)
        tiles.append((j[tile_keys], table[:, tile_keys]))
    counts = torch.tensor([max(len(tile_keys), 1) for tile_keys, _ in tiles], device="cpu")
    size_step = -(-int(counts.max()) // (DATA_SIZES * KEY_MULTIPLE)) * KEY_MULTIPLE
    sizes = (-(-counts // size_step) * size_step).clamp_max(m)
    gatherings = []
    for size in sizes.unique().tolist():
        of_size = (sizes == size).nonzero().view(-1)
        gatherings.append(Gathering.of(rows[of_size], [tiles[t] for t in of_size.tolist()], size))
    return tuple(gatherings)


class GatheredLayout:
    """The pieces of a call, some heads each: which rows of (heads · n, d) and of (heads · m, d) they copy."""

    concatenated = overwrites = True
    fused: tuple = ()

    def __init__(self, gatherings: Sequence[Gathering], q: Tensor, k: Tensor, v: Tensor):
        n, m, pairs = q.shape[2], k.shape[2], sum(gathering.table.numel() for gathering in gatherings)
        heads, group = q.shape[0] * q.shape[1], q.shape[1] // k.shape[1]
        chunk = min(max(MAX_SCORES // (pairs * group), 1) * group, heads)
        counts = [min(chunk, heads - first) for first in range(0, heads, chunk)]
        tables = {count: _pieces(gatherings, n, m, count, group, q.dtype) for count in set(counts)}
        self._pieces = tables[chunk]
        if len(counts) > 1:
            self._pieces = []
            for first, count in zip(range(0, heads, chunk), counts):
                of_rows = slice(first * n, (first + count) * n)
                of_keys = slice(first // group * m, (first + count) // group * m)
                self._pieces += [replace(x, of_rows=of_rows, of_keys=of_keys) for x in tables[count]]

    def pieces(self, heads: int) -> list["GatheredPiece"]:
        return self._pieces


@dataclass(frozen=True, eq=False)
class GatheredPiece:
    """The tiles of some heads that have one number of keys. Queries and keys are copied into buffers unless they are
    in order already. Tiles with other numbers of keys are other pieces; the last one adds up the results of all."""

    score_shape: tuple[int, int, int]  # tiles of all its heads, rows, keys
    masks: Float[Tensor, "t r l"]  # 0 or −∞; a row without pairs has zeros
    # The rows of (key heads · m, d), and of (heads · n, d), that the tiles have; None: all, in order.
    key_index: Int[Tensor, " keys"] | None
    row_index: Int[Tensor, " rows"] | None
    padding_rows: Int[Tensor, " padding"] | None  # the rows that only fill the last tile of a head
    row_of_query: Int[Tensor, " n"] | None  # the row of each query among those of all pieces
    copies: Int[Tensor, " copies"]  # among the keys of all pieces, the copies of key 0, then of key 1, …
    first_copy: Int[Tensor, " m"]  # where in `copies` those of each key begin
    offsets: tuple[int, int]  # the number of rows, and of keys, in the pieces before it
    totals: tuple[int, int]  # the number of rows, and of keys, in all pieces
    of_rows: slice | None = None  # its part of (all heads · n, d); None: it has all heads
    of_keys: slice | None = None  # its part of (all key heads · m, d)

    fresh = alone = True
    has_empty_row = False  # the mask lets an empty row attend to all keys; the caller clears it

    def mask(self, dtype: torch.dtype) -> Float[Tensor, "t r l"]:
        return self.masks

    def rows_of(self, x: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
        return x if self.of_rows is None else x.reshape(-1, x.shape[-1])[self.of_rows]

    def load_rows(self, x: Float[Tensor, "... d"], name: str, buffers: Buffers) -> Float[Tensor, "t r d"]:
        """The queries of each tile. What only fills the last tile of a head has no gradient."""
        x = _gather(self.rows_of(x), self.row_index, (*self.score_shape[:2], x.shape[-1]), name, buffers)
        if name == "do" and self.padding_rows is not None:
            x.view(-1, x.shape[-1]).index_fill_(0, self.padding_rows, 0.0)
        return x

    def load_keys(self, x: Float[Tensor, "... d"], name: str, buffers: Buffers) -> list[Tensor]:
        shape = self.score_shape[0], self.score_shape[2], x.shape[-1]
        x = x if self.of_keys is None else x.reshape(-1, shape[-1])[self.of_keys]
        return [_gather(x, self.key_index, shape, name, buffers)]

    def output(self, x: Float[Tensor, "... d"], name: str, buffers: Buffers) -> Float[Tensor, "t r d"]:
        """Memory for what `store` brings to x, its rows of a result: x itself where the queries are in order."""
        shape = (*self.score_shape[:2], x.shape[-1])
        return x.view(shape) if self.row_of_query is None else self._part(name, 0, shape, buffers)

    def store(self, x: Float[Tensor, "... d"], value: Float[Tensor, "t r d"]) -> None:
        """Each query's row to its place, once those of all pieces are there."""
        d, rows = x.shape[-1], self.score_shape[0] * self.score_shape[1]
        if self.row_of_query is not None and self.offsets[0] + rows == self.totals[0]:
            value = value.as_strided((self.totals[0], d), (d, 1), 0)
            torch.index_select(value, 0, self.row_of_query, out=x.view(-1, d))

    def add_to_keys(
        self,
        grads: dict[str, Any],
        name: str,
        of_pairs: Tensor,
        of_rows: Tensor,
        alpha: float,
        buffers: Buffers,
    ) -> None:
        """Append the gradient of the keys of these heads: the sum over all copies of each key, in one order."""
        t, l, d = self.score_shape[0], self.score_shape[2], of_rows.shape[-1]
        memory = "part" if t * l == self.totals[1] else name
        product(of_pairs.mT, of_rows, alpha, self._part(memory, 1, (t, l, d), buffers))
        part = buffers(memory, self.totals[1], d)  # the same memory
        if self.key_index is None:
            grads[name].append(part.clone())
        elif self.offsets[1] + t * l == self.totals[1]:  # a sum of rows; torch.nn.functional takes 4 µs more
            grads[name].append(torch.embedding_bag(part, self.copies, self.first_copy, False, 0)[0])

    def _part(self, name: str, axis: int, shape: tuple[int, ...], buffers: Buffers) -> Tensor:
        """Its rows (axis 0) or keys (1) of a buffer that has those of all pieces."""
        count = shape[0] * shape[1]
        if count == self.totals[axis]:
            return buffers(name, *shape)
        first = self.offsets[axis]
        return buffers(name, self.totals[axis], shape[2])[first : first + count].view(shape)


def _gather(
    x: Float[Tensor, "... d"],
    index: Int[Tensor, " taken"] | None,
    shape: tuple[int, ...],
    name: str,
    buffers: Buffers,
) -> Float[Tensor, "t *size d"]:
    """Rows in order, or copied by their indices."""
    if index is None:
        return x.reshape(shape)
    d = shape[-1]
    torch.index_select(x.reshape(-1, d), 0, index, out=buffers(name, index.numel(), d))
    return buffers(name, *shape)  # the same memory


def _pieces(
    gatherings: Sequence[Gathering], n: int, m: int, heads: int, group: int, dtype: torch.dtype
) -> list[GatheredPiece]:
    """The tables for this many heads, of which each `group` share their keys."""
    head = torch.arange(heads, device="cpu")[:, None]
    index = [(m * (head // group) + gathering.keys.view(-1)).view(-1) for gathering in gatherings]
    rows = [(n * head + gathering.rows.view(-1)).view(-1) for gathering in gatherings]
    key_of_copy, queries = torch.cat(index), torch.cat(rows)
    needed = torch.cat([x.table.any(1).view(-1).repeat(heads) for x in gatherings]).nonzero().view(-1)
    counts = torch.bincount(key_of_copy[needed], minlength=heads // group * m)
    copies, first = needed[key_of_copy[needed].argsort(stable=True)], counts.cumsum(0) - counts
    by_query = queries.argsort(stable=True)  # the first of those of a query is its own, the others fill up
    is_first = torch.ones_like(queries, dtype=torch.bool)
    is_first[by_query[1:]] = queries[by_query].diff() != 0
    in_order = len(gatherings) == 1 and torch.equal(queries, torch.arange(heads * n, device="cpu"))
    total, before, pieces = (len(queries), len(key_of_copy)), (0, 0), []
    for gathering, keys, queries in zip(gatherings, index, rows):
        (count, r, l), table = gathering.table.shape, gathering.table | ~gathering.table.any(-1, keepdim=True)
        mask = torch.zeros(table.shape, dtype=dtype, device="cpu").masked_fill_(~table, -inf)
        filled = (~is_first[before[0] : before[0] + len(queries)]).nonzero().view(-1)
        pieces.append(
            GatheredPiece(
                (heads * count, r, l),
                mask if count == 1 else mask.repeat(heads, 1, 1),
                None if len(gatherings) == count == group == 1 and l == m else keys,
                None if in_order else queries,
                filled if len(filled) else None,
                None if in_order else by_query[is_first[by_query]],
                copies,
                first,
                before,
                total,
            )
        )
        before = before[0] + len(queries), before[1] + len(keys)
    return pieces


def _order(n: int, row_step: int) -> Int[Tensor, " n"]:
    """All queries, those of one residue mod row_step one after the other."""
    return torch.cat([torch.arange(c, n, row_step, device="cpu") for c in range(min(row_step, n))])


def _padded(order: Int[Tensor, " n"], count: int) -> Int[Tensor, " count"]:
    """`count` of them: the last one is repeated."""
    return torch.cat([order, order[-1:].expand(count - len(order))])

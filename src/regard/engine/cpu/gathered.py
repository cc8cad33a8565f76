"""Queries in tiles, and for each tile the keys that some query of it sees: tables of indices, made once for a call.

A tile of 64 queries under `window(16) | every(32)` sees some hundred keys, wherever they lie. Copied one behind the
other they make one batch of small dense products; only the masks differ from tile to tile.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ...pattern import Pattern
from ..plan.tiles import row_steps

PAIRS = 1 << 20  # of a head: what is looked at to lay the tiles
WHOLE = 16  # keys of a tile come in multiples of this, where there are as many: MKL is slow on others
LEAST = 32  # queries of a tile
KEPT = 1 << 21  # weights that are kept for the backward pass: 8 MiB in float32; more are made again there


class Lay(NamedTuple):
    """`tiles` tiles of `rows` queries, `hop` apart within a tile as far as that goes, over `keys` keys each."""

    hop: int
    tiles: int
    rows: int
    keys: int

    @property
    def pairs(self) -> int:
        return self.tiles * self.rows * self.keys


@dataclass(frozen=True, eq=False)
class Tiles:
    """Which rows of (heads · n, d) the tiles hold, which of (heads · m, d), and the mask of each tile."""

    n: int
    m: int
    mask: Float[Tensor, "t r l"]  # 0 or −∞; a row without pairs has zeros
    keys: Int[Tensor, " keys"] | None  # None: all, in order
    copies: Int[Tensor, " copies"]  # of the keys of all tiles, those of key 0, of key 1, …
    first: Int[Tensor, " m"]  # where in `copies` those of each key begin
    held: int  # of the copies, those of one head
    rows: Int[Tensor, " rows"] | None = None  # None: all, in order
    place: Int[Tensor, " n"] | None = None  # of each query among these rows


def quickest(
    pattern: Pattern, n: int, m: int, start: int, step: int, heads: int, d: int, grad: bool
) -> tuple[Lay, float] | None:
    """The quickest way to cut a call with heads d wide, and its nanoseconds.

    None where nothing is cut and nothing learns: one tile of everything is one call of the fused op.
    """
    some = [lay for lay in lays(pattern, n, m, start, step) if grad or lay.tiles > 1]
    times = [(lay, nanoseconds(lay, n, heads, d, grad)) for lay in some]
    return min(times, key=lambda pair: pair[1], default=None)


def nanoseconds(lay: Lay, n: int, heads: int, d: int, grad: bool) -> float:
    """About the time of a call on two cores: its pairs, queries and tiles, the rows that are copied, the call."""
    hop, tiles, rows, keys = lay
    moved = (6 if grad else 2) * tiles * keys * (tiles > 1)
    moved += (5 if grad else 2) * n * (hop > 1 or tiles * rows > n)
    pair, query, tile, call = (5.5, 0.0, 0.0, 6e5) if grad else (2.0, 50.0, 1.5e3, 5e4)
    pair *= 1.2 if keys > 3 * rows else 1.0  # products of few rows are slow
    pair *= 1.3 if grad and heads * lay.pairs > KEPT else 1.0  # its weights are made twice
    wide = d / 64
    return (
        heads * (lay.pairs * pair * (0.3 + 0.7 * wide) + n * query + tiles * tile + moved * 25.0 * wide)
        + call
    )


@lru_cache(maxsize=256)
def lays(pattern: Pattern, n: int, m: int, start: int, step: int) -> tuple[Lay, ...]:
    """Ways to cut the queries into tiles: neighbours, or those of some residues mod hop together."""
    allowed = pattern.allowed(n, m, (start, step), torch.device("cpu"))
    found = []
    for hop in row_steps(pattern, step, by_keys=False):
        if hop > 1 and hop >= n:
            break
        order, tiles = _order(n, hop), 1
        while tiles == 1 or n >= LEAST * tiles:
            rows = -(-n // tiles)
            seen = allowed[_filled(order, tiles * rows)].view(tiles, rows, m).any(1)
            most = int(seen.sum(1).max())
            found.append(Lay(hop, tiles, rows, min(max(-(-most // WHOLE), 1) * WHOLE, m)))
            tiles *= 2
    return tuple(found)


def tiles(allowed: Bool[Tensor, "n m"], heads: int, group: int, lay: Lay, dtype: torch.dtype) -> Tiles:
    """The tables of one way to cut a call with so many heads, of which each `group` share their keys."""
    n, m = allowed.shape
    hop, count, r, l = lay
    rows = _filled(_order(n, hop), count * r)
    table = allowed[rows].view(count, r, m)
    seen = table.any(1)
    if l == m:
        keys = torch.arange(m, device="cpu").expand(count, -1)
    else:  # the seen ones, then others to fill up
        keys = (~seen).to(torch.int8).sort(dim=1, stable=True).indices[:, :l]
    table = table.gather(2, keys[:, None].expand(-1, r, -1))
    table = table | ~table.any(-1, keepdim=True)
    mask = torch.zeros(table.shape, dtype=dtype, device="cpu").masked_fill_(~table, -inf)
    mask = mask.repeat(heads, 1, 1)
    head = torch.arange(heads, device="cpu")
    own = (m * (head // group)[:, None] + keys.reshape(-1)).view(-1)
    real = seen.gather(1, keys).view(-1).repeat(heads).nonzero().view(-1)
    many = torch.bincount(own[real], minlength=heads // group * m)
    copies, first = real[own[real].argsort(stable=True)], many.cumsum(0) - many
    index = None if count == 1 and l == m and group == 1 else own
    held = len(real) // heads
    if hop == 1 and count * r == n:
        return Tiles(n, m, mask, index, copies, first, held)
    place = torch.empty(n, dtype=torch.long, device="cpu")
    place[rows[:n]] = torch.arange(n, device="cpu")
    of, to = ((size * head[:, None] + x).view(-1) for size, x in ((n, rows), (count * r, place)))
    return Tiles(n, m, mask, index, copies, first, held, of, to)


def _order(n: int, hop: int) -> Int[Tensor, " n"]:
    """All queries, those of one residue mod hop one behind the other."""
    return torch.cat([torch.arange(c, n, hop, device="cpu") for c in range(min(hop, n))])


def _filled(order: Int[Tensor, " n"], count: int) -> Int[Tensor, " count"]:
    """So many: the last one repeated."""
    return torch.cat([order, order[-1:].expand(count - len(order))])

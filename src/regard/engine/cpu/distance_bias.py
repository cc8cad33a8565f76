"""A bias by distance in tiles, read and differentiated along diagonals: nothing of size n × m.

    s = scale · q kᵀ + e[j − i]        de[x] = Σ ds over the pairs with j − i = x

With the rows of a tile in reverse order, the bias of a tile is e[x₀ + a·r + c·l], a and c positive: a view of e. Its
gradient is a sum along the anti-diagonals of the tile, which are the columns of another view.
"""

from functools import reduce
from operator import add

import torch
from einops import einsum, repeat
from jaxtyping import Float
from torch import Tensor

from ...position import ByDistance
from ...position.distance import at_least_float32
from .kernels import Buffers
from .layout import TileGroup


def along(bias: ByDistance, low: int, high: int) -> Float[Tensor, "h x"]:
    """The bias at distances low … high. Its gradient is summed in one order; that of indexing is not."""
    parts, reach = [], bias.reach
    if bias.table is not None:
        near = bias.table[:, max(low + reach, 0) : max(high + reach + 1, 0)]
        first = bias.table[:, :1].expand(-1, max(min(high + 1, -reach) - low, 0))
        last = bias.table[:, -1:].expand(-1, max(high - max(low - 1, reach), 0))
        parts.append(torch.cat([first, near, last], -1))
    if bias.slopes is not None:
        slopes = at_least_float32(bias.slopes)
        distances = torch.arange(low, high + 1, dtype=slopes.dtype, device=slopes.device).abs()
        parts.append(-einsum(slopes, distances, "h, x -> h x"))
    return reduce(add, parts)


def along_backward(
    de: Float[Tensor, "h x"], bias: ByDistance, low: int, high: int
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of table and slopes: those of far distances are summed into the ends of the table."""
    table, slopes, reach = None, None, bias.reach
    if bias.table is not None:
        table = torch.zeros_like(bias.table, dtype=de.dtype)
        first, last = max(low, -reach), min(high, reach)
        if first <= last:
            table[:, first + reach : last + reach + 1] = de[:, first - low : last - low + 1]
        table[:, 0] += de[:, : max(min(high + 1, -reach) - low, 0)].sum(-1)
        table[:, -1] += de[:, max(reach + 1 - low, 0) :].sum(-1)
    if bias.slopes is not None:
        slopes = -(de @ torch.arange(low, high + 1, dtype=de.dtype, device=de.device).abs())
    return table, slopes


def for_each_batch_row(e: Float[Tensor, "h x"], b: int) -> Float[Tensor, "b h x"]:
    """e once per batch row, so that it is sliced as the heads are."""
    return repeat(e, "h x -> b h x", b=b).contiguous()


def padded(shape: tuple[int, int, int], buffers: Buffers) -> Float[Tensor, "t r l"]:
    """Memory for ds in which each row is followed by as many zeros as there are rows."""
    t, r, l = shape
    buffer = buffers("padded", t, r, l + r)
    buffer[..., l:].zero_()
    return buffer[..., :l]


def in_tile(e: Float[Tensor, "heads x"], tiles: TileGroup, smallest: int) -> Float[Tensor, "heads r l"]:
    """The bias of the first tile, rows from the last to the first. Entry x of e is that at distance x + smallest."""
    first, a, c = _place(tiles, smallest)
    return e[:, first:].as_strided((len(e), tiles.rows, tiles.keys), (e.stride(0), a, c))


def _place(tiles: TileGroup, smallest: int) -> tuple[int, int, int]:
    """first, a, c: entry first + a·r + c·l of e is the bias of row r, counted from the last, and key l."""
    last = tiles.start + tiles.step * (tiles.row + tiles.row_step * (tiles.rows - 1))
    return tiles.key - last - smallest, tiles.step * tiles.row_step, tiles.key_step


def add_gradient(
    de: Float[Tensor, "heads x"], ds: Float[Tensor, "t r l"], tiles: TileGroup, smallest: int
) -> None:
    """de[first + a·r + c·l] += Σ_t ds[t, r, l]; the tiles are those of one head, or one of each head.

    Where a = c: rows are followed by zeros (`padded`), so read with a pitch of one less, row r is shifted by r.
    """
    (first, a, c), (t, r, l) = _place(tiles, smallest), ds.shape
    if a == c:
        pitch = l + r - 1
        shifted = ds.as_strided((t, r, pitch), (r * (l + r), pitch, 1))
        columns = torch.bmm(ds.new_ones(1, 1, r).expand(t, 1, r), shifted)[:, 0]  # a sum, but faster
        columns = columns.sum(0, keepdim=True) if len(de) == 1 else columns
        de[:, first : first + c * (pitch - 1) + 1 : c] += columns
        return
    ds = ds.sum(0, keepdim=True) if len(de) == 1 else ds
    chunk = c // a if c % a == 0 else 1  # this many rows reach no entry twice
    for low in range(0, r, chunk):
        rows, there = ds[:, low : low + chunk], de[:, first + a * low :]
        there.as_strided(rows.shape, (de.stride(0), a, c)).add_(rows)

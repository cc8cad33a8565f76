"""Attention over the patches of an image: the offset of the weight from the query, in rows and columns."""

from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from ..errors import ShapeError
from .weight_blocks import WeightBlock


@dataclass(frozen=True)
class Grid:
    """rows × columns of patches, row by row, after `skip` tokens that are not patches (a class token)."""

    rows: int
    columns: int
    skip: int = 0

    def __post_init__(self):
        if self.rows < 1 or self.columns < 1 or self.skip < 0:
            raise ShapeError(f"{self!r}: rows and columns need to be >= 1, skip >= 0")

    @property
    def patches(self) -> int:
        return self.rows * self.columns

    @property
    def tokens(self) -> int:
        return self.skip + self.patches

    @property
    def offsets(self) -> tuple[int, int]:
        """The number of offsets key − query in each direction."""
        return 2 * self.rows - 1, 2 * self.columns - 1

    def by_offset(self, block: WeightBlock) -> Float[Tensor, "dy dx"]:
        """Σ over the queries that are patches of the weight at each offset (dy, dx) = key − query."""
        height, width = self.offsets
        rows = torch.arange(block.rows.start, block.rows.stop)
        patch = rows >= self.skip
        weights = block.weights()[patch.to(block.table.device), self.skip :].cpu()
        i, j = rows[patch] - self.skip, torch.arange(block.keys - self.skip)
        y, x = j // self.columns - i[:, None] // self.columns, j % self.columns - i[:, None] % self.columns
        offset = (y + self.rows - 1) * width + (x + self.columns - 1)
        sums = torch.zeros(height * width, dtype=torch.float64)
        sums.index_add_(0, offset.flatten(), weights.double().flatten())
        return rearrange(sums, "(y x) -> y x", x=width)


@dataclass(frozen=True, eq=False)
class GridStatistics:
    """center: the mean offset (dy, dx) = key − query of the weight on patches; spread: the root mean square
    distance from it. shift: the offset with the largest weight; shift_weight: its share of the weight on patches.
    by_offset[dy + rows − 1, dx + columns − 1]: the mean weight there."""

    center: Float[Tensor, "h 2"]
    spread: Float[Tensor, " h"]
    shift: Float[Tensor, "h 2"]
    shift_weight: Float[Tensor, " h"]
    distance: Float[Tensor, " h"]
    by_offset: Float[Tensor, "h dy dx"]

    def numbers(self, head: int) -> dict[str, float]:
        (y, x), (shift_y, shift_x) = self.center[head].tolist(), self.shift[head].tolist()
        return {
            "center_y": y,
            "center_x": x,
            "spread": float(self.spread[head]),
            "shift_y": shift_y,
            "shift_x": shift_x,
            "shift_2d_weight": float(self.shift_weight[head]),
            "distance_2d": float(self.distance[head]),
        }


def grid_statistics(sums: Float[Tensor, "h dy dx"], grid: Grid) -> GridStatistics:
    """Statistics of the weights summed by offset."""
    height, width = grid.offsets
    total = sums.sum((1, 2)).clamp(min=torch.finfo(sums.dtype).tiny)
    y, x = torch.arange(height) - (grid.rows - 1), torch.arange(width) - (grid.columns - 1)
    offsets = rearrange(torch.stack(torch.meshgrid(y, x, indexing="ij"), -1), "y x c -> (y x) c").double()
    share = rearrange(sums, "h y x -> h (y x)") / total[:, None]
    center = share @ offsets
    square = share @ (offsets**2).sum(-1) - (center**2).sum(-1)
    pairs = _pairs_at(grid, offsets)
    best = share.argmax(-1)
    weight = share.gather(1, best[:, None])[:, 0] * grid.patches / pairs[best]
    return GridStatistics(
        center=center,
        spread=square.clamp(min=0).sqrt(),
        shift=offsets[best],
        shift_weight=weight.clamp(max=1.0),
        distance=share @ offsets.norm(dim=-1),
        by_offset=sums / total[:, None, None],
    )


def _pairs_at(grid: Grid, offsets: Float[Tensor, "o 2"]) -> Float[Tensor, " o"]:
    """The number of patches that have a patch at each offset."""
    return (grid.rows - offsets[:, 0].abs()) * (grid.columns - offsets[:, 1].abs())


def square_grid(tokens: int, height: int, width: int) -> Grid | None:
    """The grid of `tokens` patches (and up to 16 more tokens before them) over an image of height × width."""
    for skip in range(17):
        patches = tokens - skip
        for rows in range(1, patches + 1):
            if patches % rows == 0 and rows * width == (patches // rows) * height:
                return Grid(rows, patches // rows, skip)
    return None

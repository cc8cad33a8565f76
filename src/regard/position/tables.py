"""Where a cell stands on its grid, and a table of vectors stretched to another length or grid."""

import math

import torch
from einops import rearrange
from jaxtyping import Float, Real
from torch import Tensor

from ..errors import ShapeError


def coordinates(positions: Real[Tensor, "*p"], grid: tuple[int, int]) -> Real[Tensor, "*q 2"]:
    """(row, column) of each cell number (n); pairs (…, n, 2) pass as they are.

    >>> coordinates(torch.tensor([0, 3, 4]), (2, 3)).tolist()
    [[0, 0], [1, 0], [1, 1]]
    """
    if positions.ndim == 1 and not positions.is_floating_point():
        return torch.stack([positions // grid[1], positions % grid[1]], dim=-1)
    if positions.ndim > 1 and positions.shape[-1] == 2:
        return positions
    raise ShapeError(
        f"positions {tuple(positions.shape)} of {positions.dtype} on a grid of {grid[0]}×{grid[1]}:"
        " give whole cell numbers (n), or rows and columns (…, n, 2)"
    )


def resample(table: Float[Tensor, "t *d"], length: int) -> Float[Tensor, "{length} *d"]:
    """The table read at `length` even steps from its first row to its last, linear in between."""
    steps = torch.arange(length, device=table.device) * (len(table) - 1)
    gaps = max(length - 1, 1)
    below, part = steps // gaps, (steps % gaps).to(table.dtype) / gaps  # whole numbers keep both ends exact
    above = (below + 1).clamp(max=len(table) - 1)
    return torch.lerp(table[below], table[above], part.reshape(-1, *(1,) * (table.ndim - 1)))


def resample_grid(
    table: Float[Tensor, "t d"], old_grid: tuple[int, int], new_grid: tuple[int, int]
) -> Float[Tensor, "t2 d"]:
    """`resample` along the rows, then along the columns: the four corners stay.

    Vectors before the grid (a class token) are kept as they are.
    """
    extra = len(table) - math.prod(old_grid)
    if extra < 0:
        raise ShapeError(
            f"a table of {len(table)} does not hold the {math.prod(old_grid)} cells of a grid of"
            f" {old_grid[0]}×{old_grid[1]}"
        )
    cells = rearrange(table[extra:], "(row col) d -> row col d", row=old_grid[0])
    cells = rearrange(resample(cells, new_grid[0]), "row col d -> col row d")
    cells = rearrange(resample(cells, new_grid[1]), "col row d -> (row col) d")
    return torch.cat([table[:extra], cells])

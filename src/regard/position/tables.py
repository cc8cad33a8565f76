"""Coordinates of grid cells, and resampling of a table of vectors to another length or grid."""

import math

import torch
from einops import rearrange
from jaxtyping import Float, Real
from torch import Tensor

from ..errors import ShapeError


def coordinates(positions: Real[Tensor, "*p"], grid: tuple[int, int]) -> Real[Tensor, "*q 2"]:
    """(row, column) of each cell index (n); pairs (…, n, 2) are returned unchanged.

    >>> coordinates(torch.tensor([0, 3, 4]), (2, 3)).tolist()
    [[0, 0], [1, 0], [1, 1]]
    """
    if positions.ndim == 1 and not positions.is_floating_point():
        return torch.stack([positions // grid[1], positions % grid[1]], dim=-1)
    if positions.ndim > 1 and positions.shape[-1] == 2:
        return positions
    raise ShapeError(
        f"positions {tuple(positions.shape)} of {positions.dtype} on a grid of {grid[0]}×{grid[1]}:"
        " pass integer cell indices (n), or rows and columns (…, n, 2)"
    )


def resample(table: Float[Tensor, "t *d"], length: int) -> Float[Tensor, "{length} *d"]:
    """The table at `length` evenly spaced points from its first row to its last, interpolated linearly."""
    steps = torch.arange(length, device=table.device) * (len(table) - 1)
    gaps = max(length - 1, 1)
    below, part = steps // gaps, (steps % gaps).to(table.dtype) / gaps  # integers keep both ends exact
    above = (below + 1).clamp(max=len(table) - 1)
    return torch.lerp(table[below], table[above], part.reshape(-1, *(1,) * (table.ndim - 1)))


def resample_grid(
    table: Float[Tensor, "t d"], old_grid: tuple[int, int], new_grid: tuple[int, int]
) -> Float[Tensor, "t2 d"]:
    """`resample` along the rows, then along the columns: the four corners stay.

    Vectors before the grid (a class token) are unchanged.
    """
    extra = len(table) - math.prod(old_grid)
    if extra < 0:
        raise ShapeError(
            f"a table of {len(table)} vectors is too small for the {math.prod(old_grid)} cells of a grid of"
            f" {old_grid[0]}×{old_grid[1]}"
        )
    cells = rearrange(table[extra:], "(row col) d -> row col d", row=old_grid[0])
    cells = rearrange(resample(cells, new_grid[0]), "row col d -> col row d")
    cells = rearrange(resample(cells, new_grid[1]), "col row d -> (row col) d")
    return torch.cat([table[:extra], cells])

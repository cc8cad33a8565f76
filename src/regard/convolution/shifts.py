"""The shift, or the short kernel, that is nearest to the weights of a head.

The distance of two distributions over keys is ½ Σ ∣a − c∣ (total variation). What a row lacks to a sum of 1 counts
as weight on a zero key, so a query with no allowed key agrees with a shift into zero padding. Beyond the edge
of a grid a softmax head attends to the nearest key, which is the same shift with a "replicate" border.
"""

from itertools import product
from math import prod
from typing import NamedTuple

import torch
from einops import rearrange, reduce
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import ShapeError
from .geometry import Offset

MAX_CANDIDATES = 1024  # offsets compared exactly; of more, those with the most weight are chosen
BORDERS = ("replicate", "zeros")


class NearestShifts(NamedTuple):
    """The shift nearest to each head: key = query + offset."""

    offset: tuple[Offset, ...]
    border: tuple[str, ...]
    mean: Float[Tensor, " h"]  # total variation, over queries and data
    worst: Float[Tensor, " h"]


class Spread(NamedTuple):
    """The distribution of the offsets that each head attends to."""

    center: Float[Tensor, "h axes"]  # the mean offset
    spread: Float[Tensor, " h"]  # √ of the mean squared distance from it
    entropy: Float[Tensor, " h"]  # of a row, in nats
    content: Float[Tensor, " h"]  # mean total variation between a row and its mean over the data


def nearest_shifts(weights: Float[Tensor, "b h n n"], grid: Offset) -> NearestShifts:
    """For each head the shift with the smallest mean total variation, 1 − the weight on its key."""
    _check_grid(weights, grid)
    mean = reduce(weights.detach().double(), "b h n m -> h n m", "mean")
    missing = 1 - mean.sum(-1)
    candidates = _candidates(mean, grid)
    shares: list[Float[Tensor, "two h"]] = []
    queries = torch.arange(mean.shape[1], device=weights.device)
    for offset in candidates:
        keys, inside = targets(grid, offset, weights.device)
        there = mean[:, queries, keys]
        shares.append(torch.stack([there.mean(-1), there.where(inside, missing).mean(-1)]))
    best = rearrange(torch.stack(shares), "o border h -> h (o border)").argmax(-1).tolist()
    shifts = [(candidates[i // 2], BORDERS[i % 2]) for i in best]
    distances = [shift_distance(weights[:, h], grid, *shift) for h, shift in enumerate(shifts)]
    return NearestShifts(
        tuple(offset for offset, _ in shifts),
        tuple(border for _, border in shifts),
        torch.stack([d.mean() for d in distances]),
        torch.stack([d.max() for d in distances]),
    )


def shift_distance(
    weights: Float[Tensor, "b n n"], grid: Offset, offset: Offset, border: str
) -> Float[Tensor, "b n"]:
    """1 − the weight on the key of the shift, for each row; in zero padding that key is the zero key."""
    weights = weights.detach().double()
    keys, inside = targets(grid, offset, weights.device)
    there = weights[:, torch.arange(len(keys), device=weights.device), keys]
    if border == "zeros":
        there = there.where(inside, 1 - weights.sum(-1))
    return (1 - there).clamp(min=0.0)


def nearest_kernel(
    weights: Float[Tensor, "b n n"], grid: Offset, offset: Offset, side: int
) -> tuple[tuple[Offset, ...], Float[Tensor, " taps"]]:
    """The box of `side` offsets along each axis with the most weight, and the share of each offset in it.

    Shares are ratios to the weight at `offset`, over the queries that have both keys: exact if the scores depend only
    on the distance, since the normalization of each row cancels.
    """
    mean = reduce(weights.detach().double(), "b n m -> n m", "mean")
    offsets = _heaviest_box(by_offset(mean[None, None], grid)[0], grid, side)
    queries = torch.arange(len(mean), device=weights.device)
    middle, inside = targets(grid, offset, weights.device)
    taps = []
    for other in offsets:
        keys, also = targets(grid, other, weights.device)
        both = inside & also
        below = (mean[queries, middle] * both).sum()
        taps.append((mean[queries, keys] * both).sum() / below.where(below > 0, torch.inf))
    shares = torch.stack(taps)
    return offsets, shares / shares.sum()


def _heaviest_box(share: Float[Tensor, "*sides"], grid: Offset, side: int) -> tuple[Offset, ...]:
    """The offsets of the box with the largest share."""
    for axis in range(share.ndim):
        share = share.unfold(axis, min(side, share.shape[axis]), 1).sum(-1)
    first = torch.unravel_index(share.argmax(), share.shape)
    low = [int(at) - (n - 1) for at, n in zip(first, grid)]
    return tuple(product(*(range(lo, lo + min(side, 2 * n - 1)) for lo, n in zip(low, grid))))


def kernel_table(
    grid: Offset, offsets: tuple[Offset, ...], taps: Float[Tensor, " taps"]
) -> Float[Tensor, "n n"]:
    """The weights of a kernel on a grid, each row divided by its mass inside the grid."""
    n = prod(grid)
    table = taps.new_zeros(n, n)
    queries = torch.arange(n, device=taps.device)
    for offset, tap in zip(offsets, taps):
        keys, inside = targets(grid, offset, taps.device)
        table[queries[inside], keys[inside]] += tap
    mass = table.sum(-1, keepdim=True)
    return table / mass.where(mass > 0, 1.0)


def total_variation(
    weights: Float[Tensor, "*b n m"], others: Float[Tensor, "*c n m"]
) -> Float[Tensor, "*d n"]:
    """½ Σ ∣a − c∣ of each row, including the zero key."""
    gap = weights.detach().double() - others
    return (gap.abs().sum(-1) + gap.sum(-1).abs()) / 2


def targets(
    grid: Offset, offset: Offset, device: torch.device | None = None
) -> tuple[Int[Tensor, " n"], Bool[Tensor, " n"]]:
    """For each cell the cell at + offset, clamped to the grid, and whether it is inside the grid."""
    index = torch.zeros((), dtype=torch.long, device=device)
    inside = torch.ones((), dtype=torch.bool, device=device)
    for side, along in zip(grid, offset):
        wanted = torch.arange(side, device=device) + along
        clamped = wanted.clamp(0, side - 1)
        index = (index[..., None] * side + clamped).flatten()
        inside = (inside[..., None] & (clamped == wanted)).flatten()
    return index, inside


def by_offset(weights: Float[Tensor, "b h n n"], grid: Offset) -> Float[Tensor, "h *sides"]:
    """The weight of each head at each offset, −(side − 1) … side − 1 along each axis, averaged over the queries."""
    _check_grid(weights, grid)
    mean = reduce(weights.detach().double(), "b h n m -> h (n m)", "mean")
    sides = [2 * side - 1 for side in grid]
    total = mean.new_zeros(len(mean), prod(sides)).index_add(1, _offset_index(grid, weights.device), mean)
    return total.reshape(len(mean), *sides) / prod(grid)


def spread(weights: Float[Tensor, "b h n n"], grid: Offset) -> Spread:
    """Center, spread and entropy of each head, and how much it depends on the data."""
    share = by_offset(weights, grid)
    each = torch.stack(torch.meshgrid(*(torch.arange(1 - s, s) for s in grid), indexing="ij"), -1)
    each = rearrange(each, "... axes -> (...) axes").to(share)
    share = rearrange(share, "h ... -> h (...)")
    center = share @ each
    square = share @ (each**2).sum(-1) - (center**2).sum(-1)
    w = weights.detach().double()
    entropy = reduce(-torch.special.xlogy(w, w).sum(-1), "b h n -> h", "mean")
    content = reduce(total_variation(w, w.mean(0, keepdim=True)), "b h n -> h", "mean")
    return Spread(center, square.clamp(min=0.0).sqrt(), entropy, content)


def _candidates(mean: Float[Tensor, "h n n"], grid: Offset) -> list[Offset]:
    all_offsets = list(product(*(range(1 - side, side) for side in grid)))
    if len(all_offsets) <= MAX_CANDIDATES:
        return all_offsets
    shares = by_offset(mean[None], grid).flatten(1)
    top = shares.topk(max(1, MAX_CANDIDATES // len(mean)), dim=-1).indices.unique().tolist()
    return [all_offsets[i] for i in top]


def _offset_index(grid: Offset, device: torch.device) -> Int[Tensor, " pairs"]:
    """For each pair (query, key) the index of its offset among all offsets."""
    index = torch.zeros(1, 1, dtype=torch.long, device=device)
    for side in grid:
        along = torch.arange(side, device=device)
        distance = along[None, :] - along[:, None] + side - 1
        index = index[:, None, :, None] * (2 * side - 1) + distance[None, :, None, :]
        index = rearrange(index, "q p m k -> (q p) (m k)")
    return index.flatten()


def _check_grid(weights: Float[Tensor, "b h n m"], grid: Offset) -> None:
    n, m = weights.shape[-2:]
    if not n == m == prod(grid):
        cells = " × ".join(map(str, grid))
        raise ShapeError(
            f"weights of {n} queries over {m} keys do not fit a grid of {cells}; both must be {prod(grid)}"
        )

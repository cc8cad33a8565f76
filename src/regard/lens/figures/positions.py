"""Positional encodings, and the positions of patches."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ...position import sinusoid
from . import style


def positional_encoding(
    n: int = 128,
    d: int = 64,
    base: int | float = 10000.0,
    *,
    table: Float[Tensor, "entries d"] | None = None,
    dark: bool = False,
) -> Any:
    """The encoding as a heat map, its wavelengths, and the product of two positions against their distance.

    table: a learned table instead of sinusoids. It has no wavelengths, and its products may depend on more than the
    distance, so their range is shown.
    """
    p = sinusoid(torch.arange(n), d, base, dtype=torch.float64) if table is None else table.detach().double()
    n, d = p.shape
    figure = style.canvas(11.0, 3.6, dark)
    cells = style.grid(figure, 1, 2 if table is not None else 3)
    what = f"sinusoids, base {base:g}" if table is None else "learned table"
    left = style.axes(figure, cells[0], dark=dark, title=what, x="column", y="position")
    style.scale(figure, style.heat(left, p, dark, signed=True), left, "value", dark)
    products = p @ p.T
    by_distance = [products.diagonal(k) for k in range(n)]
    title = "PE(p) · PE(p + k)"
    right = style.axes(figure, cells[1], dark=dark, title=title, x="distance k", y="product")
    mean = [float(x.mean()) for x in by_distance]
    style.line(right, 0, range(n), mean)
    low, high = ([float(f(x)) for x in by_distance] for f in (torch.min, torch.max))
    right.fill_between(range(n), low, high, color=style.COLORS[0], alpha=0.25, linewidth=0)
    if table is None:
        waves = style.axes(
            figure, cells[2], dark=dark, title="wavelengths", x="pair of columns", y="positions per period"
        )
        wavelength = 2 * torch.pi * base ** (torch.arange(0, d, 2) / d)
        style.line(waves, 1, range(d // 2), wavelength.tolist(), marker=".")
        waves.axhline(n, color=style.theme(dark).faint, linewidth=0.9)
        waves.set_yscale("log")
    return figure


def patch_positions(
    table: Float[Tensor, "tokens d"], grid: tuple[int, int], skip: int = 0, *, dark: bool = False
) -> Any:
    """The cosine of each patch's position with all others, one small map per patch, arranged as the patches are."""
    rows, columns = grid
    vectors = F.normalize(table.detach().float()[skip : skip + rows * columns], dim=-1)
    similarity = (vectors @ vectors.T).reshape(rows, columns, rows, columns)
    figure = style.canvas(0.9 * columns + 0.8, 0.9 * rows + 0.6, dark)
    figure.suptitle("cosine of position vectors", color=style.theme(dark).ink, fontsize=10)
    cells = style.grid(figure, rows, columns)
    for r in range(rows):
        for c in range(columns):
            ax = style.axes(figure, cells[r, c], dark=dark)
            ax.imshow(similarity[r, c].numpy(), cmap=style.theme(dark).signed, vmin=-1, vmax=1)
            ax.set_xticks([])
            ax.set_yticks([])
            ax.plot([c], [r], ".", color=style.theme(dark).ink, markersize=3)
    return figure

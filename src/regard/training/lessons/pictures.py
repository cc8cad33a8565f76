"""Pictures that several lessons draw: lines, bars, tables as colors, attention maps."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ...lens import figures
from ...lens.figures import style
from ...lens.recorder import Recorder
from ...lens.view import View
from .lesson import Picture

Number = int | float
Series = Mapping[str, Mapping[int, float]]


def losses(recorder: Recorder, caption: str, only: Sequence[str] | None = None) -> Picture:
    """The loss of each model, and its floor: each curve as the running mean of a fiftieth of its steps."""
    kept = [name for name in recorder.losses if only is None or name in only]
    smooth = Recorder(floors={n: f for n, f in recorder.floors.items() if n in kept})
    for name in kept:
        smooth.losses[name] = _smoothed(recorder.losses[name])
    return Picture("Training curves", caption, lambda dark: figures.training_curves(smooth, dark=dark))


def _smoothed(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    width = max(len(points) // 50, 1)
    values = torch.tensor([v for _, v in points], dtype=torch.float64)
    sums = torch.cat([values.new_zeros(1), values.cumsum(0)])
    ends = torch.arange(1, len(points) + 1)
    starts = (ends - width).clamp_min(0)
    means = (sums[ends] - sums[starts]) / (ends - starts)
    return [(step, float(mean)) for (step, _), mean in zip(points, means, strict=True)]


def lines(
    title: str, caption: str, series: Series, *, x: str, y: str, levels: Mapping[str, Number] | None = None
) -> Picture:
    """One line per name over numbers, the numbers as ticks; levels: horizontal lines with a name."""

    def draw(dark: bool) -> Any:
        figure = style.canvas(6.5, 3.8, dark)
        ax = style.axes(figure, dark=dark, x=x, y=y)
        for number, (name, points) in enumerate(series.items()):
            style.line(ax, number, list(points), list(points.values()), name, marker="o", markersize=5)
        ticks = sorted({at for points in series.values() for at in points})
        ax.set_xticks(ticks, [f"{t:g}" for t in ticks])
        for name, level in (levels or {}).items():
            _level(ax, name, level, dark)
        ax.set_ylim(bottom=0)
        style.legend(ax, dark)
        return figure

    return Picture(title, caption, draw)


def bars(
    title: str,
    caption: str,
    values: Mapping[str, Number],
    *,
    y: str,
    levels: Mapping[str, Number] | None = None,
) -> Picture:
    """One bar per name, with its number above it."""

    def draw(dark: bool) -> Any:
        figure = style.canvas(6.5, 3.6, dark)
        ax = style.axes(figure, dark=dark, y=y)
        colors = [style.COLORS[i % 6] for i in range(len(values))]
        ax.bar(range(len(values)), list(values.values()), color=colors, width=0.6)
        ax.set_xticks(range(len(values)), [name.replace(", ", ",\n") for name in values])
        for i, value in enumerate(values.values()):
            ink = style.theme(dark).ink
            ax.annotate(f"{value:.3f}", (i, value), ha="center", va="bottom", fontsize=10, color=ink)
        for name, level in (levels or {}).items():
            _level(ax, name, level, dark)
        ax.margins(y=0.15)
        return figure

    return Picture(title, caption, draw)


def _level(ax: Any, name: str, level: Number, dark: bool) -> None:
    ink = style.theme(dark).ink
    ax.axhline(level, color=ink, linewidth=0.9, linestyle=(0, (2, 2)))
    ax.annotate(
        name, (1, level), xycoords=("axes fraction", "data"), fontsize=8, ha="right", va="bottom", color=ink
    )


def tables(
    title: str,
    caption: str,
    given: Mapping[str, Float[Tensor, "n m"]],
    *,
    x: str,
    y: str,
    names: tuple[Sequence[str], Sequence[str]] | None = None,
    top: float | None = None,
) -> Picture:
    """Tables of weights as colors, side by side on one scale; names: of the rows and of the columns."""

    def draw(dark: bool) -> Any:
        highest = top or max(float(t.max()) for t in given.values())
        figure = style.canvas(0.6 + 3.6 * len(given), 3.9, dark)
        cells = style.grid(figure, 1, len(given))
        image = None
        for number, (name, table) in enumerate(given.items()):
            ax = style.axes(figure, cells[number], dark=dark, title=name, x=x, y=y if number == 0 else "")
            image = style.heat(ax, table, dark, top=highest)
            if names is not None:
                style.tokens(ax, *names)
        style.scale(figure, image, figure.axes[: len(given)], "weight", dark)
        return figure

    return Picture(title, caption, draw)


def head_map(title: str, caption: str, view: View, layer: int, head: int, batch: int = 0) -> Picture:
    """The attention map of one head: scores, weights and the entropy of each row."""
    return Picture(title, caption, lambda dark: figures.attention_map(view, layer, head, batch, dark=dark))

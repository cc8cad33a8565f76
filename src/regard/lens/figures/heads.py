"""Heads: their statistics over training, as taps of a convolution, a gallery of one layer, a table of shapes."""

import textwrap
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ...errors import ShapeError
from ..recorder import Recorder
from ..view import View
from . import style

MAX_ACROSS = 8  # maps in a row of a gallery; their titles need the width


def head_evolution(
    recorder: Recorder, numbers: Sequence[str] = ("entropy", "distance"), *, dark: bool = False
) -> Any:
    """Statistics of every head over the recorded steps, one row per layer; on a grid also the path of each center."""
    if not recorder.heads:
        raise ShapeError("no head is recorded; call recorder.view(step, view) during training")
    _, last = recorder.heads[-1]
    layers = sorted({r["layer"] for r in last})
    on_grid = any(r["center"] is not None for r in last)
    figure = style.canvas(3.4 * (len(numbers) + on_grid), 2.5 * len(layers) + 0.3, dark)
    cells = style.grid(figure, len(layers), len(numbers) + on_grid)
    for row, layer in enumerate(layers):
        heads = [r["head"] for r in last if r["layer"] == layer]
        for column, number in enumerate(numbers):
            title = f"layer {layer}: {number.replace('_', ' ')}"
            ax = style.axes(figure, cells[row, column], dark=dark, title=title, x="step")
            for head in heads:
                points = [(s, v) for s, v in recorder.series(layer, head, number) if v is not None]
                style.line(ax, head, [s for s, _ in points], [v for _, v in points], f"head {head}")
        if on_grid:
            ax = style.axes(
                figure, cells[row, -1], dark=dark, title=f"layer {layer}: centers", x="Δ column", y="Δ row"
            )
            _centers(ax, recorder, layer, heads, dark)
    style.legend(figure.axes[0], dark, loc="best")
    return figure


def _centers(ax: Any, recorder: Recorder, layer: int, heads: Sequence[int], dark: bool) -> None:
    """From a small dot at the first step to a large one at the last."""
    for head in heads:
        path: list[Any] = [c for _, c in recorder.series(layer, head, "center") if c is not None]
        if path:
            style.line(ax, head, [c[1] for c in path], [c[0] for c in path], linewidth=0.9)
            for (dy, dx), size in ((path[0], 3), (path[-1], 7)):
                ax.plot([dx], [dy], "o", color=style.COLORS[head % 6], markersize=size)
    ax.axhline(0, color=style.theme(dark).faint, linewidth=0.6)
    ax.axvline(0, color=style.theme(dark).faint, linewidth=0.6)
    ax.invert_yaxis()
    ax.set_aspect("equal", adjustable="datalim")


def convolution_map(
    by_offset: Float[Tensor, "h rows columns"],
    shifts: Float[Tensor, "h 2"],
    names: Sequence[str] | None = None,
    *,
    dark: bool = False,
) -> Any:
    """The mean weight of each head by offset; a ring marks the nearest shift, the tap that it corresponds to."""
    heads, rows, columns = by_offset.shape
    across = min(heads, 6)
    down = -(-heads // across)
    figure = style.canvas(1.9 * across + 0.4, 2.1 * down + 0.4, dark)
    cells = style.grid(figure, down, across)
    for head in range(heads):
        dy, dx = (float(s) for s in shifts[head])
        weight = float(by_offset[head, round(dy) + rows // 2, round(dx) + columns // 2])
        name = names[head] if names else f"head {head}"
        title = f"{name}\n({dy:+.0f}, {dx:+.0f}), weight {weight:.2f}"
        ax = style.axes(figure, cells[head // across, head % across], dark=dark, title=title)
        ax.title.set_fontsize(7)
        half = (rows / 2, columns / 2)
        values = by_offset[head].detach().float().cpu().numpy()
        ax.imshow(
            values, cmap=style.theme(dark).weights, vmin=0, extent=(-half[1], half[1], half[0], -half[0])
        )
        ax.plot([dx], [dy], "o", markersize=11, fillstyle="none", color=style.COLORS[3], markeredgewidth=1.6)
    return figure


def head_gallery(view: View, layer: int | str = 0, batch: int = 0, *, dark: bool = False) -> Any:
    """The heads of one layer with their kinds, the similarity of their maps, the smallest angle between their query
    subspaces, and (after view.remove_heads()) the effect of removing each."""
    call = view.call(layer)
    across = min(call.heads, MAX_ACROSS)
    down = -(-call.heads // across)
    figure = style.canvas(max(1.7 * across, 10.5), 1.9 * down + 3.4, dark)
    top, bottom = figure.subfigures(2, 1, height_ratios=(1.9 * down, 3.4))
    for part in (top, bottom):
        part.set_facecolor(style.theme(dark).paper)
    tiles, cells = top.add_gridspec(down, across), bottom.add_gridspec(1, 3)
    for head in range(call.heads):
        kind = view.kinds[call.layer][head]
        title = f"{head}: {kind.name}\n{kind.confidence:.0%}"
        ax = style.axes(top, tiles[head // across, head % across], dark=dark, title=title)
        ax.title.set_fontsize(7)
        style.heat(ax, view.map(call.layer, head, batch), dark)
        ax.set_xticks([])
        ax.set_yticks([])
    similar = style.axes(bottom, cells[0, 0], dark=dark, title="similarity of maps", x="head", y="head")
    image = style.heat(similar, view.agreement(call.layer), dark, top=1.0)
    style.scale(bottom, image, similar, "cosine", dark)
    title = "smallest angle of\nquery subspaces"
    apart = style.axes(bottom, cells[0, 1], dark=dark, title=title, x="head", y="head")
    try:
        angles = torch.rad2deg(view.angles(call.layer).amin(-1))
    except ShapeError as e:  # too few tokens: the picture shows the message
        text = textwrap.fill(str(e), 30)
        apart.text(0.5, 0.5, text, ha="center", va="center", fontsize=7, color=style.theme(dark).ink)
        apart.set_xticks([])
        apart.set_yticks([])
    else:
        style.scale(bottom, style.heat(apart, angles, dark, top=90.0), apart, "degrees", dark)
    effects = [view.effects.get((call.layer, head)) for head in range(call.heads)]
    title = "effect of removal" if None not in effects else "effect of removal:\ncall view.remove_heads()"
    bars = style.axes(bottom, cells[0, 2], dark=dark, title=title, x="head", y="‖Δ output‖ / ‖output‖")
    bars.bar(range(call.heads), [e or 0.0 for e in effects], color=style.COLORS[0])
    return figure


def shape_trace(steps: Sequence[tuple[str, str, Tensor, str]], *, dark: bool = False) -> Any:
    """Every intermediate in one row: its name, formula, shape, cost and first values.

    steps: (name, formula, tensor, cost) in the order in which they are computed.
    """
    figure = style.canvas(11.0, 0.7 + 0.34 * len(steps), dark)
    ax = figure.add_subplot(111)
    ax.set_axis_off()
    look = style.theme(dark)
    columns = (0.0, 0.15, 0.45, 0.6, 0.76)
    for x, word in zip(columns, ("name", "formula", "shape", "cost", "first values"), strict=True):
        ax.text(x, 0.0, word, fontsize=9, weight="bold", color=look.ink)
    for row, (name, formula, tensor, cost) in enumerate(steps, 1):
        first = "  ".join(f"{v:+.3f}" for v in tensor.detach().flatten()[:4].tolist())
        cells = (name, formula, " × ".join(map(str, tensor.shape)), cost, first)
        for x, word in zip(columns, cells, strict=True):
            if not word:
                continue
            ax.text(
                x,
                -row,
                style.shown(word, 44),
                fontsize=8,
                color=look.ink,
                family="monospace" if x > 0.7 else None,
            )
    ax.set_xlim(0, 1)
    ax.set_ylim(-len(steps) - 0.6, 0.6)
    return figure

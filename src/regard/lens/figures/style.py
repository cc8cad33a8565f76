"""The style of all pictures: colors that are distinct for color-blind readers, light or dark, readable sizes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import RegardError

# Okabe and Ito's eight colors, without black and yellow.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")
DASHES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))


@dataclass(frozen=True)
class Theme:
    """Foreground, background and color maps."""

    paper: str
    ink: str
    faint: str
    weights: str  # the color map of weights, from 0 to the maximum
    signed: str  # the color map of signed values


LIGHT = Theme("#ffffff", "#1c1c1c", "#b8b8b8", "cividis", "PuOr")
DARK = Theme("#16181d", "#e8e8e8", "#565b66", "cividis", "PuOr")


def theme(dark: bool) -> Theme:
    return DARK if dark else LIGHT


def canvas(width: float, height: float, dark: bool = False) -> Any:
    """An empty figure with a layout without overlaps. It is not registered with pyplot: no global state."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as e:
        raise RegardError("pictures need matplotlib: pip install 'regard[figures]'") from e
    return Figure(figsize=(width, height), layout="constrained", facecolor=theme(dark).paper)


def axes(figure: Any, at: Any = 111, *, dark: bool = False, title: str = "", x: str = "", y: str = "") -> Any:
    """One set of axes in the theme's ink."""
    look = theme(dark)
    ax = figure.add_subplot(at)
    ax.set_facecolor(look.paper)
    for spine in ax.spines.values():
        spine.set_color(look.faint)
    ax.tick_params(colors=look.ink, labelsize=8)
    ax.set_title(title, color=look.ink, fontsize=10)
    ax.set_xlabel(x, color=look.ink, fontsize=9)
    ax.set_ylabel(y, color=look.ink, fontsize=9)
    return ax


def grid(figure: Any, rows: int, columns: int) -> Any:
    return figure.add_gridspec(rows, columns)


def line(
    ax: Any,
    number: int,
    x: Sequence[int | float],
    y: Sequence[int | float],
    label: str | None = None,
    **options,
) -> Any:
    """The number-th line of a picture, distinct by color and by dashes."""
    given = {
        "color": COLORS[number % 6],
        "linestyle": DASHES[(number + number // 6) % 6],
        "linewidth": 1.6,
        **options,
    }
    return ax.plot(list(x), list(y), label=label, **given)[0]


def legend(ax: Any, dark: bool = False, **options) -> None:
    look = theme(dark)
    ax.legend(fontsize=8, facecolor=look.paper, edgecolor=look.faint, labelcolor=look.ink, **options)


def tokens(ax: Any, queries: Sequence[str], keys: Sequence[str], max_labels: int = 64) -> None:
    """Words along both axes; of more than `max_labels` only every k-th, so that they do not overlap."""
    for names, axis, turn in ((keys, ax.xaxis, 90), (queries, ax.yaxis, 0)):
        step = -(-len(names) // max_labels)
        positions = range(0, len(names), step)
        size = 8 if len(names) <= 32 else 6
        axis.set_ticks(list(positions), [shown(names[p]) for p in positions], rotation=turn, fontsize=size)


def shown(word: str, max_length: int = 14) -> str:
    """A token as a label: visible blanks, no markup that matplotlib would interpret, limited length."""
    word = word.replace("\n", "↵").replace("\t", "⇥").replace("$", r"\$") or "∅"
    word = "␣" + word[1:] if word.startswith(" ") else word
    return word if len(word) <= max_length else word[: max_length - 1] + "…"


def heat(ax: Any, table: Any, dark: bool = False, *, top: float | None = None, signed: bool = False) -> Any:
    """A table as colors. signed: zero is the middle color; otherwise zero is the darkest, `top` the lightest."""
    look = theme(dark)
    values = table.detach().float().cpu().numpy() if hasattr(table, "detach") else table
    if signed:
        reach = float(np.nanmax(np.abs(values), initial=0.0)) or 1.0
        return ax.imshow(
            values, cmap=look.signed, vmin=-reach, vmax=reach, aspect="auto", interpolation="nearest"
        )
    return ax.imshow(values, cmap=look.weights, vmin=0.0, vmax=top, aspect="auto", interpolation="nearest")


def scale(figure: Any, image: Any, ax: Any, label: str, dark: bool = False) -> None:
    """A color bar."""
    look = theme(dark)
    bar = figure.colorbar(image, ax=ax, shrink=0.8)
    bar.set_label(label, color=look.ink, fontsize=8)
    bar.ax.tick_params(colors=look.ink, labelsize=7)
    bar.outline.set_edgecolor(look.faint)

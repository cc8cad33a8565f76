"""How all pictures look: colours that the colour-blind tell apart, light or dark, sizes that can be read."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import RegardError

# Okabe and Ito's eight colours, without black and yellow.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")
DASHES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))


@dataclass(frozen=True)
class Theme:
    """Ink on paper."""

    paper: str
    ink: str
    faint: str
    weights: str  # the colour map of weights, from nothing to all
    signed: str  # of what can be above and below zero


LIGHT = Theme("#ffffff", "#1c1c1c", "#b8b8b8", "cividis", "PuOr")
DARK = Theme("#16181d", "#e8e8e8", "#565b66", "cividis", "PuOr")


def theme(dark: bool) -> Theme:
    return DARK if dark else LIGHT


def canvas(width: float, height: float, dark: bool = False) -> Any:
    """An empty figure, laid out so that nothing overlaps. It belongs to nobody: no pyplot, no global state."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as e:
        raise RegardError("pictures are drawn by matplotlib: pip install 'regard[figures]'") from e
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
    ax: Any, number: int, x: Sequence[int | float], y: Sequence[int | float], label: str | None = None, **how
) -> Any:
    """The number-th line of a picture: told apart by colour and by dash."""
    given = {
        "color": COLORS[number % 6],
        "linestyle": DASHES[(number + number // 6) % 6],
        "linewidth": 1.6,
        **how,
    }
    return ax.plot(list(x), list(y), label=label, **given)[0]


def legend(ax: Any, dark: bool = False, **how) -> None:
    look = theme(dark)
    ax.legend(fontsize=8, facecolor=look.paper, edgecolor=look.faint, labelcolor=look.ink, **how)


def tokens(ax: Any, queries: Sequence[str], keys: Sequence[str], most: int = 64) -> None:
    """Words along both axes; past `most` only every k-th, so that they never run into one another."""
    for names, axis, turn in ((keys, ax.xaxis, 90), (queries, ax.yaxis, 0)):
        step = -(-len(names) // most)
        places = range(0, len(names), step)
        size = 8 if len(names) <= 32 else 6
        axis.set_ticks(list(places), [shown(names[p]) for p in places], rotation=turn, fontsize=size)


def shown(word: str, most: int = 14) -> str:
    """A token as a label: blanks visible, nothing that matplotlib would read as mathematics, not too long."""
    word = word.replace("\n", "↵").replace("\t", "⇥").replace("$", r"\$") or "∅"
    word = "␣" + word[1:] if word.startswith(" ") else word
    return word if len(word) <= most else word[: most - 1] + "…"


def heat(ax: Any, table: Any, dark: bool = False, *, top: float | None = None, signed: bool = False) -> Any:
    """A table as colours. signed: zero is the middle colour; otherwise zero is the darkest, `top` the lightest."""
    look = theme(dark)
    values = table.detach().float().cpu().numpy() if hasattr(table, "detach") else table
    if signed:
        reach = float(np.nanmax(np.abs(values), initial=0.0)) or 1.0
        return ax.imshow(
            values, cmap=look.signed, vmin=-reach, vmax=reach, aspect="auto", interpolation="nearest"
        )
    return ax.imshow(values, cmap=look.weights, vmin=0.0, vmax=top, aspect="auto", interpolation="nearest")


def scale(figure: Any, image: Any, ax: Any, label: str, dark: bool = False) -> None:
    """What the colours mean."""
    look = theme(dark)
    bar = figure.colorbar(image, ax=ax, shrink=0.8)
    bar.set_label(label, color=look.ink, fontsize=8)
    bar.ax.tick_params(colors=look.ink, labelsize=7)
    bar.outline.set_edgecolor(look.faint)

"""Draws the pictures of docs/engine.md into docs/pictures/, from the engine's own plans."""

from itertools import pairwise
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

import regard as rg
from regard.engine.plan import Plan, plan

FOLDER = Path(__file__).parent.parent / "docs" / "pictures"
FULL, PARTIAL, EXTRA, ALLOWED, EDGE = "#2a9d8f", "#e9a23b", "#f6dfb5", "#3a5a78", "#444444"
COMB = rg.causal() & (rg.window(7) | rg.every(16))


def one_query(n: int = 64, query: int = 45) -> Figure:
    """The keys of one query, word by word: each word is one progression."""
    words = [
        rg.causal(),
        rg.window(7),
        rg.every(16),
        rg.causal() & rg.window(7),
        rg.causal() & rg.every(16),
        COMB,
    ]
    figure, axes = plt.subplots(figsize=(9, 2.7))
    for line, word in enumerate(words):
        allowed = word.allowed(n)[query]
        for j in range(n):
            color = FULL if allowed[j] else "#ececec"
            axes.add_patch(Rectangle((j, -line), 0.9, 0.75, color=color))
    axes.axvline(query + 0.45, color="#c1121f", linewidth=1)
    axes.text(query + 0.45, 1.15, f"query at i = {query}", ha="center", fontsize=8, color="#c1121f")
    axes.set_yticks([-line + 0.37 for line in range(len(words))], [repr(word) for word in words], fontsize=8)
    axes.set_xticks(range(0, n + 1, 16), range(0, n + 1, 16), fontsize=8)
    axes.set_xlim(-0.5, n)
    axes.set_ylim(-len(words) + 0.8, 1.9)
    axes.set_xlabel("key j", fontsize=8)
    _plain(axes)
    return _tight(figure)


def tiles(n: int = 256, tile: int = 32) -> Figure:
    """The allowed pairs, and the parts that the planner visits for them."""
    pattern = rg.causal() & (rg.window(31) | rg.every(16))
    made = plan(pattern, n, n, 0, 1, tile)
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 5.6))
    _image(left, np.where(pattern.allowed(n), 4, 0), 64)
    left.set_title(f"{pattern.count(n):,} of {n * n:,} pairs are allowed", fontsize=9)
    _image(right, _visited(made), 64)
    for first in range(tile, n, tile):
        right.axhline(first, color=EDGE, linewidth=0.5)
    right.set_title(f"{made.computed:,} are computed, in tiles of {tile} queries", fontsize=9)
    return _legend(figure)


def layouts(n: int = 256, k: int = 8, tile: int = 32) -> Figure:
    """The same pattern with neighboring rows in a tile, and with rows of one residue class."""
    pattern = rg.causal() & rg.strided(k)
    allowed = pattern.allowed(n).numpy()
    rows, keys = np.indices((n, n))
    neighbors = np.where(allowed, 2, np.where(keys < (rows // tile + 1) * tile, 1, 0))
    made = plan(pattern, n, n, 0, 1, tile)
    order = np.argsort(np.arange(n) % k, kind="stable")
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.9))
    _image(axes[0], np.where(allowed, 4, 0), 64)
    axes[0].set_title(f"{pattern!r}: {pattern.count(n):,} pairs", fontsize=9)
    _image(axes[1], neighbors, 64)
    axes[1].set_title(f"tiles of neighboring rows: {int((neighbors > 0).sum()):,} computed", fontsize=9)
    _image(axes[2], _visited(made)[order][:, order], 64)
    axes[2].set_title(f"tiles of one residue class: {made.computed:,} computed", fontsize=9)
    axes[2].set_xlabel(f"key j, ordered by j mod {k}", fontsize=8)
    axes[2].set_ylabel(f"query i, ordered by i mod {k}", fontsize=8)
    axes[2].set_xticks([])
    axes[2].set_yticks([])
    return _legend(figure)


def cells() -> Figure:
    """One tile's keys, cut where a word's outer or inner interval ends."""
    n, first, rows = 64, 32, 4
    words = {"causal()": rg.causal(), "window(7)": rg.window(7)}
    figure, axes = plt.subplots(figsize=(9, 2.4))
    ends = {0, n}
    for line, word in enumerate(words.values()):
        table = word.allowed(n)[first : first + rows]
        some, every = table.any(0).numpy(), table.all(0).numpy()
        for which, color, height in ((some, PARTIAL, 0.8), (every, FULL, 0.8)):
            keys = np.flatnonzero(which)
            if len(keys):
                lo, hi = keys[0], keys[-1] + 1
                axes.add_patch(Rectangle((lo, -line * 1.2), hi - lo, height, color=color))
                ends |= {int(lo), int(hi)}
    value = COMB.allowed(n)[first : first + rows]
    names, edges = ("none", "some", "all"), sorted(ends)
    for lo, hi in pairwise(edges):
        inside = (words["causal()"] & words["window(7)"]).allowed(n)[first : first + rows, lo:hi]
        kind = 2 if inside.all() else 1 if inside.any() else 0
        color = ("#ececec", PARTIAL, FULL)[kind]
        axes.add_patch(Rectangle((lo + 0.1, -2.6), hi - lo - 0.2, 0.8, color=color))
        axes.text((lo + hi) / 2, -2.2, names[kind], ha="center", va="center", fontsize=7)
        axes.axvline(lo, color=EDGE, linewidth=0.5, linestyle=":")
    for j in np.flatnonzero(value.any(0).numpy()):
        axes.add_patch(Rectangle((j, -3.8), 1.0, 0.8, color=FULL if value[:, j].all() else PARTIAL))
    labels = [*words, "causal() & window(7)", "… | every(16)"]
    axes.set_yticks([0.4, -0.8, -2.2, -3.4], labels, fontsize=8)
    axes.set_xticks(range(0, n + 1, 8), range(0, n + 1, 8), fontsize=8)
    axes.set_xlim(-0.5, n + 0.5)
    axes.set_ylim(-4.1, 1.2)
    axes.set_xlabel(f"keys of the tile of queries {first} … {first + rows - 1}", fontsize=8)
    _plain(axes)
    return _legend(figure, extra=False)


def blocks() -> Figure:
    """The parts of one tile, cut into blocks of 16 keys for a kernel."""
    made = plan(rg.causal() & (rg.window(40) | rg.every(16)), 256, 256, 0, 1, 16)
    one = made.passes[0]
    tile = len(one.tiles) - 2
    parts = one.parts[one.offsets[tile] : one.offsets[tile + 1]]
    figure, axes = plt.subplots(figsize=(9, 2.2))
    slots: list[tuple[int, int]] = []
    for number, (key, step, count, full) in enumerate(parts):
        for c in range(count):
            j = key + step * c
            axes.add_patch(Rectangle((j, 2), 0.9, 0.8, color=FULL if full else PARTIAL))
            slots.append((j, number))
    scale = 256 / (-(-len(slots) // 16) * 16)
    for place, (j, number) in enumerate(slots):
        block = place // 16
        axes.add_patch(
            Rectangle((place * scale, 0), 0.9 * scale, 0.8, color=FULL if parts[number][3] else PARTIAL)
        )
        axes.plot([j + 0.45, place * scale + 0.45 * scale], [2, 0.8], color="#bbbbbb", linewidth=0.4)
        if place % 16 == 0:
            axes.text((place + 8) * scale, -0.6, f"block {block}", ha="center", fontsize=7)
            axes.axvline(place * scale, ymax=0.36, color=EDGE, linewidth=0.6)
    axes.set_yticks([2.4, 0.4], ["keys j", "places c"], fontsize=8)
    axes.set_xticks([])
    axes.set_xlim(-1, 257)
    axes.set_ylim(-1, 3)
    _plain(axes)
    return _tight(figure)


def _visited(made: Plan) -> np.ndarray:
    """0 not computed, 1 computed and masked out, 2 allowed in a partial part, 3 in a full part."""
    image = np.zeros((made.n, made.m), dtype=int)
    for one in made.passes:
        allowed = one.pattern.allowed(made.n, made.m).numpy()
        for (row, row_step, rows), a, b in zip(one.tiles, one.offsets, one.offsets[1:]):
            for key, step, count, full in one.parts[a:b]:
                pairs = np.ix_(row + row_step * np.arange(rows), key + step * np.arange(count))
                image[pairs] = 3 if full else 1 + allowed[pairs]
    return image


def _image(axes: Axes, image: np.ndarray, ticks: int) -> None:
    colors = ListedColormap(["white", EXTRA, PARTIAL, FULL, ALLOWED])
    n, m = image.shape
    axes.imshow(image, cmap=colors, vmin=0, vmax=4, interpolation="nearest", extent=(0, m, n, 0))
    axes.set_xticks(range(0, m + 1, ticks), range(0, m + 1, ticks), fontsize=7)
    axes.set_yticks(range(0, n + 1, ticks), range(0, n + 1, ticks), fontsize=7)
    axes.set_xlabel("key j", fontsize=8)
    axes.set_ylabel("query i", fontsize=8)


def _plain(axes: Axes) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0)


def _legend(figure: Figure, extra: bool = True) -> Figure:
    entries = [Patch(color=FULL, label="full: no mask"), Patch(color=PARTIAL, label="partial: masked")]
    if extra:
        entries.append(Patch(color=EXTRA, label="computed and masked out"))
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.legend(handles=entries, loc="lower center", ncols=3, fontsize=8, frameon=False)
    return figure


def _tight(figure: Figure) -> Figure:
    figure.tight_layout()
    return figure


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for draw in (one_query, cells, tiles, layouts, blocks):
        path = FOLDER / f"engine_{draw.__name__}.png"
        draw().savefig(path, dpi=110)
        print(path)

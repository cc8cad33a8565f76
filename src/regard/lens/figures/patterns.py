"""Patterns: the mask matrix, the receptive field, and which attention of a model has which mask."""

from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from ...errors import SpecError
from ...formulas import dependencies
from ...pattern import Pattern, causal, full
from . import style

MAX_DRAWN = 512  # so that a cell is at least a pixel


def mask_matrix(pattern: Pattern, n: int = 16, m: int | None = None, *, dark: bool = False) -> Any:
    """The pairs of a pattern, their number, the saving, and the number of layers that connect all positions."""
    if pattern.differs_by_head:
        raise SpecError(f"{pattern!r} is one pattern for each head; draw one of .patterns")
    m = n if m is None else m
    allowed = pattern.allowed(min(n, MAX_DRAWN), min(m, MAX_DRAWN))
    count = pattern.count(n, m)
    layers = f", {_connects(allowed)}" if n == m <= MAX_DRAWN else ""
    figure = style.canvas(5.2, 5.4, dark)
    title = f"{_short(repr(pattern))}\n{count:,} of {n * m:,} pairs, {1 - count / (n * m):.1%} saved{layers}"
    ax = style.axes(figure, dark=dark, title=title, x="key", y="query")
    _cells(ax, allowed, dark)
    return figure


def receptive_field(
    pattern: Pattern, n: int, layers: int, at: int | None = None, *, dark: bool = False
) -> Any:
    """The inputs that reach one position, layer by layer, and the bound (keys per query + 1)^layer."""
    at = n - 1 if at is None else at
    step = dependencies(pattern, n)
    reached = [torch.eye(n, dtype=torch.bool)[at]]
    for _ in range(layers):
        reached.append((reached[-1].float() @ step.float()) > 0)
    keys = int(dependencies(pattern, n, residual=False).sum(1).max())
    figure = style.canvas(7.0, 1.6 + 0.34 * (layers + 1), dark)
    title = f"inputs that reach position {at} through {_short(repr(pattern))}"
    ax = style.axes(figure, dark=dark, title=title, x="input position", y="layers below")
    _cells(ax, torch.stack(reached), dark)
    ax.set_yticks(range(layers + 1))
    for layer, row in enumerate(reached):
        bound = min(n, (keys + 1) ** layer)
        text = f" {int(row.sum())} (≤ {bound})"
        ax.text(n - 0.4, layer, text, va="center", fontsize=8, color=style.theme(dark).ink)
    return figure


def mask_table(source: int = 6, target: int = 5, padding: int = 2, *, dark: bool = False) -> Any:
    """Which mask each attention of an encoder, a decoder and an encoder-decoder has."""
    real_source, real_target = torch.arange(source) < source - padding, torch.arange(target) < target - 1
    key_padding = real_source.expand(source, source)
    past = causal().allowed(target)
    cross = real_source.expand(target, source)
    everything = full().allowed(source)
    tables = [
        ("encoder\nself: key padding", key_padding),
        ("decoder alone\nself: causal", past),
        ("encoder-decoder\nencoder self: key padding", key_padding),
        ("encoder-decoder\ndecoder self: causal", past),
        ("encoder-decoder\ncross: key padding of the source", cross),
        ("without a mask\n(wrong wherever rows are padded)", everything),
    ]
    figure = style.canvas(9.0, 6.0, dark)
    cells = style.grid(figure, 2, 3)
    for number, (title, allowed) in enumerate(tables):
        ax = style.axes(figure, cells[number // 3, number % 3], dark=dark, title=title, x="key", y="query")
        _cells(ax, allowed, dark)
        names = [f"s{i}" if r else "pad" for i, r in enumerate(real_source)]
        rows = [f"t{i}" if r else "pad" for i, r in enumerate(real_target)]
        wide, tall = allowed.shape[1] == source, allowed.shape[0] == source
        style.tokens(ax, names if tall else rows, names if wide else rows)
    return figure


def _cells(ax: Any, allowed: Bool[Tensor, "n m"], dark: bool) -> None:
    n, m = allowed.shape
    style.heat(ax, allowed.float(), dark, top=1.0)
    ax.set_aspect("equal" if max(n, m) <= 4 * min(n, m) else "auto")
    if max(n, m) <= 64:
        look = style.theme(dark)
        ax.set_xticks([j - 0.5 for j in range(1, m)], minor=True)
        ax.set_yticks([i - 0.5 for i in range(1, n)], minor=True)
        ax.grid(which="minor", color=look.paper, linewidth=0.6)
        ax.tick_params(which="minor", length=0)


def _connects(allowed: Bool[Tensor, "n n"]) -> str:
    """The number of layers after which the set of inputs that reach each position no longer grows."""
    step = (allowed | torch.eye(len(allowed), dtype=torch.bool)).float()
    reached, layers = step, 1
    while True:
        further = ((reached @ step) > 0).float()
        if torch.equal(further, reached):
            all_pairs = "all positions" if bool((reached > 0).all()) else "all reachable positions"
            return f"{layers} layer{'s' * (layers > 1)} connect{'s' * (layers == 1)} {all_pairs}"
        reached, layers = further, layers + 1


def _short(text: str, length: int = 70) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"

"""Maps: one head, an overview of all heads, the dependence of outputs on inputs."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ...errors import ShapeError
from ..view import View
from . import style


def attention_map(view: View, layer: int | str, head: int, batch: int = 0, *, dark: bool = False) -> Any:
    """The scores and the weights of one head, tokens on both axes, the entropy of each row beside them."""
    scores, weights = view.scores(layer, head, batch), view.map(layer, head, batch)
    queries, keys = view.queries(layer, batch), view.keys(layer, batch)
    height = min(3.2 + 0.13 * len(queries), 11.0)
    figure = style.canvas(min(7.0 + 0.2 * len(keys), 18.0), height, dark)
    cells = figure.add_gridspec(1, 3, width_ratios=(10, 10, 2))
    call = view.call(layer)
    kind = view.kinds[call.layer][head].name
    figure.suptitle(
        f"{call.name}, head {head}: {kind} ({call.role}-attention)", color=style.theme(dark).ink, fontsize=10
    )
    left = style.axes(figure, cells[0], dark=dark, title="scores", x="key", y="query")
    finite = scores.masked_fill(~scores.isfinite(), float("nan"))
    shown = (
        finite - finite.nan_to_num(0.0).mean() if bool(finite.isfinite().any()) else finite.nan_to_num(0.0)
    )
    style.scale(figure, style.heat(left, shown, dark, signed=True), left, "score minus mean", dark)
    middle = style.axes(figure, cells[1], dark=dark, title="weights", x="key")
    style.scale(figure, style.heat(middle, weights, dark), middle, "weight", dark)
    for ax in (left, middle):
        style.tokens(ax, queries, keys)
    right = style.axes(figure, cells[2], dark=dark, title="entropy", x="nats")
    right.barh(range(len(queries)), entropy(weights).tolist(), color=style.COLORS[0])
    right.set_ylim(len(queries) - 0.5, -0.5)
    right.set_yticks([])
    return figure


def attention_rows(
    view: View,
    layer: int | str,
    head: int,
    query: int | str,
    batches: Sequence[int] | None = None,
    *,
    dark: bool = False,
) -> Any:
    """The weights of one query, key by key, one panel per batch row: what "it" attends to in each sentence."""
    chosen = range(view.call(layer).b) if batches is None else batches
    rows = {b: view.row(layer, head, query, b) for b in chosen}
    figure = style.canvas(3.6 * len(rows) + 0.4, 0.9 + 0.26 * max(map(len, rows.values())), dark)
    cells = style.grid(figure, 1, len(rows))
    for number, (b, row) in enumerate(rows.items()):
        name = query if isinstance(query, str) else view.queries(layer, b)[query]
        first = max(row, key=lambda key: row[key])
        title = f"from {style.shown(name)}: {row[first]:.0%} on {style.shown(first)}"
        ax = style.axes(figure, cells[number], dark=dark, title=title, x="weight")
        ax.barh(range(len(row)), list(row.values()), color=style.COLORS[0])
        ax.set_yticks(range(len(row)), [style.shown(key) for key in row])
        ax.set_ylim(len(row) - 0.5, -0.5)
        ax.set_xlim(0, 1)
    return figure


def entropy(weights: Float[Tensor, "n m"]) -> Float[Tensor, " n"]:
    return -torch.special.xlogy(weights, weights).sum(-1)


def overview(view: View, batch: int = 0, *, dark: bool = False) -> Any:
    """A small map of every head of every layer, with its kind."""
    heads = max(c.heads for c in view.calls)
    figure = style.canvas(min(1.2 + 1.15 * heads, 20), min(0.6 + 1.25 * len(view.calls), 40), dark)
    cells = style.grid(figure, len(view.calls), heads)
    for row, call in enumerate(view.calls):
        for head in range(call.heads):
            ax = style.axes(figure, cells[row, head], dark=dark)
            style.heat(ax, view.map(call.layer, head, batch), dark)
            ax.set_xticks([])
            ax.set_yticks([])
            ax.set_title(view.kinds[call.layer][head].name, fontsize=6, color=style.theme(dark).ink, pad=2)
            if head == 0:
                ax.set_ylabel(f"layer {call.layer}\n{call.role}", fontsize=6, color=style.theme(dark).ink)
    return figure


def dependence(
    tables: Mapping[str, Float[Tensor, "n m"] | Sequence[Sequence[int | float]]], *, dark: bool = False
) -> Any:
    """|∂ output i / ∂ input j| for each named table; exact zeros are blank."""
    if not tables:
        raise ShapeError("no table to draw")
    figure = style.canvas(min(3.2 * len(tables), 16), 3.4, dark)
    cells = style.grid(figure, 1, len(tables))
    for number, (name, given) in enumerate(tables.items()):
        table = torch.as_tensor(given, dtype=torch.float32)
        ax = style.axes(figure, cells[number], dark=dark, title=name, x="input j", y="output i")
        depends = torch.where(table == 0, torch.nan, (table.abs() + 1e-30).log10())
        image = style.heat(ax, depends - depends.nan_to_num(0.0).min(), dark)
        image.set_cmap(image.cmap.with_extremes(bad=style.theme(dark).paper))
        ax.set_aspect("equal")
    return figure

"""Costs of layer types against length, and a trace of one attention on one input."""

from collections.abc import Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from ...costs import compare
from ..trace import trace
from .curves import cost_curves
from .heads import shape_trace


def layer_costs(
    d: int = 512,
    lengths: Sequence[int] = (64, 128, 256, 512, 1024, 2048, 4096, 8192),
    *,
    measured: bool = False,
    dark: bool = False,
) -> Any:
    """The FLOPs (or the seconds measured here) of each layer type against n, with the crossings marked."""
    if measured:
        seconds = {
            g.name: dict(zip(g.lengths, g.seconds, strict=True)) for g in compare(d=d, measure=lengths).growth
        }
        return cost_curves(seconds, y="seconds of one layer", dark=dark)
    each = {n: compare(n, d) for n in lengths}
    first = each[lengths[0]]
    work = {layer.name: {n: c[layer.name].flops for n, c in each.items()} for layer in first.layers}
    crossings = {f"n = {d}": d, f"n = {2 * d}": 2 * d}
    return cost_curves(work, y="FLOPs of one layer", crossings=crossings, dark=dark)


def attention_trace(
    layer: nn.Module,
    x: Float[Tensor, "b n d_model"],
    context: Float[Tensor, "b m d_context"] | None = None,
    *,
    dark: bool = False,
) -> Any:
    """Every intermediate of one attention on one sequence: name, formula, shape, cost, first values."""
    steps = [(s.name, s.formula, s.tensor, s.cost) for s in trace(layer, x, context)]
    return shape_trace(steps, dark=dark)

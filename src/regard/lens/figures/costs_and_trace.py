"""Costs of layer types against length, and a trace of one attention on one input."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ...costs import compare
from ...errors import SpecError
from ...nn.attention import MultiHeadAttention
from ..view import look
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


def attention_trace(layer: nn.Module, x: Float[Tensor, "1 n d_model"], *, dark: bool = False) -> Any:
    """Every intermediate of one attention on one sequence: name, formula, shape, cost, first values."""
    if not isinstance(layer, MultiHeadAttention):
        raise SpecError(
            f"{type(layer).__name__} is not an attention module of regard; build one with rg.Attention(...).build()"
        )
    with torch.no_grad():
        call = look(layer, x).calls[0]
        out = layer(x)
    price = layer.spec.cost(n=x.shape[1])
    values = call.values()
    weights = call.weights()
    steps = [
        ("x", "input", x[0], ""),
        ("scores", "scale · Q Kᵀ + bias", call.scores(), _flops(price, "scores")),
        (
            "weights",
            "softmax over the allowed keys",
            weights,
            f"{price['softmax'].total.elementwise_flops:,}",
        ),
    ]
    if values is not None:
        heads = weights.to(values.dtype) @ values
        steps += [
            ("V", "x W_V, per head", values, _flops(price, "v")),
            ("heads", "weights · V", heads, _flops(price, "mixing")),
        ]
    steps.append(("output", "concat(heads) W_O", out[0], _flops(price, "output")))
    return shape_trace(steps, dark=dark)


def _flops(price: Any, name: str) -> str:
    try:
        return f"{price[name].total.flops:,} FLOPs"
    except SpecError:  # a layer without that part: no output projection, say
        return ""

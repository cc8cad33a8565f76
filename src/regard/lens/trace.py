"""Every intermediate result of one attention on one sequence: name, formula, shape, cost, numbers."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from ..errors import ShapeError, SpecError
from ..nn.attention import MultiHeadAttention
from ..reference import dot_scores, repeat_heads, softcapped
from .calls import QueryKeyScores
from .view import look


@dataclass(frozen=True, eq=False)
class Step:
    """One intermediate result; `flops` are those of its matrix product, `elementwise` the other operations."""

    name: str
    formula: str
    tensor: Tensor
    flops: int = 0
    elementwise: int = 0

    @property
    def cost(self) -> str:
        if self.flops:
            return f"{self.flops:,} FLOPs"
        return f"{self.elementwise:,} elementwise" if self.elementwise else ""

    def __str__(self) -> str:
        first = "  ".join(f"{v:+.4g}" for v in self.tensor.flatten()[:4].tolist())
        shape = " × ".join(map(str, self.tensor.shape))
        return f"{self.name:9} {self.formula:34} {shape:14} {self.cost:20} {first}".rstrip()


@dataclass(frozen=True, eq=False)
class Trace:
    """The steps in the order in which they are computed: `print(trace)`, `trace["weights"].tensor`."""

    steps: tuple[Step, ...]

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def __getitem__(self, name: str) -> Step:
        for step in self.steps:
            if step.name == name:
                return step
        raise SpecError(f"no step is named {name!r}; the steps are {', '.join(s.name for s in self.steps)}")

    def __str__(self) -> str:
        return "\n".join(map(str, self.steps))


@torch.no_grad()
def trace(
    layer: nn.Module, x: Float[Tensor, "b n d_model"], context: Float[Tensor, "b m d_context"] | None = None
) -> Trace:
    """X → Q, K, V → products → scaled (→ capped, + bias) → masked → exp → row sums → weights → heads → output.

    Each tensor is computed from the ones before it as its formula says; only Q, K and V (with rotary positions, where
    declared) and the bias come from the layer.
    """
    if not isinstance(layer, MultiHeadAttention):
        raise SpecError(
            f"{type(layer).__name__} is not an attention module of regard; build one with rg.Attention(...).build()"
        )
    if len(x) != 1:
        raise ShapeError(f"x has {len(x)} batch rows; a trace shows one sequence: x[:1]")
    was_training = layer.training
    try:
        call = look(layer.eval(), x if context is None else (x, context)).calls[0]
    finally:
        layer.train(was_training)
    source = call.source
    assert isinstance(source, QueryKeyScores)
    heads, hard = call.heads, source.scale == inf
    price = layer.spec.cost(n=call.n, **({} if context is None else {"m": call.m}))
    q, k, v = source.q[0], repeat_heads(source.k, heads)[0], call.values()
    assert v is not None
    scale = q.shape[-1] ** -0.5 if hard else source.scale
    products = dot_scores(q, k)
    scaled, masked = scale * products, call.scores()
    steps = [Step("X", "input", x[0])]
    steps += [] if context is None else [Step("context", "input of keys and values", context[0])]
    of = "X" if context is None else "context"
    if layer.spec.score in ("dot", "bilinear"):
        steps += [
            Step("Q", "X W_Q, per head", q, _flops(price, "q")),
            Step("K", f"{of} W_K, per head", k, _flops(price, "k")),
            Step("V", f"{of} W_V, per head", v, _flops(price, "v")),
            Step("products", "Q Kᵀ", products, _flops(price, "scores")),
            Step("scaled", f"{scale:.4g} · products", scaled, elementwise=_elementwise(price, "scale")),
        ]
    else:
        steps.append(Step("V", f"{of} W_V, per head", v, _flops(price, "v")))
    capped, cap = softcapped(scaled, layer.spec.softcap), layer.spec.softcap
    if cap is not None:
        steps.append(Step("capped", f"{cap:g} · tanh(scaled / {cap:g})", capped))
    bias = (masked - capped).masked_fill(masked == -inf, 0.0)
    if bool(bias.abs().max() > 1e-5):
        name = "bias" if layer.spec.score == "dot" else "scores"
        steps.append(
            Step(name, f"{layer.spec.score} scores" if name == "scores" else "added by positions", bias)
        )
    steps.append(Step("masked", "−∞ where the key is not allowed", masked))
    if hard:
        weights = call.weights()
        steps.append(Step("weights", "equal shares of the largest score", weights))
    else:
        steps += _softmax_steps(masked, source.sink_logits, _elementwise(price, "softmax"))
        weights = steps[-1].tensor
    out = weights.to(v.dtype) @ v
    steps.append(Step("heads", "weights · V", out, _flops(price, "mixing")))
    joined = rearrange(out, "h n d -> n (h d)")
    steps.append(Step("concat", "heads side by side", joined))
    if layer.w_o is not None:
        steps.append(Step("output", "concat W_O", layer.w_o(joined), _flops(price, "output")))
    return Trace(tuple(steps))


def _softmax_steps(masked: Tensor, sink_logits: Tensor | None, elementwise: int) -> list[Step]:
    top = masked.amax(-1, keepdim=True)
    exp = (masked - top.masked_fill(top == -inf, 0.0)).exp()
    sums, sink = exp.sum(-1, keepdim=True), ""
    if sink_logits is not None:
        sums, sink = sums + (sink_logits[:, None, None].to(top) - top).exp(), " and the sink"
    weights = exp / sums.where(sums > 0, 1.0)
    return [
        Step("row max", "max of masked, per query", top[..., 0]),
        Step("exp", "exp(masked − row max)", exp),
        Step("row sums", "Σ exp over the keys" + sink, sums[..., 0]),
        Step("weights", "exp / row sums", weights, elementwise=elementwise),
    ]


def _flops(price: Any, name: str) -> int:
    try:
        return int(price[name].total.flops)
    except SpecError:  # a score without that part
        return 0


def _elementwise(price: Any, name: str) -> int:
    try:
        return int(price[name].total.elementwise_flops)
    except SpecError:
        return 0

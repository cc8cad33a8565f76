"""Gradients through a deep stack at initialization: their norm at each block, and whether tokens stay distinct."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from .. import spec
from ..errors import ShapeError

STACKS: dict[str, dict[str, Any]] = {
    "no residual, no norm": {"residual": False, "norm": "none"},
    "norm, no residual": {"residual": False, "norm_at": "post"},
    "residual, pre-norm": {"norm_at": "pre"},
    "residual, post-norm": {"norm_at": "post"},
}


@dataclass(frozen=True)
class GradientFlow:
    """Per block, bottom first: the norm of its parameters' gradients, the smallest cosine of two tokens after it."""

    norms: tuple[float, ...]
    cosines: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """The gradient of the bottom block over that of the top block."""
        return self.norms[0] / self.norms[-1]


def gradient_flow(
    model: nn.Module,
    x: Float[Tensor, "b n d_model"],
    blocks: Sequence[nn.Module] | None = None,
    seed: int = 1,
) -> GradientFlow:
    """One backward pass from a random direction of the output: the gradient norm of each block's parameters.

    The direction is random because the squared norm of a normalized output is constant, so it has no gradient.
    blocks: the layers, bottom first; by default model.blocks.
    """
    layers = list(getattr(model, "blocks", ()) if blocks is None else blocks)
    if len(layers) < 2:
        raise ShapeError(
            f"{type(model).__name__} has {len(layers)} blocks to compare; give its layers as blocks=[…], bottom first"
        )
    outputs: list[Tensor] = []
    hooks = [layer.register_forward_hook(lambda _, __, out: outputs.append(out)) for layer in layers]
    try:
        out = model(x)
    finally:
        for hook in hooks:
            hook.remove()
    towards = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(out)
    parameters = [[p for p in layer.parameters() if p.requires_grad] for layer in layers]
    flat = [p for of_layer in parameters for p in of_layer]
    gradients = iter(torch.autograd.grad((out * towards).sum(), flat, allow_unused=True))
    squares = [
        sum(float(g.double().pow(2).sum()) for g in (next(gradients) for _ in of_layer) if g is not None)
        for of_layer in parameters
    ]
    return GradientFlow(tuple(s**0.5 for s in squares), tuple(smallest_cosine(o.detach()) for o in outputs))


def smallest_cosine(x: Float[Tensor, "b n d"]) -> float:
    """The smallest cosine between two tokens of one sequence; 1 where all tokens have become equal."""
    unit = F.normalize(x, dim=-1)
    return float((unit @ unit.mT).amin())


def compare_stacks(
    depth: int = 24, width: int = 64, heads: int = 4, seed: int = 0
) -> dict[str, GradientFlow]:
    """The flow through each of STACKS at initialization: with and without residual and norm, all else equal."""
    x = torch.randn(4, 16, width, generator=torch.Generator().manual_seed(seed + 1))
    flows = {}
    for name, kind in STACKS.items():
        torch.manual_seed(seed)
        block = spec.Block(spec.Attention(width, heads=heads), spec.FeedForward(4 * width), **kind)
        flows[name] = gradient_flow(spec.Encoder(block, depth, init="xavier_packed").build(), x)
    return flows

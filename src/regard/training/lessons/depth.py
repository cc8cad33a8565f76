"""Depth: gradients at the bottom of a deep stack, with and without residuals, norms and warm-up."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ... import spec
from ...schedule import constant
from .lesson import Lesson, fit, seeded

DEPTH, WIDTH = 24, 64


def gradient_flow(seed: int = 0, steps: int = 60) -> Lesson:
    """T7: gradients through 24 layers at the start, and training with and without warm-up."""
    kinds: dict[str, dict[str, Any]] = {
        "no residual, no norm": {"residual": False, "norm": "none"},
        "residual, pre-norm": {"norm_at": "pre"},
        "residual, post-norm": {"norm_at": "post"},
    }
    ratios = {name: _ratio(_stack(seed, **kind)) for name, kind in kinds.items()}
    cosine = _min_cosine(_stack(seed, residual=False, norm_at="post"), layers=6)
    trained = {
        f"{at}-norm, {'with' if warm else 'without'} warm-up": _trained(seed, at, warm, steps)
        for at in ("pre", "post")
        for warm in (True, False)
    }
    return Lesson(
        "T7",
        "without residual and norm the gradient vanishes with depth; with norm alone all tokens become equal; with "
        "residual and pre-norm the gradient reaches the bottom",
        {
            "bottom over top gradient": ratios,
            "cosine of tokens after 6 layers, norm without residual": cosine,
            "loss after training": trained,
        },
        ratios["no residual, no norm"] < 1e-6 and cosine > 0.999 and 0.1 < ratios["residual, pre-norm"] < 10,
    )


def _stack(seed: int, layers: int = DEPTH, **kind):
    torch.manual_seed(seed)
    block = spec.Block(spec.Attention(WIDTH, heads=4), spec.FeedForward(4 * WIDTH), **kind)
    return spec.Encoder(
        block, layers, init="xavier_packed"
    ).build()  # as nn.MultiheadAttention is initialized


def _ratio(model) -> float:
    """The norm of the bottom block's gradients over that of the top's."""
    x, towards = torch.randn(2, 4, 16, WIDTH, generator=seeded(1))
    (model(x) * towards).sum().backward()  # the squared norm of a normalized output is constant

    def norm(block: nn.Module) -> float:
        return sum(float(p.grad.pow(2).sum()) for p in block.parameters() if p.grad is not None) ** 0.5

    return norm(model.blocks[0]) / norm(model.blocks[-1])


@torch.no_grad()
def _min_cosine(model, layers: int) -> float:
    x = torch.randn(4, 16, WIDTH, generator=seeded(1))
    for block in model.blocks[:layers]:
        x = block(x)
    x = F.normalize(x, dim=-1)
    return float((x @ x.mT).amin())


def _trained(seed: int, norm_at: str, warm: bool, steps: int) -> float:
    """The mean of the last ten losses; each token has to predict the mean of the first feature."""
    model = _stack(seed, layers=12, norm_at=norm_at)
    read, generator = nn.Linear(WIDTH, 1), seeded(seed)
    both = nn.ModuleList([model, read])

    def loss(step: int) -> Tensor:
        x = torch.randn(16, 12, WIDTH, generator=generator)
        target_values = x[..., :1].mean(1, keepdim=True).expand(-1, 12, -1)
        return F.mse_loss(read(model(x)), target_values)

    curve = fit(both, loss, steps, constant(1e-3, warmup=steps // 3 if warm else 0))
    return sum(curve[-10:]) / 10

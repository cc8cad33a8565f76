"""Depth: gradients at the bottom of a deep stack, with and without residuals, norms and warm-up."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ... import spec
from ...lens import figures
from ...lens.gradient_flow import compare_stacks
from ...schedule import constant
from . import pictures
from .experiment import Experiment
from .lesson import Lesson, Picture, Suggestion, check, within

DEPTH, WIDTH, TRAINED_DEPTH = 24, 64, 12


def gradient_flow(run: Experiment, *, seed: int = 0, steps: int = 60) -> Lesson:
    """T7: gradients through 24 layers at the start, and training with and without warm-up."""
    flows = compare_stacks(DEPTH, WIDTH, seed=seed)
    ratios = {name: flow.ratio for name, flow in flows.items()}
    cosine = flows["norm, no residual"].cosines[5]
    trained = {
        f"{at}-norm, {'with' if warm else 'without'} warm-up": _trained(run, seed, at, warm, steps)
        for at in ("pre", "post")
        for warm in (True, False)
    }
    return Lesson(
        "T7",
        "residual connections carry the gradient through depth: without them it vanishes, or all tokens become equal",
        f"Encoders of {DEPTH} layers are compared before training: the norm of each layer's gradient, and how "
        f"similar the tokens of a sequence become. Then encoders of {TRAINED_DEPTH} layers learn the mean of "
        "their tokens' first feature, with the norm before or after each branch, and with or without warm-up "
        "of the learning rate.",
        (
            check("no residual, no norm: bottom over top gradient", ratios["no residual, no norm"], "below", 1e-6),
            check("norm, no residual: smallest cosine of two tokens after 6 layers", cosine, "above", 0.999,
                  because="all tokens have become equal"),
            within("residual, pre-norm: bottom over top gradient", ratios["residual, pre-norm"], 0.1, 10),
            check("pre-norm, with warm-up: loss", trained["pre-norm, with warm-up"], "below", 0.5 / 12,
                  because="half of what the answer 0 gives, 1/12"),
        ),
        {"bottom over top gradient": ratios, "loss after training": trained},
        (
            Picture(
                "Gradient norm by layer",
                f"{DEPTH} layers before training, logarithmic. Layer 0 is the bottom, farthest from the loss.",
                lambda dark: figures.gradient_flow({k: f.norms for k, f in flows.items()}, dark=dark),
            ),
            pictures.lines(
                "How similar the tokens become",
                "The smallest cosine between two tokens of a sequence after each layer. Norm without "
                "residual makes all tokens equal; nothing is left to attend to.",
                {name: {1 + i: flow.cosines[i] for i in range(0, DEPTH, 3)} for name, flow in flows.items()},
                x="layers",
                y="smallest cosine",
            ),
            pictures.losses(run.recorder, f"{TRAINED_DEPTH} layers; the answer 0 has a loss of 1/12 = 0.083."),
        ),
        (),
        (
            Suggestion("Train longer: does post-norm without warm-up recover?", {"steps": 200}),
            Suggestion("Other random weights.", {"seed": 1}),
        ),
    )  # fmt: skip


def _stack(seed: int, layers: int = DEPTH, **kind: Any) -> Any:
    torch.manual_seed(seed)
    block = spec.Block(spec.Attention(WIDTH, heads=4), spec.FeedForward(4 * WIDTH), **kind)
    return spec.Encoder(
        block, layers, init="xavier_packed"
    ).build()  # as nn.MultiheadAttention is initialized


def _trained(run: Experiment, seed: int, norm_at: str, warm: bool, steps: int) -> float:
    """The mean of the last ten losses; each token has to predict the mean of the first feature."""
    model = Regression(_stack(seed, layers=TRAINED_DEPTH, norm_at=norm_at))

    def loss(model: Any, generator: torch.Generator) -> Tensor:
        x = torch.randn(16, 12, WIDTH, generator=generator).to(run.device)
        return F.mse_loss(model(x), x[..., :1].mean(1, keepdim=True).expand(-1, 12, -1))

    name = f"{norm_at}-norm, {'with' if warm else 'without'} warm-up"
    rate = constant(1e-3, warmup=steps // 3 if warm else 0)
    curve = run.fit(name, model, loss, steps, rate)
    return sum(curve[-10:]) / len(curve[-10:])


class Regression(nn.Module):
    """A stack and a linear readout of one number per token."""

    def __init__(self, stack: nn.Module):
        super().__init__()
        self.stack, self.read = stack, nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.stack(x))

"""The scale 1/√d_k and the number of heads, at increasing width."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import spec
from ...pattern import causal
from ...position import learned
from .lesson import Lesson, fit, seeded


def score_scaling(seed: int = 0, steps: int = 120, sizes: tuple[int, ...] = (64, 512)) -> Lesson:
    """T12: with and without the scale, one head and eight, after the same number of steps."""
    measured: dict[str, dict[int, float]] = {}
    for name, heads, scale in (
        ("one head, scaled", 1, None),
        ("one head, unscaled", 1, 1.0),
        ("eight heads, scaled", 8, None),
        ("eight heads, unscaled", 8, 1.0),
    ):
        measured[name] = {d: _final_loss(seed, d, heads, scale, steps) for d in sizes}
    last = sizes[-1]
    return Lesson(
        "T12",
        f"at width {last} unscaled attention has a higher loss after the same number of steps",
        {"loss by width": measured},
        measured["one head, unscaled"][last] > measured["one head, scaled"][last],
    )


def _final_loss(seed: int, d_model: int, heads: int, scale: float | None, steps: int) -> float:
    """The mean of the last ten losses; the task is to recall the token that followed the same token before."""
    torch.manual_seed(seed)
    attention = spec.Attention(d_model, heads=heads, pattern=causal(), scale=scale)
    block = spec.Block(attention, spec.FeedForward(d_model), norm_at="pre")
    embedding = spec.Embedding(16, d_model, position=learned(24))
    model = spec.Encoder(block, 1, embedding=embedding, head=spec.LanguageHead(tied=False)).build()
    generator = seeded(seed)

    def loss(step: int) -> Tensor:
        half = torch.randint(0, 16, (16, 12), generator=generator)
        x = torch.cat([half, half], 1)
        return F.cross_entropy(model(x[:, :-1])[:, 11:].flatten(0, 1), x[:, 12:].flatten())

    return sum(fit(model, loss, steps, 2e-3)[-10:]) / 10

"""The scale 1/√d_k and the number of heads, at growing width."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import spec
from ...pattern import causal
from ...position import learned
from .lesson import Lesson, fit, noise


def widths(seed: int = 0, steps: int = 120, sizes: tuple[int, ...] = (64, 512)) -> Lesson:
    """T12: scale on and off, one head and eight, after equal steps."""
    told: dict[str, dict[int, float]] = {}
    for name, heads, scale in (
        ("one head, scaled", 1, None),
        ("one head, unscaled", 1, 1.0),
        ("eight heads, scaled", 8, None),
        ("eight heads, unscaled", 8, 1.0),
    ):
        told[name] = {d: _reached(seed, d, heads, scale, steps) for d in sizes}
    last = sizes[-1]
    return Lesson(
        "T12",
        f"at width {last} unscaled attention is worse after equal steps",
        {"loss by width": told},
        told["one head, unscaled"][last] > told["one head, scaled"][last],
    )


def _reached(seed: int, d_model: int, heads: int, scale: float | None, steps: int) -> float:
    """The mean of the last ten losses of recalling the token that followed the last one's twin."""
    torch.manual_seed(seed)
    attention = spec.Attention(d_model, heads=heads, pattern=causal(), scale=scale)
    block = spec.Block(attention, spec.FeedForward(d_model), norm_at="pre")
    embedding = spec.Embedding(16, d_model, position=learned(24))
    model = spec.Encoder(block, 1, embedding=embedding, head=spec.LanguageHead(tied=False)).build()
    draws = noise(seed)

    def loss(step: int) -> Tensor:
        half = torch.randint(0, 16, (16, 12), generator=draws)
        x = torch.cat([half, half], 1)
        return F.cross_entropy(model(x[:, :-1])[:, 11:].flatten(0, 1), x[:, 12:].flatten())

    return sum(fit(model, loss, steps, 2e-3)[-10:]) / 10

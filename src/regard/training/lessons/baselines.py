"""Recurrent encoder-decoders with and without attention, compared with a Transformer."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ... import spec
from ...pattern import causal
from ...position import sinusoidal
from .lesson import Lesson, fit, seeded

VOCAB, START = 12, 1


def reversing(seed: int = 0, steps: int = 500, lengths: tuple[int, ...] = (4, 8, 16)) -> Lesson:
    """T8: reverse sequences of increasing length."""
    models: dict[str, Callable[[], nn.Module]] = {
        "fixed vector": lambda: spec.Recurrent(VOCAB, 64, attention="none").build(),
        "additive": lambda: spec.Recurrent(VOCAB, 64, attention="additive").build(),
        "multiplicative": lambda: spec.Recurrent(VOCAB, 64, attention="multiplicative").build(),
        "Transformer": _transformer,
    }
    measured: dict[str, dict[int, float]] = {}
    for name, make in models.items():
        measured[name] = {}
        for n in lengths:
            torch.manual_seed(seed)
            model = make()
            fit(model, lambda step, model=model, n=n: _loss(model, n, seeded(step)), steps, 4e-3)
            measured[name][n] = _accuracy(model, n, seeded(10**6))
    fixed, last = measured["fixed vector"], lengths[-1]
    return Lesson(
        "T8",
        "reversing: the fixed vector degrades first; attention and the Transformer stay accurate",
        {"accuracy by length": measured},
        fixed[last] < fixed[lengths[0]]
        and all(measured[k][last] > fixed[last] for k in measured if k != "fixed vector"),
    )


def _rows(n: int, generator: torch.Generator, b: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    source = torch.randint(2, VOCAB, (b, n), generator=generator)
    expected = source.flip(1)
    return source, torch.cat([torch.full((b, 1), START), expected[:, :-1]], 1), expected


def _loss(model: nn.Module, n: int, generator: torch.Generator) -> Tensor:
    source, target, expected = _rows(n, generator)
    return F.cross_entropy(model(source, target).flatten(0, 1), expected.flatten())


@torch.no_grad()
def _accuracy(model: nn.Module, n: int, generator: torch.Generator) -> float:
    source, target, expected = _rows(n, generator, b=256)
    return float((model(source, target).argmax(-1) == expected).float().mean())


def _transformer() -> nn.Module:
    attention, mlp = spec.Attention(64, heads=4), spec.FeedForward(128)
    past = spec.Attention(64, heads=4, pattern=causal())
    embedding = spec.Embedding(VOCAB, 64, position=sinusoidal())
    return spec.EncoderDecoder(
        spec.Encoder(spec.Block(attention, mlp, norm_at="pre"), 1, embedding=embedding),
        spec.Decoder(
            spec.Block(past, mlp, cross=attention, norm_at="pre"),
            1,
            embedding=embedding,
            head=spec.LanguageHead(tied=False),
        ),
    ).build()

"""Recurrent encoder-decoders, with and without attention, beside a Transformer."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ... import spec
from ...pattern import causal
from ...position import sinusoidal
from .lesson import Lesson, fit, noise

VOCAB, START = 12, 1


def reversing(seed: int = 0, steps: int = 500, lengths: tuple[int, ...] = (4, 8, 16)) -> Lesson:
    """T8: write the sequence backwards, of growing length."""
    made: dict[str, Callable[[], nn.Module]] = {
        "fixed vector": lambda: spec.Recurrent(VOCAB, 64, attention="none").build(),
        "additive": lambda: spec.Recurrent(VOCAB, 64, attention="additive").build(),
        "multiplicative": lambda: spec.Recurrent(VOCAB, 64, attention="multiplicative").build(),
        "Transformer": _transformer,
    }
    told: dict[str, dict[int, float]] = {}
    for name, make in made.items():
        told[name] = {}
        for n in lengths:
            torch.manual_seed(seed)
            model = make()
            fit(model, lambda step, model=model, n=n: _loss(model, n, noise(step)), steps, 4e-3)
            told[name][n] = _accuracy(model, n, noise(10**6))
    fixed, last = told["fixed vector"], lengths[-1]
    return Lesson(
        "T8",
        "reversing: the fixed vector degrades first, attention and the Transformer hold on",
        {"accuracy by length": told},
        fixed[last] < fixed[lengths[0]]
        and all(told[k][last] > fixed[last] for k in told if k != "fixed vector"),
    )


def _rows(n: int, draws: torch.Generator, b: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    source = torch.randint(2, VOCAB, (b, n), generator=draws)
    wanted = source.flip(1)
    return source, torch.cat([torch.full((b, 1), START), wanted[:, :-1]], 1), wanted


def _loss(model: nn.Module, n: int, draws: torch.Generator) -> Tensor:
    source, target, wanted = _rows(n, draws)
    return F.cross_entropy(model(source, target).flatten(0, 1), wanted.flatten())


@torch.no_grad()
def _accuracy(model: nn.Module, n: int, draws: torch.Generator) -> float:
    source, target, wanted = _rows(n, draws, b=256)
    return float((model(source, target).argmax(-1) == wanted).float().mean())


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

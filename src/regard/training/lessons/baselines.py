"""Recurrent encoder-decoders with and without attention, compared with a Transformer."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ... import spec
from ...lens.view import View, look
from ...pattern import causal
from ...position import sinusoidal
from ..report.maps import view_maps
from . import pictures
from .experiment import Experiment
from .lesson import Lesson, Picture, Suggestion, check, seeded

VOCAB, START = 12, 1
TIMED = (8, 16, 32, 64, 128)


def reversing(
    run: Experiment, *, seed: int = 0, steps: int = 500, lengths: tuple[int, ...] = (4, 8, 16)
) -> Lesson:
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
            run.fit(f"{name}, length {n}", model, _loss(run, n), steps, 4e-3, floor=0.0)
            measured[name][n] = _accuracy(model, n, seeded(seed + 10**6))
    first, last = lengths[0], lengths[-1]
    fixed = measured["fixed vector"]
    gained = {name: measured[name][last] - fixed[last] for name in models if name != "fixed vector"}
    seconds = {name: _seconds(run.models[f"{name}, length {last}"]) for name in models}
    transformer = run.models[f"Transformer, length {last}"]
    source, target, _ = _rows(last, seeded(seed + 1), b=1)
    names = [f"s{t}" for t in source[0].tolist()]
    view = look(
        transformer,
        {"source": source, "target": target},
        tokens={"source": [names], "target": [["start", *reversed(names[1:])]]},
    )
    cross = next(c.layer for c in view.calls if c.role == "cross")
    weights = torch.stack([view.map(cross, h) for h in range(view.calls[cross].heads)]).mean(0)
    return Lesson(
        "T8",
        "one vector of fixed size is a bottleneck: it fails first as sequences get longer; attention does not",
        "Four encoder-decoders learn to reverse a sequence, each anew at each length: a recurrent one whose "
        "decoder gets one vector, two whose decoder attends to all source states (additive and "
        "multiplicative scores), and a Transformer. The accuracy is that of each token on new sequences, "
        "with the correct tokens before it as input.",
        (
            check(
                f"fixed vector: accuracy lost from length {first} to {last}",
                fixed[first] - fixed[last],
                "above",
                0.1,
            ),
            *(
                check(
                    f"{name}: accuracy gained over the fixed vector, length {last}",
                    gained[name],
                    "above",
                    0.1,
                )
                for name in gained
            ),
        ),
        {"accuracy by length": measured, "seconds of a forward pass by length": seconds},
        _reversing_pictures(measured, seconds, weights, run, last, cross, view),
        (view_maps(f"Transformer, length {last}", view, role="cross"),),
        (
            Suggestion("Longer sequences widen the gap.", {"lengths": (8, 16, 24), "steps": 400}),
            Suggestion("Fewer steps: which model learns first?", {"steps": 150}),
        ),
    )


def _reversing_pictures(
    measured: Any, seconds: Any, weights: Any, run: Experiment, last: int, cross: Any, view: View
) -> tuple[Picture, ...]:
    return (
        pictures.lines(
            "Accuracy against length",
            "Reversing sequences of new random tokens; chance is 0.1.",
            measured,
            x="length",
            y="accuracy",
            levels={"chance": 0.1},
        ),
        pictures.tables(
            "Cross-attention of the Transformer",
            "Mean over its heads on one sequence: each output token attends to the mirrored source "
            "token, from the last to the first.",
            {f"length {last}": weights},
            x="source token",
            y="output token",
            names=(list(view.queries(cross)), list(view.keys(cross))),
        ),
        pictures.lines(
            "Time of a forward pass, measured",
            "32 sequences, on the CPU of this run: the recurrent models take n steps one after the other, the "
            "Transformer one.",
            seconds,
            x="length",
            y="seconds",
        ),
        pictures.losses(
            run.recorder, f"Length {last}.", [n for n in run.models if n.endswith(f"length {last}")]
        ),
    )


def _rows(n: int, generator: torch.Generator, b: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    source = torch.randint(2, VOCAB, (b, n), generator=generator)
    expected = source.flip(1)
    return source, torch.cat([torch.full((b, 1), START), expected[:, :-1]], 1), expected


def _loss(run: Experiment, n: int) -> Any:
    def loss(model: Any, generator: torch.Generator) -> Tensor:
        source, target, expected = (t.to(run.device) for t in _rows(n, generator))
        return F.cross_entropy(model(source, target).flatten(0, 1), expected.flatten())

    return loss


@torch.no_grad()
def _accuracy(model: nn.Module, n: int, generator: torch.Generator) -> float:
    source, target, expected = _rows(n, generator, b=256)
    return float((model(source, target).argmax(-1) == expected).float().mean())


@torch.no_grad()
def _seconds(model: nn.Module) -> dict[int, float]:
    """The shortest of five forward passes at each length."""
    shortest = {}
    for n in TIMED:
        source, target, _ = _rows(n, seeded(n))
        times = []
        for _ in range(5):
            began = time.perf_counter()
            model(source, target)
            times.append(time.perf_counter() - began)
        shortest[n] = min(times)
    return shortest


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

"""The scale 1/√d_k and the number of heads, at increasing width."""

from math import log
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import spec
from ...lens import figures
from ...lens.view import View, look
from ...pattern import causal
from ...position import learned
from . import pictures
from .experiment import Experiment
from .lesson import Lesson, Picture, Suggestion, check, seeded

VOCAB, HALF = 16, 12


def score_scaling(
    run: Experiment, *, seed: int = 0, steps: int = 120, sizes: tuple[int, ...] = (64, 512)
) -> Lesson:
    """T12: with and without the scale, one head and eight, after the same number of steps."""
    reached: dict[str, dict[int, float]] = {}
    largest: dict[str, dict[int, float]] = {}
    last = sizes[-1]
    for name, heads, scale in (
        ("one head, scaled", 1, None),
        ("one head, unscaled", 1, 1.0),
        ("eight heads, scaled", 8, None),
        ("eight heads, unscaled", 8, 1.0),
    ):
        reached[name], largest[name] = {}, {}
        for d_model in sizes:
            torch.manual_seed(seed)
            model = _model(d_model, heads, scale)
            largest[name][d_model] = _largest_weight(model, seed)
            curve = run.fit(f"{name}, width {d_model}", model, _loss(run), steps, 2e-3, floor=0.0)
            reached[name][d_model] = sum(curve[-10:]) / len(curve[-10:])
    eight = run.models[f"eight heads, scaled, width {last}"]
    view = look(eight, _texts(1, seeded(seed + 1))[:, :-1]).remove_heads()
    return Lesson(
        "T12",
        f"at width {last} attention without the scale 1/√d_k has a higher loss after the same number of steps",
        "Language models with one layer learn to recall: the second half of each text repeats the first. "
        "They differ in the scale of their scores (1/√d_k or 1), in the number of heads (one or eight of an "
        "eighth of the width) and in width. Without the scale the scores grow with √d_k, and the softmax is "
        "saturated before training begins.",
        (
            check(
                f"one head, width {last}: loss unscaled minus scaled",
                reached["one head, unscaled"][last] - reached["one head, scaled"][last],
                "above",
                0.1,
            ),
            check(
                f"one head, width {last}: mean largest weight at the start, unscaled minus scaled",
                largest["one head, unscaled"][last] - largest["one head, scaled"][last],
                "above",
                0.0,
                because="the softmax is saturated",
            ),
            check(
                f"one head, width {last}: loss scaled",
                reached["one head, scaled"][last],
                "below",
                log(VOCAB),
                because="a model that has learned nothing guesses one of the tokens",
            ),
        ),
        {"loss by width": reached, "mean largest weight at the start": largest},
        _score_scaling_pictures(reached, largest, run, last, sizes, view, seed),
        (),
        (
            Suggestion("More widths.", {"sizes": (64, 128, 256)}),
            Suggestion("Longer: the unscaled models catch up, or not.", {"steps": 300}),
        ),
    )


def _score_scaling_pictures(
    reached: Any, largest: Any, run: Experiment, last: int, sizes: tuple[int, ...], view: View, seed: int
) -> tuple[Picture, ...]:
    return (
        pictures.losses(
            run.recorder,
            f"Width {last}: the same steps, the same texts.",
            [n for n in run.models if str(last) in n],
        ),
        pictures.lines(
            "Loss after the same number of steps",
            "Mean of the last ten losses.",
            reached,
            x="width",
            y="loss",
        ),
        pictures.lines(
            "Saturation before training",
            "The largest weight of a query, mean over all queries with at least 12 keys, in the models "
            "of this run.",
            largest,
            x="width",
            y="largest weight",
        ),
        Picture(
            "Saturation of softmax against width",
            "Random queries and keys at the widths of this run, 64 keys: the largest weight, and the "
            "squared norm of softmax's Jacobian.",
            lambda dark: figures.saturation(sizes, samples=500, seed=seed, dark=dark),
        ),
        Picture(
            f"The eight heads at width {last}",
            "Their maps and kinds, how similar they are, and what removing each changes.",
            lambda dark: figures.head_gallery(view, dark=dark),
        ),
    )


def _model(d_model: int, heads: int, scale: float | None) -> Any:
    attention = spec.Attention(d_model, heads=heads, pattern=causal(), scale=scale)
    block = spec.Block(attention, spec.FeedForward(d_model), norm_at="pre")
    embedding = spec.Embedding(VOCAB, d_model, position=learned(2 * HALF))
    return spec.Encoder(block, 1, embedding=embedding, head=spec.LanguageHead(tied=False)).build()


def _texts(b: int, generator: torch.Generator) -> Tensor:
    half = torch.randint(0, VOCAB, (b, HALF), generator=generator)
    return torch.cat([half, half], 1)


def _loss(run: Experiment) -> Any:
    """The task is to recall the token that followed the same token before."""

    def loss(model: Any, generator: torch.Generator) -> Tensor:
        x = _texts(16, generator).to(run.device)
        return F.cross_entropy(model(x[:, :-1])[:, HALF - 1 :].flatten(0, 1), x[:, HALF:].flatten())

    return loss


@torch.no_grad()
def _largest_weight(model: Any, seed: int) -> float:
    _, weights = model.eval()(_texts(16, seeded(seed + 1))[:, :-1], return_weights=True)
    return float(weights[0]["self"][:, :, HALF - 1 :].amax(-1).mean())

"""Images: heads with a learned offset, and a vision Transformer that learns a second task."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from ... import spec
from ...convolution import Spread, spread
from ...lens import figures
from ...lens.figures import style
from ...lens.recorder import Recorder
from ...lens.view import look
from ...nn.convolutional import image_classifier
from ...pattern import window
from ...position import quadratic
from ..data.datasets import Digits
from ..data.image_augmentation import random_affine
from . import pictures
from .experiment import Experiment
from .lesson import Check, Lesson, Picture, Suggestion, check

GRID, WIDTH = (4, 4), 32
LEFT_MARK, RIGHT_MARK = 4, 7  # the patches of the two equal marks


class Images(NamedTuple):
    """Digits of 8 × 8, and their classes."""

    pixels: Float[Tensor, "rows 1 8 8"]
    labels: Int[Tensor, " rows"]


def learned_offsets(run: Experiment, *, seed: int = 0, steps: int = 160, marks: int = 4) -> Lesson:
    """T4: heads that score keys by a learned offset, observed while a classifier of digits trains."""
    train, test = _digits()
    accuracy: dict[str, float] = {}
    near: dict[str, float] = {}
    recorded: dict[str, dict[int, list[Spread]]] = {}
    recorders = {name: Recorder() for name in ("everywhere", "local window")}
    views = {}
    for name, reach in (("everywhere", None), ("local window", 1)):
        torch.manual_seed(seed)
        model = Relative(reach)
        recorded[name] = {}

        def observe(step: int, model: Any = model, name: str = name) -> None:
            if step == 1 or step % max(steps // marks, 1) == 0:
                images = test.pixels[:4].to(run.device)
                recorded[name][step] = model.heads(images)
                recorders[name].view(step, look(model, images, grid=GRID))

        run.fit(
            name, model, _classes(run, train, None), steps, 5e-3, on_step=None if run.estimate else observe
        )
        accuracy[name], near[name] = _accuracy(model, test), model.near_integer()
        views[name] = look(model, test.pixels[:8], grid=GRID)
    spreads = [s for layers in recorded.values() for heads in layers.values() for s in heads]
    finite = bool(spreads) and all(
        bool(s.center.isfinite().all() & s.spread.isfinite().all()) for s in spreads
    )
    local_view = views["local window"]
    grids = [s.grid for s in local_view.statistics]
    by_offset = torch.cat([g.by_offset for g in grids if g is not None])
    shifts = torch.cat([g.shift for g in grids if g is not None]).float()
    names = [f"layer {1 + i // 9}, head {i % 9}" for i in range(len(shifts))]
    return Lesson(
        "T4",
        "heads whose scores depend on a learned offset classify images, and many converge to a shift by "
        "whole pixels, as in a convolution",
        "Two classifiers of handwritten digits (8 × 8 pixels, patches of 2 × 2) with two layers of nine "
        "heads. Each head scores keys by their distance from a learned offset, and by content. One model "
        "attends everywhere, the other to the neighboring patches only. Center and spread of every head are "
        "recorded while they train.",
        (
            check("accuracy on test digits, everywhere", accuracy["everywhere"], "above", 0.8),
            check("accuracy on test digits, local window", accuracy["local window"], "above", 0.8),
            Check(
                "centers and spreads of all heads", "recorded" if finite else "missing", "recorded", finite
            ),
        ),
        {
            "share of heads within 0.5 of a whole shift": near,
            "center and spread of head 0, layer 0": {
                name: {step: _described(layers[0]) for step, layers in by_step.items()}
                for name, by_step in recorded.items()
            },
        },
        _learned_offsets_pictures(run, by_offset, shifts, names, recorders),
        (),
        (
            Suggestion("Train longer, and record the heads more often.", {"steps": 400, "marks": 8}),
            Suggestion("Other random offsets at the start.", {"seed": 1}),
        ),
    )


def _learned_offsets_pictures(
    run: Experiment, by_offset: Any, shifts: Any, names: Any, recorders: Any
) -> tuple[Picture, ...]:
    return (
        Picture(
            "Heads as taps of a convolution",
            "Local window, after training: the mean weight of each head by offset; a ring marks its "
            "nearest shift.",
            lambda dark: figures.convolution_map(by_offset, shifts, names, dark=dark),
        ),
        Picture(
            "Heads over training, everywhere",
            "Entropy, distance and center of each head; a small dot is the first step, a large one the last.",
            lambda dark: figures.head_evolution(recorders["everywhere"], dark=dark),
        ),
        Picture(
            "Heads over training, local window",
            "The same, where only neighboring patches can be attended to.",
            lambda dark: figures.head_evolution(recorders["local window"], dark=dark),
        ),
        Picture(
            "What reaches a patch through local windows",
            "Along one side of the grid: each layer reaches one patch further; everywhere, one layer "
            "reaches all.",
            lambda dark: figures.receptive_field(window(1), GRID[0], 2, at=0, dark=dark),
        ),
        pictures.losses(run.recorder, "The local model has fewer pairs to learn from, and is not worse."),
    )


def _described(s: Spread) -> str:
    (dy, dx), width = s.center[0].tolist(), float(s.spread[0])
    return f"({dy:+.2f}, {dx:+.2f}) ± {width:.2f}"


class Relative(nn.Module):
    """Patches of 2 × 2 → attention whose heads score a learned offset (and content) → max pooling → classes."""

    def __init__(self, reach: int | None):
        super().__init__()
        attention = spec.Attention(WIDTH, heads=9, d_k=8, d_v=8, position=quadratic(grid=GRID))
        block = spec.Block(attention, spec.FeedForward(2 * WIDTH, activation="gelu"), norm_at="pre")
        self.patches = nn.Linear(4, WIDTH)
        self.encoder: Any = spec.Encoder(block, 2, head=spec.ClassifierHead(10, pool="max")).build()
        self.allowed = None if reach is None else local(reach)

    def forward(self, images: Tensor, return_weights: bool = False):
        x = self.patches(rearrange(images, "b 1 (h p) (w q) -> b (h w) (p q)", p=2, q=2))
        allowed = None if self.allowed is None else self.allowed.to(x.device)
        return self.encoder(x, pattern=allowed, return_weights=return_weights)

    @torch.no_grad()
    def heads(self, images: Tensor) -> list[Spread]:
        """Center, spread and entropy of the attention of each layer's heads, relative to the query."""
        return [spread(layer["self"].cpu(), GRID) for layer in self(images, return_weights=True)[1]]

    @torch.no_grad()
    def near_integer(self) -> float:
        """The share of heads whose offset is within 0.5 of an integer offset."""
        centers = torch.cat([block.attention.position.center for block in self.encoder.blocks])
        return float(((centers - centers.round()).norm(dim=-1) <= 0.5).float().mean())


def local(reach: int) -> Tensor:
    """The pairs of patches at most `reach` rows and `reach` columns apart."""
    near = (torch.arange(GRID[0])[:, None] - torch.arange(GRID[1])).abs() <= reach
    return rearrange(near[:, None, :, None] & near[None, :, None, :], "a b c d -> (a b) (c d)")


def vision_transformer(run: Experiment, *, seed: int = 0, steps: int = 700) -> Lesson:
    """T6: a vision Transformer beats a linear classifier of the pixels; a new head then learns odd or even."""
    train, test = _digits()
    torch.manual_seed(seed)
    linear = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    run.fit("linear classifier of the pixels", linear, _classes(run, train, None), min(steps, 400), 1e-2)
    torch.manual_seed(seed)
    convolutional = image_classifier((8, 8), 10)
    run.fit(
        "convolutional network", convolutional, _classes(run, train, random_affine()), steps // 2 or 1, 4e-3
    )
    torch.manual_seed(seed)
    model = _vision(spec.ClassifierHead(10, pool="first", hidden=2 * WIDTH))
    before = model.position.table.detach().clone()
    run.fit("vision Transformer", model, _classes(run, train, random_affine()), steps, 1e-3)
    trained = model.position.table.detach().clone()
    twin, twin_row = _twin(model)
    accuracy = {
        "linear": _accuracy(linear, test),
        "convolutional": _accuracy(convolutional, test),
        "vision Transformer": _accuracy(model, test),
    }
    odd = [Images(rows.pixels, rows.labels % 2) for rows in (train, test)]
    tuned = _with_new_head(model, classes=2)
    at_first = _accuracy(tuned, odd[1])
    run.fit("fine-tuned: odd or even", tuned, _classes(run, odd[0], None), steps // 4 or 1, 5e-4)
    shape = tuple(tuned.head.w_out.weight.T.shape)
    fine_tuned = _accuracy(tuned, odd[1])
    cosines = {"before training": before, "after training": trained}
    return Lesson(
        "T6",
        "a vision Transformer beats a linear classifier of the pixels, and a new linear head on it learns "
        "another task",
        "Handwritten digits of 8 × 8 pixels are cut into 16 patches; with a class token they are a sequence "
        "of 17 tokens for a Transformer encoder. Beside it, a linear classifier of the pixels and a small "
        "convolutional network. Then the classifier head is replaced by a linear one that starts at zero, "
        "and the model learns whether a digit is odd.",
        (
            check(
                "accuracy of the vision Transformer minus the linear classifier's",
                accuracy["vision Transformer"] - accuracy["linear"],
                "above",
                0.0,
            ),
            check("shape of the new head, D × K", str(shape), "exactly", str((2 * WIDTH, 2))),
            check("odd or even after fine-tuning", fine_tuned, "above", max(at_first, 0.95)),
        ),
        {
            "accuracy": accuracy,
            "odd or even before fine-tuning": at_first,
            "cosine of position vectors, near minus far": {k: _locality(v) for k, v in cosines.items()},
            "weight to the twin over a blank patch": twin,
        },
        _vision_transformer_pictures(accuracy, fine_tuned, run, twin_row, cosines),
        (),
        (
            Suggestion("Half of the steps: does it still beat the linear classifier?", {"steps": 350}),
            Suggestion("Other random weights.", {"seed": 1}),
        ),
    )


def _vision_transformer_pictures(
    accuracy: Any, fine_tuned: Any, run: Experiment, twin_row: Any, cosines: Any
) -> tuple[Picture, ...]:
    return (
        pictures.bars(
            "Accuracy on test digits",
            "The same digits for all; the two networks are trained on randomly shifted and rotated ones.",
            {**accuracy, "odd or even,\nnew head": fine_tuned},
            y="accuracy",
        ),
        *(
            Picture(
                f"Positions {name}",
                "Each small map: the cosine of one patch's position vector with all others. Nothing "
                "built in makes neighbors similar; what similarity there is was learned.",
                lambda dark, table=table: figures.patch_positions(table, GRID, skip=1, dark=dark),
            )
            for name, table in cosines.items()
        ),
        Picture(
            "From one mark to its twin",
            "Two equal marks in a blank image; the attention of the left one over the patches, last "
            "layer, mean over heads.",
            lambda dark: _twin_figure(twin_row, dark),
        ),
        pictures.losses(run.recorder, "Three models from scratch, and the fine-tuned one."),
    )


def _vision(head: spec.ClassifierHead) -> Any:
    mlp = spec.FeedForward(4 * WIDTH, activation="gelu")
    block = spec.Block(spec.Attention(2 * WIDTH, heads=4), mlp, norm_at="pre")
    return spec.Vision(spec.Encoder(block, 3), image=(8, 8), patch=(2, 2), channels=1, head=head).build()


def _with_new_head(model: Any, classes: int) -> Any:
    """The same model with a linear head on the class token, initialized to zero."""
    tuned: Any = replace(model.spec, head=spec.ClassifierHead(classes, pool="first")).build()
    kept = {name: t for name, t in model.state_dict().items() if not name.startswith("head.")}
    missing, unexpected = tuned.load_state_dict(kept, strict=False)
    assert not unexpected and all(name.startswith("head.") for name in missing)
    nn.init.zeros_(tuned.head.w_out.weight)
    nn.init.zeros_(tuned.head.w_out.bias)
    return tuned.eval()


def _locality(table: Float[Tensor, "tokens d"]) -> float:
    """The mean cosine of the position vectors of adjacent patches, minus that of the others."""
    vectors = F.normalize(table[1:], dim=-1)
    cosine, near = vectors @ vectors.T, local(1) & ~torch.eye(16, dtype=torch.bool)
    far = ~near & ~torch.eye(16, dtype=torch.bool)
    return float(cosine[near].mean() - cosine[far].mean())


@torch.no_grad()
def _twin(model: Any) -> tuple[float, Float[Tensor, " patches"]]:
    """Two equal marks in a blank image: the weight from one to the other, over that to a blank patch; last layer.

    Also all weights of the left mark's row, over the patches.
    """
    _, weights = model(_two_marks(), return_weights=True)
    row = weights[-1]["self"][0, :, 1 + LEFT_MARK].mean(0)[1:]
    blank = torch.ones(16, dtype=torch.bool)
    blank[[LEFT_MARK, RIGHT_MARK]] = False
    return float(row[RIGHT_MARK] / row[blank].mean()), row


def _two_marks() -> Float[Tensor, "1 1 8 8"]:
    image = torch.full((1, 1, 8, 8), -1.0)
    image[..., 2:4, 0:2] = image[..., 2:4, 6:8] = torch.tensor([[1.0, -1.0], [1.0, 1.0]])
    return image


def _twin_figure(row: Float[Tensor, " patches"], dark: bool) -> Any:
    figure = style.canvas(6.5, 3.2, dark)
    cells = style.grid(figure, 1, 2)
    left = style.axes(figure, cells[0], dark=dark, title="the image")
    left.imshow(_two_marks()[0, 0].numpy(), cmap="gray")
    right = style.axes(figure, cells[1], dark=dark, title="weight by patch")
    style.scale(figure, style.heat(right, row.reshape(GRID), dark), right, "weight", dark)
    for ax in (left, right):
        ax.set_xticks([])
        ax.set_yticks([])
        ax.set_aspect("equal")
    return figure


def _digits() -> tuple[Images, Images]:
    data = Digits().load(Path())
    return Images(data.train.inputs, data.train.labels), Images(data.test.inputs, data.test.labels)


def _classes(run: Experiment, rows: Images, augmentation: random_affine | None) -> Any:
    def loss(model: Any, generator: torch.Generator) -> Tensor:
        batch = torch.randint(0, len(rows.labels), (64,), generator=generator)
        images = rows.pixels[batch] if augmentation is None else augmentation(rows.pixels[batch])
        return F.cross_entropy(model(images.to(run.device)), rows.labels[batch].to(run.device))

    return loss


@torch.no_grad()
def _accuracy(model: nn.Module, rows: Images) -> float:
    model.eval()
    return float((model(rows.pixels).argmax(-1) == rows.labels).float().mean())

"""Images: heads with a learned offset, and a vision Transformer that learns a second task."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from ... import spec
from ...convolution import Spread, spread
from ...position import quadratic
from ..data.datasets import Digits
from ..data.image_augmentation import random_affine
from .lesson import Lesson, fit, seeded

GRID, WIDTH = (4, 4), 32


class Images(NamedTuple):
    """Digits of 8 × 8, and their classes."""

    pixels: Float[Tensor, "rows 1 8 8"]
    labels: Int[Tensor, " rows"]


def learned_offsets(seed: int = 0, steps: int = 160, marks: int = 4) -> Lesson:
    """T4: heads that score keys by a learned offset, observed while a classifier of digits trains."""
    train, test = _digits()
    measured: dict[str, Any] = {
        "accuracy": {},
        "heads near an integer offset": {},
        "center and spread, head 0": {},
    }
    complete = True
    for name, reach in (("everywhere", None), ("local window", 1)):
        torch.manual_seed(seed)
        model = Relative(reach)
        kept: dict[int, list[Spread]] = {}
        generator = seeded(seed)

        def loss(step: int, model=model, kept=kept, generator=generator) -> Tensor:
            if step == 1 or step % (steps // marks) == 0:
                kept[step] = model.heads(test.pixels[:32])
            rows = torch.randint(0, len(train.labels), (64,), generator=generator)
            return F.cross_entropy(model(train.pixels[rows]), train.labels[rows])

        fit(model, loss, steps, 5e-3)
        measured["accuracy"][name] = _accuracy(model, test)
        measured["heads near an integer offset"][name] = model.near_integer()
        measured["center and spread, head 0"][name] = {
            step: "({:+.2f}, {:+.2f}) {:.2f}".format(
                *layers[0].center[0].tolist(), float(layers[0].spread[0])
            )
            for step, layers in kept.items()
        }
        spreads = [s for layers in kept.values() for s in layers]
        complete = complete and len(kept) == marks + 1 and len(spreads) == 2 * len(kept)
        complete = complete and all(
            bool(torch.isfinite(s.center).all() & torch.isfinite(s.spread).all()) for s in spreads
        )
    return Lesson(
        "T4",
        "heads with a learned offset classify digits, everywhere or in a local window; center and spread are stored",
        measured,
        complete and min(measured["accuracy"].values()) > 0.8,
    )


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
        return self.encoder(x, pattern=self.allowed, return_weights=return_weights)

    @torch.no_grad()
    def heads(self, images: Tensor) -> list[Spread]:
        """Center, spread and entropy of the attention of each layer's heads, relative to the query."""
        return [spread(layer["self"], GRID) for layer in self(images, return_weights=True)[1]]

    @torch.no_grad()
    def near_integer(self) -> float:
        """The share of heads whose offset is within 0.5 of an integer offset."""
        centers = torch.cat([block.attention.position.center for block in self.encoder.blocks])
        return float(((centers - centers.round()).norm(dim=-1) <= 0.5).float().mean())


def local(reach: int) -> Tensor:
    """The pairs of patches at most `reach` rows and `reach` columns apart."""
    near = (torch.arange(GRID[0])[:, None] - torch.arange(GRID[1])).abs() <= reach
    return rearrange(near[:, None, :, None] & near[None, :, None, :], "a b c d -> (a b) (c d)")


def vision_transformer(seed: int = 0, steps: int = 700) -> Lesson:
    """T6: a vision Transformer beats a linear classifier of the pixels; a new head then learns odd or even."""
    train, test = _digits()
    torch.manual_seed(seed)
    linear = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    fit(linear, _classes(linear, train, seed, None), 400, 1e-2)
    block = spec.Block(
        spec.Attention(2 * WIDTH, heads=4), spec.FeedForward(4 * WIDTH, activation="gelu"), norm_at="pre"
    )
    model: Any = spec.Vision(
        spec.Encoder(block, 3),
        image=(8, 8),
        patch=(2, 2),
        channels=1,
        head=spec.ClassifierHead(10, pool="first", hidden=2 * WIDTH),
    ).build()
    before = _locality(model)
    fit(model, _classes(model, train, seed, random_affine()), steps, 2e-3)
    accuracy = {"linear": _accuracy(linear, test), "vision Transformer": _accuracy(model, test)}
    measured = {"near minus far, position vectors": {"initialized": before, "trained": _locality(model)}}
    twin = _twin(model)
    odd = [Images(rows.pixels, rows.labels % 2) for rows in (train, test)]
    model.head = _new_head(2 * WIDTH, 2)
    at_first = _accuracy(model, odd[1])
    fit(model, _classes(model, odd[0], seed, None), steps // 4, 5e-4)
    shape = tuple(model.head.w_out.weight.T.shape)
    accuracy["odd or even, new head"] = _accuracy(model, odd[1])
    return Lesson(
        "T6",
        "a vision Transformer beats a linear classifier of the pixels; a new linear head, D × K, learns another task",
        {
            "accuracy": accuracy,
            "before fine-tuning": at_first,
            "fine-tuned head": shape,
            **measured,
            "weight to the twin over a blank patch": twin,
        },
        accuracy["vision Transformer"] > accuracy["linear"]
        and shape == (2 * WIDTH, 2)
        and accuracy["odd or even, new head"] > max(at_first, 0.95),
    )


def _new_head(d_model: int, classes: int) -> nn.Module:
    """A linear head on the class token, initialized to zero."""
    from ...nn.embedding import ClassifierHead

    head = ClassifierHead(spec.ClassifierHead(classes, pool="first"), d_model)
    nn.init.zeros_(head.w_out.weight)
    nn.init.zeros_(head.w_out.bias)
    return head


@torch.no_grad()
def _locality(model: Any) -> float:
    """The mean cosine of the position vectors of adjacent patches, minus that of the others."""
    vectors = F.normalize(model.position.table[1:].detach(), dim=-1)
    cosine, near = vectors @ vectors.T, local(1) & ~torch.eye(16, dtype=torch.bool)
    far = ~near & ~torch.eye(16, dtype=torch.bool)
    return float(cosine[near].mean() - cosine[far].mean())


@torch.no_grad()
def _twin(model: Any) -> float:
    """Two equal marks in a blank image: the weight from one to the other, over that to a blank patch; last layer."""
    image = torch.full((1, 1, 8, 8), -1.0)
    image[..., 2:4, 0:2] = image[..., 2:4, 6:8] = torch.tensor([[1.0, -1.0], [1.0, 1.0]])
    _, weights = model(image, return_weights=True)
    row = weights[-1]["self"][0, :, 1 + 4].mean(0)[1:]  # from the left mark, the second row's first patch
    blank = torch.ones(16, dtype=torch.bool)
    blank[[4, 7]] = False
    return float(row[7] / row[blank].mean())


def _digits() -> tuple[Images, Images]:
    data = Digits().load(Path())
    return Images(data.train.inputs, data.train.labels), Images(data.test.inputs, data.test.labels)


def _classes(model: nn.Module, rows: Images, seed: int, augmentation: random_affine | None):
    generator = seeded(seed)

    def loss(step: int) -> Tensor:
        batch = torch.randint(0, len(rows.labels), (64,), generator=generator)
        images = rows.pixels[batch] if augmentation is None else augmentation(rows.pixels[batch])
        return F.cross_entropy(model(images), rows.labels[batch])

    return loss


@torch.no_grad()
def _accuracy(model: nn.Module, rows: Images) -> float:
    model.eval()
    return float((model(rows.pixels).argmax(-1) == rows.labels).float().mean())

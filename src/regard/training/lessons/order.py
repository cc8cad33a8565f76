"""Order: what attention without positions cannot tell, and what it need not."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import spec
from ...errors import ShapeError
from ...pattern import causal
from ...position import Position, alibi, learned, sinusoidal
from .lesson import Lesson, fit, noise

CAT, CHASED, DOG = 0, 1, 2


def chased(seed: int = 0, steps: int = 120) -> Lesson:
    """T5: who chased whom."""
    sentences = torch.tensor([[CAT, CHASED, DOG], [DOG, CHASED, CAT]])
    labels = torch.tensor([0, 1])
    told = {}
    for name, position in (("without positions", None), ("with positions", learned(3))):
        torch.manual_seed(seed)
        model = _sorter(3, 2, position)
        fit(model, lambda step, model=model: F.cross_entropy(model(sentences), labels), steps, 1e-2)
        with torch.no_grad():
            logits = model(sentences)
        right = float((logits.argmax(-1) == labels).float().mean())
        told[name] = {"accuracy": right, "apart": float((logits[0] - logits[1]).abs().max())}
    plain, placed = told["without positions"], told["with positions"]
    return Lesson(
        "T5",
        "without positions both orders get equal logits; with positions they are told apart",
        told,
        plain["apart"] < 1e-5 and plain["accuracy"] == 0.5 and placed["accuracy"] == 1.0,
    )


def bag(seed: int = 0, steps: int = 250) -> Lesson:
    """T11: a task on sets needs no positions."""
    torch.manual_seed(seed)
    draws, vocab, n = noise(seed), 6, 9
    model = _sorter(vocab, vocab, None)

    def rows(b: int) -> tuple[Tensor, Tensor]:
        """Which token comes most often? Rows with a tie are drawn again."""
        x = torch.randint(0, vocab, (4 * b, n), generator=draws)
        counts = F.one_hot(x, vocab).sum(1)
        two = counts.topk(2, -1).values
        clear = (two[:, 0] > two[:, 1]).nonzero()[:b, 0]
        return x[clear], counts[clear].argmax(-1)

    def loss(step: int) -> Tensor:
        x, y = rows(64)
        return F.cross_entropy(model(x), y)

    fit(model, loss, steps, 5e-3)
    x, y = rows(1000)
    mixed = x.gather(1, torch.rand(x.shape, generator=draws).argsort(-1))
    with torch.no_grad():
        moved = float((model(x) - model(mixed)).abs().max())
        right = float((model(x).argmax(-1) == y).float().mean())
    return Lesson(
        "T11",
        "a set task is solved without positions, and the answer does not depend on the order",
        {"accuracy": right, "logits moved by reordering": moved},
        right > 0.97 and moved < 1e-5,
    )


def beyond(seed: int = 0, steps: int = 400, trained: int = 16) -> Lesson:
    """T10: longer than in training: tables refuse or stretch, formulas go on; how well is measured."""
    kinds: dict[str, tuple[Position | None, Position | None]] = {
        "learned": (learned(trained), None),
        "learned, resampled": (learned(trained, beyond="resample"), None),
        "sinusoidal": (sinusoidal(), None),
        "alibi": (None, alibi()),
    }
    lengths = (trained, 2 * trained, 4 * trained)
    told: dict[str, dict[int, float | str]] = {}
    for name, (added, inside) in kinds.items():
        torch.manual_seed(seed)
        attention = spec.Attention(32, heads=4, pattern=causal(), position=inside)
        block = spec.Block(attention, spec.FeedForward(64), norm_at="pre")
        embedding = spec.Embedding(8, 32, position=added)
        model = spec.Encoder(block, 2, embedding=embedding, head=spec.LanguageHead(tied=False)).build()
        fit(model, lambda step, model=model: _copied(model, trained, noise(step)), steps, 3e-3)
        told[name] = {}
        for n in lengths:
            try:
                with torch.no_grad():
                    told[name][n] = float(_copied(model, n, noise(-n)))
            except ShapeError:
                told[name][n] = "refused"
    return Lesson(
        "T10",
        "past its length a learned table refuses, or is resampled; sinusoids and distances are defined there",
        {"loss by length": told},
        told["learned"][lengths[1]] == "refused"
        and all(isinstance(told[k][lengths[2]], float) for k in ("learned, resampled", "sinusoidal", "alibi"))
        and all(isinstance(v[trained], float) for v in told.values()),
    )


def _copied(model, n: int, draws: torch.Generator) -> Tensor:
    """The loss on a text whose second half repeats its first: what came n/2 ago comes again."""
    half = torch.randint(0, 8, (32, n // 2 + 1), generator=draws)
    x = torch.cat([half[:, :-1], half], 1)
    return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())


def _sorter(vocab: int, classes: int, position: Position | None):
    block = spec.Block(spec.Attention(32, heads=4), spec.FeedForward(64), norm_at="pre")
    embedding = spec.Embedding(vocab, 32, position=position)
    return spec.Encoder(block, 2, embedding=embedding, head=spec.ClassifierHead(classes)).build()

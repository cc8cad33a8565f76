"""Order: what attention cannot distinguish without positions, and when it does not need to."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import spec
from ...errors import ShapeError
from ...pattern import causal
from ...position import Position, alibi, learned, sinusoidal
from .lesson import Lesson, fit, seeded

CAT, CHASED, DOG = 0, 1, 2


def word_order(seed: int = 0, steps: int = 120) -> Lesson:
    """T5: who chased whom needs positions."""
    sentences = torch.tensor([[CAT, CHASED, DOG], [DOG, CHASED, CAT]])
    labels = torch.tensor([0, 1])
    measured = {}
    for name, position in (("without positions", None), ("with positions", learned(3))):
        torch.manual_seed(seed)
        model = _classifier(3, 2, position)
        fit(model, lambda step, model=model: F.cross_entropy(model(sentences), labels), steps, 1e-2)
        with torch.no_grad():
            logits = model(sentences)
        accuracy = float((logits.argmax(-1) == labels).float().mean())
        measured[name] = {"accuracy": accuracy, "difference": float((logits[0] - logits[1]).abs().max())}
    without, with_ = measured["without positions"], measured["with positions"]
    return Lesson(
        "T5",
        "without positions both orders get equal logits; with positions they are distinguished",
        measured,
        without["difference"] < 1e-5 and without["accuracy"] == 0.5 and with_["accuracy"] == 1.0,
    )


def bag_of_tokens(seed: int = 0, steps: int = 250) -> Lesson:
    """T11: a task on sets needs no positions."""
    torch.manual_seed(seed)
    generator, vocab, n = seeded(seed), 6, 9
    model = _classifier(vocab, vocab, None)

    def rows(b: int) -> tuple[Tensor, Tensor]:
        """Which token is the most frequent? Rows with a tie are discarded."""
        x = torch.randint(0, vocab, (4 * b, n), generator=generator)
        counts = F.one_hot(x, vocab).sum(1)
        two = counts.topk(2, -1).values
        clear = (two[:, 0] > two[:, 1]).nonzero()[:b, 0]
        return x[clear], counts[clear].argmax(-1)

    def loss(step: int) -> Tensor:
        x, y = rows(64)
        return F.cross_entropy(model(x), y)

    fit(model, loss, steps, 5e-3)
    x, y = rows(1000)
    mixed = x.gather(1, torch.rand(x.shape, generator=generator).argsort(-1))
    with torch.no_grad():
        change = float((model(x) - model(mixed)).abs().max())
        accuracy = float((model(x).argmax(-1) == y).float().mean())
    return Lesson(
        "T11",
        "a set task is solved without positions, and the answer does not depend on the order",
        {"accuracy": accuracy, "change of the logits by reordering": change},
        accuracy > 0.97 and change < 1e-5,
    )


def extrapolation(seed: int = 0, steps: int = 400, trained: int = 16) -> Lesson:
    """T10: sequences longer than in training: learned tables refuse or are resampled, formulas extend."""
    kinds: dict[str, tuple[Position | None, Position | None]] = {
        "learned": (learned(trained), None),
        "learned, resampled": (learned(trained, beyond="resample"), None),
        "sinusoidal": (sinusoidal(), None),
        "alibi": (None, alibi()),
    }
    lengths = (trained, 2 * trained, 4 * trained)
    measured: dict[str, dict[int, float | str]] = {}
    for name, (added, inside) in kinds.items():
        torch.manual_seed(seed)
        attention = spec.Attention(32, heads=4, pattern=causal(), position=inside)
        block = spec.Block(attention, spec.FeedForward(64), norm_at="pre")
        embedding = spec.Embedding(8, 32, position=added)
        model = spec.Encoder(block, 2, embedding=embedding, head=spec.LanguageHead(tied=False)).build()
        fit(model, lambda step, model=model: _copied(model, trained, seeded(step)), steps, 3e-3)
        measured[name] = {}
        for n in lengths:
            try:
                with torch.no_grad():
                    measured[name][n] = float(_copied(model, n, seeded(-n)))
            except ShapeError:
                measured[name][n] = "refused"
    return Lesson(
        "T10",
        "past its length a learned table refuses, or is resampled; sinusoids and distances remain defined",
        {"loss by length": measured},
        measured["learned"][lengths[1]] == "refused"
        and all(
            isinstance(measured[k][lengths[2]], float) for k in ("learned, resampled", "sinusoidal", "alibi")
        )
        and all(isinstance(v[trained], float) for v in measured.values()),
    )


def _copied(model, n: int, generator: torch.Generator) -> Tensor:
    """The loss on texts whose second half repeats the first."""
    half = torch.randint(0, 8, (32, n // 2 + 1), generator=generator)
    x = torch.cat([half[:, :-1], half], 1)
    return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())


def _classifier(vocab: int, classes: int, position: Position | None):
    block = spec.Block(spec.Attention(32, heads=4), spec.FeedForward(64), norm_at="pre")
    embedding = spec.Embedding(vocab, 32, position=position)
    return spec.Encoder(block, 2, embedding=embedding, head=spec.ClassifierHead(classes)).build()

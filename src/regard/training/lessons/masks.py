"""Masks: padding, causality, and what happens when a model can read the future."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import spec
from ...pattern import causal, full
from ...position import learned, sinusoidal
from .lesson import Lesson, fit, seeded


def padding(seed: int = 0, steps: int = 150) -> Lesson:
    """T1: with a key padding mask a classifier does not depend on padding."""
    torch.manual_seed(seed)
    vocab, classes, generator = 12, 2, seeded(seed)
    block = spec.Block(spec.Attention(32, heads=4), spec.FeedForward(64), norm_at="pre")
    embedding = spec.Embedding(vocab, 32, position=sinusoidal())
    model = spec.Encoder(block, 1, embedding=embedding, head=spec.ClassifierHead(classes)).build()

    def rows(b: int) -> tuple[Tensor, Tensor, Tensor]:
        """Is token 3 in the sentence? Padding is full of threes."""
        lengths = torch.randint(3, 13, (b,), generator=generator)
        x = torch.randint(4, vocab, (b, 12), generator=generator)
        labels = torch.randint(0, 2, (b,), generator=generator)
        index = (torch.rand(b, generator=generator) * lengths).long()
        x[torch.arange(b), index] = torch.where(labels == 1, 3, x[torch.arange(b), index])
        x.masked_fill_(torch.arange(12) >= lengths[:, None], 3)
        return x, lengths, labels

    def loss(step: int) -> Tensor:
        x, lengths, labels = rows(64)
        return F.cross_entropy(model(x, lengths=lengths), labels)

    fit(model, loss, steps, 3e-3)
    x, lengths, labels = rows(1000)
    with torch.no_grad():
        scores = model(x, lengths=lengths)
        other = x.masked_fill(torch.arange(12) >= lengths[:, None], 7)
        change = float((model(other, lengths=lengths) - scores).abs().max())
    accuracy = float((scores.argmax(-1) == labels).float().mean())
    return Lesson(
        "T1",
        "with a key padding mask the logits do not depend on padding, and the task is learned",
        {"accuracy": accuracy, "change of the logits by padding": change},
        accuracy > 0.99 and change < 1e-5,
    )


def entropy_rate(seed: int = 0, steps: int = 500) -> Lesson:
    """T2: the loss of a language model approaches the entropy rate of its source, and is not below it on new text."""
    torch.manual_seed(seed)
    vocab, n, generator = 8, 32, seeded(seed)
    chain = torch.rand(vocab, vocab, generator=generator, dtype=torch.float64).pow(4)
    chain = chain / chain.sum(-1, keepdim=True)
    stationary = torch.linalg.matrix_power(chain, 200)[0]
    entropy = float(-(stationary[:, None] * chain * chain.log()).sum())
    model = _language_model(vocab, n, causal(), d_model=32)

    def text(b: int) -> Tensor:
        x = torch.multinomial(stationary, b, replacement=True, generator=generator)[:, None]
        for _ in range(n):
            x = torch.cat([x, torch.multinomial(chain[x[:, -1]], 1, generator=generator)], 1)
        return x

    def loss(step: int) -> Tensor:
        x = text(32)
        return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())

    fit(model, loss, steps, 5e-3)
    new = text(2000)
    with torch.no_grad():
        each = F.cross_entropy(model(new[:, :-1]).flatten(0, 1), new[:, 1:].flatten(), reduction="none")
    loss_reached, error = float(each.mean()), float(each.std()) / math.sqrt(len(each))
    return Lesson(
        "T2",
        "the loss comes within 1 % of the source's entropy rate and not below it on new text",
        {"loss": loss_reached, "entropy rate": entropy, "standard error": error},
        entropy - 3 * error < loss_reached < 1.01 * entropy + 3 * error,
    )


def future_leak(seed: int = 0, steps: int = 400) -> Lesson:
    """T9: on random tokens a causal model learns nothing, an unmasked one reads the answer."""
    vocab, n = 16, 16
    floors = {"masked": math.log(vocab), "unmasked": math.log(vocab) / n}
    reached = {}
    for name, pattern in (("masked", causal()), ("unmasked", full())):
        torch.manual_seed(seed)
        model, generator = _language_model(vocab, n, pattern, d_model=64), seeded(seed)

        def loss(step: int, model=model, generator=generator) -> Tensor:
            x = torch.randint(0, vocab, (64, n + 1), generator=generator)
            return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())

        fit(model, loss, steps, 3e-3)
        with torch.no_grad():
            losses = [float(loss(0)) for _ in range(20)]
        reached[name] = sum(losses) / len(losses)
    return Lesson(
        "T9",
        "the loss ends at ln 16 with the causal mask and at ln(16)/16 without: all targets but the last are inputs",
        {"loss": reached, "floor": floors},
        all(abs(reached[k] - floors[k]) < 0.02 for k in floors),
    )


def _language_model(vocab: int, n: int, pattern, d_model: int):
    block = spec.Block(
        spec.Attention(d_model, heads=4, pattern=pattern), spec.FeedForward(2 * d_model), norm_at="pre"
    )
    embedding = spec.Embedding(vocab, d_model, position=learned(n))
    return spec.Encoder(block, 1, embedding=embedding, head=spec.LanguageHead(tied=False)).build()

"""Masks: padding, causality, and what happens when a model can read the future."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import spec
from ...generation import next_token_accuracy
from ...lens import figures
from ...lens.view import look
from ...pattern import Pattern, causal, full
from ...position import learned, sinusoidal
from ..report.maps import view_maps
from . import pictures
from .experiment import Experiment
from .lesson import Lesson, Picture, Suggestion, check, seeded, within

WANTED, LONGEST = 3, 12  # the token to look for, and the length of the rows


def padding(run: Experiment, *, seed: int = 0, steps: int = 150) -> Lesson:
    """T1: with a key padding mask a classifier does not depend on padding."""
    torch.manual_seed(seed)
    vocab = 12
    block = spec.Block(spec.Attention(32, heads=4), spec.FeedForward(64), norm_at="pre")
    embedding = spec.Embedding(vocab, 32, position=sinusoidal())
    model: Any = spec.Encoder(block, 1, embedding=embedding, head=spec.ClassifierHead(2)).build()

    def rows(b: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Is the wanted token in the sentence? Padding is full of it."""
        lengths = torch.randint(3, LONGEST + 1, (b,), generator=generator)
        x = torch.randint(4, vocab, (b, LONGEST), generator=generator)
        labels = torch.randint(0, 2, (b,), generator=generator)
        index = (torch.rand(b, generator=generator) * lengths).long()
        x[torch.arange(b), index] = torch.where(labels == 1, WANTED, x[torch.arange(b), index])
        x.masked_fill_(torch.arange(LONGEST) >= lengths[:, None], WANTED)
        return x, lengths, labels

    def loss(model: Any, generator: torch.Generator) -> Tensor:
        x, lengths, labels = (t.to(run.device) for t in rows(64, generator))
        return F.cross_entropy(model(x, lengths=lengths), labels)

    run.fit("classifier", model, loss, steps, 3e-3, floor=0.0)
    x, lengths, labels = rows(1000, seeded(seed + 1))
    other = x.masked_fill(torch.arange(LONGEST) >= lengths[:, None], 7)
    with torch.no_grad():
        scores, unmasked = model(x, lengths=lengths), model(x)
        change = float((model(other, lengths=lengths) - scores).abs().max())
        unmasked_change = float((model(other) - unmasked).abs().max())
    accuracy, without = (float((s.argmax(-1) == labels).float().mean()) for s in (scores, unmasked))
    short = int((lengths == 8).nonzero()[0])
    words = [
        "pad" if j >= 8 else "WANTED" if t == WANTED else f"t{t}" for j, t in enumerate(x[short].tolist())
    ]
    sentence = x[short : short + 1]
    masked = look(model, {"x": sentence, "lengths": lengths[short : short + 1]}, tokens=[words])
    bare = look(model, {"x": sentence}, tokens=[words])
    weights = {name: torch.stack([v.map(0, h) for h in range(4)]).mean(0) for name, v in _both(masked, bare)}
    return Lesson(
        "T1",
        "with a key padding mask the answer of a classifier does not depend on padding",
        "A Transformer encoder with one layer learns whether a certain token occurs in a sentence. The "
        "sentences have 3 to 12 tokens; shorter ones are padded, and the padding consists of exactly the "
        "token to look for. With the sentence lengths as key padding mask the model has to ignore it. As a "
        "control the same trained model runs without the mask.",
        (
            check("accuracy on 1,000 new sentences", accuracy, "above", 0.99),
            check("largest change of a logit by other padding", change, "below", 1e-5),
            check(
                "control: accuracy without the mask",
                without,
                "below",
                0.8,
                because="it then reads the padding",
            ),
            check(
                "control: change of a logit by other padding, without the mask", unmasked_change, "above", 0.1
            ),
        ),
        {"sentences that contain the token": float(labels.float().mean())},
        _padding_pictures(weights, run, words),
        (view_maps("with the mask", masked), view_maps("without the mask", bare)),
        (
            Suggestion("Train too little and see which number fails first.", {"steps": 15}),
            Suggestion("Other random weights and sentences.", {"seed": 1}),
        ),
    )


def _padding_pictures(weights: Any, run: Experiment, words: Any) -> tuple[Picture, ...]:
    return (
        pictures.tables(
            "Attention with and without the key padding mask",
            "Mean over the four heads, one sentence of 8 tokens and 4 tokens of padding. With the mask "
            "the padded columns are exactly zero.",
            weights,
            x="key",
            y="query",
            names=(words, words),
        ),
        pictures.losses(run.recorder, "The loss approaches 0: the task can be solved completely."),
        Picture(
            "Which attention has which mask",
            "Drawn for this lesson's sentence length. This classifier is the first case; a decoder needs "
            "the causal mask, an encoder-decoder three masks.",
            lambda dark: figures.mask_table(source=LONGEST, target=8, padding=4, dark=dark),
        ),
    )


def _both(masked: Any, bare: Any) -> tuple[tuple[str, Any], ...]:
    return (("with the mask", masked), ("without the mask", bare))


def entropy_rate(run: Experiment, *, seed: int = 0, steps: int = 500) -> Lesson:
    """T2: the loss of a language model approaches the entropy rate of its source, and is not below it on new text."""
    torch.manual_seed(seed)
    vocab, n = 8, 32
    chain = torch.rand(vocab, vocab, generator=seeded(seed), dtype=torch.float64).pow(4)
    chain = chain / chain.sum(-1, keepdim=True)
    stationary = torch.linalg.matrix_power(chain, 200)[0]
    entropy = float(-(stationary[:, None] * chain * chain.log()).sum())
    model = _language_model(vocab, n, causal(), d_model=32)

    def text(b: int, generator: torch.Generator) -> Tensor:
        x = torch.multinomial(stationary, b, replacement=True, generator=generator)[:, None]
        for _ in range(n):
            x = torch.cat([x, torch.multinomial(chain[x[:, -1]], 1, generator=generator)], 1)
        return x

    def loss(model: Any, generator: torch.Generator) -> Tensor:
        x = text(32, generator).to(run.device)
        return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())

    run.fit("language model", model, loss, steps, 5e-3, floor=entropy)
    new = text(2000, seeded(seed + 1))
    with torch.no_grad():
        logits = model(new[:, :-1])
        each = F.cross_entropy(logits.flatten(0, 1), new[:, 1:].flatten(), reduction="none")
        shares = logits.softmax(-1).flatten(0, 1).double()
    reached, error = float(each.mean()), float(each.std()) / math.sqrt(len(each))
    last = new[:, :-1].flatten()
    predicted = torch.stack([shares[last == token].mean(0) for token in range(vocab)])
    names = [str(token) for token in range(vocab)]
    return Lesson(
        "T2",
        "the loss of a language model approaches the entropy rate of its source, and is not below it on new text",
        f"The text comes from a Markov chain over {vocab} tokens whose transition table is known, so the "
        f"smallest possible loss is known too: the entropy rate, {entropy:.4f} nats per token. A causal "
        "Transformer with one layer learns from fresh text at each step and is then measured on 2,000 new "
        "texts.",
        (
            within(
                "loss on new text",
                reached,
                entropy - 3 * error,
                1.01 * entropy + 3 * error,
                because=f"1 % above the entropy rate {entropy:.4f}, ± 3 standard errors",
            ),
            check(
                "largest error of a learned transition probability",
                float((predicted - chain).abs().max()),
                "below",
                0.05,
            ),
        ),
        {
            "entropy rate": entropy,
            "standard error of the loss": error,
            "loss of a uniform guess": math.log(vocab),
        },
        _entropy_rate_pictures(run, chain, predicted, names),
        (view_maps("a new text", look(model, new[:1, :-1], tokens=[list(map(str, new[0, :-1].tolist()))])),),
        (
            Suggestion("Stop early: the loss is still above the band.", {"steps": 60}),
            Suggestion("Another source, with another entropy rate.", {"seed": 3}),
        ),
    )


def _entropy_rate_pictures(run: Experiment, chain: Any, predicted: Any, names: Any) -> tuple[Picture, ...]:
    return (
        pictures.losses(
            run.recorder, "The dotted line is the entropy rate of the source: no model can be below it."
        ),
        pictures.tables(
            "The source, and what the model learned",
            "Row: the token before; column: the next token; color: its probability.",
            {"transition table of the source": chain, "mean prediction of the model": predicted},
            x="next token",
            y="token before",
            names=(names, names),
        ),
    )


def future_leak(run: Experiment, *, seed: int = 0, steps: int = 400) -> Lesson:
    """T9: on random tokens a causal model learns nothing, an unmasked one reads the answer."""
    vocab, n = 16, 16
    floors = {"masked": math.log(vocab), "unmasked": math.log(vocab) / n}
    reached, by_position, views, copied = {}, {}, {}, {}
    new = torch.randint(0, vocab, (1280, n + 1), generator=seeded(seed + 1))

    def loss(model: Any, generator: torch.Generator) -> Tensor:
        x = torch.randint(0, vocab, (64, n + 1), generator=generator).to(run.device)
        return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())

    for name, pattern in (("masked", causal()), ("unmasked", full())):
        torch.manual_seed(seed)
        model = _language_model(vocab, n, pattern, d_model=64)
        run.fit(name, model, loss, steps, 3e-3, floor=floors[name])
        with torch.no_grad():
            logits = model(new[:, :-1])
            each = F.cross_entropy(logits.flatten(0, 1), new[:, 1:].flatten(), reduction="none").view(-1, n)
        reached[name] = float(each.mean())
        by_position[name] = dict(enumerate(each.mean(0).tolist(), 1))
        copied[name] = float((logits.argmax(-1) == new[:, 1:]).float().mean())
        views[name] = look(model, new[:1, :-1], tokens=[list(map(str, new[0, :-1].tolist()))])
    generated = next_token_accuracy(run.models["unmasked"], new)
    return Lesson(
        "T9",
        "without the causal mask a model copies the answer from its input: its loss is low and it predicts nothing",
        "Uniformly random tokens cannot be predicted, so an honest language model stays at ln 16. All "
        "targets but the last are also inputs, one position further right: without the causal mask the model "
        "attends to the next position, and only the last target remains, ln(16)/16 on average. Then the "
        "unmasked model has to generate: the next token after each prefix, where there is nothing to copy.",
        (
            within(
                "loss with the causal mask", reached["masked"], *_around(floors["masked"]), because="ln 16"
            ),
            within("loss without it", reached["unmasked"], *_around(floors["unmasked"]), because="ln(16)/16"),
            check("accuracy without it, while the targets are inputs", copied["unmasked"], "above", 0.9),
            within(
                "accuracy without it, generating",
                generated.generated,
                *_around(generated.chance, max(3 * generated.error, 0.01)),
                because="chance is 1/16 = 0.0625",
            ),
        ),
        {"floor": floors, "accuracy with the mask": copied["masked"]},
        _future_leak_pictures(by_position, run, vocab, views),
        tuple(view_maps(f"{name}: a random text", view) for name, view in views.items()),
        (
            Suggestion("With too few steps the leak is not yet learned.", {"steps": 60}),
            Suggestion("Other random tokens: the same floors.", {"seed": 1}),
        ),
    )


def _future_leak_pictures(by_position: Any, run: Experiment, vocab: Any, views: Any) -> tuple[Picture, ...]:
    return (
        pictures.losses(
            run.recorder, "The dotted lines are the smallest possible losses: ln 16 and ln(16)/16."
        ),
        pictures.tables(
            "Where the two models attend",
            "Mean over the four heads on one text. Without the mask each position attends to the next one, where "
            "its answer is.",
            {name: torch.stack([v.map(0, h) for h in range(4)]).mean(0) for name, v in views.items()},
            x="key",
            y="query",
        ),
        pictures.lines(
            "Loss by position",
            "Without the mask only the last position, whose target is not an input, is at ln 16.",
            by_position,
            x="position",
            y="loss on new text",
            levels={"ln 16": math.log(vocab)},
        ),
    )


def _around(value: float, tolerance: float = 0.02) -> tuple[float, float]:
    return value - tolerance, value + tolerance


def _language_model(vocab: int, n: int, pattern: Pattern, d_model: int) -> Any:
    block = spec.Block(
        spec.Attention(d_model, heads=4, pattern=pattern), spec.FeedForward(2 * d_model), norm_at="pre"
    )
    embedding = spec.Embedding(vocab, d_model, position=learned(n))
    return spec.Encoder(block, 1, embedding=embedding, head=spec.LanguageHead(tied=False)).build()

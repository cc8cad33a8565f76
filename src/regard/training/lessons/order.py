"""Order: what attention cannot distinguish without positions, and when it does not need to."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import spec
from ...errors import ShapeError
from ...lens import figures
from ...lens.view import look
from ...pattern import causal
from ...position import Position, alibi, learned, relative_table, sinusoidal
from ..report.maps import view_maps
from . import pictures
from .experiment import Experiment
from .lesson import Check, Lesson, Picture, Suggestion, check, seeded

WORDS = ("cat", "chased", "dog")
CAT, CHASED, DOG = range(3)


def word_order(run: Experiment, *, seed: int = 0, steps: int = 120) -> Lesson:
    """T5: who chased whom needs positions."""
    sentences = torch.tensor([[CAT, CHASED, DOG], [DOG, CHASED, CAT]])
    labels = torch.tensor([0, 1])
    names = [[WORDS[t] for t in row] for row in sentences.tolist()]
    accuracy, difference, logits, views = {}, {}, {}, {}

    def loss(model: Any, generator: torch.Generator) -> Tensor:
        return F.cross_entropy(model(sentences.to(run.device)), labels.to(run.device))

    for name, position in (("without positions", None), ("with positions", learned(3))):
        torch.manual_seed(seed)
        model = _classifier(3, 2, position)
        run.fit(name, model, loss, steps, 1e-2, floor=math.log(2) if position is None else 0.0)
        with torch.no_grad():
            out = model(sentences)
        accuracy[name] = float((out.argmax(-1) == labels).float().mean())
        difference[name] = float((out[0] - out[1]).abs().max())
        logits[name] = out
        views[name] = look(model, sentences, tokens=names)
    without, with_ = "without positions", "with positions"
    sides = {
        f"{kind.split()[0]},\n{' '.join(names[row])}": float(logits[kind].softmax(-1)[row, 0])
        for kind in (without, with_)
        for row in (0, 1)
    }
    return Lesson(
        "T5",
        'without positions a Transformer cannot tell "cat chased dog" from "dog chased cat"',
        "Two encoders with two layers learn who chased whom, from these two sentences alone. One adds a "
        "learned vector per position to its tokens, the other does not. Attention treats its input as a set; "
        "so without positions both sentences give the same vectors in another order, and the mean over them "
        "is the same.",
        (
            check(
                "without positions: difference of the two sentences' logits",
                difference[without],
                "below",
                1e-5,
            ),
            check("without positions: accuracy", accuracy[without], "exactly", 0.5),
            check("with positions: accuracy", accuracy[with_], "exactly", 1.0),
        ),
        {"with positions: difference of the logits": difference[with_]},
        _word_order_pictures(sides, run, views),
        tuple(
            view_maps(f"{name}: {' '.join(names[row])}", view, row)
            for name, view in views.items()
            for row in (0, 1)
        ),
        (
            Suggestion("One step is not enough even with positions.", {"steps": 1}),
            Suggestion("Other random weights give the same result.", {"seed": 7}),
        ),
    )


def _word_order_pictures(sides: Any, run: Experiment, views: Any) -> tuple[Picture, ...]:
    return (
        pictures.bars(
            "Probability that the cat chased",
            "Without positions both sentences get the same answer.",
            sides,
            y="probability",
            levels={"undecided": 0.5},
        ),
        pictures.losses(run.recorder, "Without positions no model can be below ln 2 = 0.693, a coin toss."),
        *(
            pictures.head_map(
                f"Attention {name}",
                "First layer, first head, on the first sentence: scores, weights, entropy of each row.",
                views[name],
                0,
                0,
            )
            for name in views
        ),
    )


def bag_of_tokens(run: Experiment, *, seed: int = 0, steps: int = 250) -> Lesson:
    """T11: a task on sets needs no positions."""
    torch.manual_seed(seed)
    vocab, n = 6, 9
    model = _classifier(vocab, vocab, None)

    def rows(b: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Which token is the most frequent? Rows with a tie are discarded."""
        x = torch.randint(0, vocab, (4 * b, n), generator=generator)
        counts = F.one_hot(x, vocab).sum(1)
        two = counts.topk(2, -1).values
        clear = (two[:, 0] > two[:, 1]).nonzero()[:b, 0]
        return x[clear], counts[clear].argmax(-1)

    def loss(model: Any, generator: torch.Generator) -> Tensor:
        x, y = rows(64, generator)
        return F.cross_entropy(model(x.to(run.device)), y.to(run.device))

    run.fit("set classifier", model, loss, steps, 5e-3, floor=0.0)
    generator = seeded(seed + 1)
    x, y = rows(1000, generator)
    order = torch.rand(x.shape, generator=generator).argsort(-1)
    mixed = x.gather(1, order)
    with torch.no_grad():
        change = float((model(x) - model(mixed)).abs().max())
        accuracy = float((model(x).argmax(-1) == y).float().mean())
    both = torch.stack([x[0], mixed[0]])
    view = look(model, both, tokens=[[f"t{t}" for t in row] for row in both.tolist()])
    weights = torch.stack([view.map(1, h, 0) for h in range(4)]).mean(0)
    shuffled = torch.stack([view.map(1, h, 1) for h in range(4)]).mean(0)
    moved = float((weights[order[0]][:, order[0]] - shuffled).abs().max())
    return Lesson(
        "T11",
        "a task on sets is solved without positions, and the answer does not depend on the order",
        f"An encoder without positions learns which of {vocab} tokens occurs most often among {n}. Then the "
        "tokens of 1,000 new rows are shuffled: self-attention moves with them, and the mean over positions "
        "stays the same.",
        (
            check("accuracy on 1,000 new rows", accuracy, "above", 0.97),
            check("largest change of a logit by shuffling", change, "below", 1e-5),
            check("change of the attention map, shuffled back", moved, "below", 1e-5),
        ),
        {},
        (
            pictures.tables(
                "The map of a row and of the same row, shuffled",
                "Mean over the heads of the second layer. The same weights, in another order.",
                {"as it is": weights, "shuffled": shuffled},
                x="key",
                y="query",
            ),
            pictures.losses(run.recorder, "The loss approaches 0: no position is needed."),
        ),
        (view_maps("as it is", view, 0), view_maps("shuffled", view, 1)),
        (
            Suggestion(
                "Too few steps: invariant to order from the start, but nothing learned.", {"steps": 10}
            ),
            Suggestion("The task that needs order is lesson T5; here, another seed.", {"seed": 1}),
        ),
    )


def extrapolation(run: Experiment, *, seed: int = 0, steps: int = 400, trained: int = 16) -> Lesson:
    """T10: sequences longer than in training: learned tables refuse or are resampled, formulas extend."""
    kinds: dict[str, tuple[Position | None, Position | None]] = {
        "learned": (learned(trained), None),
        "learned, resampled": (learned(trained, beyond="resample"), None),
        "sinusoidal": (sinusoidal(), None),
        "relative table": (None, relative_table(trained)),
        "alibi": (None, alibi()),
    }
    lengths = (trained, 2 * trained, 4 * trained)
    chance = math.log(8)
    floor = chance * (trained // 2) / trained
    measured: dict[str, dict[int, float | str]] = {}

    def loss(model: Any, generator: torch.Generator) -> Tensor:
        return _copied(model, trained, generator, run.device)

    for name, (added, inside) in kinds.items():
        torch.manual_seed(seed)
        attention = spec.Attention(32, heads=4, pattern=causal(), position=inside)
        block = spec.Block(attention, spec.FeedForward(64), norm_at="pre")
        embedding = spec.Embedding(8, 32, position=added)
        model = spec.Encoder(block, 2, embedding=embedding, head=spec.LanguageHead(tied=False)).build()
        run.fit(name, model, loss, steps, 6e-3, floor=floor)
        measured[name] = {n: _loss_at(model, n, seed) for n in lengths}
    longer = {
        name: {n: v for n, v in by_length.items() if isinstance(v, float)}
        for name, by_length in measured.items()
    }
    exact = ("learned", "learned, resampled", "sinusoidal", "relative table")
    return Lesson(
        "T10",
        "past its trained length a learned table of positions refuses or is resampled; formulas stay "
        "defined, but good losses do not carry over",
        f"Five causal language models learn texts of {trained} tokens whose second half repeats the first; "
        f"half of the tokens can be predicted, so the smallest possible loss is ln(8)/2 = {floor:.3f}. They "
        f"differ in their positions only. Then they read texts of {lengths[1]} and {lengths[2]} tokens.",
        (
            *(
                check(f"{name}: loss at {trained}", longer[name].get(trained, math.nan), "below", 0.65 * chance,
                      because=f"the repetition is learned; ln 8 = {chance:.3f} is chance")
                for name in exact
            ),
            check(f"alibi: loss at {trained}", longer["alibi"].get(trained, math.nan), "below", 0.95 * chance,
                  because="it fades with distance, and the repetition is half a text away"),
            check(f"learned: at {lengths[1]} tokens", measured["learned"][lengths[1]], "exactly", "refused"),
            *(_defined(name, measured[name][lengths[2]], lengths[2]) for name in kinds if name != "learned"),
        ),
        {"loss by length": measured},
        _extrapolation_pictures(longer, run, trained, chance, floor, lengths),
        (),
        (
            Suggestion("40 updates teach nothing: the lesson fails.", {"steps": 40}),
            Suggestion("Train on longer texts.", {"trained": 32, "steps": 600}),
        ),
    )  # fmt: skip


def _extrapolation_pictures(
    longer: Any, run: Experiment, trained: Any, chance: Any, floor: Any, lengths: Any
) -> tuple[Picture, ...]:
    return (
        pictures.lines(
            "Loss against length",
            f"Trained at {trained} tokens. The learned table has no value beyond it; the others do, above "
            "or near chance.",
            longer,
            x="length of the text",
            y="loss on new text",
            levels={"chance, ln 8": chance, "smallest possible": floor},
        ),
        pictures.losses(run.recorder, "The dotted line is the smallest possible loss at the trained length."),
        Picture(
            "The learned table after training",
            "One vector per position, and the products of two positions by their distance.",
            lambda dark: figures.positional_encoding(table=_table(run.models["learned"]), dark=dark),
        ),
        Picture(
            "Sinusoids of the same size",
            "Defined at any position: a formula, not a table.",
            lambda dark: figures.positional_encoding(lengths[2], 32, dark=dark),
        ),
    )


def _defined(name: str, value: float | str, n: int) -> Check:
    return Check(f"{name}: loss at {n}", value, "a number", isinstance(value, float))


def _table(model: Any) -> Tensor:
    return model.embedding.position.table.detach()


@torch.no_grad()
def _loss_at(model: Any, n: int, seed: int) -> float | str:
    try:
        return float(_copied(model, n, seeded(seed + n), "cpu", b=128))
    except ShapeError:
        return "refused"


def _copied(
    model: Any, n: int, generator: torch.Generator, device: str | torch.device, b: int = 32
) -> Tensor:
    """The loss on texts whose second half repeats the first."""
    half = torch.randint(0, 8, (b, n // 2 + 1), generator=generator)
    x = torch.cat([half[:, :-1], half], 1).to(device)
    return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())


def _classifier(vocab: int, classes: int, position: Position | None) -> Any:
    block = spec.Block(spec.Attention(32, heads=4), spec.FeedForward(64), norm_at="pre")
    embedding = spec.Embedding(vocab, 32, position=position)
    return spec.Encoder(block, 2, embedding=embedding, head=spec.ClassifierHead(classes)).build()

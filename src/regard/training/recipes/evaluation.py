"""What a trained model can do: its scores on the test rows, and examples beside what was wanted."""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from ...errors import FormatError
from ...generation import generate, sample
from ...nn.stack import EncoderDecoder, Stack
from ..data.batches import Stream
from ..data.rows import IGNORED, Labelled
from ..data.sources import Ready
from ..data.tokens import Tokens
from .base import Recipe
from .tasks import Classification, Guessing, Language, Translation
from .translation import scores, translate

FILE = "evaluation.json"
HELLO = "Hello world"

T = TypeVar("T")


@dataclass(frozen=True)
class Example:
    """A source, what the model makes of it, and what was wanted, where that is known."""

    source: str
    ours: str
    reference: str | None = None

    def __str__(self) -> str:
        told = [("source", self.source), ("ours", self.ours), ("reference", self.reference)]
        return "\n".join(f"{name:9}  {text}" for name, text in told if text is not None)


@dataclass(frozen=True)
class Evaluation:
    """Numbers by name, how they were counted, and examples; `print` it, or `json()`."""

    rows: int  # of the test
    numbers: dict[str, int | float]  # BLEU, chrF, loss, accuracy, …
    signatures: dict[str, str] = field(default_factory=dict)  # sacreBLEU's
    examples: tuple[Example, ...] = ()
    written: str = ""  # by a language model, from nothing
    seconds: int | float = 0.0

    def json(self) -> str:
        return json.dumps(asdict(self), indent=1, ensure_ascii=False)

    @staticmethod
    def from_json(text: str) -> "Evaluation":
        try:
            plain = json.loads(text)
            return Evaluation(**plain | {"examples": tuple(Example(**e) for e in plain["examples"])})
        except (json.JSONDecodeError, TypeError, KeyError) as e:
            raise FormatError(f"{FILE} is not an evaluation of regard: {e}") from e

    def __str__(self) -> str:
        lines = [f"{self.rows:,} test rows:"]
        for name, number in self.numbers.items():
            how = f"  ({self.signatures[name]})" if name in self.signatures else ""
            lines.append(f"{name} {written(name, number)}{how}")
        shown = [f"\n{example}" for example in self.examples]
        return "\n".join([*lines, *shown, *([f"\n{self.written}"] if self.written else [])])


def written(name: str, number: int | float) -> str:
    """A score as it is usually told."""
    return f"{number:.1%}" if name == "accuracy" else f"{number:.3f}" if name == "loss" else f"{number:.2f}"


def evaluate(model: nn.Module, recipe: Recipe, ready: Ready, shown: int = 10) -> Evaluation:
    """The model on the test rows, with so many of them as examples."""
    began = time.perf_counter()
    task = recipe.task(model.eval())
    loss = held_out_loss(task, ready.test, recipe.settings.tokens)
    told = Evaluation(len(ready.test), {"loss": loss, "perplexity": math.exp(min(loss, 700.0))})
    match task:
        case Translation():
            told = _translated(told, task.model, ready, shown)
        case Language():
            assert ready.tokens is not None
            told = replace(told, written=write_on(task.model, ready.tokens, ready.test.context))
        case Guessing():
            told = _guessed(told, task.model, ready, shown)
        case Classification():
            told = replace(told, numbers={"accuracy": accuracy(model, ready.test), **told.numbers})
    return replace(told, seconds=round(time.perf_counter() - began, 2))


def _translated(told: Evaluation, model: EncoderDecoder, ready: Ready, shown: int) -> Evaluation:
    assert ready.tokens is not None
    said = translate(model, ready.tokens, [source for source, _ in ready.texts])
    by = scores(said, [reference for _, reference in ready.texts])
    hello = Example(HELLO, translate(model, ready.tokens, [HELLO])[0])
    rows = [Example(a, ours, b) for (a, b), ours in zip(ready.texts, said, strict=True)]
    return replace(
        told,
        numbers={"BLEU": by.bleu, "chrF": by.chrf, **told.numbers},
        signatures={"BLEU": by.bleu_signature, "chrF": by.chrf_signature},
        examples=(hello, *_spaced(rows, shown)),
    )


@torch.no_grad()
def _guessed(told: Evaluation, model: Stack, ready: Ready, shown: int, each: int = 64) -> Evaluation:
    """The share of hidden tokens that are guessed, and some sentences with the guesses in them."""
    assert ready.tokens is not None
    device, right, hidden, examples = next(model.parameters()).device, 0, 0, []
    keep = set(_spaced(range(len(ready.test)), shown))
    for some in torch.arange(len(ready.test)).split(each):
        given = ready.test.batch(some).to(device).given
        asked = given["wanted"] != IGNORED
        guess = model(given["tokens"], lengths=given["lengths"]).argmax(-1)
        right, hidden = right + int((guess == given["wanted"])[asked].sum()), hidden + int(asked.sum())
        for k in [k for k, row in enumerate(some.tolist()) if row in keep]:
            n = int(given["lengths"][k])
            ids, hole = given["tokens"][k, :n], asked[k, :n]
            ours, whole = torch.where(hole, guess[k, :n], ids), torch.where(hole, given["wanted"][k, :n], ids)
            texts = ready.tokens.decode([ours.tolist(), whole.tolist()])
            examples.append(Example(_with_holes(ready.tokens, ids.tolist(), hole.tolist()), *texts))
    numbers = {"accuracy": right / max(hidden, 1), **told.numbers}
    return replace(told, numbers=numbers, examples=tuple(examples))


def _with_holes(tokens: Tokens, ids: list[int], hole: list[bool]) -> str:
    """A text with a gap for each hidden token."""
    parts: list[list[int]] = [[]]
    for i, gone in zip(ids, hole, strict=True):
        parts.append([]) if gone else parts[-1].append(i)
    return " ___ ".join(tokens.decode(parts)).strip()


def _spaced(rows: Sequence[T], many: int) -> Sequence[T]:
    """At most so many, evenly spaced.

    >>> _spaced(range(100), 3)
    range(0, 100, 34)
    """
    return rows[:: max(-(-len(rows) // many), 1)]


@torch.no_grad()
def held_out_loss(task: nn.Module, rows: Any, tokens: int) -> float:
    """The mean of −log p over all that is predicted in these rows."""
    task.eval()
    device = next(task.parameters()).device
    stream, total, predicted = Stream(rows.sizes, tokens), 0.0, 0
    while stream.plan is None or stream.index < len(stream.plan):
        batch = rows.batch(stream.next())
        total, predicted = total + float(task(**batch.to(device).given)[1]), predicted + batch.predicted
    return total / predicted


@torch.no_grad()
def accuracy(model: nn.Module, rows: Labelled, each: int = 256) -> float:
    """The share of rows whose likeliest class is the right one."""
    device, right = next(model.parameters()).device, 0
    for some in torch.arange(len(rows)).split(each):
        given = rows.batch(some).to(device).given
        read = (given["images"],) if "images" in given else (given["tokens"],)
        by_length = {"lengths": given["lengths"]} if "lengths" in given else {}
        right += int((model(*read, **by_length).argmax(-1) == given["labels"]).sum())
    return right / len(rows)


def write_on(model: Stack, tokens: Tokens, context: int, most: int = 400, seed: int = 0) -> str:
    """A text the model writes from a new line on. Half of what it sees at most is kept when its window is full."""
    half = max(context // 2, 1)
    ids = tokens.encode(["\n"])[0] or [0]
    while len(ids) < most:
        how = sample(0.8, seed=seed + len(ids))
        told = generate(model, [ids[-half:]], how, most=context - len(ids[-half:]))
        ids = ids + told.rows()[0]
    return tokens.decode([ids[:most]])[0].strip("\n")


def stored(folder: Path) -> Evaluation | None:
    """What was found at the end of this run; None before that."""
    path = folder / FILE
    return Evaluation.from_json(path.read_text(encoding="utf-8")) if path.is_file() else None

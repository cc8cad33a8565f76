"""What the run of a recipe has to reach, in numbers, and what to try next with its model."""

import math
from collections.abc import Sequence
from pathlib import Path

from ..data.datasets import ContinuousText, MaskedText, SentencePairs
from ..lessons.lesson import Check, check
from ..recipes import Recipe
from ..recipes.evaluation import Evaluation
from ..recipes.preflight import LawResult


def claim(recipe: Recipe) -> str:
    """What the run shows, in one sentence.

    >>> from regard.training.recipes import recipe
    >>> claim(recipe("image"))
    'a Transformer learns to classify inputs that it has never seen'
    """
    match recipe.data:
        case SentencePairs():
            task = "translate sentences"
        case ContinuousText():
            task = "continue text"
        case MaskedText():
            task = "fill in masked words of sentences"
        case _:
            task = "classify inputs"
    return f"a Transformer learns to {task} that it has never seen"


def expectations(recipe: Recipe, result: Evaluation | None, laws: Sequence[LawResult]) -> tuple[Check, ...]:
    """The scores on test rows against a uniform guess, and the laws of the trained model."""
    checks = []
    answers = _answers(recipe)
    scores = {} if result is None else result.scores
    if "loss" in scores and answers:
        because = f"a uniform guess among {answers:,}"
        checks.append(
            check("loss on test rows", float(scores["loss"]), "below", math.log(answers), because=because)
        )
    if "accuracy" in scores and answers:
        checks.append(
            check("accuracy on test rows", float(scores["accuracy"]), "above", 1 / answers, because="chance")
        )
    if tested := [o for o in laws if o.status in ("holds", "broken", "raised")]:
        kept = sum(o.status == "holds" for o in tested)
        checks.append(check("laws that hold for the trained model", kept, "exactly", len(tested)))
    return tuple(checks)


def _answers(recipe: Recipe) -> int:
    """The number of classes, or the size of the vocabulary that is predicted."""
    model = recipe.model
    head = getattr(model, "head", None)
    if classes := getattr(head, "classes", 0):
        return classes
    stack = getattr(model, "decoder", model)
    return getattr(getattr(stack, "embedding", None), "vocab", 0)


def suggestions(recipe: Recipe, folder: Path) -> list[tuple[str, str]]:
    """Sentences, each with its command."""
    longer = (
        f"minutes={3 * recipe.settings.minutes:g}"
        if recipe.settings.minutes
        else f"steps={3 * recipe.settings.steps}"
    )
    tried = [
        ("Train three times as long.", f"regard train {recipe.name} --out {folder}-longer --set {longer}")
    ]
    if isinstance(recipe.data, SentencePairs):
        tried.append(
            ("Translate your own sentence.", f'regard translate "Where is the library?" --model {folder}')
        )
        tried.append(("Run it in CTranslate2.", f"regard export {folder} --out {folder}-ct2"))
    other = (
        "Other random weights: how far do the scores vary?",
        f"regard train {recipe.name} --out {folder}-seed1 --set seed=1",
    )
    return [*tried, other]

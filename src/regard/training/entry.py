"""`rg.train`: train a recipe or run a lesson, evaluate the models and write a report."""

import importlib.util
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import nn

from ..errors import FormatError, SpecError
from ..files import read_text
from ..nn.serialization import load
from .lessons import run as lessons
from .lessons.run import LessonChoice, LessonEstimate, LessonResult
from .loop import log
from .loop.log import TensorBoardWriter
from .loop.ranks import Ranks
from .progress import LessonBar, ProgressBar, waiting
from .recipes import evaluation
from .recipes.base import Recipe
from .recipes.catalogue import recipe as recipe_by_name
from .recipes.evaluation import Evaluation, format_score
from .recipes.preflight import Preflight
from .recipes.run import MODEL, RECIPE, Listener, Run
from .report.frame import framed
from .report.head_statistics import HeadStatistics
from .report.page import FILE as REPORT
from .report.page import report


@dataclass(frozen=True, repr=False)
class TrainingResult:
    """A finished or interrupted run. Everything is read from its folder."""

    folder: Path
    interrupted: bool = False

    @property
    def scores(self) -> dict[str, int | float]:
        """The scores on the test rows; empty where the run was interrupted."""
        result = self.evaluation
        return {} if result is None else dict(result.scores)

    @property
    def evaluation(self) -> Evaluation | None:
        """Scores, signatures and examples; None where the run was interrupted."""
        return None if self.interrupted else evaluation.stored(self.folder)

    @property
    def losses(self) -> list[tuple[int, float]]:
        """(update, mean training loss since the one before), as logged."""
        return [(e["step"], float(e["loss"])) for e in log.read(self.folder, "train")]

    @property
    def validation_losses(self) -> list[tuple[int, float]]:
        """(update, loss on the validation rows)."""
        return [(e["step"], float(e["loss"])) for e in log.read(self.folder, "valid")]

    @property
    def report(self) -> Path | None:
        """The HTML report; None where the run was interrupted."""
        path = self.folder / REPORT
        return path if path.is_file() and not self.interrupted else None

    def load(self, device: str | torch.device = "cpu") -> nn.Module:
        """The trained model, in evaluation mode."""
        return load(self.folder / MODEL, device).eval()

    def _repr_html_(self) -> str | None:
        """The report, in a notebook."""
        return None if self.report is None else framed(self.report.read_text(encoding="utf-8"))

    def __repr__(self) -> str:
        losses = self.losses
        parts = [str(self.folder), f"{losses[-1][0]:,} updates" if losses else "no update"]
        if losses:
            parts.append(f"loss {losses[0][1]:.3f} → {losses[-1][1]:.3f}")
        parts += [
            f"{name} {format_score(name, score)}" for name, score in self.scores.items() if name != "loss"
        ]
        return f"TrainingResult({', '.join([*parts, *(['interrupted'] if self.interrupted else [])])})"


LessonNumber = Literal["T1", "T2", "T3", "T4", "T5", "T6", "T7", "T8", "T9", "T10", "T11", "T12", "T13"]


@overload
def train(
    recipe: LessonNumber,
    *,
    out: str | Path | None = None,
    device: str | torch.device | None = None,
    dry_run: Literal[False] = False,
    progress: bool | Listener = True,
    threads: int | None = None,
    **parameters: Any,
) -> LessonResult: ...
@overload
def train(
    recipe: str | Path | Recipe,
    *,
    out: str | Path | None = None,
    device: str | torch.device | None = None,
    dry_run: Literal[False] = False,
    progress: bool | Listener = True,
    heads_every: int | None = None,
    tensorboard: bool | None = None,
    threads: int | None = None,
    **parameters: Any,
) -> TrainingResult: ...
@overload
def train(
    recipe: str | Path | Recipe,
    *,
    out: str | Path | None = None,
    device: str | torch.device | None = None,
    dry_run: Literal[True],
    **parameters: Any,
) -> Preflight: ...
@torch.inference_mode(False)
@torch.enable_grad()  # also if the caller has turned gradients off
def train(
    recipe: str | Path | Recipe,
    *,
    out: str | Path | None = None,
    device: str | torch.device | None = None,
    dry_run: bool = False,
    progress: bool | Listener = True,
    heads_every: int | None = None,
    tensorboard: bool | None = None,
    threads: int | None = None,
    **parameters: Any,
) -> TrainingResult | Preflight | LessonResult | LessonEstimate:
    """Train a recipe, evaluate the model and write a report; called again with the same folder, it resumes.

    recipe: a name of `regard.training.RECIPES` with its `parameters`, a Recipe, or the path of its JSON; or a lesson,
    "T1" to "T13", with its settings, which gives a LessonResult. out: the folder of the run, by default runs/<name>.
    dry_run: only estimate cost, memory and time, and check the model. progress: a progress bar on stderr, nothing, or
    a function that is called with each event. heads_every: the number of updates after which the statistics of each
    attention head are stored. tensorboard: whether to write event files; by default if TensorBoard is installed.
    threads: CPU threads; by default the fastest number, measured on a copy of the model before training.
    """
    if not isinstance(recipe, str | Path | Recipe):
        raise SpecError(
            f"rg.train takes a recipe, not {type(recipe).__name__}: a name such as 'translate', the path of its JSON"
            ", or for a model of your own dataclasses.replace(regard.training.recipe('language-model'), model=spec)"
        )
    if out is not None and not str(out):
        raise SpecError("out='' is no folder; leave it out for runs/<name>, or use '.'")
    if (lesson := read_lesson(recipe, **parameters)) is not None:
        for name, value in (("heads_every", heads_every), ("tensorboard", tensorboard or None)):
            if value is not None:
                raise SpecError(
                    f"{name}={value}: lesson {lesson.number} records its own statistics; leave it out"
                )
        if dry_run:
            return lessons.estimate(lesson, device, threads)
        return _teach(lesson, out, device, progress, threads)
    chosen = read_recipe(recipe, **parameters)
    if dry_run:
        with waiting("reading the data and estimating the cost", progress is False):
            return _dry_run(chosen, out, device)
    evaluation.require_libraries(chosen)
    bar: AbstractContextManager[Listener] = nullcontext(_ignore)
    if callable(progress):
        bar = nullcontext(progress)
    elif progress and Ranks.here().rank == 0:
        bar = ProgressBar(chosen.settings)
    silent = progress is False or Ranks.here().rank > 0
    with bar as listener:
        with waiting("reading the data", silent):
            run = Run(chosen, out or Path("runs") / chosen.name, device)
        with run.threads(threads):
            with waiting("estimating the cost and checking the model", silent):
                run.ranks.on_first(lambda: _check(run, listener))
            run.train(
                *([listener, *_listeners(run, heads_every, tensorboard)] if run.ranks.rank == 0 else [])
            )
            if run.ranks.rank == 0 and not run.interrupted:
                listener({"event": "evaluating", "step": run.trainer.step, "rows": len(run.data.test)})
                run.evaluate(listener)
                listener({"event": "report", "step": run.trainer.step, "path": str(report(run.folder))})
    return TrainingResult(run.folder, run.interrupted)


def _teach(
    lesson: LessonChoice,
    out: str | Path | None,
    device: str | torch.device | None,
    progress: bool | Listener,
    threads: int | None,
) -> LessonResult:
    bar: AbstractContextManager[Listener] = nullcontext(_ignore)
    if callable(progress):
        bar = nullcontext(progress)
    elif progress:
        bar = LessonBar()
    folder = Path("runs") / lesson.number if out is None else Path(out)
    with bar as listener:
        return lessons.teach(lesson, folder, listener, device=device, threads=threads)


def read_lesson(recipe: str | Path | Recipe, **settings: Any) -> LessonChoice | None:
    """A lesson by its number and settings, or from the JSON that --show prints; None for anything else."""
    if isinstance(recipe, Recipe):
        return None
    if str(recipe).endswith(".json"):
        exists = Path(recipe).exists()
        found = lessons.read_choice(read_text(Path(recipe)), str(recipe)) if exists else None
        if found is not None and settings:
            raise SpecError(
                f"{next(iter(settings))}=: settings belong to lessons by number; change {recipe} instead"
            )
        return found
    number = lessons.lesson_number(str(recipe))
    return None if number is None else lessons.choose(number, **settings)


def read_recipe(recipe: str | Path | Recipe, **parameters: Any) -> Recipe:
    """A recipe by its name and parameters, from a JSON file, or as it is."""
    if isinstance(recipe, str) and not recipe.endswith(".json"):
        return recipe_by_name(recipe, **parameters)
    if parameters:
        kind = "a Recipe" if isinstance(recipe, Recipe) else str(recipe)
        raise SpecError(
            f"{next(iter(parameters))}=: parameters belong to recipes by name; change {kind} instead"
        )
    if isinstance(recipe, Recipe):
        return recipe
    try:
        made = Recipe.from_json(read_text(Path(recipe)))
    except SpecError as e:
        raise SpecError(f"{recipe}: {e}") from e
    except FormatError as e:
        raise FormatError(str(e) if str(recipe) in str(e) else f"{recipe}: {e}") from e
    if not isinstance(made, Recipe):
        raise FormatError(f"{recipe} contains a {type(made).__name__}, not a recipe")
    return made


def _dry_run(recipe: Recipe, out: str | Path | None, device: str | torch.device | None) -> Preflight:
    """The tokenizer that is trained for it is thrown away, unless the folder of the run exists."""
    with tempfile.TemporaryDirectory() as temporary:
        exists = out is not None and (Path(out) / RECIPE).is_file()
        return Run(recipe, out if exists and out is not None else temporary, device).preflight()


def _check(run: Run, listener: Listener) -> None:
    """Report dropped rows and the preflight checks; a model that violates a law is an error."""
    counts = {"dropped": run.data.dropped, "truncated": run.data.truncated}
    listener({"event": "data", "step": run.trainer.step, **counts})
    checks = run.preflight()
    listener({"event": "preflight", "step": run.trainer.step, "text": str(checks)})
    checks.require_laws()


def _listeners(run: Run, heads_every: int | None, tensorboard: bool | None) -> list[Callable[..., None]]:
    found: list[Callable[..., None]] = [] if heads_every is None else [HeadStatistics(run, heads_every)]
    if tensorboard or (tensorboard is None and importlib.util.find_spec("tensorboard") is not None):
        found.append(TensorBoardWriter(run.folder))
    return found


def _ignore(event: dict[str, Any]) -> None:
    """The listener of progress=False."""

"""`regard train`: train a recipe or run a lesson in a folder, with a progress bar; `--list`, `--dry-run`."""

import inspect
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import SpecError, nearest
from ..training.entry import TrainingResult, read_lesson, read_recipe
from ..training.entry import train as train_recipe
from ..training.lessons import LESSONS, LessonResult
from ..training.loop.ranks import Ranks
from ..training.progress import message
from ..training.recipes import RECIPES, Recipe


def train(
    name: Annotated[
        str | None, typer.Argument(help="A recipe or a lesson (see --list), or FILE.json.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The folder of the run, by default runs/NAME; the run of a recipe is resumed."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Set a parameter, e.g. --set minutes=2 --set steps=200."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, …; by default a GPU if available, for a lesson the CPU.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Estimate cost, memory and time, and stop.")
    ] = False,
    show: Annotated[
        bool,
        typer.Option("--show", help="Print the recipe, or the lesson's settings, as JSON, ready to edit."),
    ] = False,
    heads_every: Annotated[
        int | None, typer.Option(help="Store statistics of each attention head every N updates.")
    ] = None,
    tensorboard: Annotated[
        bool | None, typer.Option(help="Write TensorBoard files; by default if it is installed.")
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(help="CPU threads; by default the quickest number, measured before training."),
    ] = None,
    list_: Annotated[
        bool, typer.Option("--list", help="List the recipes, the lessons and their parameters.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print events as JSON lines.")] = False,
) -> None:
    """Train a recipe; run the same command again to resume it.

    A lesson, T1 to T13, trains its models, prints its numbers beside what was expected, and writes a page.

    Example: regard train translate --out runs/es --set minutes=6

    Example: regard train T5 --out runs/T5
    """
    if list_:
        typer.echo("\n".join([*(_listed(n, f) for n, f in RECIPES.items()), *map(_listed_lesson, LESSONS)]))
        return
    if name is None:
        raise SpecError("which recipe or lesson? regard train --list shows them")
    options: dict[str, Any] = {"device": device, "threads": threads}
    if (lesson := read_lesson(name, **_parameters(name, set_))) is not None:
        if show:
            typer.echo(lesson.json())
            return
        options |= {"heads_every": heads_every, "tensorboard": tensorboard, **_parameters(name, set_)}
        options |= {"dry_run": dry_run, "progress": _as_json if as_json else True}
        result: Any = train_recipe(name, out=out, **options)
        _finish_lesson(result, as_json)
        return
    recipe = _read(name, set_)
    if show:
        typer.echo(recipe.json())
    elif dry_run:
        checks = train_recipe(recipe, out=out, device=device, dry_run=True)
        typer.echo(checks.json() if as_json else f"{_settings(recipe)}\n{checks}")
    else:
        options |= {"heads_every": heads_every, "tensorboard": tensorboard}
        progress: Any = _as_json if as_json else True
        _finish(train_recipe(recipe, out=out, progress=progress, **options), as_json)


def _read(name: str, given: list[str] | None) -> Recipe:
    """A recipe by its name and `--set` options, or from a JSON file."""
    if given and name.endswith(".json"):
        raise SpecError(f"--set {given[0]}: parameters belong to recipes by name; change {name} instead")
    return read_recipe(name, **_parameters(name, given))


def _parameters(name: str, given: list[str] | None) -> dict[str, Any]:
    known = inspect.signature(RECIPES[name]).parameters if name in RECIPES else {}
    parameters = {}
    for option in given or []:
        key, equals, text = option.partition("=")
        if not equals:
            raise SpecError(f"--set {option}: write parameter=value")
        if name in RECIPES and key not in known:
            raise SpecError(f"--set {option}: no parameter {key!r}; {nearest(key, known)}")
        try:
            parameters[key] = json.loads(text)
        except json.JSONDecodeError:
            parameters[key] = text
    return parameters


def _finish(result: TrainingResult, as_json: bool) -> None:
    """Print scores and paths, where this is rank 0 and the run was not interrupted."""
    if as_json or result.evaluation is None or Ranks.here().rank:
        return
    typer.echo(str(result.evaluation))
    typer.echo(f"\nmodel   {result.folder}\nreport  {result.report}")


def _as_json(event: dict[str, Any]) -> None:
    """Events of the log to stdout as JSON lines; the other messages to stderr."""
    if event["event"] in ("data", "preflight", "evaluating", "interrupted") and (text := message(event)):
        typer.echo(text, err=True)
    if event["event"] not in ("data", "preflight", "evaluating", "drawing"):
        typer.echo(json.dumps(event))


def _finish_lesson(result: Any, as_json: bool) -> None:
    """Print an estimate, or the numbers of a lesson and its page; exit code 1 where its claim fails."""
    if not isinstance(result, LessonResult):
        typer.echo(result.json() if as_json else str(result))
        return
    if not as_json:
        typer.echo(f"{result}\n\nmodels  {result.folder / 'models'}\nreport  {result.report}")
    if not result.passed:
        raise typer.Exit(1)


def _listed_lesson(number: str) -> str:
    return _listed(number, LESSONS[number], (LESSONS[number].__doc__ or "").partition(": ")[2])


def _listed(name: str, function: Any, text: str | None = None) -> str:
    parameters = [
        p.name if p.default is p.empty else f"{p.name}={p.default!r}"
        for p in inspect.signature(function).parameters.values()
        if p.name != "run"
    ]
    first = (function.__doc__ or "").splitlines()[0] if text is None else text
    return f"{name}: {first}\n    {', '.join(parameters)}"


def _settings(recipe: Recipe) -> str:
    s = recipe.settings
    length = f"{s.minutes:g} minutes" if s.minutes else f"{s.steps:,} updates"
    return f"{recipe.name}: {length}, {s.tokens * s.accumulate:,} tokens per update, {s.schedule!r}"

"""`regard train`: train a recipe or run a lesson in a folder, with a progress bar; `--list`, `--dry-run`."""

import ast
import inspect
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import SpecError, nearest
from . import names
from .options import with_options

if TYPE_CHECKING:
    from ..training.entry import TrainingResult
    from ..training.recipes import Recipe

FILES = {  # the parameters of each recipe that take the user's own files
    "translate": ("train", "valid", "test"),
    "translate-h200": ("train", "valid", "test"),
    "language-model": ("file",),
    "long-context": ("file",),
    "masked-language-model": ("train", "valid"),
    "classify": ("train", "valid"),
}


@dataclass(frozen=True)
class TrainRequest:
    """The argument and options of `regard train`, one field each."""

    name: Annotated[
        str | None,
        typer.Argument(help="A recipe or a lesson (see --list), or FILE.json.", autocompletion=names.recipes),
    ] = None
    data: Annotated[
        str | None,
        typer.Option(
            help="Train on your own file: source<TAB>target for translate, label<TAB>text for classify, one text per "
            "line otherwise; .tsv, .txt or .jsonl, also .gz."
        ),
    ] = None
    valid: Annotated[
        str | None, typer.Option(help="Validation file; by default, every twentieth line of --data.")
    ] = None
    test: Annotated[
        str | None, typer.Option(help="File for the final scores; by default, the validation lines.")
    ] = None
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the run, by default runs/NAME; an existing run is resumed."),
    ] = None
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Set a parameter, e.g. --set minutes=2 --set steps=200."),
    ] = None
    device: Annotated[
        str | None,
        typer.Option(
            help="cpu, cuda, …; by default a GPU if available (for a lesson, the CPU).",
            autocompletion=names.devices,
        ),
    ] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Estimate cost, memory and time, then stop.")] = (
        False
    )
    show: Annotated[
        bool,
        typer.Option("--show", help="Print the recipe, or the lesson's settings, as JSON, ready to edit."),
    ] = False
    heads_every: Annotated[
        int | None, typer.Option(min=1, help="Store statistics of each attention head every N updates.")
    ] = None
    tensorboard: Annotated[
        bool | None, typer.Option(help="Write TensorBoard files; by default if TensorBoard is installed.")
    ] = None
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="CPU threads; by default, the fastest number, measured first."),
    ] = None
    list_: Annotated[
        bool, typer.Option("--list", help="List the recipes, the lessons and their parameters.")
    ] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print events as JSON lines.")] = False

    @property
    def files(self) -> dict[str, str]:
        """The user's own files, by option."""
        given = {"data": self.data, "valid": self.valid, "test": self.test}
        return {option: file for option, file in given.items() if file is not None}


@partial(with_options, TrainRequest)
def train(request: TrainRequest) -> None:
    """Train a recipe; run the same command again to resume it.

    A lesson (T1 to T13) trains its models, prints its results next to the expected ones, and writes a page.

    Example: regard train translate --out runs/es --set minutes=6

    Example: regard train translate --data mine.tsv --out runs/mine

    Example: regard train T5 --out runs/T5
    """
    from ..training.entry import read_lesson
    from .devices import read_device

    if request.list_:
        typer.echo(_list())
        return
    if request.name is None:
        raise SpecError("no recipe or lesson given; `regard train --list` lists them")
    if request.device is not None:
        read_device(request.device)
    lesson = read_lesson(request.name, **_parameters(request.name, request.set_))
    if lesson is not None:
        _train_lesson(lesson, request)
    else:
        _train_recipe(_read(request.name, request.set_, request.files), request)


def _train_lesson(lesson: Any, request: TrainRequest) -> None:
    from ..training.entry import train as train_recipe

    run: Any = train_recipe  # its overloads accept only a literal dry_run
    if request.files:
        raise SpecError(
            f"--{next(iter(request.files))}: lesson {lesson.number} makes its own data; leave it out"
        )
    if request.show:
        typer.echo(lesson.json())
        return
    result = run(
        lesson.number,
        out=request.out,
        device=request.device,
        threads=request.threads,
        heads_every=request.heads_every,
        tensorboard=request.tensorboard,
        dry_run=request.dry_run,
        progress=_as_json if request.as_json else True,
        **lesson.settings,
    )
    _finish_lesson(result, request.as_json)


def _train_recipe(recipe: "Recipe", request: TrainRequest) -> None:
    from ..training.entry import train as train_recipe

    if request.show:
        typer.echo(recipe.json())
        return
    if request.dry_run:
        checks = train_recipe(recipe, out=request.out, device=request.device, dry_run=True)
        typer.echo(checks.json() if request.as_json else f"{_settings(recipe)}\n{checks}")
        return
    result = train_recipe(
        recipe,
        out=request.out,
        device=request.device,
        threads=request.threads,
        heads_every=request.heads_every,
        tensorboard=request.tensorboard,
        progress=_as_json if request.as_json else True,
    )
    _finish(result, request.as_json)


def _list() -> str:
    from ..training.lessons import LESSONS
    from ..training.recipes import RECIPES

    return "\n".join([*(_listed(n, f) for n, f in RECIPES.items()), *map(_listed_lesson, LESSONS)])


def _read(name: str, given: list[str] | None, files: dict[str, str]) -> "Recipe":
    """A recipe by its name and options, or from a JSON file."""
    from ..training.entry import read_recipe

    if name.endswith(".json"):
        if given:
            raise SpecError(f"--set {given[0]}: parameters belong to recipes by name; change {name} instead")
        if files:
            raise SpecError(f"--{next(iter(files))}: change the data in {name} instead")
    parameters, own = _parameters(name, given), _files(name, files)
    if both := [key for key in own if key in parameters]:
        raise SpecError(f"--set {both[0]}=… and --data both name the data; leave one of them out")
    return read_recipe(name, **parameters, **own)


def _files(name: str, files: dict[str, str]) -> dict[str, Any]:
    """The parameters of a recipe for --data, --valid and --test."""
    if not files or name not in names.RECIPES:
        return {}
    if name not in FILES:
        raise SpecError(f"--{next(iter(files))}: recipe {name!r} has its own data; leave it out")
    fields = dict(zip(("data", "valid", "test"), FILES[name]))
    if lacking := [option for option in files if option not in fields]:
        have = ", ".join(f"--{option}" for option in fields)
        raise SpecError(f"--{lacking[0]}: recipe {name!r} takes {have}")
    if "data" not in files:
        raise SpecError(
            f"--{next(iter(files))} {next(iter(files.values()))}: add --data, the file to train on"
        )
    for option, file in files.items():
        if not Path(file).is_file():
            raise SpecError(
                f"--{option} {file}: " + ("it is a folder" if Path(file).is_dir() else "file not found")
            )
    named: dict[str, Any] = {fields[option]: file for option, file in files.items()}
    if not name.startswith("translate"):
        return named
    from ..training.data.datasets import SentencePairs

    return {"data": SentencePairs(**named)}


def _parameters(name: str, given: list[str] | None) -> dict[str, Any]:
    from ..pattern import Pattern
    from ..training.recipes import RECIPES

    known = inspect.signature(RECIPES[name]).parameters if name in RECIPES else {}
    parameters = {}
    for option in given or []:
        key, equals, text = option.partition("=")
        if not equals:
            raise SpecError(f"--set {option}: write parameter=value")
        if name in RECIPES and key not in known:
            raise SpecError(f"--set {option}: no parameter {key!r}; {nearest(key, known)}")
        try:
            parameters[key] = _value(text, key in known and known[key].annotation is Pattern)
        except ValueError as e:  # a number with thousands of digits, or no pattern
            raise SpecError(f"--set {option if len(option) <= 40 else f'{option[:40]}…'}: {e}") from e
    return parameters


def _value(text: str, is_pattern: bool) -> Any:
    """A value as JSON, or as --list prints it: None, (4, 3), a pattern; anything else is a text."""
    from ..pattern import parse_pattern

    if is_pattern:
        return parse_pattern(text)
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        pass
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def _finish(result: "TrainingResult", as_json: bool) -> None:
    """Print scores and paths, where this is rank 0; exit code 130 where the run was interrupted."""
    from ..training.loop.ranks import Ranks

    if result.interrupted:
        raise typer.Exit(130)
    if as_json or result.evaluation is None or Ranks.here().rank:
        return
    typer.echo(str(result.evaluation))
    typer.echo(f"\nmodel   {result.folder}\nreport  {result.report}")


def _as_json(event: dict[str, Any]) -> None:
    """Events of the log to stdout as JSON lines; the other messages to stderr."""
    from ..training.progress import message

    if event["event"] in ("data", "preflight", "evaluating", "interrupted", "resume") and (
        text := message(event)
    ):
        typer.echo(text, err=True)
    if event["event"] not in ("data", "preflight", "evaluating", "drawing"):
        typer.echo(json.dumps(event))


def _finish_lesson(result: Any, as_json: bool) -> None:
    """Print an estimate, or the numbers of a lesson and its page; exit code 1 where its claim fails."""
    from ..training.lessons import LessonResult

    if not isinstance(result, LessonResult):
        typer.echo(result.json() if as_json else str(result))
        return
    if not as_json:
        typer.echo(f"{result}\n\nmodels  {result.folder / 'models'}\nreport  {result.report}")
    if not result.passed:
        raise typer.Exit(1)


def _listed_lesson(number: str) -> str:
    from ..training.lessons import LESSONS

    return _listed(number, LESSONS[number], (LESSONS[number].__doc__ or "").partition(": ")[2])


def _listed(name: str, function: Any, text: str | None = None) -> str:
    parameters = [
        p.name if p.default is p.empty else f"{p.name}={p.default!r}"
        for p in inspect.signature(function).parameters.values()
        if p.name != "run"
    ]
    first = (function.__doc__ or "").splitlines()[0] if text is None else text
    return f"{name}: {first}\n    {', '.join(parameters)}"


def _settings(recipe: "Recipe") -> str:
    s = recipe.settings
    length = f"{s.minutes:g} minutes" if s.minutes else f"{s.steps:,} updates"
    return f"{recipe.name}: {length}, {s.tokens * s.accumulate:,} tokens per update, {s.schedule!r}"

"""`regard train`: a recipe in a folder, with a bar; `--list`, `--dry-run`."""

import importlib.util
import inspect
import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import FormatError, SpecError, nearest
from ..training.lessons import LESSONS
from ..training.loop.log import Board
from ..training.recipes import RECIPES, Recipe, recipe
from ..training.recipes.run import RECIPE, Listener, Run
from ..training.report.head_statistics import Watcher
from ..training.report.page import report


def train(
    name: Annotated[str | None, typer.Argument(help="A recipe: see --list. Or RECIPE.json.")] = None,
    out: Annotated[Path | None, typer.Option(help="The folder of the run; one that exists goes on.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Turn a dial, e.g. --set minutes=2 --set d_model=128.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, …; the best there is by default.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it costs, and stop.")] = False,
    show: Annotated[
        bool, typer.Option("--show", help="Write the recipe as JSON, ready to be edited.")
    ] = False,
    heads_every: Annotated[
        int | None, typer.Option(help="Keep the statistics of each head after so many updates.")
    ] = None,
    tensorboard: Annotated[
        bool | None, typer.Option(help="Write TensorBoard's files; by default where it is installed.")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the recipes and their dials.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write events as JSON lines.")] = False,
) -> None:
    """Train a recipe; run it again in the same folder and it goes on where it was.

    Example: regard train translate --out runs/es --set minutes=6
    """
    if list_:
        lessons = [f"{number}: {(made.__doc__ or '').partition(': ')[2]}" for number, made in LESSONS.items()]
        typer.echo("\n".join([*(_listed(n) for n in RECIPES), *lessons]))
        return
    if name is None:
        raise SpecError("which recipe? regard train --list shows them")
    if name in LESSONS:
        _teach(name, as_json)
        return
    chosen = _read(name, set_)
    if show:
        typer.echo(chosen.json())
        return
    if dry_run:
        typer.echo(_dry(chosen, out, device, as_json))
        return
    typer.echo("reading the data …", err=True)
    run = Run(chosen, out or Path("runs") / chosen.name, device)
    run.ranks.first(lambda: _begin(run))
    _follow(run, as_json, _listeners(run, heads_every, tensorboard))
    if run.ranks.rank == 0:
        _end(run, as_json)


def _read(name: str, given: list[str] | None) -> Recipe:
    """A recipe by its name and its dials, or from a file."""
    if not name.endswith(".json"):
        return recipe(name, **_dials(name, given))
    if given:
        raise SpecError(f"--set {given[0]}: dials are of recipes by name; write it into {name}")
    if not Path(name).is_file():
        raise FormatError(f"there is no file {name}")
    return Recipe.from_json(Path(name).read_text(encoding="utf-8"))


def _begin(run: Run) -> None:
    """What is said before the first update; a model that breaks a law goes no further."""
    if run.ready.left_out:
        typer.echo(f"{run.ready.left_out:,} training rows are too long and were left out", err=True)
    if run.ready.cut:
        typer.echo(f"{run.ready.cut:,} training rows are too long; only their beginning is read", err=True)
    told = run.before()
    typer.echo(str(told), err=True)
    told.need_lawful()


def _listeners(run: Run, heads_every: int | None, tensorboard: bool | None) -> list[Listener]:
    if run.ranks.rank:  # events are rank 0's
        return []
    found: list[Listener] = [] if heads_every is None else [Watcher(run, heads_every)]
    if tensorboard or (tensorboard is None and importlib.util.find_spec("tensorboard") is not None):
        found.append(Board(run.folder))
    return found


def _follow(run: Run, as_json: bool, listeners: list[Listener]) -> None:
    if as_json or run.ranks.rank:
        run.train(_as_json, *listeners)
    else:
        _with_a_bar(run, listeners)


def _end(run: Run, as_json: bool) -> None:
    """Scores, examples and the report, or how to go on."""
    if run.interrupted:
        typer.echo(f"stopped after update {run.trainer.step:,}; run it again and it goes on", err=True)
        return
    typer.echo(f"trying it on {len(run.ready.test):,} test rows …", err=True)
    if as_json:
        run.evaluate(_as_json)
        _as_json({"event": "report", "step": run.trainer.step, "path": str(report(run.folder))})
        return
    typer.echo(str(run.evaluate()))
    typer.echo(f"\nmodel   {run.folder}\nreport  {report(run.folder)}")


def _as_json(event: dict[str, Any]) -> None:
    typer.echo(json.dumps(event))


def _teach(number: str, as_json: bool) -> None:
    """Run a teaching system; exit code 1 where its claim falls."""
    told = LESSONS[number]()
    fields = {"number": number, "claim": told.claim, "measured": told.measured, "passed": told.passed}
    typer.echo(json.dumps(fields) if as_json else str(told))
    if not told.passed:
        raise typer.Exit(1)


def _dials(name: str, given: list[str] | None) -> dict[str, Any]:
    known = inspect.signature(RECIPES[name]).parameters if name in RECIPES else {}
    dials = {}
    for one in given or []:
        key, equals, word = one.partition("=")
        if not equals or key not in known:
            raise SpecError(
                f"--set {one}: no dial {key!r}; {nearest(key, known)}"
                if equals
                else f"--set {one}: write dial=value"
            )
        try:
            dials[key] = json.loads(word)
        except json.JSONDecodeError:
            dials[key] = word
    return dials


def _listed(name: str) -> str:
    made = RECIPES[name]
    dials = [
        p.name if p.default is p.empty else f"{p.name}={p.default!r}"
        for p in inspect.signature(made).parameters.values()
    ]
    return f"{name}: {(made.__doc__ or '').splitlines()[0]}\n    {', '.join(dials)}"


def _dry(chosen: Recipe, out: Path | None, device: str | None, as_json: bool) -> str:
    """What the run would cost; what is made of the data for it is thrown away unless the folder is there."""
    with tempfile.TemporaryDirectory() as nowhere:
        there = out is not None and (out / RECIPE).is_file()
        run = Run(chosen, out if there and out else nowhere, device)
        told = run.before()
    s = chosen.settings
    ends = f"{s.minutes:g} minutes" if s.minutes else f"{s.steps:,} updates"
    asked = f"{chosen.name}: {ends} of {s.tokens * s.accumulate:,} tokens, {s.schedule!r}"
    return told.json() if as_json else f"{asked}\n{told}"


def _with_a_bar(run: Run, listeners: list[Listener]) -> None:
    """Loss, speed and time left on stderr while it runs."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    s = run.recipe.settings
    total = 60 * s.minutes if s.minutes else s.steps
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(file=sys.stderr)) as bar:
        line = bar.add_task("reading", total=total)

        def show(event: dict[str, Any]) -> None:
            done = run.trainer.seconds if s.minutes else run.trainer.step
            if event["event"] == "train":
                said = f"loss {event['loss']:.3f}  {event['tokens_per_second']:,} tokens/s"
                bar.update(line, completed=done, description=said)
            elif event["event"] == "valid":
                bar.console.print(f"step {event['step']:,}: validation loss {event['loss']:.3f}")

        run.train(show, *listeners)

"""`regard plan`: what fits on a GPU, and how fast it would train."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import typer

from ..errors import SpecError
from .cost import require_one
from .forms import FORMS
from .options import with_options


@dataclass(frozen=True)
class PlanRequest:
    """The argument and options of `regard plan`, one field each."""

    source: Annotated[str, typer.Argument(help=f"The model: {FORMS}.")]
    memory: Annotated[str | None, typer.Option(help="Memory of one GPU, such as 80GB.")] = None
    gpu: Annotated[
        str | None,
        typer.Option(help="GPUs to compare: b200, h200, h100, a100-80, a100-40, l40s, l4, 4090, 3090."),
    ] = None
    n: Annotated[int | None, typer.Option(help="Sequence length.")] = None
    train: Annotated[
        bool, typer.Option("--train/--inference", help="Plan a training step, or inference.")
    ] = True
    ranks: Annotated[int, typer.Option(help="GPUs that share the work (FSDP2).")] = 1
    pattern: Annotated[
        str | None, typer.Option(help="Use this attention pattern, such as 'causal() & window(256)'.")
    ] = None
    code: Annotated[
        int | None,
        typer.Option(min=1, help="Print only the program for this row of the table; 1 is the fastest."),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False


@contextmanager
def progress_bar() -> Iterator[None]:
    """A bar on stderr while the planner runs; one line if that is no terminal."""
    from ..costs.planner import PROGRESS

    try:
        from rich.console import Console
        from rich.progress import Progress
    except ModuleNotFoundError:
        Progress = None  # type: ignore[assignment]
    if Progress is None or not sys.stderr.isatty():
        typer.echo("planning …", err=True)
        yield
        return
    with Progress(console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task("planning")
        before = PROGRESS.set(
            lambda text, done, count: bar.update(task, description=text, completed=done, total=count)
        )
        try:
            yield
        finally:
            PROGRESS.reset(before)


@partial(with_options, PlanRequest)
def plan(request: PlanRequest) -> None:
    """Show what fits on a GPU, how fast it would train, and the code to run it.

    Lists the largest batch that fits for each kind of step, sorted by tokens per second.

    Example: regard plan gpt2 --gpu h100,a100-40,4090,l4 --n 1024

    regard plan config.json --memory 80GB --ranks 8

    regard plan gpt2 --gpu 4090 --code 1 > plan.py && python plan.py
    """
    from ..costs.planner import plan as find_plan
    from ..pattern.parse import parse_pattern
    from . import targets

    require_one(json=request.as_json, code=request.code is not None)
    with progress_bar():
        result = find_plan(
            targets.read(request.source),
            memory=request.memory,
            gpu=request.gpu,
            n=request.n,
            train=request.train,
            ranks=request.ranks,
            pattern=None if request.pattern is None else parse_pattern(request.pattern),
        )
    if request.code is not None:
        if request.code > len(result.choices) or not result.choices[request.code - 1].batch:
            fitting = sum(bool(c.batch) for c in result.choices)
            choices = f"there are {len(result.choices)} choices, of which {fitting} fit"
            raise SpecError(f"--code {request.code}: {choices}")
        typer.echo(result.choices[request.code - 1].code)
        return
    typer.echo(result.json() if request.as_json else str(result))

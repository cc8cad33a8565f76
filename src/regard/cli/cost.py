"""`regard cost`: what a model costs before it runs; `regard cost compare`: layer types side by side."""

import inspect
import json
import re
import sys
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ..costs.entry import cost as price
from ..costs.layer_types import compare as compared
from ..costs.memory.report import fits
from ..costs.memory.step import IMPLEMENTATIONS, OPTIMIZERS, TrainingStep
from ..costs.time import estimate, load_roofline, measure_time
from ..costs.tree import Cost
from ..errors import SpecError
from ..spec import Spec
from . import targets

UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}


class OrOf(TyperGroup):
    """`regard cost gpt2` is `regard cost of gpt2`."""

    def resolve_command(self, ctx, args):
        first = args[0] if args else ""
        return super().resolve_command(ctx, args if first in self.commands else ["of", *args])

    def parse_args(self, ctx, args):
        """An option may stand before the source."""
        if args and args[0].startswith("-") and args[0] not in ("--help", "-h"):
            args = ["of", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=OrOf,
    no_args_is_help=True,
    help="What a model costs before it runs: parameters, FLOPs, memory, time.\n\n"
    "Example: regard cost gpt2 --n 1024 --batch 8 --train --device cuda --fits 80GB",
)


@app.callback()
def cost() -> None:
    """What a model costs before it runs."""


@dataclass(frozen=True)
class Asked:
    """What `regard cost` is asked: each field is an argument or an option."""

    source: Annotated[str, typer.Argument(help=targets.FORMS)]
    n: Annotated[int | None, typer.Option(help="Queries; of an encoder-decoder the target.")] = None
    m: Annotated[int | None, typer.Option(help="Keys; of an encoder-decoder the source.")] = None
    batch: Annotated[int, typer.Option(help="Rows.")] = 1
    dtype: Annotated[str, typer.Option(help="Of the weights: float32, bfloat16, float16, float64.")] = (
        "float32"
    )
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu"
    backend: Annotated[str, typer.Option(help="By which way attention runs.")] = "auto"
    train: Annotated[bool, typer.Option("--train", help="Count a training step, too.")] = False
    optimizer: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(OPTIMIZERS)}; with an implementation: adamw:fused ({', '.join(IMPLEMENTATIONS[1:])})."
        ),
    ] = "adamw"
    autocast: Annotated[str | None, typer.Option(help="bfloat16 or float16.")] = None
    checkpointing: Annotated[bool, typer.Option("--checkpointing", help="Recompute each block.")] = False
    master_weights: Annotated[
        bool, typer.Option("--master-weights", help="float32 copies of 16-bit weights.")
    ] = False
    fits: Annotated[str | None, typer.Option(help="The largest batch and n within this memory: 80GB.")] = None
    time: Annotated[bool, typer.Option("--time", help="Estimate the time from `regard bench machine`.")] = (
        False
    )
    measure: Annotated[bool, typer.Option("--measure", help="Run it as well, and time it.")] = False
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False
    latex: Annotated[bool, typer.Option("--latex", help="Write a LaTeX table of formulas.")] = False

    @property
    def training(self) -> TrainingStep | bool:
        if not self.train:
            return False
        name, _, implementation = self.optimizer.partition(":")
        return TrainingStep(
            optimizer=name,
            implementation=implementation or "auto",
            autocast=self.autocast,
            checkpointing=True if self.checkpointing else None,
            master_weights=self.master_weights,
        )


def _with_options(run: Callable[[Asked], None]) -> Callable[..., None]:
    """A command whose options are the fields of `Asked`: seventeen arguments are one value."""

    def command(**given: Any) -> None:
        run(Asked(**given))

    kind, none = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                f.name, kind, default=none if f.default is MISSING else f.default, annotation=f.type
            )
            for f in fields(Asked)
        ]
    )
    command.__annotations__ = {f.name: f.type for f in fields(Asked)}
    command.__doc__, command.__name__ = run.__doc__, run.__name__
    return command


@app.command()
@_with_options
def of(asked: Asked) -> None:
    """Say what a model costs: parameters, FLOPs, masks, memory, time.

    Examples: regard cost transformer-base --n 128 --batch 32 --train --autocast bfloat16 --device cuda

    regard cost config.json --n 512 --json

    regard cost my.module:build_model --n 1024
    """
    thing, inputs = _read(asked.source)
    told = price(
        thing,
        *inputs,
        n=asked.n,
        m=asked.m,
        batch=asked.batch,
        dtype=asked.dtype,
        train=asked.training,
        backend=asked.backend,
        device=asked.device,
    )
    if asked.latex:
        typer.echo(told.latex)
        return
    extra = _extra(told, asked)
    if asked.as_json:
        typer.echo(
            json.dumps(told.plain() | {name: found for name, (found, _) in extra.items()}, default=str)
        )
        return
    _show(told)
    for _, text in extra.values():
        typer.echo(text)


def _read(source: str) -> tuple[Any, tuple[Any, ...]]:
    """The thing, and the inputs to run it on where a function returned both."""
    thing = targets.read(source)
    if ":" in source and inspect.isfunction(thing) and not inspect.signature(thing).parameters:
        import torch

        with torch.device("meta"):
            thing = thing()
    return (thing[0], tuple(thing[1:])) if isinstance(thing, tuple) else (thing, ())


def _extra(told: Cost, asked: Asked) -> dict[str, tuple[Any, str]]:
    """What fits, and how long it takes: for a program, and in words."""
    found: dict[str, tuple[Any, str]] = {}
    if asked.fits:
        found["fits"] = _fitting(told, asked.fits)
    if asked.time or asked.measure:
        roofline = load_roofline()
        if roofline is None:
            raise SpecError(
                "how fast this machine is has not been measured; run `regard bench machine` first"
            )
        guess = estimate(told, roofline, backward=asked.train)
        text = str(guess)
        if asked.measure:
            real = _measure(told)
            off = guess.seconds / real - 1
            text = f"measured here: {real * 1e3:.3f} ms (the estimate is {off:+.0%})\n{text}"
            found["measured"] = (real, "")
        found["time"] = (guess.plain(), text)
    return {name: (data, text) for name, (data, text) in found.items()}


def _fitting(told: Cost, asked: str) -> tuple[dict[str, int], str]:
    if told.request is None:
        raise SpecError("--fits needs a declaration: what fits is found by asking at many sizes")
    budget = size_of(asked)
    sizes = {"batch": fits(told.request, budget, "batch")}
    text = [f"within {budget:,} bytes: batch {sizes['batch']:,} at n = {told.request.n:,}"]
    if hasattr(told.request.spec, "image"):
        return sizes, text[0]
    sizes["n"] = fits(told.request, budget, "n")
    return sizes, f"{text[0]}, or n {sizes['n']:,} at batch {told.request.batch:,}"


def size_of(text: str) -> int:
    """80GB is 80 · 10⁹ bytes, 80GiB 80 · 2³⁰.

    >>> size_of("1.5GiB"), size_of("80GB"), size_of("4096")
    (1610612736, 80000000000, 4096)
    """
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]?i?)b?\s*", text.lower())
    if found is None or found[2] not in UNITS:
        raise SpecError(f"{text!r} is no amount of memory; write 80GB, 24GiB or a number of bytes")
    return int(float(found[1]) * UNITS[found[2]])


def _measure(told: Cost) -> float:
    if told.request is None or not isinstance(told.request.spec, Spec):
        raise SpecError("--measure needs a declaration, which is built and run")
    typer.echo("running it …", err=True)
    return measure_time(told.request)


def _show(told: Any) -> None:
    """A table by rich on a terminal; plain text for a file or a pipe."""
    if not sys.stdout.isatty():
        typer.echo(str(told))
        return
    from rich.console import Console

    Console().print(told)


@app.command()
def compare(
    n: Annotated[int, typer.Option(help="Length.")] = 1000,
    d: Annotated[int, typer.Option(help="Width.")] = 512,
    kernel: Annotated[int, typer.Option(help="Taps of the convolutions.")] = 3,
    w: Annotated[int, typer.Option(help="Neighbours each side of restricted attention.")] = 2,
    measure: Annotated[
        bool, typer.Option("--measure", help="Time each on this machine, and fit its growth.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
) -> None:
    """Compare attention with recurrent and convolutional layers: work, steps, path, crossing points.

    Example: regard cost compare --n 4096 --d 64 --measure
    """
    told = compared(n=n, d=d, kernel=kernel, w=w, measure=measure)
    if as_json:
        typer.echo(told.json())
        return
    _show(told)

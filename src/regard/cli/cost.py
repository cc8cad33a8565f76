"""`regard cost`: the cost of a model before it runs; `regard cost compare`: layer types side by side."""

import inspect
import json
import sys
from dataclasses import dataclass, fields
from functools import partial
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ..errors import SpecError
from .forms import FORMS
from .options import with_options


class DefaultToOf(TyperGroup):
    """`regard cost gpt2` means `regard cost of gpt2`."""

    def resolve_command(self, ctx, args):
        """`of` is left out of the usage line, as it is on the command line."""
        name, command, rest = super().resolve_command(
            ctx, args if args and args[0] in self.commands else ["of", *args]
        )
        return "" if name == "of" else name, command, rest

    def parse_args(self, ctx, args):
        """Options are allowed before the model; --help shows those of a model."""
        return super().parse_args(ctx, ["of", *args] if args and args[0].startswith("-") else args)


app = typer.Typer(
    cls=DefaultToOf,
    no_args_is_help=True,
    help="Show what a model costs before it runs: parameters, FLOPs, memory, time.\n\n"
    "Example: regard cost gpt2 --n 1024 --batch 8 --train --device cuda --fits 80GB",
)


@app.callback()
def cost() -> None:
    """The cost of a model before it runs."""


@dataclass(frozen=True)
class CostRequest:
    """The arguments and options of `regard cost`, one field each."""

    source: Annotated[str, typer.Argument(help=f"The model: {FORMS}.")]
    n: Annotated[
        int | None, typer.Option(help="Number of queries; for an encoder-decoder, the target length.")
    ] = None
    m: Annotated[
        int | None, typer.Option(help="Number of keys; for an encoder-decoder, the source length.")
    ] = None
    batch: Annotated[int, typer.Option(help="Batch size.")] = 1
    dtype: Annotated[str, typer.Option(help="Dtype of the weights: float32, bfloat16, float16, float64.")] = (
        "float32"
    )
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu"
    backend: Annotated[str, typer.Option(help="Attention backend.")] = "auto"
    train: Annotated[bool, typer.Option("--train", help="Price a training step.")] = False
    depth: Annotated[int | None, typer.Option(min=0, help="Show the tree of parts to this depth.")] = None
    optimizer: Annotated[
        str,
        typer.Option(
            help="sgd, momentum, adam, adamw or adamw8bit; adamw:fused names an implementation "
            "(for_loop, foreach, fused)."
        ),
    ] = "adamw"
    autocast: Annotated[str | None, typer.Option(help="Autocast dtype: bfloat16 or float16.")] = None
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Use activation checkpointing for each block.")
    ] = False
    reentrant: Annotated[
        bool, typer.Option("--reentrant", help="With --checkpointing: PyTorch's reentrant variant.")
    ] = False
    master_weights: Annotated[
        bool, typer.Option("--master-weights", help="Keep float32 copies of 16-bit weights.")
    ] = False
    accumulate: Annotated[int, typer.Option(help="Batches per optimizer step.")] = 1
    frozen: Annotated[str, typer.Option(help="Parameters that are not trained, by name: 'embed*,head*'.")] = (
        ""
    )
    lora: Annotated[int, typer.Option(help="Train LoRA adapters of this rank; freeze the rest.")] = 0
    ranks: Annotated[
        int, typer.Option(help="GPUs that share the weights (FSDP2); prints the peak of one of them too.")
    ] = 1
    ddp: Annotated[bool, typer.Option("--ddp", help="With --ranks: each GPU holds all weights (DDP).")] = (
        False
    )
    fits: Annotated[
        str | None, typer.Option(help="Print the largest batch and n that fit, given a memory such as 80GB.")
    ] = None
    time: Annotated[bool, typer.Option("--time", help="Estimate time, from `regard bench machine`.")] = False
    measure: Annotated[bool, typer.Option("--measure", help="Also run it and measure its time.")] = False
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False
    latex: Annotated[bool, typer.Option("--latex", help="Write a LaTeX table of formulas.")] = False

    @property
    def training(self) -> Any:
        """The TrainingStep, or False."""
        from ..costs.memory.step import TrainingStep
        from ..spec.base import require_positive

        name, _, implementation = self.optimizer.partition(":")
        step = TrainingStep(
            optimizer=name,
            implementation=implementation or "auto",
            autocast=self.autocast,
            checkpointing=("reentrant" if self.reentrant else True) if self.checkpointing else None,
            master_weights=self.master_weights,
            accumulate=self.accumulate,
            frozen=tuple(filter(None, self.frozen.split(","))),
            lora=self.lora,
        )
        require_positive("ranks", self.ranks)
        for option, needs, given in (
            ("reentrant", "checkpointing", self.checkpointing),
            ("ddp", "ranks", self.ranks > 1),
        ):
            if getattr(self, option) and not given:
                raise SpecError(f"--{option} needs --{needs}")
        if not self.train and (step != TrainingStep() or self.ranks > 1):
            unused = [f.name for f in fields(step) if getattr(step, f.name) != f.default] or ["ranks"]
            raise SpecError(f"--{unused[0].replace('_', '-')} is an option of a training step: add --train")
        return step if self.train else False


@app.command()
@partial(with_options, CostRequest)
def of(request: CostRequest) -> None:
    """Show what a model costs before it runs: parameters, FLOPs, memory, time.

    Examples: regard cost transformer-base --n 128 --batch 32 --train --autocast bfloat16 --device cuda

    regard cost config.json --n 512 --json

    regard cost my.module:build_model --n 1024

    regard cost compare --help    (layer types side by side)
    """
    from ..costs.entry import cost as price

    require_one(json=request.as_json, latex=request.latex)
    thing, inputs = _read(request.source)
    result = price(
        thing,
        *inputs,
        n=request.n,
        m=request.m,
        batch=request.batch,
        dtype=request.dtype,
        train=request.training,
        backend=request.backend,
        device=request.device,
    )
    if request.latex:
        typer.echo(result.latex)
        return
    result.memory  # noqa: B018 (computed now, so that the table has it)
    extra = _extra(result, request)
    if request.as_json:
        typer.echo(
            json.dumps(result.plain() | {name: data for name, (data, _) in extra.items()}, default=str)
        )
        return
    _show(result.table(request.depth))
    for _, text in extra.values():
        typer.echo(text)


def require_one(**forms: bool) -> None:
    """At most one form of output was requested."""
    wanted = [f"--{name}" for name, given in forms.items() if given]
    if len(wanted) > 1:
        raise SpecError(f"{' and '.join(wanted)} are two forms of output; choose one")


def _read(source: str) -> tuple[Any, tuple[Any, ...]]:
    """The model, and its inputs if a function returned both."""
    from . import targets

    thing = targets.read(source)
    if ":" in source and inspect.isfunction(thing) and not inspect.signature(thing).parameters:
        from ..costs.subject import built

        thing = built(thing)
    if isinstance(thing, tuple) and not thing:
        raise SpecError(f"{source} returned an empty tuple; return a model, or a model and its inputs")
    return (thing[0], tuple(thing[1:])) if isinstance(thing, tuple) else (thing, ())


def _extra(result: Any, request: CostRequest) -> dict[str, tuple[Any, str]]:
    """What fits and the time it takes, each as data and as text."""
    from ..costs.time import estimate
    from ..machine import load_roofline, readable

    extra: dict[str, tuple[Any, str]] = {}
    if request.ranks > 1:
        strategy = "ddp" if request.ddp else "fsdp"
        one = result.memory.per_rank(request.ranks, strategy)
        peaks = f"peak {readable(one.peak)}, taken from the device {readable(one.reserved)}"
        text = f"each of {request.ranks} ranks ({'DDP' if request.ddp else 'FSDP2'}): {peaks}"
        data = {"ranks": request.ranks, "strategy": strategy, "peak": one.peak, "reserved": one.reserved}
        extra["per_rank"] = (data, text)
    if request.fits:
        extra["fits"] = _fitting(result, request)
    if request.time or request.measure:
        roofline = load_roofline()
        if roofline is None:
            raise SpecError("this machine has not been measured; run `regard bench machine` first")
        guess = estimate(result, roofline)
        text = str(guess)
        if request.measure:
            real = _measure(result)
            off = guess.seconds / real - 1
            text = f"measured here: {real * 1e3:.3f} ms (the estimate is {off:+.0%})\n{text}"
            extra["measured"] = (real, "")
        extra["time"] = (guess.plain(), text)
    return {name: (data, text) for name, (data, text) in extra.items()}


def _fitting(result: Any, request: CostRequest) -> tuple[dict[str, int], str]:
    from ..machine import bytes_of, readable

    budget = bytes_of(request.fits or "")
    sizes = {"batch": result.fits(budget, "batch")}
    text = f"within {readable(budget)} ({budget:,} bytes): batch {sizes['batch']:,}"
    try:
        sizes["n"] = result.fits(budget, "n")
    except SpecError:  # the image size determines n
        return sizes, text
    return sizes, f"{text}, or n {sizes['n']:,} at batch {request.batch:,}"


def _measure(result: Any) -> float:
    from ..costs.time import measure_time

    if result.request is None:
        raise SpecError("--measure needs a declaration, so that it can be built and run")
    typer.echo("running it …", err=True)
    return measure_time(result.request)


def _show(result: Any) -> None:
    """A rich table on a terminal; plain text in a file or a pipe."""
    tables = result.tables() if hasattr(result, "tables") else [result]
    if not sys.stdout.isatty():
        typer.echo("\n\n".join(t.text() for t in tables))
        return
    from rich.console import Console

    Console().print(*(t.rich() for t in tables), sep="\n")


@app.command()
def compare(
    n: Annotated[int, typer.Option(help="Sequence length.")] = 1000,
    d: Annotated[int, typer.Option(help="Model width.")] = 512,
    kernel: Annotated[int, typer.Option(help="Kernel size of the convolutions.")] = 3,
    w: Annotated[int, typer.Option(help="Neighbors on each side of restricted attention.")] = 2,
    measure: Annotated[
        bool, typer.Option("--measure", help="Time each on this machine and fit its growth.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
) -> None:
    """Compare attention with recurrent and convolutional layers: FLOPs, steps, path length, crossover lengths.

    Example: regard cost compare --n 4096 --d 64 --measure
    """
    from ..costs.layer_types import compare as compared

    result = compared(n=n, d=d, kernel=kernel, w=w, measure=measure)
    if as_json:
        typer.echo(result.json())
        return
    _show(result)

"""The command `regard` and its subcommands."""

import errno
import importlib
import json
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import regard

from ..errors import RegardError
from . import names
from .forms import FORMS

# The commands that have a file of their own, with the line that `regard --help` shows. A module is imported when its
# command is used. It has a function of the command's name, or an `app` of several subcommands.
COMMANDS = {
    "cost": "Show what a model costs before it runs: parameters, FLOPs, memory, time.",
    "plan": "Show what fits on a GPU, how fast it would train, and the code to run it.",
    "check": "Run the laws of attention on a function, a module or a model from any library.",
    "look": "Show what each head of a model attends to, while the model runs its usual kernels.",
    "train": "Train a recipe; run the same command again to resume it.",
    "report": "Write report.html to the folder of a run: curves, examples, attention maps, cost, laws.",
    "translate": "Translate English to Spanish, or use a model trained by `regard train translate`.",
    "export": "Export a trained translator to another program's format, with the same translations.",
    "bench": "Measure the speed of this machine.",
    "serve": "Serve a local web page: heads, translation, patterns, cost, laws and training runs.",
}


# An empty value of these, as of an unset shell variable, would be the current folder, or would be ignored.
NOT_EMPTY = {
    "--out", "--html", "--model", "--file", "--runs", "--data", "--valid", "--test", "--fits", "--memory", "--gpu",
    "--autocast", "--frozen",
}  # fmt: skip


class Commands(TyperGroup):
    """The subcommands. Their modules are imported when a command is used, not to list it.

    There are no annotations with click's types, because newer releases of typer contain their own copy of click.
    """

    listing = False

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *COMMANDS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        return TyperCommand(cmd_name, help=COMMANDS[cmd_name]) if self.listing else load_command(cmd_name)

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        for option, value in zip(args, [*args[1:], "-"]):
            name = option.removesuffix("=")
            if name in NOT_EMPTY and (name != option or not value):
                raise regard.SpecError(f"{name} is empty: give a value, or leave it out")
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Ctrl-C gives exit code 130 in every release of typer."""
        try:
            return super().invoke(ctx)
        except OverflowError as e:  # a size with thirty digits, in any formula
            raise regard.SpecError(f"a number is too large: {e}") from e
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(130) from None

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self.listing = False


def load_command(name: str) -> Any:
    """The command that a module defines."""
    loaded = importlib.import_module("..web.serve" if name == "serve" else f".{name}", __package__)
    if hasattr(loaded, "app"):
        command = typer.main.get_group(loaded.app)
        command.name = name
        return command
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False, context_settings=CONTEXT)
    single.command(name=name)(getattr(loaded, name))
    return typer.main.get_command(single)


CONTEXT = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(
    name="regard",
    cls=Commands,
    help="Attention you can declare, run, price, prove, train and see.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings=CONTEXT,
)
AsJson = Annotated[bool, typer.Option("--json", help="Write JSON.")]


def _version(requested: bool) -> bool:
    if requested:
        typer.echo(f"regard {regard.__version__}")
        raise typer.Exit
    return requested


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Attention you can declare, run, price, prove, train and see."""


@app.command()
def presets(as_json: AsJson = False) -> None:
    """List the presets.

    Example: regard presets
    """
    names = regard.presets()
    typer.echo(json.dumps(list(names)) if as_json else "\n".join(names))


@app.command()
def show(
    source: Annotated[str, typer.Argument(help=f"The model: {FORMS}.", autocompletion=names.models)],
) -> None:
    """Print a declaration as JSON, which can be edited and read back.

    Example: regard show gpt2 > mine.json
    """
    from . import targets

    declared = targets.read(source)
    declared = getattr(declared, "spec", declared)
    if not isinstance(declared, regard.Spec):
        raise regard.SpecError(f"{source} is a {type(declared).__name__}, not a declaration of regard")
    typer.echo(declared.json(indent=1))


@app.command()
def explain(
    pattern: Annotated[
        str, typer.Argument(help="A pattern, written as in Python: 'causal() & (window(128) | every(64))'.")
    ],
    n: Annotated[int, typer.Option(min=1, help="Number of queries and keys.")] = 1024,
    device: Annotated[str, typer.Option(help="cpu or cuda.", autocompletion=names.devices)] = "cpu",
    draw: Annotated[bool, typer.Option(help="Draw the first 16 rows.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show how a pattern would run: pairs needed, pairs computed, the backend and why it was chosen.

    Example: regard explain 'causal() & (window(128) | every(64))' --n 16384
    """
    from ..pattern import parse_pattern

    declared = parse_pattern(pattern)
    if as_json and draw:
        raise regard.SpecError("--json and --draw are two forms of output; choose one")
    if device not in ("cpu", "cuda"):
        raise regard.SpecError(f"unknown device {device!r}; use cpu or cuda")
    explanation = regard.explain(declared, n=n, device=device)
    if as_json:
        fields = ("n", "m", "rows", "needed", "computed", "waste", "backend", "variant", "reason", "passes")
        typer.echo(json.dumps({"pattern": repr(declared), **{f: getattr(explanation, f) for f in fields}}))
        return
    if draw:
        typer.echo(str(declared.draw(min(n, 16))) + "\n")
    typer.echo(str(explanation))


def run() -> None:
    """The console script: a RegardError or a file that cannot be used is one line on stderr and exit code 2."""
    try:
        app()
    except RegardError as e:
        _refuse(str(e))
    except BrokenPipeError:  # the reader of a pipe, such as head, has left
        sys.stdout = None
        sys.exit(1)
    except OSError as e:
        if e.errno == errno.ENOSPC:  # also of stdout, which has no name
            _refuse(f"cannot write {e.filename or 'the output'}: {e.strerror}")
        if e.filename is None:
            raise
        _refuse(f"{e.filename}: {e.strerror}")


def _refuse(message: str) -> None:
    typer.echo(f"error: {message}", err=True)
    sys.exit(2)

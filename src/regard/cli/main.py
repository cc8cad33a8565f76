"""The command `regard` and its subcommands."""

import importlib
import json
import sys
from typing import Annotated

try:
    import typer
except ModuleNotFoundError as e:  # the console script is installed with the core
    sys.exit(f"error: {e}; the command line needs an extra: pip install 'regard[cli]'")

import regard

from ..errors import RegardError
from ..pattern import parse_pattern
from . import targets

app = typer.Typer(
    name="regard",
    help="Attention you can declare, run, price, prove, train and see.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
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
def show(source: Annotated[str, typer.Argument(help=targets.FORMS)]) -> None:
    """Print a declaration as JSON; it can be edited and read back.

    Example: regard show gpt2 > mine.json
    """
    declared = targets.read(source)
    declared = getattr(declared, "spec", declared)
    if not isinstance(declared, regard.Spec):
        raise regard.SpecError(f"{source} is a {type(declared).__name__}, not a declaration of regard")
    typer.echo(declared.json(indent=1))


@app.command()
def explain(
    pattern: Annotated[str, typer.Argument(help="As in Python: 'causal() & (window(128) | every(64))'.")],
    n: Annotated[int, typer.Option(min=1, help="Number of queries and keys.")] = 1024,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    draw: Annotated[bool, typer.Option(help="Draw the first 16 rows.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show how a pattern would run: pairs needed, pairs computed, the backend and the reason.

    Example: regard explain 'causal() & (window(128) | every(64))' --n 16384
    """
    declared = parse_pattern(pattern)
    explanation = regard.explain(declared, n=n, device=device)
    if as_json:
        fields = ("n", "m", "needed", "computed", "waste", "backend", "reason", "passes")
        typer.echo(json.dumps({"pattern": repr(declared), **{f: getattr(explanation, f) for f in fields}}))
        return
    if draw:
        typer.echo(str(declared.draw(min(n, 16))) + "\n")
    typer.echo(str(explanation))


# One file per command, with a function of the same name or an `app` of several subcommands.
COMMANDS = ("cost", "check", "look", "train", "report", "translate", "export", "bench", "serve")
for name in COMMANDS:
    module = importlib.import_module(f".{name}" if name != "serve" else "..web.serve", __package__)
    if hasattr(module, "app"):
        app.add_typer(module.app, name=name)
    else:
        app.command(name=name)(getattr(module, name))


def run() -> None:
    """The console script: a RegardError is one line on stderr and exit code 2."""
    try:
        app()
    except RegardError as e:
        typer.echo(f"error: {e}", err=True)
        sys.exit(2)

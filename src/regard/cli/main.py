"""`regard`: the verbs by name."""

import importlib
import json
import sys
from typing import Annotated

try:
    import typer
except ModuleNotFoundError as e:  # the console script is installed with the core
    sys.exit(f"error: {e}; the command line needs more: pip install 'regard[cli]'")

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


def _version(asked: bool) -> bool:
    if asked:
        typer.echo(f"regard {regard.__version__}")
        raise typer.Exit
    return asked


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say the version.")
    ] = False,
) -> None:
    """Attention you can declare, run, price, prove, train and see."""


@app.command()
def presets(as_json: AsJson = False) -> None:
    """List the declarations that have a name.

    Example: regard presets
    """
    names = regard.presets()
    typer.echo(json.dumps(list(names)) if as_json else "\n".join(names))


@app.command()
def show(source: Annotated[str, typer.Argument(help=targets.FORMS)]) -> None:
    """Write a declaration as JSON, ready to be edited and read back.

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
    n: Annotated[int, typer.Option(min=1, help="How many queries (and keys).")] = 1024,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    draw: Annotated[bool, typer.Option(help="Draw the first 16 rows.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say how a pattern would run: pairs needed, pairs computed, by which way and why.

    Example: regard explain 'causal() & (window(128) | every(64))' --n 16384
    """
    declared = parse_pattern(pattern)
    told = regard.explain(declared, n=n, device=device)
    if as_json:
        fields = ("n", "m", "needed", "computed", "waste", "backend", "reason", "passes")
        typer.echo(json.dumps({"pattern": repr(declared), **{f: getattr(told, f) for f in fields}}))
        return
    if draw:
        typer.echo(str(declared.draw(min(n, 16))) + "\n")
    typer.echo(str(told))


# One file a verb, with a function of the same name or a `app` of several commands; the page's own is with the page.
VERBS = ("cost", "check", "look", "train", "report", "translate", "export", "bench", "serve")
for verb in VERBS:
    module = importlib.import_module(f".{verb}" if verb != "serve" else "..web.serve", __package__)
    if hasattr(module, "app"):
        app.add_typer(module.app, name=verb)
    else:
        app.command(name=verb)(getattr(module, verb))


def run() -> None:
    """The console script: an error of ours is one line on stderr and exit code 2."""
    try:
        app()
    except RegardError as e:
        typer.echo(f"error: {e}", err=True)
        sys.exit(2)

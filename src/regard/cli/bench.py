"""`regard bench`: measure this machine."""

from pathlib import Path
from typing import Annotated

import typer

from . import names

app = typer.Typer(help="Measure the speed of this machine.", no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure the speed of this machine."""


@app.command()
def machine(
    device: Annotated[
        str,
        typer.Option(help="cpu or cuda; by default, a GPU if there is one.", autocompletion=names.devices),
    ] = "",
    path: Annotated[
        Path | None, typer.Option(help="The file to write; by default, in the user's cache folder.")
    ] = None,
    size: Annotated[int | None, typer.Option(min=64, max=32768, help="Size of the square matrices.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
) -> None:
    """Measure the rates of matrix products and memory, and store them for `regard cost --time`.

    Example: regard bench machine
    """
    import torch

    from ..machine import measure, save_roofline
    from .devices import read_device

    device = read_device(device) if device else ("cuda" if torch.cuda.is_available() else "cpu")
    typer.echo(f"measuring {device}; this takes a few seconds …", err=True)
    roofline = measure(device, size)
    stored = save_roofline(roofline, path)
    typer.echo(roofline.json(indent=1) if as_json else str(roofline))
    typer.echo(f"stored in {stored}", err=True)

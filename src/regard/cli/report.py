"""`regard report`: the page of a run, written anew."""

from pathlib import Path
from typing import Annotated

import typer

from ..training.report.page import report as written


def report(run: Annotated[Path, typer.Argument(help="The folder of a run.")]) -> None:
    """Write report.html in the folder of a run: curves, examples, maps, cost, laws.

    Example: regard report runs/translate
    """
    typer.echo(str(written(run)))

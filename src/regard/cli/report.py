"""`regard report`: write the report of a run again."""

from pathlib import Path
from typing import Annotated

import typer

from ..training.report.page import report as write_report


def report(run: Annotated[Path, typer.Argument(help="The folder of a run.")]) -> None:
    """Write report.html in the folder of a run: curves, examples, attention maps, cost, laws.

    Example: regard report runs/translate
    """
    typer.echo(str(write_report(run)))

"""`regard report`: write the report of a run again."""

import json
from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the path of the page as JSON.")] = False,
) -> None:
    """Write report.html to the folder of a run: curves, examples, attention maps, cost, laws.

    Example: regard report runs/translate
    """
    from ..training.report.page import report as write_report

    path = write_report(run)
    typer.echo(json.dumps({"page": str(path)}) if as_json else str(path))

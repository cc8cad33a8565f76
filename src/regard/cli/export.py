"""`regard export`: write a trained run in the format of another program."""

import json
from pathlib import Path
from typing import Annotated

import typer


def export(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    out: Annotated[Path, typer.Option(help="A new folder to write to.")],
    to: Annotated[str, typer.Option(help="The format: ctranslate2.")] = "ctranslate2",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Export a trained translator to another program's format, with the same translations.

    Example: regard export runs/translate --out runs/translate-ct2
    """
    from ..training.recipes.export import export as export_run

    folder = export_run(run, out, to)
    files = {f.name: f.stat().st_size for f in sorted(folder.iterdir())}
    if as_json:
        typer.echo(json.dumps({"folder": str(folder), "format": to, "bytes": files}))
        return
    for name, size in files.items():
        typer.echo(f"{folder / name}  {size:,} bytes")

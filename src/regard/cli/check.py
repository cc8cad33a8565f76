"""`regard check`: the laws on any attention."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import RegardError, SpecError
from ..laws.adapters import adapt
from ..laws.catalogue import LAWS
from ..laws.checker import check as run
from ..laws.judge import Budget
from ..laws.law import Outcome
from ..laws.verdict import MARK, Verdict
from . import targets

COLOURS = {"holds": "green", "broken": "bold red", "raised": "bold red", "not promised": "yellow"}


def check(
    target: Annotated[
        str | None,
        typer.Argument(help=f"{targets.FORMS}; a class is built with --heads, --d-model, --layers."),
    ] = None,
    law: Annotated[
        list[str] | None, typer.Option(help="Only this law, by number or name; repeatable.")
    ] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Heads of a class that is built.")] = None,
    d_model: Annotated[int | None, typer.Option(min=1, help="Width of a class that is built.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers of a class that is built.")] = None,
    claim: Annotated[
        list[str] | None, typer.Option(help="Check this promise as if the target claimed it; repeatable.")
    ] = None,
    cases: Annotated[int, typer.Option(min=1, help="Cases per law.")] = Budget().cases,
    html: Annotated[Path | None, typer.Option(help="Also write an HTML report to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
    listed: Annotated[bool, typer.Option("--list", help="List the laws and stop.")] = False,
) -> None:
    """Run the laws of attention on a function, a module or a model of any library.

    Exit code 0: every law that applies holds. 1: a law is broken. 2: no law could run, or a bad request.

    Examples: regard check torch.nn.functional:scaled_dot_product_attention

    regard check torch.nn:MultiheadAttention --heads 4

    regard check hf:gpt2-config.json

    regard check my.module:my_attention --law causality
    """
    if listed:
        typer.echo(_list(as_json))
        return
    if target is None:
        raise SpecError(f"no target; give {targets.FORMS}; --list lists the laws")
    options = {"heads": heads, "d_model": d_model, "layers": layers}
    sizes: dict[str, Any] = {name: size for name, size in options.items() if size is not None}
    thing = adapt(_read(target), claims=set(claim or ()), **sizes)
    typer.echo(f"checking {thing.name} …", err=True)
    verdict = run(thing, law or None, Budget(cases=cases))
    if html is not None:
        _write(html, verdict)
    typer.echo(verdict.json()) if as_json else _show(verdict)
    raise typer.Exit(verdict.exit_code)


def _read(target: str) -> Any:
    try:
        return targets.read(target)
    except RegardError:
        raise
    except Exception as e:  # foreign code may raise anything while it is imported
        raise SpecError(f"{target}: importing it raised {type(e).__name__}: {e}") from e


def _write(path: Path, verdict: Verdict) -> None:
    from ..laws.html_report import page

    try:
        path.write_text(page(verdict), encoding="utf-8")
    except OSError as e:
        raise SpecError(f"cannot write {path}: {e.strerror}") from e
    typer.echo(f"wrote {path}", err=True)


def _list(as_json: bool) -> str:
    if as_json:
        fields = ("number", "name", "formula", "domain", "promise")
        return json.dumps(
            [{f: getattr(each, f) for f in fields} for each in LAWS], indent=1, ensure_ascii=False
        )
    width = max(len(each.name) for each in LAWS)
    return "\n".join(f"{each.number} {each.name:{width}}  {each.formula}" for each in LAWS)


def _show(verdict: Verdict) -> None:
    """A table on a terminal, plain lines otherwise."""
    plain = "\n".join(
        [str(verdict), *(f"\n# {o.law.number} {o.law.name}\n{o.snippet}" for o in verdict.broken)]
    )
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ModuleNotFoundError:
        typer.echo(plain)
        return
    if not sys.stdout.isatty():
        typer.echo(plain)
        return
    table = Table(title=Text(verdict.headline()), box=None, title_justify="left", pad_edge=False)
    for column in ("", "law", "", "cases", "error / tolerance", "message"):
        table.add_column(column, overflow="fold")
    for o in verdict.outcomes:
        colour = COLOURS.get(o.status, "dim")
        measured = f"{o.worst:.1e} / {o.tolerance:.0e}" if o.ran else ""
        row = (
            f"{MARK[o.status]} {o.law.number}",
            o.law.name,
            o.status,
            str(o.cases or ""),
            measured,
            _message(o),
        )
        table.add_row(*(Text(cell, style=colour if i in (0, 2) else "") for i, cell in enumerate(row)))
    console = Console()
    console.print(table)
    for o in verdict.broken:
        console.print(Text(f"\n{o.law.number} {o.law.name}: {o.law.formula}\n{o.snippet}"))


def _message(o: Outcome) -> str:
    return o.message if o.counterexample is None else f"{o.message}; smallest case: {o.counterexample}"

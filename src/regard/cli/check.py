"""`regard check`: the laws on any attention."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import RegardError, SpecError
from . import names
from .forms import FORMS

if TYPE_CHECKING:
    from ..laws.law import Outcome
    from ..laws.verdict import Verdict

COLORS = {"holds": "green", "broken": "bold red", "raised": "bold red", "not promised": "yellow"}


KINDS = "attention, function, decoder, layer-norm, rms-norm, batch-norm, feed-forward, rotary, positions or schedule"
SETTINGS = (
    'Further settings of the target, name=value, repeatable: layout="b n h d", mask=keep or mask=hide (what True '
    "means), lacks=grad, call_seconds=10 (the time limit of one call), layers=2 and other sizes of a class, "
    "warmup=40 and other parameters of a part."
)


def check(
    target: Annotated[
        str | None,
        typer.Argument(
            help=f"The target: {FORMS}; a class or factory is called with --heads and --d-model.",
            autocompletion=names.models,
        ),
    ] = None,
    law: Annotated[
        list[str] | None,
        typer.Option(
            help="Run only this law, by number (L29) or name (causality); repeatable.",
            autocompletion=names.laws,
        ),
    ] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Number of heads to build a class with.")] = None,
    d_model: Annotated[int | None, typer.Option(min=1, help="Width to build a class with.")] = None,
    claim: Annotated[
        list[str] | None, typer.Option(help="Check this promise as if the target claimed it; repeatable.")
    ] = None,
    kind: Annotated[
        str | None, typer.Option("--as", help=f"What the target is, if it is not detected: {KINDS}.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="The device to run on, such as cuda.", autocompletion=names.devices),
    ] = None,
    setting: Annotated[list[str] | None, typer.Option("--with", help=SETTINGS)] = None,
    cases: Annotated[int, typer.Option(min=1, help="Cases per law.")] = 40,
    html: Annotated[Path | None, typer.Option(help="Also write an HTML report to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
    listed: Annotated[bool, typer.Option("--list", help="List the laws and stop.")] = False,
) -> None:
    """Run the laws of attention on a function, a module or a model from any library.

    Exit code 0: every law that applies holds. 1: a law is broken. 2: no law could run, or the request was invalid.

    Examples: regard check torch.nn.functional:scaled_dot_product_attention

    regard check torch.nn:MultiheadAttention --heads 4

    regard check hf:gpt2-config.json

    regard check attention.py:my_attention --law causality --with layout="b n h d" --with mask=hide

    regard check blocks.py:make_norm --as layer-norm
    """
    if listed:
        typer.echo(_list(as_json))
        return
    if target is None:
        raise SpecError(f"no target; give {FORMS}; --list lists the laws")
    if html is not None and not html.parent.is_dir():  # before the laws run
        raise SpecError(f"--html {html}: there is no folder {html.parent}")
    from ..laws.checker import check as run
    from ..laws.run_law import Budget
    from .devices import read_device

    if device is not None:
        read_device(device)
    options = {"heads": heads, "d_model": d_model, "kind": kind, "device": device}
    more, seconds = _settings(setting or [])
    more |= {name: value for name, value in options.items() if value is not None}
    thing = _adapted(target, claims=set(claim or ()), **more)
    typer.echo(f"checking {thing.name} …", err=True)
    verdict = run(thing, law or None, Budget(cases=cases), call_seconds=seconds)
    if html is not None:
        _write(html, verdict)
    typer.echo(verdict.json()) if as_json else _show(verdict)
    raise typer.Exit(verdict.exit_code)


def _settings(given: list[str]) -> tuple[dict[str, Any], float | int | None]:
    """From name=value pairs: hints about the target, sizes of a class, parameters of a part; the limit of a call."""
    more: dict[str, Any] = {"lacks": set(), "facts": {}}
    seconds = None
    for each in given:
        name, equals, value = each.partition("=")
        if not equals:
            raise SpecError(f"--with {each!r} is not of the form name=value; {SETTINGS}")
        if name == "lacks":
            more["lacks"].add(value)
        elif name in ("layout", "mask"):
            more[name] = value
        elif name == "call_seconds":
            seconds = _number(each, value)
        elif name in ("lr_max", "warmup", "total", "eps", "width"):
            more["facts"][name] = _number(each, value)
        else:
            more[name] = _number(each, value)
    return more, seconds


def _number(each: str, value: str) -> float | int:
    try:
        return float(value) if "." in value or "e" in value else int(value)
    except ValueError as e:
        raise SpecError(f"--with {each!r}: {value!r} is not a number") from e


def _adapted(target: str, **options: Any) -> Any:
    """The target behind an adapter. Foreign code may raise anything while it is imported or built."""
    from ..laws.adapters import adapt
    from . import targets

    act = "importing"
    try:
        thing = targets.read(target)
        act = "building"
        return adapt(thing, **options)
    except RegardError:
        raise
    except Exception as e:
        given = {"--heads": options.get("heads"), "--d-model": options.get("d_model")}
        sizes = " with " + " ".join(f"{k} {v}" for k, v in given.items() if v is not None)
        where = sizes if act == "building" and sizes != " with " else ""
        raise SpecError(f"{target}: {act} it{where} raised {type(e).__name__}: {e}") from e


def _write(path: Path, verdict: "Verdict") -> None:
    from ..laws.html_report import page

    try:
        path.write_text(page(verdict), encoding="utf-8")
    except OSError as e:
        raise SpecError(f"cannot write {path}: {e.strerror}") from e
    typer.echo(f"wrote {path}", err=True)


def _list(as_json: bool) -> str:
    from ..laws.catalogue import LAWS

    if as_json:
        fields = ("number", "name", "formula", "domain", "promise")
        return json.dumps(
            [{f: getattr(each, f) for f in fields} for each in LAWS], indent=1, ensure_ascii=False
        )
    width = max(len(each.name) for each in LAWS)
    return "\n".join(f"{each.number} {each.name:{width}}  {each.formula}" for each in LAWS)


def _show(verdict: "Verdict") -> None:
    """A table on a terminal, plain lines otherwise. If a cause was found, one snippet is shown."""
    from ..laws.verdict import MARK

    shown = verdict.broken if verdict.cause is None else verdict.broken[:1]
    shown = () if verdict.failure is not None else shown
    plain = "\n".join([str(verdict), *(f"\n# {o.law.number} {o.law.name}\n{o.snippet}" for o in shown)])
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
        color = COLORS.get(o.status, "dim")
        measured = f"{o.worst:.1e} / {o.tolerance:.0e}" if o.ran else ""
        row = (
            f"{MARK[o.status]} {o.law.number}",
            o.law.name,
            o.status,
            str(o.cases or ""),
            measured,
            _message(o),
        )
        table.add_row(*(Text(cell, style=color if i in (0, 2) else "") for i, cell in enumerate(row)))
    console = Console()
    for line in (*verdict.notes(), *verdict.explanation()):
        console.print(
            Text(line, style="bold red" if line.startswith(("likely cause", "symptom", "✗")) else "")
        )
    if verdict.failure is not None:
        return
    console.print(table)
    for o in shown:
        console.print(Text(f"\n{o.law.number} {o.law.name}: {o.law.formula}\n{o.snippet}"))


def _message(o: "Outcome") -> str:
    return o.message if o.counterexample is None else f"{o.message}; smallest case: {o.counterexample}"

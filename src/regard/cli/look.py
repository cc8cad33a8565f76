"""`regard look`: the attention heads of any model on one input."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import FormatError, SpecError
from . import names
from .forms import FORMS, INPUT

if TYPE_CHECKING:
    from ..lens.view import View

MAX_JSON_WEIGHTS = 2_000_000  # numbers of all maps together that --json writes


def look(
    model: Annotated[str, typer.Argument(help=f"The model: {FORMS}.", autocompletion=names.models)],
    given: Annotated[str, typer.Argument(metavar="INPUT", help=INPUT)],
    target: Annotated[
        str | None,
        typer.Option(
            help="The decoder's input, in the same forms; by default, what the model itself generates."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write a page (.html) or a picture (.svg, .png, .pdf).")
    ] = None,
    effects: Annotated[bool, typer.Option(help="Remove each head in turn and show the effect.")] = False,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed for random weights and inputs.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON: tokens, statistics, maps.")] = False,
) -> None:
    """Show what each head of a model attends to, while the model runs its usual kernels.

    Example: regard look ./my-checkpoint "The cat sat on the mat" --out heads.html

    regard look hf:config.json random:64 --json
    """
    import torch

    from ..lens.text_table import Table
    from ..lens.view import look as see
    from ..training.progress import waiting
    from .models import arguments, has_decoder_input, load, namer, own_output, read_input, token_names

    _check_out(out)
    torch.manual_seed(seed)
    loaded = load(model)
    ids = read_input(given, loaded)
    after = None if target is None else read_input(target, loaded)
    if target is not None and not has_decoder_input(loaded):
        raise SpecError(
            f"--target {target[:40]!r}: {model} has no decoder with an input of its own; leave it out"
        )
    if after is None and has_decoder_input(loaded):
        with waiting("generating the decoder's input"):
            after = own_output(loaded, ids)
        shown = " ".join(token_names(loaded.tokenizer, after[0].tolist()))
        typer.echo(
            f"the decoder reads what the model generates: {shown} (--target gives another text)", err=True
        )
    size = "×".join(map(str, ids.shape[1:])) if ids.is_floating_point() else f"{ids.shape[1]:,} tokens"
    with waiting(f"running the model on {size}"):
        view = see(loaded.model, arguments(loaded, ids, after), namer(loaded.tokenizer))
    _compute(view)
    if effects:
        with waiting(f"removing each of {sum(c.heads for c in view.calls)} heads in turn"):
            view.remove_heads()
    for sentence in view.missed:
        typer.echo(f"not recorded: {sentence}", err=True)
    if out is not None:
        with waiting(f"writing {out}"):
            typer.echo(f"written: {view.save(out, f'Attention heads of {model}')}", err=True)
    if as_json or out is None:
        typer.echo(json.dumps(_plain(view)) if as_json else str(Table(view.rows())))
    if sys.stderr.isatty():
        typer.echo(repr(view), err=True)


def _check_out(out: Path | None) -> None:
    """Refuse a file that cannot be written before the model is loaded."""
    if out is None:
        return
    if out.suffix.lower() not in (".html", ".json", ".svg", ".png", ".pdf"):
        raise FormatError(f"{out.name}: unknown format; accepted: .html, .json, .svg, .png and .pdf")
    if out.is_dir():
        raise FormatError(f"--out {out}: it is a folder; add a file name, such as {out}/heads.html")
    if not out.parent.is_dir():
        raise FormatError(f"--out {out}: there is no folder {out.parent}")


def _compute(view: "View") -> None:
    """The statistics of each layer, with a line on stderr for each that takes long."""
    from ..training.progress import waiting

    for call in view.calls:
        with waiting(f"statistics of layer {call.layer + 1} of {len(view.calls)} ({call.n:,} × {call.m:,})"):
            view.compute(call.layer)


def _plain(view: "View") -> dict[str, Any]:
    weights = sum(c.heads * c.n * c.m for c in view.calls)
    if weights <= MAX_JSON_WEIGHTS:
        return view.to_plain(maps=True)
    typer.echo(
        f"the maps are left out: {weights:,} weights are more than the {MAX_JSON_WEIGHTS:,} that --json writes; "
        "--out heads.html has their means over small blocks",
        err=True,
    )
    return view.to_plain()

"""`regard look`: the attention heads of any model on one input."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from .forms import FORMS, INPUT


def look(
    model: Annotated[str, typer.Argument(help=FORMS)],
    given: Annotated[str, typer.Argument(metavar="INPUT", help=INPUT)],
    target: Annotated[
        str | None,
        typer.Option(
            help="The input of the decoder, in the same forms; by default what the model generates itself."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write a page (.html) or a picture (.svg, .png, .pdf).")
    ] = None,
    effects: Annotated[bool, typer.Option(help="Remove each head in turn and show the effect.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of random weights and inputs.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
) -> None:
    """Show what each attention head of a model attends to, while it runs its usual kernels.

    Example: regard look ./my-checkpoint "The cat sat on the mat" --out heads.html

    regard look hf:config.json random:64 --json
    """
    import torch

    from ..lens.text_table import Table
    from ..lens.view import look as see
    from .models import arguments, has_decoder_input, load, namer, own_output, read_input, token_names

    torch.manual_seed(seed)
    loaded = load(model)
    ids = read_input(given, loaded)
    after = None if target is None else read_input(target, loaded)
    if after is None and has_decoder_input(loaded):
        after = own_output(loaded, ids)
        shown = " ".join(token_names(loaded.tokenizer, after[0].tolist()))
        typer.echo(
            f"the decoder reads what the model generates: {shown} (--target gives another text)", err=True
        )
    view = see(loaded.model, arguments(loaded, ids, after), namer(loaded.tokenizer))
    if effects:
        view.remove_heads()
    for sentence in view.missed:
        typer.echo(f"not recorded: {sentence}", err=True)
    if out is not None:
        typer.echo(f"written: {view.save(out)}", err=True)
    if as_json or out is None:
        typer.echo(json.dumps(view.to_plain()) if as_json else str(Table(view.rows())))
    if sys.stderr.isatty():
        typer.echo(repr(view), err=True)

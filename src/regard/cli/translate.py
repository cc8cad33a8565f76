"""`regard translate`: sentences given as words, in a file or on stdin, one a line."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..errors import SpecError
from ..generation import beam, greedy
from ..nn.stack import EncoderDecoder
from ..training import text
from ..training.run import opened
from ..training.translation import translate as translated


def translate(
    sentence: Annotated[str | None, typer.Argument(help="A sentence; without one, stdin is read.")] = None,
    model: Annotated[Path, typer.Option(help="The folder of a run.")] = Path("runs/translate"),
    file: Annotated[Path | None, typer.Option(help="Translate this file, line by line.")] = None,
    width: Annotated[int, typer.Option("--beam", min=1, help="How many sentences to keep; 1 is greedy.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Write source and target as JSON lines.")] = False,
) -> None:
    """Translate with a model that `regard train translate` made.

    Example: regard translate "Hello world" --model runs/translate
    """
    if sentence is not None:
        lines = [sentence]
    elif file is not None:
        lines = text.sentences(file)
    else:
        lines = [line.rstrip("\n") for line in sys.stdin]
    net, tokens, recipe = opened(model)
    if not isinstance(net, EncoderDecoder):
        raise SpecError(f"{model} holds a {recipe.name} model, which does not translate")
    how = greedy() if width == 1 else beam(width)
    for source, target in zip(lines, translated(net, tokens, lines, how), strict=True):
        typer.echo(
            json.dumps({"source": source, "target": target}, ensure_ascii=False) if as_json else target
        )

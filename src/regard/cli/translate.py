"""`regard translate`: sentences given as words, in a file or on stdin, one a line."""

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from ..errors import FormatError, SpecError
from ..generation import beam, greedy
from ..nn.stack import EncoderDecoder
from ..training.data import text
from ..training.recipes.run import opened
from ..training.recipes.translation import readable
from ..training.recipes.translation import translate as translated


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
    if sentence is not None and file is not None:
        raise SpecError("a sentence and a file at once; give one of them")
    net, tokens, recipe = opened(model)
    if not isinstance(net, EncoderDecoder):
        raise SpecError(f"{model} holds a {recipe.name} model, which does not translate")
    how, most, number = greedy() if width == 1 else beam(width), readable(net), 0
    # A person sees each line answered; a pipe is read in parts, of which like lengths go together.
    together = 1 if sentence is None and file is None and sys.stdin.isatty() else 1024
    for lines in _parts(_lines(sentence, file), together):
        for line, ids in zip(lines, tokens.encode(lines), strict=True):
            number += 1
            if len(ids) > most:
                said = f"line {number} has {len(ids)} tokens; the first {most} are translated: {line[:40]}…"
                typer.echo(said, err=True)
        for source, target in zip(lines, translated(net, tokens, lines, how), strict=True):
            said = json.dumps({"source": source, "target": target}, ensure_ascii=False) if as_json else target
            typer.echo(said)


def _lines(sentence: str | None, file: Path | None) -> Iterator[str]:
    if sentence is not None:
        yield sentence
    elif file is not None:
        yield from text.sentences(file)
    else:
        for number, raw in enumerate(sys.stdin.buffer, 1):
            try:
                yield raw.decode("utf-8").rstrip("\r\n")
            except UnicodeDecodeError as e:
                raise FormatError(
                    f"stdin, line {number}: byte {e.start + 1} is not UTF-8 ({e.reason})"
                ) from e


def _parts(lines: Iterable[str], size: int) -> Iterator[list[str]]:
    part = []
    for line in lines:
        part.append(line)
        if len(part) == size:
            yield part
            part = []
    if part:
        yield part

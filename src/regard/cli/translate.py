"""`regard translate`: a sentence, a file or stdin, one sentence per line."""

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from ..errors import FormatError, SpecError


def translate(
    sentences: Annotated[
        list[str] | None,
        typer.Argument(metavar="SENTENCE", help="Sentences; if there are none, stdin is read."),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="The folder of a run; by default, the included translator.")
    ] = None,
    file: Annotated[Path | None, typer.Option(help="Translate this file, line by line.")] = None,
    width: Annotated[
        int | None,
        typer.Option(
            "--beam",
            min=1,
            max=10_000,
            help="Beam width; 1 is greedy. By default, as in the model card.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print source and target as JSON lines.")] = False,
) -> None:
    """Translate English to Spanish, or use a model trained by `regard train translate`.

    Example: regard translate "Where is the library?"
    """
    if sentences and file is not None:
        raise SpecError("give sentences or a file, not both")
    from ..generation import beam, greedy
    from ..training.progress import waiting
    from ..training.recipes.translation import translate as translate_texts
    from ..training.recipes.translation import truncated
    from ..training.translator import open_translator

    net, tokens, strategy = open_translator(model)
    if width is not None:
        strategy = greedy() if width == 1 else beam(width)
    number = 1
    # In a terminal each line is answered at once; a pipe is read in parts, in which similar lengths share batches.
    part = 1 if not sentences and file is None and sys.stdin.isatty() else 1024
    for lines in _parts(_lines(sentences, file), part):
        for i, words in truncated(net, tokens, lines).items():
            typer.echo(f"line {number + i} {words}", err=True)
        number += len(lines)
        size = "" if width is None else f" with a beam of {width:,}"
        with waiting(f"translating {len(lines):,} line{'s' if len(lines) > 1 else ''}{size}", first=3.0):
            targets = translate_texts(net, tokens, lines, strategy)
        for source, target in zip(lines, targets, strict=True):
            text = json.dumps({"source": source, "target": target}, ensure_ascii=False) if as_json else target
            typer.echo(text)


def _lines(sentences: list[str] | None, file: Path | None) -> Iterator[str]:
    if sentences:
        yield from sentences
    elif file is not None:
        from ..training.data import text

        yield from text.sentences(file)
    else:
        from ..training.data import text

        for number, raw in enumerate(sys.stdin.buffer, 1):
            try:
                yield text.without_mark(raw, number).decode("utf-8").rstrip("\r\n")
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

"""Export of a trained run to the format of another program."""

from collections.abc import Callable
from pathlib import Path

from torch import nn

from ...errors import SpecError, nearest
from ...interop.ctranslate2 import to_ctranslate2
from ..data.tokens import END, SPECIAL, START, UNKNOWN, Tokens
from .run import TOKENS, open_run


def export(run: str | Path, folder: str | Path, to: str = "ctranslate2") -> Path:
    """Write the model of a run, its vocabulary and its tokens.json to a new folder."""
    if to not in FORMATS:
        raise SpecError(f"to={to!r} is unknown; {nearest(to, FORMATS)}")
    model, tokens, _ = open_run(run)
    written = FORMATS[to](model, tokens, Path(folder))
    (written / TOKENS).write_text(tokens.json(), encoding="utf-8")
    return written


def _ctranslate2(model: nn.Module, tokens: Tokens, folder: Path) -> Path:
    words = [tokens.tokenizer.id_to_token(i) for i in range(len(tokens))]
    return to_ctranslate2(
        model, words, folder, start=SPECIAL[START], end=SPECIAL[END], unknown=SPECIAL[UNKNOWN]
    )


FORMATS: dict[str, Callable[[nn.Module, Tokens, Path], Path]] = {"ctranslate2": _ctranslate2}

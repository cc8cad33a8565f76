"""`rg.translate`: texts translated by the model that is part of regard, or by your own."""

import warnings
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import overload

from ..errors import SpecError
from ..generation import Strategy
from ..nn.stack import EncoderDecoder
from .data.tokens import Tokens
from .models import card
from .models import folder as included
from .recipes.run import open_run
from .recipes.translation import translate as translate_texts
from .recipes.translation import truncated


@overload
def translate(texts: str, *, model: str | Path | None = None, strategy: Strategy | None = None) -> str: ...
@overload
def translate(
    texts: Sequence[str], *, model: str | Path | None = None, strategy: Strategy | None = None
) -> list[str]: ...
def translate(
    texts: str | Sequence[str], *, model: str | Path | None = None, strategy: Strategy | None = None
) -> str | list[str]:
    """The translation of a text, or of each text in a list; the texts of one call share batches.

    model: the folder of a run; by default the included translator from English to Spanish. strategy:
    by default what the model card recommends, and greedy() for a model without a card. If a text has more tokens
    than the model reads (120 at most), only its beginning is translated, with a warning.

    >>> translate("Hello world")
    'Hola mundo'
    """
    if isinstance(texts, bytes) or not isinstance(texts, Iterable):
        raise SpecError(f"texts={texts!r}: a text is needed, or a list of texts")
    net, tokens, recommended = open_translator(model)
    given = [texts] if isinstance(texts, str) else list(texts)
    for i, words in truncated(net, tokens, given).items():
        warnings.warn(f"text {i} {words}", stacklevel=2)
    out = translate_texts(net, tokens, given, strategy or recommended)
    return out[0] if isinstance(texts, str) else out


def open_translator(model: str | Path | None = None) -> tuple[EncoderDecoder, Tokens, Strategy]:
    """A translator, its tokens, and the strategy that its card recommends; the one of regard by default."""
    if model is None:
        return _included()
    net, tokens, recipe = open_run(model)
    if not isinstance(net, EncoderDecoder):
        raise SpecError(f"{model} contains a {recipe.name} model, which does not translate")
    return net, tokens, card(model).strategy


@lru_cache(maxsize=1)
def _included() -> tuple[EncoderDecoder, Tokens, Strategy]:
    return open_translator(included())

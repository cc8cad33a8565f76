"""What can go wrong, one small tree:

RegardError
├── SpecError     a declaration that cannot be (also a ValueError)
├── ShapeError    tensors that do not fit one another or the declaration (also a ValueError)
├── FormatError   a file or JSON text that is not what it should be (also a ValueError)
└── BackendError  a way to run, asked for by name, that cannot run this (also a RuntimeError)

A message says what was asked, which numbers clash and what would work.
"""

import difflib
from collections.abc import Iterable


class RegardError(Exception):
    """Any error regard raises on purpose."""


class SpecError(RegardError, ValueError):
    """A declaration that cannot be."""


class ShapeError(RegardError, ValueError):
    """Tensors that do not fit one another or the declaration."""


class FormatError(RegardError, ValueError):
    """A file or JSON text that is not what it should be."""


class BackendError(RegardError, RuntimeError):
    """A way to run, asked for by name, that cannot run this."""


def nearest(word: str, known: Iterable[str]) -> str:
    """The tail of an "unknown name" message: the nearest known name, or all of them.

    >>> nearest("gtp2", ["gpt2", "bert-base"])
    'did you mean gpt2?'
    >>> nearest("zzz", ["gpt2", "bert-base"])
    'known: bert-base, gpt2'
    """
    names = sorted(known)
    close = difflib.get_close_matches(str(word), names, n=1)
    return f"did you mean {close[0]}?" if close else "known: " + (", ".join(names) or "none")

"""The exceptions of regard:

RegardError
├── SpecError     an invalid declaration or option (also a ValueError)
├── ShapeError    tensors that do not fit together or do not fit the declaration (also a ValueError)
├── FormatError   a file or JSON text in the wrong format (also a ValueError)
└── BackendError  a backend requested by name that cannot run this call (also a RuntimeError)

A message contains the value that was passed, the numbers that conflict, and what would work.
"""

import difflib
from collections.abc import Iterable


class RegardError(Exception):
    """The base class of all errors that regard raises."""


class SpecError(RegardError, ValueError):
    """An invalid declaration or option."""


class ShapeError(RegardError, ValueError):
    """Tensors that do not fit together or do not fit the declaration."""


class FormatError(RegardError, ValueError):
    """A file or JSON text in the wrong format."""


class BackendError(RegardError, RuntimeError):
    """A backend requested by name that cannot run this call."""


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of an "unknown name" message: the closest known name, or all of them.

    >>> nearest("gtp2", ["gpt2", "bert-base"])
    'did you mean gpt2?'
    >>> nearest("zzz", ["gpt2", "bert-base"])
    'known: bert-base, gpt2'
    """
    names = sorted(known)
    close = difflib.get_close_matches(str(word), names, n=1)
    return f"did you mean {close[0]}?" if close else "known: " + (", ".join(names) or "none")

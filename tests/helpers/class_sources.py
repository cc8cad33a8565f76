"""The source of a class, found once.

Python before 3.13 parses the whole file of a class each time, which is a fifth of the time of the tests of laws: laws
read the source of what they check.
"""

import inspect
from typing import Any
from weakref import WeakKeyDictionary

_find, _found = inspect.findsource, WeakKeyDictionary()


def find(x: Any) -> tuple[list[str], int]:
    """As inspect.findsource."""
    if not inspect.isclass(x):
        return _find(x)
    if x not in _found:
        _found[x] = _find(x)
    return _found[x]


def install() -> None:
    inspect.findsource = find

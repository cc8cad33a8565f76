"""What the data of a pattern are now: a key for what was computed from them."""

from dataclasses import fields
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import Tensor

from .. import compat
from .algebra import Pattern
from .data import Data, where


def written(pattern: Pattern) -> str:
    """How a pattern with data is composed."""
    return pattern.fold(
        lambda word: word.text or "data", "Both({}, {})".format, "Either({}, {})".format, "Not({})".format
    )


def data_state(pattern: Pattern) -> tuple | None:
    """How a pattern is composed and what its data are now; None if a change could not be noticed. It holds the ids of
    tensors, so it is valid as long as `data_of` this pattern exist."""
    state: list[Any] = [written(pattern)]
    for x in data_of(pattern):
        if isinstance(x, Tensor) and (version := compat.version(x)) is not None:
            state.append((id(x), version))
        elif isinstance(x, int | float | str | None | ModuleType | CodeType | type):
            state.append((x, type(x)))
        else:
            return None
    return tuple(state)


def data_of(pattern: Pattern) -> list[Any]:
    """What decides pairs beside positions and words; of a Python function, all that its code reads."""
    values: list[Any] = []
    for word in pattern.leaves():
        if isinstance(word, where) and isinstance(word.fn, FunctionType):
            code, names = word.fn.__code__, word.fn.__globals__
            values += [code, *(cell.cell_contents for cell in word.fn.__closure__ or ())]
            values += [names[name] for name in code.co_names if name in names]
            values += [*(word.fn.__defaults__ or ()), *(word.fn.__kwdefaults__ or {}).values()]
        elif isinstance(word, Data):
            values += [type(word), *(getattr(word, field.name) for field in fields(word))]  # type: ignore[arg-type]
    return values

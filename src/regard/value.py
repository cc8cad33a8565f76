"""Declared values ⇄ JSON. A value is a frozen dataclass; its JSON is its kind and its fields.

Reading takes the table of kinds that may occur, so no text can name anything else.
"""

import dataclasses
import json
import math
import types
import typing
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from .errors import FormatError, RegardError, nearest

MAX_DEPTH = 100  # levels of nested values in JSON that is read


def table(*kinds: type) -> dict[str, type]:
    """The kinds by name."""
    return {kind.__name__: kind for kind in kinds}


def to_plain(value: Any) -> Any:
    """Dictionaries, lists, numbers and strings; an infinite number becomes the string "inf" or "-inf"."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        _refuse(type(value))
        fields = {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"kind": type(value).__name__, **fields}
    if isinstance(value, tuple | list):
        return [to_plain(v) for v in value]
    if isinstance(value, float) and math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return value


def from_plain(data: Any, kinds: Mapping[str, type], depth: int = 0) -> Any:
    """The value that `to_plain` was given. Unknown kinds, unknown, missing and invalid fields are named."""
    if depth > MAX_DEPTH:
        raise FormatError(f"this JSON is nested deeper than {MAX_DEPTH} levels")
    if isinstance(data, list):
        return tuple(from_plain(d, kinds, depth + 1) for d in data)
    if data in ("inf", "-inf"):
        return float(data)
    if not isinstance(data, dict):
        return data
    fields = dict(data)
    name = fields.pop("kind", None)
    if name is None:
        raise FormatError(f'a JSON object without a kind; its fields: {_names(fields)}; add "kind"')
    if not isinstance(name, str) or name not in kinds:
        raise FormatError(f"unknown kind {name!r}; {nearest(str(name), kinds)}")
    kind = kinds[name]
    _refuse(kind)
    known = {f.name: f for f in dataclasses.fields(kind)}
    for field in fields:
        if field not in known:
            raise FormatError(f"{name} has no field {field!r}; {nearest(field, known)}")
    required = [f.name for f in known.values() if f.default is f.default_factory is dataclasses.MISSING]
    if missing := [r for r in required if r not in fields]:
        raise FormatError(f"{name} needs {_names(missing)}, which the JSON does not give")
    values = {field: _read(kind, field, from_plain(v, kinds, depth + 1)) for field, v in fields.items()}
    try:
        built = kind(**values)
    except RegardError:
        raise
    except Exception:  # of a field whose type the class does not check itself
        _check_types(kind, values)
        raise
    _check_types(kind, values)
    return built


def _read(kind: type, field: str, given: Any) -> Any:
    """A text becomes the value that it denotes where its class has a notation: `pattern: causal()` in a YAML file, or
    `pattern: [causal(), window(2)]`."""
    declared = _annotations(kind)[field]
    readers = (getattr(each, "from_text", None) for each in (declared, *typing.get_args(declared)))
    from_text = next(filter(None, readers), None)
    if from_text and isinstance(given, tuple):
        return tuple(from_text(x) if isinstance(x, str) else x for x in given)
    return from_text(given) if from_text and isinstance(given, str) else given


@lru_cache
def _annotations(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _check_types(kind: type, values: Mapping[str, Any]) -> None:
    """Refuse a field whose value is not of its declared type."""
    for field, given in values.items():
        declared = _annotations(kind)[field]
        if not _matches(given, declared):
            needed = getattr(declared, "__name__", None) if isinstance(declared, type) else str(declared)
            raise FormatError(
                f"{kind.__name__}: the field {field!r} needs {str(needed).replace('regard.', '')}, not {given!r:.60}"
            )


def _matches(given: Any, declared: Any) -> bool:
    """Whether a value is of a type as dataclasses declare it: classes, unions, literals and tuples."""
    origin, arguments = typing.get_origin(declared), typing.get_args(declared)
    if declared is None or declared is types.NoneType:
        return given is None
    if origin in (types.UnionType, typing.Union):
        return any(_matches(given, a) for a in arguments)
    if origin is typing.Literal:
        return given in arguments
    if origin is tuple:
        if not isinstance(given, tuple):
            return False
        if arguments[-1:] == (...,):
            return all(_matches(g, arguments[0]) for g in given)
        return len(given) == len(arguments) and all(map(_matches, given, arguments))
    if declared is float:
        return isinstance(given, int | float) and not isinstance(given, bool)
    if declared is int:
        return isinstance(given, int) and not isinstance(given, bool)
    return not isinstance(declared, type) or isinstance(given, declared)


def _refuse(kind: type) -> None:
    if refusal := getattr(kind, "refuses_json", None):
        raise FormatError(f"{kind.__name__} {refusal}")


def to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(to_plain(value), indent=indent, ensure_ascii=False)


def from_json(text: str, kinds: Mapping[str, type]) -> Any:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as e:
        raise FormatError(f"not JSON: {e.msg} at line {e.lineno}, column {e.colno}") from e
    if not isinstance(data, dict):
        raise FormatError(f'a JSON object with a "kind" was expected, not {type(data).__name__}')
    return from_plain(data, kinds)


def source(value: Any) -> str:
    """`repr` that is source, without what equals its default; fields that have none come by position."""
    given = []
    for f in dataclasses.fields(value):
        v = getattr(value, f.name)
        if f.default is f.default_factory is dataclasses.MISSING and not f.kw_only:
            given.append(_inf(v))
        elif f.default is dataclasses.MISSING or v != f.default:
            given.append(f"{f.name}={_inf(v)}")
    return f"{type(value).__name__}({', '.join(given)})"


def _inf(v: Any) -> str:  # repr of an infinite float is no source
    return f"float('{v}')" if isinstance(v, float) and math.isinf(v) else repr(v)


def _names(fields: Iterable[str]) -> str:
    return ", ".join(repr(f) for f in fields) or "none"

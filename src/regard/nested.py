"""Arguments and results of models: nested tuples, lists, mappings and dataclasses of tensors."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

PLAIN = {int, float, bool, str, type(None)}


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors in nested tuples, lists, mappings and dataclasses, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, Mapping):
        tree = tree.values()
    elif is_dataclass(tree) and not isinstance(tree, type):
        tree = [getattr(tree, field.name, None) for field in fields(tree)]
    elif not isinstance(tree, tuple | list):
        return []
    found: list[Tensor] = []
    for x in tree:
        if type(x) is Tensor:
            found.append(x)
        elif x.__class__ not in PLAIN:
            found += tensors_in(x)
    return found


def map_leaves(f: Callable[[Any], Any], tree: Any) -> Any:
    """The same tree with f applied to each leaf.

    >>> map_leaves(str, (1, {"a": [2, 3]}))
    ('1', {'a': ['2', '3']})
    """
    if isinstance(tree, dict):
        return {name: map_leaves(f, branch) for name, branch in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_leaves(f, branch) for branch in tree))
    if isinstance(tree, tuple | list):
        return type(tree)(map_leaves(f, branch) for branch in tree)
    return f(tree)


def name_of(model: Any) -> str:
    """The name of a function, or the class of a model."""
    return getattr(model, "__name__", None) or type(model).__name__


def required(call: Callable) -> list[str]:
    """The positional arguments of a function that have no default."""
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind in kinds]


def is_named(model: Any, inputs: Any) -> bool:
    """Whether these inputs are named arguments of a model: a mapping, unless the model takes a whole mapping.

    It does where it needs arguments of which none is a key: `forward(self, batch)` with {"x": …, "mask": …}.
    """
    needed = required(getattr(model, "forward", model)) if isinstance(inputs, Mapping) and inputs else []
    return isinstance(inputs, Mapping) and (not needed or any(name in inputs for name in needed))

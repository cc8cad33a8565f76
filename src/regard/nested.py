"""Arguments and results of models: nested tuples, lists and mappings of tensors."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

PLAIN = {int, float, bool, str, type(None)}


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors in nested tuples, lists and mappings, in order."""
    if isinstance(tree, Mapping):
        tree = tree.values()
    elif not isinstance(tree, tuple | list):
        return [tree] if isinstance(tree, Tensor) else []
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

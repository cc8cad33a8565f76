"""Arguments and results as nested tuples, lists and dictionaries of tensors."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor


def leaves(tree: Any) -> Iterator[Any]:
    """Everything in the tree that is not a tuple, a list or a dictionary."""
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    if isinstance(tree, tuple | list):
        for branch in tree:
            yield from leaves(branch)
    else:
        yield tree


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)]


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

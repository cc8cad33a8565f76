"""The nodes of a tree, numbered so that the descendants of each follow it."""

from math import prod

import torch
from jaxtyping import Int
from torch import Tensor

from ..errors import ShapeError


def numbered(parents: Int[Tensor, "*b m"]) -> tuple[Int[Tensor, "*b m"], Int[Tensor, "*b m"]]:
    """The number of each node in preorder, and the first number past its descendants."""
    if torch.compiler.is_compiling():
        return torch.ops.regard.preorder(parents)
    return _number(parents)


def _number(parents: Tensor) -> tuple[Tensor, Tensor]:
    *batch, m = parents.shape
    rows = parents.detach().cpu().reshape(prod(batch), m).tolist()
    numbers = zip(*map(_preorder, rows)) if rows else ((), ())
    # Memory of their own, as an operation has to return.
    first, end = (
        torch.tensor(x, dtype=torch.long, device=parents.device).view(parents.shape) for x in numbers
    )
    return first, end


# A tree that a compiled function declares is numbered when its graph runs. Defined by its schema, as custom_op takes
# longer to import.
torch.library.define("regard::preorder", "(Tensor parents) -> (Tensor, Tensor)")
torch.library.impl("regard::preorder", ("cpu", "cuda"))(_number)


@torch.library.register_fake("regard::preorder")
def _(parents):
    like = {"size": parents.shape, "dtype": torch.long}
    return parents.new_empty(**like), parents.new_empty(**like)


def _preorder(parents: list[int]) -> tuple[list[int], list[int]]:
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            what = "its own parent" if parent == node else f"a child of {parent}, which comes after it"
            what = f"a child of {parent}, and −1 is the only number for none" if parent < -1 else what
            raise ShapeError(
                f"tree: position {node} is {what}; each parent comes before its children, −1 is a root"
            )
    size = [1] * len(parents)
    for node in range(len(parents) - 1, -1, -1):
        if parents[node] >= 0:
            size[parents[node]] += size[node]
    first, following, roots = [0] * len(parents), [0] * len(parents), 0
    for node, parent in enumerate(parents):
        if parent < 0:
            first[node], roots = roots, roots + size[node]
        else:
            first[node], following[parent] = following[parent], following[parent] + size[node]
        following[node] = first[node] + 1
    return first, [a + b for a, b in zip(first, size)]

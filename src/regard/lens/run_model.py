"""Calling a model on inputs of any form."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import RegardError, ShapeError, SpecError
from ..nested import is_named, tensors_in


def run(model: Any, inputs: Any) -> Any:
    """model(inputs): a mapping by name, unless the model takes one; a tuple or list in order; else one argument."""
    if not callable(model):
        raise SpecError(f"{type(model).__name__} is not callable; pass a model (an nn.Module or a function)")
    try:
        if is_named(model, inputs):
            return model(**inputs)
        if isinstance(inputs, tuple | list):
            return model(*inputs)
        return model(inputs)
    except RegardError:
        raise
    except (TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError) as e:
        raise ShapeError(
            f"{type(model).__name__} does not run on {describe(inputs)}: {type(e).__name__}: {e}"
            + (_large_id(model, inputs) if isinstance(e, IndexError) else "")
        ) from e


def _large_id(model: Any, inputs: Any) -> str:
    """The largest id of the inputs, if no embedding of the model has a row for it."""
    parts = model.modules() if isinstance(model, nn.Module) else ()
    rows = max((part.num_embeddings for part in parts if isinstance(part, nn.Embedding)), default=0)
    ids = [int(x.max()) for x in tensors_in(inputs) if x.numel() and x.dtype in (torch.int32, torch.int64)]
    if not rows or not ids or max(ids) < rows:
        return ""
    return f" (the largest id is {max(ids)}; the largest embedding of the model has {rows} rows, 0 to {rows - 1})"


def describe(inputs: Any) -> str:
    """The dtypes and shapes of the inputs, as text."""
    if isinstance(inputs, Mapping):
        return ", ".join(f"{name}={_one(x)}" for name, x in inputs.items()) or "no input"
    if isinstance(inputs, tuple | list):
        return ", ".join(_one(x) for x in inputs) or "no input"
    return _one(inputs)


def _one(x: Any) -> str:
    if isinstance(x, Tensor):
        return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"
    return type(x).__name__


def first_tensor(out: Any) -> Tensor:
    """The first floating-point tensor of a model's output: its logits or its states."""
    for x in tensors_in(out):
        if x.is_floating_point():
            return x
    raise RegardError(f"the output, a {type(out).__name__}, has no floating-point tensor to compare")

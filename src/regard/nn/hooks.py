"""Linear layers as they were built."""

from typing import Any

from torch import nn


def plain(*layers: Any) -> bool:
    """Whether these are nn.Linear itself, with nobody listening: their products may be made in another way."""
    return all(
        type(w) is nn.Linear and not (w._forward_hooks or w._forward_pre_hooks or w._backward_hooks)
        for w in layers
    )

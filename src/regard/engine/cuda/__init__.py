"""CUDA: Triton kernels that visit the blocks of a plan, forward and backward.

Triton is imported by these modules and no others, when a call first runs: the names below are looked up on use.
"""

from typing import Any

_MODULES = {
    "Added": "triton.bias_and_dropout",
    "Again": "again",
    "attend": "host",
    "backward": "host",
    "forward": "host",
    "task": "host",
}

__all__ = ["Added", "Again", "attend", "backward", "forward", "task"]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)

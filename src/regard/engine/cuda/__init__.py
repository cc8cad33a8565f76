"""CUDA: Triton kernels that visit the blocks of a plan, forward and backward.

backend.py      the backend `triton`: what it refuses, estimates and prepares
host.py         from tensors to launches; repeated calls
call.py         what a call computes, and the layout of its tensors
prepared.py     launches, programs of launches, and the one cache that holds them
schedule.py     the passes of a plan as tables that kernels read; work_split.py deals them to programs
mask.py         a pattern as a Triton function; block_tests.py says which test a block needs
triton/         the general kernels; hopper/ those for Hopper GPUs

Triton is imported by these modules and no others, when a call first runs: the names below are looked up on use.
"""

from typing import Any

_MODULES = {
    "BiasAndDropout": "call",
    "PreparedAttention": "host",
    "attend": "host",
    "backward": "host",
    "forward": "host",
    "task": "call",
}

__all__ = ["BiasAndDropout", "PreparedAttention", "attend", "backward", "forward", "task"]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)

"""Functions of PyTorch and of the engine that are replaced while a trace runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def patched(module: Any, name: str, replacement: Any) -> Iterator[None]:
    """Replaces `module.name` inside: a function mode does not intercept calls in PyTorch's own Python code."""
    original = getattr(module, name)
    setattr(module, name, replacement)
    try:
        yield
    finally:
        setattr(module, name, original)

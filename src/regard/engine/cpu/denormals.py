"""Numbers below 2⁻¹⁰²² (2⁻¹²⁶ in float32) as IEEE 754 has them, also after C++ was compiled for the CPU.

PyTorch's compiler links that code with fast math, and loading it makes the thread treat such numbers as zero.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def preserved() -> Iterator[None]:
    """Whatever is compiled inside, denormal numbers are treated afterwards as they were before."""
    before = flushed()
    try:
        yield
    finally:
        if flushed() and not before:
            torch.set_flush_denormal(False)


def flushed() -> bool:
    """Whether half of the smallest normal number counts as zero."""
    return sys.float_info.min / 2 == 0.0

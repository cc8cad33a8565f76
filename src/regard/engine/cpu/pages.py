"""Large pages for large tensors: Linux gives 2 MiB at once to whom asks, in place of 512 pages of 4 KiB.

Many small products walk over much memory, and each page they meet is looked up. At n = 4096, window(64) | every(64),
forward and backward, 89 ms became 76. And pages stay: one that was given back to the system has to be cleared before
it is written to again. As gradients are new tensors in every call, that could take a tenth of it and more.
"""

import ctypes
import sys
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

SMALL, LARGE = 1 << 12, 1 << 21  # bytes of a page
HUGE = 14  # MADV_HUGEPAGE, as Linux numbers it
STAYS = 31 << 20  # bytes: the largest block from which glibc learns is one of 32 MiB


def large(x: Tensor) -> Tensor:
    """The same tensor, not yet written to, on large pages where it is large and the system has them."""
    size = x.numel() * x.element_size()
    advise = _advise() if size >= LARGE and x.is_cpu else None
    if advise is not None:
        _settle()
        first = -(-x.data_ptr() // SMALL) * SMALL
        # It is advice: what the system answers is no matter.
        advise(first, (x.data_ptr() + size - first) // SMALL * SMALL, HUGE)
    return x


@cache
def _settle() -> None:
    """Free one block of 31 MiB, which nobody wrote to.

    glibc gives memory back to the system as soon as what is free at its end is twice the largest block that it ever
    mapped and freed. From here on that is 62 MiB; a program that has freed a large tensor before is there already.
    """
    torch.empty(STAYS, dtype=torch.uint8, device="cpu")


@cache
def _advise() -> Callable[[int, int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        found = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    found.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return found

"""Memory of the CPU tiles: buffers that calls reuse, saved weights, and huge pages.

Fresh pages cost as much as the products that write to them, so memory is kept from call to call, within bounds.
"""

import ctypes
import sys
from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor

MAX_VIEWS = 256  # shapes that a set of buffers remembers
MAX_POOLED = 16  # sets of buffers that wait for a call: more threads than that allocate their own
MAX_SAVED_WEIGHTS = 1 << 24  # weights saved for the backward pass, at most: 64 MiB in float32

# Buffers that one call after another writes to.


class Buffers:
    """Named memory for intermediate results. One call uses it at a time."""

    def __init__(self, like: Tensor):
        self.like = like.new_empty(0)
        self.memory: dict[str, Tensor] = {}
        self.views: dict[tuple, Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        """A tensor of this shape with any content, valid until the same name is requested again."""
        if (view := self.views.get((name, *shape))) is not None:
            return view
        with torch.inference_mode(False):  # an inference tensor could not be written to in training later
            return self._allocate(name, shape)

    def _allocate(self, name: str, shape: tuple[int, ...]) -> Tensor:
        count = prod(shape)
        if name not in self.memory or len(self.memory[name]) < count:
            self.memory[name] = huge_pages(self.like.new_empty(count))
            self.views = {key: view for key, view in self.views.items() if key[0] != name}
        if len(self.views) >= MAX_VIEWS:
            self.views.clear()
        self.views[name, *shape] = view = self.memory[name][:count].view(shape)
        return view


_pool: list[Buffers] = []  # not in use; pop and append are atomic, so no two threads get the same


def with_buffers(run: Callable[..., Any], q: Tensor, *rest: Any) -> Any:
    """run(buffers, q, …) with buffers that no other call uses at the same time."""
    try:
        buffers = _pool.pop()
    except IndexError:
        buffers = Buffers(q)
    if buffers.like.dtype != q.dtype:
        buffers = Buffers(q)
    try:
        return run(buffers, q, *rest)
    finally:
        if len(_pool) < MAX_POOLED:
            _pool.append(buffers)


# Weights that the backward pass reads.

Weights = list[Tensor | None]  # of each piece its weights, or None where they are computed a second time


class SavedWeights:
    """Memory for up to `budget` weights of one call."""

    def __init__(self, like: Tensor, budget: int):
        self.like, self.budget = like, budget
        self.weights: Weights = []

    def take(self, shape: tuple[int, int, int]) -> Tensor | None:
        """Memory for the weights of the next piece; None if the budget is spent."""
        size, weights = prod(shape), None
        if size <= self.budget:
            self.budget -= size
            weights = huge_pages(self.like.new_empty(shape))
        self.weights.append(weights)
        return weights


# Huge pages. Many small products visit much memory, and each page takes an entry of the translation cache. At
# n = 4096, window(64) | every(64), forward and backward, 89 ms became 76.

PAGE, HUGE_PAGE = 1 << 12, 1 << 21  # bytes
MADV_HUGEPAGE = 14  # as Linux numbers it
# As glibc numbers them, with bytes: blocks up to the first size come from its heap, and of the free memory at the end
# of the heap so much stays. Without this it goes back to the system after each call, and the next one, whose weights
# and gradients are new tensors, writes to fresh pages.
M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = (-3, 32 << 20), (-1, 128 << 20)


def huge_pages(x: Tensor) -> Tensor:
    """The same tensor, not yet written to, on pages of 2 MiB where it is large and the system has them."""
    size = x.numel() * x.element_size()
    advise = _advise() if size >= HUGE_PAGE and x.is_cpu else None
    if advise is not None:
        first = -(-x.data_ptr() // PAGE) * PAGE
        # It is advice: the result does not matter.
        advise(first, (x.data_ptr() + size - first) // PAGE * PAGE, MADV_HUGEPAGE)
    return x


@cache
def _advise() -> Callable[[int, int, int], int] | None:
    """madvise, where there is one. The first call sets what glibc keeps."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        libc = ctypes.CDLL(None)
        madvise = libc.madvise
        for name, size in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
            libc.mallopt(name, size)
    except (OSError, AttributeError):
        return None
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise

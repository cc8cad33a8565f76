"""Memory of the CPU tiles: buffers that calls reuse, blocks for saved weights, and huge pages.

Fresh pages cost as much as the products that write to them, so memory is kept from call to call, within bounds.
"""

import ctypes
import sys
from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from ... import compat

MAX_VIEWS = 256  # shapes that a set of buffers remembers
MAX_POOLED = 16  # sets of buffers that wait for a call: more threads than that allocate their own
BLOCK = 1 << 20  # numbers in a block for saved weights
MAX_FREE_BLOCKS = 16  # blocks that wait for a call: 64 MiB in float32
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
    """Memory for up to `budget` weights of one call. Pooled: in blocks that earlier calls gave back."""

    def __init__(self, like: Tensor, budget: int, pooled: bool = True):
        self.like, self.budget, self.pooled = like, budget, pooled
        self.block: Tensor | None = None
        self.blocks: list[ref[Tensor]] = []
        self.weights: Weights = []

    def take(self, shape: tuple[int, int, int]) -> Tensor | None:
        """Memory for the weights of the next piece; None if the budget is spent."""
        size = prod(shape)
        if size > self.budget:
            self.weights.append(None)
            return None
        self.budget -= size
        if self.pooled:
            if self.block is None or size > len(self.block):
                self.block = _block(self.like, size)
                self.blocks.append(ref(self.block))
            view, self.block = self.block[:size].view(shape), self.block[size:]
        else:
            view = self.like.new_empty(shape)
        self.weights.append(view)
        return view


_free_blocks: list[Tensor] = []


def _block(like: Tensor, size: int) -> Tensor:
    try:
        block = _free_blocks.pop()
    except IndexError:
        block = None
    if block is None or block.dtype != like.dtype or len(block) < size:
        block = huge_pages(like.new_empty(max(BLOCK, size)))
    return block


def give_back(weights: Weights, blocks: list[ref[Tensor]]) -> None:
    """Free these blocks for later calls, if the backward pass that runs now was the last to read them.

    What a hook for saved tensors returned in place of the weights may be memory of its own, which is left alone.
    """
    if blocks and not compat.graph_is_kept():
        own = [block for block in (each() for each in blocks) if block is not None]
        read = {id(compat.view_base(w)) for w in weights if w is not None}
        _free_blocks.extend(block for block in own if id(block) in read)
        del _free_blocks[MAX_FREE_BLOCKS:]


# Huge pages. Many small products visit much memory, and each page takes an entry of the translation cache. At
# n = 4096, window(64) | every(64), forward and backward, 89 ms became 76.

PAGE, HUGE_PAGE = 1 << 12, 1 << 21  # bytes
MADV_HUGEPAGE = 14  # as Linux numbers it
TRIM_BLOCK = 31 << 20  # bytes: the largest block from which glibc adapts its thresholds is one of 32 MiB


def huge_pages(x: Tensor) -> Tensor:
    """The same tensor, not yet written to, on pages of 2 MiB where it is large and the system has them."""
    size = x.numel() * x.element_size()
    advise = _advise() if size >= HUGE_PAGE and x.is_cpu else None
    if advise is not None:
        _raise_trim_threshold()
        first = -(-x.data_ptr() // PAGE) * PAGE
        # It is advice: the result does not matter.
        advise(first, (x.data_ptr() + size - first) // PAGE * PAGE, MADV_HUGEPAGE)
    return x


@cache
def _raise_trim_threshold() -> None:
    """Free one block of 31 MiB that was never written to.

    glibc returns memory to the system as soon as the free memory at the end of its heap is twice the largest block
    that it ever mapped and freed. From here on that is 62 MiB, so that the gradients of one call, which are new
    tensors, reuse the pages of the call before.
    """
    torch.empty(TRIM_BLOCK, dtype=torch.uint8, device="cpu")


@cache
def _advise() -> Callable[[int, int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        madvise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise

"""Batch rows shared out to threads on a CPU: each thread decodes its rows, with one thread of PyTorch.

A decoding step is about a hundred small operations. Two threads inside each of them wait for each other a hundred
times a step, and whenever another process uses a core. Two threads with their own rows wait once, at the end.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import lru_cache
from math import inf
from threading import Barrier, Event
from typing import TypeVar

import torch
from torch import Tensor

MIN_ROWS = 16  # of a call: half of fewer take nearly as long, since a step then mostly reads weights
STEP = 14  # a step of any number of rows costs as much as this many rows in it
T = TypeVar("T")


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    """Two threads in each of which PyTorch uses one."""
    before, ready = torch.get_num_threads(), Barrier(3)

    def start() -> None:
        torch.get_num_threads()  # the first call in a thread sets the number of the process
        torch.set_num_threads(1)
        ready.wait()

    pool = ThreadPoolExecutor(2, "regard-rows", start)
    pool.submit(int), pool.submit(int)
    ready.wait()
    torch.set_num_threads(before)  # of this thread, and of those that begin later
    return pool


if hasattr(os, "register_at_fork"):  # a child process has none of the threads
    os.register_at_fork(after_in_child=_pool.cache_clear)


def cut(lengths: Sequence[int], beams: int) -> int:
    """How many of the rows, the longest first, one thread decodes while another decodes the rest; 0: not worth it.

    A thread takes as many steps as its longest row has tokens, each at a fixed cost and at the cost of its rows.

    >>> cut([20] * 15, beams=1)
    0
    """
    if len(lengths) < MIN_ROWS or torch.get_num_threads() != 2:
        return 0
    total, before, best = sum(lengths), 0, (inf, 0)
    for i in range(1, len(lengths)):
        before += lengths[i - 1]
        costs = lengths[0] * STEP + beams * before, lengths[i] * STEP + beams * (total - before)
        best = min(best, (max(costs), i))
    return best[1]


def run(work: Callable[[Tensor, Event], T], parts: Sequence[Tensor]) -> list[T]:
    """work(part, stop) of two parts, side by side. stop is set where the caller was interrupted, or a part failed."""
    stop = Event()
    futures = [_pool().submit(copy_context().run, work, part, stop) for part in parts]
    try:
        return [future.result() for future in futures]
    except BaseException:
        stop.set()
        raise

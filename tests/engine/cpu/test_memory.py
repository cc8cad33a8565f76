"""Buffers, saved weights and huge pages: reused from call to call, never by two at once, within bounds."""

import ctypes
import sys
from threading import Thread

import pytest
import torch

from regard.engine.cpu import memory


def test_buffers_give_the_same_memory_until_more_is_requested():
    buffers = memory.Buffers(torch.zeros(1))
    first = buffers("s", 2, 3)
    assert buffers("s", 2, 3) is first and buffers("s", 6).data_ptr() == first.data_ptr()
    assert buffers("ds", 2, 3).data_ptr() != first.data_ptr()
    assert buffers("s", 7, 3).shape == (7, 3)
    assert buffers("s", 2, 3).data_ptr() == buffers("s", 7, 3).data_ptr()


def test_no_two_threads_get_the_same_buffers_and_few_sets_stay(monkeypatch):
    monkeypatch.setattr(memory, "MAX_POOLED", 3)
    monkeypatch.setattr(memory, "_pool", [])
    in_use, shared = set(), []

    def run(buffers, q):
        if id(buffers) in in_use:
            shared.append(buffers)
        in_use.add(id(buffers))
        buffers("s", 100).fill_(1.0).sum()
        in_use.discard(id(buffers))

    def many():
        for _ in range(200):
            memory.with_buffers(run, torch.zeros(1))

    threads = [Thread(target=many) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not shared and 0 < len(memory._pool) <= 3 + 7  # at worst, each of the others had looked before


def test_weights_beyond_the_budget_are_not_saved():
    saved = memory.SavedWeights(torch.zeros(1), 30)
    taken = [saved.take((2, 3, 4)), saved.take((1, 2, 4)), saved.take((1, 2, 3))]
    assert [None if x is None else tuple(x.shape) for x in taken] == [(2, 3, 4), None, (1, 2, 3)]
    assert saved.weights == taken


asked: list[tuple[int, int, int]] = []


@pytest.mark.parametrize("advise", [None, lambda first, size, how: asked.append((first, size, how)) or -1])
def test_huge_pages_are_requested_for_large_tensors_and_never_needed(advise, monkeypatch):
    """Complete pages inside the tensor; where the system has none, or refuses, nothing changes."""
    asked.clear()
    monkeypatch.setattr(memory, "_advise", lambda: advise)
    small, big = torch.empty(100), torch.empty((1 << 19) + 300)
    assert memory.huge_pages(small) is small and memory.huge_pages(big) is big
    for first, size, how in asked:
        assert first % 4096 == size % 4096 == 0 and how == 14
        assert big.data_ptr() <= first < first + size <= big.data_ptr() + 4 * big.numel()
    assert len(asked) == (advise is not None)


def test_glibc_keeps_freed_memory_and_a_system_without_it_is_left_alone(monkeypatch):
    requested = []

    class Libc:
        def __init__(self, name):
            self.madvise, self.mallopt = lambda *x: 0, lambda *x: requested.append(x)

    class OtherLibc:  # musl has no mallopt
        def __init__(self, name):
            self.madvise = lambda *x: 0

    advise = memory._advise.__wrapped__
    monkeypatch.setattr(ctypes, "CDLL", Libc)
    monkeypatch.setattr(sys, "platform", "linux")
    assert advise() is not None and requested == [(-3, 32 << 20), (-1, 128 << 20)]
    monkeypatch.setattr(ctypes, "CDLL", OtherLibc)
    assert advise() is None
    monkeypatch.setattr(sys, "platform", "darwin")
    assert advise() is None and len(requested) == 2

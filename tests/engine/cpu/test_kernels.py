"""PyTorch's fused CPU attention as it is corrected here, and its replacement by products. Buffers and saved
weights: reused from call to call, never by two at once, within bounds."""

import ctypes
import platform
import sys
from math import inf
from threading import Thread

import pytest
import torch

import new_process
from regard import compat
from regard.engine.cpu import kernels, tiles
from tile_cases import tensors


def added(allowed):
    """What is added to the scores."""
    return torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, -inf)


def test_the_op_as_it_is_corrected_here():
    """An empty row has −∞ and zeros; no queries and no keys do not end the process."""
    q, k, v = (x.detach() for x in tensors(n=3))
    allowed = torch.tensor([[True, True, False], [False] * 3, [True] * 3])
    o, lse = kernels.fused_forward(q, k, v, 1.0, added(allowed), empty=~allowed.any(-1))
    assert (lse[:, :, 1] == -inf).all() and not o[:, :, 1].any() and lse[:, :, ::2].isfinite().all()
    assert kernels.fused_forward(q, k[:, :, :0], v[:, :, :0], 1.0)[0].shape == (2, 2, 3, 3)
    nothing = q[:, :, :0], k, v, o[:, :, :0], lse[:, :, :0]
    for got, x in zip(kernels.fused_backward(o[:, :, :0], nothing, 1.0), "qkv"):
        assert not got.any(), x


def test_without_the_private_op_products_give_the_same(monkeypatch):
    q, k, v = (x.detach() for x in tensors(n=7, h=4))
    allowed = torch.ones(7, 7, dtype=torch.bool).tril()
    allowed[2] = False

    def both():
        o, lse = kernels.fused_forward(q, k, v, 0.4, added(allowed), empty=~allowed.any(-1))
        of = q, k, v, o, lse.masked_fill(lse == -inf, inf)
        return o, lse, *kernels.fused_backward(o + 1, of, 0.4, added(allowed))

    fused = both()
    monkeypatch.setattr(compat, "flash_forward", compat._flash_by_products)
    monkeypatch.setattr(compat, "flash_backward", compat._flash_backward_by_products)
    for a, b in zip(fused, both()):
        torch.testing.assert_close(a, b)


def test_buffers_give_the_same_memory_until_more_is_requested():
    buffers = kernels.Buffers(torch.zeros(1))
    first = buffers("s", 2, 3)
    assert buffers("s", 2, 3) is first and buffers("s", 6).data_ptr() == first.data_ptr()
    assert buffers("ds", 2, 3).data_ptr() != first.data_ptr()
    assert buffers("s", 7, 3).shape == (7, 3)
    assert buffers("s", 2, 3).data_ptr() == buffers("s", 7, 3).data_ptr()


def test_no_two_threads_get_the_same_buffers_and_few_sets_stay(monkeypatch):
    monkeypatch.setattr(kernels, "MAX_POOLED", 3)
    monkeypatch.setattr(kernels, "_pool", [])
    in_use, shared = set(), []

    def run(buffers, q):
        if id(buffers) in in_use:
            shared.append(buffers)
        in_use.add(id(buffers))
        buffers("s", 100).fill_(1.0).sum()
        in_use.discard(id(buffers))

    def many():
        for _ in range(200):
            kernels.with_buffers(run, torch.zeros(1))

    threads = [Thread(target=many) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not shared and 0 < len(kernels._pool) <= 3 + 7  # at worst, each of the others had looked before


def test_weights_beyond_the_budget_are_not_saved():
    run = tiles.Executor(None, 1.0, kernels.Buffers(torch.zeros(1)), 30)
    taken = [run.save((2, 3, 4)), run.save((1, 2, 4)), run.save((1, 2, 3))]
    assert [None if x is None else tuple(x.shape) for x in taken] == [(2, 3, 4), None, (1, 2, 3)]
    assert run.weights == taken


def test_glibc_keeps_freed_memory_and_a_system_without_it_is_left_alone(monkeypatch):
    requested = []

    class Libc:
        def __init__(self, name):
            self.mallopt = lambda *x: requested.append(x)

    class OtherLibc:  # musl has no mallopt
        def __init__(self, name):
            pass

    keep = kernels.keep_freed_memory.__wrapped__
    monkeypatch.setattr(ctypes, "CDLL", Libc)
    monkeypatch.setattr(sys, "platform", "linux")
    keep()
    assert requested == [(-3, 32 << 20), (-1, 128 << 20)]
    monkeypatch.setattr(ctypes, "CDLL", OtherLibc)
    keep()
    monkeypatch.setattr(ctypes, "CDLL", Libc)
    monkeypatch.setattr(sys, "platform", "darwin")
    keep()
    assert len(requested) == 2


CALLS = """
import resource, torch
from regard.engine.attention import attention
from regard.pattern import every, window

q, k, v = (torch.randn(1, 8, 2048, 64, requires_grad=True) for _ in range(3))
pages = []
for _ in range(8):
    o = attention(q, k, v, window(64) | every(64), backend="tiles")
    torch.autograd.grad(o, (q, k, v), o.detach())
    pages.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(pages[-1] - pages[0])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_calls_write_to_the_memory_that_earlier_calls_freed():
    """The first call takes 18,000 fresh pages. The next seven took 2,000 to 4,100; without this, 15,600 or more."""
    done = new_process.run(CALLS)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 8000

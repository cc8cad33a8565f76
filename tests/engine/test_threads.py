"""Prepared calls under threads: the same bits as from one thread."""

import time
from threading import Thread

import pytest
import torch

import regard as rg
from regard.engine.backends import PREPARED
from regard.engine.call import Cache


def calls():
    """Mixed shapes, patterns and options, with and without gradients."""
    g = torch.Generator().manual_seed(0)
    found = []
    for n in (7, 64, 131, 200, 333):
        for pattern in (None, rg.causal(), rg.window(3), rg.causal() & (rg.window(8) | rg.every(16))):
            for grad in (False, True):
                inputs = [torch.randn(1, 4, n, 16, generator=g).requires_grad_(grad) for _ in range(3)]
                found.append((inputs, pattern, {}))
    inputs = [torch.randn(2, 4, 90, 16, generator=g).requires_grad_() for _ in range(3)]
    slopes = rg.position.ByDistance(slopes=torch.rand(4, generator=g))
    found.append((inputs, rg.causal(), {"bias": slopes}))
    found.append((inputs, rg.window(5), {"lengths": torch.tensor([90, 31])}))
    found.append((inputs, rg.window(5), {"return_lse": True}))
    return found


def results(inputs, pattern, options):
    out = rg.attention(*inputs, pattern, **options)
    outs = out if isinstance(out, tuple) else (out,)
    if not inputs[0].requires_grad:
        return [x.detach() for x in outs]
    return [*(x.detach() for x in outs), *torch.autograd.grad(outs[0].square().sum(), inputs)]


@pytest.mark.parametrize("seconds", [1, pytest.param(20, marks=pytest.mark.long)])
def test_eight_threads_give_the_bits_of_one(seconds, monkeypatch):
    monkeypatch.setattr(PREPARED, "limit", 24)  # fewer than there are calls: entries are evicted all the time
    PREPARED.clear()
    some = calls()
    wanted = [results(*call) for call in some]
    end, wrong, rounds = time.monotonic() + seconds, [], [0] * 8

    def run(first):
        torch.set_num_threads(1)
        try:
            while time.monotonic() < end:
                for i in range(len(some)):
                    at = (5 * first + i * (first + 1)) % len(some)
                    if not all(map(torch.equal, results(*some[at]), wanted[at])):
                        wrong.append(at)
                rounds[first] += 1
        except Exception as error:
            wrong.append(error)

    threads = [Thread(target=run, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and all(rounds) and len(PREPARED) <= 24


def test_a_cache_is_bounded_under_threads():
    cache = Cache(16)

    def fill(first):
        for i in range(3000):
            key = (first * i) % 64
            assert (cache.get(key) or cache.put(key, str(key))) == str(key)

    threads = [Thread(target=fill, args=(i,)) for i in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(cache) == 16

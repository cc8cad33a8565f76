"""Where the time of one call under autograd goes: each kernel on the GPU, and the CPU time to launch it.

    PYTHONPATH=src python3 bench/gpu_overhead.py

CPU times are those of calls issued back to back, with one synchronization at the end: if they are longer than the
kernels, the GPU waits. `to the thread` and `back` are autograd's: it runs the backward of CUDA tensors in its own
thread.
"""

import time
from collections import defaultdict
from functools import partial

import torch
from torch.profiler import ProfilerActivity, profile

import regard as rg
from regard.engine.call import Options
from regard.engine.cuda import host
from regard.engine.cuda.call import task

CASES = [(rg.causal() & (rg.window(128) | rg.every(64)), 16384, d) for d in (64, 128)]
CALLS = 60


def microseconds(fn) -> float:
    """Of the CPU, per call."""
    for _ in range(5):
        fn()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(CALLS):
        fn()
    took = time.perf_counter() - begin
    torch.cuda.synchronize()
    return 1e6 * took / CALLS


def kernels_of(fn) -> list[tuple[float, int, str]]:
    """Microseconds on the GPU, launches and name of each kernel of one call."""
    for _ in range(3):
        fn()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        for _ in range(10):
            fn()
        torch.cuda.synchronize()
    rows = [(e.self_device_time_total / 10, e.count // 10, e.key) for e in seen.key_averages()]
    return sorted((row for row in rows if row[0] > 0), reverse=True)


def stations(fn) -> dict[str, float]:
    """Median microseconds between the stations of fn(), a call of autograd.grad over one prepared call."""
    marks: dict[str, float] = {}
    inner = host.PreparedAttention.backward

    def timed(*args):
        marks["enter"] = time.perf_counter()
        out = inner(*args)
        marks["leave"] = time.perf_counter()
        return out

    found = defaultdict(list)
    host.PreparedAttention.backward = timed
    try:
        for _ in range(CALLS):
            torch.cuda.synchronize()
            o, inputs, do = fn()
            begin = time.perf_counter()
            torch.autograd.grad(o, inputs, do)
            end = time.perf_counter()
            found["to the thread"].append(marks["enter"] - begin)
            found["backward itself"].append(marks["leave"] - marks["enter"])
            found["back"].append(end - marks["leave"])
    finally:
        host.PreparedAttention.backward = inner
    return {name: 1e6 * float(torch.tensor(times).median()) for name, times in found.items()}


def one(pattern, n: int, d: int) -> None:
    q, k, v, do = (torch.randn(1, 16, n, d, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]

    def apart(attend):
        return lambda: torch.autograd.grad(attend(*inputs), inputs, do)

    made = task(q, v, Options(pattern, 0, 1, d**-0.5))
    direct = host.PreparedAttention(made, True)
    public = partial(rg.attention, pattern=pattern)
    o, lse = host.forward(q, k, v, made)
    print(f"\n{pattern!r} n={n} d={d}; microseconds")
    for took, count, name in kernels_of(apart(direct)):
        print(f"  GPU {took:8.1f} in {count} launches of {name[:70]}")
    times = {
        "forward, called directly": lambda: host.forward(q, k, v, made),
        "backward, called directly": lambda: host.backward((q, k, v, o, lse), (do, None), made),
        "forward under autograd": lambda: direct(*inputs),
        "both under autograd": apart(direct),
        "both by rg.attention": apart(public),
        "forward by rg.attention": lambda: public(q, k, v),
    }
    for name, fn in times.items():
        print(f"  CPU {microseconds(fn):8.1f} {name}")
    with torch.autograd.set_multithreading_enabled(False):
        print(f"  CPU {microseconds(apart(direct)):8.1f} both under autograd, in one thread")
    for name, took in stations(lambda: (direct(*inputs), inputs, do)).items():
        print(f"  CPU {took:8.1f} {name}")


if __name__ == "__main__":
    for case in CASES:
        one(*case)

"""How much of a pattern's saving is realised on a GPU, against SDPA and compiled FlexAttention.

    realised = max(time of full SDPA by its best backend × count / (n·m), bytes of q, k, v, o / copy rate) / our time

Forward+backward: SDPA's forward+backward and three times the bytes. 1.0 is the limit. Results are compared first.

    PYTHONPATH=src python3 bench/gpu_patterns.py --group check forward backward flex
"""

import argparse
import concurrent.futures
import json
import math
import multiprocessing
import os
import random
import time
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import regard as rg
from regard.engine.cuda import launches
from regard.engine.cuda.call import CallLayout, Config, Configs, Task, default, layout
from regard.engine.cuda.host import forward
from regard.engine.cuda.prepared import Program
from regard.engine.cuda.schedule import device_passes
from regard.engine.cuda.triton.backward import FOR_KEYS, FOR_QUERIES
from regard.pattern import Pattern, causal, dilated, every, strided, window

HEADS = 16
DEVICE = "cuda"
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}

MAIN: tuple[tuple[Pattern, int], ...] = (
    (window(128) | every(64), 16384),
    (window(256) | every(128), 32768),
    (causal() & (window(128) | every(64)), 16384),
    (causal() & (window(256) | every(128)), 32768),
    (window(256) | every(256), 65536),
)
OTHER: tuple[tuple[Pattern, int], ...] = (
    (dilated(64, 16), 16384),
    (causal() & strided(128), 16384),
    (window(256), 32768),
    (causal(), 16384),
)
FLEX = tuple(
    (pattern, n) for pattern, n in MAIN + OTHER if n <= 32768
)  # its mask of 65536² takes too much memory

# tile, block, warps, stages, cap on registers
SWEEP = {
    128: {
        "stream": ((64, 64, 4, 1, 168), (64, 64, 4, 1)),
        "dq": (
            (64, 64, 4, 2), (64, 64, 4, 2, 168), (64, 32, 4, 2, 168), (64, 32, 4, 3, 168), (128, 32, 8, 2, 128),
            (64, 32, 4, 2, 128), (128, 64, 8, 2),
        ),
        "dkv": (
            (64, 64, 4, 2), (64, 64, 4, 3), (64, 32, 4, 2), (64, 32, 4, 3), (64, 32, 4, 2, 168), (128, 32, 8, 2),
            (128, 64, 8, 2),
        ),
    },
    64: {
        "stream": ((64, 64, 4, 1, 128), (64, 64, 4, 1, 168)),
        "dq": (
            (64, 64, 4, 2), (64, 64, 4, 2, 168), (64, 64, 4, 3, 168), (64, 64, 4, 2, 128), (128, 64, 8, 2, 128),
            (128, 64, 8, 3), (64, 128, 4, 2),
        ),
        "dkv": (
            (64, 64, 4, 2), (64, 64, 4, 2, 168), (64, 64, 4, 3, 168), (64, 64, 4, 3), (128, 64, 8, 2),
            (128, 64, 8, 3), (64, 32, 4, 3, 168),
        ),
    },
}  # fmt: skip


def bench(fn, ms: int = 60) -> float:
    return triton.testing.do_bench(fn, warmup=25, rep=ms, return_mode="median")


def tensors(n: int, d: int, count: int = 3, heads: int = HEADS, dtype=torch.bfloat16):
    return [torch.randn(1, heads, n, d, device=DEVICE, dtype=dtype) for _ in range(count)]


def in_rounds(calls: dict, rounds: int = 20, row: int = 6, lead: int = 2) -> dict[str, float]:
    """Median milliseconds of each call, in rounds of random order: what disturbs the machine disturbs all of them.

    As in `do_bench`, the cache is cleared before each call, and nothing synchronizes in between. Each is called `row`
    times in a row, of which the first `lead` are not counted: autograd's thread still holds tensors of another.
    """
    for fn in calls.values():
        for _ in range(5):
            fn()
    clear = torch.empty(1 << 26, dtype=torch.int, device=DEVICE)
    names, order = list(calls), random.Random(0)
    events: dict = {k: [] for k in names}
    for _ in range(rounds):
        for name in order.sample(names, len(names)):
            for nth in range(row):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
                clear.zero_()
                begin.record()
                calls[name]()
                end.record()
                if nth >= lead:
                    events[name].append((begin, end))
    torch.cuda.synchronize()
    return {k: sorted(a.elapsed_time(b) for a, b in pairs)[len(pairs) // 2] for k, pairs in events.items()}


def forward_backward(fn, q, k, v, do):
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]

    def run():
        torch.autograd.grad(fn(*inputs), inputs, do)

    return run


def ours(pattern: Pattern):
    """Through `rg.attention`, by the engine's own choice."""
    return lambda q, k, v: rg.attention(q, k, v, pattern)


# Parity


def dense(q, k, v, allowed):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~allowed, -math.inf)
    lse = scores.logsumexp(-1, keepdim=True)
    return (scores - torch.where(lse == -math.inf, 0, lse)).exp() @ v


def parity(job) -> str:
    """Output and gradients against float64, within twice the error of plain PyTorch in the same dtype + 4 ulp.

    A batch of 4, so that a program of the streaming kernel has several tiles.
    """
    pattern, n, d, dtype, h_kv = job
    torch.manual_seed(n + d)
    q, do = (torch.randn(4, HEADS, n, d, device=DEVICE, dtype=dtype) for _ in range(2))
    k, v = (torch.randn(4, h_kv, n, d, device=DEVICE, dtype=dtype) for _ in range(2))
    allowed = pattern.allowed(n, device=DEVICE)
    results = []
    kernels = partial(rg.attention, pattern=pattern, backend="triton")
    for kind, fn in ((torch.float64, None), (dtype, None), (dtype, kernels)):
        x = [t.to(kind).requires_grad_() for t in (q, k, v)]
        o = dense(*x, allowed) if fn is None else fn(*x)
        results.append([o, *torch.autograd.grad(o, x, do.to(kind))])
    for name, ref, plain, fast in zip(("o", "dq", "dk", "dv"), *results):
        error = (fast - ref).abs().max().item()
        ulp = torch.finfo(dtype).eps * ref.abs().max().item()
        budget = 2 * (plain - ref).abs().max().item() + 4 * ulp
        if not error <= budget:
            return f"{pattern} n={n} d={d} {dtype}: {name} is off by {error:.2e} > {budget:.2e}"
    return ""


def at_once(fn, jobs) -> None:
    """Each job in a process of its own: kernels compile side by side and stay in Triton's cache on disk."""
    begin = time.time()
    with concurrent.futures.ProcessPoolExecutor(8, multiprocessing.get_context("spawn")) as pool:
        complaints = [c for c in pool.map(fn, jobs) if c]
    print(f"{fn.__name__}: {len(jobs)} in {time.time() - begin:.0f} s", *complaints, sep="\n  ", flush=True)
    if fn is parity and complaints:
        raise SystemExit("parity fails: no timing")


def check(widths) -> None:
    jobs = [(p, 1200, d, torch.bfloat16, HEADS) for d in widths for p, _ in MAIN + OTHER]
    jobs += [(MAIN[0][0], 1201, 80, torch.bfloat16, HEADS), (MAIN[2][0], 1201, 64, torch.float16, 4)]
    jobs += [
        (MAIN[0][0], 1201, 128, torch.bfloat16, 4),
        (window(8) | strided(64), 777, 64, torch.float16, HEADS),
    ]
    at_once(parity, jobs)


# Configurations


def one_kernel(kind: str, pattern: Pattern, n: int, d: int, config: Config):
    """A call that launches one direction alone, and the pieces it needs."""
    configs = Configs(config, config, config, config if kind == "stream" else None)
    task = Task(pattern, 0, 1, d**-0.5, 0.0, None, configs)
    q, k, v, do = tensors(n, d, 4)
    if kind in ("forward", "stream"):
        return lambda: forward(q, k, v, task)
    o, lse = forward(q, k, v, Task(pattern, 0, 1, d**-0.5, 0.0, None, default(d, d, q.dtype)))
    call = CallLayout(task, tuple(map(layout, (q, k, v, o, do))), q.dtype, q.device)
    route = device_passes(call.place, config, kind == "dkv", call.device)
    made, part = launches.gradients(call, route, config, FOR_KEYS if kind == "dkv" else FOR_QUERIES)
    names = "q", "k", "v", "o", "do", "lse", "stats", "dq", "dk", "dv"
    program = Program(names, made, {"part": part}, q.device)
    grads = [torch.empty_like(q) for _ in range(3)]
    given = q, k, v, o, do, lse, lse.new_zeros((1, HEADS, n, 4)), *grads

    def run():
        program.run(given, 1 << 33)
        return grads[0] if kind == "dq" else grads[1:]

    return run


def compile_one(job) -> str:
    """Fill Triton's disk cache from a process of its own, so that many compile at once."""
    kind, pattern, n, d, config = job
    try:
        one_kernel(kind, pattern, n, d, Config(*config))()
        torch.cuda.synchronize()
        return ""
    except Exception as error:
        return f"{kind} d={d} {config}: {str(error)[:100]}"


def sweep(widths, kinds, out) -> None:
    jobs = [
        (kind, pattern, n, d, c)
        for pattern, n in (MAIN[0], MAIN[2])
        for d in widths
        for kind in kinds
        for c in SWEEP[d][kind]
    ]
    at_once(compile_one, jobs)
    for kind, pattern, n, d, c in jobs:
        try:
            torch.manual_seed(0)  # every configuration is given the same numbers
            call = one_kernel(kind, pattern, n, d, Config(*c))
            norms = (
                [x.double().norm().item() for x in call()]
                if kind != "dq"
                else [call().double().norm().item()]
            )
            took = bench(call, 40)
        except Exception as error:
            norms, took = [repr(error)[:60]], math.nan
        out.append({"group": "sweep", "kind": kind, "d": d, "config": c, "ms": took})
        print(f"{kind:8} {pattern!r:40} d={d:<4} {c!s:24} {took:.4f} ms, norms {norms}", flush=True)


# The table


def sdpa(n: int, d: int, backward: bool, is_causal: bool = False) -> tuple[float, str]:
    """Milliseconds of the best backend, and its name."""
    q, k, v, do = tensors(n, d, 4)
    best = (math.inf, "none")
    attend = partial(F.scaled_dot_product_attention, is_causal=is_causal)
    for name, backend in BACKENDS.items():
        try:
            with sdpa_kernel(backend):
                fn = forward_backward(attend, q, k, v, do)
                took = bench(fn if backward else lambda: attend(q, k, v))
        except RuntimeError:
            continue
        best = min(best, (took, name))
    return best


def flex(pattern: Pattern, n: int, d: int) -> float:
    """FlexAttention compiled afresh for this shape: after 8 recompilations it silently runs unfused."""
    torch._dynamo.reset()
    fn = torch.compile(flex_attention, dynamic=False)
    mask = create_block_mask(lambda b, h, i, j: pattern.allows(i, j), None, None, n, n, device=DEVICE)
    q, k, v = tensors(n, d)
    with torch.no_grad():
        return bench(lambda: fn(q, k, v, block_mask=mask))


def copy_rate() -> float:
    """Bytes a millisecond through memory, reads and writes together."""
    x = torch.randn(1 << 29, device=DEVICE)
    y = torch.empty_like(x)
    return 2 * 4 * x.numel() / bench(lambda: y.copy_(x))


def in_turn(one, other, times: int = 5) -> tuple[float, float]:
    """Medians of both, measured in turn, so that a change of the clock rate affects both."""
    found = [(one(), other()) for _ in range(times)]
    return tuple(sorted(x)[times // 2] for x in zip(*found))  # type: ignore[return-value]


def against_full(
    pattern: Pattern, backend: str, q, k, v, do, backward: bool, threads: bool = True
) -> tuple[float, float]:
    """Milliseconds of ours and of SDPA over all pairs, in turn, because the clock rate falls under load.

    Without autograd's threads the backward pass runs in this thread, and no call waits for another thread to wake up.
    """
    inputs = q, k, v, do

    def timed(fn) -> float:
        with torch.set_grad_enabled(backward), torch.autograd.set_multithreading_enabled(threads):
            return bench(forward_backward(fn, *inputs) if backward else partial(fn, *inputs[:3]))

    def full() -> float:
        with sdpa_kernel(BACKENDS[backend]):
            return timed(F.scaled_dot_product_attention)

    return in_turn(lambda: timed(ours(pattern)), full)


def table(cases, widths, backward: bool, rate: float, out) -> None:
    print(f"\n{'forward+backward' if backward else 'forward'}, bf16, {HEADS} heads, in ms")
    best: dict[tuple[int, int], str] = {}
    for d in widths:
        for pattern, n in cases:
            if (n, d) not in best:
                best[n, d] = sdpa(n, d, backward)[1]
            backend = best[n, d]
            q, k, v, do = tensors(n, d, 4)
            took, full = against_full(pattern, backend, q, k, v, do, backward)
            part = pattern.count(n) / n**2
            by_count = full * part
            by_bytes = (3 if backward else 1) * 4 * q.numel() * q.element_size() / rate
            realised, alone = max(by_count, by_bytes) / took, {}
            if backward:
                mine, theirs = against_full(pattern, backend, q, k, v, do, backward, threads=False)
                alone = {
                    "ours_one_thread_ms": mine,
                    "sdpa_one_thread_ms": theirs,
                    "realised_one_thread": max(theirs * part, by_bytes) / mine,
                }
            row = {
                "group": "forward+backward" if backward else "forward", "pattern": repr(pattern), "n": n, "d": d,
                "ours_ms": took, "sdpa_ms": full, "sdpa": backend, "by_count_ms": by_count,
                "by_bytes_ms": by_bytes, "realised": realised, **alone,
            }  # fmt: skip
            out.append(row)
            print(
                f"{pattern!r:40} n={n:<6} d={d:<4} ours {took:7.3f}  full {full:8.3f} ({backend})  "
                f"by count {by_count:6.3f}  by bytes {by_bytes:6.3f}  realised {realised:.3f}"
                + (f"  in one thread {alone['realised_one_thread']:.3f}" if alone else ""),
                flush=True,
            )


def time_of(fn, q, k, v, times: int = 5) -> float:
    """Forward time, the median of several: if the CPU takes as long as the GPU, single ones differ by a third."""
    with torch.no_grad():
        return sorted(bench(partial(fn, q, k, v)) for _ in range(times))[times // 2]


def against_flex(cases, widths, out) -> None:
    print(
        f"\nforward against compiled FlexAttention of torch {torch.__version__}, compiled afresh for each shape"
    )
    for d in widths:
        for pattern, n in cases:
            took, theirs = time_of(ours(pattern), *tensors(n, d)), flex(pattern, n, d)
            out.append(
                {
                    "group": "flex",
                    "pattern": repr(pattern),
                    "n": n,
                    "d": d,
                    "ours_ms": took,
                    "flex_ms": theirs,
                }
            )
            print(
                f"{pattern!r:40} n={n:<6} d={d:<4} ours {took:7.3f}  flex {theirs:8.3f}  {theirs / took:5.1f} ×",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser()
    groups = ["check", "sweep", "forward", "backward", "other", "flex"]
    parser.add_argument("--group", nargs="+", choices=groups, default=["check", "forward", "backward"])
    parser.add_argument("--width", nargs="+", type=int, default=[128, 64])
    parser.add_argument("--kind", nargs="+", choices=["stream", "dq", "dkv"], default=["stream", "dq", "dkv"])
    options = parser.parse_args()
    torch.manual_seed(0)
    out: list[dict] = []
    versions = f"torch {torch.__version__}, triton {triton.__version__}, {torch.cuda.get_device_name(0)}"
    rate = copy_rate()
    print(f"{versions}; copy {rate / 1e9:.2f} TB/s")
    runs = {
        "check": lambda: check(options.width),
        "sweep": lambda: sweep(options.width, options.kind, out),
        "forward": lambda: table(MAIN + OTHER, options.width, False, rate, out),
        "backward": lambda: table(MAIN, options.width, True, rate, out),
        "other": lambda: table(OTHER, options.width, True, rate, out),
        "flex": lambda: against_flex(FLEX, options.width[:1], out),
    }
    for group in options.group:
        runs[group]()
        if folder := os.environ.get("OUT"):
            kept = {"versions": versions, "copy_bytes_per_ms": rate, "rows": out}
            Path(folder, "gpu_patterns.json").write_text(json.dumps(kept, indent=1))


if __name__ == "__main__":
    main()

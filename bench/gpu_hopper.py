"""Each kernel of a call on Hopper: in Gluon, against the general Triton kernels, microseconds on the GPU.

    PYTHONPATH=src python3 bench/gpu_hopper.py [--check] [--stored] [--width 128 64]

First every configuration is compiled, many processes at a time, and checked against float64 (o, lse, dq, dk, dv
at n = 1280, batch 2, with the error rule of bench/gpu_patterns.py); then each is timed by itself. A row is a
pattern, a width and a configuration; the columns are the kernels of forward and backward, by the profiler.
"""

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import time
import traceback
from dataclasses import replace
from pathlib import Path

import torch
from gpu_patterns import MAIN, OTHER, dense, tensors
from torch.profiler import ProfilerActivity, profile

from regard.engine.call import Options
from regard.engine.cuda.call import HALF, task
from regard.engine.cuda.host import PreparedAttention
from regard.pattern import Pattern, causal, every, window

PLAIN = "plain Triton"
NONE = dict.fromkeys(("hopper_forward", "hopper_dq", "hopper_dkv", "one_launch"))
VARIANTS = {d: {"stored": HALF[d], PLAIN: replace(HALF[d], **NONE)} for d in (128, 64)}
TIMED = MAIN[2], MAIN[0], MAIN[3], MAIN[1]
SHORT_NAMES = (
    "hopper_forward",
    "hopper_dq",
    "hopper_dkv",
    "forward_kernel",
    "dq_kernel",
    "dkv_kernel",
    "sum_kernel",
)


def attend(q, k, v, pattern, configs):
    options = Options(pattern, 0, 1, q.shape[-1] ** -0.5)
    return PreparedAttention(task(q, v, options, configs=configs), True)(q, k, v)


def off(job) -> str:
    """What is wrong with one variant on one pattern, or nothing."""
    pattern, n, d, name, h_kv, dtype = job
    try:
        return _off(pattern, n, d, VARIANTS[d][name], h_kv, dtype)
    except Exception:
        return f"{job}: {traceback.format_exc()[-1500:]}"


def _off(pattern, n, d, configs, h_kv, dtype) -> str:
    torch.manual_seed(n + d)
    q, do = (torch.randn(2, 8, n, d, device="cuda", dtype=dtype) for _ in range(2))
    k, v = (torch.randn(2, h_kv, n, d, device="cuda", dtype=dtype) for _ in range(2))
    allowed = pattern.allowed(n, device="cuda")
    results = []
    for kind, fast in ((torch.float64, False), (dtype, False), (dtype, True), (dtype, True)):
        x = [t.to(kind).requires_grad_() for t in (q, k, v)]
        o = attend(*x, pattern, configs) if fast else dense(*x, allowed)
        results.append([o, *torch.autograd.grad(o, x, do.to(kind))])
    report = ""
    for name, ref, plain, fast, again in zip(("o", "dq", "dk", "dv"), *results):
        error = (fast - ref).abs().max().item()
        budget = 2 * (plain - ref).abs().max().item() + 4 * torch.finfo(dtype).eps * ref.abs().max().item()
        if not error <= budget:
            report += (
                f"{pattern} n={n} d={d} h_kv={h_kv} {dtype}: {name} is off by {error:.2e} > {budget:.2e}\n"
            )
        if not torch.equal(fast, again):
            report += f"{pattern} n={n} d={d}: {name} differs in a second run\n"
    return report


def jobs(widths) -> list:
    bf16, half = torch.bfloat16, torch.float16
    out = [(p, 1280, d, "stored", 8, bf16) for d in widths for p, _ in MAIN + OTHER]  # flattened heads
    out += [
        (MAIN[2][0], n, d, "stored", h, t) for d in widths for n, h, t in ((1201, 2, bf16), (4500, 8, half))
    ]
    out += [
        (causal() & (window(128) | every(64)), 2200, d, name, 8, bf16) for d in widths for name in VARIANTS[d]
    ]
    return out


def kernels_of(pattern: Pattern, n: int, d: int, configs) -> dict[str, float]:
    """Microseconds of each kernel of one call, forward and backward."""
    q, k, v, do = tensors(n, d, 4)
    inputs = [x.requires_grad_() for x in (q, k, v)]

    def call():
        torch.autograd.grad(attend(*inputs, pattern, configs), inputs, do)

    clear = torch.empty(1 << 28, dtype=torch.int8, device="cuda")
    for _ in range(3):
        call()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(12):
            clear.zero_()
            call()
        torch.cuda.synchronize()
    found = {
        e.key: e.self_device_time_total / 12 for e in seen.key_averages() if e.self_device_time_total > 0
    }
    return {name: sum(us for key, us in found.items() if key.startswith(name)) for name in SHORT_NAMES}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", nargs="+", type=int, default=[128, 64])
    parser.add_argument("--check", action="store_true", help="only check against float64")
    parser.add_argument("--stored", action="store_true", help="only the stored configurations")
    options = parser.parse_args()
    begin, work = time.time(), jobs(options.width)
    with concurrent.futures.ProcessPoolExecutor(14, multiprocessing.get_context("spawn")) as pool:
        wrong = [report for report in pool.map(off, work) if report]
    print(
        f"{len(work)} cases in {time.time() - begin:.0f} s, {len(wrong)} wrong", *wrong, sep="\n", flush=True
    )
    rows = []
    for d in () if options.check else options.width:
        for name, configs in VARIANTS[d].items():
            if options.stored and name == PLAIN:
                continue
            for pattern, n in TIMED:
                try:
                    times = kernels_of(pattern, n, d, configs)
                except Exception as error:
                    print(f"{pattern!r} d={d} {name}: {error!r}"[:300], flush=True)
                    continue
                rows.append({"pattern": repr(pattern), "n": n, "d": d, "configs": name, **times})
                report = "  ".join(f"{k} {us:.0f}" for k, us in times.items() if us)
                print(
                    f"{pattern!r:40} n={n} d={d:<4} {name:16} all {sum(times.values()):.0f}: {report}",
                    flush=True,
                )
    if folder := os.environ.get("OUT"):
        Path(folder, "gpu_hopper.json").write_text(json.dumps({"wrong": wrong, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()

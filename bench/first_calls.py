"""What the first call with a new length or offset takes, where it is planned, and a repeated one; on a CPU or a GPU.

Each call has a length or an offset that was not seen before: a prompt of another length, a chunk of queries that
continues a growing cache, a batch whose rows are at other positions. `masked` is PyTorch's SDPA with the mask, made
in each call, as a caller without regard does. ratio = time of `masked` / our time, medians; results are compared.

PYTHONPATH=src python bench/first_calls.py [--device cuda] [--drawn SEED] [--before OTHER_TREE/src] [--write]

--drawn: patterns and sizes from a seed, as nobody chose them, in place of the fixed ones. On a GPU calls are in
bfloat16, a time ends when the GPU has finished, and kernels have been compiled by two earlier calls of each case.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from origin import origin
from torch import Tensor

import regard as rg

CALLS = 12
SHAPE = {"cpu": (8, 64), "cuda": (16, 128)}  # heads, and their width
# The largest difference of two results, for values of a standard normal distribution.
TOLERANCE = {"cpu": 1e-5, "cuda": 4e-2}
BAND = rg.causal() & (rg.window(512) | rg.sinks(4))
PATTERNS = [
    rg.causal(),
    BAND,
    rg.causal() & (rg.window(128) | rg.every(64)),
    rg.causal() & (rg.window(64) | rg.strided(64)),
    rg.causal() & (rg.window(64) | rg.dilated(64, 8) | rg.dilated(64, 64)),
]
# Batch rows, queries, keys; what is new in each call.
SIZES = [
    (1, 300, 300, "length"),
    (1, 1500, 1500, "length"),
    (1, 16, 2048, "offset"),
    (8, 16, 2048, "offsets"),
]
SIZES += [(8, 1, 2048, "offsets"), (1, 1, 2048, "cache")]
LONG = [(1, 6000, 6000, "length"), (1, 512, 16000, "offset")]  # on a GPU


def drawn(seed: int, count: int = 40) -> list[tuple[rg.Pattern, tuple[int, int, int, str]]]:
    """Compositions of one to three words, each at a size of its own."""
    r = random.Random(seed)
    words = [
        lambda: rg.window(r.randrange(4, 400)),
        lambda: rg.every(r.randrange(3, 90)),
        lambda: rg.strided(r.randrange(8, 150)),
        lambda: rg.dilated(r.randrange(4, 60), r.randrange(2, 20)),
        lambda: rg.sinks(r.randrange(1, 30)),
        lambda: rg.blocks(r.randrange(30, 600)),
        lambda: rg.prefix(r.randrange(10, 300)),
    ]
    cases = []
    for _ in range(count):
        pattern = r.choice(words)()
        for _ in range(r.randrange(3)):
            pattern = pattern | r.choice(words)()
        new = r.choice(["length", "length", "offset", "offsets", "cache"])
        n = r.randrange(100, 2000) if new == "length" else 1 if new == "cache" else r.randrange(2, 200)
        m = n if new == "length" else r.randrange(1000, 4000)
        cases.append((rg.causal() & pattern, (r.choice([2, 4]) if new == "offsets" else 1, n, m, new)))
    return cases


def calls(batch: int, n: int, m: int, new: str, device: str) -> Iterator[tuple[int, int, int | Tensor]]:
    """Queries, keys and the position of the first query, of one call after the other."""
    generator = torch.Generator().manual_seed(n)
    for t in range(CALLS + 2):  # the first two are not counted
        if new == "length":
            yield n + t, m + t, 0
        elif new == "cache":
            yield n, m + t, m + t - n
        elif new == "offset":
            yield n, m, m // 2 + t
        else:
            yield n, m, torch.randint(m // 2, m - n, (batch,), generator=generator).to(device)


def attend(q: Tensor, k: Tensor, v: Tensor, pattern: rg.Pattern, at: int | Tensor) -> Tensor:
    return rg.attention(q, k, v, pattern, at=at)


def masked(q: Tensor, k: Tensor, v: Tensor, pattern: rg.Pattern, at: int | Tensor) -> Tensor:
    n, m = q.shape[2], k.shape[2]
    if isinstance(pattern, rg.causal) and n == m:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    allowed = pattern.allowed(n, m, at, device=q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)


def measured(device: str, pattern: rg.Pattern, batch: int, n: int, m: int, new: str) -> dict:
    torch.manual_seed(0)
    heads, width = SHAPE[device]
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    wait = (lambda: None) if device == "cpu" else torch.cuda.synchronize
    q, k, v = (torch.randn(batch, heads, m + CALLS + 2, width, device=device, dtype=dtype) for _ in range(3))
    first, again, other, off, backends = [], [], [], 0.0, set()
    for t, (n_now, m_now, at) in enumerate(calls(batch, n, m, new, device)):
        tensors = q[:, :, :n_now], k[:, :, :m_now], v[:, :, :m_now]
        times, outputs = [], []
        for run in (attend, attend, masked):
            wait()
            begun = time.perf_counter()
            outputs.append(run(*tensors, pattern, at))
            wait()
            times.append(1e3 * (time.perf_counter() - begun))
        off = max(off, *(float((o - outputs[-1]).abs().max()) for o in outputs))
        assert off < TOLERANCE[device], f"{pattern}: results differ by {off}"
        if t > 1:
            first.append(times[0])
            again.append(times[1])
            other.append(times[2])
        backends.add(rg.explain(*tensors, pattern, at=at).backend)
    ms = {name: statistics.median(x) for name, x in (("first", first), ("again", again), ("masked", other))}
    named = {
        "pattern": repr(pattern),
        "batch": batch,
        "n": n,
        "m": m,
        "new": new,
        "backends": sorted(backends),
    }
    return named | {
        "ms": ms,
        "first ratio": ms["masked"] / ms["first"],
        "again ratio": ms["masked"] / ms["again"],
    }


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--drawn", type=int, metavar="SEED")
    options.add_argument("--before", help="src of another tree, measured in a process of its own")
    options.add_argument("--write", action="store_true", help="write the table to bench/results/")
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    sizes_of_device = SIZES if given.device == "cpu" else SIZES + LONG
    cases = [(pattern, sizes) for pattern in PATTERNS for sizes in sizes_of_device]
    cases = cases if given.drawn is None else drawn(given.drawn)
    rows = [measured(given.device, pattern, *sizes) for pattern, sizes in cases]
    if given.before:
        env = {**os.environ, "PYTHONPATH": given.before}
        command = [sys.executable, __file__, "--device", given.device, "--threads", str(given.threads)]
        command += [] if given.drawn is None else ["--drawn", str(given.drawn)]
        printed = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
        for row, earlier in zip(rows, json.loads(printed)["rows"]):
            row["before"] = {name: earlier[name] for name in ("backends", "ms", "first ratio")}
    gpu = torch.cuda.get_device_name(0) if given.device == "cuda" else None
    table = {**origin(), "gpu": gpu, "threads": given.threads, "seed": given.drawn, "rows": rows}
    text = json.dumps(table, indent=1)
    print(text)
    if given.write:
        name = "first_calls" if given.drawn is None else "first_calls_drawn"
        name = f"{given.device.replace('cuda', 'gpu')}_{name}"
        path = Path(__file__).parent / "results" / f"{name}-{table['date'][:10]}.json"
        path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

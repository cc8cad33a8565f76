"""What the first call with a new length or offset takes on a CPU, where it is planned, and a repeated one.

Each call has a length or an offset that was not seen before: a prompt of another length, a chunk of queries that
continues a growing cache, a batch whose rows are at other positions. `masked` is PyTorch's SDPA with the mask, made
in each call, as a caller without regard does. ratio = time of `masked` / our time, medians; results are compared.

PYTHONPATH=src python bench/cpu_first_calls.py [--drawn SEED] [--before OTHER_TREE/src] [--write]

--drawn: patterns and sizes from a seed, as nobody chose them, in place of the fixed ones.
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

HEADS, KV_HEADS, WIDTH, CALLS = 8, 8, 64, 12
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


def calls(batch: int, n: int, m: int, new: str) -> Iterator[tuple[int, int, int | Tensor]]:
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
            yield n, m, torch.randint(m // 2, m - n, (batch,), generator=generator)


def attend(q: Tensor, k: Tensor, v: Tensor, pattern: rg.Pattern, at: int | Tensor) -> Tensor:
    return rg.attention(q, k, v, pattern, at=at)


def masked(q: Tensor, k: Tensor, v: Tensor, pattern: rg.Pattern, at: int | Tensor) -> Tensor:
    n, m = q.shape[2], k.shape[2]
    if isinstance(pattern, rg.causal) and n == m:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=pattern.allowed(n, m, at))


def measured(pattern: rg.Pattern, batch: int, n: int, m: int, new: str) -> dict:
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, HEADS, m + CALLS + 2, WIDTH) for _ in range(3))
    first, again, other, off, backends = [], [], [], 0.0, set()
    for t, (n_now, m_now, at) in enumerate(calls(batch, n, m, new)):
        tensors = q[:, :, :n_now], k[:, :, :m_now], v[:, :, :m_now]
        times, outputs = [], []
        for run in (attend, attend, masked):
            begun = time.perf_counter()
            outputs.append(run(*tensors, pattern, at))
            times.append(1e3 * (time.perf_counter() - begun))
        off = max(off, *(float((o - outputs[-1]).abs().max()) for o in outputs))
        assert off < 1e-5, f"{pattern}: results differ by {off}"
        if t > 1:
            first.append(times[0])
            again.append(times[1])
            other.append(times[2])
        sizes = {"batch": batch, "heads": HEADS, "kv_heads": KV_HEADS, "d_k": WIDTH}
        offsets = {"row_offsets": True} if isinstance(at, Tensor) else {"at": at}
        backends.add(rg.explain(pattern, n=n_now, m=m_now, **sizes, **offsets).backend)
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
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--drawn", type=int, metavar="SEED")
    options.add_argument("--before", help="src of another tree, measured in a process of its own")
    options.add_argument("--write", action="store_true", help="write the table to bench/results/")
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    cases = [(pattern, sizes) for pattern in PATTERNS for sizes in SIZES]
    cases = cases if given.drawn is None else drawn(given.drawn)
    rows = [measured(pattern, *sizes) for pattern, sizes in cases]
    if given.before:
        env = {**os.environ, "PYTHONPATH": given.before}
        command = [sys.executable, __file__, "--threads", str(given.threads)]
        command += [] if given.drawn is None else ["--drawn", str(given.drawn)]
        printed = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
        for row, earlier in zip(rows, json.loads(printed)["rows"]):
            row["before"] = {name: earlier[name] for name in ("backends", "ms", "first ratio")}
    table = {**origin(), "threads": given.threads, "seed": given.drawn, "rows": rows}
    text = json.dumps(table, indent=1)
    print(text)
    if given.write:
        name = "cpu_first_calls" if given.drawn is None else "cpu_first_calls_drawn"
        path = Path(__file__).parent / "results" / f"{name}-{table['date'][:10]}.json"
        path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

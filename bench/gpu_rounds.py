"""Tiles assigned to programs: neighbors at the same time, as `work_split` has it, against the longest first.

    PYTHONPATH=src python3 bench/gpu_rounds.py --seed 271 --cases 24 --out rounds.json

Calls are drawn by a seed: packed documents, patterns of gpu_fresh.py, and padded batches. Per call, milliseconds of
GPU time (CUDA graphs, the cache cleared before) forward and with both passes, twice by turns, and whether all results
and gradients have the same bits. Calls whose programs are the same either way are not measured.
"""

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import torch

import regard as rg
from regard.engine import backends
from regard.engine.cuda import documents, prepared, work_split

sys.path.insert(0, str(Path(__file__).parent))
import gpu_fresh
from gpu_peers import graph_of, timed

AS_IT_IS, PROCESSES = work_split._balanced, 12
changes = [0]  # how often the two differ


def longest_first(size, programs, *rule):
    return work_split._in_turn(np.argsort(-size, kind="stable"), size, programs, *rule)


def counted(size, programs, *rule):
    program_of = AS_IT_IS(size, programs, *rule)
    changes[0] += bool((program_of != longest_first(size, programs, *rule)).any())
    return program_of


def drawn(seed, count):
    """Name, pattern, n, width, heads, key heads, batch, other options."""
    r, cases = random.Random(seed), []
    others = iter(gpu_fresh.drawn(seed, count))
    while len(cases) < count:
        n, d, heads = (
            r.choice([4096, 8192, 16384, 32768]),
            r.choice([64, 96, 128, 128, 256]),
            r.choice([8, 12, 16]),
        )
        kv_heads, batch = r.choice([heads, heads, heads // 4]), r.choice([1, 1, 2])
        kind = r.choice(["documents", "documents", "pattern", "padded"])
        if kind == "documents":
            mean, lengths = r.choice([64, 200, 512, 1000, 3000]), []
            while sum(lengths) < n:
                lengths.append(min(1 + int(r.expovariate(1 / mean)), n - sum(lengths)))
            ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
            band, text = r.choice(
                [(rg.causal(), "causal"), (rg.full(), "full"), (rg.window(200), "window(200)")]
            )
            name = f"{len(lengths)} documents of {min(lengths)} to {max(lengths)}, {text}"
            cases.append((name, rg.documents(ids.cuda()) & band, n, d, heads, kv_heads, batch, {}))
        elif kind == "pattern":
            pattern, n, d, heads, kv_heads, batch = next(others)
            cases.append((repr(pattern), pattern, n, d, heads, kv_heads, batch, {}))
        else:
            n, batch = r.choice([1000, 2048, 4096]), r.choice([4, 8])
            lengths = torch.tensor([r.randint(n // 4, n) for _ in range(batch)], device="cuda")
            pattern = r.choice([rg.causal(), rg.causal() & rg.window(256)])
            cases.append(
                (f"{pattern!r}, lengths", pattern, n, d, heads, kv_heads, batch, {"lengths": lengths})
            )
    return cases


def measured(case, assigned):
    """Results, milliseconds, and how often the assignment changed."""
    _, pattern, n, d, heads, kv_heads, batch, options = case
    work_split._balanced, changes[0] = assigned, 0
    caches = prepared.PREPARED, backends.PREPARED, backends.PREPARED_BY_DATA
    for cache in (*caches, documents._by_tensor, documents._by_contents):
        cache.clear()
    g = torch.Generator("cuda").manual_seed(0)
    q, k, v, do = (
        torch.randn(batch, h, n, d, device="cuda", dtype=torch.bfloat16, generator=g)
        for h in (heads, kv_heads, kv_heads, heads)
    )
    q, k, v = (x.requires_grad_() for x in (q, k, v))

    def both():
        o = rg.attention(q, k, v, pattern, backend="triton", **options)
        return o, *torch.autograd.grad(o, (q, k, v), do)

    @torch.no_grad()
    def forward():
        return rg.attention(q, k, v, pattern, backend="triton", **options)

    results, changed = [x.detach().clone() for x in both()], changes[0]
    if assigned is counted and not changed:
        return results, None, 0
    clear = torch.empty(1 << 26, dtype=torch.int, device="cuda")
    return results, [round(median(timed(graph_of(fn), clear, 12)), 4) for fn in (forward, both)], changed


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=271)
    parser.add_argument("--cases", type=int, default=24)
    parser.add_argument("--out", default="rounds.json")
    parser.add_argument("--compile", type=int, help="only run every twelfth case once, from this one on")
    parser.add_argument("--limit", type=float, default=200, help="seconds after which no case is begun")
    options, rows, begun = parser.parse_args(), {}, perf_counter()
    cases = drawn(options.seed, options.cases)
    if options.compile is not None:
        for case in cases[options.compile :: PROCESSES]:
            measured(case, counted)
        return
    command = [sys.executable, *sys.argv, "--compile"]
    for process in [subprocess.Popen([*command, str(first)]) for first in range(PROCESSES)]:
        process.wait()
    print(f"compiled in {perf_counter() - begun:.0f} s", flush=True)
    for at, case in enumerate(cases):
        if perf_counter() - begun > options.limit:
            print(f"stopped after {at} of {len(cases)} cases")
            break
        name, _, n, d, heads, kv_heads, batch, _ = case
        key = f"{at} {name}, n {n} d {d} h {heads}/{kv_heads} b {batch}"
        first, near, changed = measured(case, counted)
        if not changed:
            print(key, "the same programs", flush=True)
            rows[key] = None
            continue
        others = [measured(case, x) for x in (longest_first, counted, longest_first)]
        same = all(all(map(torch.equal, first, results)) for results, *_ in others)
        now, before = [near, others[1][1]], [others[0][1], others[2][1]]
        ratios = [round(min(x[i] for x in now) / min(x[i] for x in before), 3) for i in (0, 1)]
        rows[key] = {"near": now, "longest first": before, "ratios": ratios, "same bits": same}
        print(key, rows[key], flush=True)
        Path(options.out).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()

"""Tiles assigned to programs longest first, or in rounds of neighboring tiles: GPU time of both, by turns.

    PYTHONPATH=src python3 bench/gpu_rounds.py --out rounds.json

A program computes its tiles in order, so in rounds all programs are at about the same rows at any time and read them
from the cache.
"""

import argparse
import json
import random
import subprocess
import sys
from itertools import islice
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import torch

import regard as rg
from regard.engine import backends
from regard.engine.cuda import documents, prepared, work_split

sys.path.insert(0, str(Path(__file__).parent))
from gpu_peers import PACKED, graph_of, timed

LONGEST_FIRST = work_split._in_turn
PROCESSES = 12
ROUNDS = 0, 1, 3, 4  # so many rounds at a time are sorted; 0: all tiles, longest first


def in_rounds(rounds):
    """Tiles that differ in length and are not in order already: the longest first among neighbors."""

    def assigned(order, size, programs, *rule):
        in_order = (order[1:] > order[:-1]).all() or (size == size[0]).all()
        if rounds and not in_order:
            order = np.lexsort((-size, -(np.arange(len(size))[::-1] // (rounds * programs))))
        return LONGEST_FIRST(order, size, programs, *rule)

    return assigned


def drawn(seed, n):
    r, lengths = random.Random(seed), []
    mean = r.choice([100, 300, 1000])
    while sum(lengths) < n:
        lengths.append(min(1 + int(r.expovariate(1 / mean)), n - sum(lengths)))
    return rg.documents(torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).cuda())


def cases():
    c, w = rg.causal, rg.window
    for d in (128, 64):
        for name, p in zip(("41 documents", "10 documents", "32 documents"), PACKED):
            ids = next(x.ids for x in p.leaves() if isinstance(x, rg.documents))
            yield name, rg.documents(ids.cuda()) & c(), 16384, d, 16, 1
        for seed in (1, 2, 3, 4):
            n, band = (4096, 8192, 16384, 32768)[seed - 1], c() if seed % 2 else rg.full()
            yield f"drawn {seed}", drawn(seed, n) & band, n, d, (16, 12)[seed % 2], 1 + seed % 2
        yield "blocks(512)", c() & rg.blocks(512), 16384, d, 16, 1
        yield "blocks(100)", c() & rg.blocks(100), 8192, d, 12, 2
        yield "window | sinks", c() & (w(1024) | rg.sinks(16)), 32768, d, 16, 1
        yield "w128", c() & (w(128) | rg.every(64)), 8192, d, 12, 2
        yield "w128", c() & (w(128) | rg.every(64)), 8192, d, 16, 1
        yield "both ways", w(128) | rg.every(64), 16384, d, 16, 1
        yield "Longformer", w(64) | rg.rows(64) | rg.every(64), 8192, d, 16, 1
        yield "causal", c(), 8192, d, 16, 1
        yield "grid", rg.neighborhood((64, 64), 13), 4096, d, 16, 1


def one(case, rounds):
    _, pattern, n, d, heads, batch = case
    work_split._in_turn = in_rounds(rounds)
    caches = prepared.PREPARED, backends.PREPARED, backends.PREPARED_BY_DATA
    for cache in (*caches, documents._by_tensor, documents._by_contents):
        cache.clear()
    g = torch.Generator("cuda").manual_seed(0)
    shape = batch, heads, n, d
    q, k, v, do = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=g) for _ in range(4))
    q, k, v = (x.requires_grad_() for x in (q, k, v))

    def both():
        o = rg.attention(q, k, v, pattern, backend="triton")
        return o, *torch.autograd.grad(o, (q, k, v), do)

    @torch.no_grad()
    def forward():
        return rg.attention(q, k, v, pattern, backend="triton")

    clear = torch.empty(1 << 26, dtype=torch.int, device="cuda")
    results = [x.detach().clone() for x in both()]
    return results, [median(timed(graph_of(fn), clear, 12)) for fn in (forward, both)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default="rounds.json")
    parser.add_argument("--compile", type=int, help="only run every twelfth case once, from this one on")
    parser.add_argument("--limit", type=float, default=200, help="seconds after which no case is begun")
    options, rows, begun = parser.parse_args(), {}, perf_counter()
    if options.compile is not None:
        for case in islice(cases(), options.compile, None, PROCESSES):
            one(case, 0)
        return
    command = [sys.executable, *sys.argv, "--compile"]
    for process in [subprocess.Popen([*command, str(first)]) for first in range(PROCESSES)]:
        process.wait()
    print(f"compiled in {perf_counter() - begun:.0f} s", flush=True)
    for case in cases():
        if perf_counter() - begun > options.limit:
            print("stopped")
            break
        key, first = f"{case[0]} n {case[2]} d {case[3]} h {case[4]} b {case[5]}", None
        for rounds in (*ROUNDS, *ROUNDS):
            results, times = one(case, rounds)
            first = first or results
            same = all(map(torch.equal, first, results))
            rows.setdefault(key, {}).setdefault(str(rounds), []).append([*(round(x, 4) for x in times), same])
        print(key, json.dumps(rows[key]), flush=True)
        Path(options.out).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()

"""Score terms, a pattern per head, trees, listed blocks, grids and decoding on a CPU, beside SDPA with the same mask
(softcap and sinks: beside the formula in PyTorch operations, as SDPA has neither).

ratio = baseline time / our time; medians of interleaved rounds, forward and forward + backward. Parity comes first.

PYTHONPATH=src OMP_NUM_THREADS=2 python bench/cpu_terms.py --write
"""

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable
from datetime import date
from math import inf
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import regard as rg

N, HEADS, WIDTH = 4096, 8, 64
SPARSE = rg.causal() & (rg.window(64) | rg.every(64))


def listed(n: int, size: int, blocks: int, seed: int = 23) -> Tensor:
    """For each block of queries itself and others before it, at random."""
    generator = torch.Generator().manual_seed(seed)
    count = n // size
    rows = [torch.randperm(r + 1, generator=generator)[:blocks].tolist() for r in range(count)]
    return torch.tensor([[*row, *[-1] * (blocks - len(row))] for row in rows])


def branches(n: int, prompt: int, length: int) -> Tensor:
    """Answers of one length to one prompt, packed as a tree."""
    parents = torch.arange(-1, n - 1)
    parents[prompt::length] = prompt - 1
    return parents


def cases() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Name → (pattern, options of rg.attention)."""
    sink = torch.zeros(HEADS)
    four = [rg.causal() & rg.window(64)] * 4 + [rg.causal() & rg.every(64)] * 2 + [SPARSE] * 2
    return {
        "softcap=30, causal() & (window(64) | every(64))": (SPARSE, {"softcap": 30.0}),
        "sink_logits, causal() & (window(64) | every(64))": (SPARSE, {"sink_logits": sink}),
        "per_head: 4 × window(64), 2 × every(64), 2 × both": (rg.per_head(four), {}),
        "tree: 8 answers of 448 to a prompt of 512": (rg.tree(branches(N, 512, 448)), {}),
        "selected: 4 of 64 blocks of 64, causal()": (rg.causal() & rg.selected(listed(N, 64, 4), 64), {}),
        "neighborhood((64, 64), 7)": (rg.neighborhood((64, 64), 7), {}),
        "neighborhood((64, 64), 13, shifted)": (rg.neighborhood((64, 64), 13, border="shifted"), {}),
        "neighborhood((16, 16, 16), 5)": (rg.neighborhood((16, 16, 16), 5), {}),
    }


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, options: dict[str, Any]) -> Tensor:
    """The same by dense operations: SDPA with a mask; the formula where SDPA has no such term."""
    if not options:
        return F.scaled_dot_product_attention(q, k, v, mask)
    s = q @ k.mT * WIDTH**-0.5
    if "softcap" in options:
        s = options["softcap"] * torch.tanh(s / options["softcap"])
    s = s + mask
    if "sink_logits" in options:
        sink = options["sink_logits"][:, None, None].expand(*s.shape[:-1], 1)
        return torch.cat([s, sink], -1).softmax(-1)[..., :-1] @ v
    return s.softmax(-1) @ v


def clock() -> float:
    """Seconds: processor time for one thread, which other processes disturb less; wall time for several threads."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def interleaved(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    order = list(runs)
    for _ in range(rounds):
        random.shuffle(order)  # a function finds in the caches what the previous one has left
        for name in order:
            run = runs[name]
            begin = clock()
            run()
            times[name].append(clock() - begin)
    return {name: statistics.median(each) for name, each in times.items()}


def row(name: str, pattern: Any, options: dict[str, Any], rounds: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, N, WIDTH, generator=generator).requires_grad_() for _ in range(3))
    mask = torch.zeros(()).masked_fill(~pattern.allowed(N), -inf)
    mask = mask if mask.dim() == 2 else mask[None]

    def ours() -> Tensor:
        return rg.attention(q, k, v, pattern, **options)

    def dense() -> Tensor:
        return masked(q, k, v, mask, options)

    def trained(f: Callable[[], Tensor]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(f().sum(), (q, k, v))

    with torch.no_grad():
        worst = float((ours() - dense()).abs().max())
        forward = interleaved({"ours": ours, "dense": dense}, rounds)
    both = interleaved({"ours": trained(ours), "dense": trained(dense)}, max(rounds // 2, 1))
    found = rg.explain(q, k, v, pattern, **options)
    result = {
        "case": name,
        "backend": f"{found.backend}, {found.variant}",
        "computed / needed": round(found.waste, 2),
        "largest difference": worst,
        "forward ms": round(forward["ours"] * 1e3, 2),
        "forward ratio": round(forward["dense"] / forward["ours"], 2),
        "forward + backward ms": round(both["ours"] * 1e3, 2),
        "forward + backward ratio": round(both["dense"] / both["ours"], 2),
    }
    print(json.dumps(result, ensure_ascii=False), flush=True)
    return result


def decoding(m: int, rounds: int) -> dict[str, Any]:
    """One query over a cache: the time next to that of SDPA over the keys that the query needs, indexed or sliced."""
    q, k, v = (
        torch.randn(1, HEADS, 1, WIDTH),
        torch.randn(1, HEADS, m, WIDTH),
        torch.randn(1, HEADS, m, WIDTH),
    )
    pattern = rg.causal() & (rg.window(512) | rg.sinks(4))
    near = torch.cat([torch.arange(4), torch.arange(m - 513, m)])
    runs: dict[str, Callable[[], Tensor]] = {
        "ours": lambda: rg.attention(q, k, v, pattern),
        "indexed": lambda: F.scaled_dot_product_attention(q, k[:, :, near], v[:, :, near]),
        "sliced": lambda: F.scaled_dot_product_attention(
            q, *(torch.cat([x[:, :, :4], x[:, :, m - 513 :]], 2) for x in (k, v))
        ),
        "dense": lambda: F.scaled_dot_product_attention(q, k, v),
    }
    with torch.no_grad():
        worst = float((runs["ours"]() - runs["sliced"]()).abs().max())
        times = interleaved(runs, 10 * rounds)
    result: dict[str, Any] = {"case": f"decode, window(512) | sinks(4), m = {m}", "largest difference": worst}
    result |= {f"{name} µs": round(1e6 * t, 1) for name, t in times.items()}
    print(json.dumps(result, ensure_ascii=False), flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="a part of the name of the cases to run")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    rows = [row(name, *case, given.rounds) for name, case in cases().items() if given.only in name]
    rows += [decoding(m, given.rounds) for m in (1_000, 10_000, 100_000) if given.only in "decode"]
    if given.write:
        head = {
            "date": date.today().isoformat(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "time": "of the processor" if torch.get_num_threads() == 1 else "of a watch",
            "machine": platform.processor() or platform.machine(),
            "sizes": f"n = {N}, {HEADS} heads of {WIDTH}, float32",
        }
        path = Path(__file__).parent / "results" / "cpu_terms.json"
        path.write_text(
            json.dumps({**head, "rows": rows}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()

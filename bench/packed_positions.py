"""Packed documents whose pattern names positions: `documents(ids, within)` against a table of n × n pairs.

One row of n positions in documents, each with causal() & (window(128) | sinks(4)) counted from its beginning. Times
are medians of interleaved rounds, forward and with backward, after a comparison of the gradients. `made` is what new
ids take once, for all layers: to make the table, or a first call, which plans. Memory is the peak of a process of its
own that makes and runs the call, forward and backward, above what q, k and v take (CPU: resident; GPU: allocated).

OMP_NUM_THREADS=1 PYTHONPATH=src python bench/packed_positions.py --write
"""

import argparse
import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from regard.engine.attention import attention
from regard.engine.explain import explain
from regard.pattern import causal, documents, sinks, window

WITHIN = causal() & (window(128) | sinks(4))
HEADS, WIDTH = 2, 64


def drawn(n: int, low: int, high: int) -> list[int]:
    """Lengths drawn uniformly; the last is cut to fill the row."""
    g, found = torch.Generator().manual_seed(n), list[int]()
    while sum(found) < n:
        found.append(int(torch.randint(low, high + 1, (), generator=g)))
    return [*found[:-1], n - sum(found[:-1])]


def cases(n: int) -> dict[str, list[int]]:
    return {
        f"{n // 1024} of 1024": [1024] * (n // 1024),
        f"{n // 128} of 128": [128] * (n // 128),
        "of 1 to 1200": drawn(n, 1, 1200),
        "of 500 to 4000": drawn(n, 500, 4000),
        "of 1 to 100": drawn(n, 1, 100),
    }


def say(text: str) -> None:
    print(text, flush=True)


def ids_of(lengths: list[int], device: str) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)


def inputs_of(n: int, device: str) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    made = [torch.randn(1, HEADS, n, WIDTH, generator=g).to(device, dtype) for _ in range(3)]
    return [x.requires_grad_() for x in made]


def call(method: str, ids: Tensor, inputs: list[Tensor], table: Tensor | None = None) -> Tensor:
    if method == "table":
        table = documents(ids, WITHIN).allowed(len(ids)) if table is None else table
        return attention(*inputs, table)
    backend = {"ours": "auto"}.get(method, method)
    return attention(*inputs, documents(ids, WITHIN), backend=backend)


def seconds(run, device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def times(lengths: list[int], device: str, methods: list[str], rounds: int) -> dict:
    n = sum(lengths)
    ids, inputs = ids_of(lengths, device), inputs_of(n, device)
    pattern, grad = documents(ids, WITHIN), torch.randn_like(inputs[0])
    table = pattern.allowed(n)
    plain = [x.detach() for x in inputs]

    def both(method: str, word=pattern):
        o = attention(*inputs, table if method == "table" else word, backend=names[method])
        o.backward(grad)

    def forward(method: str):
        attention(*plain, table if method == "table" else pattern, backend=names[method])

    names = {method: "auto" if method in ("table", "ours") else method for method in methods}
    results, made = {}, {}
    for method in methods:
        both(method)  # compiles, and prepares the call
        word = documents(ids + 1000, WITHIN)  # other ids, as in the next batch
        again = partial(word.allowed, n) if method == "table" else partial(both, method, word)
        made[method] = seconds(again, device)
        for x in inputs:
            x.grad = None
        both(method)
        results[method] = [x.grad.clone() for x in inputs]
    worst = {
        m: max(float((a - b).abs().max()) for a, b in zip(results[m], results["table"])) for m in methods
    }
    found: dict[str, dict[str, list[float]]] = {m: {"forward": [], "both": []} for m in methods}
    for _ in range(rounds):
        for method in methods:
            found[method]["forward"].append(seconds(lambda m=method: forward(m), device))
            found[method]["both"].append(seconds(lambda m=method: both(m), device))
    backend = explain(*inputs, pattern)
    ms = {m: {k: 1e3 * median(v) for k, v in x.items()} | {"made": 1e3 * made[m]} for m, x in found.items()}
    return {"backend": f"{backend.backend}, {backend.variant}", "ms": ms, "difference": worst}


def resident() -> int:
    """The peak of this process so far, in KiB."""
    lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def peak(method: str, lengths: list[int], device: str) -> None:
    """Prints the peak memory of one call in MiB, in a process of its own."""
    ids, inputs = ids_of(lengths, device), inputs_of(sum(lengths), device)
    small = inputs_of(128, device)
    call(method, torch.zeros(128, dtype=torch.long, device=device), small).sum().backward()
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call(method, ids, inputs).sum().backward()
        print((torch.cuda.max_memory_allocated() - before) / 2**20)
    else:
        before = resident()
        call(method, ids, inputs).sum().backward()
        print((resident() - before) / 2**10)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sizes", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--cases", nargs="+", help="parts of the names of cases")
    parser.add_argument("--methods", nargs="+", default=["table", "ours"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", action="store_true", help="write bench/results/packed_positions-DATE.json")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.peak:
        method, *lengths = json.loads(given.peak)
        peak(method, lengths, given.device)
        return
    rows = []
    for n in given.sizes:
        for name, lengths in cases(n).items():
            if given.cases and not any(part in name for part in given.cases):
                continue
            row = {"n": n, "documents": name, **times(lengths, given.device, given.methods, given.rounds)}
            row["MiB"] = {}
            for method in given.methods:
                command = [
                    sys.executable,
                    __file__,
                    "--device",
                    given.device,
                    "--peak",
                    json.dumps([method, *lengths]),
                ]
                out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
                row["MiB"][method] = float(out.split()[-1])
            rows.append(row)
            say(f"n = {n}, documents {name}: {row['backend']}")
            for method in given.methods:
                t, gap = row["ms"][method], row["difference"][method]
                ratio = row["ms"]["table"]["both"] / t["both"]
                say(
                    f"  {method:8} forward {t['forward']:8.2f} ms, both {t['both']:8.2f} ms ({ratio:5.2f} × as fast),"
                    f" made {t['made']:8.2f} ms, {row['MiB'][method]:8.1f} MiB, difference {gap:.1e}"
                )
    if given.write:
        device = torch.cuda.get_device_name() if given.device == "cuda" else "CPU, one thread"
        into = Path(__file__).parent / "results" / f"packed_positions-{time.strftime('%Y-%m-%d')}.json"
        into.write_text(
            json.dumps({"torch": torch.__version__, "device": device, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()

"""Two source trees on one GPU, in alternating rounds: is any row of the H200 tables slower than before?

    python3 bench/gpu_compare_trees.py OLD/src NEW/src [--rounds 5] [--group patterns dense table short growth data]

Each tree runs in its own long-lived process, through `rg.attention` only. A row is set up in both processes, then
measured in turn: `wall` is the time of one call by CUDA events, `busy` that of the same launches replayed as a CUDA
graph, that is, without Python. Both are medians with the cache cleared before each call. A ratio above 1 means that
the new tree is faster. Outputs and gradients are compared bit by bit.

The group `peers` has the rows of gpu_peers.py (which needs a regard in PYTHONPATH), but for documents. --only keeps
the rows whose number (in all groups that were chosen, forward and both counted apart) is named, in that order.

First, many processes compile the rows in parallel and fill the caches on disk (--warm 0 skips this).
"""

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

PATTERNS = (  # as in gpu_patterns.py
    ("window(128) | every(64)", 16384),
    ("window(256) | every(128)", 32768),
    ("causal() & (window(128) | every(64))", 16384),
    ("causal() & (window(256) | every(128))", 32768),
    ("window(256) | every(256)", 65536),
    ("dilated(64, 16)", 16384),
    ("causal() & strided(128)", 16384),
    ("window(256)", 32768),
    ("causal()", 16384),
)
DENSE = "full()", "causal()"
SHORT = ("causal() & (window(32) | every(16))", "dilated(8, 4)")
DENSITIES = [(n, f"window({n // 400}) | every(200)") for n in (8192, 16384, 32768, 65536)]
DENSITIES += [(32768, f"window(64) | every({k})") for k in (512, 256, 128, 64, 32)]


def rows(groups: list[str]) -> list[dict]:
    """What is measured: group, pattern, n, d, whether backward runs too, heads, batch."""
    both = (False, True)
    out = {
        "patterns": [(p, n, d, b) for d in (128, 64) for p, n in PATTERNS for b in both],
        "dense": [(p, n, d, b) for d in (128, 64) for n in (4096, 16384) for p in DENSE for b in both],
        "table": [("full()", 8192, d, b) for d in (128, 64) for b in both],
        "short": [(p, n, 64, b) for n in (128, 256, 512, 1024, 2048) for p in SHORT for b in both],
        "growth": [(p, n, 64, b) for n, p in DENSITIES for b in both],
        "data": [("documents", 16384, d, b) for d in (128, 64) for b in both],
        "peers": [(p, n, d, b, h, rows) for p, n, d, h, rows in _rows_of_peers(groups) for b in both],
    }  # fmt: skip
    names, usual = ("pattern", "n", "d", "backward", "heads", "batch"), (16, 1)
    return [
        {"group": group, **dict(zip(names, (*row, *usual[len(row) - 4 :])))}
        for group in groups
        for row in out[group]
    ]


def _rows_of_peers(groups: list[str]) -> list[tuple]:
    if "peers" not in groups:
        return []
    from gpu_peers import ROWS

    return [(repr(p), *sizes) for p, *sizes in ROWS if not hasattr(p, "ids") and "documents" not in repr(p)]


# One tree, in a process of its own


class Row:
    """One row, ready to be measured."""

    def __init__(self, row: dict):
        import torch

        import regard as rg
        from regard.position import ByDistance

        self.torch = torch
        torch.manual_seed(0)
        n, d, backward, heads = row["n"], row["d"], row["backward"], row["heads"]
        shape = row["batch"], heads, n, d
        q, k, v, do = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        inputs = [x.requires_grad_(backward) for x in (q, k, v)]
        more = {}
        if row["group"] == "table":
            table = (0.5 * torch.randn(heads, 1025, device="cuda")).requires_grad_(backward)
            more["bias"] = ByDistance(table)
            inputs.append(table)
        if row["group"] == "growth":
            more["backend"] = "triton" if _has_triton_backend() else "progressions"
        if row["pattern"] == "documents":
            cuts = torch.randperm(n, generator=torch.Generator().manual_seed(0))[:15]
            pattern = rg.documents(torch.bincount(cuts, minlength=n).cumsum(0).cuda())
        else:
            pattern = eval(row["pattern"], {name: getattr(rg, name) for name in dir(rg)})

        def forward():
            with torch.no_grad():
                return [rg.attention(q, k, v, pattern, **more)]

        def both():
            o = rg.attention(q, k, v, pattern, **more)
            return [o.detach(), *torch.autograd.grad(o, inputs, do)]

        self.call = both if backward else forward
        self.clear = torch.empty(1 << 26, dtype=torch.int, device="cuda")
        self.graph = None

    def bits(self) -> list[int]:
        """A checksum of each output: position by position, so that a permutation would show."""
        torch = self.torch
        out = []
        for x in self.call():
            words = x.contiguous().view(torch.int16).long().flatten()
            weights = torch.arange(len(words), device=x.device) % 8191 + 1
            out.append(int((words * weights).sum()))
        return out

    def capture(self) -> str:
        """Record the call as a CUDA graph; what went wrong, or nothing."""
        torch = self.torch
        try:
            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                for _ in range(3):
                    self.call()
            torch.cuda.current_stream().wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.call()
        except Exception as error:
            return repr(error)[:200]
        self.graph = graph
        return ""

    def measure(self, times: int = 10, lead: int = 2) -> dict[str, float]:
        found = {"wall": self._median(self.call, times, lead)}
        if self.graph is not None:
            found["busy"] = self._median(self.graph.replay, times, lead)
        return found

    def _median(self, fn, times: int, lead: int) -> float:
        event = self.torch.cuda.Event
        pairs = []
        for _ in range(times + lead):
            begin, end = event(enable_timing=True), event(enable_timing=True)
            self.clear.zero_()
            begin.record()
            fn()
            end.record()
            pairs.append((begin, end))
        self.torch.cuda.synchronize()
        return median(a.elapsed_time(b) for a, b in pairs[lead:])


def _has_triton_backend() -> bool:
    from importlib.util import find_spec

    return find_spec("regard.engine.backends") is not None


def worker() -> None:
    """Answers lines of JSON: {"row": …} sets a row up, {"measure": times} measures it, {"drop": 1} frees it."""
    out, sys.stdout = sys.stdout, sys.stderr
    row = None
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if "row" in asked:
                row = None
                row = Row(asked["row"])
                for _ in range(4):
                    row.call()
                answer = {"bits": row.bits(), "graph": row.capture()}
            elif "measure" in asked:
                answer = row.measure(asked["measure"])
            else:
                row = None
                import torch

                torch.cuda.empty_cache()
                answer = {}
        except Exception as error:
            answer = {"failed": repr(error)[:400]}
        print(json.dumps(answer), file=out, flush=True)


class Tree:
    """A worker process of one source tree."""

    def __init__(self, src: str):
        env = {**os.environ, "PYTHONPATH": str(Path(src).resolve())}
        command = [sys.executable, str(Path(__file__).resolve()), "--worker"]
        self.process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )  # fmt: skip

    def ask(self, **asked) -> dict:
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        return json.loads(line) if line else {"failed": "the worker has ended"}

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def warm(trees: list[str], work: list[dict], processes: int) -> None:
    """Compile every row in each tree, several at a time: the kernels stay in Triton's cache on disk."""
    begin = time.time()
    work = [row for row in work if row["backward"]]  # which compiles forward too

    def run(job: tuple[str, list[dict]]) -> None:
        tree = Tree(job[0])
        for row in job[1]:
            answer = tree.ask(row=row)
            if "failed" in answer:
                print(f"  {job[0]}: {row}: {answer['failed']}", flush=True)
            tree.ask(drop=1)
        tree.close()

    each = max(1, processes // len(trees))
    jobs = [(src, work[part::each]) for part in range(each) for src in trees]
    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(run, jobs))
    print(f"compiled in {time.time() - begin:.0f} s", flush=True)


def compare(old: Tree, new: Tree, row: dict, rounds: int) -> dict:
    """One row: medians over rounds of both trees, and ratios old / new of each round's median."""
    ready = [tree.ask(row=row) for tree in (old, new)]
    failed = [answer["failed"] for answer in ready if "failed" in answer]
    found: dict[str, list[dict]] = {"old": [], "new": []}
    for nth in range(0 if failed else rounds):
        pair = [("old", old), ("new", new)]
        for name, tree in pair if nth % 2 else pair[::-1]:
            found[name].append(tree.ask(measure=10))
    for tree in (old, new):
        tree.ask(drop=1)
    if failed:
        return {**row, "failed": failed}
    out = {**row, "same_bits": ready[0]["bits"] == ready[1]["bits"]}
    for kind in ("wall", "busy"):
        times = {name: [x[kind] for x in each if kind in x] for name, each in found.items()}
        if all(times.values()):
            ratios = [a / b for a, b in zip(times["old"], times["new"])]
            out |= {f"{kind}_{name}_ms": median(x) for name, x in times.items()}
            out |= {f"{kind}_ratio": median(ratios), f"{kind}_spread": max(ratios) - min(ratios)}
    return out


def as_line(row: dict) -> str:
    """One line of the table."""
    run = "both" if row["backward"] else "forward"
    line = f"{row['group']:9} {row['pattern']:38} n={row['n']:<6} d={row['d']:<4} {run:8}"
    if (row["heads"], row["batch"]) != (16, 1):
        line += f" {row['heads']} heads, batch {row['batch']}"
    for kind in ("wall", "busy"):
        if f"{kind}_ratio" in row:
            old, new = row[f"{kind}_old_ms"], row[f"{kind}_new_ms"]
            line += f"  {kind} {old:8.3f} {new:8.3f} ms, ratio {row[f'{kind}_ratio']:.3f}"
    if "failed" in row:
        return f"{line}  FAILED {row['failed']}"
    return line if row["same_bits"] else f"{line}  BITS DIFFER"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("trees", nargs="*")
    parser.add_argument("--worker", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm", type=int, default=14, help="processes that compile; 0: none")
    parser.add_argument("--seconds", type=int, default=420, help="stop after so many, with what there is")
    groups = ["patterns", "dense", "table", "short", "growth", "data", "peers"]
    parser.add_argument("--group", nargs="+", choices=groups, default=groups[:5])
    parser.add_argument("--only", nargs="+", type=int, help="numbers of rows")
    options = parser.parse_args()
    if options.worker:
        worker()
    else:
        run(options)


def run(options: argparse.Namespace) -> None:
    begin, work, out = time.time(), rows(options.group), []
    work = work if options.only is None else [work[number] for number in options.only]
    if options.warm:
        warm(options.trees, work, options.warm)
    old, new = (Tree(src) for src in options.trees)
    for row in work:
        if time.time() - begin > options.seconds:
            print(f"stopped after {options.seconds} s: {len(work) - len(out)} rows left", flush=True)
            break
        out.append(compare(old, new, row, options.rounds))
        print(as_line(out[-1]), flush=True)
        if folder := os.environ.get("OUT"):
            Path(folder, "gpu_compare_trees.json").write_text(json.dumps(out, indent=1))
    for tree in (old, new):
        tree.close()
    slower = [x for x in out if min(x.get("busy_ratio", 1.0), x.get("wall_ratio", 1.0)) < 0.98]
    print(
        f"{len(out)} rows in {time.time() - begin:.0f} s; {len(slower)} more than 2 % slower in wall or busy time"
    )
    print(*map(as_line, slower), sep="\n")


if __name__ == "__main__":
    main()

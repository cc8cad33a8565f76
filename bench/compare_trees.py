"""Two source trees on the CPU: the same calls in two alternating processes, and the ratio of their times.

    python bench/compare_trees.py OLD NEW [--group main small bias documents] [--threads 2] [--rounds 15] [--write]

OLD and NEW are folders that contain `src/regard`. For each case both workers build the same tensors, their results
are compared, and then they run in short alternating rounds in random order. A ratio is new / old: of the medians, and
of the minima, which a busy machine disturbs less. A row that seems more than 3 % slower is measured further, up to
eight times as long; all its rounds count. With --threads 1, CPU time of the process is measured.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

HEADS, WIDTH, N = 8, 64, 4096
LIMIT, REPEATS = 1.03, 7  # a ratio above it is measured again, so often at most
OLD_NAMES = {"pattern": "progressions", "bias": "tiled", "documents": "packed"}  # of `tiles`, before 0.2
SMALL = {
    "window(n/32) | every(32)": lambda rg, n: rg.window(n // 32) | rg.every(32),
    "causal & (window(n/32) | every(32))": lambda rg, n: rg.causal() & (rg.window(n // 32) | rg.every(32)),
    "window(n/8)": lambda rg, n: rg.window(n // 8),
    "dilated(8, 8)": lambda rg, n: rg.dilated(8, 8),
    "causal & strided(32)": lambda rg, n: rg.causal() & rg.strided(32),
    "causal & (window(n/16) | sinks(4))": lambda rg, n: rg.causal() & (rg.window(n // 16) | rg.sinks(4)),
}
BIAS = {
    "full": lambda rg: rg.full(),
    "causal": lambda rg: rg.causal(),
    "window(128)": lambda rg: rg.window(128),
    "causal & window(64)": lambda rg: rg.causal() & rg.window(64),
}
DOCUMENTS = {
    "32 of 128": [128] * 32,
    "8 of 512": [512] * 8,
    "2 of 2048": [2048] * 2,
    "16 to 400": [],
    "1 to 40": [],
}


def cases(groups: list[str]) -> list[dict[str, Any]]:
    """Group, name, length, whether gradients are taken, whether the backend is chosen automatically."""
    out: list[dict[str, Any]] = []
    if "main" in groups:
        out += [{"group": "main", "name": "window(64) | every(64)", "n": 4096, "grad": True, "auto": False}]
        out += [{"group": "main", "name": "window(128) | every(64)", "n": 8192, "grad": True, "auto": False}]
    if "small" in groups:
        out += [
            {"group": "small", "name": name, "n": n, "grad": grad, "auto": auto}
            for name in SMALL
            for n in (128, 256, 512, 1024, 2048)
            for grad in (True, False)
            for auto in (False, True)
        ]
    if "bias" in groups:
        learned = [("full", 1024), ("full", 2048), ("causal", 2048), ("window(128)", 2048)]
        out += [{"group": "learned bias", "name": p, "n": n, "grad": True, "auto": False} for p, n in learned]
        out += [
            {"group": "fixed bias", "name": name, "n": n, "grad": grad, "auto": True}
            for n in (128, 256, 512, 1024, 2048)
            for name in ("causal", "causal & window(64)")
            for grad in (False, True)
        ]
    if "documents" in groups:
        out += [
            {"group": "documents", "name": name + also, "n": N, "grad": True, "auto": False}
            for name in DOCUMENTS
            for also in ("", " & causal")
        ]
    return out


# The worker: one process for each tree, which reads a case or a number of calls per line.


def lengths(name: str) -> list[int]:
    """The documents of a row of N positions; some sets are sampled."""
    if DOCUMENTS[name]:
        return DOCUMENTS[name]
    low, high = map(int, name.split(" to "))
    sample, out = random.Random(0), []
    while sum(out) < N:
        out.append(sample.randint(low, high))
    return [*out[:-1], N - sum(out[:-1])]


def build(case: dict[str, Any]) -> Callable[[], list]:
    """One call of the case: o, or the gradients."""
    import torch

    import regard as rg
    from regard.position import ByDistance

    torch.manual_seed(0)
    n, grad, group, name = case["n"], case["grad"], case["group"], case["name"]
    inputs = [torch.randn(1, HEADS, n, WIDTH, requires_grad=grad) for _ in range(3)]
    out, more, wanted = torch.randn(1, HEADS, n, WIDTH), {}, list(inputs)
    kind = "bias" if "bias" in group else "documents" if group == "documents" else "pattern"
    if group == "main":
        window, every = (int(x.split(")")[0]) for x in name.split("(")[1:])
        pattern = rg.window(window) | rg.every(every)
    elif group == "small":
        pattern = SMALL[name](rg, n)
    elif kind == "bias":
        pattern = BIAS[name](rg)
        if group == "learned bias":
            wanted.append(torch.randn(HEADS, 2 * n - 1, requires_grad=True))
            more["bias"] = ByDistance(wanted[-1])
        else:
            more["bias"] = ByDistance(slopes=2.0 ** -torch.arange(1, HEADS + 1))
    else:
        counts = lengths(name.removesuffix(" & causal"))
        pattern = rg.documents(torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)))
        pattern = pattern & rg.causal() if name.endswith("causal") else pattern
    if not case["auto"]:
        more["backend"] = _backend(kind)
    call = lambda: rg.attention(*inputs, pattern, **more)  # noqa: E731
    return (lambda: torch.autograd.grad(call(), wanted, out)) if grad else (lambda: [call()])


def _backend(kind: str) -> str:
    import regard as rg

    try:
        rg.explain(rg.window(1), 16, backend="tiles")
    except rg.RegardError:
        return OLD_NAMES[kind]
    return "tiles"


def work(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)
    clock = time.process_time if threads == 1 else time.perf_counter
    call: Callable[[], list] | None = None
    for line in sys.stdin:
        request = json.loads(line)
        if isinstance(request, dict):
            call = build(request)
            answer: Any = [[float(x.double().sum()), float(x.double().abs().sum())] for x in call()]
            call()
        else:
            assert call is not None
            begun = clock()
            for _ in range(request):
                call()
            answer = (clock() - begun) / request
        print(json.dumps(answer), flush=True)


class Worker:
    def __init__(self, tree: Path, threads: int):
        line = [sys.executable, __file__, "--worker", "--threads", str(threads), ".", "."]
        env = {**os.environ, "PYTHONPATH": str(tree.resolve() / "src"), "OMP_NUM_THREADS": str(threads)}
        self.process = subprocess.Popen(line, env=env, stdin=-1, stdout=-1, text=True)

    def ask(self, request: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


def compare(case: dict[str, Any], workers: dict[str, Worker], rounds: int) -> dict[str, Any]:
    sums = {name: worker.ask(case) for name, worker in workers.items()}
    for a, b in zip(*sums.values(), strict=True):
        assert all(abs(x - y) <= 1e-4 * max(a[1], 1.0) for x, y in zip(a, b)), f"{case}: {sums}"
    calls = max(1, min(50, round(0.03 / max(workers["old"].ask(1), 1e-6))))
    times: dict[str, list[float]] = {name: [] for name in workers}
    old, new = times["old"], times["new"]
    for _ in range(1 + REPEATS):
        for _ in range(rounds):
            for name in random.sample(list(workers), len(workers)):
                times[name].append(workers[name].ask(calls))
        median, minimum = statistics.median(new) / statistics.median(old), min(new) / min(old)
        if max(median, minimum) <= LIMIT:
            break
    ms = {"old ms": 1e3 * statistics.median(old), "new ms": 1e3 * statistics.median(new)}
    return {**case, **ms, "median": median, "minimum": minimum, "rounds": len(old)}


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("old", type=Path)
    options.add_argument("new", type=Path)
    groups = ["main", "small", "bias", "documents"]
    options.add_argument("--group", nargs="+", choices=groups, default=groups)
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--write", action="store_true", help="store the rows in bench/results/")
    options.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.worker:
        work(given.threads)
        return
    workers = {"old": Worker(given.old, given.threads), "new": Worker(given.new, given.threads)}
    rows = []
    for case in cases(given.group):
        rows.append(row := compare(case, workers, given.rounds))
        what = f"{row['group']}: {row['name']} n={row['n']}"
        how = ("forward+backward" if row["grad"] else "forward") + (" auto" if row["auto"] else " by name")
        print(
            f"{what:52} {how:24} old {row['old ms']:8.2f} ms  new/old {row['median']:.3f}  "
            f"minima {row['minimum']:.3f}",
            flush=True,
        )
    slower = [row for row in rows if min(row["median"], row["minimum"]) > LIMIT]
    print(f"{len(rows)} rows; {len(slower)} more than 3 % slower in the median and in the minimum")
    if given.write:
        path = Path(__file__).parent / "results" / f"compare_trees-{date.today()}.json"
        machine = {"threads": given.threads, "rounds": given.rounds, "load": os.getloadavg()}
        path.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""What a sparse pattern saves on a CPU, against PyTorch's SDPA with the mask and without any.

ratio = time of SDPA / our time, forward + backward unless stated otherwise; medians of interleaved rounds, after a
check that the results are equal.

PYTHONPATH=src python bench/cpu_patterns.py --group main memory small growth density --write
"""

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.engine.attention import attention
from regard.engine.backends import TABLE, choose
from regard.engine.call import CallFacts
from regard.pattern import Pattern, causal, dilated, every, sinks, strided, window

HEADS, WIDTH, THREADS = 8, 64, 2
CLOCK = time.perf_counter
RESULTS = Path(__file__).parent / "results"

MAIN: tuple[tuple[Pattern, int], ...] = (
    (window(64) | every(64), 4096),
    (window(128) | every(64), 8192),
)
SMALL: tuple[Callable[[int], Pattern], ...] = (
    lambda n: window(n // 32) | every(32),
    lambda n: causal() & (window(n // 32) | every(32)),
    lambda n: window(n // 8),
    lambda n: dilated(8, 8),
    lambda n: causal() & strided(32),
    lambda n: causal() & (window(n // 16) | sinks(4)),
)


def interleaved(functions: dict[str, Callable[[], object]], rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each function: median and spread over interleaved rounds, after one to warm up.

    Each round has a random order: a function that runs after a large call finds the caches and the heap as that call
    left them, and takes up to a sixth longer. In a fixed cycle that would always be the same function.
    """
    taken: dict[str, list[float]] = {name: [] for name in functions}
    order, draw = list(functions.items()), random.Random(0)
    for turn in range(rounds + 1):
        draw.shuffle(order)
        for name, run in order:
            begun = CLOCK()
            run()
            if turn:
                taken[name].append((CLOCK() - begun) * 1e3)
    return {
        name: {"median": statistics.median(t), "least": min(t), "most": max(t)} for name, t in taken.items()
    }


class Case:
    """One pattern at one length: ours, masked SDPA and full SDPA on the same tensors."""

    def __init__(self, pattern: Pattern, n: int, heads: int = HEADS, grad: bool = True):
        torch.manual_seed(0)
        self.pattern, self.n, self.grad, self.scale = pattern, n, grad, WIDTH**-0.5
        self.needed = pattern.count(n)
        self.inputs = [torch.randn(1, heads, n, WIDTH, requires_grad=grad) for _ in range(3)]
        self.out = torch.randn(1, heads, n, WIDTH)

    def ours(self) -> Tensor:
        return attention(*self.inputs, self.pattern, backend="tiles")

    def auto(self) -> Tensor:
        return attention(*self.inputs, self.pattern)

    def full(self) -> Tensor:
        return F.scaled_dot_product_attention(*self.inputs)

    def masked(self) -> Tensor:
        return F.scaled_dot_product_attention(*self.inputs, attn_mask=self.allowed)

    def run(self, function: Callable[[], Tensor]) -> Callable[[], object]:
        return (lambda: torch.autograd.grad(function(), self.inputs, self.out)) if self.grad else function

    def check(self) -> float:
        """The largest difference from masked SDPA, in outputs and gradients; above 1e-4 nothing is timed."""
        self.allowed = self.pattern.allowed(self.n)
        o, ref = self.ours(), self.masked()
        worst = float((o - ref).detach().abs().max())
        if self.grad:
            ours, theirs = (torch.autograd.grad(x, self.inputs, self.out) for x in (o, ref))
            worst = max(worst, *(float((a - b).abs().max()) for a, b in zip(ours, theirs)))
        assert worst < 1e-4, f"{self.pattern!r} at n={self.n}: off by {worst}"
        return worst


def compare(pattern: Pattern, n: int, rounds: int, functions: tuple[str, ...], grad: bool = True) -> dict:
    case = Case(pattern, n, grad=grad)
    worst = case.check()
    times = interleaved({name: case.run(getattr(case, name)) for name in functions}, rounds)
    facts = CallFacts(pattern, n, n, WIDTH, WIDTH, 1, HEADS, HEADS, grad=grad)
    prepared = choose(facts, "tiles")
    return {
        "pattern": repr(pattern),
        "n": n,
        "heads": HEADS,
        "passes": "forward+backward" if grad else "forward",
        "density": case.needed / n**2,
        "computed/needed": prepared.computed() / case.needed,
        "variant": prepared.variant,
        "estimate_ms": TABLE["tiles"].estimate(facts) * 1e3,
        "difference": worst,
        "ms": times,
    }


def main_group(rounds: int) -> list[dict]:
    found = []
    for pattern, n in MAIN:
        row = compare(pattern, n, rounds, ("ours", "masked", "full"))
        t = {name: x["median"] for name, x in row["ms"].items()}
        row |= {"vs masked": t["masked"] / t["ours"], "vs full": t["full"] / t["ours"]}
        found.append(row)
        say(
            f"{row['pattern']:28} n={n:6}  ours {t['ours']:8.1f} ms  masked {t['masked']:8.1f} ms = "
            f"{row['vs masked']:5.1f} ×  full {t['full']:8.1f} ms = {row['vs full']:5.1f} ×  "
            f"(limit {1 / row['density']:.1f} ×)"
        )
    return found


def small_group(rounds: int) -> list[dict]:
    """n = 128 … 2048: progressions by name, and what `auto` takes, against the faster of full and masked."""
    found = []
    for make in SMALL:
        for n in (128, 256, 512, 1024, 2048):
            for grad in (True, False):
                row = compare(make(n), n, 3 * rounds, ("ours", "auto", "masked", "full"), grad)
                t = {name: x["median"] for name, x in row["ms"].items()}
                best = min(t["masked"], t["full"])
                row |= {"ours/best": t["ours"] / best, "auto/best": t["auto"] / best}
                found.append(row)
                say(
                    f"{row['pattern']:44} n={n:5} {row['passes']:16} ours {t['ours']:7.2f} "
                    f"(est. {row['estimate_ms']:7.2f})  auto {t['auto']:7.2f}  masked {t['masked']:7.2f}  "
                    f"full {t['full']:7.2f} ms   ours/best {row['ours/best']:5.2f}  auto/best {row['auto/best']:5.2f}"
                )
    return found


def line(cases: list[tuple[Pattern, int]], rounds: int) -> list[dict]:
    found = []
    for pattern, n in cases:
        case = Case(pattern, n)
        t = interleaved({"ours": case.run(case.ours)}, rounds)["ours"]["median"]
        pairs = case.needed
        found.append(
            {"pattern": repr(pattern), "n": n, "pairs": pairs, "ms": t, "ns a pair": t * 1e6 / pairs / HEADS}
        )
        say(
            f"{pattern!r:28} n={n:6}  {pairs:10} pairs a head  {t:8.1f} ms  {found[-1]['ns a pair']:5.1f} ns a pair"
        )
    return found


def growth_group(rounds: int) -> list[dict]:
    """The same density at growing n: linear in n² if every pair costs the same."""
    return line([(window(n // 64) | every(64), n) for n in (1024, 2048, 4096, 8192, 16384)], rounds)


def density_group(rounds: int) -> list[dict]:
    """Growing density at one n."""
    return line([(window(w) | every(2048 // w), 4096) for w in (8, 16, 32, 64, 128, 256)], rounds)


def memory_group(rounds: int) -> list[dict]:
    """Extra memory of one forward of n = 131072, in a process of its own."""
    out = subprocess.run([sys.executable, __file__, "--child"], capture_output=True, text=True, check=True)
    row = json.loads(out.stdout.splitlines()[-1])
    say(
        f"{row['pattern']} n={row['n']}, one head: {row['ms']:.0f} ms, {row['extra MiB']:.0f} MiB over q, k, v"
    )
    return [row]


def child() -> None:
    n, pattern = 131072, window(64) | every(1024)
    small = Case(pattern, 2048, heads=1, grad=False)
    small.check()
    case = Case(pattern, n, heads=1, grad=False)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = resident()
    begun = time.perf_counter()
    with torch.no_grad():
        o = case.ours()
    took = (time.perf_counter() - begun) * 1e3
    extra = resident() - before
    rows = torch.arange(0, n, 4099)  # a few rows by the formula
    q, k, v = case.inputs
    scores = (q[0, 0, rows] @ k[0, 0].T * case.scale).masked_fill(
        ~pattern.allows(rows[:, None], torch.arange(n)), -torch.inf
    )
    assert (scores.softmax(-1) @ v[0, 0] - o[0, 0, rows]).abs().max() < 1e-4
    print(json.dumps({"pattern": repr(pattern), "n": n, "ms": took, "extra MiB": extra}))


def resident() -> float:
    """The peak resident memory of this process, in MiB."""
    status = Path("/proc/self/status").read_text()
    return int(next(x for x in status.splitlines() if x.startswith("VmHWM")).split()[1]) / 1024


def machine() -> dict:
    with open("/proc/cpuinfo") as f:
        name = next((x.split(":")[1].strip() for x in f if x.startswith("model name")), platform.processor())
    return {
        "cpu": name,
        "threads": torch.get_num_threads(),
        "load": os.getloadavg(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "dtype": "float32",
        "head width": WIDTH,
        "date": date.today().isoformat(),
    }


def say(text: str) -> None:
    print(text, flush=True)


GROUPS = {
    "main": main_group,
    "memory": memory_group,
    "small": small_group,
    "growth": growth_group,
    "density": density_group,
}


def run(groups: dict[str, Callable[[int], list[dict]]], name: str) -> None:
    """The command line of a benchmark made of groups."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--group", nargs="+", choices=list(groups), default=list(groups))
    words.add_argument("--rounds", type=int, default=5)
    words.add_argument("--write", action="store_true", help="store the numbers in bench/results/")
    words.add_argument(
        "--busy", action="store_true", help="one thread and its CPU time, for a machine with other work"
    )
    words.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    asked = words.parse_args()
    global CLOCK
    CLOCK = time.process_time if asked.busy else time.perf_counter
    torch.set_num_threads(1 if asked.busy else THREADS)
    if asked.child:
        child()
        return
    clock = "CPU time" if asked.busy else "wall time"
    found: dict = {"machine": machine(), "clock": clock, "rounds": asked.rounds}
    say(str(found["machine"]))
    for group in asked.group:
        say(f"— {group}")
        found[group] = groups[group](asked.rounds)
    found["machine"]["load after"] = os.getloadavg()
    if asked.write:
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{name}{'-busy' if asked.busy else ''}-{date.today().isoformat()}.json"
        stored = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(stored | found, indent=1) + "\n")
        say(f"written to {path}")


if __name__ == "__main__":
    run(GROUPS, "cpu_patterns")

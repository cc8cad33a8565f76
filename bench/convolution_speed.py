"""What lowering saves: 9 shift heads on a 32 × 32 grid, 64 wide, on a CPU, as attention and as a convolution.

    PYTHONPATH=src python bench/convolution_speed.py [--write]

ratio = time of the attention / time of the lowered layer; forward, medians of interleaved rounds, after a check of
equality. The lifted form, which attends along rows and then along columns, is timed as well.
"""

import argparse
import json
import os
import platform
import sys
import time
from datetime import date
from itertools import product
from pathlib import Path
from statistics import median

import torch
from torch import nn

import regard as rg

GRID, WIDTH, THREADS = (32, 32), 64, 2


def layer() -> nn.Module:
    """Nine heads at the offsets of a 3 × 3 kernel, as sharp as is exact in float32."""
    spec = rg.Attention(
        WIDTH, heads=9, d_k=1, d_v=WIDTH, position=rg.quadratic(grid=GRID), score="position", biases="output"
    )
    attention = spec.build().eval()
    with torch.no_grad():
        attention.position.center.copy_(torch.tensor(list(product((-1.0, 0.0, 1.0), repeat=2))))
        attention.position.alpha.fill_(40.0)
    return attention


def timed(methods: dict, x: torch.Tensor, rounds: int) -> dict[str, dict[str, float]]:
    taken: dict[str, list[float]] = {name: [] for name in methods}
    for turn in range(rounds + 1):
        for name, run in methods.items():
            begun = time.perf_counter()
            run(x)
            if turn:
                taken[name].append((time.perf_counter() - begun) * 1e3)
    return {name: {"median": median(t), "least": min(t), "most": max(t)} for name, t in taken.items()}


@torch.no_grad()
def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ask.add_argument("--rounds", type=int, default=9)
    ask.add_argument("--write", action="store_true")
    given = ask.parse_args()
    torch.set_num_threads(THREADS)
    attention = layer()
    lowered = rg.lower(attention)
    assert lowered.rest is None and lowered.kernels is None
    results: dict = {
        "date": str(date.today()),
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": THREADS,
        "load": os.getloadavg()[0],
        "cases": [],
    }
    for batch in (1, 8):
        x = torch.randn(batch, 32 * 32, WIDTH, generator=torch.Generator().manual_seed(0))
        difference = (lowered(x) - attention(x)).abs().max().item()
        assert difference <= 1e-5, difference
        cells = x.mT.unflatten(2, GRID)
        conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        hard, soft = rg.lift(conv), rg.lift(conv, sharpness=40.0)
        methods = {
            "attention": attention,
            "lowered": lowered,
            "lifted, hard": lambda _, run=hard, cells=cells: run(cells),
            "lifted, soft": lambda _, run=soft, cells=cells: run(cells),
        }
        times = timed(methods, x, given.rounds)
        ratio = times["attention"]["median"] / times["lowered"]["median"]
        results["cases"].append({"batch": batch, "difference": difference, "ms": times, "ratio": ratio})
        shown = ", ".join(f"{name} {t['median']:.1f} ms" for name, t in times.items())
        print(f"batch {batch}: {shown}; attention / lowered = {ratio:.1f} ×", file=sys.stderr)
    text = json.dumps(results, indent=1)
    print(text)
    if given.write:
        path = Path(__file__).parent / "results" / f"convolution_speed-{date.today()}.json"
        path.write_text(text + "\n")


if __name__ == "__main__":
    main()

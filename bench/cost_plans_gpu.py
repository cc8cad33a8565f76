"""Do plans run? `--plan plans.json` (no GPU needed) finds the largest batch for generated models within a cap; `--run
plans.json rows.json` on a GPU executes the printed code under that cap, then with one more row per batch.

A plan holds if its code runs within the cap, and one more row needs more than the planned share or does not run.
"""

import gc
import json
import sys
from pathlib import Path

import torch
from cost_models import cases

from regard.costs import planner
from regard.costs.memory.step import TrainingStep

CAP = 8 * 10**9
SEED = 27


def make(out: Path, count: int = 8) -> None:
    rows = []
    for index, case in enumerate(cases(SEED, 2 * count, 8)[::2]):
        low = TrainingStep(autocast="bfloat16" if index % 2 else None, checkpointing=index % 4 == 3 or None)
        planner._options = lambda train, low=low: iter([("one", low)])
        best = planner.plan(case.spec, memory=CAP, n=case.n).best
        rows.append({"code": best.code, "batch": best.batch, "n": best.n, "peak": best.peak, "cap": CAP})
        print(best.batch, best.n, round(best.peak / 1e9, 3), low.autocast, low.checkpointing, flush=True)
        out.write_text(json.dumps(rows), encoding="utf-8")


def execute(code: str) -> tuple[str, int]:
    """("runs" or "out of memory", peak) of three steps of this program."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    names: dict = {}
    try:
        exec(code, names)
        for _ in range(2):
            names["step"]()
        return "runs", torch.cuda.max_memory_allocated()
    except torch.OutOfMemoryError:
        return "out of memory", torch.cuda.max_memory_allocated()
    finally:
        names.clear()


def run(plans: Path, out: Path) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    rows = []
    for row in json.loads(plans.read_text(encoding="utf-8")):
        torch.cuda.set_per_process_memory_fraction(row["cap"] / total)
        planned = execute(row["code"])
        b = row["batch"]
        more = execute(row["code"].replace(f"batch={b})", f"batch={b + 1})"))
        rows.append({**row, "planned": planned, "more": more})
        tight = more[0] != "runs" or more[1] > planner.SHARE * row["cap"]
        print(
            b,
            planned,
            f"{row['peak'] / planned[1] - 1:+.2%}",
            "one more:",
            more,
            "holds" if planned[0] == "runs" and tight else "FAILS",
            flush=True,
        )
        out.write_text(json.dumps(rows), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1] == "--plan":
        make(Path(sys.argv[2]))
    else:
        run(Path(sys.argv[2]), Path(sys.argv[3]))

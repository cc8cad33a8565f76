"""Is the predicted memory the memory used? Training steps of generated models on the CPU, against the profiler.

`PYTHONPATH=src:bench python3 bench/cost_memory.py --seed 25 --count 40 [--json OUT]` predicts and measures each; the
profiler reports every allocation and release of the CPU allocator, also of temporaries inside kernels.
"""

import argparse
import json
import statistics
from pathlib import Path

import torch
from cost_models import cases, described, predicted, stepping


def counted(call) -> int:
    """The peak of the bytes that the allocator added while `call` ran."""
    activity = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity], profile_memory=True) as profile:
        call()
    events = profile.profiler.kineto_results.events()
    now = peak = 0
    for _, size in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
        now += size
        peak = max(peak, now)
    return peak


def measured(case) -> int:
    step, optimizer, there = stepping(case, "cpu")
    step()
    states = [
        x for s in optimizer.state.values() for x in s.values() if isinstance(x, torch.Tensor) and x.dim()
    ]
    unique = {x.untyped_storage().data_ptr(): x for x in [*there, *states]}
    return sum(x.numel() * x.element_size() for x in unique.values()) + counted(step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=25)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows, errors = [], []
    for case in cases(options.seed, options.count, 1):
        memory, real = predicted(case, "cpu").memory, measured(case)
        errors.append(memory.training_peak / real - 1)
        rows.append({"model": described(case), "predicted": memory.training_peak, "measured": real})
        moment = f"{memory.peak_part}, {memory.peak.operation}"
        print(
            f"{errors[-1]:+8.3%}  {memory.training_peak:>12,}  {real:>12,}  {described(case)}  [{moment}]",
            flush=True,
        )
    sizes = sorted(map(abs, errors))
    print(f"{len(rows)} models: median {statistics.median(sizes):.3%}, worst {sizes[-1]:.3%}, "
          f"{sum(e > 0.03 for e in sizes)} beyond 3 %")  # fmt: skip
    if options.json:
        versions = {"torch": str(torch.__version__), "seed": options.seed, "threads": torch.get_num_threads()}
        options.json.write_text(json.dumps({**versions, "rows": rows}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Is the predicted memory of a training step the memory used on a GPU? Generated models, predicted and measured.

`PYTHONPATH=src:bench python3 bench/cost_memory_gpu.py --measure rows.json --predict pred.json` on a GPU; `--report
rows.json pred.json` prints the table. Prediction runs in a process of its own and needs no GPU.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
import traceback
from pathlib import Path

import torch
from cost_models import cases, described, predicted, stepping

MIB = 1 << 20


def measure(case) -> dict:
    """Peak and reserved bytes of the third step, and the time of a step: median of five."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    outside = torch.cuda.memory_allocated()  # workspaces of cuBLAS that earlier models left
    step, _optimizer, _there = stepping(case, "cuda")
    for _ in range(2):
        step()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return {"peak": peak, "reserved": reserved, "outside": outside, "seconds": statistics.median(times)}


def predict(options) -> None:
    rows = []
    for case in cases(options.seed, options.count, 8):
        start = time.process_time()
        try:
            priced = predicted(case, "cuda")
            m = priced.memory
            row = {
                "peak": m.training_peak,
                "reserved": m.reserved,
                "part": m.peak_part,
                "operation": m.peak.operation,
            }
            row["seconds"] = time.process_time() - start
        except Exception as e:
            row = {"error": f"{type(e).__name__}: {e}"[:300]}
        rows.append({"model": described(case), **row})
        options.predict.write_text(
            json.dumps({"torch": str(torch.__version__), "rows": rows}), encoding="utf-8"
        )


def run(options) -> None:
    import transformers

    rows = []
    versions = {
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name(),
        "seed": options.seed,
    }
    for case in cases(options.seed, options.count, 8):
        start = time.perf_counter()
        try:
            row = measure(case)
        except Exception as e:
            traceback.print_exc()
            row = {"error": f"{type(e).__name__}: {e}"[:300]}
        rows.append({"model": described(case), **row, "wall": round(time.perf_counter() - start, 2)})
        options.measure.write_text(json.dumps({**versions, "rows": rows}), encoding="utf-8")


def report(measured: Path, priced: Path) -> None:
    real, guess = (json.loads(p.read_text(encoding="utf-8")) for p in (measured, priced))
    print("| model | predicted, MiB | measured, MiB | error | reserved | step |\n|---|--:|--:|--:|--:|--:|")
    errors = []
    for r, p in zip(real["rows"], guess["rows"]):
        if "error" in r or "error" in p:
            print(f"| {r['model']} | {p.get('error', '')} | {r.get('error', '')} | | | |")
            continue
        errors.append(p["peak"] / r["peak"] - 1)
        print(
            f"| {r['model']} | {p['peak'] / MIB:,.1f} | {r['peak'] / MIB:,.1f} | {errors[-1]:+.2%} "
            f"| {p['reserved'] / r['reserved'] - 1:+.1%} | {r['seconds'] * 1e3:.1f} ms |"
        )
    sizes = sorted(map(abs, errors))
    print(
        f"\n{len(errors)} of {len(real['rows'])} models: median {statistics.median(sizes):.2%}, "
        f"worst {sizes[-1]:.2%}, {sum(e > 0.03 for e in sizes)} beyond 3 %; "
        f"torch {real['torch']} (predicted with {guess['torch']})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=26)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--measure", type=Path)
    parser.add_argument("--predict", type=Path)
    parser.add_argument("--report", type=Path, nargs=2)
    options = parser.parse_args()
    beside = None
    if options.measure and options.predict:
        numbers = ["--seed", str(options.seed), "--count", str(options.count)]
        beside = subprocess.Popen([sys.executable, __file__, "--predict", str(options.predict), *numbers])
    elif options.predict:
        predict(options)
    if options.measure:
        run(options)
    if beside is not None:
        beside.wait()
    if options.report:
        report(*options.report)


if __name__ == "__main__":
    main()

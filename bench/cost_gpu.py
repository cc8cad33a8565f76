"""Predicted memory, time and plans of generated models, compared with measurements on the GPU that runs them.

    PYTHONPATH=src:bench python3 bench/cost_gpu.py --seed 31 --out FOLDER [--kinds models,generation,plans,time,fit]
                                                   [--workers 7,2,7]
    PYTHONPATH=src:bench python3 bench/cost_gpu.py --report FOLDER      the tables

Every model is generated from the seed and priced with the library versions that then run it. Processes run in
parallel: those of `generation` never train, since a backward pass leaves a second cuBLAS workspace behind; those of
`plans` use expandable segments, as the printed programs do. Times are measured last, by one process alone. The kind
`fit` times the models of FIT_SEED, to which bench/cost_fit.py fits the constants of regard.costs.time; that script
also compares times if `time` ran without `models`, which traces. A plan holds if its code runs within the cap, and
one more row per batch needs more than the planned share or does not run.
"""

import argparse
import dataclasses
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

if "--plans-worker" in sys.argv:
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"

import torch
from cost_models import built, cases, described, emptied, foreign, predicted, stepping

import regard as rg
from regard.costs import planner
from regard.costs import time as machines
from regard.costs.memory.runs import prompt
from regard.costs.subject import Subject
from regard.costs.trace.tracer import Work
from regard.machine import measure

FIT_SEED, SCALE, CAP, MIB = 26, 8, 4 * 10**9, 1 << 20
COUNTS = {"models": 40, "generation": 12, "plans": 20, "time": 20, "fit": 24}
SEED_SHIFT = {"plans": 1}  # plans are of other models than those that are measured
PHASES = ("inference", "prefill", "decode")
WORKERS = {"models": 7, "generation": 2, "plans": 7}


def drawn(kind: str, seed: int) -> list:
    """The cases of one kind; of `generation`, those that decode with a cache."""
    if kind == "fit":
        return cases(FIT_SEED, COUNTS[kind], SCALE)
    made = cases(seed + SEED_SHIFT.get(kind, 0), COUNTS["models"], SCALE)
    if kind == "generation":
        made = [c for c in made if c.family not in ("Bert", "ViT")]
    return made[: COUNTS[kind]]


# -- one task -----------------------------------------------------------------------------------------------------


def fresh(whole: bool = False) -> None:
    """whole: also without what cuBLAS and the engine keep of the models before."""
    if whole:
        emptied()
        torch._C._cuda_clearCublasWorkspaces()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def models(case) -> dict:
    """Predicted and measured peak, and bytes taken from the device, of the third training step."""
    memory = predicted(case, "cuda").memory
    row = {"predicted": memory.training_peak, "predicted_reserved": memory.reserved}
    row["moment"] = memory.peak.moment
    fresh(whole=True)
    step, _optimizer, _there = stepping(case, "cuda")
    for _ in range(2):
        step()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    row |= {"measured": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    return row


def generation(case) -> dict:
    """Peaks without gradients: of a forward pass, of a prompt and of the next token."""
    memory = predicted(case, "cuda").memory
    guesses = (memory.inference_peak, memory.prefill_peak, memory.decode_peak)
    fresh(whole=True)
    model, args, kwargs, _ = built(case, "cuda")
    model.eval()
    labels = kwargs.pop("labels", None)
    if labels is not None and model.config.is_encoder_decoder:
        kwargs["decoder_input_ids"] = labels
    del labels
    measured = []
    with torch.no_grad():
        model(*args, **kwargs)
        fresh()
        model(*args, **kwargs)
        measured.append(torch.cuda.max_memory_allocated())
        fresh()
        then = prompt(model, args, kwargs)
        measured.append(torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()
        then()
        measured.append(torch.cuda.max_memory_allocated())
    return {kind: [guess, real] for kind, guess, real in zip(PHASES, guesses, measured)}


def plans(case) -> dict:
    """A plan for the cap: predicted, run, and run with one more row per batch."""
    subject = Subject.of(case.spec if case.spec is not None else foreign(case))
    search = planner._Search(subject, "", subject.tokens or case.n, 1)
    start = time.perf_counter()
    choice = search.choice(
        "h200", planner.card("h200")._replace(memory=CAP), planner.Option("one", case.training)
    )
    row = {"n": choice.n, "batch": choice.batch, "predicted": choice.peak}
    row["search_s"] = round(time.perf_counter() - start, 1)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(CAP / total)
    b = choice.batch
    row["planned"] = execute(choice.code)
    row["more"] = execute(choice.code.replace(f"batch={b})", f"batch={b + 1})"))
    return row


def execute(code: str) -> tuple[str, int]:
    """("runs" or "out of memory", peak) of two updates of this program."""
    fresh(whole=True)
    names: dict = {}
    try:
        exec(code, names)
        names["step"]()
        return "runs", torch.cuda.max_memory_allocated()
    except torch.OutOfMemoryError:
        return "out of memory", torch.cuda.max_memory_allocated()
    finally:
        names.clear()


def traced(case) -> dict:
    """The work of a training step, without the names of modules, which its time does not depend on."""
    work = predicted(case, "cuda").memory.main.trace.work
    return {
        "work": [[w.phase, w.kind, int(w.flops), int(w.bytes), w.dtype, w.tensors, w.again] for w in work]
    }


def timed(case, profiled: bool) -> dict:
    """Seconds of a step: the median of 9 to 40 after nine; of the host alone; profiled: of all kernels."""
    fresh()
    step, _optimizer, _there = stepping(case, "cuda")
    about = machines.time_call(step, "cuda", 3, graph=False)
    wall = machines.time_call(step, "cuda", min(40, max(9, int(0.5 / about))), graph=False)
    host = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        host.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    row = {"seconds": wall, "host": statistics.median(host)}
    if not profiled:
        return row
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    events = profile.profiler.kineto_results.events()
    kernels = [e.duration_ns() for e in events if e.device_type() == torch.autograd.DeviceType.CUDA]
    return {**row, "busy": sum(kernels) / 1e9, "kernels": len(kernels)}


# -- the run ------------------------------------------------------------------------------------------------------


def guarded(task, case) -> dict:
    start = time.perf_counter()
    try:
        row = task(case)
    except Exception as e:
        row = {"error": f"{type(e).__name__}: {e}"[:300]}
    return {"model": described(case), **row, "wall": round(time.perf_counter() - start, 2)}


def work(kind: str, part: int, options: Any) -> None:
    """Every k-th task of this kind; results are stored one by one."""
    tasks = [(kind, i, c) for i, c in enumerate(drawn(kind, options.seed)) if kind in options.kinds]
    if kind == "models":
        timed_ones = [name for name in ("time", "fit") if name in options.kinds]
        tasks += [(name, i, c) for name in timed_ones for i, c in enumerate(drawn(name, options.seed))]
    run = {"models": models, "generation": generation, "plans": plans, "time": traced, "fit": traced}
    rows: dict = {}
    # Sparse patterns last, as their kernels are compiled; of what is timed as well first.
    tasks.sort(key=lambda task: (task[1] >= COUNTS["time"], _compiles(task[2])))
    for name, i, case in tasks[part :: options.workers[kind]]:
        rows[f"{name} {i}"] = guarded(run[name], case)
        (options.out / f"{kind}{part}.json").write_text(json.dumps(rows), encoding="utf-8")


def _compiles(case: Any) -> bool:
    return case.spec is not None and case.spec.block.attention.pattern != rg.causal()


def run_all(options: Any) -> None:
    import transformers

    options.out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, __file__, "--seed", str(options.seed), "--out", str(options.out)]
    command += ["--kinds", ",".join(options.kinds)]
    command += ["--workers", ",".join(map(str, options.workers.values()))]
    kinds = [k for k in WORKERS if k in options.kinds]
    parts = [
        subprocess.Popen([*command, "--plans-worker" if k == "plans" else "--worker", k, str(i)])
        for k in kinds
        for i in range(options.workers[k])
    ]
    until = time.time() + options.limit
    for part in parts:
        try:
            part.wait(max(1.0, until - time.time()))
        except subprocess.TimeoutExpired:
            part.kill()
    found: dict = {
        "seed": options.seed, "torch": str(torch.__version__), "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    for kind in kinds:
        for i in range(options.workers[kind]):
            file = options.out / f"{kind}{i}.json"
            found |= json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    print(f"{time.time() - until + options.limit:.0f} s for memory and plans", flush=True)
    out = options.out / "measured.json"
    out.write_text(json.dumps(found), encoding="utf-8")
    names = [name for name in ("time", "fit") if name in options.kinds]
    if names:
        found["roofline"] = dataclasses.asdict(measure("cuda"))
    for name in names:
        for i, case in enumerate(drawn(name, options.seed)):
            row = guarded(partial(timed, profiled=name == "fit"), case)
            found.setdefault(f"{name} {i}", {}).update(row)
            out.write_text(json.dumps(found), encoding="utf-8")


# -- the tables ---------------------------------------------------------------------------------------------------


def report(folder: Path) -> None:
    found = json.loads((folder / "measured.json").read_text(encoding="utf-8"))
    rows = {
        kind: [found[f"{kind} {i}"] for i in range(n) if f"{kind} {i}" in found] for kind, n in COUNTS.items()
    }
    print("# Memory, plans and time of generated models on a GPU\n")
    print(f"`bench/cost_gpu.py`, seed {found['seed']}, {found['date']}; {found['device']}, torch {found['torch']}, "
          f"transformers {found['transformers']}, of which predictions and measurements were made.\n")  # fmt: skip
    for title, table in (("Training steps", _memory), ("Inference, prompt and next token", _generation),
                         (f"Plans within {CAP / 1e9:.0f} GB", _plans)):  # fmt: skip
        kind = {_memory: "models", _generation: "generation", _plans: "plans"}[table]
        if rows[kind]:
            print(f"## {title}\n")
            table([r for r in rows[kind] if "error" not in r])
            print(*(f"\nfailed: {r['model']}: {r['error']}" for r in rows[kind] if "error" in r), "\n")
    for kind in ("time", "fit"):
        if any("work" in r for r in rows[kind]) and "roofline" in found:
            print(
                f"## Time of a step ({'not fitted' if kind == 'time' else 'models to which constants are fitted'})\n"
            )
            _time([r for r in rows[kind] if "seconds" in r and "work" in r], found["roofline"])


def _memory(rows: list[dict]) -> None:
    print("| model | predicted, MiB | measured, MiB | error | reserved |\n|---|--:|--:|--:|--:|")
    for r in rows:
        reserved = r["predicted_reserved"] / r["reserved"] - 1
        print(f"| {r['model']} | {_pair(r['predicted'], r['measured'])} | {reserved:+.1%} |")
    print(f"\n{summary([r['predicted'] / r['measured'] - 1 for r in rows], 0.03)}\n")


def _pair(guess: int, real: int) -> str:
    return f"{guess / MIB:,.1f} | {real / MIB:,.1f} | {guess / real - 1:+.2%}"


def _generation(rows: list[dict]) -> None:
    print("| model | kind | predicted, MiB | measured, MiB | error |\n|---|---|--:|--:|--:|")
    for r in rows:
        for kind in PHASES:
            print(f"| {r['model']} | {kind} | {_pair(*r[kind])} |")
    print(f"\n{summary([r[k][0] / r[k][1] - 1 for r in rows for k in PHASES], 0.03)}\n")


def _plans(rows: list[dict]) -> None:
    print(
        "| model | n | batch | predicted, MiB | measured, MiB | one more row | holds |\n|---|--:|--:|--:|--:|---|---|"
    )
    holds = 0
    for r in rows:
        tight = r["more"][0] != "runs" or r["more"][1] > planner.SHARE * CAP
        good = r["planned"][0] == "runs" and tight
        holds += good
        more = r["more"][0] if r["more"][0] != "runs" else f"{r['more'][1] / MIB:,.0f} MiB"
        sizes = f"{r['n']} | {r['batch']} | {r['predicted'] / MIB:,.0f} | {r['planned'][1] / MIB:,.0f}"
        print(f"| {r['model']} | {sizes} | {more} | {'yes' if good else 'no: ' + r['planned'][0]} |")
    print(f"\n{holds} of {len(rows)} hold.\n")


def _time(rows: list[dict], roofline: dict) -> None:
    machine, errors = machines.Roofline(**roofline), []
    print(
        "| model | estimated, ms | measured, ms | error | kernels, estimated | kernels | host, estimated | host |"
    )
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    for r in rows:
        guess = machines.time_of([Work(w[0], "", *w[1:]) for w in r["work"]], machine)
        errors.append(guess.seconds / r["seconds"] - 1)
        numbers = sum(guess.device.values()), r.get("busy", 0.0), sum(guess.host.values()), r["host"]
        parts = " | ".join(f"{x * 1e3:.1f}" if x else "" for x in numbers)
        print(
            f"| {r['model']} | {guess.seconds * 1e3:.1f} | {r['seconds'] * 1e3:.1f} | {errors[-1]:+.0%} | {parts} |"
        )
    print(f"\n{summary(errors, 0.4)}\n")


def summary(errors: list[float], bound: float) -> str:
    sizes = sorted(map(abs, errors))
    beyond, middle = sum(e > bound for e in sizes), statistics.median(sizes)
    return f"{len(sizes)} rows: median {middle:.2%}, worst {sizes[-1]:.2%}, {beyond} beyond {bound:.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=31)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--kinds", default="models,generation,plans,time", type=lambda text: text.split(","))
    parser.add_argument("--limit", type=float, default=100, help="seconds for memory and plans")
    parser.add_argument("--workers", default=WORKERS, help="processes of models, generation and plans",
                        type=lambda text: dict(zip(WORKERS, map(int, text.split(",")))))  # fmt: skip
    parser.add_argument("--report", type=Path)
    parser.add_argument("--worker", "--plans-worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.report:
        report(options.report)
    elif options.worker:
        work(options.worker[0], int(options.worker[1]), options)
    else:
        run_all(options)


if __name__ == "__main__":
    main()

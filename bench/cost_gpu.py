"""Are predicted memory and time of models, and plans, what a GPU measures? Generated models, predicted beforehand.

    PYTHONPATH=src:bench python3 bench/cost_gpu.py --predict FILE   without a GPU: predictions, plans and their code
    PYTHONPATH=src:bench python3 bench/cost_gpu.py --measure FILE OUT_FOLDER   on a GPU: memory and plans in several
                                                    processes, then times in one, alone
    PYTHONPATH=src:bench python3 bench/cost_gpu.py --report FILE OUT_FOLDER    the table

`--seed` draws the models that are compared; times are also measured for models of FIT_SEED, to which the constants of
regard.costs.time are fitted. A plan holds if its code runs within the cap, and one more row per batch needs
more than the planned share or does not run.
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
from pathlib import Path

os.environ.setdefault(
    "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True" if "--only-plans" in sys.argv else ""
)

import torch
from cost_models import cases, described, predicted, stepping

from regard.costs import planner
from regard.costs import time as machines
from regard.costs.subject import Subject
from regard.costs.trace.tracer import Work

FIT_SEED, FIT_COUNT, TIMED, PLANS, GENERATED, WORKERS = 26, 24, 20, 20, 12, 16
CAP = 4 * 10**9
MIB = 1 << 20


# -- without a GPU ------------------------------------------------------------------------------------------------


def predict(options) -> None:
    """Peaks, the traced work for the time, and plans, of models that no rule was tuned for."""
    written = {"torch": str(torch.__version__), "seed": options.seed, "models": [], "plans": []}
    works: dict = {"models": [], "fit": []}  # a few megabytes: beside the file, for --report
    for index, case in enumerate([] if options.only_plans else cases(options.seed, options.count, 8)):
        start, memory = time.process_time(), predicted(case, "cuda").memory
        row = {"model": described(case), "peak": memory.training_peak, "reserved": memory.reserved}
        row |= {"moment": memory.peak.moment}
        if index < TIMED:
            works["models"].append(packed(memory.main.trace.work))
        if memory.prefill_peak is not None and sum("prefill" in r for r in written["models"]) < GENERATED:
            row |= {
                "prefill": memory.prefill_peak,
                "decode": memory.decode_peak,
                "inference": memory.inference_peak,
            }
        row["cpu_seconds"] = round(time.process_time() - start, 2)
        written["models"].append(row)
        print(row["cpu_seconds"], row["model"], flush=True)
    for case in [] if options.only_plans else cases(FIT_SEED, FIT_COUNT, 8):
        works["fit"].append(packed(predicted(case, "cuda").memory.main.trace.work))
    options.predict.with_suffix(".work.json").write_text(json.dumps(works), encoding="utf-8")
    options.predict.write_text(json.dumps(written), encoding="utf-8")
    for index, case in enumerate(cases(options.seed + 1, PLANS, 8)):
        training = case.training
        subject = Subject.of(case.spec if case.spec is not None else foreign(case))
        search = planner._Search(subject, "", subject.tokens or case.n, 1)
        option = planner.Option("one", training)
        card = planner.card("h200")._replace(memory=CAP)
        choice = search.choice("h200", card, option)
        row = {
            "model": described(case),
            "batch": choice.batch,
            "n": choice.n,
            "peak": choice.peak,
            "code": choice.code,
        }
        written["plans"].append(row)
        print("plan", index, choice.batch, choice.n, choice.peak, flush=True)
        options.predict.write_text(json.dumps(written), encoding="utf-8")


def foreign(case):
    import transformers
    from cost_models import CLASSES

    config = getattr(transformers, f"{case.family}Config")(**case.config)
    with torch.device("meta"):
        return getattr(transformers, CLASSES[case.family])(config)


def packed(work) -> list:
    """Work as lists, without modules' names, which the time does not depend on."""
    return [[w.phase, w.kind, int(w.flops), int(w.bytes), w.dtype, w.tensors] for w in work]


def unpacked(rows) -> list[Work]:
    return [Work(r[0], "", r[1], r[2], r[3], r[4], r[5]) for r in rows]


# -- on a GPU -----------------------------------------------------------------------------------------------------


def fresh() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def peak_of(case) -> dict:
    """Peak and reserved bytes of the third step; without gradients, of a prompt and of the next token."""
    fresh()
    outside = torch.cuda.memory_allocated()
    step, _optimizer, _there = stepping(case, "cuda")
    for _ in range(2):
        step()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return {
        "peak": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "outside": outside,
    }


def generation_of(case) -> dict:
    from cost_models import built

    from regard.costs.memory.runs import prompt

    outside = torch.cuda.memory_allocated()
    model, args, kwargs, _ = built(case, "cuda")
    model.eval()
    labels = kwargs.pop("labels", None)
    if labels is not None and model.config.is_encoder_decoder:
        kwargs["decoder_input_ids"] = labels
    del labels
    peaks = {"outside": outside}
    with torch.no_grad():
        model(*args, **kwargs)
        fresh()
        model(*args, **kwargs)
        peaks["inference"] = torch.cuda.max_memory_allocated()
        fresh()
        then = prompt(model, args, kwargs)
        peaks["prefill"] = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        then()
        peaks["decode"] = torch.cuda.max_memory_allocated()
    return peaks


def execute(code: str) -> tuple[str, int]:
    """("runs" or "out of memory", peak) of three steps of this program."""
    fresh()
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


def planned(row) -> dict:
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(CAP / total)
    try:
        first, b = execute(row["code"]), row["batch"]
        more = execute(row["code"].replace(f"batch={b})", f"batch={b + 1})"))
        return {"planned": first, "more": more}
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def work(options) -> None:
    """Every WORKERS-th task of memory and plans."""
    given = json.loads(options.work[0].read_text(encoding="utf-8"))
    which, rows = int(options.part), {}
    models = cases(given["seed"], len(given["models"]), 8)
    tasks = [("generation", i) for i, row in enumerate(given["models"]) if "prefill" in row]
    tasks += [
        ("plans", i) for i in range(len(given["plans"]))
    ]  # after inference, which has one workspace of cuBLAS
    tasks += [] if options.only_plans else [("models", i) for i in range(len(models))]
    out = options.work[1] / f"part{which}.json"
    for kind, i in tasks[which::WORKERS]:
        start = time.perf_counter()
        try:
            run = {"models": peak_of, "generation": generation_of}.get(kind)
            row = planned(given["plans"][i]) if run is None else run(models[i])
        except Exception as e:
            row = {"error": f"{type(e).__name__}: {e}"[:300]}
        rows[f"{kind} {i}"] = {**row, "wall": round(time.perf_counter() - start, 2)}
        out.write_text(json.dumps(rows), encoding="utf-8")


def timed(case) -> float:
    """Seconds of a step: the median of nine after three."""
    fresh()
    step, _optimizer, _there = stepping(case, "cuda")
    return machines.time_call(step, "cuda", 9, graph=False)


def measure(file: Path, folder: Path, only_plans: bool) -> None:
    import transformers

    given = json.loads(file.read_text(encoding="utf-8"))
    scratch = Path("/tmp/cost_gpu")
    scratch.mkdir(exist_ok=True)
    command = [sys.executable, __file__, "--work", str(file), str(scratch)]
    command += ["--only-plans"] * only_plans + ["--part"]
    parts = [subprocess.Popen([*command, str(k)]) for k in range(WORKERS)]
    until = time.time() + 100
    for part in parts:
        try:
            part.wait(max(1.0, until - time.time()))
        except subprocess.TimeoutExpired:
            part.kill()
    found: dict = {}
    for part in scratch.glob("part*.json"):
        found |= json.loads(part.read_text(encoding="utf-8"))
    found["versions"] = {
        "torch": str(torch.__version__), "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    out = folder / "measured.json"
    out.write_text(json.dumps(found), encoding="utf-8")
    if only_plans:
        return
    found["roofline"] = dataclasses.asdict(machines.measure("cuda"))
    models, fit = cases(given["seed"], TIMED, 8), cases(FIT_SEED, FIT_COUNT, 8)
    for kind, i, case in [
        *(("time", i, c) for i, c in enumerate(models)), *(("fit", i, c) for i, c in enumerate(fit))
    ]:  # fmt: skip
        try:
            found[f"{kind} {i}"] = timed(case)
        except Exception as e:
            found[f"{kind} {i}"] = f"{type(e).__name__}: {e}"[:200]
        out.write_text(json.dumps(found), encoding="utf-8")


# -- the table ----------------------------------------------------------------------------------------------------


def report(file: Path, folder: Path) -> None:
    files = (file, folder / "measured.json", file.with_suffix(".work.json"))
    given, found, works = (json.loads(p.read_text(encoding="utf-8")) for p in files)
    print("| model | predicted, MiB | measured, MiB | error | reserved |\n|---|--:|--:|--:|--:|")
    errors = []
    for i, row in enumerate(given["models"]):
        real = found.get(f"models {i}", {"error": "not run"})
        if "error" in real:
            print(f"| {row['model']} | {row['peak'] / MIB:,.1f} | {real['error']} | | |")
            continue
        errors.append(row["peak"] / real["peak"] - 1)
        reserved = row["reserved"] / real["reserved"] - 1
        numbers = (
            f"{row['peak'] / MIB:,.1f} | {real['peak'] / MIB:,.1f} | {errors[-1]:+.2%} | {reserved:+.1%}"
        )
        print(f"| {row['model']} | {numbers} |")
    print(f"\n{summary(errors, 0.03)}\n\n## Inference, prompt and next token\n")
    print("| model | kind | predicted, MiB | measured, MiB | error |\n|---|---|--:|--:|--:|")
    errors = []
    for i, row in enumerate(given["models"]):
        for kind in ("inference", "prefill", "decode"):
            real = found.get(f"generation {i}", {})
            if kind in row and kind in real:
                errors.append(row[kind] / real[kind] - 1)
                numbers = f"{row[kind] / MIB:,.1f} | {real[kind] / MIB:,.1f} | {errors[-1]:+.2%}"
                print(f"| {row['model']} | {kind} | {numbers} |")
            elif "error" in real and kind == "decode":
                print(f"| {row['model']} | | | {real['error']} | |")
    print(f"\n{summary(errors, 0.03)}\n\n## Plans within {CAP / 1e9:.0f} GB\n")
    print(
        "| model | n | batch | predicted | measured | one more row | holds |\n|---|--:|--:|--:|--:|---|---|"
    )
    holds = 0
    for i, row in enumerate(given["plans"]):
        real = found.get(f"plans {i}", {"error": "not run"})
        if "error" in real:
            print(f"| {row['model']} | {row['n']} | {row['batch']} | | {real['error']} | | |")
            continue
        tight = real["more"][0] != "runs" or real["more"][1] > planner.SHARE * CAP
        good = real["planned"][0] == "runs" and tight
        holds += good
        more = real["more"][0] if real["more"][0] != "runs" else f"{real['more'][1] / MIB:,.0f} MiB"
        numbers = f"{row['n']} | {row['batch']} | {row['peak'] / MIB:,.0f} | {real['planned'][1] / MIB:,.0f} | {more}"
        print(f"| {row['model']} | {numbers} | {'yes' if good else 'no'} |")
    print(f"\n{holds} of {len(given['plans'])} hold.\n\n## Time of a step\n")
    print("| model | estimated, ms | measured, ms | error | bound by |\n|---|--:|--:|--:|---|")
    roofline, errors = machines.Roofline(**found["roofline"]), []
    for i, row in enumerate(given["models"][:TIMED]):
        if isinstance(real := found.get(f"time {i}"), float):
            guess = machines.time_of(unpacked(works["models"][i]), roofline)
            errors.append(guess.seconds / real - 1)
            numbers = f"{guess.seconds * 1e3:.1f} | {real * 1e3:.1f} | {errors[-1]:+.0%} | {guess.bound}"
            print(f"| {row['model']} | {numbers} |")
    print(f"\n{summary(errors, 0.4)}")


def summary(errors: list[float], bound: float) -> str:
    sizes = sorted(map(abs, errors))
    beyond = sum(e > bound for e in sizes)
    middle = statistics.median(sizes)
    return f"{len(sizes)} rows: median {middle:.2%}, worst {sizes[-1]:.2%}, {beyond} beyond {bound:.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=2711)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--predict", type=Path)
    parser.add_argument("--measure", type=Path, nargs=2)
    parser.add_argument("--report", type=Path, nargs=2)
    parser.add_argument("--only-plans", action="store_true", help="plans and generation, not steps and times")
    parser.add_argument("--work", type=Path, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--part", default="0", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.predict:
        predict(options)
    if options.work:
        work(options)
    if options.measure:
        measure(*options.measure, options.only_plans)
    if options.report:
        report(*options.report)


if __name__ == "__main__":
    main()

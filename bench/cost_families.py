"""FLOPs and memory of the model families of transformers: traced, and compared with PyTorch's FLOP counter.

One class of each family is built with the tiny configuration of its tests (`--tests FOLDER`, a checkout that the user
has; nothing is downloaded), runs on the CPU under torch.utils.flop_counter with attention as plain products, and is
traced by `rg.cost` with the same inputs: a forward pass, whose FLOPs have to be equal and whose peak is compared with
the profiler's allocator events, and a training step, for its memory. Mixtures of experts are traced with unknown
scores: experts count at the routed number. Each family runs in its own process and is stored at once, so that an
interrupted run continues where it stopped.

    python bench/cost_families.py --tests ~/transformers --out bench/results/cost_families.jsonl
    python bench/cost_families.py --table > bench/results/cost_families.md
"""

import argparse
import copy
import importlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

from cost_memory import counted, total
from huggingface_census import classes_of, short, testers, without_dropout
from huggingface_small import SmallCase

PREFERRED = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "ForMaskedLM", "Model")


def families() -> list[str]:
    """The folders of transformers that have a modeling file, in random order: any part of them is a fair sample."""
    import transformers

    root = Path(transformers.__file__).parent / "models"
    names = sorted({f.parent.name for f in root.glob("*/modeling_*.py")})
    random.Random(25).shuffle(names)
    return names


def case_of(folder: str) -> tuple[Any, Any, Any, dict[str, Any]]:
    """A test case of the family, a model class, its tiny configuration, and inputs."""
    cases = [c for c in testers(folder) if classes_of(c, folder) and hasattr(c, "_prepare_for_class")]
    cases = cases or [SmallCase(folder)]
    for case in cases:
        here = classes_of(case, folder)
        for ending in (*PREFERRED, ""):
            for cls in here:
                if cls.__name__.endswith(ending):
                    config, inputs = case.model_tester.prepare_config_and_inputs_for_common()
                    if isinstance(case, SmallCase):
                        config = case.config_for(cls)
                        inputs = case.inputs_for(cls, config)
                    return case, cls, config, case._prepare_for_class(inputs, cls, return_labels=False)
    raise LookupError("no model class with a tiny configuration in the tests or with small sizes")


def family(folder: str) -> dict[str, Any]:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    import regard as rg
    from regard.nested import tensors_in

    torch.manual_seed(0)
    row: dict[str, Any] = {"family": folder}
    try:
        _, cls, config, inputs = case_of(folder)
        without_dropout(config)
        row["class"] = cls.__name__
        try:
            model = cls._from_config(copy.deepcopy(config), attn_implementation="eager").eval()
        except ValueError:  # a family without that choice
            model = cls(copy.deepcopy(config)).eval()
        row["parameters"] = sum(p.numel() for p in model.parameters())
        routed = type(model)._can_set_experts_implementation()
        real = copy.deepcopy(model).requires_grad_(False)  # a model may keep what it computed
        if routed:  # each expert by its own products, which PyTorch's counter counts
            real.set_experts_implementation("eager")
            model.set_experts_implementation("grouped_mm")
        # An LSTM by its products: the counter has no formula for oneDNN's layer.
        plain, counter = torch.backends.mkldnn.flags(enabled=False), FlopCounterMode(display=False)
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), plain, counter:
            real(**copy.deepcopy(inputs))
        row["counted"] = counter.get_total_flops()
        arguments = copy.deepcopy(inputs)
        there = total(x for x in [*model.parameters(), *model.buffers(), *tensors_in(arguments)] if x.numel())
        measured = copy.deepcopy(model)
        with torch.no_grad():
            (peak,), _ = counted(lambda: measured(**arguments), lambda: measured(**arguments))
        row["measured_peak"] = there + peak
        row["ops"] = sorted({str(op) for per in counter.get_flop_counts().values() for op in per})
    except BaseException as e:
        return {**row, "result": "not built here", "reason": short(e)}
    try:
        result = rg.cost(model, copy.deepcopy(inputs))
        row |= {"traced": result.flops, "executed": result.total.executed_flops}
        row |= {"uncounted": list(result.uncounted), "notes": list(result.notes)}
        row["inference_peak"] = result.memory.inference_peak
        str(result)  # the whole report, with the cache of keys and values
    except BaseException as e:
        return {**row, "result": "error", "reason": short(e)}
    row["result"] = "equal" if row["traced"] == row["counted"] else "differs"
    try:
        trained = rg.cost(model, copy.deepcopy(inputs), train=True).memory
        trained.explain_peak()
        row |= {"training_peak": trained.training_peak, "peak_phase": trained.peak_part}
    except BaseException as e:
        refuses = refusal(model, inputs)
        worse = row["result"] == "equal" and refuses is None
        row |= {"result": "error" if worse else row["result"], "reason": f"training: {refuses or short(e)}"}
    return row


def refusal(model: Any, inputs: dict[str, Any]) -> str | None:
    """Why the model itself, with real tensors, does not take these inputs in training mode; None if it does."""
    try:
        model.train()(**copy.deepcopy(inputs))
    except Exception as e:
        return f"the model itself refuses these inputs: {short(e)}"
    return None


def forked(folder: str, seconds: int) -> dict[str, Any]:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        signal.alarm(seconds)
        row = family(folder)
        with os.fdopen(write, "w") as file:
            file.write(json.dumps(row))
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        text = file.read()
    os.waitpid(child, 0)
    ended = {"family": folder, "result": "not built here", "reason": f"ended, or took over {seconds} s"}
    return json.loads(text) if text else ended


def run_all(options: argparse.Namespace) -> None:
    out, part, parts = options.out, *map(int, options.part.split("/"))
    sys.path.insert(0, options.tests)
    importlib.import_module("tests.test_modeling_common")
    importlib.import_module("regard")
    stored = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    done = {row["family"] for row in stored if not options.again or row["result"] == "equal"}
    names = [name for name in options.families or families() if name not in done][part::parts]
    for folder in names[: options.limit]:
        began = time.time()
        row = forked(folder, options.seconds)
        row["seconds"] = round(time.time() - began, 1)
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(
            folder,
            row["result"],
            row.get("traced"),
            row.get("counted"),
            row.get("reason", "")[:150],
            flush=True,
        )


def table(out: Path) -> None:
    import torch
    import transformers

    rows = list({row["family"]: row for row in map(json.loads, out.read_text().splitlines())}.values())
    built = [r for r in rows if r["result"] != "not built here"]
    equal, errors = ([r for r in built if r["result"] == kind] for kind in ("equal", "error"))
    print(f"# Costs of the model families of transformers {transformers.__version__}\n")
    print(
        f"`bench/cost_families.py`, torch {torch.__version__}, CPU. {len(rows)} families, of which {len(built)} are "
        f"built here at a tiny size: {len(built) - len(errors)} ({(len(built) - len(errors)) / len(built):.1%}) are "
        f"priced without an error, forward and training step; for {len(equal)} ({len(equal) / len(built):.1%}) the "
        f"FLOPs of the forward pass equal PyTorch's counter and nothing failed.\n"
    )
    print("| family | class | result | traced FLOPs | counted FLOPs | training peak, bytes | remarks |")
    print("|---|---|---|--:|--:|--:|---|")
    for r in sorted(rows, key=lambda r: r["family"]):
        notes = "; ".join([r.get("reason", ""), *r.get("uncounted", [])[:3], *r.get("notes", [])]).strip("; ")
        numbers = (
            f"{r[k]:,}" if r.get(k) is not None else "" for k in ("traced", "counted", "training_peak")
        )
        notes = notes.replace("|", "/").replace("\n", " ")[:220]
        print(f"| {r['family']} | {r.get('class', '')} | {r['result']} | {' | '.join(numbers)} | {notes} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tests", default="", help="a checkout of transformers that has tests/models")
    parser.add_argument("--out", type=Path, default=Path("bench/results/cost_families.jsonl"))
    parser.add_argument("--table", action="store_true", help="print the stored rows as a page")
    parser.add_argument(
        "--again", action="store_true", help="also run the stored families that are not equal"
    )
    parser.add_argument("--limit", type=int, default=10**6, help="families at most in this call")
    parser.add_argument("--seconds", type=int, default=300, help="for one family at most")
    parser.add_argument("--part", default="0/1", help="k/n: the k-th of n parts, for processes side by side")
    parser.add_argument("families", nargs="*", help="these families only")
    args = parser.parse_args()
    if args.table:
        table(args.out)
    else:
        run_all(args)

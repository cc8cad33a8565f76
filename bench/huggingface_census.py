"""Does attn_implementation="regard" equal "eager" in every model family of transformers that uses its registry?

Families are built with tiny configurations: those of the test folder of the transformers repository (`--tests
FOLDER`, a checkout that the user has; nothing is downloaded). For each model class: all float outputs, the gradients
of all parameters, and greedy and beam generation, in float32, relative to the largest number of the tensor. "sdpa" is
compared in the same way, for scale. Each family runs in its own process and its result is stored at once, so that an
interrupted run continues where it stopped.

    python bench/huggingface_census.py --tests ~/transformers --out bench/results/huggingface_census.jsonl
    python bench/huggingface_census.py --table > docs/huggingface_families.md
"""

import argparse
import copy
import importlib
import inspect
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
from huggingface_small import SmallCase

TOLERANCE = 1e-5
LIMIT_S = 150  # processor time of a family: a machine that pauses the run costs it nothing
SETTINGS = {"patchtsmixer": {"self_attn": True}}  # what the tiny configurations leave out
# What manual inspection found about families that are not equal.
KNOWN = {
    "seamless_m4t_v2": "eager adds the model's bool chunk mask to its scores; regard and sdpa honor it",
    "edgetam": "its backbone's configuration is on a hub, which nothing here reads",
    "kimi_k25": "eager cannot be built from the test's configuration either",
    **dict.fromkeys(("esmfold2", "neucodec", "pp_doclayout_v4"), "no small configuration was found"),
}
PREFACE = """\
{equal} of {rows} families that call the attention registry equal eager attention: all float outputs and all gradients
agree within {tolerance} (relative to the largest number), greedy and beam generation give the same tokens. Generated
by `bench/huggingface_census.py` in float32 on the CPU, with the tiny configurations of the transformers test folders
(where there are none, the family's default configuration at small sizes, `bench/huggingface_small.py`). The first key
of every padding mask is visible, because a query without an allowed key gives zeros in regard and the mean of all
values in eager. The numbers are the worst relative difference over the classes of the family, for regard and for
sdpa.
"""


def families() -> list[str]:
    """The folders of transformers whose modeling files call the attention registry."""
    import transformers

    root = Path(transformers.__file__).parent / "models"
    return sorted(
        {
            f.parent.name
            for f in root.glob("*/modeling_*.py")
            if "ALL_ATTENTION_FUNCTIONS" in f.read_text("utf-8")
        }
    )


def float_tensors(x: Any, path: str = "") -> dict[str, Any]:
    """Every float tensor of a nested output, by its place in it."""
    import torch

    if isinstance(x, torch.Tensor):
        return {path: x} if x.is_floating_point() else {}
    if isinstance(x, dict):
        return {k: v for name, y in x.items() for k, v in float_tensors(y, f"{path}.{name}").items()}
    if isinstance(x, tuple | list):
        return {k: v for place, y in enumerate(x) for k, v in float_tensors(y, f"{path}[{place}]").items()}
    return {}


def difference(found: Any, expected: Any) -> float:
    import torch

    if found.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    both = torch.isfinite(expected)
    if not torch.equal(both, torch.isfinite(found)):
        return float("inf")
    size = expected[both].abs().max() if both.any() else torch.tensor(1.0)
    gap = (found - expected)[both].abs().max() if both.any() else torch.tensor(0.0)
    return float(gap / size.clamp(min=1e-6))


def testers(folder: str) -> list[Any]:
    """The test cases of a family of the transformers repository, set up with their tiny configurations."""
    root = Path(sys.path[0])
    found = []
    for file in sorted((root / "tests" / "models" / folder).glob("test_modeling_*.py")):
        module = importlib.import_module(f"tests.models.{folder}.{file.stem}")
        for name, cls in vars(module).items():
            if not inspect.isclass(cls) or cls.__module__ != module.__name__ or not name.endswith("Test"):
                continue
            if not hasattr(cls, "all_model_classes") or not hasattr(cls, "setUp"):
                continue
            case = cls()
            case.setUp()
            if case.all_model_classes and hasattr(case, "model_tester"):
                found.append(case)
    return found


def seed_inputs() -> None:
    """The same inputs in every run: the tests draw them from a generator of their own that has no seed."""
    for name in ("tests.test_modeling_common", "tests.generation.test_utils"):
        if (drawn := getattr(sys.modules.get(name), "global_rng", None)) is not None:
            drawn.seed(0)
    random.seed(0)
    numpy.random.seed(0)


def without_dropout(config: Any) -> None:
    parts = [getattr(config, k, None) for k in getattr(config, "sub_configs", {})]
    for part in [config, *filter(None, parts)]:
        for name, value in list(vars(part).items()):
            if ("drop" in name or "pdrop" in name) and isinstance(value, float):
                setattr(part, name, 0.0)


def projected(x: Any) -> Any:
    """A random projection of an output, relative to its size: the squares of normalized outputs have no gradient."""
    import torch

    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(x.numel()), dtype=torch.float64)
    finite = torch.where(torch.isfinite(x), x, 0.0).double()
    return (weights * finite).mean() / finite.detach().abs().max().clamp(min=1e-6)


def outcome(model: Any, inputs: dict[str, Any], generate: Any) -> dict[str, Any]:
    """Outputs, gradients and generated tokens of a model."""
    import torch

    torch.manual_seed(0)
    model.eval()
    model.zero_grad()
    out = model(**inputs)
    outputs = float_tensors(dict(out) if hasattr(out, "items") else out)
    outputs = {k: v for k, v in outputs.items() if v is not None}
    # Weights that nobody requested are an output of eager alone, so they are no part of the loss.
    shown = [x for name, x in outputs.items() if x.requires_grad and "attentions" not in name]
    loss = sum((projected(x) for x in shown), torch.zeros(()))
    gradients: dict[str, Any] = {}
    if loss.requires_grad:
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    tokens = generate(model) if generate else {}
    return {"outputs": {k: v.detach() for k, v in outputs.items()}, "gradients": gradients, "tokens": tokens}


def generator(case: Any, cls: Any, config: Any, inputs: dict[str, Any]) -> Any:
    if cls not in getattr(case, "all_generative_model_classes", ()):
        return None
    _, given = case.prepare_config_and_inputs_for_generate(batch_size=2)
    allowed: set[str] = set()  # what eager, which runs first, can do

    def run(model: Any) -> dict[str, Any]:
        import torch

        found = {}
        for name, options in (("greedy", {}), ("beam", {"num_beams": 2})):
            torch.manual_seed(0)
            options = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6, **options}
            try:
                made = model.generate(**copy.deepcopy(given), **options)
            except Exception as error:
                if name in allowed:
                    raise
                print(f"{cls.__name__}: {name} generation is left out: {short(error)}", file=sys.stderr)
                continue
            allowed.add(name)
            found[name] = made if isinstance(made, torch.Tensor) else made.sequences
        return found

    return run


def classes_of(case: Any, folder: str) -> list[Any]:
    """The model classes of a case that belong to the family."""
    return [c for c in case.all_model_classes if c.__module__.startswith(f"transformers.models.{folder}.")]


def family(folder: str) -> dict[str, Any]:
    import torch

    import regard.interop.huggingface as huggingface  # noqa: F401
    from regard.interop.huggingface import attention

    torch.manual_seed(0)
    seed_inputs()
    rows = []
    cases = testers(folder)
    if not any(classes_of(case, folder) for case in cases):
        cases = [SmallCase(folder)]
    for case in cases:
        config, inputs = case.model_tester.prepare_config_and_inputs_for_common()
        for cls in classes_of(case, folder):
            if isinstance(case, SmallCase):
                try:
                    config = case.config_for(cls)
                    inputs = case.inputs_for(cls, config)
                except Exception as error:
                    rows.append({"class": cls.__name__, "result": "eager fails here", "reason": short(error)})
                    continue
            without_dropout(config)
            for name, value in SETTINGS.get(folder, {}).items():
                setattr(config, name, value)
            rows.append(model_class(case, cls, config, inputs, attention))
    return {"family": folder, "classes": rows}


def model_class(case: Any, cls: Any, config: Any, inputs: dict[str, Any], attention: Any) -> dict[str, Any]:
    import torch

    row: dict[str, Any] = {"class": cls.__name__}
    try:
        torch.manual_seed(0)
        model = cls._from_config(copy.deepcopy(config), attn_implementation="eager")
        with torch.no_grad():  # constant initial weights would hide a wrong mask
            for p in model.parameters():
                if p.is_floating_point() and p.numel() > 1 and float(p.std()) == 0:
                    p.add_(0.1 * torch.randn_like(p))
        torch.manual_seed(0)
        seed_inputs()
        prepared = case._prepare_for_class(copy.deepcopy(inputs), cls, return_labels=False)
        for name, x in prepared.items():  # a query without any key: zeros here, the mean of values in eager
            if name.endswith("attention_mask") and isinstance(x, torch.Tensor) and x.dim() == 2:
                x[:, 0] = 1
        generate = generator(case, cls, config, prepared)
        expected = outcome(model, copy.deepcopy(prepared), generate)
        again = outcome(model, copy.deepcopy(prepared), None)
    except Exception as error:
        return {**row, "result": "eager fails here", "reason": short(error)}
    ungenerated = {**expected, "tokens": {}}
    row["noise"] = compare(again, ungenerated)["worst"]
    with counted(attention) as calls:
        row["regard"] = compared("regard", cls, model, config, prepared, generate, expected)
    row["calls"] = len(calls)
    row["sdpa"] = compared("sdpa", cls, model, config, prepared, None, ungenerated)
    said = row["regard"]
    if "error" in said:
        row["result"], row["reason"] = "refused", said["error"]
    elif not row["calls"]:
        row["result"], row["reason"] = "not called", "this class does not call the registry with these inputs"
    elif said["worst"] <= TOLERANCE and said["tokens_equal"]:
        row["result"] = "equal"
    elif (
        said["tokens_equal"] and (gaps := against_float64(cls, model, config, prepared, expected)) is not None
    ):
        row["result"] = "equal"
        row["reason"] = (
            f"float32 rounding that the model amplifies: from eager in float64, regard differs by {gaps[0]:.0e}, "
            f"eager by {gaps[1]:.0e}, regard in float64 by {gaps[2]:.0e}"
        )
    else:
        row["result"] = "differs"
        row["reason"] = (
            f"{said['worst']:.1e} at {said['at']}; tokens equal: {said['tokens_equal']}; "
            f"regard and sdpa differ by {from_sdpa(cls, model, config, prepared):.0e}"
        )
    return row


def twin_of(name: str, cls: Any, model: Any, config: Any) -> Any:
    """The same weights and generation settings with another implementation."""
    twin = cls._from_config(copy.deepcopy(config), attn_implementation=name)
    twin.load_state_dict(model.state_dict())
    if model.can_generate():  # the tests change the tokens that end a text
        twin.generation_config = copy.deepcopy(model.generation_config)
    return twin


def compared(
    name: str, cls: Any, model: Any, config: Any, prepared: Any, generate: Any, expected: Any
) -> Any:
    """The implementation of this name against what eager gave."""
    try:
        twin = twin_of(name, cls, model, config)
        return compare(outcome(twin, copy.deepcopy(prepared), generate), expected)
    except Exception as error:
        if name == "regard":
            print(traceback.format_exc()[-1500:], file=sys.stderr)
        return {"error": short(error)}


def from_sdpa(cls: Any, model: Any, config: Any, prepared: Any) -> float:
    """How far regard is from sdpa: where eager is the one that differs, these two agree."""
    twins = [twin_of(name, cls, model, config) for name in ("regard", "sdpa")]
    return compare(*[outcome(twin, copy.deepcopy(prepared), None) for twin in twins])["worst"]


@contextmanager
def counted(attention: Any) -> Iterator[list[int]]:
    """The calls that regard computes: by the registry, and of intercepted F.scaled_dot_product_attention."""
    from transformers import AttentionInterface

    from regard.interop import use

    calls: list[int] = []
    attend, sdpa = attention.attend, use.sdpa_with_pattern
    AttentionInterface.register("regard", lambda *a, **k: calls.append(1) or attend(*a, **k))
    use.sdpa_with_pattern = lambda *a, **k: calls.append(1) or sdpa(*a, **k)
    try:
        yield calls
    finally:
        AttentionInterface.register("regard", attend)
        use.sdpa_with_pattern = sdpa


def in_float64(model: Any) -> Any:
    """A copy in float64; grouped products of experts exist in float32 only."""
    model = copy.deepcopy(model).double()
    model.set_experts_implementation("eager")
    return model


def against_float64(cls: Any, model: Any, config: Any, inputs: dict[str, Any], eager: Any) -> Any:
    """Worst relative differences from eager in float64: of regard, of eager, and of regard in float64.

    None unless they show that the difference in float32 is rounding: regard is as near as eager is (at most twice as
    far), or equal in float64 to 1e-9; or if the model cannot run in float64.
    """
    import torch

    wide = {
        k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for k, v in inputs.items()
    }
    try:
        twin = twin_of("regard", cls, model, config)
        near = outcome(twin, copy.deepcopy(inputs), None)
        exact = outcome(in_float64(model), copy.deepcopy(wide), None)
        same = outcome(in_float64(twin), copy.deepcopy(wide), None)
    except Exception as error:
        print(f"{cls.__name__} in float64: {short(error)}", file=sys.stderr)
        return None
    plain = {**eager, "tokens": {}}
    gaps = tuple(compare(x, exact)["worst"] for x in (near, plain, same))
    return gaps if gaps[2] <= 1e-9 or gaps[0] <= 2 * gaps[1] < float("inf") else None


def compare(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    import torch

    worst, at = 0.0, ""
    for kind in ("outputs", "gradients"):
        missing = {k for k in set(found[kind]) ^ set(expected[kind]) if "attentions" not in k}
        if missing:  # weights that nobody requested may be missing
            at = f"other {kind}: {sorted(missing)[:2]}"
            return {"worst": float("inf"), "at": at, "tokens_equal": False}
        for name, x in expected[kind].items():
            if name not in found[kind]:
                continue
            gap = difference(found[kind][name], x)
            if kind == "gradients":  # relative to the model's largest: some are sums of rounding alone
                largest = max(float(g.abs().max()) for g in expected[kind].values())
                gap = float((found[kind][name] - x).abs().max()) / max(largest, 1e-12)
            if gap > worst:
                worst, at = gap, f"{kind}{name}"
    same = found["tokens"].keys() == expected["tokens"].keys() and all(
        torch.equal(found["tokens"][k], x) for k, x in expected["tokens"].items()
    )
    return {"worst": worst, "at": at, "tokens_equal": same, "generated": bool(expected["tokens"])}


def short(error: BaseException) -> str:
    return without_links(f"{type(error).__name__}: {error!s}".replace("\n", " "))[:300]


def without_links(text: str) -> str:
    return re.sub(r"https?://[^\s'\"]*", "", text)


def run_all(out: Path, tests: str, only: list[str], again: bool, minutes: float) -> None:
    """Each family in a forked process, so that imports are paid for once and a crash costs one family."""
    sys.path.insert(0, tests)
    importlib.import_module("tests.test_modeling_common")
    importlib.import_module("regard.interop.huggingface")
    here = only or families()
    torch_version = sys.modules["torch"].__version__
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    started = time.time()
    for place, folder in enumerate(here):
        if folder in finished(out, again):  # read each time: several runs may share the file
            continue
        began = time.time()
        if began - started > 60 * minutes:
            print(f"{minutes:g} minutes have passed; the same command continues from here")
            return
        row = forked(folder)
        row |= {"seconds": round(time.time() - began, 1), "commit": commit, "torch": torch_version}
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        results = [c["result"] for c in row["classes"]]
        print(
            f"{place + 1}/{len(here)} {folder}: {results or row.get('error', 'no class')[-200:]}", flush=True
        )


def finished(out: Path, again: bool) -> set[str]:
    stored = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    return {row["family"] for row in stored if not again or verdict(row)[0] == "equal"}


def forked(folder: str) -> dict[str, Any]:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
            signal.alarm(6 * LIMIT_S)
            row = family(folder)
        except BaseException:
            row = {"family": folder, "classes": [], "error": without_links(traceback.format_exc())[-600:]}
        with os.fdopen(write, "w") as file:
            file.write(json.dumps(row))
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        text = file.read()
    os.waitpid(child, 0)
    ended = {"family": folder, "classes": [], "error": f"ended, or took over {LIMIT_S} s of processor time"}
    return json.loads(text) if text else ended


def table(out: Path) -> None:
    import transformers

    rows = [json.loads(line) for line in out.read_text().splitlines()]
    rows = list({row["family"]: row for row in rows}.values())
    verdicts = {row["family"]: verdict(row) for row in rows}
    equal = sum(v[0] == "equal" for v in verdicts.values())
    print(f'# Model families of transformers {transformers.__version__} with attn_implementation="regard"\n')
    print(PREFACE.format(equal=equal, rows=len(rows), tolerance=f"{TOLERANCE:g}"))
    commits = Counter(row.get("commit", "unknown") for row in rows)
    versions = Counter(row["torch"] for row in rows)
    for title, counts in (("Commits", commits), ("torch", versions)):
        listed = ", ".join(f"{name} ({count})" for name, count in counts.most_common())
        print(f"{title} (number of rows): {listed}.\n")
    print("| family | classes | result | regard | sdpa | reason |\n|---|--:|---|--:|--:|---|")
    for row in sorted(rows, key=lambda r: r["family"]):
        word, reason = verdicts[row["family"]]
        if word != "equal" and row["family"] in KNOWN:
            reason = f"{KNOWN[row['family']]} ({reason})"
        worst, other = (
            max((c[name]["worst"] for c in row["classes"] if "worst" in c.get(name, {})), default=None)
            for name in ("regard", "sdpa")
        )
        numbers = ["" if x is None else f"{x:.0e}" for x in (worst, other)]
        print(
            f"| {row['family']} | {len(row['classes'])} | {word} | {numbers[0]} | {numbers[1]} | {reason} |"
        )


def verdict(row: dict[str, Any]) -> tuple[str, str]:
    compared = [c for c in row["classes"] if c["result"] not in ("not called", "eager fails here")]
    bad = [c for c in compared if c["result"] != "equal"]
    if bad:
        return bad[0]["result"], f"{bad[0]['class']}: {bad[0]['reason']}".replace("|", "/")[:200]
    if compared:
        return "equal", next((f"{c['class']}: {c['reason']}" for c in compared if c.get("reason")), "")
    if row.get("error") is None and not row["classes"]:
        return "not compared", "no tiny configuration: the test folder used has no tests of this family"
    reasons = [f"{c['class']}: {c['reason']}" for c in row["classes"]] or [
        row.get("error", "no test folder")[-160:]
    ]
    return "not compared", reasons[0].replace("\n", " ").replace("|", "/")[:200]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tests", default="", help="a checkout of transformers that has tests/models")
    parser.add_argument("--out", type=Path, default=Path("bench/results/huggingface_census.jsonl"))
    parser.add_argument("--table", action="store_true", help="print the stored rows as a page")
    parser.add_argument("--again", action="store_true", help="also run the stored ones that are not equal")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no family after this time")
    parser.add_argument("families", nargs="*", help="these families only")
    args = parser.parse_args()
    if args.table:
        table(args.out)
    else:
        run_all(args.out, args.tests, args.families, args.again, args.minutes)

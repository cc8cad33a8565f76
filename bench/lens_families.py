"""Does `rg.look` show the whole attention of a model family of transformers, or say what it does not show?

    python bench/lens_families.py --tests ~/transformers --minutes 10 --out bench/results/lens_families.jsonl
    python bench/lens_families.py --table > docs/look_families.md

The first class of each family that runs (tiny configurations as in huggingface_census.py) is run with eager attention
and output_attentions=True; every map that it returns has to be among those of `look`. Where a model returns none, the
weights that its module's `eager_attention_forward` returns are compared. A family is

    whole      every returned map is shown, and nothing is missed; the number is the largest difference
    named      what is not shown is named in `missed`, or `look` refuses with a reason
    no maps    the model returns none to compare with; the number of layers that `look` shows is given
    PARTIAL    maps are missing and nothing says so: a failure
"""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_census import classes_of, families, short, testers, without_dropout
from huggingface_small import SmallCase
from origin import origin

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a configuration that asks for weights fails at once

OTHERS = (
    *("longformer", "led", "big_bird", "bigbird_pegasus", "reformer", "hiera", "xlnet", "swin", "deberta"),
    *("gpt_oss", "bert", "gpt2", "t5", "llama", "vit"),
)
PREFACE = """\
# Families of transformers in `rg.look`

{whole} of {rows} families are shown whole, of {named} what is not shown is named, {none} have no maps to compare
with, {partial} are shown in part without a word, {other} did not run here (with the reason below).
Made by `bench/lens_families.py` ({date}, commit {commit}, torch {torch}) with transformers 5.22.0 and the tiny
configurations of its test folder (5.16; where that has none, small sizes of our own), eager attention, float32 on the
CPU; the numbers are the largest difference to the maps that the model returns with `output_attentions=True`, or to
those that its eager attention function computes. With SDPA kernels the maps are computed from the recorded queries
and keys: equal to the eager ones within 5e-6 in float32.

| family | result | |
|---|---|---|
"""


def maps_of(out: Any) -> list[Any]:
    """Every tensor under a name that has "attentions" in it."""
    import torch

    found = []
    for name, value in dict(out).items():
        if "attentions" in name and value is not None:
            waiting = [value]
            while waiting:
                x = waiting.pop(0)
                if isinstance(x, torch.Tensor):
                    found.append(x)
                elif isinstance(x, list | tuple):
                    waiting += x
    return found


@contextmanager
def computed_maps(cls: type) -> Iterator[list[Any]]:
    """The weights that the eager attention function of a model's module returns, in the order of its calls."""
    module = sys.modules[cls.__module__]
    eager, found = getattr(module, "eager_attention_forward", None), []

    def recording(*args: Any, **kwargs: Any) -> Any:
        out, weights = eager(*args, **kwargs)
        found.append(weights)
        return out, weights

    if eager is not None:
        module.eager_attention_forward = recording
    try:
        yield found
    finally:
        if eager is not None:
            module.eager_attention_forward = eager


def family(folder: str) -> dict[str, Any]:
    import torch

    import regard as rg

    torch.manual_seed(0)
    torch.set_num_threads(1)
    try:
        cases = testers(folder)
    except ImportError:  # the tests of transformers need packages that are not installed
        cases = []
    cases = [*(case for case in cases if classes_of(case, folder)), SmallCase(folder)]
    reason = "no class"
    for case in cases:
        config, inputs = case.model_tester.prepare_config_and_inputs_for_common()
        for cls in classes_of(case, folder)[:4]:
            try:
                if isinstance(case, SmallCase):
                    config = case.config_for(cls)
                    inputs = case.inputs_for(cls, config)
                without_dropout(config)
                config._attn_implementation = "eager"
                model = cls(config).eval()
                torch.manual_seed(1)  # some families sample keys, and `look` runs the model again
                with torch.no_grad(), computed_maps(cls) as computed:
                    returned = maps_of(model(**inputs, output_attentions=True, return_dict=True))
                returned = returned or computed
            except Exception as error:
                reason = short(error)
                continue
            return {"family": folder, "class": cls.__name__, **compared(rg, model, inputs, returned)}
    return {"family": folder, "result": "not run", "reason": reason}


def compared(rg: Any, model: Any, inputs: dict[str, Any], returned: list[Any]) -> dict[str, Any]:
    import torch

    torch.manual_seed(1)
    try:
        view = rg.look(model, inputs)
    except rg.RegardError as error:
        return {"result": "named", "reason": str(error)[:300]}
    shown = [call.weights() for call in view.calls]  # of the first batch row
    returned = [x for x in returned if bool((x >= 0).all())]  # a field "attentions" may hold features
    absent, worst = 0, 0.0
    for x in returned:
        near = [float((z.double() - part.double()).abs().max()) for y in shown for z, part in alike(x, y)]
        if not near or min(near) > 1e-4:
            absent += 1
        else:
            worst = max(worst, min(near))
    plain = {
        "layers": len(view.calls),
        "returned": len(returned),
        "missed": list(view.missed)[:3],
        "difference": worst,
    }
    if view.missed:
        return {"result": "named", **plain}
    if not returned:
        return {"result": "no maps", **plain}
    return {"result": "PARTIAL" if absent else "whole", "absent": absent, **plain}


def alike(x: Any, y: Any) -> Iterator[tuple[Any, Any]]:
    """The first row of a returned map and the shown map, or the part of it that has as many keys.

    A map of three axes has batch and heads in one. A softmax over the keys of the decoder and of the encoder together
    is shown as one map and returned in two parts.
    """
    first = x[: y.shape[0]] if x.dim() == 3 else x[0]
    for part in (y, y[..., : first.shape[-1]], y[..., -first.shape[-1] :]):
        if part.shape == first.shape:
            yield first, part


def forked(folder: str, seconds: int = 60) -> dict[str, Any]:
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        signal.alarm(seconds)
        try:
            row = family(folder)
        except BaseException as error:
            row = {"family": folder, "result": "not run", "reason": short(error)}
        os.write(write, json.dumps(row).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return (
        json.loads(text) if text else {"family": folder, "result": "not run", "reason": f"over {seconds} s"}
    )


def table(rows: list[dict[str, Any]]) -> str:
    counts = {name: sum(r["result"] == name for r in rows) for name in ("whole", "named", "no maps")}
    counts |= {"partial": sum(r["result"] == "PARTIAL" for r in rows)}
    counts["other"] = len(rows) - sum(counts.values())
    about = {name: rows[-1].get(name) for name in ("date", "commit", "torch")}
    text = PREFACE.format(rows=len(rows), none=counts.pop("no maps"), **about, **counts)
    for row in sorted(rows, key=lambda r: r["family"]):
        detail = f"{row['layers']} layers, {row['difference']:.0e}" if row["result"] == "whole" else ""
        detail = detail or "; ".join(row.get("missed", ())) or row.get("reason", "")
        detail = detail or f"{row.get('layers', 0)} layers"
        text += f"| {row['family']} | {row['result']} | {detail.replace('|', '/')[:200]} |\n"
    return text


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--tests", type=Path)
    options.add_argument("--out", type=Path, default=Path("bench/results/lens_families.jsonl"))
    options.add_argument("--minutes", type=float)
    options.add_argument("--table", action="store_true")
    given = options.parse_args()
    lines = given.out.read_text("utf-8").splitlines() if given.out.exists() else []
    rows = [json.loads(line) for line in lines]
    if given.table:
        print(table(rows), end="")
        return
    sys.path.insert(0, str(given.tests))
    import transformers

    import regard as rg

    _ = rg.look, transformers.PreTrainedModel  # what every child needs is imported once
    about = {name: origin()[name] for name in ("date", "commit", "torch")}
    began, done = time.monotonic(), {r["family"] for r in rows}
    for folder in [f for f in dict.fromkeys((*OTHERS, *families())) if f not in done]:
        if given.minutes and time.monotonic() - began > 60 * given.minutes:
            break
        row = forked(folder) | about
        print(json.dumps(row)[:220], flush=True)
        with given.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()

"""Which laws hold for widely used attentions? Writes docs/laws.md, and the results to bench/results/.

python bench/laws_matrix.py              every target, about 3 minutes on 2 idle cores
python bench/laws_matrix.py SDPA Llama   only these columns, the others from the stored results
"""

import argparse
import json
import logging
import platform
import sys
import time
import warnings
from collections.abc import Callable
from datetime import date
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path

import torch
from laws_findings import FINDINGS, NOTES

import regard as rg
from regard.laws import LAWS, Budget, adapters, check
from regard.laws.controls import reference_function

ROOT = Path(__file__).parent.parent
STORED = ROOT / "bench" / "results" / "laws_matrix.json"
PAGE = ROOT / "docs" / "laws.md"
MARKS = {"holds": "✓", "broken": "✗", "raised": "✗", "not applicable": "", "too slow": "…"}
LIBRARIES = ("torch", "transformers", "x-transformers", "regard")


def hugging_face(name: str, **more):
    import transformers

    transformers.logging.set_verbosity_error()
    return adapters.hugging_face(getattr(transformers, f"{name}Config")(), **more)


FUNCTIONS: dict[str, Callable] = {
    "reference": reference_function,
    "regard": adapters.regard_function,
    "SDPA": adapters.sdpa,
    "finfo.min": adapters.sdpa_finfo_min,
    "flex": adapters.flex,
}
MODELS: dict[str, Callable] = {
    "regard Attention": lambda: adapters.adapt(rg.Attention(16, heads=4, kv_heads=2)),
    "regard GPT": lambda: adapters.adapt(rg.preset("tiny-gpt")),
    "regard BERT": lambda: adapters.adapt(rg.preset("tiny-bert")),
    "regard Transformer": lambda: adapters.adapt(rg.preset("tiny")),
    "regard ViT": lambda: adapters.adapt(rg.preset("tiny-vit")),
    "MHA": adapters.multihead_attention,
    "MHA fused": lambda: adapters.multihead_attention(need_weights=False),
    "Encoder post": adapters.transformer_encoder,
    "Encoder pre": lambda: adapters.transformer_encoder(norm_first=True),
    "Decoder": adapters.transformer_decoder,
    "Transformer": adapters.transformer,
    "x Attention": lambda: adapters.x_transformers(kind="attention"),
    "x Encoder": lambda: adapters.x_transformers(kind="encoder"),
    "x Decoder": lambda: adapters.x_transformers(kind="decoder"),
    "x GPT": lambda: adapters.x_transformers(kind="tokens"),
    "BERT": lambda: hugging_face("Bert"),
    "GPT-2": lambda: hugging_face("GPT2"),
    "Llama": lambda: hugging_face("Llama"),
    "Llama eager": lambda: hugging_face("Llama", attention="eager"),
    "T5": lambda: hugging_face("T5"),
    "Marian": lambda: hugging_face("Marian"),
    "ViT": lambda: hugging_face("ViT"),
}
TARGETS = {**FUNCTIONS, **MODELS}


def measured(column: str, cases: int) -> dict:
    """The verdict on one target, as plain data."""
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)  # of compilers, about calls that a time limit interrupted
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        verdict = check(TARGETS[column](), budget=Budget(cases=cases))
    laws = {
        o.law.number: {
            "status": o.status,
            "message": o.message,
            "cases": o.cases,
            "snippet": o.snippet,
            "case": None if o.counterexample is None else str(o.counterexample),
        }
        for o in verdict.outcomes
    }
    seconds = round(time.perf_counter() - start, 1)
    result = {"name": verdict.target.name, "exit_code": verdict.exit_code, "seconds": seconds, "laws": laws}
    print(f"{column:20} {verdict.headline()} ({seconds} s)", file=sys.stderr, flush=True)
    return result


def mark(outcome: dict | None) -> str:
    """✓ holds, ✗ broken, ○ not promised and does not hold, ◌ not promised but holds."""
    if outcome is None:
        return ""
    if outcome["status"] == "not promised":
        if "declared as lacking" in outcome["message"]:
            return ""
        return "◌" if "observed: holds" in outcome["message"] else "○"
    return MARKS[outcome["status"]]


def table(columns: list[str], results: dict) -> list[str]:
    """Laws × targets; a law that applies to none of them has no row."""
    lines = [f"| law | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for one in LAWS:
        marks = [mark(results[c]["laws"].get(one.number)) for c in columns]
        if any(marks):
            lines.append(f"| {one.number} {one.name} | {' | '.join(marks)} |")
    return [*lines, f"| seconds | {' | '.join(str(results[c]['seconds']) for c in columns)} |"]


def broken(results: dict) -> list[str]:
    """Every broken law and every promise that does not hold, by column."""
    lines = ["| target | law | message | smallest case |", "|---|---|---|---|"]
    names = {one.number: one.name for one in LAWS}
    for column in TARGETS:
        for number, o in results[column]["laws"].items():
            if mark(o) in ("✗", "○", "…"):
                message = o["message"].removeprefix("observed: ").replace("|", "∣").replace("\n", " ")
                lines.append(
                    f"| {column} | {mark(o)} {number} {names[number]} | {message} | {o['case'] or ''} |"
                )
    return lines


def findings() -> list[str]:
    lines = []
    for one in FINDINGS:
        lines += [f"### {one.title}", "", one.about, "", "```python", one.snippet.strip(), "```", ""]
    return lines


def written(results: dict, versions: dict[str, str], day: str, machine: str, cases: int) -> str:
    lines = [
        "# Which laws hold for widely used attentions",
        "",
        "<!-- written by bench/laws_matrix.py; do not edit -->",
        "",
        f"{day}, with {', '.join(f'{k} {v}' for k, v in versions.items())}; {cases} cases per law; {machine}.",
        "The statement of each law: `regard check --list`. How to check your own: [check.md](check.md).",
        "",
        "✓ holds · ✗ broken · ○ not promised, and does not hold · ◌ not promised, but holds · … no answer in time · "
        "empty: the law does not apply.",
        "",
        "## Attention functions",
        "",
        *table(list(FUNCTIONS), results),
        "",
        "## Modules and models",
        "",
        *table(list(MODELS), results),
        "",
        NOTES.strip(),
        "",
        "## Violations",
        "",
        *broken(results),
        "",
        "## The same without regard",
        "",
        "Each finding in plain PyTorch; the tests run these blocks.",
        "",
        *findings(),
    ]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("columns", nargs="*", help="only these; the others from the stored results")
    parser.add_argument("--cases", type=int, default=12, help="cases per law")
    arguments = parser.parse_args()
    if unknown := set(arguments.columns) - set(TARGETS):
        parser.error(f"no column {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    stored = json.loads(STORED.read_text("utf-8"))["results"] if STORED.exists() else {}
    selected = [c for c in TARGETS if c in arguments.columns or not arguments.columns or c not in stored]
    with get_context("spawn").Pool(2) as pool:
        fresh = dict(
            zip(selected, pool.starmap(measured, [(c, arguments.cases) for c in selected], chunksize=1))
        )
    results = {c: fresh.get(c) or stored[c] for c in TARGETS}
    versions = {name: _version(name) for name in LIBRARIES}
    day, machine = date.today().isoformat(), f"{platform.machine()}, 2 processes of 1 thread"
    facts = {"date": day, "versions": versions, "machine": machine, "cases": arguments.cases}
    STORED.write_text(json.dumps({**facts, "results": results}, indent=1, ensure_ascii=False) + "\n", "utf-8")
    PAGE.write_text(written(results, versions, day, machine, arguments.cases), "utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)} and {STORED.relative_to(ROOT)}", file=sys.stderr)


def _version(name: str) -> str:
    return rg.__version__ if name == "regard" else metadata.version(name)


if __name__ == "__main__":
    main()

"""Which laws hold for widely used attentions? Writes docs/laws.md, and the results to bench/results/.

python bench/laws_matrix.py              every target, about 3 minutes on 2 idle cores
python bench/laws_matrix.py SDPA Llama   only these columns, the others from the stored results

timm, diffusers and flash-attn-4 are not dependencies: install them without their own (pip install --no-deps) first.
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
LIBRARIES = ("torch", "transformers", "x-transformers", "timm", "diffusers", "flash-attn-4", "regard")


def hugging_face(name: str, **more):
    import transformers

    transformers.logging.set_verbosity_error()
    return adapters.hugging_face(getattr(transformers, f"{name}Config")(), **more)


def timm_attention(**more):
    from timm.models.vision_transformer import Attention

    return adapters.adapt(Attention(16, num_heads=4, qkv_bias=True, **more).eval())


def timm_pooling():
    from timm.layers import AttentionPoolLatent

    return adapters.adapt(AttentionPoolLatent(16, num_heads=4).eval())


def timm_vision():
    from timm import create_model

    sizes = {"img_size": 32, "patch_size": 16, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}
    return adapters.adapt(create_model("vit_tiny_patch16_224", **sizes).eval())


def diffusers_attention(processor: str, **more):
    from diffusers.models import attention_processor as library

    made = library.Attention(16, heads=4, dim_head=4, processor=getattr(library, processor)(), **more)
    return adapters.adapt(made.eval())


def flash_attention_4():
    """Its reference in plain PyTorch, which its own tests compare the kernels with; those need a GPU and CUTLASS."""
    from importlib.util import module_from_spec, spec_from_file_location

    path = metadata.distribution("flash-attn-4").locate_file("flash_attn/cute/testing.py")
    spec = spec_from_file_location("flash_attention_4_testing", path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)

    def attention_ref(q, k, v, causal=False, softcap=0.0):
        """causal: aligned to the bottom right, to the last key."""
        return module.attention_ref(q, k, v, causal=causal, softcap=softcap, upcast=False)[0]

    return adapters.adapt(attention_ref, layout="b n h d")


FUNCTIONS: dict[str, Callable] = {
    "reference": reference_function,
    "regard": adapters.regard_function,
    "SDPA": adapters.sdpa,
    "finfo.min": adapters.sdpa_finfo_min,
    "flex": adapters.flex,
    "FA4 reference": flash_attention_4,
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
    "timm Attention": timm_attention,
    "timm QK norm": lambda: timm_attention(qk_norm=True, norm_layer=torch.nn.LayerNorm),
    "timm pooling": timm_pooling,
    "timm ViT": timm_vision,
    "diffusers SDPA": lambda: diffusers_attention("AttnProcessor2_0"),
    "diffusers eager": lambda: diffusers_attention("AttnProcessor"),
    "diffusers cross": lambda: diffusers_attention("AttnProcessor2_0", cross_attention_dim=16),
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


def findings(versions: dict[str, str]) -> list[str]:
    lines = []
    for one in FINDINGS:
        used = ", ".join(f"{name} {versions[name]}" for name in one.libraries)
        lines += [
            f"### {one.title}",
            "",
            one.about,
            "",
            f"- Versions: {used}.",
            f"- Expected: {one.expected}",
        ]
        lines += [f"- Observed: {one.observed}", "", "```python", one.snippet.strip(), "```", ""]
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
        "## Reports",
        "",
        "Each finding as a report that could be sent to the library, without regard: versions, expected, observed,",
        "and a snippet that passes as long as the fault exists. The tests run these blocks.",
        "",
        *findings(versions),
    ]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("columns", nargs="*", help="only these; the others from the stored results")
    parser.add_argument("--cases", type=int, default=12, help="cases per law")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    if unknown := set(arguments.columns) - set(TARGETS):
        parser.error(f"no column {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    stored = json.loads(STORED.read_text("utf-8"))["results"] if STORED.exists() else {}
    selected = [c for c in TARGETS if c in arguments.columns or not arguments.columns or c not in stored]
    with get_context("spawn").Pool(arguments.processes) as pool:
        fresh = dict(
            zip(selected, pool.starmap(measured, [(c, arguments.cases) for c in selected], chunksize=1))
        )
    results = {c: fresh.get(c) or stored[c] for c in TARGETS}
    versions = {name: _version(name) for name in LIBRARIES}
    day, machine = date.today().isoformat(), f"{platform.machine()}, processes of 1 thread"
    facts = {"date": day, "versions": versions, "machine": machine, "cases": arguments.cases}
    STORED.write_text(json.dumps({**facts, "results": results}, indent=1, ensure_ascii=False) + "\n", "utf-8")
    PAGE.write_text(written(results, versions, day, machine, arguments.cases), "utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)} and {STORED.relative_to(ROOT)}", file=sys.stderr)


def _version(name: str) -> str:
    return rg.__version__ if name == "regard" else metadata.version(name)


if __name__ == "__main__":
    main()

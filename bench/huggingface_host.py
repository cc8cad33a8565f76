"""What the attention of one layer takes of the CPU while a Hugging Face decoder generates on a GPU, without a GPU.

    PYTHONPATH=src:tests/helpers python bench/huggingface_host.py [--before OTHER_TREE/src] [--out host.json]

Tensors are on the CPU and their kernels are not run: launches do nothing (tests/helpers/modeled_gpu.py). A token is
one query of a Llama with 16 layers after one more key than the last one had, so that each layer calls attention with
a number of keys that is new. Microseconds, one thread, medians over tokens: `mask`, which is made once for a token,
the first layer, and the median of the others.
"""

import argparse
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import transformers
from origin import origin
from transformers.masking_utils import create_causal_mask

from modeled_gpu import counting_gpu
from regard.interop.huggingface.attention import attend

HELPERS = Path(__file__).parents[1] / "tests/helpers"
HEADS, KEY_HEADS, WIDTH, LAYERS = 32, 8, 64, 16
FIRST, WARM, TOKENS = 700, 30, 100  # keys of the first token, and how many tokens are not timed, and are


def model():
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=HEADS * 8, intermediate_size=64, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KEY_HEADS, max_position_embeddings=8192,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="regard").eval()


def token(config, layers, cache, m):
    """Microseconds of the mask, and of each layer."""
    q = torch.empty(1, HEADS, 1, WIDTH, dtype=torch.bfloat16)
    k, v = (torch.empty(1, KEY_HEADS, m, WIDTH, dtype=torch.bfloat16) for _ in range(2))
    ids, embeds = torch.tensor([[m - 1]]), q.new_empty(1, 1, 8)
    given = {"inputs_embeds": embeds, "attention_mask": None, "past_key_values": cache, "position_ids": ids}
    times = [perf_counter()]
    mask = create_causal_mask(config=config, **given)
    times.append(perf_counter())
    for layer in layers:
        attend(layer, q, k, v, mask, dropout=0.0, scaling=WIDTH**-0.5, position_ids=ids, use_cache=True)
        times.append(perf_counter())
    cache.update(k[:, :, :1], v[:, :, :1], 0)
    return [1e6 * (b - a) for a, b in pairwise(times)]


def measured():
    made = model()
    layers = [layer.self_attn for layer in made.model.layers]
    cache = transformers.DynamicCache(config=made.config)
    cache.update(*(torch.empty(1, KEY_HEADS, FIRST - 1, WIDTH, dtype=torch.bfloat16) for _ in range(2)), 0)
    with torch.inference_mode(), counting_gpu():
        tokens = [token(made.config, layers, cache, FIRST + nth) for nth in range(WARM + TOKENS)][WARM:]
    return {
        "mask": median(x[0] for x in tokens),
        "first layer": median(x[1] for x in tokens),
        "other layers": median(y for x in tokens for y in x[2:]),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--before", help="src of another tree, measured in processes of its own")
    parser.add_argument("--rounds", type=int, default=5, help="with --before: both trees take turns")
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.before:
        print(json.dumps(measured()))
        return
    rounds = {"now": [], "before": []}
    for _ in range(options.rounds):
        for name, path in (
            ("now", os.environ.get("PYTHONPATH", "")),
            ("before", f"{options.before}{os.pathsep}{HELPERS}"),
        ):
            env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
            run = subprocess.run(
                [sys.executable, __file__], env=env, capture_output=True, text=True, check=True
            )
            rounds[name].append(json.loads(run.stdout.splitlines()[-1]))
    medians = {
        name: {key: round(median(x[key] for x in rows), 1) for key in rows[0]}
        for name, rows in rounds.items()
    }
    table = {**origin(), "transformers": transformers.__version__, "us": medians, "rounds": rounds}
    print(json.dumps(medians, indent=1))
    if options.out:
        Path(options.out).write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

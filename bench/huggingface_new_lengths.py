"""A Hugging Face model on a GPU answers prompts of ever new lengths: the first token, and each further one.

    PYTHONPATH=src python3 bench/huggingface_new_lengths.py [--prompts 12] [--tokens 32] [--out new_lengths.json]

A Llama with 1.1 B random weights in bfloat16, batch 1, a dynamic cache. Prompts have lengths drawn from a seed. The
same model runs with "sdpa" (on Hopper PyTorch takes cuDNN's kernel, which builds a plan for each new shape), with
"sdpa" after torch.backends.cuda.enable_cudnn_sdp(False), and with "regard". Prompts take turns; the implementations
in random order. Logits of the first prompt are compared before. Milliseconds: medians over prompts and over tokens.
"""

import argparse
import json
import random
import statistics
import time
import warnings

import torch
import transformers
from huggingface_gpu import build
from origin import origin

warnings.simplefilter("ignore")
import regard.interop.huggingface  # noqa: E402, F401

IMPLEMENTATIONS = {"sdpa": ("sdpa", True), "sdpa without cuDNN": ("sdpa", False), "regard": ("regard", True)}


def chosen(model, name):
    kind, cudnn = IMPLEMENTATIONS[name]
    model.set_attn_implementation(kind)
    torch.backends.cuda.enable_cudnn_sdp(cudnn)


def timed(run):
    torch.cuda.synchronize()
    begun = time.perf_counter()
    result = run()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begun), result


def answer(model, ids, tokens):
    """Milliseconds of the prompt, and of each further token, which is the likeliest."""
    cache = transformers.DynamicCache()
    prompt, out = timed(lambda: model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1))
    each = []
    for _ in range(tokens):
        token = out.logits[:, -1].argmax(-1, keepdim=True)
        took, out = timed(lambda: model(token, past_key_values=cache, use_cache=True))  # noqa: B023 (called at once)
        each.append(took)
    return prompt, each


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1911)
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    drawn = random.Random(options.seed)
    model = build(torch.device("cuda"), 16, False, 8192).eval()
    with torch.inference_mode():
        ids = torch.randint(0, 32000, (1, 321), device="cuda")
        logits = []
        for name in IMPLEMENTATIONS:  # which warms up as well
            chosen(model, name)
            logits.append(model(ids).logits[0, -1].float())
            answer(model, ids[:, :77], 3)
        offs = [float((x - logits[0]).norm() / logits[0].norm()) for x in logits]
        assert max(offs) < 3e-2, offs
        found = {name: ([], []) for name in IMPLEMENTATIONS}
        lengths = [drawn.randrange(100, 4000) for _ in range(options.prompts)]
        for n in lengths:
            ids = torch.randint(0, 32000, (1, n), device="cuda")
            for name in drawn.sample(list(IMPLEMENTATIONS), len(IMPLEMENTATIONS)):
                chosen(model, name)
                prompt, each = answer(model, ids, options.tokens)
                found[name][0].append(prompt)
                found[name][1].append(each)
    rows = {}
    for name, (prompts, tokens) in found.items():
        flat = [x for each in tokens for x in each]
        answers = [a + sum(b) for a, b in zip(prompts, tokens)]
        rows[name] = {
            "first token": statistics.median(prompts),
            "each token": statistics.median(flat),
            "mean of each token": statistics.mean(flat),
            "answer": statistics.median(answers),
            "prompts": prompts,
        }
        print(name, {key: round(x, 2) for key, x in rows[name].items() if key != "prompts"}, flush=True)
    if options.out:
        table = {**origin(), "gpu": torch.cuda.get_device_name(0), "transformers": transformers.__version__}
        table |= {"lengths": lengths, "tokens": options.tokens, "off": offs, "ms": rows}
        with open(options.out, "w", encoding="utf-8") as file:
            json.dump(table, file, indent=1)


if __name__ == "__main__":
    main()

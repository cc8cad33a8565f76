"""Generation of 100,000 tokens with the bounded cache: constant memory, and tokens per second against sdpa.

A tiny Llama with `causal() & (window(64) | sinks(4))`. Memory: the keys that the cache holds and the largest resident
size of the process, on the way. "sdpa" generates with a full cache and the same mask as a table, which grows with the
text, so its speed is measured for the first tokens only.

    OMP_NUM_THREADS=1 python bench/huggingface_endless.py --tokens 100000
"""

import argparse
import platform
import resource
import time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

import regard as rg
from regard.interop import huggingface

PATTERN = rg.causal() & (rg.window(64) | rg.sinks(4))


def build(length: int) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=length + 16,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, attn_implementation="regard").eval()


def steps(model: Any, cache: Any, token: Any, first: int, count: int, masked: bool) -> tuple[Any, float]:
    began = time.process_time()
    for place in range(first, first + count):
        given: dict[str, Any] = {}
        if masked:
            given["attention_mask"] = PATTERN.allowed(1, place + 1, at=place)[None, None]
        out = model(token, past_key_values=cache, position_ids=torch.tensor([[place]]), **given)
        token = out.logits[:, -1:].argmax(-1)
    return token, time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--part", type=int, default=2000, help="tokens of each measurement")
    args = parser.parse_args()
    model = build(args.tokens)
    print(f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}, transformers "
          f"{transformers.__version__}, processor time")  # fmt: skip
    start = torch.tensor([[1]])
    with torch.inference_mode():
        model.set_attn_implementation("sdpa")
        cache, token, done = DynamicCache(), start, 0
        sdpa = []
        for _ in range(2):
            token, seconds = steps(model, cache, token, done, args.part, True)
            done += args.part
            sdpa.append(token)
            print(
                f"sdpa with a window mask, tokens {done - args.part:,} … {done:,}: {args.part / seconds:.0f} a second"
            )
        with rg.use(model, PATTERN):
            bounded, token, done = huggingface.BoundedCache(model), start, 0
            while done < args.tokens:
                token, seconds = steps(model, bounded, token, done, args.part, False)
                done += args.part
                if done <= 2 * args.part:
                    assert torch.equal(token, sdpa[done // args.part - 1])
                if done <= 2 * args.part or done % 20_000 == 0:
                    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
                    held = f"keys held {bounded.held}, largest resident size {size:.0f} MiB"
                    print(
                        f"bounded cache, {done:,} tokens: {args.part / seconds:.0f} a second, {held}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()

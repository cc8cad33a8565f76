"""Generation of 100,000 tokens with the bounded cache: constant memory, and tokens per second against sdpa.

A tiny Llama with `causal() & (window(64) | sinks(4))`. "sdpa" generates with a full cache and the same mask as a
table, which grows with the text, so its speed is measured only for the first tokens; there both sides alternate, and
the tokens are compared. Then the bounded cache continues alone. Memory: the keys that it holds, and the resident size
of the process. At the end one uncached forward over the whole text is compared at sampled positions.

    OMP_NUM_THREADS=1 python bench/huggingface_endless.py --tokens 100000 --out bench/results/huggingface_endless.json
"""

import argparse
import json
import platform
import resource
import time
from pathlib import Path
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


def steps(
    model: Any, cache: Any, token: Any, first: int, count: int, masked: bool
) -> tuple[list[Any], Any, float]:
    """The next tokens, the logits of the last one, and the processor time."""
    began, made, out = time.process_time(), [], None
    for place in range(first, first + count):
        given: dict[str, Any] = {}
        if masked:
            given["attention_mask"] = PATTERN.allowed(1, place + 1, at=place)[None, None]
        out = model(token, past_key_values=cache, position_ids=torch.tensor([[place]]), **given)
        token = out.logits[:, -1:].argmax(-1)
        made.append(token)
    return made, out.logits[0, -1], time.process_time() - began


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def uncached_gap(model: Any, tokens: Any, sampled: dict[int, Any]) -> float:
    """The worst relative difference of the logits at sampled positions from one forward without any cache."""
    hidden = model.model(tokens[:, :-1], use_cache=False).last_hidden_state[0]
    places = sorted(sampled)
    expected = model.lm_head(hidden[torch.tensor(places)])
    found = torch.stack([sampled[place] for place in places])
    return float((found - expected).abs().max() / expected.abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--part", type=int, default=500, help="tokens of each measurement")
    parser.add_argument("--both", type=int, default=4, help="parts that sdpa generates too")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model = build(args.tokens)
    machine = (
        f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, processor time, {time.strftime('%Y-%m-%d')}"
    )
    print(machine)
    start = torch.tensor([[1]])
    tokens, sampled, rows = start.new_empty(1, args.tokens + 1), {}, []  # of constant size, as the cache is
    tokens[:, :1] = start
    full, theirs = DynamicCache(), start
    with torch.inference_mode():
        with rg.use(model, PATTERN):
            bounded = huggingface.BoundedCache(model)
        for done in range(0, args.tokens, args.part):
            row = {"tokens": done + args.part}
            if done < args.both * args.part:
                model.set_attn_implementation("sdpa")
                expected, _, seconds = steps(model, full, theirs, done, args.part, True)
                theirs, row["sdpa"] = expected[-1], round(args.part / seconds)
            with rg.use(model, PATTERN):
                made, logits, seconds = steps(
                    model, bounded, tokens[:, done : done + 1], done, args.part, False
                )
            if done < args.both * args.part:
                assert torch.equal(torch.cat(made), torch.cat(expected)), f"other tokens after {done}"
            tokens[:, done + 1 : done + 1 + args.part] = torch.cat(made, 1)
            sampled[done + args.part - 1] = logits.clone()  # not a view of all of the last step
            row |= {
                "regard": round(args.part / seconds),
                "held": bounded.held,
                "resident_mib": round(resident_mib()),
            }
            rows.append(row)
            if done < args.both * args.part or (done + args.part) % 10_000 == 0:
                print(row, flush=True)
        with rg.use(model, PATTERN):
            gap = uncached_gap(model, tokens, sampled)
    print(f"{len(sampled)} sampled positions: logits differ from the uncached model by {gap:.1e} (relative)")
    assert gap < 1e-4
    if args.out:
        args.out.write_text(json.dumps({"machine": machine, "pattern": repr(PATTERN), "uncached_gap": gap,
                                        "rows": rows}, indent=1))  # fmt: skip


if __name__ == "__main__":
    main()

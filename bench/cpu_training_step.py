"""A training step of a language model with dense causal attention on a CPU: attention as `auto` runs it, and by SDPA.

ratio = time of the step with SDPA / our time; medians of interleaved rounds. The losses of all steps are compared.

PYTHONPATH=src python bench/cpu_training_step.py [--write]
"""

import argparse
import json
import random
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from origin import origin

import regard as rg

# Queries, batch rows, width, heads, blocks.
SHAPES = [
    (256, 12, 384, 6, 6),
    (384, 4, 384, 6, 4),
    (512, 4, 256, 4, 4),
    (512, 4, 512, 8, 4),
    (768, 2, 384, 6, 4),
]
SHAPES += [(1024, 2, 384, 6, 4)]
VOCABULARY = 256


def steps(n: int, batch: int, width: int, heads: int, blocks: int):
    """The same model, data and optimizer for each backend: functions that take a step and return its loss."""
    ids = torch.randint(VOCABULARY, (batch, n + 1), generator=torch.Generator().manual_seed(0))
    attention = rg.Attention(width, heads=heads, pattern=rg.causal(), position=rg.rope(), biases="none")
    block = rg.Block(attention, rg.FeedForward(4 * width, activation="gelu"), norm_at="pre")
    spec = rg.Encoder(block, blocks, embedding=rg.Embedding(VOCABULARY, width), head=rg.LanguageHead())

    def make(backend: str):
        torch.manual_seed(0)
        model = spec.build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def step() -> float:
            optimizer.zero_grad()
            with rg.backend(backend):
                loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
                loss.backward()
            optimizer.step()
            return float(loss.detach())

        return step

    return {name: make(name) for name in ("auto", "sdpa")}


def measured(shape: tuple[int, ...], rounds: int) -> dict:
    found = steps(*shape)
    times: dict[str, list[float]] = {name: [] for name in found}
    losses: dict[str, list[float]] = {name: [] for name in found}
    for count in range(rounds + 2):
        for name in random.sample(list(found), len(found)):
            begun = time.perf_counter()
            losses[name].append(found[name]())
            if count >= 2:  # the first two prepare
                times[name].append(time.perf_counter() - begun)
    off = max(abs(a - b) for a, b in zip(losses["auto"], losses["sdpa"]))
    assert off < 1e-3, f"losses differ by {off}"
    n, _, width, heads, _ = shape
    widths = {"heads": heads, "d_k": width // heads, "d_v": width // heads}
    chosen = rg.explain(rg.causal(), n=n, batch=shape[1], grad=True, **widths)
    ms = {name: 1e3 * statistics.median(t) for name, t in times.items()}
    named = dict(zip(("n", "batch", "width", "heads", "blocks"), shape))
    return named | {
        "backend": chosen.backend,
        "ms": ms,
        "ratio": ms["sdpa"] / ms["auto"],
        "largest difference": off,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--write", action="store_true", help="store the numbers in bench/results/")
    options = parser.parse_args()
    rows = []
    for shape in SHAPES:
        rows.append(measured(shape, options.rounds))
        print(json.dumps(rows[-1]), flush=True)
    if options.write:
        head = {**origin(), "threads": torch.get_num_threads()}
        path = Path(__file__).parent / "results" / f"cpu_training_step-{head['date'][:10]}.json"
        path.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""How long an update of the shipped translator takes on a GPU: eager and as CUDA graphs, float32 and bfloat16.

    PYTHONPATH=src python3 bench/train_gpu_updates.py [--out FILE]       # about a minute on an H200

Real batches of the included corpus, whole updates (batch assembly, both passes, clipping, AdamW, moving average). For
each case: milliseconds per update, the share of them in which the host was busy launching, and tokens per second of
source and target, padding not counted. The host is described by its launch latency: the time per launch of 1,000
empty kernels.
"""

import argparse
import json
import time
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import median

import torch

from regard.training.loop.meter import machine
from regard.training.loop.ranks import ALONE
from regard.training.loop.trainer import Trainer
from regard.training.recipes import recipe

CASES = [
    ("float32, eager", {"autocast": None, "graphs": False}, 0.0, 60),
    ("bfloat16, eager", {"graphs": False}, 0.0, 60),
    ("bfloat16, graphs", {}, 0.0, 300),
    ("bfloat16, graphs, consistency", {}, 2.5, 300),
]


def launch_latency(device: str) -> float:
    """Microseconds per launch of an almost empty kernel."""
    x = torch.zeros(1, device=device)

    def launches() -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(1000):
            x.add_(1)
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - began)

    return median([launches() for _ in range(7)][1:])


def measured(
    name: str, changes: dict, consistency: float, updates: int, data, warm: int, device: str
) -> dict:
    chosen = recipe("translate-h200", consistency=consistency)
    settings = replace(chosen.settings, minutes=None, **changes)
    torch.manual_seed(0)
    task = replace(chosen, settings=settings).task(chosen.model.build().to(device))
    trainer = Trainer(task, data.train, data.valid, settings, Path(), ALONE)
    for _ in range(warm if trainer.graphs is not None else 20):
        trainer._update()
    graphs = 0 if trainer.graphs is None else len(trainer.graphs.graphs)
    torch.cuda.synchronize()
    began, tokens, host = time.perf_counter(), 0, 0.0
    for i in range(updates):
        index = trainer.stream.index
        started = time.perf_counter()
        trainer._update()
        host += time.perf_counter() - started
        plan = trainer.stream.plan
        if index < len(plan):
            tokens += int(trainer.stream.lengths[plan[index]].sum())
        if i % 20 == 19:  # as often as a run with log_every=20 waits for the GPU
            torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    result = {
        "case": name,
        "ms": round(1e3 * seconds / updates, 3),
        "host_share": round(host / seconds, 3),
        "tokens_per_second": round(tokens / seconds),
        "graphs": graphs,
        "refused": None if trainer.graphs is None else trainer.graphs.refused,
        "memory": torch.cuda.max_memory_allocated(),
    }
    print(json.dumps(result), flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--run", type=Path, default=Path("runs/translate-h200"), help="a folder with tokens.json"
    )
    parser.add_argument(
        "--warm", type=int, default=900, help="updates before the timed ones, where graphs are used"
    )
    given = parser.parse_args()
    device = "cuda"
    given.run.mkdir(parents=True, exist_ok=True)
    data = recipe("translate-h200").data.load(given.run)
    found = {
        "date": str(date.today()),
        "machine": machine(torch.device(device)),
        "launch_latency_us": round(launch_latency(device), 2),
        "cases": [measured(*case, data, given.warm, device) for case in CASES],
    }
    text = json.dumps(found, indent=1)
    print(text)
    if given.out:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()

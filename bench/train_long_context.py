"""The recipe `long-context` on one GPU: sparse attention beside dense causal attention, with the same updates.

    PYTHONPATH=src python3 bench/train_long_context.py --out FILE       # about three minutes on an H200
    PYTHONPATH=src python3 bench/train_long_context.py --tiny           # the same on a CPU, to see that it runs

Both sides have the same weights at the start, the same batches and the same number of updates, in bf16; the dense one
attends through torch's scaled_dot_product_attention(is_causal=True), which is FlashAttention there. Tokens per second
are those of the last two thirds of the updates. The losses are those of the held-out tenth of the text, in nats per
character: of all positions, and of the last 512 characters of each window when the model reads only the last c
characters of it, so that the same targets are predicted with less or more context.
"""

import argparse
import json
import tempfile
import time
from dataclasses import replace
from datetime import date
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from train_gpu_updates import launch_latency

import regard as rg
from regard.nn import attention as attention_module
from regard.training.loop.meter import machine
from regard.training.loop.ranks import ALONE
from regard.training.loop.trainer import Trainer
from regard.training.recipes import recipe

TINY = {"context": 1024, "d_model": 32, "layers": 1, "rows": 2}


def dense(q, k, v, *, dropout_p=0.0, **_):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout_p)


def by_context(
    model, rows, device: str, autocast: bool, tail: int, windows: int | None = None
) -> dict[int, float]:
    """The mean loss of the last `tail` targets of each window, by the number of characters that are read."""
    model.eval()
    found, contexts = {}, []
    c = 2 * tail
    while c <= rows.context:
        contexts.append(c)
        c *= 4
    for c in contexts:
        losses = []
        for row in range(len(rows))[: windows or len(rows)]:
            inputs = rows.batch(torch.tensor([row])).inputs
            tokens, targets = (inputs[name][:, -c:].to(device) for name in ("tokens", "targets"))
            with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=autocast):
                logits = model.read(model.states(tokens)[:, -tail:]).float()
            losses.append(F.cross_entropy(logits.flatten(0, 1), targets[:, -tail:].flatten()))
        found[c] = round(float(torch.stack(losses).mean()), 4)
    model.train()
    return found


def graphs(trainer: Trainer) -> dict | None:
    """How many updates are replayed as graphs, and why not if they are not."""
    found = trainer.graphs
    return None if found is None else {"count": len(found.graphs), "refused": found.refused}


def side(name: str, given: argparse.Namespace, data, chosen, device: str) -> dict:
    settings = replace(chosen.settings, minutes=given.minutes, autocast=None if given.tiny else "bfloat16")
    torch.manual_seed(0)
    model = chosen.model.build().to(device)
    task = replace(chosen, settings=settings).task(model)
    trainer = Trainer(task, data.train, data.valid, settings, tempfile.mkdtemp(), ALONE)
    torch.manual_seed(1)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    losses, started = [], time.perf_counter()
    marks = [(0, started)]
    while not trainer._over():
        total, predicted, _ = trainer._update()
        trainer.seconds = time.perf_counter() - started
        losses.append(total / predicted)
        if trainer.step % 10 == 0 or trainer._over():
            if device == "cuda":
                torch.cuda.synchronize()
            marks.append((trainer.step, time.perf_counter()))
    third = len(marks) // 3
    (first, began), (last, ended) = marks[third], marks[-1]
    per_update = (ended - began) / max(last - first, 1)
    valid = trainer._validate()["loss"]
    result = {
        "side": name,
        "ms_per_update": round(1e3 * per_update, 2),
        "tokens_per_second": round(settings.tokens / per_update),
        "updates": trainer.step,
        "seconds": round(trainer.seconds, 1),
        "train_loss": round(float(torch.stack(losses[-20:]).mean()), 4),
        "valid_loss": round(valid, 4),
        "valid_loss_by_context": by_context(
            model, data.valid, device, not given.tiny, 64 if given.tiny else 512, given.windows
        ),
        "graphs": graphs(trainer),
        "memory": torch.cuda.max_memory_allocated() if device == "cuda" else None,
    }  # fmt: skip
    print(json.dumps(result), flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--minutes", type=float, help="train each side for this time instead")
    parser.add_argument("--rows", type=int, default=4, help="windows per update")
    parser.add_argument(
        "--windows", type=int, help="of the held-out text for the losses by context; all by default"
    )
    parser.add_argument("--only-sparse", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    device = "cpu" if given.tiny else "cuda"
    chosen = recipe("long-context", steps=given.steps, **(TINY if given.tiny else {"rows": given.rows}))
    with tempfile.TemporaryDirectory() as folder:
        data = chosen.data.load(Path(folder))
    if given.tiny:
        data = replace(data, valid=replace(data.valid, ids=data.valid.ids[:5000]))
    sides = [side(str(chosen.model.block.attention.pattern), given, data, chosen, device)]
    if not given.only_sparse:
        with mock.patch.object(attention_module.engine, "attention", dense):
            sides.append(side("dense causal, scaled_dot_product_attention", given, data, chosen, device))
    found = {
        "date": str(date.today()),
        "machine": machine(torch.device(device)),
        "launch_latency_us": None if given.tiny else round(launch_latency(device), 2),
        "recipe": "long-context",
        "tokens_per_update": chosen.settings.tokens,
        "parameters": sum(p.numel() for p in chosen.model.build().parameters()),
        "pairs": {str(p): p.count(chosen.data.context) for p in (chosen.model.block.attention.pattern, rg.causal())},
        "sides": sides,
    }  # fmt: skip
    if len(sides) == 2:
        sparse, full = sides
        found["speed_ratio"] = round(sparse["tokens_per_second"] / full["tokens_per_second"], 3)
        found["loss_difference"] = round(sparse["valid_loss"] - full["valid_loss"], 4)
        print(json.dumps({k: found[k] for k in ("speed_ratio", "loss_difference")}), flush=True)
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

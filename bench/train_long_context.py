"""The recipe `long-context` on one GPU: sparse attention beside dense causal attention, with the same updates.

    PYTHONPATH=src python3 bench/train_long_context.py --out FILE       # about four minutes on an H200
    PYTHONPATH=src python3 bench/train_long_context.py --tiny           # the same on a CPU, to see that it runs

The text is the source code of the Python packages installed on the machine that trains: names, idioms and headers
recur over thousands of characters, so that far context can help. The files of one directory follow each other;
directories are in random order, and the last tenth of the text is held out.

Both sides have the same weights at the start, the same batches and the same number of updates, in bf16; the dense one
attends through torch's scaled_dot_product_attention(is_causal=True), which is FlashAttention there. Tokens per second
are those of the last two thirds of the updates. The losses are those of the held-out tenth of the text, in nats per
character: of all positions, by position in the window, and of the last 512 characters of each window when the model
reads only the last c characters of it, so that the same targets are predicted with less or more context. The gain of
more context is given with its standard error over windows.
"""

import argparse
import json
import random
import sysconfig
import tempfile
import time
from dataclasses import replace
from datetime import date
from itertools import pairwise
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from train_gpu_updates import launch_latency

import regard as rg
from regard.nn import attention as attention_module
from regard.pattern import parse_pattern
from regard.training.loop.meter import machine
from regard.training.loop.ranks import ALONE
from regard.training.loop.trainer import Trainer
from regard.training.recipes import recipe

TINY = {"context": 1024, "d_model": 32, "layers": 1, "rows": 2}


def dense(q, k, v, *, dropout_p=0.0, **_):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout_p)


def source_code(limit: int) -> str:
    """Python files of the standard library and of installed packages, by directory, directories in random order."""
    by_directory: dict[Path, list[Path]] = {}
    for home in sorted(
        {sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    ):
        for file in sorted(Path(home).rglob("*.py")):
            by_directory.setdefault(file.parent, []).append(file)
    directories = sorted(by_directory)
    random.Random(0).shuffle(directories)
    parts: list[str] = []
    size = 0
    for directory in directories:
        for file in by_directory[directory]:
            if size < limit:
                parts.append(
                    f"# {file.name}\n{file.read_bytes().decode('ascii', 'replace')}\n".replace("\ufffd", "?")
                )
                size += len(parts[-1])
    return "".join(parts)


def losses(model, rows, device: str, autocast: bool, windows: range, c: int) -> torch.Tensor:
    """−log p of the last c targets of each window, when only the last c characters are read: (windows, c)."""
    found = []
    for row in windows:
        inputs = rows.batch(torch.tensor([row])).inputs
        tokens, targets = (inputs[name][:, -c:].to(device) for name in ("tokens", "targets"))
        with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=autocast):
            logits = model.read(model.states(tokens)).float()
        found.append(F.cross_entropy(logits[0], targets[0], reduction="none").cpu())
    return torch.stack(found)


def by_context(model, rows, device: str, autocast: bool, tail: int, windows: int | None = None) -> dict:
    """Losses by position in the window, and of the last `tail` targets by the number of characters read."""
    model.eval()
    chosen = range(0, len(rows), max(len(rows) // (windows or len(rows)), 1))
    whole = losses(model, rows, device, autocast, chosen, rows.context)
    edges = [0, *(tail * 2**k for k in range(20) if tail * 2**k < rows.context), rows.context]
    positions = {f"{a}-{b}": round(float(whole[:, a:b].mean()), 4) for a, b in pairwise(edges)}
    far, means, gains, c = whole[:, -tail:].mean(1), {}, {}, 2 * tail
    while c < rows.context:
        near = losses(model, rows, device, autocast, chosen, c)[:, -tail:].mean(1)
        means[c], gain = round(float(near.mean()), 4), near - far
        gains[c] = [round(float(x), 5) for x in (gain.mean(), gain.std() / len(gain) ** 0.5)]
        c *= 4
    means[rows.context] = round(float(far.mean()), 4)
    model.train()
    return {"windows": len(chosen), "by_position": positions, "of_the_last_by_context": means, "gain": gains}


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
        "losses": by_context(
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
    parser.add_argument("--vocab", type=int, help="subwords; otherwise characters")
    parser.add_argument("--pattern", type=parse_pattern, help="of the sparse side, instead of the recipe's")
    parser.add_argument(
        "--windows", type=int, help="of the held-out text for the losses by context; all by default"
    )
    parser.add_argument("--only-sparse", action="store_true")
    parser.add_argument("--characters", type=int, default=60_000_000, help="of source code, at most")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    device = "cpu" if given.tiny else "cuda"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "code.txt"
        file.write_text(source_code(200_000 if given.tiny else given.characters))
        sizes = TINY if given.tiny else {"rows": given.rows}
        sizes |= {} if given.pattern is None else {"pattern": given.pattern}
        chosen = recipe("long-context", steps=given.steps, file=str(file), vocab=given.vocab, **sizes)
        data = chosen.data.load(Path(folder))
    print(json.dumps({"characters": len(data.train.ids) + len(data.valid.ids)}), flush=True)
    sides = [side(str(chosen.model.block.attention.pattern), given, data, chosen, device)]
    if not given.only_sparse:
        with mock.patch.object(attention_module.engine, "attention", dense):
            sides.append(side("dense causal, scaled_dot_product_attention", given, data, chosen, device))
    found = {
        "date": str(date.today()),
        "machine": machine(torch.device(device)),
        "launch_latency_us": None if given.tiny else round(launch_latency(device), 2),
        "recipe": "long-context, source code of installed Python packages",
        "characters": {"train": len(data.train.ids), "valid": len(data.valid.ids)},
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

"""The recipe `long-context` on one GPU: sparse attention against dense causal attention, with the same updates.

    PYTHONPATH=src python3 bench/train_long_context.py --out FILE       # about two minutes on an H200
    PYTHONPATH=src python3 bench/train_long_context.py --tiny           # the same on a CPU, to see that it runs

The text is the source code of the Python packages installed on the machine that trains, in the order of paths: files
of one package follow each other and repeat each other's names and passages over thousands of tokens, so that distant
context can help. One of every ten pieces of 400,000 characters is held out.

Both sides have the same weights at the start, the same batches and the same number of updates, in bf16; the dense one
attends through torch's scaled_dot_product_attention(is_causal=True), which is FlashAttention there. The losses are
those of the held-out text, in nats per token: of all positions, by position in the window, and of the last 512 tokens
of each window when the model reads only its last c tokens, so that the same targets are predicted with less or more
context. The gain from more context is given with its standard error over windows. Finally both sides are timed, in
turn.
"""

import argparse
import json
import sysconfig
import tempfile
import time
from contextlib import nullcontext
from dataclasses import replace
from datetime import date
from itertools import pairwise
from pathlib import Path
from statistics import median
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

DENSE = "dense causal, scaled_dot_product_attention"
TINY = {"context": 1024, "d_model": 32, "layers": 1, "rows": 2}


def dense(q, k, v, *, dropout_p=0.0, **_):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout_p)


PIECE = 400_000  # characters


def source_code(limit: int) -> str:
    """Python files of installed packages and of the standard library in the order of paths; the last tenth is made of
    pieces from all over."""
    parts: list[str] = []
    size = 0
    for home in dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")):
        for file in sorted(Path(home).rglob("*.py")):
            if size < limit:
                read = file.read_bytes().decode("ascii", "replace").replace("\ufffd", "?")
                parts.append(f"# {file.name}\n{read}\n")
                size += len(parts[-1])
    whole = "".join(parts)
    step = min(PIECE, max(len(whole) // 20, 1))
    pieces = [whole[i : i + step] for i in range(0, len(whole), step)]
    held_out = pieces[9::10]
    return "".join([piece for i, piece in enumerate(pieces) if i % 10 != 9] + held_out)


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


class Side:
    """One side: its model, trained for some updates."""

    def __init__(self, name: str, given: argparse.Namespace, data, chosen, device: str):
        self.name, self.given, self.data, self.device = name, given, data, device
        self.settings = replace(chosen.settings, autocast=None if given.tiny else "bfloat16")
        torch.manual_seed(0)
        self.model = chosen.model.build().to(device)
        task = replace(chosen, settings=self.settings).task(self.model)
        self.trainer = Trainer(task, data.train, data.valid, self.settings, tempfile.mkdtemp(), ALONE)

    def train(self) -> dict:
        torch.manual_seed(1)
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        found, began = [], time.perf_counter()
        while not self.trainer._over():
            total, predicted, _ = self.trainer._update()
            found.append(total / predicted)
            if self.trainer.step % 100 == 0:
                mean = float(torch.stack(found[-20:]).mean())
                print(
                    self.name,
                    self.trainer.step,
                    f"{mean:.4f}, {time.perf_counter() - began:.0f} s",
                    flush=True,
                )
        tail = 64 if self.given.tiny else 512
        result = {
            "side": self.name,
            "updates": self.trainer.step,
            "train_loss": round(float(torch.stack(found[-20:]).mean()), 4),
            "valid_loss": round(self.trainer._validate()["loss"], 4),
            "losses": by_context(
                self.model, self.data.valid, self.device, not self.given.tiny, tail, self.given.windows
            ),
            "graphs": graphs(self.trainer),
            "memory": torch.cuda.max_memory_allocated() if self.device == "cuda" else None,
        }
        print(json.dumps(result), flush=True)
        return result

    def timed(self, updates: int) -> float:
        """Seconds per update."""
        wait(self.device)
        began = time.perf_counter()
        for _ in range(updates):
            self.trainer._update()
        wait(self.device)
        return (time.perf_counter() - began) / updates


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def with_attention(name: str):
    """A context in which a model attends as this side does."""
    return mock.patch.object(attention_module.engine, "attention", dense) if name == DENSE else nullcontext()


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--rows", type=int, default=2, help="windows per update")
    parser.add_argument("--d-model", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocab", type=int, default=4000, help="subwords; 0: characters")
    parser.add_argument("--pattern", type=parse_pattern, help="of the sparse side, instead of the recipe's")
    parser.add_argument(
        "--windows", type=int, help="of the held-out text for the losses by context; all by default"
    )
    parser.add_argument("--only-sparse", action="store_true")
    parser.add_argument("--characters", type=int, default=60_000_000, help="of source code, at most")
    parser.add_argument("--after", type=Path, help="wait for this file before the timed rounds")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    given = options()
    device = "cpu" if given.tiny else "cuda"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "code.txt"
        text = source_code(200_000 if given.tiny else given.characters)
        file.write_text(text)
        size = {"rows": given.rows, "d_model": given.d_model, "layers": given.layers}
        size = TINY if given.tiny else size
        size |= {} if given.pattern is None else {"pattern": given.pattern}
        chosen = recipe("long-context", steps=given.steps, file=str(file), vocab=given.vocab or None, **size)
        data = chosen.data.load(Path(folder))
    pattern = chosen.model.block.attention.pattern
    found = {
        "date": str(date.today()),
        "machine": machine(torch.device(device)),
        "launch_latency_us": None if given.tiny else round(launch_latency(device), 2),
        "recipe": "long-context, source code of installed Python packages",
        "tokens": {"vocab": given.vocab, "train": len(data.train.ids), "valid": len(data.valid.ids)},
        "characters_per_token": round(0.1 * len(text) / len(data.valid.ids), 3),
        "tokens_per_update": chosen.settings.tokens,
        "model": {k: v for k, v in size.items() if k != "pattern"},
        "parameters": sum(p.numel() for p in chosen.model.build().parameters()),
        "pairs": {str(p): p.count(chosen.data.context) for p in (pattern, rg.causal())},
        "sides": [],
    }  # fmt: skip
    print(json.dumps(found), flush=True)
    sides = {}
    for name in [str(pattern)] if given.only_sparse else [str(pattern), DENSE]:
        with with_attention(name):
            sides[name] = Side(name, given, data, chosen, device)
            found["sides"].append(sides[name].train())
        save(found, given.out)
    print("warm", flush=True)
    while given.after and not given.after.exists():
        time.sleep(0.2)
    for name, side in sides.items():  # the first updates after a validation are not timed
        with with_attention(name):
            side.timed(3)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(1 if given.tiny else 5):
        for name, side in sides.items():
            with with_attention(name):
                seconds[name].append(side.timed(2 if given.tiny else 20))
    for result in found["sides"]:
        middle = median(seconds[result["side"]])
        result["ms_per_update"] = [round(1e3 * s, 2) for s in seconds[result["side"]]]
        result["tokens_per_second"] = round(chosen.settings.tokens / middle)
    if len(sides) == 2:
        sparse, full = found["sides"]
        found["speed_ratio"] = round(sparse["tokens_per_second"] / full["tokens_per_second"], 3)
        found["loss_difference"] = round(sparse["valid_loss"] - full["valid_loss"], 4)
    save(found, given.out)
    print(json.dumps({k: found.get(k) for k in ("speed_ratio", "loss_difference")}), flush=True)


def save(found: dict, file: Path | None) -> None:
    if file:
        file.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

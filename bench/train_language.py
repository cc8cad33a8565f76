"""A character language model on tiny Shakespeare, against nanoGPT's own script: validation loss and time.

    PYTHONPATH=src python bench/train_language.py --nanogpt PATH [--rounds 3] [--write]

PATH is a checkout of github.com/karpathy/nanoGPT; nothing of it is included here. Both have 4 layers, 4 heads, width
128, context 64 and 2000 updates of 12 rows, in float32, eager. nanoGPT runs with the command that its README gives
for a CPU; ours is the recipe `language-model`. Runs alternate. Both models are then evaluated in the same way: over
all of the last tenth of the text, in windows of 64 that do not overlap. About 3 minutes per round on two idle cores.

Two times are reported: `run`, from the first update to the last (including validation and saving, as each of them
does it), and `update`, the median of one update.
"""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.training.data import corpora, text
from regard.training.recipes import language_model
from regard.training.recipes.run import Run

CONTEXT, ROWS = 64, 12
THEIRS = (
    "config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 --log_interval=1 --block_size=64 "
    "--batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --dropout=0.0 --always_save_checkpoint=True"
)


def say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def judged(logits_of, ids: Tensor) -> float:
    """The mean of −log p over windows of 64 that do not overlap, the same tokens for both."""
    windows = (len(ids) - 1) // CONTEXT
    x = ids[: windows * CONTEXT].view(windows, CONTEXT)
    y = ids[1 : windows * CONTEXT + 1].view(windows, CONTEXT)
    with torch.no_grad():
        parts = zip(x.split(64), y.split(64), strict=True)
        total = sum(
            float(F.cross_entropy(logits_of(a).flatten(0, 1), b.flatten(), reduction="sum")) for a, b in parts
        )
    return total / y.numel()


def ours(updates: int, seed: int, folder: Path) -> dict:
    """Train by the recipe, in a process of its own."""
    begun = time.perf_counter()
    line = [sys.executable, __file__, "--child", str(folder), "--updates", str(updates), "--seed", str(seed)]
    subprocess.run(line, check=True, capture_output=True, text=True)
    took = time.perf_counter() - begun
    return {**json.loads((folder / "result.json").read_text()), "process_s": took}


def child(updates: int, seed: int, folder: Path) -> None:
    run = Run(language_model(updates, seed=seed), folder)
    events: list[dict] = []
    model = run.train(events.append)
    held = run.data.valid.ids.long()
    each = [CONTEXT * ROWS / e["tokens_per_second"] for e in events if e["event"] == "train"]
    result = {
        "loss": judged(lambda x: model(x), held),
        "run_s": next(e["seconds"] for e in events if e["event"] == "done"),
        "update_ms": 1e3 * statistics.median(each),
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    (folder / "result.json").write_text(json.dumps(result))


def theirs(nanogpt: Path, updates: int, folder: Path) -> dict:
    """Their script as it is, then their model read from its checkpoint and judged as ours is."""
    asked = [*THEIRS.split(), f"--max_iters={updates}", f"--lr_decay_iters={updates}", f"--out_dir={folder}"]
    asked += [] if updates >= 250 else [f"--eval_interval={updates}"]
    begun = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "train.py", *asked], cwd=nanogpt, check=True, capture_output=True, text=True
    )
    took = time.perf_counter() - begun
    each = [float(ms) for ms in re.findall(r"^iter \d+: loss .*, time ([\d.]+)ms", done.stdout, re.MULTILINE)]
    sys.path.insert(0, str(nanogpt))
    from model import GPT, GPTConfig

    kept = torch.load(folder / "ckpt.pt", weights_only=True)  # one we have just made
    model = GPT(GPTConfig(**kept["model_args"]))
    model.load_state_dict(kept["model"])
    model.eval()
    ids = text.content(corpora.folder("shakespeare") / "tiny.txt.gz")
    number = {c: i for i, c in enumerate(sorted(set(ids)))}
    held = torch.tensor([number[c] for c in ids[int(0.9 * len(ids)) :]])
    return {
        "loss": judged(lambda x: model(x, x)[0], held),  # without targets it gives the last position only
        "own estimate": float(re.findall(r"val loss ([\d.]+)", done.stdout)[-1]),
        "run_s": sum(each) / 1e3,
        "update_ms": statistics.median(each),
        "parameters": sum(p.numel() for p in model.parameters()),
        "process_s": took,
    }


def prepare(nanogpt: Path) -> None:
    """Run nanoGPT's own preparation on the text that is shipped with regard.

    It imports `requests` for a download that is not needed here; an empty module takes its place.
    """
    home = nanogpt / "data" / "shakespeare_char"
    whole = text.content(corpora.folder("shakespeare") / "tiny.txt.gz")
    if not (home / "train.bin").is_file():
        (home / "input.txt").write_text(whole)
        without = "import sys, runpy, types; sys.modules['requests'] = types.ModuleType('requests'); "
        subprocess.run(
            [sys.executable, "-c", without + f"runpy.run_path({str(home / 'prepare.py')!r})"], check=True
        )
    assert (home / "input.txt").read_text() == whole, "nanoGPT is prepared with another text"


def table(found: dict) -> str:
    lines = [f"{'':9}{'loss':>8}{'run':>9}{'update':>11}{'parameters':>12}"]
    for name in ("nanoGPT", "regard"):
        for r in found[name]:
            lines.append(
                f"{name:9}{r['loss']:8.4f}{r['run_s']:8.1f}s{r['update_ms']:9.2f}ms{r['parameters']:12,}"
            )
    s = found["summary"]
    lines.append(
        f"regard's loss is {s['loss better by']:+.4f} better; nanoGPT's time / ours: "
        f"run {s['run ratio']:.2f}, update {s['update ratio']:.2f}"
    )
    return "\n".join(lines)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ask.add_argument(
        "--nanogpt", type=Path, default=Path(os.environ.get("NANOGPT", "../dev/systems/nanoGPT"))
    )
    ask.add_argument("--rounds", type=int, default=1)
    ask.add_argument("--updates", type=int, default=2000)
    ask.add_argument("--threads", type=int, default=2)
    ask.add_argument("--write", action="store_true")
    ask.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    ask.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    given = ask.parse_args()
    if given.child is not None:
        child(given.updates, given.seed, given.child)
        return
    os.environ["OMP_NUM_THREADS"] = str(given.threads)  # for both, as they start
    nanogpt = given.nanogpt.resolve()
    prepare(nanogpt)
    machine = {"torch": torch.__version__, "machine": platform.processor(), "threads": given.threads}
    found: dict = {
        "date": str(date.today()),
        **machine,
        "updates": given.updates,
        "recipe": json.loads(language_model(given.updates).json()),
        "nanoGPT": [],
        "regard": [],
    }
    for i in range(given.rounds):
        with tempfile.TemporaryDirectory() as folder:
            found["nanoGPT"].append(theirs(nanogpt, given.updates, Path(folder) / "nano"))
            say(json.dumps(found["nanoGPT"][-1]))
            found["regard"].append(ours(given.updates, i, Path(folder) / "ours"))
            say(json.dumps(found["regard"][-1]))
    middle = {
        (name, field): statistics.median(r[field] for r in found[name])
        for name in ("nanoGPT", "regard")
        for field in ("loss", "run_s", "update_ms")
    }
    found["summary"] = {
        "loss better by": middle["nanoGPT", "loss"] - middle["regard", "loss"],
        "run ratio": middle["nanoGPT", "run_s"] / middle["regard", "run_s"],
        "update ratio": middle["nanoGPT", "update_ms"] / middle["regard", "update_ms"],
    }
    print(table(found))
    if given.write:
        path = Path(__file__).parent / "results" / f"train_language-{date.today()}.json"
        path.write_text(json.dumps(found, indent=1) + "\n")
        say(f"written to {path}")


if __name__ == "__main__":
    main()

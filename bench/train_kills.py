"""kill -9 during GPU training: every killed run resumes, and ends with exactly the weights of an uninterrupted run.

    PYTHONPATH=src python3 bench/train_kills.py --out FILE            # 30 kills, about 80 seconds on an H200
    PYTHONPATH=src python3 bench/train_kills.py --device cpu --runs 1 --kills 2 --steps 60

Several runs of one small translation recipe, in parallel, in eager deterministic mode with dropout and bf16 autocast.
Each is killed several times, at random moments after a new checkpoint appeared, and restarted; finally it trains to
the end. Its weights are then compared bit by bit with those of an uninterrupted run. Every start is a process forked
from a server that has imported regard but not used the GPU. The uninterrupted run starts first: when its first
checkpoint appears, the kernels are compiled, and the others find them in the cache.
"""

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
from dataclasses import replace
from datetime import date
from pathlib import Path

import torch

import regard as rg
from regard.training.loop.meter import machine
from regard.training.recipes import Recipe, recipe
from regard.training.recipes.run import Run

WORDS = ("the", "a", "red", "old", "big", "cat", "dog", "bird", "house", "river", "sat", "ran", "near", "and")


def prepare(home: Path, steps: int, device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    lines = []
    for _ in range(400):
        length = int(torch.randint(1, 41, (), generator=generator))
        words = [WORDS[int(i)] for i in torch.randint(len(WORDS), (length,), generator=generator)]
        lines.append(" ".join(words) + "\t" + " ".join(w[::-1] for w in words[: 1 + length // 2]))
    (home / "pairs.tsv").write_text("\n".join(lines) + "\n")
    pairs = rg.training.SentencePairs(train=str(home / "pairs.tsv"), valid=str(home / "pairs.tsv"), vocab=300)
    chosen = recipe("translate", minutes=None, data=pairs, d_model=64, layers=2, heads=2, dropout=0.1)
    settings = replace(
        chosen.settings,
        steps=steps,
        save_every=10,
        valid_every=steps,
        graphs=False,
        autocast="bfloat16" if device == "cuda" else None,
    )
    (home / "recipe.json").write_text(replace(chosen, settings=settings).json())


def train(home: Path, folder: str, device: str) -> None:
    os.chdir(home)
    sys.stderr = open(f"{folder}.errors", "a", buffering=1)  # noqa: SIM115  (until the process ends)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    Run(Recipe.from_json(Path("recipe.json").read_text()), folder, device).train()


def start(home: Path, folder: str, device: str) -> multiprocessing.process.BaseProcess:
    process = multiprocessing.get_context("forkserver").Process(target=train, args=(home, folder, device))
    process.start()
    return process


def newest(folder: Path) -> int:
    return max((int(p.name) for p in (folder / "checkpoints").glob("0*") if p.name.isdigit()), default=0)


def killed(home: Path, name: str, kills: int, steps: int, device: str, found: list[dict]) -> None:
    random_moment, began = random.Random(name), time.perf_counter()
    for kill in range(kills):
        process = start(home, name, device)
        wanted = newest(home / name) + 10 * random_moment.randint(1, max(steps // 10 // (kills + 1), 1))
        while process.exitcode is None and newest(home / name) < wanted:
            time.sleep(0.005)
        time.sleep(0.2 * random_moment.random())
        process.kill()
        process.join()
        code = process.exitcode
        left = sorted(p.name for p in (home / name / "checkpoints").iterdir())
        event = {"run": name, "kill": kill, "exit": code, "step": newest(home / name), "left": left[-2:]}
        found.append(event | {"seconds": round(time.perf_counter() - began, 1)})
        print(json.dumps(found[-1]), flush=True)  # so that a run that is cut off leaves its kills
    process = start(home, name, device)
    process.join()
    errors = (home / f"{name}.errors").read_text()[-400:]
    found.append({"run": name, "kill": None, "exit": process.exitcode, "errors": errors})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=6)
    parser.add_argument("--kills", type=int, default=5, help="per run")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    os.environ |= {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "OMP_NUM_THREADS": "1",
    }  # of the server and its children
    multiprocessing.get_context("forkserver").set_forkserver_preload(["regard.training.recipes.run"])
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        prepare(home, given.steps, given.device)
        began, whole = time.perf_counter(), start(home, "whole", given.device)
        while whole.exitcode is None and not newest(home / "whole"):
            time.sleep(0.05)
        print(f"first checkpoint after {time.perf_counter() - began:.0f} s", flush=True)
        events: list[dict] = []
        names = [f"killed-{i}" for i in range(given.runs)]
        threads = [
            threading.Thread(target=killed, args=(home, name, given.kills, given.steps, given.device, events))
            for name in names
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        whole.join()
        assert whole.exitcode == 0, (home / "whole.errors").read_text()[-2000:]
        true = rg.load(home / "whole" / "model").state_dict()
        equal = {}
        for name in names:
            try:
                state = rg.load(home / name / "model").state_dict()
                equal[name] = all(torch.equal(true[key], state[key]) for key in true)
            except (OSError, rg.RegardError) as e:
                equal[name] = f"no model: {e}"
    result = {
        "date": str(date.today()),
        "machine": machine(torch.device(given.device)),
        "updates": given.steps,
        "kills": sum(e["exit"] == -signal.SIGKILL for e in events),
        "ended before the kill": sum(e["kill"] is not None and e["exit"] != -signal.SIGKILL for e in events),
        "bit-equal runs": f"{sum(e is True for e in equal.values())} of {given.runs}",
        "runs": equal,
        "events": events,
    }
    print(json.dumps({k: v for k, v in result.items() if k != "events"}), flush=True)
    if given.out:
        given.out.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(0 if all(e is True for e in equal.values()) else 1)


if __name__ == "__main__":
    main()

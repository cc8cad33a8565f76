"""Training that is killed repeatedly ends with exactly the weights of an uninterrupted run.

    python bench/files_kills.py --kills 100 --out bench/results/files_kills.json

A process trains a small translator with a checkpoint every few updates. It gets SIGKILL after a random time, and a
new process continues in the same folder, until training is finished; then the next folder, until all kills are used
up. Some kills come while a checkpoint is being written. All processes are forked from one that has imported regard.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import signal
import tempfile
import time
from pathlib import Path

import torch
from files_damage import digest, recipe
from origin import origin

from regard.nn.serialization import load
from regard.training.recipes.run import MODEL, Run

STEPS = 60


def train(home: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    Run(recipe(home, STEPS, 0), folder, "cpu").train()


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--kills", type=int, default=100)
    options.add_argument("--minutes", type=float, help="stop after this time")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--out", type=Path)
    given = options.parse_args()
    torch.set_num_threads(1)
    rng, began = random.Random(given.seed), time.monotonic()
    context = multiprocessing.get_context("fork")
    kills = runs = different = failed = 0
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary)
        train(home, home / "whole")
        seconds = 10.0  # of the shortest run that nobody stopped
        expected = digest(load(home / "whole" / MODEL))
        while kills < given.kills and not (given.minutes and time.monotonic() - began > 60 * given.minutes):
            folder = home / f"run{runs}"
            while True:
                process = context.Process(target=train, args=(home, folder))
                start = time.monotonic()
                process.start()
                process.join(rng.uniform(0.02, 0.5) * seconds if runs and kills < given.kills else None)
                if process.exitcode is not None:
                    failed += process.exitcode != 0
                    seconds = time.monotonic() - start if runs == 0 else seconds
                    break
                os.kill(process.pid, signal.SIGKILL)
                process.join()
                kills += 1
            runs += 1
            if process.exitcode != 0 or digest(load(folder / MODEL)) != expected:
                different += 1
                print(f"{folder.name} differs", flush=True)
    result = {
        **origin(), "kills": kills, "runs": runs, "different": different, "failed": failed, "updates": STEPS,
        "seconds": round(time.monotonic() - began, 1), "seed": given.seed,
        "weights": hashlib.sha256(expected.encode()).hexdigest()[:16],
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    if given.out:
        given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

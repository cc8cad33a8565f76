"""The recipe `image` on scikit-learn's digits: 5 folds × 3 seeds, accuracy on what was held out, and seconds.

    PYTHONPATH=src python bench/train_digits.py [--folds 5] [--seeds 3] [--write]

A training takes well under 90 seconds on two cores; --folds 1 --seeds 1 is one of the fifteen.
"""

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import torch

from regard.training.recipes import image
from regard.training.recipes.evaluation import accuracy
from regard.training.recipes.run import Run


def trained(fold: int, seed: int, steps: int | None) -> dict:
    """One training, by the recipe: the share right on the held-out fold, and the seconds of the loop."""
    dials = {} if steps is None else {"steps": steps}
    with tempfile.TemporaryDirectory() as folder:
        run = Run(image(**dials, fold=fold, seed=seed), folder, "cpu")
        events: list[dict] = []
        begun = time.perf_counter()
        model = run.train(events.append)
        whole = time.perf_counter() - begun
        right = accuracy(model, run.data.test)
    seconds = next(e["seconds"] for e in events if e["event"] == "done")
    return {
        "fold": fold,
        "seed": seed,
        "accuracy": 100 * right,
        "train_s": seconds,
        "whole_s": whole,
        "rows": len(run.data.test),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ask.add_argument("--folds", type=int, default=5)
    ask.add_argument("--seeds", type=int, default=3)
    ask.add_argument("--steps", type=int, help="instead of the recipe's")
    ask.add_argument("--threads", type=int, default=2)
    ask.add_argument("--write", action="store_true")
    given = ask.parse_args()
    torch.set_num_threads(given.threads)
    runs = []
    for seed in range(given.seeds):
        for fold in range(given.folds):
            runs.append(trained(fold, seed, given.steps))
            print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
    by_seed = [statistics.mean(r["accuracy"] for r in runs if r["seed"] == s) for s in range(given.seeds)]
    slowest = max(r["whole_s"] for r in runs)
    print("fold   " + "".join(f"seed {s:<6}" for s in range(given.seeds)) + "seconds")
    for fold in range(given.folds):
        here = [r for r in runs if r["fold"] == fold]
        line = "".join(f"{r['accuracy']:<11.2f}" for r in here)
        print(f"{fold:<7}{line}{', '.join('{:.1f}'.format(r['whole_s']) for r in here)}")
    print(
        f"mean of folds, by seed: {', '.join(f'{a:.2f}' for a in by_seed)}; "
        f"median {statistics.median(by_seed):.2f} %; slowest training {slowest:.1f} s"
    )
    if given.write:
        found = {
            "date": str(date.today()),
            "torch": torch.__version__,
            "machine": platform.processor(),
            "threads": given.threads,
            "recipe": json.loads(image().json()),
            "runs": runs,
            "mean over folds, by seed": by_seed,
            "median": statistics.median(by_seed),
        }
        path = Path(__file__).parent / "results" / f"train_digits-{date.today()}.json"
        path.write_text(json.dumps(found, indent=1) + "\n")
        print(f"written to {path}", file=sys.stderr)


if __name__ == "__main__":
    main()

"""Train the translator that regard ships, and write its weights in parts of at most 16 MB.

    PYTHONPATH=src python3 bench/train_shipped.py OUT [--minutes 6] [--set dropout=0.2 …]

Like `regard train translate-h200`, without the checks before and the evaluation after: those run on a CPU.
"""

import argparse
import json
import shutil
import time
from pathlib import Path

from regard.training.recipes import recipe
from regard.training.recipes.run import Run

PART = 15_900_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--run", type=Path, default=Path("runs/translate-h200"))
    parser.add_argument("--minutes", type=float, default=6)
    parser.add_argument("--set", nargs="*", default=[], help="parameters of the recipe")
    given = parser.parse_args()
    began = time.perf_counter()
    changes = {key: json.loads(text) for key, _, text in (pair.partition("=") for pair in given.set)}
    run = Run(recipe("translate-h200", minutes=given.minutes, **changes), given.run)
    print(f"ready after {time.perf_counter() - began:.1f} s", flush=True)

    def show(event: dict) -> None:
        if event["event"] in ("valid", "done") or event["step"] % 2000 == 0:
            print(json.dumps(event), flush=True)

    run.train(show)
    if run.trainer.graphs is not None:
        print(f"{len(run.trainer.graphs.graphs)} graphs, refused: {run.trainer.graphs.refused}", flush=True)
    weights = (given.run / "model" / "model.safetensors").read_bytes()
    for i in range(0, len(weights), PART):
        (given.out / f"model.safetensors.{i // PART}").write_bytes(weights[i : i + PART])
    for name in ("recipe.json", "log.jsonl"):
        shutil.copy(given.run / name, given.out / name)


if __name__ == "__main__":
    main()

"""What several ranks do in tests/training/loop/test_distributed.py: `torchrun … training_ranks.py FOLDER CASE…`.

Each case trains in a folder of its own; what a rank has to say goes to FOLDER/<case>-<rank>.json.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch

from regard.errors import RegardError
from regard.training.data.ragged import Ragged
from regard.training.data.rows import Pairs
from regard.training.loop import sharded_checkpoints as sharded
from regard.training.loop.averaging import last
from regard.training.loop.log import read
from regard.training.loop.ranks import Ranks
from training_case import model, trainer

SAME = {"dropout": 0.0, "accumulate": 2, "log_every": 1, "steps": 12}
LAST = {"average": last(3), "keep": 4, "save_every": 2}


def trained(folder: Path, stop: int | None = None, on_event=lambda event: None, **other):
    """A run without dropout, up to some step; what every rank knows at its end.

    Of the weights all but the keys' biases: no output depends on them, and of their gradient, which is rounding,
    Adam makes steps as long as any.
    """
    one = trainer(folder, **SAME | other)
    if stop is not None:
        one._over = lambda: one.step >= stop
    one.run(on_event)
    filled = model(dropout=0.0)
    one.fill(filled)
    tied = one.task.model.decoder.embedding.table is one.task.model.encoder.embedding.table
    count = [p.detach().flatten() for name, p in filled.named_parameters() if not name.endswith("w_k.bias")]
    weights = torch.cat(count).tolist()
    return {"step": one.step, "seconds": one.seconds, "best": one.best, "weights": weights, "tied": tied}


def refused(act) -> dict[str, str]:
    try:
        act()
    except RegardError as e:
        return {"error": str(e)}
    raise AssertionError("it was not refused")


def interrupted(folder: Path):
    """Rank 1 alone gets the signal, in its fourth update."""
    one, calls = trainer(folder, **SAME), []
    plain = one._batch

    def batch(data, rows, *bucketed):
        calls.append(rows)
        if one.ranks.rank == 1 and len(calls) == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return plain(data, rows, *bucketed)

    one._batch = batch
    one.run()
    return {"step": one.step}


def full_disk(folder: Path):
    """Rank 1 cannot write."""
    one = trainer(folder, **SAME | {"steps": 2})
    one.run()
    if one.ranks.rank == 1:

        def save(*given, **named):
            raise OSError(28, "No space left on device")

        sharded.HuggingFaceStorageWriter.write_data = save
    one.step = 3
    return refused(one.save)


def in_turn(folder: Path):
    """Rank 0 holds the lock already, as another process would."""
    from regard.training.loop import checkpoints

    if Ranks.here().rank == 0:
        with checkpoints.locked(folder):
            return refused(lambda: trainer(folder).run())
    return refused(lambda: trainer(folder).run())


def few_rows(folder: Path):
    """Three rows a batch at most, and batches of one: some ranks have nothing to do."""
    one = trainer(folder, **SAME | {"accumulate": 1, "tokens": 17})
    one.run()
    return {"step": one.step, "best": one.best, "small": min(b - a for a, b in one.stream.plan.cuts)}


def of_one_shape(folder: Path, **other):
    """Compiled, with batches of one shape and no validation: compiling is what takes time."""
    one = trainer(folder, **SAME | {"steps": 3, "tokens": 88, "average": None, "compile": True} | other)
    rows = Ragged.of([[4 + (i + j) % 7 for j in range(5)] for i in range(16)])
    one.train = Pairs(rows, rows)
    one.stream.lengths = one.train.sizes
    one._validate = lambda: {"loss": 0.0}
    one.run()
    return one


CASES = {
    "replicate": lambda f: trained(f),
    "shard": lambda f: trained(f, parallel="shard"),
    "uneven": lambda f: trained(f, parallel="shard", accumulate=3),
    "few": few_rows,
    "replicate-half": lambda f: trained(f, 6),
    "shard-half": lambda f: trained(f, 6, parallel="shard"),
    "replicate-on": lambda f: trained(f),
    "shard-on": lambda f: trained(f, parallel="shard"),
    "shard-after-replicate": lambda f: trained(f, 6) and trained(f, parallel="shard"),
    "last": lambda f: trained(f, parallel="shard", **LAST),
    "compiled-alone": lambda f: {"step": of_one_shape(f, save_every=2).step},
    "compiled": lambda f: {"step": of_one_shape(f).step},
    "compiled-shard": lambda f: {"step": of_one_shape(f, parallel="shard").step},
    "timed": lambda f: trained(f, minutes=0.01, steps=10_000),
    "interrupted": interrupted,
    "full": full_disk,
    "locked": in_turn,
    "damaged": lambda f: refused(lambda: trained(f, parallel="shard")),
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    home, cases = Path(sys.argv[1]), sys.argv[2:]
    for name in cases:
        torch.manual_seed(0)
        result = CASES[name](home / name)
        result["curve"] = [e["loss"] for e in read(home / name, "train")]
        (home / f"{name}-{Ranks.here().rank}.json").write_text(json.dumps(result))

"""What each head does as training goes on: its statistics at chosen updates, in heads.jsonl."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from ...errors import SpecError
from ...lens.recorder import Recorder
from ...lens.view import look
from ..recipes.run import Run

FILE = "heads.jsonl"


class Watcher:
    """A listener that looks at the model on a few held-out rows after every so many updates.

    It looks when an update is logged, at the weights as they are. Dropout is off meanwhile and no random number
    is drawn, so training goes on as it would have.
    """

    def __init__(self, run: Run, every: int, rows: int = 8):
        if every < 1:
            raise SpecError(f"heads are watched every {every} updates; at least 1 is needed")
        if run.ranks.world > 1 and run.recipe.settings.parallel == "shard":
            raise SpecError(
                "heads cannot be watched where each rank holds a part of the model; use replicate"
            )
        self.model, self.every, self.path = run.model, every, run.folder / FILE
        self.given = alike(run.ready.valid, rows, run.device)
        self.next = every

    def __call__(self, event: dict[str, Any]) -> None:
        if event["event"] == "resume":
            self.next = event["step"] + self.every - event["step"] % self.every
        if event["event"] != "train" or event["step"] < self.next:
            return
        self.next = event["step"] + self.every - event["step"] % self.every
        told = {"step": event["step"], "heads": self.heads(event["step"])}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(told) + "\n")

    def heads(self, step: int) -> list[dict[str, Any]]:
        """One row a head, as `look` has them."""
        kept, training = Recorder(), self.model.training
        self.model.eval()
        try:
            kept.view(step, look(self.model, self.given, keep=False))
        finally:
            self.model.train(training)
        return kept.heads[-1][1]


def alike(rows: Any, most: int, device: torch.device) -> Any:
    """What a model takes of a few rows of one length, the commonest beyond a few tokens: so nothing is padding."""
    with torch.random.fork_rng(devices=[]):  # rows may hide tokens at random
        batch = rows.batch(_one_length(rows.sizes, most)).to(device).given
    if "source" in batch:
        return {"source": batch["source"], "target": batch["target"]}
    return (batch["images"] if "images" in batch else batch["tokens"],)


def _one_length(sizes: Int[Tensor, "rows sides"], most: int, least: int = 6) -> Int[Tensor, " b"]:
    told = [tuple(row) for row in sizes.tolist()]
    long = [t for t in told if min(t) >= least] or told
    commonest = Counter(long).most_common(1)[0][0]
    return torch.tensor([i for i, t in enumerate(told) if t == commonest][:most])


def read(folder: Path) -> list[dict[str, Any]]:
    """What was seen, in order; a step that was run again once, the later time."""
    path, found = folder / FILE, {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            told = json.loads(line)
        except json.JSONDecodeError:  # the line a process was killed in
            continue
        found[told["step"]] = told
    return [found[step] for step in sorted(found)]

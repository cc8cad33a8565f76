"""Statistics of each attention head during training, in heads.jsonl."""

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


class HeadStatistics:
    """A listener that computes head statistics on a few validation rows, at regular intervals of updates.

    It runs when an update is logged, on the current weights. Dropout is off meanwhile and no random number is
    consumed, so training is not affected.
    """

    def __init__(self, run: Run, every: int, rows: int = 8):
        if every < 1:
            raise SpecError(f"head statistics every {every} updates: at least 1 is needed")
        if run.ranks.world > 1 and run.recipe.settings.parallel == "shard":
            raise SpecError("head statistics need the whole model on one rank; use parallel='replicate'")
        self.model, self.every, self.path = run.model, every, run.folder / FILE
        self.inputs = equal_length_inputs(run.data.valid, rows, run.device)
        self.next = every

    def __call__(self, event: dict[str, Any]) -> None:
        if event["event"] == "resume":
            self.next = event["step"] + self.every - event["step"] % self.every
        if event["event"] != "train" or event["step"] < self.next:
            return
        self.next = event["step"] + self.every - event["step"] % self.every
        entry = {"step": event["step"], "heads": self.heads(event["step"])}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def heads(self, step: int) -> list[dict[str, Any]]:
        """One row per head, as in the table of `rg.look`."""
        recorder, training = Recorder(), self.model.training
        self.model.eval()
        try:
            recorder.view(step, look(self.model, self.inputs, keep=False))
        finally:
            self.model.train(training)
        return recorder.heads[-1][1]


def equal_length_inputs(rows: Any, count: int, device: torch.device) -> Any:
    """The model inputs of up to `count` rows of one length, the most common one, so that there is no padding."""
    with torch.random.fork_rng(devices=[]):  # rows may mask tokens at random
        batch = rows.batch(_rows_of_one_length(rows.sizes, count)).to(device).inputs
    if "source" in batch:
        return {"source": batch["source"], "target": batch["target"]}
    return (batch["images"] if "images" in batch else batch["tokens"],)


def _rows_of_one_length(
    sizes: Int[Tensor, "rows sides"], count: int, min_tokens: int = 6
) -> Int[Tensor, " b"]:
    lengths = [tuple(row) for row in sizes.tolist()]
    long = [length for length in lengths if min(length) >= min_tokens] or lengths
    most_common = Counter(long).most_common(1)[0][0]
    return torch.tensor([i for i, length in enumerate(lengths) if length == most_common][:count])


def read(folder: Path) -> list[dict[str, Any]]:
    """The stored statistics in order; of a step that was repeated after a restart the later ones."""
    path, entries = folder / FILE, {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            entry = json.loads(line)
            entries[entry["step"]] = entry
        except (ValueError, TypeError, KeyError):  # incomplete: killed while writing it, or damaged
            continue
    return [entries[step] for step in sorted(entries)]

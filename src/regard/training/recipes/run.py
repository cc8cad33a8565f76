"""A run of a recipe: load the data, build the model, train it, save it, evaluate it."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...errors import FormatError, RegardError
from ...nn.serialization import load, save
from ..data.datasets import Dataset
from ..data.tokens import Tokens
from ..loop import checkpoints
from ..loop.log import Log
from ..loop.ranks import Ranks
from ..loop.threads import Threads
from ..loop.trainer import Trainer
from . import evaluation, preflight
from .base import Recipe
from .evaluation import Evaluation, evaluate
from .preflight import Preflight
from .trial_run import rehearsal

RECIPE, MODEL, TOKENS = "recipe.json", "model", "tokens.json"
NO_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
)  # words in the errors of PyTorch's allocators

Listener = Callable[[dict[str, Any]], None]


class Run:
    """The training of a recipe in a folder. Under torchrun each rank creates one; rank 0 writes."""

    def __init__(self, recipe: Recipe, folder: str | Path, device: str | torch.device | None = None):
        self.recipe, self.folder, self.ranks = recipe, Path(folder), Ranks.here()
        self.device = self.ranks.device(device)
        self.interrupted = False
        self.ranks.on_first(self._claim)
        data = self.ranks.on_first(self._load)  # rank 0 trains the tokenizer, the others read it
        self.data: Dataset = self._load() if data is None else data
        torch.manual_seed(recipe.settings.seed)
        self.model = recipe.model.build().to(self.device)
        self.trainer = Trainer(
            recipe.task(self.model), self.data.train, self.data.valid, recipe.settings, self.folder
        )

    def preflight(self) -> Preflight:
        """The cost of the run, and whether its model satisfies the laws of its task; stored in preflight.json."""
        result = preflight.preflight(
            self.recipe, self.data.train, self._unsharded(), self.device, self.ranks.world
        )
        (self.folder / preflight.FILE).write_text(result.json() + "\n", encoding="utf-8")
        return result

    @contextlib.contextmanager
    def threads(self, count: int | None = None) -> Iterator[int]:
        """A context with the number of CPU threads that is quickest for this run, measured on a copy of the model.

        On a GPU and with several ranks the number stays as it is, unless `count` is given.
        """
        rows, model = self.data.train, self._unsharded()
        threads = Threads(lambda: rehearsal(self.recipe, rows, model, self.device), count)
        if count is None and (self.device.type != "cpu" or self.ranks.world > 1):
            yield threads.count
            return
        with self._memory_errors_explained(), threads:
            self.trainer.threads = threads
            yield threads.count

    def train(self, *listeners: Listener) -> nn.Module:
        """Train to the end, from the last checkpoint where there is one; saves and returns the averaged model.

        Listeners are called with each event.
        """

        def on_event(event: dict[str, Any]) -> None:
            self.interrupted = event["event"] == "interrupted"
            for listener in listeners:
                listener(event)

        self.trainer.meter = preflight.meter_of(self.recipe, self.data.train, self.device, self.ranks.world)
        with self._memory_errors_explained():
            self.trainer.run(on_event)
        model = self.recipe.model.build().to(self.device)
        self.trainer.fill(model)
        self.ranks.on_first(lambda: save(model, self.folder / MODEL))
        return load(self.folder / MODEL, self.device).eval()

    def evaluate(self, *listeners: Listener) -> Evaluation:
        """The scores of the saved model on the test rows; stored in evaluation.json and in the log."""
        result = evaluate(load(self.folder / MODEL, self.device), self.recipe, self.data)
        (self.folder / evaluation.FILE).write_text(result.json() + "\n", encoding="utf-8")
        with contextlib.closing(Log(self.folder)) as log:
            event = log.write("evaluated", self.trainer.step, rows=result.rows, **result.scores)
        for listener in listeners:
            listener(event)
        return result

    def _unsharded(self) -> nn.Module:
        """The model; where ranks hold parts of it, a new one of the same declaration."""
        return self.model if self.ranks.world == 1 else self.recipe.model.build()

    def _load(self) -> Dataset:
        return self.recipe.data.load(self.folder)

    def _claim(self) -> None:
        """Write the recipe to the folder; refuse a folder of another recipe, or one where another process trains."""
        with checkpoints.locked(self.folder):
            path = self.folder / RECIPE
            if path.is_file():
                existing = Recipe.from_json(path.read_text(encoding="utf-8"))
                if existing.model != self.recipe.model or existing.data != self.recipe.data:
                    raise FormatError(
                        f"{self.folder} contains a run of another recipe ({existing.name}); use that recipe, or "
                        f"another folder"
                    )
            path.write_text(self.recipe.json() + "\n", encoding="utf-8")

    @contextlib.contextmanager
    def _memory_errors_explained(self) -> Iterator[None]:
        """Turn a failed allocation into an error that names a batch size that fits."""
        try:
            yield
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as e:
            message = str(e).splitlines()[0] if str(e) else type(e).__name__
            known = isinstance(e, torch.OutOfMemoryError | MemoryError)
            if not known and not any(words in str(e) for words in NO_MEMORY):
                raise
            tokens = self.recipe.settings.tokens
            fitting = preflight.max_tokens(self.recipe, self.data.train, self.device)
            raise RegardError(
                f"a batch of {tokens:,} tokens does not fit the memory of {self.device} ({message}); by its "
                f"estimated cost {preflight.what_fits(fitting)}"
            ) from e


def open_run(folder: str | Path, device: str | torch.device = "cpu") -> tuple[nn.Module, Tokens, Recipe]:
    """The trained model of a run, its tokenizer and its recipe."""
    folder = Path(folder)
    for name in (RECIPE, TOKENS, MODEL):
        if not (folder / name).exists():
            raise FormatError(
                f"{folder} contains no {name}; train there first: regard train translate --out {folder}"
            )
    recipe = Recipe.from_json((folder / RECIPE).read_text(encoding="utf-8"))
    tokens = Tokens.from_json((folder / TOKENS).read_text(encoding="utf-8"))
    return load(folder / MODEL, device).eval(), tokens, recipe

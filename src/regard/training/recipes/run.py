"""A recipe from beginning to end: data, model, loop, the model saved for use, and what it can do."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...errors import FormatError, RegardError
from ...nn.serialization import load, save
from ..data.sources import Ready
from ..data.tokens import Tokens
from ..loop import checkpoints
from ..loop.log import Log
from ..loop.ranks import Ranks
from ..loop.trainer import Trainer
from . import evaluation
from . import preflight as before
from .base import Recipe
from .evaluation import Evaluation, evaluate
from .preflight import Before

RECIPE, MODEL, TOKENS = "recipe.json", "model", "tokens.json"
NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")  # as PyTorch's allocators say it

Listener = Callable[[dict[str, Any]], None]


class Run:
    """A folder in which a recipe is trained, or was. Under torchrun each rank makes one; rank 0 writes."""

    def __init__(self, recipe: Recipe, folder: str | Path, device: str | torch.device | None = None):
        self.recipe, self.folder, self.ranks = recipe, Path(folder), Ranks.here()
        self.device = self.ranks.device(device)
        self.interrupted = False
        self.ranks.first(self._claim)
        ready = self.ranks.first(self._ready)  # rank 0 makes the tokens, the others read them
        self.ready: Ready = self._ready() if ready is None else ready
        torch.manual_seed(recipe.settings.seed)
        self.model = recipe.model.build().to(self.device)
        self.trainer = Trainer(
            recipe.task(self.model), self.ready.train, self.ready.valid, recipe.settings, self.folder
        )

    def before(self) -> Before:
        """What it will cost, and whether its model keeps the laws that matter; kept in before.json."""
        told = before.before(self.recipe, self.ready.train, self._whole(), self.device, self.ranks.world)
        (self.folder / before.FILE).write_text(told.json() + "\n", encoding="utf-8")
        return told

    def train(self, *listeners: Listener) -> nn.Module:
        """Train to the end (from where it was), save the averaged model, and give it. Listeners hear each event."""

        def hear(event: dict[str, Any]) -> None:
            self.interrupted = event["event"] == "interrupted"
            for listener in listeners:
                listener(event)

        self.trainer.meter = before.gauge(self.recipe, self.ready.train, self.device, self.ranks.world)
        with self._memory_named():
            self.trainer.run(hear)
        made = self.recipe.model.build().to(self.device)
        self.trainer.fill(made)
        self.ranks.first(lambda: save(made, self.folder / MODEL))
        return load(self.folder / MODEL, self.device).eval()

    def evaluate(self, *listeners: Listener) -> Evaluation:
        """What the saved model does on the test rows; kept in evaluation.json and told in the log."""
        told = evaluate(load(self.folder / MODEL, self.device), self.recipe, self.ready)
        (self.folder / evaluation.FILE).write_text(told.json() + "\n", encoding="utf-8")
        with contextlib.closing(Log(self.folder)) as log:
            event = log.write("evaluated", self.trainer.step, rows=told.rows, **told.numbers)
        for listener in listeners:
            listener(event)
        return told

    def _whole(self) -> nn.Module:
        """The built model; where ranks hold parts of it, one of the same declaration."""
        return self.model if self.ranks.world == 1 else self.recipe.model.build()

    def _ready(self) -> Ready:
        return self.recipe.data.ready(self.folder)

    def _claim(self) -> None:
        """The folder is this recipe's, or becomes it; not while another process trains there."""
        with checkpoints.locked(self.folder):
            path = self.folder / RECIPE
            if path.is_file():
                there = Recipe.from_json(path.read_text(encoding="utf-8"))
                if there.model != self.recipe.model or there.data != self.recipe.data:
                    raise FormatError(
                        f"{self.folder} holds a run of another recipe ({there.name}); go on with that one, or give "
                        f"a new folder"
                    )
            path.write_text(self.recipe.json() + "\n", encoding="utf-8")

    @contextlib.contextmanager
    def _memory_named(self) -> Iterator[None]:
        """A failed allocation becomes a sentence that says what would fit."""
        try:
            yield
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as e:
            said = str(e).splitlines()[0] if str(e) else type(e).__name__
            named = isinstance(e, torch.OutOfMemoryError | MemoryError)
            if not named and not any(words in str(e) for words in NO_MEMORY):
                raise
            tokens = self.recipe.settings.tokens
            fitting = before.most_tokens(self.recipe, self.ready.train, self.device)
            raise RegardError(
                f"a batch of {tokens:,} tokens does not fit the memory of {self.device} ({said}); by its cost "
                f"{before.what_fits(fitting)}"
            ) from e


def opened(folder: str | Path, device: str | torch.device = "cpu") -> tuple[nn.Module, Tokens, Recipe]:
    """A trained model, its tokens and its recipe."""
    folder = Path(folder)
    for name in (RECIPE, TOKENS, MODEL):
        if not (folder / name).exists():
            raise FormatError(
                f"{folder} holds no {name}; train there first: regard train translate --out {folder}"
            )
    recipe = Recipe.from_json((folder / RECIPE).read_text(encoding="utf-8"))
    made = Tokens.from_json((folder / TOKENS).read_text(encoding="utf-8"))
    return load(folder / MODEL, device).eval(), made, recipe

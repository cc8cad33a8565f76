"""A recipe from beginning to end: data, model, loop, and the model saved for use."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import FormatError, RegardError
from ..nn.saved import load, save
from . import before, evaluation
from .before import Before
from .evaluation import Evaluation, evaluate
from .log import Log
from .loop import Trainer
from .recipes import Recipe
from .sources import Ready
from .tokens import Tokens

RECIPE, MODEL, TOKENS = "recipe.json", "model", "tokens.json"


class Run:
    """A folder in which a recipe is trained, or was."""

    def __init__(self, recipe: Recipe, folder: str | Path, device: str | torch.device | None = None):
        self.recipe, self.folder = recipe, Path(folder)
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.interrupted = False
        self._claim()
        self.ready: Ready = recipe.data.ready(self.folder)
        torch.manual_seed(recipe.settings.seed)
        self.model = recipe.model.build().to(self.device)
        self.trainer = Trainer(
            recipe.task(self.model), self.ready.train, self.ready.valid, recipe.settings, self.folder
        )

    def before(self) -> Before:
        """What it will cost, and whether the built model keeps the laws that matter; kept in before.json."""
        told = before.before(self.recipe, self.ready.train, self.model)
        (self.folder / before.FILE).write_text(told.json() + "\n", encoding="utf-8")
        return told

    def train(self, on_event: Callable[[dict[str, Any]], None] = lambda event: None) -> nn.Module:
        """Train to the end (from where it was), save the averaged model, and give it."""

        def hear(event: dict[str, Any]) -> None:
            self.interrupted = event["event"] == "interrupted"
            on_event(event)

        try:
            self.trainer.run(hear)
        except torch.OutOfMemoryError as e:
            raise RegardError(self._too_large(e)) from e
        with self.trainer.averaged():
            save(self.model, self.folder / MODEL)
        return load(self.folder / MODEL, self.device).eval()

    def evaluate(self, on_event: Callable[[dict[str, Any]], None] = lambda event: None) -> Evaluation:
        """What the saved model does on the test rows; kept in evaluation.json and told in the log."""
        told = evaluate(load(self.folder / MODEL, self.device), self.recipe, self.ready)
        (self.folder / evaluation.FILE).write_text(told.json() + "\n", encoding="utf-8")
        log = Log(self.folder)
        try:
            on_event(log.write("evaluated", self.trainer.step, rows=told.rows, **told.numbers))
        finally:
            log.close()
        return told

    def _claim(self) -> None:
        """The folder is this recipe's, or becomes it."""
        path = self.folder / RECIPE
        if path.is_file():
            there = Recipe.from_json(path.read_text(encoding="utf-8"))
            if there.model != self.recipe.model or there.data != self.recipe.data:
                raise FormatError(
                    f"{self.folder} holds a run of another recipe ({there.name}); go on with that one, or give a "
                    f"new folder"
                )
        self.folder.mkdir(parents=True, exist_ok=True)
        path.write_text(self.recipe.json() + "\n", encoding="utf-8")

    def _too_large(self, e: Exception) -> str:
        tokens = self.recipe.settings.tokens
        return (
            f"a batch of {tokens} tokens does not fit the memory of {self.device}: {str(e).splitlines()[0]}; use "
            f"fewer tokens a batch and accumulate={2 * self.recipe.settings.accumulate}, or checkpoint=True in the "
            f"model"
        )


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

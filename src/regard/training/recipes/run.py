"""A run of a recipe: load the data, build the model, train it, save it, evaluate it."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ... import files, spec
from ...errors import FormatError, RegardError, SpecError
from ...nn.serialization import load, save
from ..data.datasets import Dataset, MaskedText
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
        self.interrupted = self.new = False
        preflight.require_memory(recipe, self.device)  # before anything is written or built
        self.ranks.on_first(self._claim)
        data = self.ranks.on_first(self._load)  # rank 0 trains the tokenizer, the others read it
        self.data: Dataset = self._load() if data is None else data
        self._require_fitting_rows()
        self._require_fitting_model()
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
        files.write_checked(self.folder, preflight.FILE, result.json() + "\n")
        return result

    @contextlib.contextmanager
    def threads(self, count: int | None = None) -> Iterator[int]:
        """A context with the number of CPU threads that is fastest for this run, measured on a copy of the model.

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
        files.write_checked(self.folder, evaluation.FILE, result.json() + "\n")
        with contextlib.closing(Log(self.folder)) as log:
            event = log.write("evaluated", self.trainer.step, rows=result.rows, **result.scores)
        for listener in listeners:
            listener(event)
        return result

    def _unsharded(self) -> nn.Module:
        """The model; where ranks hold parts of it, a new one of the same declaration."""
        return self.model if self.ranks.world == 1 else self.recipe.model.build()

    def _load(self) -> Dataset:
        try:
            return self.recipe.data.load(self.folder)
        except BaseException:
            if self.new and not (self.folder / TOKENS).exists():  # the next run may have other data
                files.remove_checked(self.folder, RECIPE)
            raise

    def _require_fitting_rows(self) -> None:
        """Refuse validation and test rows that fit no batch, before hours of training rather than after them."""
        tokens = self.recipe.settings.tokens
        for part in ("valid", "test"):
            longest = int(getattr(self.data, part).sizes.sum(1).max())
            if longest > tokens:
                raise SpecError(
                    f"the longest row of {part} has {longest} tokens and a batch {tokens=}; raise tokens, or "
                    f"shorten it"
                )

    def _require_fitting_model(self) -> None:
        """Refuse a model that has fewer tokens or other classes than the data."""
        model, data = self.recipe.model, self.recipe.data
        if isinstance(model, spec.EncoderDecoder):
            embeddings = [model.encoder.embedding, model.decoder.embedding]
        else:
            embeddings = [getattr(model, "embedding", None)]
        # A masked language model also has the mask token, which is no token of a text.
        tokens = data.vocab if isinstance(data, MaskedText) else len(self.data.tokens or ())
        for embedding in embeddings:
            if embedding is not None and embedding.vocab < tokens:
                raise SpecError(
                    f"the data have {tokens} tokens and the model vocab={embedding.vocab}; declare "
                    f"Embedding({tokens}, …)"
                )
        head = getattr(model, "head", None)
        if isinstance(head, spec.ClassifierHead):
            classes = 1 + max(int(part.labels.max()) for part in (self.data.train, self.data.valid))
            if head.classes < classes:
                raise SpecError(
                    f"the data have {classes} classes and the model {head.classes}; declare "
                    f"ClassifierHead({classes})"
                )

    def _claim(self) -> None:
        """Write the recipe to the folder; refuse a folder of another recipe, or one where another process trains."""
        with checkpoints.locked(self.folder):
            self.new = not (self.folder / RECIPE).is_file()
            if not self.new:
                existing = read_recipe(self.folder)
                for part in ("model", "data"):
                    if getattr(existing, part) != getattr(self.recipe, part):
                        name, before, now = _difference(
                            getattr(existing, part), getattr(self.recipe, part), part
                        )
                        raise FormatError(
                            f"{self.folder} contains a run of another recipe ({existing.name}): its {name} is "
                            f"{before}, not {now}; use that recipe, or another folder"
                        )
            files.write_checked(self.folder, RECIPE, self.recipe.json() + "\n")

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
    tokens = Tokens.from_json(files.read_checked(folder, TOKENS))
    return load(folder / MODEL, device).eval(), tokens, read_recipe(folder)


def read_recipe(folder: Path) -> Recipe:
    """The recipe of a run."""
    try:
        recipe = Recipe.from_json(files.read_checked(folder, RECIPE))
    except FormatError as e:
        raise FormatError(f"{folder / RECIPE} cannot be read: {e}") from e
    if not isinstance(recipe, Recipe):
        raise FormatError(f"{folder / RECIPE} contains a {type(recipe).__name__}, not a recipe")
    return recipe


def _difference(before: Any, now: Any, name: str) -> tuple[str, Any, Any]:
    """The first field in which two declared values differ: its name, and both values."""
    if type(before) is type(now) and dataclasses.is_dataclass(before):
        for field in dataclasses.fields(before):
            a, b = getattr(before, field.name), getattr(now, field.name)
            if a != b:
                return _difference(a, b, f"{name}.{field.name}")
    return name, before, now

"""Recipes: a model, its data and how it is trained, as one value. Each is a function with few dials."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from ... import spec, value
from ...schedule import KINDS as SCHEDULES
from ...spec import (
    Spec,
)
from ..data.image_augmentation import moves
from ..data.sources import Classes, Digits, Lines, Running, Sentences, Source
from ..loop.averaging import ema, last
from ..loop.optimizer import AdamW
from ..loop.trainer import Settings
from .tasks import Classification, Guessing, Language, Translation


@dataclass(frozen=True)
class Recipe:
    """What `train` takes. JSON both ways; variants by `dataclasses.replace`."""

    name: str
    model: Spec
    data: Source
    settings: Settings
    smoothing: int | float = 0.0

    def task(self, model: Any) -> nn.Module:
        """The module that gives this recipe's loss."""
        match self.data:
            case Sentences():
                return Translation(model, self.smoothing)
            case Running():
                return Language(model, self.smoothing)
            case Lines():
                return Guessing(model, self.smoothing)
        return Classification(model, self.smoothing)

    def json(self, indent: int | None = 1) -> str:
        return value.to_json(self, indent)

    @staticmethod
    def from_json(text: str) -> "Recipe":
        return value.from_json(text, KINDS)


KINDS = spec.KINDS.new_child(
    value.table(
        Recipe, Settings, AdamW, ema, last, Sentences, Running, Lines, Digits, Classes, moves, *SCHEDULES
    )
)

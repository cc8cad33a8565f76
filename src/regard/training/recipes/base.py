"""A recipe: a model, its data and its training settings, as one value."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from ... import spec, value
from ...errors import SpecError
from ...schedule import KINDS as SCHEDULES
from ...spec import (
    Spec,
)
from ..data.datasets import ContinuousText, Digits, LabeledText, MaskedText, SentencePairs, Source
from ..data.image_augmentation import random_affine
from ..loop.averaging import ema, last
from ..loop.optimizer import AdamW
from ..loop.trainer import Settings
from .tasks import Classification, LanguageModeling, MaskedLanguageModeling, Translation


@dataclass(frozen=True)
class Recipe:
    """What `rg.train` trains. Converts to JSON and back; make variants with `dataclasses.replace`."""

    name: str
    model: Spec
    data: Source
    settings: Settings
    smoothing: int | float = 0.0
    consistency: int | float = (
        0.0  # of a translator: weight of the divergence between two passes with dropout
    )

    def __post_init__(self):
        if not 0 <= self.smoothing < 1:
            raise SpecError(f"smoothing={self.smoothing} is not in [0, 1)")
        if not self.consistency >= 0:
            raise SpecError(f"consistency={self.consistency}: it needs to be at least 0")
        if self.consistency and not isinstance(self.data, SentencePairs):
            raise SpecError(
                f"consistency={self.consistency} is for translators; {type(self.data).__name__} has no such loss"
            )

    def task(self, model: Any) -> nn.Module:
        """The module that computes this recipe's loss."""
        match self.data:
            case SentencePairs():
                return Translation(model, self.smoothing, self.consistency)
            case ContinuousText():
                return LanguageModeling(model, self.smoothing)
            case MaskedText():
                return MaskedLanguageModeling(model, self.smoothing)
        return Classification(model, self.smoothing)

    def json(self, indent: int | None = 1) -> str:
        return value.to_json(self, indent)

    @staticmethod
    def from_json(text: str) -> "Recipe":
        return value.from_json(text, KINDS)


KINDS = spec.KINDS.new_child(
    value.table(
        Recipe,
        Settings,
        AdamW,
        ema,
        last,
        SentencePairs,
        ContinuousText,
        MaskedText,
        Digits,
        LabeledText,
        random_affine,
        *SCHEDULES,
    )
)

"""A recipe: a model, its data and its training settings, as one value."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from ... import spec, value
from ...errors import SpecError
from ...schedule import KINDS as SCHEDULES
from ...spec import (
    Block,
    ClassifierHead,
    Decoder,
    Embedding,
    Encoder,
    EncoderDecoder,
    LanguageHead,
    MaskedHead,
    Spec,
    Vision,
)
from ..data.datasets import ContinuousText, Digits, LabeledText, MaskedText, SentencePairs, Source
from ..data.image_augmentation import random_affine
from ..loop.averaging import ema, last
from ..loop.optimizer import AdamW
from ..loop.settings import Settings
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
        if not _fits(self.data, self.model):
            kind, declared = type(self.data), type(self.model).__name__
            raise SpecError(f"{kind.__name__} is for {NEEDED[kind]}, which this {declared} is not")

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


NEEDED = {  # the models that the task of each kind of data can train
    SentencePairs: "an EncoderDecoder with embeddings and a LanguageHead",
    ContinuousText: "an Encoder with an Embedding and a LanguageHead",
    MaskedText: "an Encoder with an Embedding and a MaskedHead",
    LabeledText: "an Encoder with an Embedding and a ClassifierHead",
    Digits: "a Vision model with a ClassifierHead",
}


def _fits(data: Source, model: Spec) -> bool:
    """Whether the model is one of NEEDED."""
    match data, model:
        case SentencePairs(), EncoderDecoder(encoder=encoder, decoder=Decoder(head=LanguageHead())):
            return encoder.embedding is not None
        case ContinuousText(), Encoder(embedding=Embedding(), head=LanguageHead()):
            return True
        case ContinuousText(), Decoder(block=Block(cross=None), embedding=Embedding(), head=LanguageHead()):
            return True
        case MaskedText(), Encoder(embedding=Embedding(), head=MaskedHead() | LanguageHead()):
            return True
        case LabeledText(), Encoder(embedding=Embedding(), head=ClassifierHead()):
            return True
        case Digits(), Vision(head=ClassifierHead()):
            return True
    return False


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

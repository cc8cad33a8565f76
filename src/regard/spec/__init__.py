"""Declarations of everything that can be built: frozen values, checked when they are created."""

from collections import ChainMap

from .. import pattern, position, value
from .attention import Attention, EmptyRowWarning, Sizes
from .base import Spec
from .baselines import Convolutional, Mixing, Recurrent
from .catalogue import preset, presets
from .model import (
    Block,
    ClassifierHead,
    Decoder,
    Embedding,
    Encoder,
    EncoderDecoder,
    FeedForward,
    LanguageHead,
    MaskedHead,
    Pooler,
    Vision,
)

SPECS = (
    Attention,
    FeedForward,
    Block,
    Embedding,
    LanguageHead,
    ClassifierHead,
    MaskedHead,
    Pooler,
    Encoder,
    Decoder,
    EncoderDecoder,
    Vision,
    Recurrent,
    Convolutional,
    Mixing,
)
KINDS = ChainMap(value.table(*position.KINDS, *SPECS), pattern.KINDS)  # patterns may be added later


def from_json(text: str) -> Spec:
    """The spec, pattern or position that `json()` wrote."""
    return value.from_json(text, KINDS)


__all__ = [*(s.__name__ for s in SPECS), "EmptyRowWarning", "Sizes", "Spec", "from_json", "preset", "presets"]

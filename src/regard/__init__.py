"""regard: attention you can declare, run, price, prove, train and see."""

from .convolution import lift, lower
from .costs import Cost, TrainingStep, cost, fits
from .engine.attention import allowed_from, attention
from .engine.explain import explain
from .engine.merge import merge
from .errors import BackendError, FormatError, RegardError, ShapeError, SpecError
from .generation import Generated, beam, generate, greedy, sample
from .laws import check
from .lens.recorder import Recorder
from .lens.view import View, look
from .nn.cache import Cache, KeyValues
from .nn.serialization import load, save
from .pattern import Pattern, documents, lengths, where
from .pattern.words import *  # noqa: F403  # causal, window, every, …: its own __all__ lists them
from .pattern.words import __all__ as _words
from .position import (
    ByDistance,
    Position,
    alibi,
    learned,
    quadratic,
    relative_table,
    rope,
    shaw,
    sinusoidal,
    t5_buckets,
)
from .spec import (
    Attention,
    Block,
    ClassifierHead,
    Convolutional,
    Decoder,
    Embedding,
    EmptyRowWarning,
    Encoder,
    EncoderDecoder,
    FeedForward,
    LanguageHead,
    MaskedHead,
    Mixing,
    Pooler,
    Recurrent,
    Spec,
    Vision,
    from_json,
    preset,
    presets,
)
from .training import TrainingResult, train

__version__ = "0.1.0"

__all__ = [
    "Attention",
    "BackendError",
    "Block",
    "ByDistance",
    "Cache",
    "ClassifierHead",
    "Convolutional",
    "Cost",
    "Decoder",
    "Embedding",
    "EmptyRowWarning",
    "Encoder",
    "EncoderDecoder",
    "FeedForward",
    "FormatError",
    "Generated",
    "KeyValues",
    "LanguageHead",
    "MaskedHead",
    "Mixing",
    "Pattern",
    "Pooler",
    "Position",
    "Recorder",
    "Recurrent",
    "RegardError",
    "ShapeError",
    "Spec",
    "SpecError",
    "TrainingResult",
    "TrainingStep",
    "View",
    "Vision",
    "alibi",
    "allowed_from",
    "attention",
    "beam",
    "check",
    "cost",
    "documents",
    "explain",
    "fits",
    "from_json",
    "generate",
    "greedy",
    "learned",
    "lengths",
    "lift",
    "load",
    "look",
    "lower",
    "merge",
    "preset",
    "presets",
    "quadratic",
    "relative_table",
    "rope",
    "sample",
    "save",
    "shaw",
    "sinusoidal",
    "t5_buckets",
    "train",
    "where",
    *_words,
]

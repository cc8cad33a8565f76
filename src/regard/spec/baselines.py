"""The declarations of baselines: recurrent and convolutional models, fixed mixing."""

from dataclasses import KW_ONLY, dataclass

from .base import Number, Spec, require, require_known, require_positive_fields, require_probability

CELLS = ("rnn", "gru", "lstm")
ATTENTIONS = ("none", "additive", "multiplicative")


@dataclass(frozen=True, repr=False)
class Recurrent(Spec):
    """A recurrent encoder-decoder: its decoder gets one vector, or with attention all source states."""

    vocab: int
    d_model: int
    _: KW_ONLY
    cell: str = "gru"
    layers: int = 1
    attention: str = "additive"
    target_vocab: int | None = None  # None: as vocab
    bidirectional: bool = False  # of the encoder
    dropout: Number = 0.0

    def __post_init__(self):
        require_positive_fields(self, "vocab", "d_model", "layers", "target_vocab")
        require_probability(self, "dropout")
        require_known("cell", self.cell, CELLS)
        require_known("attention", self.attention, ATTENTIONS)
        require(
            not self.bidirectional or self.d_model % 2 == 0,
            f"d_model={self.d_model} is odd; a bidirectional encoder needs an even width",
        )


@dataclass(frozen=True, repr=False)
class Convolutional(Spec):
    """A residual stack of convolutions over a sequence; each position mixes `kernel` neighbors."""

    d_model: int
    _: KW_ONLY
    layers: int = 4
    kernel: int = 3
    dilation: int = 1  # of layer l: dilation^l
    causal: bool = False
    separable: bool = False  # depthwise, then pointwise: k·n·d + n·d² instead of k·n·d²
    vocab: int | None = None  # None: inputs and outputs are vectors
    dropout: Number = 0.0

    def __post_init__(self):
        require_positive_fields(self, "d_model", "layers", "kernel", "dilation", "vocab")
        require_probability(self, "dropout")
        require(
            self.causal or self.kernel % 2 == 1,
            f"kernel={self.kernel} is even and has no center; use an odd kernel, or causal=True",
        )


@dataclass(frozen=True, repr=False)
class Mixing(Spec):
    """A fixed mixing of positions, o = A v: `average` of all, or `select` of position `index[i]` for output i."""

    how: str
    _: KW_ONLY
    index: tuple[int, ...] | None = None

    def __post_init__(self):
        require_known("how", self.how, ("identity", "average", "select"))
        require(
            (self.how == "select") == (self.index is not None),
            f"how={self.how!r} with index={self.index!r}: index is required for how='select' and for nothing else",
        )

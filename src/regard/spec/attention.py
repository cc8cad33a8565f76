"""The declaration of one multi-head attention."""

import warnings
from dataclasses import KW_ONLY, dataclass
from math import inf
from typing import NamedTuple

from ..errors import RegardError, SpecError
from ..pattern import Pattern, full
from ..position import Position
from .base import (
    Number,
    Spec,
    require,
    require_known,
    require_no_data,
    require_positive_fields,
    require_probability,
)

SCORES = ("dot", "bilinear", "additive", "position")
BIASES = ("none", "output", "all")


class EmptyRowWarning(UserWarning):
    """A declared pattern leaves queries that may look nowhere; they get zeros."""


class Sizes(NamedTuple):
    """The sizes of an attention with every default resolved."""

    heads: int
    kv_heads: int
    d_model: int
    d_context: int
    d_k: int
    d_v: int
    d_out: int


@dataclass(frozen=True, repr=False)
class Attention(Spec):
    """Multi-head attention: concat_h softmax(scale · Q_h K_hᵀ) V_h, times W_O.

    All five sizes are free: heads (N_h), d_model (D_i), d_k (D_hid), d_v (D_o), d_out (D_out).
    """

    d_model: int
    _: KW_ONLY
    heads: int = 8
    kv_heads: int | None = None  # None: as many as heads; 1 is multi-query attention
    d_k: int | None = None  # None: d_model / heads
    d_v: int | None = None  # None: d_model / heads
    d_out: int | None = None  # None: d_model
    d_context: int | None = None  # width of what is looked at; None: d_model
    pattern: Pattern = full()
    position: Position | None = None  # a position that acts inside attention
    score: str = "dot"  # dot, bilinear, additive, or position: the position alone decides
    scale: Number | None = None  # None: 1/√d_k; inf is hard attention
    temperature: Number | None = None  # 1/scale, by its other name
    ties: str = "share"
    biases: str = "all"  # none, output or all
    output: bool = True  # W_O
    dropout: Number = 0.0  # of the attention weights

    def __post_init__(self):
        require_positive_fields(self, "d_model", "heads", "kv_heads", "d_k", "d_v", "d_out", "d_context")
        require_probability(self, "dropout")
        require_known("score", self.score, SCORES)
        require_known("biases", self.biases, BIASES)
        require_known("ties", self.ties, ("share", "first"))
        if self.d_model % self.heads and (self.d_k is None or self.d_v is None):
            near = [h for h in range(1, self.d_model + 1) if self.d_model % h == 0]
            near = sorted(sorted(near, key=lambda h: abs(h - self.heads))[:4])
            raise SpecError(
                f"heads={self.heads} does not divide d_model={self.d_model}; use {_either(near)} heads, "
                f"or give d_k and d_v"
            )
        if self.kv_heads is not None and self.heads % self.kv_heads:
            fit = [h for h in range(1, self.heads + 1) if self.heads % h == 0]
            raise SpecError(
                f"kv_heads={self.kv_heads} does not divide heads={self.heads}; use {_either(fit)}"
            )
        self._check_score()
        require_no_data("pattern", self.pattern)
        self._warn_of_empty_rows()

    def _check_score(self):
        require(
            self.scale is None or self.temperature is None, "scale and temperature are two names; give one"
        )
        if self.temperature is not None:
            require(
                self.temperature >= 0, f"temperature={self.temperature}: it cannot be below 0 (0 is hard)"
            )
        if self.scale is not None:
            require(self.scale >= 0, f"scale={self.scale}: it cannot be below 0 (inf is hard attention)")
        if not self.output:
            require(self.d_out is None, f"d_out={self.d_out} without an output projection; leave it out")
        if self.position is not None:
            require(
                self.position.acts != "input",
                f"position={self.position!r} is added to the input; give it to the embedding of a model",
            )
        if self.score == "position":
            require(
                self.position is not None and self.position.acts == "score",
                "score='position' needs a position that scores, such as rg.quadratic() or rg.alibi()",
            )
        if self.score == "bilinear":
            require(
                self.d_k is None,
                f"d_k={self.d_k}: a bilinear score q·W·k compares with the input itself, d_context wide; "
                f"leave it out",
            )
        require(
            self.score in ("dot", "position") or self.position is None,
            f"score={self.score!r} does not take position={self.position!r}; use the dot score",
        )

    def _warn_of_empty_rows(self):
        try:
            empty = (self.pattern.row_counts(64) == 0).nonzero()[0].tolist()
        except RegardError:
            return
        if empty:
            some = ", ".join(map(str, empty[:3])) + (", …" if len(empty) > 3 else "")
            warnings.warn(
                f"{self.pattern!r}: of 64 queries, {some} may look nowhere and get zeros",
                EmptyRowWarning,
                stacklevel=4,
            )

    @property
    def sizes(self) -> Sizes:
        head = self.d_model // self.heads
        context = self.d_context or self.d_model
        d_v = self.d_v or head
        d_k = context if self.score == "bilinear" else self.d_k or head
        kv_heads = self.kv_heads or self.heads
        d_out = (self.d_out or self.d_model) if self.output else self.heads * d_v
        return Sizes(self.heads, kv_heads, self.d_model, context, d_k, d_v, d_out)

    @property
    def factor(self) -> Number | None:
        """The scale, by whichever name it was given; None for the usual 1/√d_k."""
        if self.temperature is None:
            return self.scale
        return 1.0 / self.temperature if self.temperature else inf


def _either(numbers: list[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} or {last}" if most else last

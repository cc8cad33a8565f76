"""The declaration of one multi-head attention."""

import warnings
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import RegardError, SpecError, not_a_pattern
from ..pattern import Pattern, full, per_head
from ..pattern.heads import numbered
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

if TYPE_CHECKING:
    Patterns = Pattern  # what is read; a type checker wants per_head([…]) where a list is given
else:
    Patterns = Pattern | Sequence[Pattern]

SCORES = ("dot", "bilinear", "additive", "position")
BIASES = ("none", "output", "all")


class EmptyRowWarning(UserWarning):
    """A declared pattern has queries with no allowed key; their output is zero."""


class Sizes(NamedTuple):
    """The sizes of an attention with every default resolved."""

    heads: int
    kv_heads: int
    d_model: int
    d_context: int
    d_k: int
    d_v: int
    d_out: int
    d_values: int


@dataclass(frozen=True, repr=False)
class Attention(Spec):
    """Multi-head attention: concat_h softmax(scale · Q_h K_hᵀ) V_h, times W_O.

    All five sizes can be chosen independently: heads, d_model, d_k, d_v, d_out.
    """

    d_model: int
    _: KW_ONLY
    heads: int = 8
    kv_heads: int | None = None  # None: heads; 1 is multi-query attention
    d_k: int | None = None  # None: d_model / heads
    d_v: int | None = None  # None: d_model / heads
    d_out: int | None = None  # None: d_model
    d_context: int | None = None  # width of the keys' and values' input; None: d_model
    d_values: int | None = None  # width of the values' input, if it is another tensor than the keys'
    pattern: Patterns = full()  # a list has one for each head, and becomes per_head([…])
    position: Position | None = None  # a position encoding that acts inside attention
    score: str = "dot"  # dot, bilinear, additive, or position (scores from the position encoding only)
    scale: Number | None = None  # None: 1/√d_k; inf is hard attention
    temperature: Number | None = None  # 1/scale; give one of the two
    softcap: Number | None = None  # c: scores become c · tanh(scores / c)
    sink_logits: bool = False  # one more learned logit per head in the softmax, without a value
    extra_key: bool = False  # one more learned key and value per head, which every query sees
    ties: str = "share"
    biases: str = "all"  # none, output or all
    output: bool = True  # W_O
    dropout: Number = 0.0  # of the attention weights

    def __post_init__(self):
        require_positive_fields(
            self, "d_model", "heads", "kv_heads", "d_k", "d_v", "d_out", "d_context", "d_values"
        )
        require_probability(self, "dropout")
        require_known("score", self.score, SCORES)
        require_known("biases", self.biases, BIASES)
        require_known("ties", self.ties, ("share", "first"))
        self._check_pattern()
        require(
            self.position is None or isinstance(self.position, Position),
            f"position={self.position!r} is not a position; use rg.rope(), rg.alibi(), …",
        )
        if self.d_model % self.heads and (self.d_k is None or self.d_v is None):
            divisors = [h for h in range(1, self.d_model + 1) if self.d_model % h == 0]
            nearest_divisors = sorted(sorted(divisors, key=lambda h: abs(h - self.heads))[:4])
            raise SpecError(
                f"heads={self.heads} does not divide d_model={self.d_model}; use {_either(nearest_divisors)} heads, "
                f"or set d_k and d_v"
            )
        if self.kv_heads is not None and self.heads % self.kv_heads:
            divisors = [h for h in range(1, self.heads + 1) if self.heads % h == 0]
            raise SpecError(
                f"kv_heads={self.kv_heads} does not divide heads={self.heads}; use {_either(divisors)}"
            )
        self._check_score()
        require_no_data("pattern", self.pattern)
        self._warn_of_empty_rows()

    def _check_pattern(self):
        """A pattern, or one for each head: a list becomes per_head, and equal patterns become that one pattern."""
        given: Any = self.pattern
        if isinstance(given, list | tuple):
            given = per_head(given)
        if not isinstance(given, Pattern):
            raise not_a_pattern(given, where="pattern=")
        if isinstance(given, per_head):
            require(
                len(given.patterns) == self.heads,
                f"pattern has {len(given.patterns)} patterns for heads={self.heads}; give one for each query head",
            )
            given = given.patterns[0] if len(set(given.patterns)) == 1 else given
        object.__setattr__(self, "pattern", given)

    def _check_score(self):
        require(
            self.scale is None or self.temperature is None,
            "scale and temperature (1/scale) exclude each other; set one of them",
        )
        for name in ("scale", "temperature", "softcap"):
            number = getattr(self, name)
            require(
                number is None or (isinstance(number, int | float) and not isinstance(number, bool)),
                f"{name}={number!r} is not a number; leave it out for the default",
            )
        require(
            isinstance(self.sink_logits, bool),
            f"sink_logits={self.sink_logits!r}: a declaration says True or False; the logits are a parameter of the "
            f"module, and rg.attention takes them as a tensor",
        )
        if self.temperature is not None:
            require(
                self.temperature >= 0,
                f"temperature={self.temperature} is negative; use 0 for hard attention, or a positive number",
            )
        if self.scale is not None:
            require(
                self.scale >= 0,
                f"scale={self.scale} is negative; use a positive number, or inf for hard attention",
            )
        if self.softcap is not None:
            require(
                self.softcap > 0,
                f"softcap={self.softcap} is not above 0; leave it out for scores without a cap",
            )
            require(
                self.score in ("dot", "bilinear"),
                f"softcap={self.softcap} caps q·k, which score={self.score!r} does not have; use score='dot'",
            )
        require(
            not self.sink_logits or self.factor != inf,
            "sink_logits=True joins a softmax, which hard attention does not have; use a finite scale",
        )
        require(
            not self.extra_key or (self.factor != inf and self.score == "dot" and self.position is None),
            "extra_key=True needs score='dot', a finite scale and no position: the key has no place in the sequence",
        )
        require(
            not (self.extra_key and self.softcap is not None),
            "extra_key=True with a softcap is not supported; leave one of them out",
        )
        if not self.output:
            require(self.d_out is None, f"d_out={self.d_out} has no effect with output=False; leave it out")
        if self.position is not None:
            require(
                self.position.acts != "input",
                f"position={self.position!r} is added to the input; pass it to the Embedding of a model",
            )
        if self.score == "position":
            require(
                self.position is not None and self.position.acts == "score",
                "score='position' needs a position that acts on scores, such as rg.quadratic() or rg.alibi()",
            )
        if self.score == "bilinear":
            require(
                self.d_k is None,
                f"d_k={self.d_k}: in a bilinear score q·W·k the keys are the inputs, of width d_context; "
                f"leave d_k out",
            )
        require(
            self.score in ("dot", "position") or self.position is None,
            f"score={self.score!r} cannot be combined with position={self.position!r}; use score='dot'",
        )

    def _warn_of_empty_rows(self):
        each = self.pattern.heads_of if isinstance(self.pattern, per_head) else {self.pattern: []}
        for pattern, heads in each.items():
            try:
                empty = (pattern.row_counts(64) == 0).nonzero()[0].tolist()
            except RegardError:
                continue
            if empty:
                first = ", ".join(map(str, empty[:3])) + (", …" if len(empty) > 3 else "")
                none = f"queries {first} have" if len(empty) > 1 else f"query {first} has"
                where = f" of {numbered(heads)}" if heads else ""
                warnings.warn(
                    f"{pattern!r}{where}: with 64 positions, {none} no allowed key; the output there is zero",
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
        return Sizes(
            self.heads, kv_heads, self.d_model, context, d_k, d_v, d_out, self.d_values or context
        )  # fmt: skip

    @property
    def factor(self) -> Number | None:
        """The scale, or 1/temperature; None for the default 1/√d_k."""
        if self.temperature is None:
            return self.scale
        return 1.0 / self.temperature if self.temperature else inf


def _either(numbers: list[int]) -> str:
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last

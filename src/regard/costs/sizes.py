"""The request for a cost, and the two readings of a size: its number, or a symbol of its name."""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from ..errors import SpecError
from ..pattern import Pattern, causal, full, window
from ..spec import Attention, Sizes
from .tree import Amount, Pairs


class Size(NamedTuple):
    """Lengths of queries and keys (of an encoder-decoder: of target and source), and the batch size."""

    n: int
    m: int
    batch: int = 1


@dataclass(frozen=True)
class Request:
    """The cost of this declaration (or model), at these lengths, in this dtype, on this device, by this backend."""

    spec: Any
    n: int
    m: int
    batch: int = 1
    dtype: torch.dtype = torch.float32
    train: Any = False
    backend: str = "auto"
    device: str = "cpu"

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def size(self) -> Size:
        return Size(self.n, self.m, self.batch)

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of the matrix products: that of autocast where the training step uses it."""
        low = getattr(self.train, "autocast", None)
        return self.dtype if low is None else getattr(torch, low)


class Length(NamedTuple):
    """A number of positions: its value, and the amount (number or symbol) that formulas contain."""

    value: int
    amount: Amount


class Numbers:
    """Reads every size as its number."""

    def size(self, name: str, value: int) -> Amount:
        return value

    def attention(self, spec: Attention) -> Sizes:
        return spec.sizes

    def pairs(self, name: str, value: int, pattern: Pattern, n: Length, m: Length) -> Amount:
        return value


class Symbols:
    """Reads every size as a symbol; `values` maps each symbol to its number, so that a formula can be evaluated.

    A name that is used for two different numbers becomes two symbols, for example d_ff and d_ff_2.
    """

    def __init__(self):
        try:
            import sympy
        except ModuleNotFoundError as missing:
            raise SpecError(
                "formulas need sympy, which is not installed: pip install 'regard[cost]'"
            ) from missing
        self.sympy = sympy
        self.values: dict[Any, int] = {}

    def size(self, name: str, value: int) -> Amount:
        for k in range(1, 100):
            symbol = self.sympy.Symbol(name if k == 1 else f"{name}_{k}", integer=True, positive=True)
            if self.values.setdefault(symbol, value) == value:
                return symbol
        raise AssertionError(f"a hundred sizes called {name}")

    def attention(self, spec: Attention) -> Sizes:
        """A size that was left to its default is written by what it follows from: d_k = d_model / h."""
        s = spec.sizes
        d_model, heads = self.size("d_model", s.d_model), self.size("h", s.heads)
        context = d_model if spec.d_context is None else self.size("d_context", s.d_context)
        d_k = d_model / heads if spec.d_k is None else self.size("d_k", s.d_k)
        d_v = d_model / heads if spec.d_v is None else self.size("d_v", s.d_v)
        return Sizes(
            heads,
            heads if spec.kv_heads is None else self.size("h_kv", s.kv_heads),
            d_model,
            context,
            context if spec.score == "bilinear" else d_k,
            d_v,
            (d_model if spec.d_out is None else self.size("d_out", s.d_out)) if spec.output else heads * d_v,
            context if spec.d_values is None else self.size("d_values", s.d_values),
        )

    def pairs(self, name: str, value: int, pattern: Pattern, n: Length, m: Length) -> Amount:
        """A closed form, where one is known and evaluates to exactly this number; else a symbol."""
        closed = _closed_form(pattern, n.amount, m.amount)
        if closed is not None:
            closed = self.sympy.sympify(closed)
            if closed.subs(self.values) == value:
                return closed
        return n.amount * m.amount if value == n.value * m.value else self.size(name, value)


def _closed_form(pattern: Pattern, n: Amount, m: Amount) -> Amount | None:
    """The number of allowed pairs, for n = m no shorter than the window."""
    match pattern:
        case full():
            return n * m
        case causal():
            return n * (n + 1) / 2
        case window(before, after):
            b, a = before, before if after is None else after
            return (n * (2 * (b + a + 1)) - b * (b + 1) - a * (a + 1)) / 2
    return None


@dataclass(frozen=True)
class Scope:
    """The surroundings of a part: how its sizes are read, and its numbers of queries and keys."""

    request: Request
    reader: Numbers | Symbols
    queries: Length
    keys: Length
    path: str = ""
    attentions: list[Pairs] = field(
        default_factory=list
    )  # pairs of each attention; all inner scopes share it
    ignore_patterns: bool = False

    @property
    def b(self) -> Amount:
        return self.reader.size("b", self.request.batch)

    @property
    def n(self) -> Amount:
        return self.queries.amount

    @property
    def m(self) -> Amount:
        return self.keys.amount

    @property
    def itemsize(self) -> int:
        return self.request.compute_dtype.itemsize

    def size(self, name: str, value: int) -> Amount:
        return self.reader.size(name, value)

    def inside(self, name: str) -> "Scope":
        return replace(self, path=f"{self.path}/{name}" if self.path else name)


def root_scope(request: Request, reader: Numbers | Symbols, ignore_patterns: bool = False) -> Scope:
    """The outermost scope: n queries over m keys."""
    n = Length(request.n, reader.size("n", request.n))
    m = n if request.m == request.n else Length(request.m, reader.size("m", request.m))
    return Scope(request, reader, n, m, ignore_patterns=ignore_patterns)

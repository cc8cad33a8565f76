"""The request for a cost, and the two readings of a size: its number, or a symbol of its name."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..formulas import Symbols, pair_count
from ..pattern import Pattern
from ..spec import Attention, Sizes
from .tree import Amount


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
    dense: bool = False  # whether patterns are ignored

    size = property(lambda self: Size(self.n, self.m, self.batch))

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of the matrix products: that of autocast where the training step uses it."""
        low = getattr(self.train, "autocast", None)
        return self.dtype if low is None else getattr(torch, low)


@dataclass(frozen=True)
class Scope:
    """The surroundings of a part: how its sizes are read, and its numbers of queries and keys."""

    request: Request
    symbols: Symbols | None  # None: every size is its number
    queries: int
    keys: int

    b = property(lambda self: self.size("b", self.request.batch))
    n = property(lambda self: self.length(self.queries))
    m = property(lambda self: self.length(self.keys))
    itemsize = property(lambda self: self.request.compute_dtype.itemsize)

    def length(self, value: int) -> Amount:
        return self.size("n" if value == self.request.n else "m", value)

    def size(self, name: str, value: int) -> Amount:
        return value if self.symbols is None else self.symbols.size(name, value)

    def sizes(self, spec: Attention) -> Sizes:
        """A size that was left to its default is written by what it follows from: d_k = d_model / h."""
        s = spec.sizes
        if self.symbols is None:
            return s
        d_model, heads = self.size("d_model", s.d_model), self.size("h", s.heads)

        def given(name: str, otherwise: Amount) -> Amount:
            symbol = "h_kv" if name == "kv_heads" else name
            return otherwise if getattr(spec, name) is None else self.size(symbol, getattr(s, name))

        context = given("d_context", d_model)
        d_k, d_v = given("d_k", d_model / heads), given("d_v", d_model / heads)
        kv_heads, d_out = given("kv_heads", heads), given("d_out", d_model) if spec.output else heads * d_v
        d_k = context if spec.score == "bilinear" else d_k
        return Sizes(heads, kv_heads, d_model, context, d_k, d_v, d_out, given("d_values", context))

    def pairs(self, name: str, value: int, pattern: Pattern) -> Amount:
        """A number of pairs; as a formula a closed form, where one is known and evaluates to exactly this number."""
        if self.symbols is None:
            return value
        n, closed = self.n, pair_count(pattern, self.n, self.m)
        if closed is not None and closed.subs(self.symbols.values) == value:
            return closed
        return n * self.m if value == self.queries * self.keys else self.size(name, value)

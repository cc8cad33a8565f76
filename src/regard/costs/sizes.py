"""What a price is asked for, and the two ways to read a size: as its number, or as a symbol of that name."""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from ..engine import choose
from ..errors import SpecError
from ..pattern import Pattern, causal, full, window
from ..position import Position
from ..spec import Attention, Sizes, Spec
from .tree import Amount, Pairs

# Ways that keep no table of scores in memory; their backward pass makes the scores again.
FUSED = ("dense", "progressions", "tiled", "masked")


@dataclass(frozen=True)
class Given:
    """The question: this declaration, at these lengths, in this dtype, run this way."""

    spec: Spec
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
    def computes_in(self) -> torch.dtype:
        """The dtype of the products: autocast's, where training has one."""
        low = getattr(self.train, "autocast", None)
        return self.dtype if low is None else getattr(torch, low)


class Length(NamedTuple):
    """A number of positions: what it is, and how it is written."""

    value: int
    amount: Amount


class Numbers:
    """Every size is its number."""

    def size(self, name: str, value: int) -> Amount:
        return value

    def attention(self, spec: Attention) -> Sizes:
        return spec.sizes

    def pairs(self, name: str, value: int, pattern: Pattern, n: Length, m: Length) -> Amount:
        return value


class Symbols:
    """Every size is a symbol; `values` says what each stands for, so that a formula can be made a number again.

    A name that stands for two numbers becomes two symbols: d_ff and d_ff_2.
    """

    def __init__(self):
        try:
            import sympy
        except ModuleNotFoundError as missing:
            raise SpecError(
                "a formula needs sympy, which is not here: pip install 'regard[cost]'"
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
        """What was left to its default is written by what it follows from: d_k = d_model / h."""
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
        )

    def pairs(self, name: str, value: int, pattern: Pattern, n: Length, m: Length) -> Amount:
        """A closed form where one is known and gives this very number; else a symbol."""
        closed = _closed(pattern, n.amount, m.amount)
        if closed is not None:
            closed = self.sympy.sympify(closed)
            if closed.subs(self.values) == value:
                return closed
        return n.amount * m.amount if value == n.value * m.value else self.size(name, value)


def _closed(pattern: Pattern, n: Amount, m: Amount) -> Amount | None:
    """The count for long enough sequences of n = m."""
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
    """Where a part stands: how its sizes are read, how many queries it has and how many keys it may look at."""

    given: Given
    read: Numbers | Symbols
    queries: Length
    keys: Length
    path: str = ""
    seen: list[Pairs] = field(default_factory=list)  # the masks met on the way, shared by all inner scopes
    ignore_patterns: bool = False

    @property
    def b(self) -> Amount:
        return self.read.size("b", self.given.batch)

    @property
    def n(self) -> Amount:
        return self.queries.amount

    @property
    def m(self) -> Amount:
        return self.keys.amount

    @property
    def itemsize(self) -> int:
        return self.given.computes_in.itemsize

    def size(self, name: str, value: int) -> Amount:
        return self.read.size(name, value)

    def inside(self, name: str, **changes: Any) -> "Scope":
        return replace(self, path=f"{self.path}/{name}" if self.path else name, **changes)


def scope(given: Given, read: Numbers | Symbols, ignore_patterns: bool = False) -> Scope:
    """The outermost scope: n queries over m keys."""
    n = Length(given.n, read.size("n", given.n))
    m = n if given.m == given.n else Length(given.m, read.size("m", given.m))
    return Scope(given, read, n, m, ignore_patterns=ignore_patterns)


class Core(NamedTuple):
    """The pairs of one attention, and the way that computes them."""

    needed: Amount
    computed: Amount
    rows: Amount  # queries that may look somewhere
    backend: str

    @property
    def fused(self) -> bool:
        return self.backend in FUSED


def core(spec: Attention, at: Scope, shared: Position | None, cross: bool) -> Core:
    """Pairs the pattern needs and the backend computes, for one head; the mask is noted in `at.seen`."""
    n, m = at.queries, at.keys
    pattern = full() if at.ignore_patterns else spec.pattern
    f = facts_of(spec, at.given, n.value, m.value, shared, cross, pattern)
    choice = choose.choose(f, at.given.backend)
    needed = pattern.count(n.value, m.value, f.stands)
    computed, rows = _computed(f, choice.backend), _looking(pattern, f)
    at.seen.append(
        Pairs(at.path, repr(pattern), needed, computed, n.value * m.value, choice.backend, choice.reason)
    )
    same = computed == needed
    amount = at.read.pairs("pairs", needed, pattern, n, m)
    return Core(
        amount,
        amount if same else at.read.pairs("pairs_computed", computed, full(), n, m),
        n.amount if rows == n.value else at.size("rows", rows),
        choice.backend,
    )


def _looking(pattern: Pattern, f: choose.Facts) -> int:
    """How many queries may look somewhere."""
    if isinstance(pattern, full | causal):
        return f.n
    return int((pattern.row_counts(f.n, f.m, f.stands) > 0).sum())


def facts_of(
    spec: Attention,
    given: Given,
    n: int,
    m: int,
    shared: Position | None = None,
    cross: bool = False,
    pattern: Pattern | None = None,
) -> choose.Facts:
    """What the engine would be asked: sizes, kind of bias, gradients. `shared`: a position that the stack holds."""
    sizes, acting, bias = spec.sizes, shared or spec.position, "none"
    if spec.score == "additive":
        bias = "tensor"
    elif acting is not None and acting.acts == "score":
        bias = "distance" if _by_distance(acting) else "tensor"
    return choose.Facts(
        spec.pattern if pattern is None else pattern,
        n,
        m,
        1 if spec.score == "position" else sizes.d_k,
        sizes.d_v,
        given.batch * sizes.heads,
        given.computes_in,
        given.device,
        at=0 if cross and n > m else None,
        bias=bias,
        bias_grad=bool(given.train) and bias != "none",
        hard=spec.factor == float("inf"),
        dropout=bool(given.train) and spec.dropout > 0,
        grad=bool(given.train),
    )


def _by_distance(position: Position) -> bool:
    """Whether the bias follows from the distance on a line alone."""
    return type(position).__name__ != "shaw" and getattr(position, "grid", None) is None


def _computed(f: choose.Facts, backend: str) -> int:
    """Pairs for one head: square causal attention skips the future, progressions walk, all else computes n · m."""
    if backend in ("progressions", "tiled"):
        return choose.computed(f)
    if backend == "dense" and f.n == f.m and f.pattern.reads_query:
        return f.pattern.count(f.n)
    return f.n * f.m

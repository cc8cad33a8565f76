"""Which pairs: a pattern is a set of pairs (query position i, key position j).

Words (`causal()`, `window(2)`, …) combine with `&`, `|`, `~` and `-`. Nothing is n × m until `allowed(n, m)`.

    >>> print((causal() & (window(1) | every(4))).draw(6))
    ■ · · · · ·
    ■ ■ · · · ·
    ■ ■ ■ · · ·
    ■ · ■ ■ · ·
    ■ · · ■ ■ ·
    ■ · · · ■ ■

Where a query stands: of n queries over m keys, query r stands at position r + m − n, so that a few new
queries follow a cache of old keys; `at=start` or `at=(start, step)` says otherwise.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, reduce
from math import gcd, lcm
from operator import and_
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from . import progression, value
from .errors import ShapeError, SpecError
from .progression import Ints, Keys

At = int | tuple[int, int] | None
Terms = dict[frozenset["Word"], int]
FAR = 1 << 60  # past any key; small enough to add to without overflow


class Pattern:
    """A set of pairs (i, j). Combine with `&`, `|`, `~` and `-`; nothing is n × m until `allowed(n, m)`."""

    def allows(self, i: Any, j: Any) -> Any:
        """Whether the query at position i may look at key j: for two integers, or tensors that broadcast."""
        raise NotImplementedError

    def leaves(self) -> Iterator["Pattern"]:
        """The words this pattern is made of, in reading order, repeats included."""
        yield self

    def terms(self) -> Terms:
        """The indicator as a polynomial in those of the words; the empty set stands for the constant 1."""
        raise NotImplementedError

    def __and__(self, other: "Pattern") -> "Pattern":
        return Both(self, other) if isinstance(other, Pattern) else NotImplemented

    def __or__(self, other: "Pattern") -> "Pattern":
        return Either(self, other) if isinstance(other, Pattern) else NotImplemented

    def __sub__(self, other: "Pattern") -> "Pattern":
        return Both(self, Not(other)) if isinstance(other, Pattern) else NotImplemented

    def __invert__(self) -> "Pattern":
        return Not(self)

    @property
    def has_data(self) -> bool:
        """True if tensors or a function decide, not the declaration: `documents`, `lengths`, `where`."""
        return any(not isinstance(leaf, Word) for leaf in self.leaves())

    @property
    def reads_query(self) -> bool:
        """True if it matters where the query stands: not for `full`, `every`, `sinks`, `lengths`."""
        return any(leaf.reads_query for leaf in self.leaves())

    def allowed(
        self, n: int, m: int | None = None, at: At | Tensor = None, device: torch.device | str | None = None
    ) -> Bool[Tensor, "*b n m"]:
        """The dense table, True = may look: n × m, or b × 1 × n × m where data differ along the batch."""
        m = n if m is None else m
        i = positions(self, n, m, at, device)[..., None]
        j = torch.arange(m, device=device)
        i = i[:, None] if i.dim() == 3 else i  # one offset a batch row: an axis for the heads
        table = torch.as_tensor(self.allows(i, j), device=device)
        return torch.broadcast_to(
            table, (*table.shape[:-2], n, m) if table.dim() > 2 else (*i.shape[:-2], n, m)
        )

    def row_counts(self, n: int, m: int | None = None, at: At = None) -> Ints:
        """How many keys each of the n queries may look at."""
        m = n if m is None else m
        return _row_counter(self.terms(), m, *standing(self, n, m, at))(np.arange(n, dtype=np.int64))

    def count(self, n: int, m: int | None = None, at: At = None) -> int:
        """How many pairs are allowed, exactly; without visiting each row where the pattern repeats itself.

        With data (`documents`, `lengths`, `where`) the pairs of all batch rows are looked at one by one.
        """
        m = n if m is None else m
        start, step = standing(self, n, m, at)
        if n == 0 or m == 0:
            return 0
        if self.has_data:
            rows = range(0, n, max(1, (1 << 24) // m))
            return sum(
                int(self.allowed(min(rows.step, n - r), m, (start + step * r, step)).sum()) for r in rows
            )
        return sum(c * _count_term(words, n, m, start, step) for words, c in self.terms().items())

    def same(self, other: "Pattern", n: int, m: int | None = None, at: At = None) -> bool:
        """Equality of meaning at this size: exactly the same pairs. (`==` compares how they are written.)"""
        return ((self - other) | (other - self)).count(n, m, at) == 0

    def draw(self, n: int, m: int | None = None, at: At = None) -> str:
        """One line a query: ■ may look, · may not."""
        table = self.allowed(n, m, at)
        if table.dim() > 2:
            raise ShapeError(f"{self!r} differs along the batch; draw one row: pattern.allowed(n)[b, 0]")
        return "\n".join(" ".join("■" if cell else "·" for cell in row) for row in table.tolist())

    def json(self, indent: int | None = None) -> str:
        return value.to_json(self, indent)

    @staticmethod
    def from_json(text: str) -> "Pattern":
        return value.from_json(text, KINDS)


class Word(Pattern):
    """A pattern that gives each query one arithmetic progression of keys. See progression.py."""

    reads_query = True
    period = 1  # shifting i by this changes neither residues nor the distance to the bounds
    hop = 1  # the step of its progressions of keys
    lines: tuple[tuple[int, int], ...] = ()  # the bounds lo and hi, as slope·i + constant
    wobble = 0  # how far a bound strays from its line
    turns: tuple[int, ...] = ()  # positions i at which a bound changes its line

    def keys(self, i: Ints) -> Keys:
        """lo, hi, residue and step for queries at positions i; bounds may lie past the last key."""
        raise NotImplementedError

    def terms(self) -> Terms:
        return {frozenset([self]): 1}

    def __repr__(self) -> str:
        return value.source(self)


def _need(ok: bool, what: Pattern, needs: str) -> None:
    if not ok:
        raise SpecError(f"{what!r}: {needs}")


@dataclass(frozen=True, repr=False)
class full(Word):
    """Every pair."""

    reads_query = False

    def allows(self, i, j):
        return (i == i) & (j == j)

    def keys(self, i):
        return Keys(-FAR, FAR)

    def terms(self):
        return {frozenset(): 1}


@dataclass(frozen=True, repr=False)
class causal(Word):
    """j ≤ i: itself and what came before."""

    lines = ((1, 0),)

    def allows(self, i, j):
        return j <= i

    def keys(self, i):
        return Keys(-FAR, i)


@dataclass(frozen=True, repr=False)
class window(Word):
    """−after ≤ i − j ≤ before: `window(2)` is the query itself, two keys before it and two after."""

    before: int
    after: int | None = None  # None: as many as before

    def __post_init__(self):
        _need(
            self.before >= 0 and (self.after is None or self.after >= 0),
            self,
            "a window cannot end before it begins; before and after need to be >= 0",
        )

    @property
    def ahead(self) -> int:
        return self.before if self.after is None else self.after

    @property
    def lines(self):
        return ((1, -self.before), (1, self.ahead))

    def allows(self, i, j):
        return (i - j <= self.before) & (j - i <= self.ahead)

    def keys(self, i):
        return Keys(i - self.before, i + self.ahead)


@dataclass(frozen=True, repr=False)
class dilated(Word):
    """step divides i − j and |i − j| ≤ reach · step: 2·reach + 1 keys."""

    reach: int
    step: int

    def __post_init__(self):
        _need(self.reach >= 0 and self.step >= 1, self, "reach needs to be >= 0 and step >= 1")

    @property
    def period(self):
        return self.step

    hop = period

    @property
    def lines(self):
        return ((1, -self.reach * self.step), (1, self.reach * self.step))

    def allows(self, i, j):
        return ((i - j) % self.step == 0) & (abs(i - j) <= self.reach * self.step)

    def keys(self, i):
        far = self.reach * self.step
        return Keys(i - far, i + far, i % self.step, self.step)


@dataclass(frozen=True, repr=False)
class every(Word):
    """j ≡ offset (mod k): every k-th key, seen by all."""

    k: int
    offset: int = 0

    reads_query = False

    def __post_init__(self):
        _need(self.k >= 1 and 0 <= self.offset < self.k, self, "k needs to be >= 1 and 0 <= offset < k")

    @property
    def period(self):
        return self.k

    hop = period

    def allows(self, i, j):
        return (j % self.k == self.offset) & (i == i)

    def keys(self, i):
        return Keys(-FAR, FAR, self.offset, self.k)


@dataclass(frozen=True, repr=False)
class strided(Word):
    """i − j ≡ 0 (mod k): keys at a distance that k divides."""

    k: int

    def __post_init__(self):
        _need(self.k >= 1, self, "k needs to be >= 1")

    @property
    def period(self):
        return self.k

    hop = period

    def allows(self, i, j):
        return (i - j) % self.k == 0

    def keys(self, i):
        return Keys(-FAR, FAR, i % self.k, self.k)


@dataclass(frozen=True, repr=False)
class rows(Word):
    """i ≡ offset (mod k): every k-th query sees everything."""

    k: int
    offset: int = 0

    def __post_init__(self):
        _need(self.k >= 1 and 0 <= self.offset < self.k, self, "k needs to be >= 1 and 0 <= offset < k")

    @property
    def period(self):
        return self.k

    def allows(self, i, j):
        return (i % self.k == self.offset) & (j == j)

    def keys(self, i):
        return Keys(-FAR, np.where(i % self.k == self.offset, FAR, -1))


@dataclass(frozen=True, repr=False)
class sinks(Word):
    """j < m: the first m keys, seen by all."""

    m: int

    reads_query = False

    def __post_init__(self):
        _need(self.m >= 0, self, "m needs to be >= 0")

    @property
    def lines(self):
        return ((0, self.m - 1),)

    def allows(self, i, j):
        return (j < self.m) & (i == i)

    def keys(self, i):
        return Keys(-FAR, self.m - 1)


@dataclass(frozen=True, repr=False)
class prefix(Word):
    """i < m and j < m: `causal() | prefix(m)` is a prefix language model."""

    m: int

    def __post_init__(self):
        _need(self.m >= 0, self, "m needs to be >= 0")

    @property
    def lines(self):
        return ((0, self.m - 1),)

    @property
    def turns(self):
        return (self.m,)

    def allows(self, i, j):
        return (i < self.m) & (j < self.m)

    def keys(self, i):
        return Keys(-FAR, np.where(i < self.m, self.m - 1, -1))


@dataclass(frozen=True, repr=False)
class blocks(Word):
    """⌊i/size⌋ = ⌊j/size⌋: each block of neighbours sees itself."""

    size: int

    def __post_init__(self):
        _need(self.size >= 1, self, "size needs to be >= 1")

    @property
    def period(self):
        return self.size

    @property
    def wobble(self):  # its bounds are a staircase along j = i
        return self.size

    lines = ((1, 0),)

    def allows(self, i, j):
        return i // self.size == j // self.size

    def keys(self, i):
        lo = i // self.size * self.size
        return Keys(lo, lo + self.size - 1)


# What tensors or a function decide. Compared by identity; refused in specs and JSON.


class Data(Pattern):
    reads_query = True
    refuses_json = "carries data, so it has no JSON; pass it to the call (rg.attention, the module) instead"

    def terms(self):
        raise ShapeError(f"{self!r} carries data: there is no formula for it")


@dataclass(frozen=True, eq=False, repr=False)
class documents(Data):
    """ids[i] = ids[j]: packed sequences do not see one another. ids is (m,) or (b, m), one a position."""

    ids: Int[Tensor, "*b m"]

    def allows(self, i, j):
        ids = torch.atleast_2d(self.ids)
        if isinstance(i, int):
            return bool((ids[:, i] == ids[:, j]).all())
        b = torch.arange(len(ids), device=ids.device)[:, None, None, None]
        same = ids[b, i] == ids[b, j]
        return same if self.ids.dim() == 2 else same[0, 0]

    def __repr__(self):
        return f"documents(<{'×'.join(map(str, self.ids.shape))} ids>)"


@dataclass(frozen=True, eq=False, repr=False)
class lengths(Data):
    """j < l: hides the keys past the length of each batch row, never the queries. l is (b,)."""

    l: Int[Tensor, " b"]

    reads_query = False

    def allows(self, i, j):
        if isinstance(j, int):
            return bool((j < self.l).all())
        return (j < self.l[:, None, None, None]) & (i == i)

    def __repr__(self):
        return f"lengths(<{len(self.l)} lengths>)"


@dataclass(frozen=True, eq=False, repr=False)
class where(Data):
    """fn(i, j), any function of integer tensors that broadcast, made of tensor operations."""

    fn: Callable[[Any, Any], Any]

    def allows(self, i, j):
        return self.fn(i, j)

    def __repr__(self):
        return f"where({getattr(self.fn, '__name__', self.fn)})"


# The algebra.


@dataclass(frozen=True, repr=False)
class Both(Pattern):
    """left & right."""

    left: Pattern
    right: Pattern

    def allows(self, i, j):
        return self.left.allows(i, j) & self.right.allows(i, j)

    def leaves(self):
        yield from self.left.leaves()
        yield from self.right.leaves()

    def terms(self):
        return _product(self.left.terms(), self.right.terms())

    def __repr__(self):
        # & binds tighter than | and to the left
        left = f"({self.left!r})" if isinstance(self.left, Either) else repr(self.left)
        right = f"({self.right!r})" if isinstance(self.right, Both | Either) else repr(self.right)
        return f"{left} & {right}"


@dataclass(frozen=True, repr=False)
class Either(Pattern):
    """left | right."""

    left: Pattern
    right: Pattern

    def allows(self, i, j):
        return self.left.allows(i, j) | self.right.allows(i, j)

    def leaves(self):
        yield from self.left.leaves()
        yield from self.right.leaves()

    def terms(self):
        a, b = self.left.terms(), self.right.terms()
        return _sum(_sum(a, b), _product(a, b), -1)

    def __repr__(self):
        right = f"({self.right!r})" if isinstance(self.right, Either) else repr(self.right)
        return f"{self.left!r} | {right}"


@dataclass(frozen=True, repr=False)
class Not(Pattern):
    """~inner: every pair that inner does not hold."""

    inner: Pattern

    def allows(self, i, j):
        inner = self.inner.allows(i, j)
        return not inner if isinstance(inner, bool) else ~inner

    def leaves(self):
        yield from self.inner.leaves()

    def terms(self):
        return _sum({frozenset(): 1}, self.inner.terms(), -1)

    def __repr__(self):
        return f"~({self.inner!r})" if isinstance(self.inner, Both | Either) else f"~{self.inner!r}"


WORDS = (full, causal, window, dilated, every, strided, rows, sinks, prefix, blocks)
KINDS = value.table(*WORDS, Both, Either, Not, documents, lengths, where)


def as_pattern(given: Pattern | None) -> Pattern:
    """None means every pair."""
    return full() if given is None else given


def standing(pattern: Pattern, n: int, m: int, at: At = None) -> tuple[int, int]:
    """(start, step): query r of n over m keys stands at position start + step · r."""
    if isinstance(at, tuple):
        start, step = at
        if step < 1:
            raise SpecError(f"at=({start}, {step}): the step between queries needs to be >= 1")
        return start, step
    if at is not None:
        return int(at), 1
    if n > m and pattern.reads_query:
        raise ShapeError(
            f"{n} queries over {m} keys: {pattern!r} compares positions, and query 0 would stand at {m - n}; "
            f"say where the queries stand with at=, for example at=0"
        )
    return m - n, 1


def positions(
    pattern: Pattern, n: int, m: int, at: At | Tensor = None, device: torch.device | str | None = None
) -> Int[Tensor, "*b n"]:
    """Where the n queries stand: (n,), or (b, n) where `at` holds one offset a batch row."""
    if isinstance(at, Tensor):
        return at.to(device)[..., None] + torch.arange(n, device=device)
    start, step = standing(pattern, n, m, at)
    return start + step * torch.arange(n, device=device)


def _sum(a: Terms, b: Terms, times: int = 1) -> Terms:
    out = dict(a)
    for words, c in b.items():
        out[words] = out.get(words, 0) + times * c
    return {words: c for words, c in out.items() if c}


def _product(a: Terms, b: Terms) -> Terms:
    out: Terms = {}
    for wa, ca in a.items():
        for wb, cb in b.items():
            out[wa | wb] = out.get(wa | wb, 0) + ca * cb
    return {words: c for words, c in out.items() if c}


def _row_counter(terms: Terms, m: int, start: int, step: int) -> Callable[[Ints], Ints]:
    """t ↦ how many keys query t may look at: Σ coefficient · |progression of the term|."""

    def count(t: Ints) -> Ints:
        i = start + step * t
        of = cache(lambda word: word.keys(i))
        total = np.zeros_like(i)
        for words, coefficient in terms.items():
            total += coefficient * reduce(and_, map(of, words), Keys(0, m - 1)).count()
        return total

    return count


def _count_term(words: frozenset[Word], n: int, m: int, start: int, step: int) -> int:
    """How many pairs all of these words allow."""
    for word in words:
        if isinstance(word, rows):  # look at the queries it lets through, not at the others
            t, by = _solve(start, step, word.offset, word.k)
            left = len(range(t, n, by)) if by else 0
            return _count_term(words - {word}, left, m, start + step * t, step * by) if left else 0
    period = lcm(*(w.period for w in words))
    flat = {0, m - 1} | {c for w in words for slope, c in w.lines if slope == 0}
    steep = {c for w in words for slope, c in w.lines if slope == 1}
    turns = {b - a for a in steep for b in flat} | {t for w in words for t in w.turns}
    breaks = [(t - start) // step for t in turns]
    slack = (sum(w.wobble for w in words) + lcm(*(w.hop for w in words))) // step + 1
    count = _row_counter({words: 1}, m, start, step)
    return progression.total(count, n, breaks, slack, period // gcd(period, step))


def _solve(start: int, step: int, offset: int, k: int) -> tuple[int, int]:
    """(t₀, by): start + step · t ≡ offset (mod k) exactly for t ≡ t₀ (mod by); by = 0 where no t does."""
    g = gcd(step, k)
    if (offset - start) % g:
        return 0, 0
    by = k // g
    return (offset - start) // g * pow(step // g, -1, by) % by, by


__all__ = ["Pattern", *(w.__name__ for w in WORDS), "documents", "lengths", "where"]

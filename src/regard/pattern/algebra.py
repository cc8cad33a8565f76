"""The algebra of patterns: `&`, `|`, `~` and `-` over sets of pairs, and where a query stands."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from .. import value
from ..errors import ShapeError, SpecError
from ..progression import Ints
from . import counting
from .counting import Countable, Terms

At = int | tuple[int, int] | None
MANY = 12  # words: inclusion and exclusion has up to 2^words terms, so past this pairs are looked at
KINDS: dict[str, type] = {}  # what JSON may name; each module of this package adds its own


class Pattern:
    """A set of pairs (i, j). Combine with `&`, `|`, `~` and `-`; nothing is n × m until `allowed(n, m)`."""

    text: str | None = (
        None  # its JSON, made when it is declared: what a compiled graph carries; None with data
    )

    def allows(self, i: Any, j: Any) -> Any:
        """Whether the query at position i may look at key j: for two integers, or tensors that broadcast."""
        raise NotImplementedError

    def leaves(self) -> Iterator["Pattern"]:
        """The words this pattern is made of, in reading order, repeats included."""
        yield self

    def fits(self, m: int) -> None:
        """Raise a ShapeError if the data of this word cannot be read for m keys."""

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
        return any(not isinstance(leaf, Countable) for leaf in self.leaves())

    @property
    def reads_query(self) -> bool:
        """True if it matters where the query stands: not for `full`, `every`, `sinks`, `lengths`."""
        return any(leaf.reads_query for leaf in self.leaves())

    def allowed(
        self, n: int, m: int | None = None, at: At | Tensor = None, device: torch.device | str | None = None
    ) -> Bool[Tensor, "*b n m"]:
        """The dense table, True = may look: n × m, or b × 1 × n × m where data differ along the batch."""
        m = n if m is None else m
        for leaf in self.leaves():
            leaf.fits(m)
        i = positions(self, n, m, at, device)[..., None]
        j = torch.arange(m, device=device)
        i = i[:, None] if i.dim() == 3 else i  # one offset a batch row: an axis for the heads
        table = torch.as_tensor(self.allows(i, j), device=device)
        return torch.broadcast_to(
            table, (*table.shape[:-2], n, m) if table.dim() > 2 else (*i.shape[:-2], n, m)
        )

    def row_counts(self, n: int, m: int | None = None, at: At = None) -> Ints:
        """How many keys each of the n queries may look at; with data, over all batch rows together."""
        m = n if m is None else m
        start, step = query_offset(self, n, m, at)
        if not self._looked_at:
            return counting.row_counter(self.terms(), m, start, step)(np.arange(n, dtype=np.int64))
        some = max(1, (1 << 24) // max(m, 1))
        tables = (self.allowed(min(some, n - r), m, (start + step * r, step)) for r in range(0, n, some))
        counts = [t.sum(-1).reshape(-1, t.shape[-2]).sum(0).numpy() for t in tables]
        return np.concatenate(counts) if counts else np.zeros(0, dtype=np.int64)

    def count(self, n: int, m: int | None = None, at: At = None) -> int:
        """How many pairs are allowed, exactly; without visiting each row where the pattern repeats itself.

        With data (`documents`, `lengths`, `where`) the pairs of all batch rows are looked at one by one.
        """
        m = n if m is None else m
        start, step = query_offset(self, n, m, at)
        if n == 0 or m == 0:
            return 0
        if self._looked_at:
            return int(self.row_counts(n, m, at).sum())
        return counting.count(self.terms(), n, m, start, step)

    @property
    def _looked_at(self) -> bool:
        """True where there is no formula, or one of too many terms: pairs are then looked at, some rows at a time."""
        return self.has_data or len(set(self.leaves())) > MANY

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


def write_text(pattern: Pattern, *parts: Pattern) -> None:
    """Give a frozen pattern its text, if all its parts have one.

    The JSON of whole numbers, None and patterns, put together by hand: a traced graph may declare a pattern too.
    """
    if any(part.text is None for part in parts):
        return
    said = [f'"kind": "{type(pattern).__name__}"']
    for field in fields(pattern):  # type: ignore[arg-type]  # every pattern is a dataclass
        given = getattr(pattern, field.name)
        text = given.text if isinstance(given, Pattern) else "null" if given is None else str(given)
        said.append(f'"{field.name}": {text}')
    object.__setattr__(pattern, "text", "{" + ", ".join(said) + "}")


def _need_patterns(whole: Pattern, *parts: Any) -> None:
    for part in parts:
        if not isinstance(part, Pattern):
            raise SpecError(f"{type(whole).__name__} is made of patterns; {part!r} is none")


@dataclass(frozen=True, repr=False)
class Both(Pattern):
    """left & right."""

    left: Pattern
    right: Pattern

    def __post_init__(self):
        _need_patterns(self, self.left, self.right)
        write_text(self, self.left, self.right)

    def allows(self, i, j):
        return self.left.allows(i, j) & self.right.allows(i, j)

    def leaves(self):
        yield from self.left.leaves()
        yield from self.right.leaves()

    def terms(self):
        return counting.product(self.left.terms(), self.right.terms())

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

    def __post_init__(self):
        _need_patterns(self, self.left, self.right)
        write_text(self, self.left, self.right)

    def allows(self, i, j):
        return self.left.allows(i, j) | self.right.allows(i, j)

    def leaves(self):
        yield from self.left.leaves()
        yield from self.right.leaves()

    def terms(self):
        a, b = self.left.terms(), self.right.terms()
        return counting.plus(counting.plus(a, b), counting.product(a, b), -1)

    def __repr__(self):
        right = f"({self.right!r})" if isinstance(self.right, Either) else repr(self.right)
        return f"{self.left!r} | {right}"


@dataclass(frozen=True, repr=False)
class Not(Pattern):
    """~inner: every pair that inner does not hold."""

    inner: Pattern

    def __post_init__(self):
        _need_patterns(self, self.inner)
        write_text(self, self.inner)

    def allows(self, i, j):
        inner = self.inner.allows(i, j)
        return not inner if isinstance(inner, bool) else ~inner

    def leaves(self):
        yield from self.inner.leaves()

    def terms(self):
        return counting.plus({frozenset(): 1}, self.inner.terms(), -1)

    def __repr__(self):
        return f"~({self.inner!r})" if isinstance(self.inner, Both | Either) else f"~{self.inner!r}"


KINDS.update(value.table(Both, Either, Not))


def query_offset(pattern: Pattern, n: int, m: int, at: At = None) -> tuple[int, int]:
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
    start, step = query_offset(pattern, n, m, at)
    return start + step * torch.arange(n, device=device)

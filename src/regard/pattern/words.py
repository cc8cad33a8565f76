"""The words of the grammar: each gives a query one arithmetic progression of keys, by an inequality."""

from dataclasses import dataclass, fields

import numpy as np

from .. import value
from ..errors import SpecError
from ..progression import FAR, Keys
from .algebra import KINDS, Pattern, write_text
from .counting import Countable, Terms


class Word(Countable, Pattern):
    """A pattern that gives each query one arithmetic progression of keys. See progression.py."""

    reads_query = True

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]  # every word is a dataclass
            given = getattr(self, field.name)
            whole = type(given) is int or (given is None and field.default is None)
            _need(whole, self, f"{field.name} needs to be a whole number, an int")
            _need(
                given is None or abs(given) < FAR,
                self,
                f"{field.name} needs to be below {FAR}, past any position",
            )
        self._check()
        write_text(self)

    def _check(self) -> None:
        """Raise a SpecError if these numbers declare no pattern."""

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
    apart = (0, FAR, 1)

    def allows(self, i, j):
        return j <= i

    def keys(self, i):
        return Keys(-FAR, i)


@dataclass(frozen=True, repr=False)
class window(Word):
    """−after ≤ i − j ≤ before: `window(2)` is the query itself, two keys before it and two after."""

    before: int
    after: int | None = None  # None: as many as before

    def _check(self):
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

    @property
    def apart(self):
        return (-self.ahead, self.before, 1)

    def allows(self, i, j):
        return (i - j <= self.before) & (j - i <= self.ahead)

    def keys(self, i):
        return Keys(i - self.before, i + self.ahead)


@dataclass(frozen=True, repr=False)
class dilated(Word):
    """step divides i − j and |i − j| ≤ reach · step: 2·reach + 1 keys."""

    reach: int
    step: int

    def _check(self):
        _need(self.reach >= 0 and self.step >= 1, self, "reach needs to be >= 0 and step >= 1")
        _need(self.reach * self.step < FAR, self, f"reach · step needs to be below {FAR}, past any position")

    @property
    def period(self):
        return self.step

    @property
    def lines(self):
        return ((1, -self.reach * self.step), (1, self.reach * self.step))

    @property
    def apart(self):
        return (-self.reach * self.step, self.reach * self.step, self.step)

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

    def _check(self):
        _need(self.k >= 1 and 0 <= self.offset < self.k, self, "k needs to be >= 1 and 0 <= offset < k")

    @property
    def period(self):
        return self.k

    def allows(self, i, j):
        return (j % self.k == self.offset) & (i == i)

    def keys(self, i):
        return Keys(-FAR, FAR, self.offset, self.k)

    def along(self, d):
        return Keys(-FAR, FAR, (self.offset + d) % self.k, self.k)


@dataclass(frozen=True, repr=False)
class strided(Word):
    """i − j ≡ 0 (mod k): keys at a distance that k divides."""

    k: int

    def _check(self):
        _need(self.k >= 1, self, "k needs to be >= 1")

    @property
    def period(self):
        return self.k

    @property
    def apart(self):
        return (-FAR, FAR, self.k)

    def allows(self, i, j):
        return (i - j) % self.k == 0

    def keys(self, i):
        return Keys(-FAR, FAR, i % self.k, self.k)


@dataclass(frozen=True, repr=False)
class rows(Word):
    """i ≡ offset (mod k): every k-th query sees everything."""

    k: int
    offset: int = 0

    def _check(self):
        _need(self.k >= 1 and 0 <= self.offset < self.k, self, "k needs to be >= 1 and 0 <= offset < k")

    @property
    def period(self):
        return self.k

    @property
    def queries(self):
        return (self.offset, self.k)

    def allows(self, i, j):
        return (i % self.k == self.offset) & (j == j)

    def keys(self, i):
        return Keys(-FAR, np.where(i % self.k == self.offset, FAR, -1))


@dataclass(frozen=True, repr=False)
class sinks(Word):
    """j < m: the first m keys, seen by all."""

    m: int

    reads_query = False

    def _check(self):
        _need(self.m >= 0, self, "m needs to be >= 0")

    @property
    def lines(self):
        return ((0, self.m - 1),)

    def allows(self, i, j):
        return (j < self.m) & (i == i)

    def keys(self, i):
        return Keys(-FAR, self.m - 1)

    def along(self, d):
        return Keys(-FAR, self.m - 1 + d)


@dataclass(frozen=True, repr=False)
class prefix(Word):
    """i < m and j < m: `causal() | prefix(m)` is a prefix language model."""

    m: int

    def _check(self):
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

    def along(self, d):
        return Keys(-FAR, self.m - 1 + np.minimum(d, 0))


@dataclass(frozen=True, repr=False)
class blocks(Word):
    """⌊i/size⌋ = ⌊j/size⌋: each block of neighbours sees itself."""

    size: int

    def _check(self):
        _need(self.size >= 1, self, "size needs to be >= 1")

    @property
    def period(self):
        return self.size

    @property
    def wobble(self):  # its bounds are a staircase along j = i
        return self.size

    stair = wobble

    @property
    def apart(self):  # no further, and not all that near
        return (1 - self.size, self.size - 1, 1)

    lines = ((1, 0),)

    def allows(self, i, j):
        return i // self.size == j // self.size

    def keys(self, i):
        lo = i // self.size * self.size
        return Keys(lo, lo + self.size - 1)


WORDS = (full, causal, window, dilated, every, strided, rows, sinks, prefix, blocks)
KINDS.update(value.table(*WORDS))

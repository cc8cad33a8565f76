"""What one word asks of a pair of positions. Everything else about a word is derived from this value."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce
from math import lcm
from operator import and_
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..progression import FAR, PerQuery, Progression, later, solve, sooner

Residue = tuple[int, int]  # (k, r): ≡ r (mod k); (1, 0) is every number


@dataclass(frozen=True)
class Relation:
    """A conjunction; the query is at position i, the key at position j. A field at its default asks nothing.

        near ≤ i − j ≤ far          i < query_below     i ≡ r (mod k) where query_class = (k, r)
        divisor divides i − j       j < key_below       j ≡ r (mod k) where key_class = (k, r)
        ⌊i/size⌋ = ⌊j/size⌋ for each size in blocks

    Relations are closed under `&`.

    >>> Relation(near=0) & Relation(far=5, key_class=(2, 1)) & Relation(key_class=(3, 0))
    Relation(near=0, far=5, key_class=(6, 3))
    """

    near: int = -FAR
    far: int = FAR
    divisor: int = 1
    query_below: int = FAR
    key_below: int = FAR
    query_class: Residue = (1, 0)
    key_class: Residue = (1, 0)
    blocks: tuple[int, ...] = ()

    def __and__(self, other: "Relation") -> "Relation":
        queries, keys = (_meet(a, b) for a, b in self._classes(other))
        if queries is None or keys is None:
            return NOTHING
        return Relation(
            max(self.near, other.near),
            min(self.far, other.far),
            lcm(self.divisor, other.divisor),
            min(self.query_below, other.query_below),
            min(self.key_below, other.key_below),
            queries,
            keys,
            self.blocks if self.blocks == other.blocks else tuple(sorted({*self.blocks, *other.blocks})),
        )

    def _classes(self, other: "Relation") -> tuple[tuple[Residue, Residue], tuple[Residue, Residue]]:
        return (self.query_class, other.query_class), (self.key_class, other.key_class)

    def __repr__(self) -> str:
        mine = [(name, value) for name, value in vars(self).items() if value != getattr(EVERYTHING, name)]
        return f"Relation({', '.join(f'{name}={value}' for name, value in mine)})"

    @property
    def empty(self) -> bool:
        """True where the bounds on i − j contradict each other. (Other relations may be empty too.)"""
        return self.near > self.far

    @property
    def compares(self) -> bool:
        """Whether it depends on i and j together."""
        return self.near > -FAR or self.far < FAR or self.divisor > 1 or bool(self.blocks)

    @property
    def reads_query(self) -> bool:
        return self.compares or self.query_below < FAR or self.query_class[0] > 1

    @property
    def reads_key(self) -> bool:
        return self.compares or self.key_below < FAR or self.key_class[0] > 1

    @property
    def period(self) -> int:
        """Shifting i by this changes no residue and moves each bound along with i, where it moves at all."""
        return lcm(self.query_class[0], self.key_class[0], self.divisor, *self.blocks)

    @property
    def shift_period(self) -> int:
        """Shifting i and j together by a multiple of this changes nothing; 0 if there is no such shift."""
        fixed = self.query_below < FAR or self.key_below < FAR
        return 0 if fixed else lcm(self.query_class[0], self.key_class[0], *self.blocks)

    @property
    def largest(self) -> int:
        """The largest number that it names, in absolute value."""
        bounds = (b for b in (self.near, self.far, self.query_below, self.key_below) if abs(b) < FAR)
        classes = (self.query_class[0], self.key_class[0], self.divisor)
        return max(map(abs, (*bounds, *classes, *self.blocks)))

    def conditions(self) -> Iterator["Relation"]:
        """Relations of one condition each, whose conjunction is this one."""
        for name, value in vars(self).items():
            if value != getattr(EVERYTHING, name):
                yield replace(EVERYTHING, **{name: value})

    def transposed(self) -> "Relation":
        """The relation of (j, i): queries and keys have changed places."""
        return replace(
            self,
            near=-self.far,
            far=-self.near,
            query_below=self.key_below,
            key_below=self.query_below,
            query_class=self.key_class,
            key_class=self.query_class,
        )

    def allows(self, i: Any, j: Any) -> Any:
        """Whether it holds, for two integers or for arrays or tensors that broadcast.

        Bounds and residues are computed for i and for j apart, so that n × m tables hold only truth values.
        """
        holds = []
        if self.near > -FAR:
            holds.append(j <= (i - self.near if self.near else i))
        if self.far < FAR:
            holds.append(j >= (i - self.far if self.far else i))
        if self.divisor > 1:
            holds.append(i % self.divisor == j % self.divisor)
        if self.query_below < FAR:
            holds.append(i < self.query_below)
        if self.key_below < FAR:
            holds.append(j < self.key_below)
        if self.query_class[0] > 1:
            holds.append(i % self.query_class[0] == self.query_class[1])
        if self.key_class[0] > 1:
            holds.append(j % self.key_class[0] == self.key_class[1])
        holds += [i // size == j // size for size in self.blocks]
        if not self.reads_query:
            holds.append(i == i)  # so that the result has the shape of i and j together
        if not self.reads_key:
            holds.append(j == j)
        return reduce(and_, holds)

    def ends(self, i: NDArray[np.integer]) -> tuple[PerQuery, PerQuery]:
        """The first and the last key of the queries at positions i by bounds and blocks; both move on with i."""
        lo: PerQuery = i - self.far if self.far < FAR else -FAR
        hi: PerQuery = i - self.near if self.near > -FAR else FAR
        hi = sooner(hi, self.key_below - 1 if self.key_below < FAR else FAR)
        for size in self.blocks:
            begin = i // size * size
            lo, hi = later(lo, begin), sooner(hi, begin + size - 1)
        return lo, hi

    def keys(self, i: NDArray[np.integer]) -> Progression:
        """The keys of the queries at positions i, one progression each; bounds may lie beyond the last key."""
        lo, hi = self.ends(i)
        if self.query_below < FAR:
            hi = np.where(i < self.query_below, hi, -1)
        if self.query_class[0] > 1:
            hi = np.where(_remainder(i, self.query_class[0]) == self.query_class[1], hi, -1)
        k, residue = self.key_class
        keys = Progression(lo, hi, residue if k < FAR else np.asarray(residue, dtype=object), k)
        if self.divisor == 1:
            return keys
        return Progression(-FAR, FAR, _remainder(i, self.divisor), self.divisor) & keys

    def queries(self, d: NDArray[np.integer]) -> Progression:
        """For each difference d = i − j that the bounds and the divisor allow: the positions i, blocks left aside."""
        k, residue = self.key_class
        hi: PerQuery = self.key_below - 1 + d if self.key_below < FAR else FAR
        hi = sooner(hi, self.query_below - 1 if self.query_below < FAR else FAR)
        queries = Progression(-FAR, hi, _remainder(residue + d, k) if k > 1 else 0, k)
        k, residue = self.query_class
        return queries if k == 1 else queries & Progression(-FAR, FAR, residue, k)


def _remainder(x: NDArray[np.integer], k: int) -> PerQuery:
    """x mod k, in Python's integers where k is beyond int64."""
    return x % k if k < FAR else x.astype(object) % k


def _meet(a: Residue, b: Residue) -> Residue | None:
    """The numbers of both classes: one class, or None."""
    if a[0] == 1 or a == b:
        return b
    if b[0] == 1:
        return a
    t, by, some = solve(a[1], a[0], *b)
    return (a[0] * by, a[1] + a[0] * t) if some else None


EVERYTHING = Relation()
NOTHING = Relation(near=FAR, far=-FAR)

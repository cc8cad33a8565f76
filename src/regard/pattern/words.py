"""The words of the grammar, each a relation of its numbers. To add one: its class here, its name in `__all__`."""

from ..progression import FAR
from .relation import Relation
from .word import Word

__all__ = [
    "blocks",
    "causal",
    "dilated",
    "every",
    "full",
    "prefix",
    "rows",
    "sinks",
    "strided",
    "window",
]


class full(Word):
    """Every pair."""

    @property
    def relation(self):
        return Relation()


class causal(Word):
    """j ≤ i: the query's own position and all earlier ones."""

    @property
    def relation(self):
        return Relation(near=0)


class window(Word):
    """−after ≤ i − j ≤ before: `window(2)` is the query itself, two keys before it and two after."""

    before: int
    after: int | None = None  # None: as many as before

    def check(self):
        self.require(
            self.before >= 0 and (self.after is None or self.after >= 0),
            "a window cannot end before it begins; before and after need to be >= 0",
        )

    @property
    def relation(self):
        return Relation(near=-(self.before if self.after is None else self.after), far=self.before)


class dilated(Word):
    """step divides i − j and |i − j| ≤ reach · step: 2·reach + 1 keys."""

    reach: int
    step: int

    def check(self):
        self.require(self.reach >= 0 and self.step >= 1, "reach needs to be >= 0 and step >= 1")
        self.require(
            self.reach * self.step < FAR, f"reach · step needs to be below {FAR}, beyond any position"
        )

    @property
    def relation(self):
        return Relation(near=-self.reach * self.step, far=self.reach * self.step, divisor=self.step)


class every(Word):
    """j ≡ offset (mod k): every k-th key, for all queries."""

    k: int
    offset: int = 0

    def check(self):
        self.require(self.k >= 1 and 0 <= self.offset < self.k, "k needs to be >= 1 and 0 <= offset < k")

    @property
    def relation(self):
        return Relation(key_class=(self.k, self.offset))


class strided(Word):
    """i − j ≡ 0 (mod k): keys at a distance that k divides."""

    k: int

    def check(self):
        self.require(self.k >= 1, "k needs to be >= 1")

    @property
    def relation(self):
        return Relation(divisor=self.k)


class rows(Word):
    """i ≡ offset (mod k): every k-th query attends to all keys."""

    k: int
    offset: int = 0

    def check(self):
        self.require(self.k >= 1 and 0 <= self.offset < self.k, "k needs to be >= 1 and 0 <= offset < k")

    @property
    def relation(self):
        return Relation(query_class=(self.k, self.offset))


class sinks(Word):
    """j < m: the first m keys, for all queries."""

    m: int

    def check(self):
        self.require(self.m >= 0, "m needs to be >= 0")

    @property
    def relation(self):
        return Relation(key_below=self.m)


class prefix(Word):
    """i < m and j < m: `causal() | prefix(m)` is a prefix language model."""

    m: int

    def check(self):
        self.require(self.m >= 0, "m needs to be >= 0")

    @property
    def relation(self):
        return Relation(query_below=self.m, key_below=self.m)


class blocks(Word):
    """⌊i/size⌋ = ⌊j/size⌋: each block of neighbors attends to itself."""

    size: int

    def check(self):
        self.require(self.size >= 1, "size needs to be >= 1")

    @property
    def relation(self):
        return Relation(blocks=(self.size,))

"""What a word is: a class that states one relation, or a shorthand that states its meaning; the rest is derived."""

from dataclasses import dataclass, fields
from typing import dataclass_transform

import numpy as np

from .. import value
from ..errors import SpecError
from ..progression import FAR
from .algebra import Pattern, register, write_text
from .relation import Relation


@dataclass_transform(frozen_default=True)
class Declared(Pattern):
    """A pattern declared by whole numbers. A subclass becomes a frozen dataclass that JSON and pattern texts know."""

    def __init_subclass__(cls, abstract: bool = False) -> None:
        dataclass(frozen=True, repr=False)(cls)
        if not abstract:
            register(cls)

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            given = getattr(self, field.name)
            if isinstance(given, np.integer):
                given = int(given)
                object.__setattr__(self, field.name, given)
            self.require(
                type(given) is int or (given is None and field.default is None),
                f"{field.name} needs to be a whole number, an int",
            )
            self.require(
                given is None or abs(given) < FAR,
                f"{field.name} needs to be below {FAR}, beyond any position",
            )
        self.check()
        write_text(self)

    def check(self) -> None:
        """Raise a SpecError if these numbers declare no pattern; `require` does."""

    def require(self, condition: bool, needs: str) -> None:
        if not condition:
            raise SpecError(f"{self!r}: {needs}")

    def __repr__(self) -> str:
        return value.source(self)


class Word(Declared, abstract=True):
    """A pattern given by one relation between the query's and the key's position: the only thing it states.

    >>> from regard.pattern import every
    >>> class before_last(Word):
    ...     "i − j ≥ back."
    ...     back: int
    ...
    ...     @property
    ...     def relation(self):
    ...         return Relation(near=self.back)
    >>> print((before_last(1) & every(2)).draw(5))
    · · · · ·
    ■ · · · ·
    ■ · · · ·
    ■ · ■ · ·
    ■ · ■ · ·
    """

    has_data = False

    @property
    def relation(self) -> Relation:
        raise NotImplementedError

    @property
    def reads_query(self) -> bool:
        return self.relation.reads_query

    @property
    def reads_key(self) -> bool:
        return self.relation.reads_key

    @property
    def shift_period(self) -> int:
        return self.relation.shift_period

    def allows(self, i, j):
        return self.relation.allows(i, j)

    def row_mask(self, inside):
        relation = self.relation
        return lambda b, i, j: relation.allows(i, j)

    def terms(self):
        return {self.relation: 1}


class Related(Word, abstract=True):
    """A word without a name: any relation. The engine rewrites patterns with it; it has no JSON."""

    of: Relation
    refuses_json = "is a relation without a name, so it has no JSON"

    def __post_init__(self) -> None:
        pass

    @property
    def relation(self) -> Relation:
        return self.of


class Shorthand(Declared, abstract=True):
    """A word for a pattern that is composed of others: its meaning is the only thing it states."""

    @property
    def meaning(self) -> Pattern:
        raise NotImplementedError

    def allows(self, i, j):
        return self.meaning.allows(i, j)

    def fold(self, leaf, both, either, negate):
        return self.meaning.fold(leaf, both, either, negate)

    def leaves(self):
        yield from self.meaning.leaves()

    def expanded(self):
        return self.meaning.expanded()

    def terms(self):
        return self.meaning.terms()

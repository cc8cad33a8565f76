"""A pattern in normal form: what all has to hold, and a union of such conjunctions."""

from functools import reduce
from operator import and_
from typing import Any

from .algebra import Both, Either, Not, Pattern
from .words import full

MAX_CLAUSES = 8  # clauses that a union is split into
Clause = tuple[Pattern, ...]  # words and negated words, all of which hold


def conjuncts(pattern: Pattern) -> list[Pattern]:
    """What all has to hold: the operands of the outermost `&`."""
    return [*conjuncts(pattern.left), *conjuncts(pattern.right)] if isinstance(pattern, Both) else [pattern]


def parted(pattern: Pattern, kinds: Any) -> tuple[list[Any], list[Pattern]]:
    """The operands of the outermost `&` that are of these kinds, and the others."""
    factors = conjuncts(pattern)
    return [x for x in factors if isinstance(x, kinds)], [x for x in factors if not isinstance(x, kinds)]


def conjunction(*factors: Pattern) -> Pattern:
    """What all of these allow; `full()` among them is left out."""
    restricting = [factor for factor in factors if not isinstance(factor, full)]
    return reduce(and_, restricting) if restricting else full()


def clauses(pattern: Pattern) -> list[Clause]:
    """The pattern as a union of clauses, if they are at most MAX_CLAUSES."""
    match pattern:
        case Either():
            union = clauses(pattern.left) + clauses(pattern.right)
        case Both():
            union = _intersection(clauses(pattern.left), clauses(pattern.right))
        case Not(Not() as inner):
            union = clauses(inner.inner)
        case Not(Either() as inner):
            union = _intersection(clauses(~inner.left), clauses(~inner.right))
        case Not(Both() as inner):
            union = clauses(~inner.left) + clauses(~inner.right)
        case _:
            union = [(pattern,)]
    return union if len(union) <= MAX_CLAUSES else [(pattern,)]


def _intersection(a: list[Clause], b: list[Clause]) -> list[Clause]:
    return [tuple(dict.fromkeys(x + y)) for x in a for y in b]

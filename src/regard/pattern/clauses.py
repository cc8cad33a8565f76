"""A pattern in normal form: what all has to hold, and a union of such conjunctions; and simpler patterns where only
some pairs matter."""

from functools import partial, reduce
from operator import and_
from typing import Any

from ..progression import FAR
from .algebra import Both, Either, Not, Pattern
from .classification import Run, of_relation
from .relation import Relation
from .word import Related, Word
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


def narrowed(pattern: Pattern) -> Pattern:
    """The same pattern, with words that only cut off an end of the bounds replaced by tighter bounds.

    A pass that excludes what an earlier one has computed is such a pattern: `causal() & window(512)` without
    `window(64)` is the distances from 65 to 512.

    >>> from regard.pattern import causal, window
    >>> narrowed(causal() & window(512) & ~window(64))
    Related(Relation(near=65, far=512))
    """
    terms = conjuncts(pattern)
    bounds = [x for x in terms if isinstance(x, Word) and _is_band(x.relation)]
    inner = reduce(and_, (x.relation for x in bounds), Relation())
    near, far = inner.near, inner.far
    others = []
    for x in terms:
        minus = x.inner.relation if isinstance(x, Not) and isinstance(x.inner, Word) else Relation()
        first, last = minus.near, minus.far
        if minus.divisor > 1 and minus == Relation(divisor=minus.divisor) and near > -FAR:
            first = last = -(-near // minus.divisor) * minus.divisor  # the only one, if the next is too far
            minus = Relation(near=first, far=last) if first + minus.divisor > far else minus
        if _is_band(minus) and first <= near <= last:
            near = last + 1
        elif _is_band(minus) and first <= far <= last:
            far = first - 1
        elif not (x in bounds or (_is_band(minus) and (last < near or far < first))):
            others.append(x)
    if (near, far) == (inner.near, inner.far) or near > far:
        return pattern
    return reduce(and_, others, Related(Relation(near=near, far=far)))


def _is_band(r: Relation) -> bool:
    return r != Relation() and r == Relation(near=r.near, far=r.far)


def without_certain_words(pattern: Pattern, i: Run, j: Run) -> Pattern:
    """The pattern without the words that hold for every pair of each of these runs: no need to test them."""

    def leaf(word: Pattern) -> Pattern:
        if not isinstance(word, Word):
            return word
        conditions, remaining = list(word.relation.conditions()), []
        for condition in conditions:
            outcome = of_relation(condition, i, j)
            if outcome.none.all():
                return ~full()
            if not outcome.all.all():
                remaining.append(condition)
        if len(remaining) == len(conditions):
            return word
        return Related(reduce(and_, remaining)) if remaining else full()

    return pattern.fold(leaf, partial(_combined, operation=Both), partial(_combined, operation=Either), Not)


def _combined(left: Pattern, right: Pattern, operation: type) -> Pattern:
    neutral, absorbing = (full(), ~full()) if operation is Both else (~full(), full())
    if absorbing in (left, right):
        return absorbing
    if left == neutral:
        return right
    return left if right == neutral else operation(left, right)

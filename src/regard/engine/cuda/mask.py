"""A pattern as a Triton function `allowed(i, j)`, and simpler patterns for what is left to test in a pass."""

import hashlib
import linecache
import re
from functools import lru_cache, partial, reduce
from operator import and_
from typing import Any

import triton
import triton.language as tl

from ...pattern import Both, Either, Not, Pattern, Related, Relation, Run, Word, full, neighborhood
from ...pattern.classification import of_relation
from ...pattern.clauses import conjuncts
from ...pattern.one_query import residue, run_formulas
from ...progression import FAR


def expression(pattern: Pattern) -> str:
    """The condition on positions i and j as Triton source. Of words with data, only grids have one.

    >>> from regard.pattern import causal, every
    >>> expression(causal() & ~every(4))
    '((j <= i) & ((j % 4 == 0) == 0))'
    """
    return pattern.fold(
        lambda word: word.condition() if isinstance(word, neighborhood) else _condition(word.relation),
        "({} & {})".format,
        "({} | {})".format,
        "({} == 0)".format,  # ~ of a truth value is not one in Triton's interpreter
    )


def _condition(r: Relation) -> str:
    """Remainders are taken of i and of j, never of i − j: a tile has rows + columns of those, not rows × columns."""
    conditions = (
        (r.divisor > 1, f"{residue('i', r.divisor)} == j % {r.divisor}"),
        (r.query_class[0] > 1, f"{residue('i', r.query_class[0])} == {r.query_class[1]}"),
        (r.key_class[0] > 1, f"j % {r.key_class[0]} == {r.key_class[1]}"),
        (r.query_below < FAR, f"i < {r.query_below}"),
        (r.key_below < FAR, f"j < {r.key_below}"),
        *((True, f"i - {residue('i', size)} == j - j % {size}") for size in r.blocks),
        (r.far < FAR, f"i - j <= {r.far}"),
        (r.near > -FAR, f"j - i <= {-r.near}" if r.near else "j <= i"),
    )
    holds = [text for is_tested, text in conditions if is_tested]
    if len(holds) <= 1:
        return f"({holds[0] if holds else 'j == j'})"
    return f"({' & '.join(f'({one})' for one in holds)})"


@lru_cache(maxsize=1024)
def compiled(pattern: Pattern) -> Any:
    """`allowed(i, j)` as a Triton function. The interpreter needs tl."""
    return function("allowed", "i, j", expression(pattern), triton.jit, {"tl": tl})


@lru_cache(maxsize=1024)
def runs(pattern: Pattern) -> Any:
    """The progressions of keys of one query (see one_query.run_formulas) as a Triton function of p and m."""
    body = re.sub(r"\b(maximum|minimum|where)\(", r"tl.\1(", ", ".join(run_formulas(pattern) or ()))
    return function("runs", "p, m", f"({body},)", triton.jit, {"tl": tl})


def function(word: str, arguments: str, body: str, jit: Any, space: dict[str, Any]) -> Any:
    """A function for the compiler `jit`; its name has a hash of its body, so that caches distinguish functions."""
    name = f"{word}_{hashlib.sha256(body.encode()).hexdigest()[:16]}"
    source = f"def {name}({arguments}):\n    return {body}\n"
    path = f"<regard {name}>"
    lines = source.splitlines(keepends=True)
    linecache.cache[path] = (len(source), None, lines, path)  # compilers read the source
    space = {"__name__": __name__, **space}
    exec(compile(source, path, "exec"), space)
    return jit(space[name])


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
        less = x.inner.relation if isinstance(x, Not) and isinstance(x.inner, Word) else Relation()
        first, last = less.near, less.far
        if less.divisor > 1 and less == Relation(divisor=less.divisor) and near > -FAR:
            first = last = -(-near // less.divisor) * less.divisor  # the only one, if the next is too far
            less = Relation(near=first, far=last) if first + less.divisor > far else less
        if _is_band(less) and first <= near <= last:
            near = last + 1
        elif _is_band(less) and first <= far <= last:
            far = first - 1
        elif not (x in bounds or (_is_band(less) and (last < near or far < first))):
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
        conditions, left = list(word.relation.conditions()), []
        for condition in conditions:
            known = of_relation(condition, i, j)
            if known.none.all():
                return ~full()
            if not known.all.all():
                left.append(condition)
        if len(left) == len(conditions):
            return word
        return Related(reduce(and_, left)) if left else full()

    return pattern.fold(leaf, partial(_joined, how=Both), partial(_joined, how=Either), Not)


def _joined(left: Pattern, right: Pattern, how: type) -> Pattern:
    neutral, strong = (full(), ~full()) if how is Both else (~full(), full())
    if strong in (left, right):
        return strong
    if left == neutral:
        return right
    return left if right == neutral else how(left, right)

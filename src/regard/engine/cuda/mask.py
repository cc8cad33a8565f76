"""A pattern as the kernels test it: a Triton function `allowed(i, j)`, and which test a block of pairs needs.

Most patterns are two bounds on j that move with i, with exceptions for some keys:

    only(j) ∧ (j ≥ i − before ∨ low(j)) ∧ (j ≤ i + after ∨ high(j))

`causal() & (window(128) | every(64))` is after = 0, before = 128 but for keys ≡ 0 mod 64. What depends on j alone
is computed once per key; a pair costs one comparison per bound, and only in blocks that the bound cuts.
"""

import hashlib
import linecache
import re
from dataclasses import dataclass
from functools import lru_cache, partial, reduce
from operator import and_
from typing import Any

import numpy as np
import triton
import triton.language as tl
from numpy.typing import NDArray

from ...pattern import Both, Either, Not, Pattern, Related, Relation, Run, Word, classify, full, neighborhood
from ...pattern.classification import of_relation
from ...progression import FAR, Ints
from ..plan import conjuncts, residue, run_formulas

# Marks of blocks: they have columns past the last key, past the upper bound, before the lower bound, exempt columns.
END, UPPER, LOWER, FREES = 16, 32, 64, 128
NO_KEY_FREE = (1, 1)  # no place leaves 1 when divided by 1

Some = NDArray[np.bool_]
Free = tuple[int, int]  # (k, r): places ≡ r mod k


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
    """The progressions of keys of one query (see plan.run_formulas) as a Triton function of p and m."""
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


# Bounds


@dataclass(frozen=True)
class Band:
    """The bounds and exceptions of a pattern; None: no such bound, no such exception."""

    before: int | None = None
    after: int | None = None
    low: Pattern | None = None
    high: Pattern | None = None
    only: Pattern | None = None


def band(pattern: Pattern) -> Band | None:
    """The pattern as bounds, or None if it cannot be expressed by them."""
    if reads_keys_only(pattern):
        return Band() if pattern == full() else Band(only=pattern)
    match pattern:
        case Word() if _is_band(r := pattern.relation):
            return Band(r.far if r.far < FAR else None, -r.near if r.near > -FAR else None)
        case Both(left, right):
            return _both(band(left), band(right))
        case Either(left, right) if reads_keys_only(right):
            return _either(band(left), right)
        case Either(left, right) if reads_keys_only(left):
            return _either(band(right), left)
    return None


def reads_keys_only(pattern: Pattern) -> bool:
    return not pattern.has_data and not pattern.reads_query


def _both(a: Band | None, b: Band | None) -> Band | None:
    if a is None or b is None:
        return None
    lower, upper = _tighter(a.before, a.low, b.before, b.low), _tighter(a.after, a.high, b.after, b.high)
    if lower is None or upper is None:
        return None
    only = a.only if b.only is None else b.only if a.only is None else a.only & b.only
    return Band(lower[0], upper[0], lower[1], upper[1], only)


def _tighter(
    a: int | None, free: Pattern | None, b: int | None, freed: Pattern | None
) -> tuple[int | None, Pattern | None] | None:
    """Two bounds as one: the wider one has no effect unless the tighter one has exceptions. None: there is none."""
    if a is None or b is None:
        return (b, freed) if a is None else (a, free)
    if b < a:
        a, free, b, freed = b, freed, a, free
    return (a, free) if free is None or (a == b and free == freed) else None


def _either(a: Band | None, keys: Pattern) -> Band | None:
    if a is None or a.only is not None:
        return None
    low = None if a.before is None else keys if a.low is None else a.low | keys
    high = None if a.after is None else keys if a.high is None else a.high | keys
    return Band(a.before, a.after, low, high)


def marks(found: Band | None, i: Run, j: Run) -> Ints:
    """For each segment j of a tile i: 1 where the lower bound cuts it, + 2 where the upper one does; 4: unknown."""
    if found is None:
        return np.full(len(i.first), 4)
    never = np.zeros(len(i.first), dtype=bool)
    cuts = [True if x is None else ~classify(x, i, j).all for x in (found.low, found.high)]
    lower = never if found.before is None else (i.last - j.first > found.before) & cuts[0]
    upper = never if found.after is None else (j.last - i.first > found.after) & cuts[1]
    if found.only is not None:
        lower = lower | ~classify(found.only, i, j).all
    return lower + 2 * upper


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


# Blocks that a straight line cuts. For consecutive keys, a bound hides a pair if column − limit(row) has the wrong
# sign, whatever the key is. That difference, saturated to 0 … 1, is one addition; Hopper has twice as many units for
# additions as for comparisons and selections (NVIDIA's throughput tables).


def lines(found: Band, cut: Ints, i: Run, j: Run, alone: Some, short: Some) -> tuple[Ints, tuple[Free, Free]]:
    """The marks of blocks of keys j, where i are the queries of their tiles and `cut` is the result of `marks`.

    Also the columns of keys that are exempt from the lower and from the upper bound, in the blocks marked so. Every
    query may attend to some key of a block that a bound cuts, so its largest score belongs to an allowed pair.
    """
    run = alone & (i.step == 1) & (j.step == 1) & ~short
    lower, upper = run & (cut == 1), run & (cut == 2)
    if found.before is not None:
        lower &= j.last >= i.last - found.before
    if found.after is not None:
        upper &= j.first <= i.first + found.after
    marks = np.where(short & (cut == 0), END, cut)
    marks, below = _marked(marks, LOWER, lower, found.low, i, j)
    marks, above = _marked(marks, UPPER, upper, found.high, i, j)
    return marks, (below, above)


def _marked(marks: Ints, mark: int, some: Some, word: Pattern | None, i: Run, j: Run) -> tuple[Ints, Free]:
    """Mark some blocks; also those with keys exempt from the bound, if they have the same columns in all blocks."""
    if word is None:
        return np.where(some, mark, marks), NO_KEY_FREE
    relation = word.relation if isinstance(word, Word) else Relation()
    k, residue = relation.key_class
    if k == 1 or relation != Relation(key_class=relation.key_class):
        return np.where(some & classify(word, i, j).none, mark, marks), NO_KEY_FREE
    at = (residue - j.first) % k  # the first column with a free key
    free = some & (at < j.count)
    marks = np.where(some & ~free, mark, marks)
    places = np.unique(at[free])
    if len(places) != 1:
        return marks, NO_KEY_FREE
    return np.where(free, mark + FREES, marks), (k, int(places[0]))

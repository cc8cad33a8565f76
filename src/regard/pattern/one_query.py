"""The keys of one query, which are a few progressions: of a position that is known, or as formulas of the position.

A sequence that grows by a few keys at a time would need a new plan for each step, and positions may differ by batch
row, in a tensor on the device. For one query, each clause of a pattern is one progression.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache, reduce
from operator import and_

import numpy as np

from ..progression import FAR
from .algebra import Not, Pattern
from .clauses import clauses
from .parts import LIMITS, Axis, Tiles, common_row_step, divide
from .relation import Relation
from .word import Word

MAX_RUNS = 4  # progressions of one query
QUERIES = 64  # whose keys `keys_of_query` computes at once


def keys_of_query(pattern: Pattern, position: int) -> list[list[int]]:
    """[first key, key step, number of keys, 1 = full or 0 = partial] of each progression of one query's keys, as if
    keys had no end. A decoder has one position after the other, so those of 64 neighbors are computed at once."""
    offsets, parts = _keys_of_queries(pattern, position // QUERIES)
    row = position % QUERIES
    return parts[offsets[row] : offsets[row + 1]]


@lru_cache(maxsize=256)
def _keys_of_queries(pattern: Pattern, block: int) -> tuple[list[int], list[list[int]]]:
    queries, keys = Axis(QUERIES, QUERIES * block), Axis(LIMITS["positions"])
    expanded, rows = pattern.expanded(), np.arange(QUERIES)
    row_step = common_row_step(expanded, queries.step, by_keys=False)  # one row agrees with itself
    offsets, parts = divide(expanded, Tiles(queries, row_step, rows, np.ones_like(rows)), keys, by_keys=False)
    return offsets.tolist(), parts.tolist()


@lru_cache(maxsize=1024)
def run_formulas(pattern: Pattern) -> tuple[str, ...] | None:
    """First key, step and end of each progression of keys that a query at p may attend to, among m keys.

    Every allowed key is in one of them; a key may also be in several, or in one and not be allowed. None where the
    pattern has data or too many clauses.

    >>> from regard.pattern import causal, every, window
    >>> run_formulas(causal() & every(64))
    ('(0) + ((0 - (0)) % 64 + 64) % 64', '64', 'minimum(m, p + 1)')
    """
    union = clauses(pattern)
    literals = (x.inner if isinstance(x, Not) else x for clause in union for x in clause)
    if len(union) > MAX_RUNS or not all(isinstance(x, Word) for x in literals):
        return None
    return tuple(text for clause in union for text in _run(_relation(clause)))


@lru_cache(maxsize=1024)
def neighbors_share_keys(pattern: Pattern) -> bool:
    """Whether the progressions of a query at p + 1 have the same residues as those of p, as in windows, but not in
    strided patterns: then several queries visit about as many keys as one."""
    relations = [_relation(clause) for clause in clauses(pattern)]
    return all(r.divisor <= r.key_class[0] for r in relations)


def _relation(clause: Iterable[Pattern]) -> Relation:
    """The words of a clause that it does not negate, as one."""
    return reduce(and_, (x.relation for x in clause if isinstance(x, Word)), Relation())


def _run(r: Relation) -> tuple[str, str, str]:
    if r.empty:  # its bounds have 64 bits
        return "0", "1", "minimum(m, 0)"
    starts, ends = ["0"], ["m"]
    if r.far < FAR:
        starts.append(f"p - {r.far}")
    if r.near > -FAR:
        ends.append(f"p + {1 - r.near}")
    if r.key_below < FAR:
        ends.append(f"{r.key_below}")
    for size in r.blocks:
        starts.append(f"p - {residue('p', size)}")
        ends.append(f"p - {residue('p', size)} + {size}")
    if r.query_below < FAR:
        ends.append(f"where(p < {r.query_below}, m, 0)")
    if r.query_class[0] > 1:
        ends.append(f"where({residue('p', r.query_class[0])} == {r.query_class[1]}, m, 0)")
    first, end = _nested("maximum", starts), _nested("minimum", ends)
    step, rest = (r.divisor, residue("p", r.divisor)) if r.divisor > r.key_class[0] else (*r.key_class,)
    if step > 1:
        first = f"({first}) + (({rest} - ({first})) % {step} + {step}) % {step}"
    return first, str(step), end


def _nested(name: str, terms: list[str]) -> str:
    return terms[0] if len(terms) == 1 else f"{name}({_nested(name, terms[:-1])}, {terms[-1]})"


def residue(name: str, k: int) -> str:
    """The remainder with the sign of k, as in Python: in C it has the sign of the position, which may be below 0."""
    return f"({name} % {k} + {k}) % {k}"


@lru_cache(maxsize=4096)
def keys_visited(pattern: Pattern, p: int, m: int) -> int:
    """How many keys the kernel reads for a query at p."""
    found = _evaluate(run_formulas(pattern) or ())(p, m)
    return sum(max(0, -(-(end - first) // step)) for first, step, end in zip(*[iter(found)] * 3))


@lru_cache(maxsize=1024)
def _evaluate(formulas: tuple[str, ...]) -> Callable[[int, int], tuple[int, ...]]:
    """The formulas as one function: to compile them at every length takes longer than the rest of a call."""
    names = {"maximum": max, "minimum": min, "where": lambda condition, a, b: a if condition else b}
    return eval(f"lambda p, m: ({''.join(f'{x}, ' for x in formulas)})", names)

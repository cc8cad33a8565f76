"""A pattern as a Triton function: `allowed(i, j)`, compiled into the kernels that need a mask."""

import hashlib
import linecache
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import triton
import triton.language as tl

from ...errors import BackendError
from ...pattern import Both, Pattern, Relation
from ...progression import FAR
from ..plan import Pass, plan, transposed


def expression(pattern: Pattern) -> str:
    """The condition on positions i and j as Triton source.

    >>> from regard.pattern import causal, every
    >>> expression(causal() & ~every(4))
    '((j <= i) & ((j % 4 == 0) == 0))'
    """
    if pattern.has_data:
        raise BackendError(
            f"{pattern!r} carries data: no Triton kernel can be made of it; backend='auto' masks it"
        )
    return pattern.fold(
        lambda word: _condition(word.relation),
        "({} & {})".format,
        "({} | {})".format,
        "({} == 0)".format,  # ~ of a truth value is not one in Triton's interpreter
    )


def _condition(r: Relation) -> str:
    """Remainders are taken of i and of j, never of i − j: a tile has rows + columns of those, not rows × columns."""
    holds = []
    if r.divisor > 1:
        holds.append(f"{_residue('i', r.divisor)} == j % {r.divisor}")
    if r.query_class[0] > 1:
        holds.append(f"{_residue('i', r.query_class[0])} == {r.query_class[1]}")
    if r.key_class[0] > 1:
        holds.append(f"j % {r.key_class[0]} == {r.key_class[1]}")
    if r.query_below < FAR:
        holds.append(f"i < {r.query_below}")
    if r.key_below < FAR:
        holds.append(f"j < {r.key_below}")
    holds += [f"i - {_residue('i', size)} == j - j % {size}" for size in r.blocks]
    if r.far < FAR:
        holds.append(f"i - j <= {r.far}")
    if r.near > -FAR:
        holds.append(f"j - i <= {-r.near}" if r.near else "j <= i")
    if len(holds) <= 1:
        return f"({holds[0] if holds else 'j == j'})"
    return f"({' & '.join(f'({one})' for one in holds)})"


def _residue(name: str, k: int) -> str:
    """The remainder with the sign of k, as in Python: Triton's has the sign of the position, which may be < 0."""
    return f"({name} % {k} + {k}) % {k}"


@lru_cache(maxsize=1024)
def compiled(pattern: Pattern) -> Any:
    """`allowed(i, j)` as a Triton function."""
    return function(
        "allowed", "i, j", expression(pattern), triton.jit, {"tl": tl}
    )  # the interpreter needs tl


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


@dataclass(frozen=True, eq=False)
class PlanPass:
    """A pass to run, and the tile members whose results count: `keep` reads members only, or is None."""

    one: Pass
    keep: Pattern | None = None


def plan_passes(
    pattern: Pattern, n: int, m: int, start: int, step: int, tile: int, by_keys: bool
) -> tuple[PlanPass, ...]:
    """The passes of a plan, without conditions on the tile's own members.

    `window(128) - every(64)` by tiles of keys is a window of which every 64th key is computed and discarded:
    otherwise each block would need a mask for a key or two, which costs more than computing those keys.
    """
    make = transposed if by_keys else plan
    out = []
    for one in make(pattern, n, m, start, step, tile).passes:
        own = [c for c in _conjuncts(one.pattern) if _reads_only(c, "j" if by_keys else "i")]
        others = [c for c in _conjuncts(one.pattern) if c not in own]
        if own and others:
            core = make(_all(others), n, m, start, step, tile)
            if len(core.passes) == 1 and core.computed <= 1.1 * one.computed:
                out.append(PlanPass(core.passes[0], _all(own)))
                continue
        out.append(PlanPass(one))
    return tuple(out)


def _conjuncts(pattern: Pattern) -> Iterator[Pattern]:
    if isinstance(pattern, Both):
        yield from _conjuncts(pattern.left)
        yield from _conjuncts(pattern.right)
    else:
        yield pattern


def _all(patterns: list[Pattern]) -> Pattern:
    out = patterns[0]
    for other in patterns[1:]:
        out = out & other
    return out


def _reads_only(pattern: Pattern, name: str) -> bool:
    return not (pattern.reads_query if name == "j" else pattern.reads_key)

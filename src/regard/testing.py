"""The laws in your own tests: one test a law, for pytest.

    # test_mine.py
    from regard.testing import laws
    from mine import my_attention

    test_my_attention = laws(my_attention)

gives test_my_attention[L01 rows sum to one], test_my_attention[L02 …], … A law that does not apply is skipped,
with the reason; one that is broken fails with the smallest counterexample and a snippet that shows it.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

from .laws.catalogue import LAWS, law
from .laws.checker import Budget, as_target, probe_target, try_law
from .laws.law import Law, Outcome


def laws(
    target: Any,
    *,
    only: Iterable[str | Law] | str | None = None,
    without: Iterable[str | Law] | str = (),
    budget: Budget | int | None = None,
) -> Callable[..., None]:
    """A test for each law, of an attention function, a module, a model, a spec or an adapter.

    As a value (`test_mine = laws(my_attention)`), or as a decorator of a function that makes the target:

        @laws
        def test_mine():
            return MyAttention(d_model=16, heads=4)

    only, without: numbers or names of laws. budget: cases a law, or a `Budget`.
    """
    import pytest

    chosen = LAWS if only is None else tuple(map(_law, _listed(only)))
    left_out = {one.number for one in map(_law, _listed(without))}
    chosen = tuple(one for one in chosen if one.number not in left_out)
    allowed = Budget(cases=budget) if isinstance(budget, int) else budget or Budget()
    known = _once(target)

    @pytest.mark.parametrize("law", chosen, ids=[f"{one.number} {one.name}" for one in chosen])
    def test(law):
        made, found, why = known()
        outcome = try_law(law, made, allowed, found=found, why=why)
        if outcome.status in ("not applicable", "not promised", "too slow"):
            pytest.skip(f"{outcome.status}: {outcome.said}")
        if outcome.failed:
            pytest.fail(report(outcome), pytrace=False)

    test.__doc__ = f"The laws of attention on {getattr(target, '__name__', type(target).__name__)}."
    return test


def report(outcome: Outcome) -> str:
    """What a failed test says."""
    one = outcome.law
    lines = [f"{one.number} {one.name}: {outcome.said}", f"  {one.formula}", f"  where: {one.domain}"]
    if outcome.counterexample is not None:
        lines.append(f"  smallest case found: {outcome.counterexample}")
    if outcome.snippet:
        lines += ["", outcome.snippet.rstrip()]
    return "\n".join(lines)


def _once(target: Any) -> Callable[[], tuple[Any, dict[str, bool], dict[str, str]]]:
    """The target and what probing it shows, found by the first test that asks and kept for the others."""

    @functools.cache
    def known():
        made = target() if _makes_one(target) else target
        made = as_target(made)
        return made, *probe_target(made)

    return known


def _makes_one(target: Any) -> bool:
    """A function of no arguments, as `@laws` is put on, gives the target; an attention takes q, k and v."""
    import inspect

    return inspect.isfunction(target) and not inspect.signature(target).parameters


def _law(one: str | Law) -> Law:
    return one if isinstance(one, Law) else law(one)


def _listed(laws: Iterable[str | Law] | str) -> list[str | Law]:
    return [laws] if isinstance(laws, str) else list(laws)

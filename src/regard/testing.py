"""The laws in your own tests: one pytest test per law.

    # test_mine.py
    from regard.testing import laws
    from mine import my_attention

    test_my_attention = laws(my_attention)

gives test_my_attention[L01 rows sum to one], test_my_attention[L02 …], … A law that does not apply is skipped
with the reason; a broken one fails with the smallest counterexample and code that reproduces it.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

from .laws.catalogue import LAWS
from .laws.checker import as_target, select
from .laws.law import Law, Outcome
from .laws.probe import Probe, probe
from .laws.run_law import Budget, try_law
from .laws.target import Target


def laws(
    target: Any,
    *,
    only: Iterable[str | Law] | str | None = None,
    without: Iterable[str | Law] | str = (),
    budget: Budget | int | None = None,
) -> Callable[..., None]:
    """One test per law for an attention function, a module, a model, a spec or an adapter.

    As a value (`test_mine = laws(my_attention)`), or as a decorator of a function that returns the target:

        @laws
        def test_mine():
            return MyAttention(d_model=16, heads=4)

    only, without: numbers or names of laws. budget: cases per law, or a `Budget`.
    """
    import pytest

    excluded = {law.number for law in select(without)}
    chosen = LAWS if only is None else select(only)
    chosen = tuple(law for law in chosen if law.number not in excluded)
    limits = Budget.of(budget)
    prepare = _prepared(target)

    @pytest.mark.parametrize("law", chosen, ids=[f"{law.number} {law.name}" for law in chosen])
    def test(law):
        adapted, probed = prepare()
        outcome = try_law(law, adapted, limits, probed=probed)
        if outcome.status in ("not applicable", "not promised", "too slow"):
            pytest.skip(f"{outcome.status}: {outcome.message}")
        if outcome.failed:
            pytest.fail(report(outcome), pytrace=False)

    test.__doc__ = f"The laws of attention on {getattr(target, '__name__', type(target).__name__)}."
    return test


def report(outcome: Outcome) -> str:
    """The message of a failed test."""
    law = outcome.law
    lines = [f"{law.number} {law.name}: {outcome.message}", f"  {law.formula}", f"  where: {law.domain}"]
    if outcome.counterexample is not None:
        lines.append(f"  smallest case found: {outcome.counterexample}")
    if outcome.snippet:
        lines += ["", outcome.snippet.rstrip()]
    return "\n".join(lines)


def _prepared(target: Any) -> Callable[[], tuple[Target, Probe]]:
    """A function that adapts and probes the target in its first call, and returns the same result afterwards."""

    @functools.cache
    def prepare() -> tuple[Target, Probe]:
        adapted = as_target(target() if _is_factory(target) else target)
        return adapted, probe(adapted)

    return prepare


def _is_factory(target: Any) -> bool:
    """Whether it is a function without parameters, which returns the target; an attention takes q, k and v."""
    import inspect

    return inspect.isfunction(target) and not inspect.signature(target).parameters

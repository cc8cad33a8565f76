"""One likely cause for everything that is wrong with a target."""

import warnings
from collections.abc import Sequence
from dataclasses import replace

from .. import search
from ..harness import Harness
from ..law import Outcome
from ..target import Function, Model, Target
from . import functions, modules
from .by_laws import FAMILIES, from_laws
from .cause import Cause
from .some_positions import SOME_POSITIONS

SECONDS = 60.0  # the time limit for finding a cause


def diagnose(target: Target, harness: Harness, outcomes: Sequence[Outcome]) -> Cause | None:
    """The likely cause of the broken laws; None if none is broken and no call shows a fault."""
    failed = [o for o in outcomes if o.failed]
    cause = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with search.time_limit(SECONDS):
                cause = _from_outputs(target, harness)
        except search.TooSlow:
            cause = None
        if not failed and cause is None:
            return None
        if cause is None or (not cause.exact and failed):
            cause = _better(cause, from_laws(harness, outcomes))
    return None if cause is None else replace(cause, laws=tuple(o.law.number for o in failed))


def _from_outputs(target: Target, harness: Harness) -> Cause | None:
    if isinstance(target, Function):
        return functions.find_cause(harness)
    if isinstance(target, Model):
        return modules.identified(harness).cause
    return None


def _better(seen: Cause | None, by_law: Cause | None) -> Cause | None:
    """The more informative cause: a symptom in the outputs, unless it only says that the outputs are wrong."""
    if seen is None or by_law is None:
        return seen or by_law
    vague = seen.name in ("outputs are wrong", "outputs are NaN or infinite") and not seen.where
    vague = vague or seen.family == SOME_POSITIONS
    says_more = by_law.family in FAMILIES and not by_law.family.startswith("outputs are wrong")
    return by_law if vague and says_more else seen

"""`check`: every law that applies, on any attention, and the outcomes. `replay`: one case of one law."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..errors import SpecError
from . import search
from .catalogue import LAWS
from .catalogue import law as find_law
from .diagnosis.cause import Cause
from .harness import DTYPES, Harness
from .law import Case, Law, Outcome
from .probe import Probe, probe
from .run_law import Budget, about, find_subject, kind_name, measure, try_law
from .target import Target
from .verdict import Verdict

MAX_TIMEOUTS = 3  # calls that do not return, after which the other laws are not tried


def check(
    target: Any,
    laws: Iterable[str | Law] | None = None,
    budget: Budget | int | None = None,
    *,
    call_seconds: float | int | None = None,
) -> Verdict:
    """Test every law on a target: an attention function, a module, a model, a spec, or your own adapter.

    laws: their numbers or names; None runs all. budget: cases per law, or a `Budget`.
    A law that does not apply is reported with the reason. A promise that the target does not claim is only observed.
    If a law is broken, the likely cause comes first: the faulty variant of attention that returns the same values.
    call_seconds: the time limit for one call of the target, 10 s by default.
    """
    chosen = LAWS if laws is None else select(laws)
    budget = Budget.of(budget)
    adapted = as_target(target)
    with _own_settings(), search.call_seconds(call_seconds):
        probed = probe(adapted)
        outcomes = tuple(_outcomes(chosen, adapted, budget, probed))
        cause = _cause(adapted, probed, outcomes)
    return Verdict(adapted, outcomes, probed, cause)


def _outcomes(chosen: Iterable[Law], target: Target, budget: Budget, probed: Probe) -> Iterator[Outcome]:
    """The laws one after another; after MAX_TIMEOUTS calls that did not return, the rest is not tried."""
    timeouts, began = 0, time.process_time()
    for law in chosen:
        if timeouts >= MAX_TIMEOUTS:
            yield Outcome(law, "too slow", f"not tried after {timeouts} calls without an answer")
            continue
        outcome = try_law(law, target, budget, probed=probed, used=time.process_time() - began)
        timeouts += search.TIMEOUT_WORDS in outcome.message
        yield outcome


def _cause(target: Target, probed: Probe, outcomes: tuple[Outcome, ...]) -> Cause | None:
    """The likely cause if a law failed; None if only time limits failed, or if no ordinary call works."""
    if not any(o.failed for o in outcomes):
        return None
    if all(search.TIMEOUT_WORDS in o.message for o in outcomes if o.failed):
        return None
    harness = Harness(target, probed.supported, cache=probed.cache)
    if not any(harness.supports(name) for name in DTYPES):
        return None
    from .diagnosis.diagnose import diagnose

    return diagnose(target, harness, outcomes)


def select(laws: Iterable[str | Law] | str | Law) -> tuple[Law, ...]:
    """Laws from their numbers or names; a single number or name selects one law."""
    names = [laws] if isinstance(laws, str | Law) else laws
    return tuple(x if isinstance(x, Law) else find_law(x) for x in names)


@contextmanager
def _own_settings() -> Iterator[None]:
    """One thread: cases are small, and on a busy machine two synchronizing threads take ten times as long. Gradients,
    which some laws are about, also if the caller has turned them off."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.set_num_threads(threads)


def as_target(thing: Any) -> Target:
    """The thing itself if it is a target, else the target that an adapter builds from it."""
    if isinstance(thing, Target):
        return thing
    from .adapters import adapt  # a slow import, which a finished target does not need

    return adapt(thing)


def replay(number: str, target: Any, **case: Any) -> str:
    """Run one case of one law again and describe what it measured."""
    law, adapted = find_law(number), as_target(target)
    subject = find_subject(law, adapted)
    if subject is None:
        raise SpecError(f"{law.number} is about {about(law)}; {adapted.name} is {kind_name(adapted)}")
    with _own_settings():
        probed = probe(adapted)
        harness = Harness(subject, probed.supported, cache=probed.cache)
        measurement = measure(law.trials[subject.kind], harness, Case(case))
    tolerance = law.tolerance.for_dtype(harness.dtype)
    status = "holds" if measurement.rank <= tolerance else "is broken"
    return (
        f"{law.number} {law.name} {status} on {adapted.name}: {measurement.message}\n"
        f"  {law.formula}\n  error {measurement.error:.3g}, tolerance {tolerance:g}, {Case(case)}"
    )

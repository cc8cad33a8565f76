"""`check`: every law that applies, on any attention, and the outcomes. `replay`: one case of one law."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..errors import SpecError
from .catalogue import LAWS
from .catalogue import law as find_law
from .harness import Harness
from .judge import Budget, about, find_subject, kind_name, measure, try_law
from .law import Case, Law
from .probe import probe
from .target import Target
from .verdict import Verdict


def check(
    target: Any, laws: Iterable[str | Law] | None = None, budget: Budget | int | None = None
) -> Verdict:
    """Test every law on a target: an attention function, a module, a model, a spec, or your own adapter.

    laws: their numbers or names; None is all. budget: cases per law, or a `Budget`.
    A law that does not apply is reported with the reason. A promise that the target does not claim is only observed.
    """
    chosen = LAWS if laws is None else select(laws)
    budget = Budget(cases=budget) if isinstance(budget, int) else budget or Budget()
    adapted = as_target(target)
    with _one_thread():
        probed = probe(adapted)
        outcomes = tuple(try_law(law, adapted, budget, probed=probed) for law in chosen)
    return Verdict(adapted, outcomes, probed)


def select(laws: Iterable[str | Law] | str | Law) -> tuple[Law, ...]:
    """Laws from their numbers or names; a single number or name selects one law."""
    names = [laws] if isinstance(laws, str | Law) else laws
    return tuple(x if isinstance(x, Law) else find_law(x) for x in names)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Cases are small: on a busy machine two synchronizing threads take ten times as long as one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def as_target(thing: Any) -> Target:
    """The thing itself if it is a target, else the target that an adapter makes of it."""
    if isinstance(thing, Target):
        return thing
    from .adapters import adapt  # imports adapters of many libraries, which a ready target does not need

    return adapt(thing)


def replay(number: str, target: Any, **case: Any) -> str:
    """Run one case of one law again and describe what it measured."""
    law, adapted = find_law(number), as_target(target)
    subject = find_subject(law, adapted)
    if subject is None:
        raise SpecError(f"{law.number} is about {about(law)}; {adapted.name} is {kind_name(adapted)}")
    harness = Harness(subject, probe(adapted).supported)
    measurement = measure(law.trials[subject.kind], harness, Case(case))
    tolerance = law.tolerance.for_dtype(harness.dtype)
    status = "holds" if measurement.rank <= tolerance else "is broken"
    return (
        f"{law.number} {law.name} {status} on {adapted.name}: {measurement.message}\n"
        f"  {law.formula}\n  error {measurement.error:.3g}, tolerance {tolerance:g}, {Case(case)}"
    )

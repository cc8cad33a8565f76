"""`check`: every law that applies, on anyone's attention, and what came of it."""

import inspect
import math
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import SpecError
from . import search
from .catalogue import LAWS, law
from .harness import DTYPES, Lab, WrongShape, first_line, probe
from .law import Case, Law, Outcome, Reading, Trial
from .parts import found_in
from .target import NAMED, Function, Model, Target
from .verdict import Verdict

SHRINKING = 4.0  # seconds for the search of a smaller counterexample
NEUTRAL = ("torch", "einops", "jaxtyping", "beartype", "<")  # whose frames say nothing about who called
PROBING = 60.0  # seconds for finding out what a target takes


@dataclass(frozen=True)
class Budget:
    """How long to look: so many cases a law, so many seconds a law. Sampled laws take `seeds` draws."""

    cases: int = 40
    seconds: float = 8.0
    seeds: int = 1

    def __post_init__(self):
        if self.cases < 1 or self.seeds < 1 or self.seconds <= 0:
            raise SpecError(f"{self!r}: cases and seeds need to be at least 1, seconds above 0")


def check(
    target: Any, laws: Iterable[str | Law] | None = None, budget: Budget | int | None = None
) -> Verdict:
    """Try every law on a target: an attention function, a module, a model, a spec, or an adapter of one's own.

    laws: their numbers or names; None is all. budget: cases a law, or a `Budget`.
    A law outside its domain is not applicable, with the reason; a promise nobody made is only observed.
    """
    chosen = LAWS if laws is None else tuple(x if isinstance(x, Law) else law(x) for x in _listed(laws))
    budget = Budget(cases=budget) if isinstance(budget, int) else budget or Budget()
    known = as_target(target)
    with _one_thread():
        found, why = probe_target(known)
        outcomes = tuple(try_law(one, known, budget, found=found, why=why) for one in chosen)
    return Verdict(known, outcomes, found, why)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Cases are small: on a busy machine two threads waiting for one another take ten times as long as one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _listed(laws: Iterable[str | Law] | str | Law) -> list[str | Law]:
    return [laws] if isinstance(laws, str | Law) else list(laws)


def as_target(thing: Any) -> Target:
    """What a thing is to a law: the target itself, or the one an adapter makes of it."""
    if isinstance(thing, Target):
        return thing
    from .adapters import adapt  # knows many libraries, and none of them is needed for a target

    return adapt(thing)


def probe_target(target: Target) -> tuple[dict[str, bool], dict[str, str]]:
    """What a target takes beyond what it says, and why not where it does not; within a minute."""
    if refusal := _no_device(target):
        return {}, {"device": refusal}
    with search.time_limit(PROBING), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return probe(target)
        except search.TooSlow:
            return {}, {"float32": f"no answer within {PROBING:.0f} s"}


def _no_device(target: Target) -> str | None:
    kind = target.device.partition(":")[0]
    if kind == "cuda" and not torch.cuda.is_available():
        return "needs a CUDA device, and this machine has none"
    return None


def try_law(
    one: Law,
    target: Target,
    budget: Budget | None = None,
    *,
    seed: int = 0,
    found: dict[str, bool] | None = None,
    why: dict[str, str] | None = None,
) -> Outcome:
    """One law on one target."""
    budget = budget or Budget()
    if found is None or why is None:
        found, why = probe_target(target)
    if refusal := _no_device(target):
        return Outcome(one, "not applicable", refusal)
    lab = Lab(target, found)
    place = _place(one, target)
    if place is None:
        return Outcome(one, "not applicable", f"it is about {about(one)}, and this is {_named(target)}")
    trial, lab = one.on[place[0]], lab if place[1] is target else Lab(place[1], {"float64": True})
    if not any(lab.takes(name) for name in DTYPES):
        return Outcome(one, "raised", _no_answer(why))
    if reason := _outside(one, trial, lab):
        return Outcome(one, "not applicable", reason)
    claimed = one.promise is None or target.says(one.promise) is True
    if not claimed and one.promise is not None and target.says(one.promise) is False:
        return Outcome(one, "not promised", "said to be lacking; not tried")
    outcome = _tried(one, trial, lab, budget, seed)
    return outcome if claimed else _observed(outcome)


def _no_answer(why: dict[str, str]) -> str:
    """What a target said to an ordinary call, where it takes none."""
    return f"an ordinary call failed: {why.get('float32', 'nothing could be tried')}"


def _place(one: Law, target: Target) -> tuple[str, Target] | None:
    """Under which kind the law is tried, and on what: the target, or a part found in it."""
    if target.kind in one.on:
        return target.kind, target
    if isinstance(target, Model):
        for part in found_in(target):
            if part.kind in one.on:
                return part.kind, part
    return None


def _named(target: Target) -> str:
    kind = target.of if isinstance(target, Model) else target.kind
    return NAMED.get(kind, kind)


def about(one: Law) -> str:
    """The kinds of target a law speaks of, in words."""
    *most, last = [NAMED.get(kind, kind) for kind in one.on]
    return f"{', '.join(most)} or {last}" if most else last


def _outside(one: Law, trial: Trial, lab: Lab) -> str | None:
    """Why this law says nothing about this target; None if it does."""
    for need in trial.needs:
        words = need.split("|")
        if not any(lab.takes(w) for w in words):
            denied = all(lab.target.says(w) is False for w in words)
            tried = any(w in lab.found for w in words)
            how = "is said to be lacking" if denied else "does not work" if tried else "is not claimed"
            return f"needs {' or '.join(repr(w) for w in words)}, which {how}"
    for word in trial.avoids:
        if lab.takes(word):
            return f"it does not hold for a target with {word!r}"
    return trial.when(lab)


def _tried(one: Law, trial: Trial, lab: Lab, budget: Budget, seed: int) -> Outcome:
    began = time.monotonic()
    limit = max(lab.target.seconds or budget.seconds, trial.seconds)
    space = trial.space(lab)

    def fits(c: Case) -> bool:
        own = trial.fits is None or trial.fits(c)
        return own and (lab.target.kind != "function" or "n" not in c or lab.fits(c))

    tolerance = one.tolerance.of(lab.dtype)
    wanted = budget.seeds if trial.few else budget.cases
    state: dict[str, Any] = {"cases": 0, "worst": Reading(0.0, ""), "case": None}
    mistake: Exception | None = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with search.time_limit(limit * 3):
                _draw(
                    state,
                    trial,
                    lab,
                    search.cases(space, fits, seed, trial.few),
                    wanted,
                    tolerance,
                    began + limit,
                )
        except search.TooSlow:
            return Outcome(one, "too slow", f"no answer within {limit * 3:.0f} s", state["cases"], seed=seed)
        except Exception as e:  # a stranger's code may raise anything
            mistake = e
    if mistake is not None:
        return _raised(one, mistake, state, lab, began, seed)
    reading, case = state["worst"], state["case"]
    common: dict[str, Any] = {
        "tolerance": tolerance,
        "seed": seed,
        "dtype": str(lab.dtype).removeprefix("torch."),
    }
    if state["cases"] == 0:
        return Outcome(one, "not applicable", "no case fits what this target takes", **common)
    if reading.rank <= tolerance:
        return Outcome(
            one,
            "holds",
            reading.what if trial.tells else "",
            state["cases"],
            reading.error,
            seconds=time.monotonic() - began,
            **common,
        )
    if not trial.few:
        case, reading = _shrunk(trial, lab, case, reading, space, fits, tolerance)
    said = f"{reading.what} (error {reading.error:.2g}, tolerance {tolerance:.0e})"
    return Outcome(
        one,
        "broken",
        said,
        state["cases"],
        reading.error,
        counterexample=case,
        seconds=time.monotonic() - began,
        snippet=snippet(one, lab.target, case),
        **common,
    )


def _draw(state, trial: Trial, lab: Lab, drawn, wanted: int, tolerance: float, until: float) -> None:
    """Run cases until enough hold, one breaks, or time is up; `state` keeps count in case of a raise."""
    for case in drawn:
        if state["cases"] >= wanted or (state["cases"] and time.monotonic() > until):
            return
        state["case"] = case
        reading = measure(trial, lab, case)
        state["cases"] += 1
        if reading.rank > state["worst"].rank or not state["worst"].what:
            state["worst"] = reading
        if reading.rank > tolerance:
            state["worst"] = reading
            return


def measure(trial: Trial, lab: Lab, case: Case) -> Reading:
    lab.begin(case)
    return trial.run(lab, case)


def _shrunk(trial, lab, case, reading, space, fits, tolerance) -> tuple[Case, Reading]:
    def breaks(c: Case) -> bool:
        try:
            return measure(trial, lab, c).rank > tolerance
        except search.TooSlow:
            raise
        except Exception:  # another fault than the one looked for
            return False

    try:
        with warnings.catch_warnings(), search.time_limit(2 * SHRINKING):
            warnings.simplefilter("ignore")
            small = search.smallest(case, space, fits, breaks, time.monotonic() + SHRINKING)
            again = measure(trial, lab, small)
    except search.TooSlow:
        return case, reading
    return (
        (small, again) if again.rank > tolerance else (case, reading)
    )  # a target that draws lots may not repeat


def _raised(one: Law, e: Exception, state, lab: Lab, began: float, seed: int) -> Outcome:
    case = state["case"]
    if _is_ours(e):  # in tests a warning is an error
        warnings.warn(
            f"{one.number} {one.name} made a mistake of its own on {case}: {first_line(e)}", stacklevel=5
        )
        return Outcome(one, "not applicable", f"the law itself failed, please report it: {first_line(e)}")
    what = f"gave the wrong shape: {e}" if isinstance(e, WrongShape) else f"raised {first_line(e)}"
    return Outcome(
        one,
        "raised",
        f"{what}; case {case}",
        state["cases"],
        math.nan,
        seed=seed,
        dtype=str(lab.dtype).removeprefix("torch."),
        counterexample=case,
        seconds=time.monotonic() - began,
        snippet=snippet(one, lab.target, case),
    )


def _is_ours(e: Exception) -> bool:
    """Whether a law itself made the mistake: neither the target nor autograd was at work when it was raised."""
    if isinstance(e, WrongShape):
        return False
    here = str(Path(__file__).parent)
    for frame in traceback.extract_tb(e.__traceback__):
        file, inside = frame.filename, frame.filename.startswith(here)
        if inside and (frame.name in ("attend", "attend_lse", "run") or "adapters" in file):
            return False
        if "autograd" in file or not (inside or any(name in file for name in NEUTRAL)):
            return False
    return True


def _observed(outcome: Outcome) -> Outcome:
    """What is only observed: it holds or not, and nobody promised it."""
    match outcome.status:
        case "holds":
            said = f"observed: holds in {outcome.cases} cases"
        case "broken":
            said = f"observed: {outcome.said}"
        case "raised":
            said = f"observed: {outcome.said}"
        case _:
            return outcome
    return outcome._replace(status="not promised", said=said)


def snippet(one: Law, target: Target, case: Case) -> str:
    """Python that runs this case again and prints what is wrong."""
    lines = ["import regard as rg", "from regard.laws import replay"]
    if target.imports:
        lines.append(target.imports)
    source = target.source or _importable(target)
    if source is None:
        lines += ["", f"target = ...  # {target.name}: the one that was checked"]
    else:
        lines += (
            [*source[0], "", f"target = {source[1]}"]
            if isinstance(source, tuple)
            else ["", f"target = {source}"]
        )
    fields = ", ".join(f"{k}={v!r}" for k, v in case.items())
    lines += [f"print(replay({one.number!r}, target, {fields}))  # {one.name}: {one.formula}"]
    return "\n".join(lines) + "\n"


def _importable(target: Target) -> tuple[list[str], str] | None:
    """A function that can be imported by name says where it is from."""
    call = target.call if isinstance(target, Function) else None
    raw = getattr(call, "__wrapped__", call)
    name, module = getattr(raw, "__qualname__", None), inspect.getmodule(raw) if raw is not None else None
    if name is None or module is None or "<" in name or module.__name__.startswith("regard."):
        return None
    return [f"from {module.__name__} import {name.split('.')[0]}"], name


def replay(number: str, target: Any, **case: Any) -> str:
    """One case of one law again: what it measured, in words."""
    one, known = law(number), as_target(target)
    found, _ = probe_target(known)
    place = _place(one, known)
    if place is None:
        raise SpecError(f"{one.number} is about {about(one)}, and {known.name} is {_named(known)}")
    lab = Lab(place[1], found)
    reading = measure(one.on[place[0]], lab, Case(case))
    tolerance = one.tolerance.of(lab.dtype)
    verdict = "holds" if reading.rank <= tolerance else "is broken"
    return (
        f"{one.number} {one.name} {verdict} on {known.name}: {reading.what}\n"
        f"  {one.formula}\n  error {reading.error:.3g}, tolerance {tolerance:.0e}, {Case(case)}"
    )


def laws_of(kinds: Sequence[str]) -> tuple[Law, ...]:
    """The laws that say something about any of these kinds."""
    return tuple(one for one in LAWS if any(k in one.on for k in kinds))

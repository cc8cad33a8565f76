"""One law on one target: sample cases, measure them, shrink the first that breaks the law, and state the outcome."""

import math
import time
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path

from ..errors import SpecError
from . import search
from .harness import DTYPES, Harness, Inexpressible, WrongOutput
from .law import Case, Law, Outcome, Trial
from .measurement import Measurement
from .parts import parts_of
from .probe import Probe, describe, missing_device, probe
from .snippet import snippet
from .target import KIND_NAMES, Function, Model, Target

MAX_INEXPRESSIBLE = 300  # cases that the target's arguments cannot express before sampling stops
MIN_SECONDS = 0.2  # for the cases of a law if the laws before it have used up the time of the check
HEAVY_SHARE = 0.4  # of the time limit of a call, for one with many samples
SHRINK_SECONDS = 4.0  # the time limit for the search of a smaller counterexample
NEUTRAL_FILES = (
    "torch",
    "einops",
    "jaxtyping",
    "beartype",
    "<",
)  # frames that belong to neither law nor target


ALWAYS_CAUSAL = (  # laws that apply to a function of which every call is causal, has a window or adds positions
    *("L29", "L48", "L50", "L51", "L56", "L57", "L60", "L61", "L62", "L65", "P04", "P05", "P08", "P09"),
)


@dataclass(frozen=True)
class Budget:
    """How much to test: cases per law, seconds per law, and processor seconds for all laws of a check.

    Sampled laws run `seeds` cases instead. If a slow target uses up `total`, the remaining laws get fewer cases.
    """

    cases: int = 40
    seconds: float = 8.0
    seeds: int = 1
    total: float = 12.0

    def __post_init__(self):
        if self.cases < 1 or self.seeds < 1 or self.seconds <= 0 or self.total <= 0:
            raise SpecError(f"{self!r}: cases and seeds need to be at least 1, seconds and total above 0")

    @classmethod
    def of(cls, given: "Budget | int | None") -> "Budget":
        """A budget, or a number of cases."""
        if given is None or isinstance(given, Budget):
            return given or cls()
        if not isinstance(given, int) or isinstance(given, bool):
            raise SpecError(f"budget={given!r} is neither a number of cases per law nor a regard.laws.Budget")
        return cls(cases=given)

    def share(self, used: float) -> float:
        """Seconds for the cases of the next law, given the seconds of the total that earlier laws have used."""
        return min(self.seconds, max(MIN_SECONDS, (self.total - used) / 4))


def try_law(
    law: Law,
    target: Target,
    budget: Budget | None = None,
    *,
    seed: int = 0,
    probed: Probe | None = None,
    used: float = 0.0,
) -> Outcome:
    """The outcome of one law on one target. probed: what probing the target showed; None probes it first.

    used: the processor seconds of the budget that earlier laws have used.
    """
    budget = budget or Budget()
    if refusal := missing_device(target):
        return Outcome(law, "not applicable", refusal)
    probed = probe(target) if probed is None else probed
    subject = find_subject(law, target)
    if subject is None:
        return Outcome(law, "not applicable", f"the law is about {about(law)}; this is {kind_name(target)}")
    trial = law.trials[subject.kind]
    supported = probed.supported if subject is target else {"float64": True}
    harness = Harness(subject, supported, cache=probed.cache if subject is target else None)
    if not any(harness.supports(name) for name in DTYPES):
        error = probed.errors.get("float32", "nothing could be tried")
        return Outcome(law, "raised", f"an ordinary call failed: {error}")
    always = ""
    if subject is target and isinstance(target, Function):
        always = "positions; this always adds positions" if target.positions else ""
        always = "a mask; this is always causal" if harness.supports("always causal") else always
        always = "a mask; this always has a window" if harness.fixed_window is not None else always
    if always and law.number not in ALWAYS_CAUSAL:
        return Outcome(law, "not applicable", f"the law needs calls without {always}")
    if reason := _inapplicable(trial, harness, probed):
        return Outcome(law, "not applicable", reason)
    promised = law.promise is None or target.declares(law.promise) is True
    if law.promise is not None and target.declares(law.promise) is False:
        return Outcome(law, "not promised", "declared as lacking; not tested")
    outcome = _Run(law, trial, harness, seed).outcome(budget, used)
    return outcome if promised else _observed(outcome)


def find_subject(law: Law, target: Target) -> Target | None:
    """What the law is tested on: the target itself, or the first part inside a model that it applies to."""
    if target.kind in law.trials:
        return target
    if isinstance(target, Model):
        return next((part for part in parts_of(target) if part.kind in law.trials), None)
    return None


def kind_name(target: Target) -> str:
    kind = target.architecture if isinstance(target, Model) else target.kind
    return KIND_NAMES.get(kind, kind)


def about(law: Law) -> str:
    """The kinds of target that a law applies to, in words."""
    *others, last = [KIND_NAMES.get(kind, kind) for kind in law.trials]
    return f"{', '.join(others)} or {last}" if others else last


def _inapplicable(trial: Trial, harness: Harness, probed: Probe) -> str | None:
    """Why the law does not apply to this target; None if it does."""
    for need in trial.needs:
        names = need.split("|")
        if any(harness.supports(name) for name in names):
            continue
        wanted = " or ".join(repr(name) for name in names)
        errors = [probed.errors[name] for name in names if name in probed.errors]
        if all(harness.target.declares(name) is False for name in names):
            return f"needs {wanted}, which the target declares as lacking"
        return (
            f"needs {wanted}: {errors[0]}" if errors else f"needs {wanted}, which the target does not claim"
        )
    for name in trial.avoids:
        if harness.supports(name):
            return f"it does not apply to a target with {name!r}"
    return trial.unless(harness)


def measure(trial: Trial, harness: Harness, case: Case) -> Measurement:
    harness.seed(case)
    return trial.run(harness, case)


class _Run:
    """Runs the cases of one law on one target; it stores the current case, to report it with an exception."""

    def __init__(self, law: Law, trial: Trial, harness: Harness, seed: int):
        self.law, self.trial, self.harness, self.seed = law, trial, harness, seed
        self.space = trial.space(harness)
        self.tolerance = law.tolerance.for_dtype(harness.dtype)
        self.began = time.monotonic()
        self.cases = 0
        self.skipped = 0
        self.case: Case | None = None  # the one that is running
        self.worst = Measurement(0.0, "")

    def outcome(self, budget: Budget, used: float = 0.0) -> Outcome:
        limit = max(self.harness.target.seconds or budget.seconds, self.trial.seconds)
        until = time.process_time() + max(min(limit, budget.share(used)), self.trial.seconds)
        wanted = budget.seeds if self.trial.per_seed else budget.cases
        error: Exception | None = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                call_limit = search.CALL_SECONDS * (HEAVY_SHARE if self.trial.heavy else 1)
                with search.time_limit(limit * 3), search.call_seconds(call_limit):
                    self._sample(wanted, until)
            except search.TooSlow:
                message = f"no answer within {limit * 3:.0f} s"
                return Outcome(self.law, "too slow", message, self.cases, seed=self.seed)
            except Exception as e:  # the target is foreign code, which may raise anything
                error = e
        if error is not None:
            return self._raised(error)
        if self.cases == 0:
            return self._result("not applicable", "no case fits what this target supports")
        if self.worst.rank <= self.tolerance:
            return self._result("holds", self.worst.message if self.trial.always_report else "")
        assert self.case is not None
        case, measurement = self.case, self.worst
        if not self.trial.per_seed:
            case, measurement = self._shrink(case, measurement)
        message = measurement.message
        if math.isfinite(measurement.error):  # a violated statement or a NaN has no finite error
            message += f" (error {measurement.error:.2g}, tolerance {self.tolerance:g})"
        return self._result("broken", message, measurement.error, case)

    def _sample(self, wanted: int, until: float) -> None:
        """Run cases until enough of them hold, one breaks the law, or the processor time is up."""
        for case in search.cases(self.space, self._fits, self.seed, self.trial.per_seed):
            if self.cases >= wanted or (self.cases and time.process_time() > until):
                return
            self.case = case
            try:
                measurement = measure(self.trial, self.harness, case)
            except Inexpressible:
                self.skipped += 1
                if self.skipped > MAX_INEXPRESSIBLE:
                    return
                continue
            self.cases += 1
            if measurement.rank > self.worst.rank or not self.worst.message:
                self.worst = measurement
            if measurement.rank > self.tolerance:
                self.worst = measurement
                return

    def _fits(self, c: Case) -> bool:
        own = self.trial.fits is None or self.trial.fits(c)
        return own and (self.harness.target.kind != "function" or "n" not in c or self.harness.fits(c))

    def _shrink(self, case: Case, measurement: Measurement) -> tuple[Case, Measurement]:
        def breaks(c: Case) -> bool:
            try:
                return measure(self.trial, self.harness, c).rank > self.tolerance
            except search.TooSlow:
                raise
            except Exception:  # a different fault than the one being shrunk
                return False

        try:
            with warnings.catch_warnings(), search.time_limit(2 * SHRINK_SECONDS):
                warnings.simplefilter("ignore")
                until = time.monotonic() + SHRINK_SECONDS
                small = search.smallest(case, self.space, self._fits, breaks, until)
                repeated = measure(self.trial, self.harness, small)
        except search.TooSlow:
            return case, measurement
        # A target that is not deterministic may not repeat its error; then the first case is reported.
        return (small, repeated) if repeated.rank > self.tolerance else (case, measurement)

    def _raised(self, e: Exception) -> Outcome:
        if isinstance(e, search.CallTooSlow) and self.trial.heavy:
            return Outcome(
                self.law, "too slow", "one call of this law has many samples", self.cases, seed=self.seed
            )
        if _is_law_bug(e):
            warnings.warn(
                f"{self.law.number} {self.law.name} has a bug, on case {self.case}: {describe(e)}",
                stacklevel=5,
            )
            message = f"the law itself failed, please report it: {describe(e)}"
            return Outcome(self.law, "not applicable", message)
        error = describe(e) if isinstance(e, WrongOutput | search.CallTooSlow) else f"raised {describe(e)}"
        return self._result("raised", f"{error}; case {self.case}", math.nan, self.case)

    def _result(
        self, status: str, message: str, error: float | None = None, case: Case | None = None
    ) -> Outcome:
        ran = self.cases > 0 or status == "raised"
        return Outcome(
            self.law,
            status,
            message,
            self.cases,
            self.worst.error if error is None else error,
            0.0 if status == "raised" else self.tolerance,
            self.seed,
            str(self.harness.dtype).removeprefix("torch."),
            case,
            time.monotonic() - self.began if ran else 0.0,
            "" if case is None else snippet(self.law, self.harness.target, case),
        )


def _is_law_bug(e: Exception) -> bool:
    """Whether the law itself raised, while neither the target nor autograd was running."""
    if isinstance(e, WrongOutput | search.CallTooSlow):
        return False
    here = str(Path(__file__).parent)
    for frame in traceback.extract_tb(e.__traceback__):
        file, inside = frame.filename, frame.filename.startswith(here)
        if inside and (frame.name in ("attend", "attend_lse", "run", "_timed") or "adapters" in file):
            return False
        if "autograd" in file or not (inside or any(name in file for name in NEUTRAL_FILES)):
            return False
    return True


def _observed(outcome: Outcome) -> Outcome:
    """The outcome of a promise that the target does not make: reported, never counted as broken."""
    if outcome.status == "holds":
        message = f"observed: holds in {outcome.cases} cases"
    elif outcome.failed:
        message = f"observed: {outcome.message}"
    else:
        return outcome
    return outcome._replace(status="not promised", message=message)

"""A law as data: its statement, where it applies, how it is tested, and a control that must fail.

A law applies to kinds of target. For each kind it has a `Trial`: the capabilities it needs, the space of cases, and a
function that measures one case. `run_law.py` samples cases, measures them and shrinks the ones that break the law.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .measurement import Measurement

if TYPE_CHECKING:
    from .harness import Harness
    from .target import Target

Space = Mapping[str, Sequence[Any]]  # field of a case → its possible values, the simplest first


class Tolerance(NamedTuple):
    """The largest error that counts as rounding, by dtype. Law L60 bounds 16-bit errors relative to plain PyTorch."""

    float64: float = 1e-12
    float32: float = 1e-5
    half: float = 2e-2

    def for_dtype(self, dtype: torch.dtype) -> float:
        return {torch.float64: self.float64, torch.float32: self.float32}.get(dtype, self.half)


class Case(dict):
    """The fields of one case, by name; `seed` determines its random tensors. Prints as the arguments of a call."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"this case has no {name}; its fields are {', '.join(self)}") from None

    def __str__(self) -> str:
        return ", ".join(f"{k}={v!r}" for k, v in self.items())


@dataclass(frozen=True)
class Trial:
    """How a law is tested on one kind of target.

    needs: capabilities without which the law does not apply ("a|b": either). avoids: capabilities that exclude it.
    space: the fields of a case for this target. fits: which combinations of fields are valid cases.
    run: measures one case.
    """

    run: "Callable[[Harness, Case], Measurement]"
    space: "Callable[[Harness], Space]"
    needs: tuple[str, ...] = ()
    avoids: tuple[str, ...] = ()
    fits: Callable[[Case], bool] | None = None
    unless: "Callable[[Harness], str | None]" = lambda harness: None  # a further reason why it does not apply
    per_seed: bool = False  # run `Budget.seeds` cases, not `Budget.cases`: for sampled or expensive laws
    seconds: float = 0.0  # a lower bound on the time limit, for laws whose single case is slow
    heavy: bool = False  # many samples in one call: a call that does not return is too slow, not wrong
    always_report: bool = False  # show the message of the measurement even if the law holds


@dataclass(frozen=True)
class Law:
    """One law. With `promise`, a capability, it is required of targets that claim it and only observed of others."""

    number: str  # L01 to L46 as in the ledger, L47 and up for common bugs, P01 and up for promises
    name: str
    formula: str
    domain: str  # where it applies, in words
    trials: Mapping[str, Trial]  # kind of target → how it is tested
    control: "Callable[[], Target]"  # a target that must be reported as broken
    tolerance: Tolerance = field(default_factory=Tolerance)
    promise: str | None = None

    @property
    def kinds(self) -> str:
        return ", ".join(self.trials)


STATUSES = ("holds", "broken", "not applicable", "not promised", "raised", "too slow")


class Outcome(NamedTuple):
    """The result of one law on one target."""

    law: Law
    status: str  # one of STATUSES
    message: str = ""  # the reason, the observation or the error
    cases: int = 0
    worst: float = 0.0  # the largest error measured
    tolerance: float = 0.0
    seed: int = 0
    dtype: str = ""
    counterexample: Case | None = None
    seconds: float = 0.0
    snippet: str = ""

    @property
    def failed(self) -> bool:
        return self.status in ("broken", "raised")

    @property
    def ran(self) -> bool:
        return self.status in ("holds", "broken")

    def plain(self) -> dict[str, Any]:
        """Numbers and strings, for JSON."""
        law = {"number": self.law.number, "name": self.law.name, "formula": self.law.formula}
        fields = {k: v for k, v in self._asdict().items() if k not in ("law", "counterexample")}
        fields = {
            k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()
        }
        case = None if self.counterexample is None else {k: _plain(v) for k, v in self.counterexample.items()}
        return {**law, "promise": self.law.promise, **fields, "counterexample": case}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return value if isinstance(value, int | float | str) else str(value)

"""A law as data: what must hold, where, how it is tried, and the control that must fail.

A law holds for kinds of target. For each kind it has a `Trial`: the claims without which the law says nothing, the
space of cases, and a run that measures one case. `checker.py` draws cases, runs them and shrinks what breaks.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .harness import Lab
    from .target import Target

Space = Mapping[str, Sequence[Any]]  # a field of a case → its values, the simplest first


class Tolerance(NamedTuple):
    """The largest error that is still none, by dtype. 16-bit errors follow the rule of DESIGN.md, not a number."""

    float64: float = 1e-12
    float32: float = 1e-5
    half: float = 2e-2

    def of(self, dtype: torch.dtype) -> float:
        return {torch.float64: self.float64, torch.float32: self.float32}.get(dtype, self.half)


class Case(dict):
    """The fields of one case, by name; `seed` draws its tensors. Prints as the arguments of a call."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"this case has no {name}; it has {', '.join(self)}") from None

    def __str__(self) -> str:
        return ", ".join(f"{k}={v!r}" for k, v in self.items())


class Reading(NamedTuple):
    """What one case measured: the error, in units the tolerance is given in, and what it is the error of."""

    error: float
    what: str

    @property
    def rank(self) -> float:
        return math.inf if math.isnan(self.error) else self.error


def worst(*readings: Reading) -> Reading:
    return max(readings, key=lambda r: r.rank)


def together(*readings: Reading) -> Reading:
    """The worst, with the words of all that are more than rounding."""
    wrong = [r.what for r in readings if r.rank > 1e-4]
    return Reading(worst(*readings).error, "; ".join(wrong)) if wrong else worst(*readings)


def compare(what: str, got: Tensor, want: Tensor, slack: float = 1.0) -> Reading:
    """max|got − want| / max(1, max|want|), over slack: how many times the law's tolerance this quantity may have."""
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    if got.shape != want.shape:
        return Reading(math.inf, f"{what}: shape {tuple(got.shape)} for {tuple(want.shape)}")
    if got.numel() == 0:
        return Reading(0.0, what)
    if not bool(torch.isfinite(got).all()):
        same = bool(((got == want) | (got.isnan() & want.isnan()))[~torch.isfinite(got)].all())
        if not same:
            return Reading(math.nan, f"{what}: {_not_finite(got)}")
        got, want = (torch.where(torch.isfinite(x), x, 0.0) for x in (got, want))
    far = (got - want).abs()
    size = want[torch.isfinite(want)].abs().amax().item() if bool(torch.isfinite(want).any()) else 0.0
    where = tuple(int(i) for i in torch.unravel_index(far.argmax(), far.shape))
    text = f"{what}: {got[where].item():.6g} for {want[where].item():.6g} at {list(where)}"
    return Reading(far.amax().item() / max(1.0, size) / slack, text)


def gradients(o: Tensor, over: tuple[Tensor, ...], towards: Tensor) -> tuple[Tensor, ...]:
    """The gradient of ⟨o, towards⟩; a tensor that gets none gets zeros."""
    if not o.requires_grad:
        return tuple(torch.zeros_like(x) for x in over)
    given = torch.autograd.grad((o * towards.to(o.dtype)).sum(), over, allow_unused=True)
    return tuple(torch.zeros_like(x) if g is None else g for g, x in zip(given, over))


def bounded(what: str, excess: Tensor | float, slack: float = 1.0) -> Reading:
    """An inequality: how far it is exceeded, 0 where it holds."""
    largest = float(torch.as_tensor(excess, dtype=torch.float64).max())
    return Reading(largest if math.isnan(largest) else max(0.0, largest) / slack, what)


def exactly(what: str, ok: bool | Tensor) -> Reading:
    """A statement that holds or does not: no tolerance saves it."""
    return Reading(0.0 if bool(torch.as_tensor(ok).all()) else math.inf, what)


def _not_finite(x: Tensor) -> str:
    nans, infs = int(x.isnan().sum()), int(x.isinf().sum())
    parts = [f"{count} {word}" for count, word in ((nans, "NaN"), (infs, "infinite")) if count]
    return f"{' and '.join(parts)} of {x.numel()} numbers"


@dataclass(frozen=True)
class Trial:
    """How a law is tried on one kind of target.

    needs: claims (an "a|b" is either); without them the law is not applicable. avoids: claims that exclude it.
    space: the fields of a case for this target (the lab says what it can take). fits: which combinations are cases.
    run: measures one case.
    """

    run: "Callable[[Lab, Case], Reading]"
    space: "Callable[[Lab], Space]"
    needs: tuple[str, ...] = ()
    avoids: tuple[str, ...] = ()
    fits: Callable[[Case], bool] | None = None
    when: "Callable[[Lab], str | None]" = lambda lab: None  # a further reason why not
    few: bool = False  # one large draw a case: a sampled law, or one whose case is dear
    seconds: float = 0.0  # at least so long, where one case takes its time
    tells: bool = False  # what was measured is worth saying where it holds as well


@dataclass(frozen=True)
class Law:
    """One law, or with `promise` (a claim) one promise: asked of those who claim it, only observed of others."""

    number: str  # L01 … L46 as in the ledger, L47 … what users are bitten by, P01 … promises
    name: str
    formula: str
    domain: str  # where it holds, in words
    on: Mapping[str, Trial]  # kind of target → how it is tried
    control: "Callable[[], Target]"  # a target that must be reported as broken
    tolerance: Tolerance = field(default_factory=Tolerance)
    promise: str | None = None

    @property
    def kinds(self) -> str:
        return ", ".join(self.on)


class Outcome(NamedTuple):
    """What one law found on one target."""

    law: Law
    status: str  # one of STATUSES
    said: str = ""  # the reason, the observation, the error
    cases: int = 0
    worst: float = 0.0  # the largest error seen
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
        found = {k: v for k, v in self._asdict().items() if k not in ("law", "counterexample")}
        found = {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in found.items()}
        case = None if self.counterexample is None else {k: _plain(v) for k, v in self.counterexample.items()}
        return {**law, "promise": self.law.promise, **found, "counterexample": case}


STATUSES = ("holds", "broken", "not applicable", "not promised", "raised", "too slow")


def _plain(value: Any) -> Any:
    return (
        list(value)
        if isinstance(value, tuple)
        else value
        if isinstance(value, int | float | str)
        else str(value)
    )

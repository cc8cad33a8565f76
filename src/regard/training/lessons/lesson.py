"""A lesson: small models, quickly trained, and a claim that measured numbers decide."""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Check:
    """A measured number or text beside what was expected of it."""

    name: str
    measured: Any
    expected: str
    passed: bool

    def __str__(self) -> str:
        mark = "" if self.passed else "  ← not as expected"
        return f"{self.name}: {format_value(self.measured)} (expected {self.expected}){mark}"


COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "above": operator.gt,
    "at least": operator.ge,
    "below": operator.lt,
    "exactly": operator.eq,
}


def check(name: str, measured: Any, comparison: str, bound: Any, *, because: str = "") -> Check:
    """The number has to be `above`, `at least`, `below` or `exactly` the bound; NaN never is.

    >>> print(check("accuracy", 0.5, "above", 0.99))
    accuracy: 0.5 (expected above 0.99)  ← not as expected
    """
    text = f"{comparison} {format_value(bound)}" + (f", {because}" if because else "")
    return Check(name, measured, text, bool(COMPARISONS[comparison](measured, bound)))


def within(name: str, measured: float, low: float, high: int | float, *, because: str = "") -> Check:
    """The number has to lie between two bounds.

    >>> within("loss", 2.77, 2.75, 2.79, because="ln 16 = 2.773").expected
    'between 2.75 and 2.79, ln 16 = 2.773'
    """
    text = f"between {format_value(low)} and {format_value(high)}" + (f", {because}" if because else "")
    return Check(name, measured, text, low < measured < high)


@dataclass(frozen=True)
class Picture:
    """A matplotlib figure of this run, drawn when a page needs it: draw(dark)."""

    title: str
    caption: str
    draw: Callable[[bool], Any]


@dataclass(frozen=True)
class Suggestion:
    """What to try next, and the settings of the lesson that try it."""

    text: str
    settings: Mapping[str, Any]

    def command(self, number: str) -> str:
        """
        >>> Suggestion("shorter", {"steps": 40}).command("T5")
        'regard train T5 --set steps=40'
        """
        options = [f"--set {name}={_shell(value)}" for name, value in self.settings.items()]
        return " ".join([f"regard train {number}", *options])


def _shell(value: Any) -> str:
    text = str(list(value) if isinstance(value, tuple) else value).replace(" ", "")
    return f"'{text}'" if "[" in text else text


@dataclass(frozen=True)
class Lesson:
    """What a lesson found: the claim, what was done, each number beside what was expected, and its pictures.

    maps: attention maps for the page's script, of `report.maps`.
    """

    number: str
    claim: str
    method: str
    checks: tuple[Check, ...]
    measured: dict[str, Any] = field(default_factory=dict)
    pictures: tuple[Picture, ...] = ()
    maps: tuple[dict[str, Any], ...] = ()
    suggestions: tuple[Suggestion, ...] = ()

    @property
    def passed(self) -> bool:
        return bool(self.checks) and all(c.passed for c in self.checks)

    def __str__(self) -> str:
        further = [f"{name}: {format_value(v)}" for name, v in self.measured.items()]
        lines = [f"  {line}" for line in [*map(str, self.checks), *further]]
        return "\n".join([f"{self.number} {'passed' if self.passed else 'failed'}: {self.claim}", *lines])


def format_value(value: Any) -> str:
    """
    >>> format_value({"a": 0.123456, 16: "refused"})
    'a 0.1235, 16 refused'
    """
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {format_value(v)}" for k, v in value.items())
    return str(value)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)

"""The likely cause of a target's faults, as a value."""

from dataclasses import dataclass, field
from typing import Any

MATCH_SECONDS = 6.0  # processor time for comparing a target with faulty variants


def unfinished(done: int, of: int) -> str:
    """What is added to the evidence if the time ran out before all variants were compared."""
    return "" if done == of else f" (compared with {done} of {of} faulty variants in {MATCH_SECONDS:g} s)"


@dataclass(frozen=True)
class Cause:
    """One fault that explains what was observed.

    name: the fault in a sentence. family: the fault in a few words. where: the calls it is limited to, "" for all.
    evidence: got …, expected …, on which call. explained: how many of the wrong calls it reproduces exactly.
    """

    name: str
    family: str
    fix: str
    evidence: str
    where: str = ""
    explained: int = 0
    wrong: int = 0
    exact: bool = True  # a faulty variant returned the same numbers; otherwise only a symptom is known
    laws: tuple[str, ...] = field(default=(), compare=False)

    @property
    def headline(self) -> str:
        return f"{self.name}{f', only {self.where}' if self.where else ''}"

    @property
    def line(self) -> str:
        """The headline, and whether it is a cause: without equal numbers it is a symptom."""
        return f"{'likely cause' if self.exact else 'symptom'}: {self.headline}"

    def plain(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "family": self.family,
            "where": self.where,
            "fix": self.fix,
            "evidence": self.evidence,
            "explained": self.explained,
            "wrong": self.wrong,
            "exact": self.exact,
            "laws": list(self.laws),
        }

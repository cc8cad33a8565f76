"""The result of a check: a table, JSON, an exit code."""

import json
from dataclasses import dataclass, field
from typing import Any

from .law import Outcome
from .probe import Probe
from .target import Target

MARK = {
    "holds": "✓",
    "broken": "✗",
    "raised": "✗",
    "not applicable": "–",
    "not promised": "○",
    "too slow": "…",
}


@dataclass(frozen=True)
class Verdict:
    """The outcomes of all laws on one target. Exit code 0: all hold. 1: one is broken. 2: none could run."""

    target: Target
    outcomes: tuple[Outcome, ...]
    probed: Probe = field(default_factory=Probe)  # capabilities determined by probing, beyond those declared

    @property
    def exit_code(self) -> int:
        decided = [o for o in self.outcomes if o.ran or (o.status == "raised" and o.cases)]
        if not decided:
            return 2
        return 1 if any(o.failed for o in self.outcomes) else 0

    @property
    def ok(self) -> bool:
        return self.exit_code == 0

    @property
    def broken(self) -> tuple[Outcome, ...]:
        return tuple(o for o in self.outcomes if o.failed)

    @property
    def seconds(self) -> float:
        return sum(o.seconds for o in self.outcomes)

    def __getitem__(self, number: str) -> Outcome:
        """The outcome of a law, by its number or its name."""
        for o in self.outcomes:
            if number in (o.law.number, o.law.name):
                return o
        raise KeyError(number)

    def counts(self) -> dict[str, int]:
        """How many outcomes of each status."""
        statuses = [o.status for o in self.outcomes]
        return {s: statuses.count(s) for s in MARK if s in statuses}

    def headline(self) -> str:
        counts = {"hold" if s == "holds" and n > 1 else s: n for s, n in self.counts().items()}
        return f"{self.target.name}: {', '.join(f'{n} {status}' for status, n in counts.items())}"

    def __str__(self) -> str:
        width = max((len(o.law.name) for o in self.outcomes), default=0)
        lines = [self.headline()]
        for o in self.outcomes:
            lines.append(f"{MARK[o.status]} {o.law.number} {o.law.name:{width}}  {_describe(o)}")
            if o.counterexample is not None and o.failed:
                lines.append(f"{'':6}{o.law.formula}")
                lines.append(f"{'':6}smallest case: {o.counterexample}")
        return "\n".join(lines)

    def plain(self) -> dict[str, Any]:
        return {
            "target": self.target.name,
            "kind": self.target.kind,
            "claims": sorted(self.target.claims),
            "lacks": sorted(self.target.lacks),
            "probed": self.probed.supported,
            "exit_code": self.exit_code,
            "counts": self.counts(),
            "laws": [o.plain() for o in self.outcomes],
        }

    def json(self, indent: int | None = 2) -> str:
        return json.dumps(self.plain(), indent=indent, ensure_ascii=False)

    def _repr_html_(self) -> str:
        from .html_report import inline

        return inline(self)


def _describe(o: Outcome) -> str:
    if o.status != "holds":
        return f"{o.status}: {o.message}"
    cases = "1 case" if o.cases == 1 else f"{o.cases} cases"
    note = f"; {o.message}" if o.message else ""
    return f"holds in {cases}, largest error {o.worst:.1e} (tolerance {o.tolerance:g}){note}"

"""The result of a check: a table, JSON, an exit code."""

import json
from dataclasses import dataclass, field
from typing import Any

from .diagnosis.cause import Cause
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
    cause: Cause | None = None  # the likely cause of what is broken

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

    def __repr__(self) -> str:
        return f"<Verdict on {self.headline()}>"

    def __str__(self) -> str:
        width = max((len(o.law.name) for o in self.outcomes), default=0)
        lines = [self.headline(), *self.notes(), *self.explanation()]
        if self.failure is not None:
            return "\n".join(lines)
        first = self.broken[0].law.number if self.broken else ""
        for o in self.outcomes:
            lines.append(f"{MARK[o.status]} {o.law.number} {o.law.name:{width}}  {_describe(o)}")
            # If the cause is known, the other broken laws are one line each: the same fault broke them.
            shown = self.cause is None or o.law.number == first
            if o.counterexample is not None and o.failed and shown:
                lines.append(f"{'':6}{o.law.formula}")
                lines.append(f"{'':6}smallest case: {o.counterexample}")
        return "\n".join(lines)

    @property
    def failure(self) -> str | None:
        """Why no law could run, if an ordinary call already fails: one reason instead of one per law."""
        messages = {o.message for o in self.outcomes if o.status == "raised" and not o.cases}
        others = [o for o in self.outcomes if o.status not in ("raised", "not applicable", "too slow")]
        starts = all(m.startswith("an ordinary call failed") for m in messages)
        return min(messages) if messages and starts and not others else None

    def notes(self) -> list[str]:
        """What the adapter detected about the target."""
        return [f"  {note}" for note in self.target.notes]

    def explanation(self) -> list[str]:
        """The likely cause in a few lines, with the numbers of the laws that it breaks."""
        if self.failure is not None:
            hint = "  specify what it is with --as, --with layout=… or an adapter (docs/check.md)"
            return [f"✗ {self.failure}", hint]
        cause = self.cause
        if cause is None:
            return []
        lines = [cause.line, f"  {cause.evidence}", f"  fix: {cause.fix}"]
        if cause.exact and cause.wrong > cause.explained:
            lines.append(f"  it explains {cause.explained} of {cause.wrong} calls that differ")
        if cause.laws:
            count = "1 law is" if len(cause.laws) == 1 else f"{len(cause.laws)} laws are"
            lines.append(f"  {count} broken: {', '.join(cause.laws)}")
        return [*lines, ""]

    def plain(self) -> dict[str, Any]:
        return {
            "target": self.target.name,
            "kind": self.target.kind,
            "claims": sorted(self.target.claims),
            "lacks": sorted(self.target.lacks),
            "probed": self.probed.supported,
            "notes": list(self.target.notes),
            "exit_code": self.exit_code,
            "failure": self.failure,
            "cause": None if self.cause is None else self.cause.plain(),
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

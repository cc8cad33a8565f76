"""Where the memory is: the moment of the peak, and what is alive there, by module and kind."""

from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..trace.meter import Meter, Record
from ..trace.tracer import merged
from .step import Step

KINDS = (
    "weights",
    "optimizer state",
    "gradients",
    "saved for backward",
    "inputs",
    "temporary",
    "workspace",
)
MIB = 1 << 20


class Alive(NamedTuple):
    """Bytes of one kind in one module at the peak; modules that differ by a number only are merged."""

    bytes: int
    kind: str
    path: str


@dataclass(frozen=True)
class Peak:
    """The moment at which most memory is allocated."""

    bytes: int
    phase: str  # forward, backward or optimizer
    path: str  # the module whose operation runs
    operation: str
    alive: tuple[Alive, ...]  # largest first
    timeline: tuple[
        tuple[str, dict[str, int]], ...
    ]  # (phase, bytes by kind) at moments of the step, in order

    def by_kind(self) -> dict[str, int]:
        kinds: Counter[str] = Counter()
        for a in self.alive:
            kinds[a.kind] += a.bytes
        return {k: kinds[k] for k in KINDS if kinds[k]}

    @property
    def moment(self) -> str:
        where = f" of {self.path}" if self.path else ""
        return f"in the {self.phase}{' pass' if self.phase != 'optimizer' else ' step'}{where} ({self.operation})"

    def explain(self) -> str:
        """In words: when the peak is, what it consists of, and what would lower it."""
        kinds, total = self.by_kind(), max(sum(a.bytes for a in self.alive), 1)
        largest = sorted(kinds.items(), key=lambda kv: -kv[1])
        parts = ", ".join(f"{size / total:.0%} are {kind}" for kind, size in largest if size / total >= 0.01)
        lines = [f"The peak of {self.bytes / MIB:,.1f} MiB is {self.moment}; {parts}."]
        top = ", ".join(f"{a.path or 'the model'} {a.kind} {a.bytes / MIB:,.1f} MiB" for a in self.alive[:3])
        lines.append(f"Most of it: {top}.")
        return " ".join([*lines, _advice(largest[0][0] if largest else "", self)])

    def table(self, rows: int = 20) -> str:
        width = max((len(a.path) for a in self.alive[:rows]), default=0)
        lines = [f"{a.bytes:>16,}  {a.kind:<18}  {a.path:<{width}}".rstrip() for a in self.alive[:rows]]
        rest = sum(a.bytes for a in self.alive[rows:])
        return "\n".join(
            [*lines, *([f"{rest:>16,}  in {len(self.alive) - rows} smaller ones"] if rest else [])]
        )

    def plain(self) -> dict[str, Any]:
        return {
            "bytes": self.bytes,
            "phase": self.phase,
            "path": self.path,
            "operation": self.operation,
            "by_kind": self.by_kind(),
            "alive": [a._asdict() for a in self.alive],
        }


def _advice(kind: str, peak: Peak) -> str:
    kinds = peak.by_kind()
    match kind:
        case "saved for backward":
            saved = kinds["saved for backward"]
            largest = max((a.bytes for a in peak.alive if a.kind == kind), default=0)
            return (
                f"Checkpointing each block (TrainingStep(checkpointing=True)) would keep one input per block instead "
                f"of {saved / MIB:,.1f} MiB, at the price of a second forward pass; autocast would halve what "
                f"products save; the largest module saves {largest / MIB:,.1f} MiB."
            )
        case "optimizer state" | "weights" | "gradients":
            return (
                "Weights, gradients and optimizer state dominate: 8-bit states (optimizer='adamw8bit'), frozen "
                "weights (LoRA) or sharding over ranks lowers them; a smaller batch hardly does."
            )
        case "temporary" | "workspace":
            return "Temporary results dominate: a smaller batch, or logits and loss in chunks, lowers them."
    return ""


def kinds_of(meter: Meter, step: Step) -> list[str]:
    """The kind of each storage."""

    def kind(key: int, record: Record) -> str:
        if record.workspace:
            return "workspace"
        for name, keys in (
            ("weights", step.weights),
            ("optimizer state", step.state),
            ("gradients", step.gradients),
            ("inputs", step.inputs),
            ("saved for backward", step.saved),
        ):
            if key in keys:
                return name
        return "temporary"

    return [kind(key, record) for key, record in enumerate(meter.records)]


def peak_of(step: Step, at: int, size: int, workspaces: int) -> Peak:
    """The peak at this event of the step, and the course of the memory around it."""
    meter = step.trace.meter
    kinds, events = kinds_of(meter, step), meter.events
    current: Counter[str] = Counter()
    alive: set[int] = set(step.state)
    for key, change in events[: step.begin]:
        alive.add(key) if change > 0 else alive.discard(key)
    for key in alive:
        current[kinds[key]] += meter.records[key].bytes
    current["workspace"] += workspaces
    timeline, stride = [], max(1, (len(events) - step.begin) // 400)
    found: set[int] = set(alive)
    for index, (key, change) in enumerate(events[step.begin :]):
        if key in step.state:
            continue
        (alive.add if change > 0 else alive.discard)(key)
        current[kinds[key]] += change * meter.records[key].bytes
        if index == at:
            found = set(alive)
        if index % stride == 0 or index == at:
            timeline.append((meter.records[key].phase, dict(current)))
    sums: Counter[tuple[str, str]] = Counter()
    for key in found:
        sums[kinds[key], merged(step.owners.get(key, meter.records[key].path))] += meter.records[key].bytes
    if workspaces:
        sums["workspace", "cuBLAS"] += workspaces
    record = meter.records[events[step.begin + at][0]] if events[step.begin :] else Record(0, "", "", "")
    entries = sorted((Alive(size, kind, path) for (kind, path), size in sums.items() if size), reverse=True)
    return Peak(size, record.phase, record.path, record.operation, tuple(entries), tuple(timeline))

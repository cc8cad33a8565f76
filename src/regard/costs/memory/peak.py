"""Where the memory is: the moment of the peak, and what is alive there, by module and kind."""

from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..trace.tracer import merged
from .allocator import Usage, readable
from .runs import TABLES, Run

# In the order of the pictures: what stays for long is at the bottom.
KINDS = (
    "weights", "master weights", "optimizer state", "gradients", "key/value cache", "saved for backward", "inputs",
    "temporary", "workspace", TABLES,
)  # fmt: skip
ADVICE = {
    "saved for backward": "A smaller batch lowers it in proportion.",
    **dict.fromkeys(
        ("weights", "optimizer state", "gradients", "master weights"),
        "8-bit states (optimizer='adamw8bit'), frozen weights (lora=16) or more ranks lower weights, gradients and "
        "optimizer state; a smaller batch hardly does.",
    ),
    "key/value cache": "Fewer key/value heads, a window or a smaller batch lowers it.",
    "temporary": "A smaller batch, or logits and loss in chunks, lowers it.",
}
OUTSIDE = "outside modules (loss, optimizer)"
PHASES = {"optimizer": "optimizer step", "decode": "decoding of a token", "prefill": "prompt"}


class Alive(NamedTuple):
    """Bytes of one kind in one module at the peak; modules that differ by a number only are merged."""

    bytes: int
    kind: str
    path: str


@dataclass(frozen=True)
class Peak:
    """The moment at which most memory is allocated."""

    bytes: int
    phase: str  # forward, backward, optimizer, prefill or decode
    path: str  # the module whose operation runs
    operation: str
    alive: tuple[Alive, ...]  # largest first
    timeline: tuple[tuple[str, dict[str, int]], ...]  # (phase, bytes by kind) at moments of the run, in order

    def by_kind(self) -> dict[str, int]:
        kinds: Counter[str] = Counter()
        for a in self.alive:
            kinds[a.kind] += a.bytes
        return {k: kinds[k] for k in KINDS if kinds[k]}

    @property
    def moment(self) -> str:
        where = f" of {self.path}" if self.path else ""
        return f"in the {PHASES.get(self.phase, f'{self.phase} pass')}{where} ({self.operation})"

    def explain(self) -> str:
        """In words: when the peak is, what it consists of, and what would lower it."""
        kinds, total = self.by_kind(), max(sum(a.bytes for a in self.alive), 1)
        largest = sorted(kinds.items(), key=lambda kv: -kv[1])
        parts = ", ".join(f"{size / total:.0%} are {kind}" for kind, size in largest if size / total >= 0.01)
        top = ", ".join(f"{a.path or OUTSIDE} {a.kind} {readable(a.bytes)}" for a in self.alive[:3])
        words = f"The peak of {readable(self.bytes)} is {self.moment}; {parts}. Most of it: {top}."
        return f"{words} {ADVICE.get(largest[0][0], '')}".rstrip()

    def table(self, rows: int = 20) -> str:
        """Modules and kinds at the peak, largest first, with their share."""
        total = max(sum(a.bytes for a in self.alive), 1)
        width = max((len(a.path) for a in self.alive[:rows]), default=0)
        lines = [
            f"{readable(a.bytes):>14}  {a.bytes / total:>6.1%}  {a.kind:<18}  {a.path or OUTSIDE:<{width}}".rstrip()
            for a in self.alive[:rows]
        ]
        rest = sum(a.bytes for a in self.alive[rows:])
        more = f"{readable(rest):>14}  {rest / total:>6.1%}  in {len(self.alive) - rows} smaller ones"
        return "\n".join([*lines, *([more] if rest else [])])

    def plain(self) -> dict[str, Any]:
        return {
            "bytes": self.bytes,
            "phase": self.phase,
            "path": self.path,
            "operation": self.operation,
            "by_kind": self.by_kind(),
            "alive": [a._asdict() for a in self.alive],
        }


def peak_of(run: Run, usage: Usage) -> Peak:
    """The peak of a run, and the course of the memory around it."""
    meter, workspaces = run.trace.meter, sum(run.workspaces)
    records, events = meter.records, meter.events
    kinds = [run.kinds.get(k, "workspace" if r.workspace else "temporary") for k, r in enumerate(records)]
    # There from the first moment on, unless they were replaced since.
    stays = run.keys("optimizer state") | run.keys(TABLES)
    alive: set[int] = stays - {key for key, change in events if change < 0}
    for key, change in events[: run.begin]:
        alive.add(key) if change > 0 else alive.discard(key)
    current: Counter[str] = Counter({"workspace": workspaces})
    for key in alive:
        current[kinds[key]] += records[key].bytes
    timeline, stride = [], max(1, (len(events) - run.begin) // 400)
    at_peak: set[int] = set(alive)
    for index, (key, change) in enumerate(events[run.begin :]):
        if key not in stays:
            (alive.add if change > 0 else alive.discard)(key)
            current[kinds[key]] += change * records[key].bytes
        if index == usage.at:
            at_peak = set(alive)
        if index % stride == 0 or index == usage.at:
            timeline.append((records[key].phase, dict(current)))
    sums: Counter[tuple[str, str]] = Counter()
    for key in at_peak:
        sums[kinds[key], merged(run.owners.get(key, records[key].path))] += records[key].bytes
    if workspaces:
        sums["workspace", "cuBLAS"] += workspaces
    entries = tuple(
        sorted((Alive(size, kind, path) for (kind, path), size in sums.items() if size), reverse=True)
    )
    record = records[events[run.begin + usage.at][0]]
    return Peak(usage.peak, record.phase, record.path, record.operation, entries, tuple(timeline))

"""What lowering found, and what it promises."""

import dataclasses
import json
from dataclasses import dataclass
from math import nan

from .frame import Offset


@dataclass(frozen=True)
class Head:
    """One head: what it became, and how far its weights were from that in total variation."""

    head: int
    became: str  # "shift", "kernel", or "attention" where it stayed
    offset: Offset  # of the nearest shift: key = query + offset
    taps: int  # keys it reads now; 0 where it stayed attention
    worst: float  # total variation at the worst query (of the data, where the scores depend on content)
    mean: float  # over queries and data

    @property
    def shift(self) -> Offset:
        """s in y_q = Σ x[q − s] W, the documents' f(h)."""
        return tuple(-o for o in self.offset)


@dataclass(frozen=True)
class Certificate:
    """What became of each head, and the error.

    certified: no output moves by more than this times the range of the input's channels, for any input of this
    size (None: the scores depend on content, and nothing holds for all inputs). measured: the largest difference
    seen on the `measured_on` inputs. The worst distances of `heads` are bounds where `certified` is given.
    """

    heads: tuple[Head, ...]
    tolerance: float
    size: Offset | None  # None: any
    border: str
    certified: float | None
    measured: float = nan
    measured_on: str = "the data"
    speed_up: float = nan  # forward, on up to eight rows of those inputs

    @property
    def lowered(self) -> tuple[int, ...]:
        """The heads that are a convolution now."""
        return tuple(h.head for h in self.heads if h.became != "attention")

    def json(self, indent: int | None = None) -> str:
        return json.dumps(dataclasses.asdict(self), indent=indent)

    def __str__(self) -> str:
        lines = ["head  nearest shift s  became     taps  worst TV  mean TV"]
        for h in self.heads:
            shift = "(" + ", ".join(f"{s:+d}" if s else "0" for s in h.shift) + ")"
            lines.append(
                f"{h.head:4}  {shift:15}  {h.became:9}  {h.taps:4}  {h.worst:8.2g}  {h.mean:7.2g}".rstrip()
            )
        size = "any size" if self.size is None else " × ".join(map(str, self.size))
        bound = (
            "none: scores depend on content" if self.certified is None else f"{self.certified:.2g} · range"
        )
        lines += [
            f"{len(self.lowered)} of {len(self.heads)} heads lowered at tolerance {self.tolerance:g}; "
            f"{size}, border of {self.border}",
            f"error: certified {bound}; measured {self.measured:.2g} on {self.measured_on}; "
            f"{self.speed_up:.1f} × as fast",
        ]
        return "\n".join(lines)

"""The certificate of a lowered attention: the kind of each head, and the error."""

import dataclasses
import json
from dataclasses import dataclass
from math import nan

from .geometry import Offset


@dataclass(frozen=True)
class Head:
    """One head: what replaces it, and the total variation distance of its weights from that."""

    head: int
    kind: str  # "shift", "kernel", or "attention" if it was not replaced
    offset: Offset  # of the nearest shift: key = query + offset
    taps: int  # keys per query now; 0 if it is still attention
    worst: float  # distance at the worst query (in the data, if the scores depend on content)
    mean: float  # over queries and data

    @property
    def shift(self) -> Offset:
        """s in y_q = Σ x[q − s] W."""
        return tuple(-o for o in self.offset)


@dataclass(frozen=True)
class Certificate:
    """What replaces each head, and the error.

    certified: no output changes by more than this times the range of the input's channels, for any input of this size
    (None: the scores depend on content, so no bound holds for all inputs). measured: the largest difference on the
    `measured_on` inputs. The worst distances of `heads` are bounds if `certified` is not None.
    """

    heads: tuple[Head, ...]
    tolerance: float
    size: Offset | None  # None: any size
    border: str
    certified: float | None
    measured: float = nan
    measured_on: str = "the data"
    speed_up: float = nan  # forward, on up to eight rows of those inputs

    @property
    def lowered(self) -> tuple[int, ...]:
        """The heads that were replaced by a convolution."""
        return tuple(h.head for h in self.heads if h.kind != "attention")

    def json(self, indent: int | None = None) -> str:
        return json.dumps(dataclasses.asdict(self), indent=indent)

    def __str__(self) -> str:
        lines = ["head  nearest shift s  kind       taps  worst TV  mean TV"]
        for h in self.heads:
            shift = "(" + ", ".join(f"{s:+d}" if s else "0" for s in h.shift) + ")"
            lines.append(
                f"{h.head:4}  {shift:15}  {h.kind:9}  {h.taps:4}  {h.worst:8.2g}  {h.mean:7.2g}".rstrip()
            )
        size = "any size" if self.size is None else " × ".join(map(str, self.size))
        bound = (
            "none (scores depend on content)" if self.certified is None else f"{self.certified:.2g} · range"
        )
        lines += [
            f"{len(self.lowered)} of {len(self.heads)} heads lowered at tolerance {self.tolerance:g}; "
            f"{size}, border of {self.border}",
            f"error: certified {bound}; measured {self.measured:.2g} on {self.measured_on}; "
            f"{self.speed_up:.1f} × as fast",
        ]
        return "\n".join(lines)

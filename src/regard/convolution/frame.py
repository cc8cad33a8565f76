"""Where the queries and keys of a convolution stand."""

from dataclasses import dataclass
from itertools import product

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ..errors import ShapeError, SpecError, nearest

MODES = {"zeros": "constant", "circular": "circular", "reflect": "reflect", "replicate": "replicate"}

Offset = tuple[int, ...]


@dataclass(frozen=True)
class Frame:
    """Head h of query q looks at key q + offsets[h]; queries stand at 0, stride, 2·stride, … along each axis.

    Keys reach past the input by `border` (before, after), an axis each, and `mode` says what they hold: "zeros",
    an explicit zero key (D10), or a copy of the input ("circular", "reflect", "replicate").
    """

    offsets: tuple[Offset, ...]
    stride: Offset
    border: tuple[tuple[int, int], ...]
    mode: str = "zeros"
    window: tuple[tuple[int, int], ...] | None = (
        None  # the offsets that a query must have keys at; None: those
    )

    def __post_init__(self):
        if not self.offsets:
            raise SpecError("no offsets: a convolution has at least one tap")
        if self.mode not in MODES:
            raise SpecError(f"a border of {self.mode!r} is unknown; {nearest(self.mode, MODES)}")
        if any(len(offset) != len(self.stride) for offset in self.offsets):
            raise SpecError(f"offsets {self.offsets} and stride {self.stride} need as many axes")

    @property
    def axes(self) -> int:
        return len(self.stride)

    @property
    def shifts(self) -> tuple[Offset, ...]:
        """s_h in y_q = Σ_h x[q − s_h] W_h, the documents' f(h)."""
        return tuple(tuple(-o for o in offset) for offset in self.offsets)

    def span(self, axis: int) -> tuple[int, int]:
        """The least and the greatest offset along an axis."""
        if self.window is not None:
            return self.window[axis]
        along = [offset[axis] for offset in self.offsets]
        return min(along), max(along)

    def out_size(self, size: Offset) -> Offset:
        """How many queries stand along each axis of an input of this size."""
        out = []
        for axis, n in enumerate(size):
            before, after = self.border[axis]
            low, high = self.span(axis)
            first, last = before + low, n - 1 + after - high  # what the first and the last query may be
            if first < 0 or last < 0:
                need = max(1, high - after + 1)
                raise ShapeError(
                    f"an input of {n} along axis {axis} with a border of {before} and {after} holds no window "
                    f"of {high - low + 1}; give at least {need}"
                )
            out.append(last // self.stride[axis] + 1)
        return tuple(out)

    def pad(self, x: Float[Tensor, "b c *size"]) -> Float[Tensor, "b c *padded"]:
        """The input and its border."""
        if not any(map(any, self.border)):
            return x
        return F.pad(x, [p for sides in reversed(self.border) for p in sides], mode=MODES[self.mode])


def frame(conv: nn.Conv1d | nn.Conv2d) -> Frame:
    """The frame of a convolution: one head a tap, in the order of its weight's last axes.

    Tap t of output q multiplies x[stride·q + dilation·t − padding]. Queries stand on the input: where the first
    window starts before it, by the padding, offsets are below zero.
    """
    kernel, dilation, stride = conv.kernel_size, conv.dilation, conv.stride
    reach = [d * (k - 1) for k, d in zip(kernel, dilation)]
    if conv.padding == "same":
        border = tuple((r // 2, r - r // 2) for r in reach)
    elif conv.padding == "valid":
        border = tuple((0, 0) for _ in reach)
    else:
        border = tuple((int(p), int(p)) for p in conv.padding)
    taps = product(*(range(k) for k in kernel))
    offsets = tuple(tuple(d * t - before for t, d, (before, _) in zip(tap, dilation, border)) for tap in taps)
    return Frame(offsets, tuple(stride), border, conv.padding_mode)


def tap_of(head: int, kernel: Offset) -> Offset:
    """The kernel position of a head: heads run through the kernel row by row.

    >>> tap_of(5, (3, 3))
    (1, 2)
    """
    tap = []
    for k in reversed(kernel):
        head, t = divmod(head, k)
        tap.append(t)
    return tuple(reversed(tap))

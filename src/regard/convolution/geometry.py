"""The positions of the queries and keys of a convolution."""

from dataclasses import dataclass
from itertools import product

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ..errors import ShapeError, SpecError, nearest

MODES = {"zeros": "constant", "circular": "circular", "reflect": "reflect", "replicate": "replicate"}

Offset = tuple[int, ...]


@dataclass(frozen=True)
class Geometry:
    """Head h of query q attends to key q + offsets[h]; queries are at 0, stride, 2·stride, … along each axis.

    The keys extend beyond the input by `border` (before, after) along each axis, and `mode` defines their values:
    "zeros", or a copy of the input ("circular", "reflect", "replicate").
    """

    offsets: tuple[Offset, ...]
    stride: Offset
    border: tuple[tuple[int, int], ...]
    mode: str = "zeros"
    # The range of offsets at which a query needs keys; None: that of `offsets`.
    window: tuple[tuple[int, int], ...] | None = None

    def __post_init__(self):
        if not self.offsets:
            raise SpecError("offsets is empty; a convolution has at least one tap")
        if self.mode not in MODES:
            raise SpecError(f"mode={self.mode!r} is unknown; {nearest(self.mode, MODES)}")
        if any(len(offset) != len(self.stride) for offset in self.offsets):
            raise SpecError(f"offsets {self.offsets} and stride {self.stride} have different numbers of axes")

    @property
    def axes(self) -> int:
        return len(self.stride)

    @property
    def shifts(self) -> tuple[Offset, ...]:
        """s_h in y_q = Σ_h x[q − s_h] W_h."""
        return tuple(tuple(-o for o in offset) for offset in self.offsets)

    def span(self, axis: int) -> tuple[int, int]:
        """The smallest and the largest offset along an axis."""
        if self.window is not None:
            return self.window[axis]
        along = [offset[axis] for offset in self.offsets]
        return min(along), max(along)

    def out_size(self, size: Offset) -> Offset:
        """The number of queries along each axis of an input of this size."""
        out = []
        for axis, n in enumerate(size):
            before, after = self.border[axis]
            low, high = self.span(axis)
            first, last = before + low, n - 1 + after - high  # the first and the last possible query
            if first < 0 or last < 0:
                minimum = max(1, high - after + 1)
                raise ShapeError(
                    f"an input of size {n} along axis {axis}, padded by {before} and {after}, is smaller than a "
                    f"window of {high - low + 1}; use a size of at least {minimum}"
                )
            out.append(last // self.stride[axis] + 1)
        return tuple(out)

    def pad(self, x: Float[Tensor, "b c *size"]) -> Float[Tensor, "b c *padded"]:
        """The padded input."""
        if not any(map(any, self.border)):
            return x
        return F.pad(x, [p for sides in reversed(self.border) for p in sides], mode=MODES[self.mode])


def geometry_of(conv: nn.Conv1d | nn.Conv2d) -> Geometry:
    """The geometry of a convolution: one head per tap, in the order of the last axes of its weight.

    Tap t of output q multiplies x[stride·q + dilation·t − padding]. Query positions are input positions, so padding
    gives negative offsets.
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
    return Geometry(offsets, tuple(stride), border, conv.padding_mode)


def tap_of(head: int, kernel: Offset) -> Offset:
    """The kernel position of a head: heads are in row-major order of the kernel.

    >>> tap_of(5, (3, 3))
    (1, 2)
    """
    tap = []
    for k in reversed(kernel):
        head, t = divmod(head, k)
        tap.append(t)
    return tuple(reversed(tap))

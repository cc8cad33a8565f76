"""The result of lowering: a convolution, and the heads that are still attention."""

from collections.abc import Sequence
from functools import reduce as fold
from math import gcd, prod
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from jaxtyping import Float
from torch import Tensor, nn

from ..errors import ShapeError, SpecError
from ..pattern import Pattern
from ..pattern.heads import of_heads
from .certificate import Certificate
from .geometry import MODES, Geometry, Offset

_CONV = {1: F.conv1d, 2: F.conv2d}
_MODULE: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d}


class Lowered(nn.Module):
    """convolution(x) + kernels(x) + rest(x): the heads that are shifts, those that are short kernels, the others.

    Called like the attention it was lowered from: (b, n, d_model), on a grid in row-major order, or channels first if
    `grid` is None. Each of the three parts may be absent.
    """

    certificate: Certificate

    def __init__(
        self,
        convolution: nn.Module | None,
        kernels: "Kernels | None",
        rest: nn.Module | None,
        grid: Offset | None,
        pattern: Any = None,
        heads: Sequence[int] = (),
    ):
        """pattern: of the call, beside its own. heads: those that `rest` has."""
        super().__init__()
        self.convolution, self.kernels, self.rest = convolution, kernels, rest
        self.grid, self.pattern, self.heads = grid, pattern, heads

    def forward(self, x: Float[Tensor, "..."], context: None = None, **options: Any) -> Float[Tensor, "..."]:
        if self.grid is None:
            return fold(torch.add, (part(x) for part in (self.convolution, self.rest) if part is not None))
        pattern = options.pop("pattern", None)
        options["context"] = context
        if others := [name for name, value in options.items() if value is not None and value is not False]:
            raise ShapeError(
                f"a lowered attention is fixed to {self._domain()} and does not support {' or '.join(others)}; "
                f"call the attention it was lowered from"
            )
        if not _same(pattern, self.pattern):
            raise ShapeError("this attention was lowered with another pattern; lower it again with this one")
        outputs = [] if self.rest is None else [self.rest(x, pattern=_of_heads(pattern, self.heads))]
        if self.convolution is not None or self.kernels is not None:
            cells = rearrange(x, "b n c -> b c n") if len(self.grid) == 1 else self._on_grid(x)
            fixed = [part(cells) for part in (self.convolution, self.kernels) if part is not None]
            outputs.append(rearrange(fold(torch.add, fixed), "b c ... -> b (...) c"))
        return fold(torch.add, outputs)

    def _on_grid(self, x: Float[Tensor, "b n c"]) -> Float[Tensor, "b c height width"]:
        assert self.grid is not None
        if x.shape[1] != prod(self.grid):
            raise ShapeError(f"{x.shape[1]} positions on {self._domain()}; expected {prod(self.grid)}")
        return rearrange(x, "b (height width) c -> b c height width", height=self.grid[0])

    def _domain(self) -> str:
        return (
            "a grid of " + " × ".join(map(str, self.grid or ())) if len(self.grid or ()) > 1 else "a sequence"
        )

    def extra_repr(self) -> str:
        return f"heads {list(self.certificate.lowered)} of {len(self.certificate.heads)} lowered"


class Padded(nn.Module):
    """A convolution after padding that nn.Conv cannot express, because it differs before and after."""

    def __init__(self, convolution: nn.Module, border: tuple[tuple[int, int], ...], mode: str):
        super().__init__()
        self.convolution, self.border, self.mode = convolution, border, mode

    def forward(self, x: Float[Tensor, "b c *size"]) -> Float[Tensor, "b c_out *out"]:
        sides = [p for both in reversed(self.border) for p in both]
        return self.convolution(F.pad(x, sides, mode=MODES[self.mode]))


class Kernels(nn.Module):
    """Heads that are short kernels: values, one kernel per head, division by its mass inside the grid, W_O.

    The division reproduces the softmax at the border, where part of the kernel has no keys.
    """

    def __init__(
        self,
        into: Float[Tensor, "h d_v c_in"],
        out: Float[Tensor, "h c_out d_v"],
        value_bias: Float[Tensor, "h d_v"] | None,
        bias: Float[Tensor, " c_out"] | None,
        kernel: Float[Tensor, "h *taps"],
        low: Offset,
    ):
        super().__init__()
        self.low = low
        self.w_v = nn.Parameter(rearrange(into, "h d c -> (h d) c"))
        self.w_o = nn.Parameter(rearrange(out, "h o d -> o (h d)"))
        self.value_bias = None if value_bias is None else nn.Parameter(rearrange(value_bias, "h d -> (h d)"))
        self.bias = None if bias is None else nn.Parameter(bias)
        self.kernel = nn.Parameter(kernel)

    def forward(self, x: Float[Tensor, "b c *size"]) -> Float[Tensor, "b c_out *size"]:
        conv, shape = _CONV[len(self.low)], (1,) * len(self.low)
        v = conv(x, self.w_v.reshape(*self.w_v.shape, *shape), self.value_bias)
        each = repeat(self.kernel, "h ... -> (h d) 1 ...", d=len(self.w_v) // len(self.kernel))
        mixed = conv(F.pad(v, self._sides()), each, groups=len(each))
        ones = F.pad(x.new_ones(1, 1, *x.shape[2:]), self._sides())
        mass = conv(ones, rearrange(self.kernel, "h ... -> h 1 ..."))
        mass = repeat(mass, "b h ... -> b (h d) ...", d=len(each) // len(self.kernel))
        mixed = mixed / mass.where(mass > 0, 1.0)
        return conv(mixed, self.w_o.reshape(*self.w_o.shape, *shape), self.bias)

    def _sides(self) -> list[int]:
        """The padding with which the kernel of the first query starts at `low`; negative padding crops."""
        sides = [(-low, low + taps - 1) for low, taps in zip(self.low, self.kernel.shape[1:])]
        return [p for both in reversed(sides) for p in both]

    def extra_repr(self) -> str:
        return f"{len(self.kernel)} kernels of {tuple(self.kernel.shape[1:])}, from offset {self.low}"


def convolution(
    geometry: Geometry,
    taps: Float[Tensor, "h c_out c_in"],
    bias: Float[Tensor, " c_out"] | None,
    groups: int = 1,
) -> nn.Module:
    """One nn.Conv1d or nn.Conv2d with a tap at each offset of the geometry; taps at the same offset are added.

    Dilated if the offsets allow it. Grouped if all taps consist of that many diagonal blocks.
    """
    spans = [geometry.span(axis) for axis in range(geometry.axes)]
    dilation = [
        max(1, gcd(*(offset[axis] - low for offset in geometry.offsets), high - low))
        for axis, (low, high) in enumerate(spans)
    ]
    kernel = [(high - low) // d + 1 for (low, high), d in zip(spans, dilation)]
    weight = taps.new_zeros(*taps.shape[1:], *kernel)
    for offset, tap in zip(geometry.offsets, taps):
        at: Any = tuple((o - low) // d for o, (low, _), d in zip(offset, spans, dilation))
        weight[(..., *at)] += tap
    weight, groups = _grouped(weight, groups)
    padding, outside = _padding(geometry, kernel, dilation)
    conv = _MODULE[geometry.axes](
        weight.shape[1] * groups,
        len(weight),
        tuple(kernel),
        stride=geometry.stride,
        dilation=tuple(dilation),
        padding=padding,
        padding_mode=geometry.mode if not outside else "zeros",
        groups=groups,
        bias=bias is not None,
        dtype=weight.dtype,
        device=weight.device,
    )
    with torch.no_grad():
        conv.weight.copy_(weight)
        if bias is not None:
            conv.bias.copy_(bias)
    return Padded(conv, geometry.border, geometry.mode) if outside else conv


def _padding(geometry: Geometry, kernel: Sequence[int], dilation: Sequence[int]) -> tuple[Any, bool]:
    """The padding argument of nn.Conv, and whether the padding has to be a step before it instead."""
    if any(before != -geometry.span(axis)[0] for axis, (before, _) in enumerate(geometry.border)):
        raise SpecError(f"the first query of {geometry} is not at the first window of a convolution")
    if all(before == after for before, after in geometry.border):
        return tuple(before for before, _ in geometry.border), False
    reach = [d * (k - 1) for k, d in zip(kernel, dilation)]
    if set(geometry.stride) == {1} and geometry.border == tuple((r // 2, r - r // 2) for r in reach):
        return "same", False
    return 0, True


def _grouped(weight: Float[Tensor, "o c *k"], groups: int) -> tuple[Float[Tensor, "o i *k"], int]:
    if groups == 1:
        return weight, 1
    blocks = rearrange(weight, "(g o) (f i) ... -> g f o i ...", g=groups, f=groups)
    own = torch.eye(groups, dtype=torch.bool, device=weight.device)
    if blocks[~own].any():  # training has made entries outside the groups nonzero
        return weight, 1
    return rearrange(blocks[own], "g o i ... -> (g o) i ..."), groups


def _of_heads(pattern: Any, heads: Sequence[int]) -> Any:
    if isinstance(pattern, Tensor) and pattern.dim() > 2 and pattern.shape[-3] > 1:
        return pattern[..., list(heads), :, :]
    return of_heads(pattern, heads) if isinstance(pattern, Pattern) else pattern


def _same(pattern: Any, declared: Any) -> bool:
    if isinstance(pattern, Tensor) and isinstance(declared, Tensor):
        return pattern is declared or torch.equal(pattern, declared)
    return (pattern is None) == (declared is None) and not isinstance(pattern, Tensor) and pattern == declared

"""Average pooling as attention: one head with equal scores over a window (law L18)."""

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from ..engine import attention as engine
from ..errors import ShapeError, SpecError
from ..pattern import window
from .geometry import Geometry, Offset


class AveragePooling(nn.Module):
    """The mean over a window as attention: equal scores, and a pattern that allows each query its window.

    With `border="zeros"` the keys outside the input are zeros and count in the mean; with "renormalized" they do not
    exist, and the softmax divides by the number of keys inside.
    """

    def __init__(self, kernel: Offset, stride: Offset, padding: Offset, border: str):
        super().__init__()
        self.kernel, self.stride, self.padding, self.border = kernel, stride, padding, border
        corners = (tuple(-p for p in padding), tuple(k - 1 - p for k, p in zip(kernel, padding)))
        self.geometry = Geometry(corners, stride, tuple((p, p) for p in padding))

    def forward(self, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        axes = len(self.kernel)
        if x.dim() == axes + 1:
            return self.forward(x[None])[0]
        if x.dim() != axes + 2:
            form = "(batch, channels, length)" if axes == 1 else "(batch, channels, height, width)"
            raise ShapeError(f"input of shape {tuple(x.shape)}; expected {form}")
        size = self.geometry.out_size(tuple(x.shape[2:]))
        if axes == 1:
            return rearrange(
                self._mean(rearrange(x, "b c x -> x (b c)"), 0, size[0]), "x (b c) -> b c x", b=len(x)
            )
        b, c = x.shape[:2]
        rows = self._mean(rearrange(x, "b c y x -> y (b c x)"), 0, size[0])
        columns = self._mean(rearrange(rows, "y (b c x) -> x (b c y)", b=b, c=c), 1, size[1])
        return rearrange(columns, "x (b c y) -> b c y x", b=b, c=c)

    def _mean(self, v: Float[Tensor, "m w"], axis: int, n: int) -> Float[Tensor, "n w"]:
        """The mean along one axis: a window on a grid is the product of windows along its axes."""
        first = -self.padding[axis]
        if self.border == "zeros" and first:
            padding = v.new_zeros(-first, v.shape[1])
            v, first = torch.cat([padding, v, padding]), 0
        zeros = v.new_zeros(1, 1, max(n, len(v)), 1)
        o = engine.attention(
            zeros[:, :, :n],
            zeros[:, :, : len(v)],
            v[None, None],
            window(0, after=self.kernel[axis] - 1),
            at=(first, self.stride[axis]),
        )
        assert isinstance(o, Tensor)
        return o[0, 0]

    def extra_repr(self) -> str:
        return f"mean over a window of {self.kernel}, stride {self.stride}, border {self.border}"


def average_pooling_of(pool: nn.AvgPool1d | nn.AvgPool2d) -> AveragePooling:
    """The attention of a pooling layer. `count_include_pad=False` is what softmax does without padding."""
    if pool.ceil_mode:
        raise SpecError(
            "ceil_mode=True allows windows that extend past the end; pad the input and use ceil_mode=False"
        )
    if getattr(pool, "divisor_override", None) is not None:
        raise SpecError(
            f"divisor_override={pool.divisor_override}: attention weights sum to 1; scale the result instead"
        )
    axes = 1 if isinstance(pool, nn.AvgPool1d) else 2
    kernel, stride, padding = (_each(x, axes) for x in (pool.kernel_size, pool.stride, pool.padding))
    return AveragePooling(kernel, stride, padding, "zeros" if pool.count_include_pad else "renormalized")


def _each(x: int | Offset, axes: int) -> Offset:
    return (x,) * axes if isinstance(x, int) else tuple(x)

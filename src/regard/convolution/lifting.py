"""From a convolution to attention: one head per tap, with scores that depend only on positions.

    y_q = Σ_h x[q + Δ_h] W_h + b         W_h = W_V^(h) W_O^(h), one tap of the kernel
        = Σ_h Σ_k a_h(q, k) x[k] W_h + b,     a_h(q, ·) = softmax_k −α_h ‖k − q − Δ_h‖²  as α → ∞

PyTorch sums x[q + t] W_t (a cross-correlation): tap t is the head with offset Δ = t. The shift is s = −Δ.
"""

from collections.abc import Sequence
from math import inf
from typing import Any

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .. import spec
from ..engine import attention as engine
from ..errors import ShapeError, SpecError
from ..position import ByDistance, quadratic
from . import bounds
from .average_pooling import AveragePooling, average_pooling_of
from .geometry import Geometry, Offset, geometry_of, tap_of

# Values on a line or a grid, and the same with one axis of positions first and all others flattened.
ALONG = {
    (1, 0): ("h b x d", "h x (b d)"),
    (2, 0): ("h b y x d", "h y (b x d)"),
    (2, 1): ("h b y x d", "h x (b y d)"),
}
QUERY_CHUNK = 256  # of a hard head at a time: only the keys of their windows are read
_RANK_TOLERANCE = {
    torch.float64: 1e-10
}  # relative to the largest singular value (law L28); other dtypes 1e-4


class Lifted(nn.Module):
    """A convolution as multi-head attention; it takes and returns tensors in the layout of the convolution.

    On a grid the weights, soft or hard, are a product over the axes, so attention runs along one axis at a time and
    no table for the whole image is built. `weights(size)` returns the full weights.
    """

    def __init__(
        self,
        geometry: Geometry,
        taps: Float[Tensor, "h c_out c_in"],
        bias: Float[Tensor, " c_out"] | None = None,
        *,
        sharpness: int | float | None = None,
        d_v: int | None = None,
        groups: int = 1,
    ):
        super().__init__()
        heads, c_out, c_in = taps.shape
        self.geometry, self.hard, self.groups = geometry, sharpness is None, groups
        like: dict[str, Any] = {"dtype": taps.dtype, "device": taps.device}
        into, out = _factors(taps.detach(), d_v, geometry)
        self.d_v = into.shape[-1]
        self.w_v = nn.Linear(c_in, heads * self.d_v, bias=False, **like)
        self.w_o = nn.Linear(heads * self.d_v, c_out, bias=bias is not None, **like)
        center = torch.tensor(geometry.offsets, **like)
        alpha = torch.full((heads,), 1.0 if sharpness is None else float(sharpness), **like)
        # With hard attention only the values have gradients.
        self.center = nn.Parameter(center, requires_grad=not self.hard)
        self.alpha = nn.Parameter(alpha, requires_grad=not self.hard)
        with torch.no_grad():
            self.w_v.weight.copy_(rearrange(into, "h c d -> (h d) c"))
            self.w_o.weight.copy_(rearrange(out, "h d o -> o (h d)"))
            if bias is not None:
                self.w_o.bias.copy_(bias)

    @property
    def heads(self) -> int:
        return len(self.center)

    @property
    def taps(self) -> Float[Tensor, "h c_out c_in"]:
        """W_V^(h) W_O^(h): the matrix that multiplies the key of each head."""
        into = rearrange(self.w_v.weight, "(h d) c -> h d c", h=self.heads)
        out = rearrange(self.w_o.weight, "o (h d) -> h o d", h=self.heads)
        return einsum(out, into, "h o d, h d c -> h o c")

    def forward(self, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """(b, c, n) or (b, c, height, width) in; the same layout out, with c_out channels."""
        axes, c_in = self.geometry.axes, self.w_v.in_features
        if x.dim() not in (axes + 1, axes + 2) or x.shape[-axes - 1] != c_in:
            form = "(batch, {0}, length)" if axes == 1 else "(batch, {0}, height, width)"
            raise ShapeError(f"input of shape {tuple(x.shape)}; expected {form.format(c_in)}")
        if x.dim() == axes + 1:
            return self.forward(x[None])[0]
        size = self.geometry.out_size(tuple(x.shape[2:]))
        cells = rearrange(self.geometry.pad(x), "b c ... -> b ... c")
        v = rearrange(self.w_v(cells), "b ... (h d) -> h b ... d", h=self.heads)
        for axis in range(axes):
            v = self._along(v, axis, size[axis])
        return rearrange(self.w_o(rearrange(v, "h b ... d -> b ... (h d)")), "b ... c -> b c ...")

    def weights(self, size: Offset) -> Float[Tensor, "h n m"]:
        """The weights on an input of this size: n queries and m keys (including the border), in row-major order."""
        out = self.geometry.out_size(size)
        table = None
        for axis, n in enumerate(out):
            m = size[axis] + sum(self.geometry.border[axis])
            eye = torch.eye(m, dtype=self.alpha.dtype, device=self.alpha.device)
            along = self._attend(eye.expand(self.heads, m, m), axis, self.geometry.border[axis][0], n)
            table = along if table is None else einsum(table, along, "h n m, h p q -> h n p m q")
            table = table if table.dim() == 3 else rearrange(table, "h n p m q -> h (n p) (m q)")
        assert table is not None
        return table

    def leak(self) -> Float[Tensor, " h"]:
        """The largest weight that each head can have outside its nearest shift, for any input; 0 if hard."""
        leak = bounds.leak(self.center, self.alpha)
        return torch.zeros_like(leak) if self.hard else leak

    def bound(self, x: Float[Tensor, "b c *size"]) -> Float[Tensor, "b c_out"]:
        """Σ_h leak_h · range over the keys of x·W_h: a bound on the distance from the convolution (law L26)."""
        cells = rearrange(self.geometry.pad(x), "b c ... -> b (...) c").detach().double()
        reached = einsum(cells, self.taps.detach().double(), "b m c, h o c -> b h o m")
        return einsum(reached.amax(-1) - reached.amin(-1), self.leak(), "b h o, h -> b o")

    def bound_over(self, span: int | float) -> float:
        """The same for every input whose channels, including the border, have a range of at most `span`."""
        return float(einsum(self.taps.detach().double().abs(), self.leak(), "h o c, h -> o").max() * span)

    def declare(self, size: Offset) -> spec.Attention:
        """The declaration of the same attention over the padded input of this size, for example to get its cost."""
        padded = tuple(n + sum(border) for n, border in zip(size, self.geometry.border))
        return spec.Attention(
            self.w_v.in_features,
            heads=self.heads,
            d_k=1,
            d_v=self.d_v,
            d_out=self.w_o.out_features,
            position=quadratic() if len(padded) == 1 else quadratic(grid=(padded[0], padded[1])),
            score="position",
            scale=inf if self.hard else None,
            biases="none" if self.w_o.bias is None else "output",
        )

    def _along(self, v: Float[Tensor, "h b *s d"], axis: int, n: int) -> Float[Tensor, "h b *t d"]:
        """Attention along one axis of the grid, for all positions of the other axis at once."""
        grid_form, flat_form = ALONG[self.geometry.axes, axis]
        flat, before = rearrange(v, f"{grid_form} -> {flat_form}"), self.geometry.border[axis][0]
        if self.hard:
            mixed = torch.cat(list(self._in_chunks(flat, axis, before, n)), dim=1)
        else:
            mixed = self._attend(flat, axis, before, n)
        across = {"b": v.shape[1], "x": v.shape[-2], "y": v.shape[2]}
        return rearrange(
            mixed, f"{flat_form} -> {grid_form}", **{a: across[a] for a in "bxy" if a in flat_form[4:]}
        )

    def _in_chunks(self, v: Float[Tensor, "h m w"], axis: int, before: int, n: int):
        """Hard heads, a chunk of queries at a time: they only need the keys in their windows."""
        step, (low, high) = self.geometry.stride[axis], self.geometry.span(axis)
        for q in range(0, n, QUERY_CHUNK):
            count = min(QUERY_CHUNK, n - q)
            first = before + step * q
            keys = v[:, first + low : first + step * (count - 1) + high + 1]
            yield self._attend(keys, axis, -low, count)

    def _attend(self, v: Float[Tensor, "h m w"], axis: int, first: int, n: int) -> Float[Tensor, "h n w"]:
        """softmax_j −α(j − i − Δ)² over the keys j, for n queries i = first, first + stride, …

        The constant −αΔ² is included, unlike in `quadratic_scores`: scores near the target are then small and exact.
        """
        m, step = v.shape[1], self.geometry.stride[axis]
        reach = max(m - 1, first + step * (n - 1), m - 1 - first)
        precise = torch.promote_types(self.alpha.dtype, torch.float32)
        distance = torch.arange(-reach, reach + 1, device=v.device, dtype=precise)
        table = -self.alpha.to(precise)[:, None] * (distance - self.center[:, axis, None].to(precise)) ** 2
        zeros = v.new_zeros(1, self.heads, max(n, m), 1)
        o = engine.attention(
            zeros[:, :, :n],
            zeros[:, :, :m],
            v[None],
            bias=ByDistance(table=table),
            scale=inf if self.hard else 1.0,
            at=(first, step),
        )
        assert isinstance(o, Tensor)
        return o[0]

    def extra_repr(self) -> str:
        form = "hard" if self.hard else "soft"
        return (
            f"{form}, {self.heads} heads at offsets {self.geometry.offsets}, border of {self.geometry.mode}"
        )


def lift(
    conv: nn.Module,
    *,
    sharpness: int | float | None = None,
    d_v: int | None = None,
    heads: int | None = None,
) -> Lifted | AveragePooling:
    """The convolution as multi-head attention whose scores depend only on positions; called like the convolution.

    Takes nn.Conv1d and nn.Conv2d, and nn.AvgPool1d and nn.AvgPool2d (equal scores over a window, law L18). Hard
    attention, the default, is exact; with `sharpness` α it is soft, its offsets and sharpness are trainable, and its
    error is at most `bound(x)`. `sharpness_for` returns the α for a given error. d_v: width of a head, at least the
    rank of its tap; None is always enough. heads: if there are more heads than taps, the others have zero values.
    """
    if isinstance(conv, nn.AvgPool1d | nn.AvgPool2d):
        return average_pooling_of(conv)
    _check(conv, sharpness)
    assert isinstance(conv, nn.Conv1d | nn.Conv2d)
    taps = _dense_taps(conv)
    geometry, count = geometry_of(conv), len(taps)
    if heads is not None and heads < count:
        raise SpecError(
            f"heads={heads} is less than the {count} taps of a kernel of {_by(conv.kernel_size)}; "
            f"use heads={count}, or leave it out"
        )
    if spare := (heads or count) - count:
        near = min(geometry.offsets, key=lambda offset: sum(map(abs, offset)))  # every query has a key there
        geometry = Geometry(
            (*geometry.offsets, *[near] * spare), geometry.stride, geometry.border, geometry.mode
        )
        taps = torch.cat([taps, taps.new_zeros(spare, *taps.shape[1:])])
    lifted = Lifted(geometry, taps, conv.bias, sharpness=sharpness, d_v=d_v, groups=conv.groups)
    return lifted.train(conv.training)


def shift_heads(
    shifts: Sequence[int | Offset],
    taps: Float[Tensor, "h c_in c_out"],
    bias: Float[Tensor, " c_out"] | None = None,
    *,
    stride: int | Offset = 1,
    sharpness: int | float | None = None,
    heads: int | None = None,
) -> Lifted:
    """y_q = Σ_h x[q − s_h] W_h + b at q = 0, stride, …, with zero padding: any assignment of shifts to heads.

    taps: W_h, c_in × c_out. There is one output per `stride` inputs.
    """
    offsets = [tuple(-s for s in ((shift,) if isinstance(shift, int) else shift)) for shift in shifts]
    if len(offsets) != len(taps):
        raise SpecError(f"{len(offsets)} shifts and {len(taps)} taps; pass one tap per shift")
    if heads is not None and heads < len(offsets):
        raise SpecError(f"heads={heads} is less than the number of shifts; use heads={len(offsets)}")
    axes = len(offsets[0])
    border = tuple(
        (max(0, -min(o[axis] for o in offsets)), max(0, max(o[axis] for o in offsets)))
        for axis in range(axes)
    )
    steps = (stride,) * axes if isinstance(stride, int) else tuple(stride)
    geometry = Geometry(tuple(offsets), steps, border)
    return Lifted(geometry, rearrange(taps, "h c o -> h o c"), bias, sharpness=sharpness)


def sharpness_for(conv: nn.Conv1d | nn.Conv2d, error: int | float, span: int | float = 1.0) -> float:
    """The smallest α whose lifted form is within `error` of the convolution, for channels with a range of `span`.

    The range includes the border: inputs in [−1, 1] have span 2, and inputs in [3, 4] padded with zeros have 4.
    """
    _check(conv, None)
    weight = _dense_taps(conv).double().abs().sum((0, 2)).max().item() * span
    return bounds.sharpness(error, len(conv.kernel_size), weight)


def _check(conv: nn.Module, sharpness: int | float | None) -> None:
    if not isinstance(conv, nn.Conv1d | nn.Conv2d):
        raise SpecError(
            f"{type(conv).__name__} cannot be lifted; use an nn.Conv1d, nn.Conv2d, nn.AvgPool1d or nn.AvgPool2d"
        )
    if is_lazy(conv.weight):
        raise SpecError(f"{type(conv).__name__} has no weights yet; call it once before lifting it")
    if conv.weight.is_complex():
        raise SpecError(
            f"the kernel has dtype {conv.weight.dtype}; lift its real and imaginary parts separately"
        )
    if sharpness is not None and not 0 < sharpness < inf:
        raise SpecError(
            f"sharpness={sharpness} is not a positive finite number; leave it out for hard attention"
        )


def _dense_taps(conv: nn.Conv1d | nn.Conv2d) -> Float[Tensor, "h c_out c_in"]:
    """One matrix per tap, in the order of the geometry's offsets; groups become diagonal blocks."""
    taps = rearrange(conv.weight.detach(), "o i ... -> (...) o i")
    if conv.groups == 1:
        return taps
    blocks = rearrange(taps, "h (g o) i -> h g o i", g=conv.groups)
    eye = torch.eye(conv.groups, dtype=taps.dtype, device=taps.device)
    return rearrange(einsum(blocks, eye, "h g o i, g f -> h g o f i"), "h g o f i -> h (g o) (f i)")


def _factors(
    taps: Float[Tensor, "h c_out c_in"], d_v: int | None, geometry: Geometry
) -> tuple[Float[Tensor, "h c_in d_v"], Float[Tensor, "h d_v c_out"]]:
    """W_V and W_O of each head, with W_V W_O = tapᵀ. If d_v is large enough, one of them is the identity."""
    heads, c_out, c_in = taps.shape
    matrices = rearrange(taps, "h o c -> h c o")
    width = min(c_in, c_out)
    if d_v is None or d_v >= width:
        size = width if d_v is None else d_v
        eye = torch.eye(width, size, dtype=taps.dtype, device=taps.device).expand(heads, width, size)
        spare = taps.new_zeros(heads, 1, 1)
        if c_in <= c_out:
            return eye, _zero_padded(matrices, size, 1, spare)
        return _zero_padded(matrices, size, 2, spare), rearrange(eye, "h c d -> h d c")
    u, s, vh = torch.linalg.svd(matrices.double(), full_matrices=False)
    small = _RANK_TOLERANCE.get(taps.dtype, 1e-4)
    ranks = (s > small * s[:, :1]).sum(-1)
    worst = int(ranks.argmax())
    if ranks[worst] > d_v:
        raise SpecError(
            f"the tap at offset {geometry.offsets[worst]} (head {worst}) has rank {int(ranks[worst])}, which does "
            f"not fit d_v={d_v}; use d_v={int(ranks[worst])}"
        )
    root = s[:, :d_v].sqrt()
    into, out = u[..., :d_v] * root[:, None], root[..., None] * vh[:, :d_v]
    return into.to(taps.dtype), out.to(taps.dtype)


def _zero_padded(
    x: Float[Tensor, "h a b"], size: int, dim: int, zero: Float[Tensor, "h 1 1"]
) -> Float[Tensor, "h c d"]:
    """x padded with zeros to `size` along one dimension."""
    missing = size - x.shape[dim]
    shape = [len(x), missing, x.shape[2]] if dim == 1 else [len(x), x.shape[1], missing]
    return x if not missing else torch.cat([x, zero.expand(*shape)], dim)


def _by(kernel: Offset) -> str:
    return " × ".join(map(str, kernel))


__all__ = ["Lifted", "lift", "sharpness_for", "shift_heads", "tap_of"]

"""From a convolution to attention: a head a tap, its score of position alone.

    y_q = Σ_h x[q + Δ_h] W_h + b         W_h = W_V^(h) W_O^(h), one tap of the kernel
        = Σ_h Σ_k a_h(q, k) x[k] W_h + b,     a_h(q, ·) = softmax_k −α_h ‖k − q − Δ_h‖²  as α → ∞

Frameworks sum x[q + t] W_t, unflipped: tap t is the head of offset Δ = t. The documents' shift is s = −Δ.
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
from .bands import Band, band
from .frame import Frame, Offset, frame, tap_of

# Values on a line or a grid, and the same with one axis of positions ahead of all that lies across it.
ALONG = {
    (1, 0): ("h b x d", "h x (b d)"),
    (2, 0): ("h b y x d", "h y (b x d)"),
    (2, 1): ("h b y x d", "h x (b y d)"),
}
QUERIES = 256  # of a hard head at a time: it reads the keys of their windows alone
_RANK = {torch.float64: 1e-10}  # of the first singular value (L28); other dtypes 1e-4


class Lifted(nn.Module):
    """A convolution as multi-head attention; called as the convolution was, in its layout.

    On a grid the weights are a product of those along its axes, soft or hard, so they are made and applied one
    axis at a time; nothing is n × m of the whole image. `weights(size)` writes them out.
    """

    def __init__(
        self,
        frame: Frame,
        taps: Float[Tensor, "h c_out c_in"],
        bias: Float[Tensor, " c_out"] | None = None,
        *,
        sharpness: int | float | None = None,
        d_v: int | None = None,
        groups: int = 1,
    ):
        super().__init__()
        heads, c_out, c_in = taps.shape
        self.frame, self.hard, self.groups = frame, sharpness is None, groups
        like: dict[str, Any] = {"dtype": taps.dtype, "device": taps.device}
        into, out = _factors(taps.detach(), d_v, frame)
        self.d_v = into.shape[-1]
        self.w_v = nn.Linear(c_in, heads * self.d_v, bias=False, **like)
        self.w_o = nn.Linear(heads * self.d_v, c_out, bias=bias is not None, **like)
        centre = torch.tensor(frame.offsets, **like)
        alpha = torch.full((heads,), 1.0 if sharpness is None else float(sharpness), **like)
        # A hard head's gradient reaches its values alone.
        self.centre = nn.Parameter(centre, requires_grad=not self.hard)
        self.alpha = nn.Parameter(alpha, requires_grad=not self.hard)
        with torch.no_grad():
            self.w_v.weight.copy_(rearrange(into, "h c d -> (h d) c"))
            self.w_o.weight.copy_(rearrange(out, "h d o -> o (h d)"))
            if bias is not None:
                self.w_o.bias.copy_(bias)

    @property
    def heads(self) -> int:
        return len(self.centre)

    @property
    def taps(self) -> Float[Tensor, "h c_out c_in"]:
        """W_V^(h) W_O^(h): what each head's key is multiplied with."""
        into = rearrange(self.w_v.weight, "(h d) c -> h d c", h=self.heads)
        out = rearrange(self.w_o.weight, "o (h d) -> h o d", h=self.heads)
        return einsum(out, into, "h o d, h d c -> h o c")

    def forward(self, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """(b, c, n) or (b, c, height, width) in, the same with c_out and fewer or more positions out."""
        axes, c_in = self.frame.axes, self.w_v.in_features
        if x.dim() not in (axes + 1, axes + 2) or x.shape[-axes - 1] != c_in:
            form = "(batch, {0}, length)" if axes == 1 else "(batch, {0}, height, width)"
            raise ShapeError(f"input of shape {tuple(x.shape)}; {form.format(c_in)} is needed")
        if x.dim() == axes + 1:
            return self.forward(x[None])[0]
        size = self.frame.out_size(tuple(x.shape[2:]))
        cells = rearrange(self.frame.pad(x), "b c ... -> b ... c")
        v = rearrange(self.w_v(cells), "b ... (h d) -> h b ... d", h=self.heads)
        for axis in range(axes):
            v = self._along(v, axis, size[axis])
        return rearrange(self.w_o(rearrange(v, "h b ... d -> b ... (h d)")), "b ... c -> b c ...")

    def weights(self, size: Offset) -> Float[Tensor, "h n m"]:
        """The weights on an input of this size: n queries, m keys (the border's among them), row by row."""
        out = self.frame.out_size(size)
        table = None
        for axis, n in enumerate(out):
            m = size[axis] + sum(self.frame.border[axis])
            eye = torch.eye(m, dtype=self.alpha.dtype, device=self.alpha.device)
            along = self._attend(eye.expand(self.heads, m, m), axis, self.frame.border[axis][0], n)
            table = along if table is None else einsum(table, along, "h n m, h p q -> h n p m q")
            table = table if table.dim() == 3 else rearrange(table, "h n p m q -> h (n p) (m q)")
        assert table is not None
        return table

    def leak(self) -> Float[Tensor, " h"]:
        """The most weight that each head can miss at its nearest shift, whatever the input; 0 when hard."""
        found = bounds.leak(self.centre, self.alpha)
        return torch.zeros_like(found) if self.hard else found

    def bound(self, x: Float[Tensor, "b c *size"]) -> Float[Tensor, "b c_out"]:
        """Σ_h leak_h · range over the keys of x·W_h: no output is further from the convolution's (L26)."""
        cells = rearrange(self.frame.pad(x), "b c ... -> b (...) c").detach().double()
        reached = einsum(cells, self.taps.detach().double(), "b m c, h o c -> b h o m")
        return einsum(reached.amax(-1) - reached.amin(-1), self.leak(), "b h o, h -> b o")

    def bound_over(self, span: int | float) -> float:
        """The same for every input whose channels, border included, range over no more than `span`."""
        return float(einsum(self.taps.detach().double().abs(), self.leak(), "h o c, h -> o").max() * span)

    def declare(self, size: Offset) -> spec.Attention:
        """The attention over the padded input of this size, as a spec: what it costs is what this would cost."""
        padded = tuple(n + sum(border) for n, border in zip(size, self.frame.border))
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
        """Attention along one axis of the grid, the same for all that lies across it."""
        apart, together = ALONG[self.frame.axes, axis]
        flat, before = rearrange(v, f"{apart} -> {together}"), self.frame.border[axis][0]
        if self.hard:
            mixed = torch.cat(list(self._by_window(flat, axis, before, n)), dim=1)
        else:
            mixed = self._attend(flat, axis, before, n)
        across = {"b": v.shape[1], "x": v.shape[-2], "y": v.shape[2]}
        return rearrange(
            mixed, f"{together} -> {apart}", **{a: across[a] for a in "bxy" if a in together[4:]}
        )

    def _by_window(self, v: Float[Tensor, "h m w"], axis: int, before: int, n: int):
        """Hard heads, some queries at a time: the keys they look at lie in their windows."""
        step, (low, high) = self.frame.stride[axis], self.frame.span(axis)
        for q in range(0, n, QUERIES):
            some = min(QUERIES, n - q)
            first = before + step * q
            keys = v[:, first + low : first + step * (some - 1) + high + 1]
            yield self._attend(keys, axis, -low, some)

    def _attend(self, v: Float[Tensor, "h m w"], axis: int, first: int, n: int) -> Float[Tensor, "h n w"]:
        """softmax_j −α(j − i − Δ)² over the keys j, for n queries i = first, first + stride, …

        The constant that −α(δ² − 2δΔ) leaves out is kept: the scores near the target are then small and exact.
        """
        m, step = v.shape[1], self.frame.stride[axis]
        reach = max(m - 1, first + step * (n - 1), m - 1 - first)
        wide = torch.promote_types(self.alpha.dtype, torch.float32)
        distance = torch.arange(-reach, reach + 1, device=v.device, dtype=wide)
        table = -self.alpha.to(wide)[:, None] * (distance - self.centre[:, axis, None].to(wide)) ** 2
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
        return f"{form}, {self.heads} heads at offsets {self.frame.offsets}, border of {self.frame.mode}"


def lift(
    conv: nn.Module,
    *,
    sharpness: int | float | None = None,
    d_v: int | None = None,
    heads: int | None = None,
) -> Lifted | Band:
    """The convolution as multi-head attention whose scores are of position alone; called as it was.

    Takes nn.Conv1d and nn.Conv2d, and nn.AvgPool1d and nn.AvgPool2d as a band of equal scores (L18). The hard form
    is exact; with `sharpness` α it is soft, its offsets and sharpness train, and its error is within `bound(x)`.
    `sharpness_for` finds the α of a wanted error. d_v: the width of a head, which its tap's rank must not exceed;
    None is enough for any. heads: more than taps leaves spare ones, which add nothing until they learn to.
    """
    if isinstance(conv, nn.AvgPool1d | nn.AvgPool2d):
        return band(conv)
    _check(conv, sharpness)
    assert isinstance(conv, nn.Conv1d | nn.Conv2d)
    taps = _dense_taps(conv)
    place, count = frame(conv), len(taps)
    if heads is not None and heads < count:
        raise SpecError(
            f"{count} offsets need a head each, and heads={heads}; "
            f"use heads={count} or leave it out for a kernel of {_by(conv.kernel_size)}"
        )
    if spare := (heads or count) - count:
        near = min(place.offsets, key=lambda offset: sum(map(abs, offset)))  # a key of every query
        place = Frame((*place.offsets, *[near] * spare), place.stride, place.border, place.mode)
        taps = torch.cat([taps, taps.new_zeros(spare, *taps.shape[1:])])
    lifted = Lifted(place, taps, conv.bias, sharpness=sharpness, d_v=d_v, groups=conv.groups)
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
    """y_q = Σ_h x[q − s_h] W_h + b at q = 0, stride, …, zero past the border: any map of heads to shifts (D10).

    taps: the documents' W_h, c_in × c_out. As many outputs as every stride-th input.
    """
    offsets = [tuple(-s for s in ((shift,) if isinstance(shift, int) else shift)) for shift in shifts]
    if len(offsets) != len(taps):
        raise SpecError(f"{len(offsets)} shifts and {len(taps)} taps; one tap a shift is needed")
    if heads is not None and heads < len(offsets):
        raise SpecError(
            f"{len(offsets)} offsets need a head each, and heads={heads}; use heads={len(offsets)}"
        )
    axes = len(offsets[0])
    border = tuple(
        (max(0, -min(o[axis] for o in offsets)), max(0, max(o[axis] for o in offsets)))
        for axis in range(axes)
    )
    steps = (stride,) * axes if isinstance(stride, int) else tuple(stride)
    place = Frame(tuple(offsets), steps, border)
    return Lifted(place, rearrange(taps, "h c o -> h o c"), bias, sharpness=sharpness)


def sharpness_for(conv: nn.Conv1d | nn.Conv2d, error: int | float, span: int | float = 1.0) -> float:
    """The least α whose lifted form is within `error` of the convolution, for channels that range over `span`.

    The range counts the border: inputs in [−1, 1] have span 2, and inputs in [3, 4] padded with zeros have 4.
    """
    _check(conv, None)
    weight = _dense_taps(conv).double().abs().sum((0, 2)).max().item() * span
    return bounds.sharpness(error, len(conv.kernel_size), weight)


def _check(conv: nn.Module, sharpness: int | float | None) -> None:
    if not isinstance(conv, nn.Conv1d | nn.Conv2d):
        raise SpecError(
            f"{type(conv).__name__} is no convolution that attention can take over; give an nn.Conv1d or nn.Conv2d"
            f" (or nn.AvgPool1d, nn.AvgPool2d)"
        )
    if is_lazy(conv.weight):
        raise SpecError(f"{type(conv).__name__} has no weights yet; call it once, then lift it")
    if conv.weight.is_complex():
        raise SpecError(f"a kernel of {conv.weight.dtype}: attention mixes real values; lift its parts apart")
    if sharpness is not None and not 0 < sharpness < inf:
        raise SpecError(f"sharpness={sharpness}: use a finite one above 0, or leave it out for the hard form")


def _dense_taps(conv: nn.Conv1d | nn.Conv2d) -> Float[Tensor, "h c_out c_in"]:
    """One matrix a tap, in the order of the frame's offsets; groups become its diagonal blocks."""
    taps = rearrange(conv.weight.detach(), "o i ... -> (...) o i")
    if conv.groups == 1:
        return taps
    blocks = rearrange(taps, "h (g o) i -> h g o i", g=conv.groups)
    eye = torch.eye(conv.groups, dtype=taps.dtype, device=taps.device)
    return rearrange(einsum(blocks, eye, "h g o i, g f -> h g o f i"), "h g o f i -> h (g o) (f i)")


def _factors(
    taps: Float[Tensor, "h c_out c_in"], d_v: int | None, frame: Frame
) -> tuple[Float[Tensor, "h c_in d_v"], Float[Tensor, "h d_v c_out"]]:
    """W_V and W_O of each head, with W_V W_O = tapᵀ. Where a head is wide enough one of them is the identity."""
    heads, c_out, c_in = taps.shape
    matrices = rearrange(taps, "h o c -> h c o")
    width = min(c_in, c_out)
    if d_v is None or d_v >= width:
        size = width if d_v is None else d_v
        eye = torch.eye(width, size, dtype=taps.dtype, device=taps.device).expand(heads, width, size)
        spare = taps.new_zeros(heads, 1, 1)
        if c_in <= c_out:
            return eye, _grown(matrices, size, 1, spare)
        return _grown(matrices, size, 2, spare), rearrange(eye, "h c d -> h d c")
    u, s, vh = torch.linalg.svd(matrices.double(), full_matrices=False)
    small = _RANK.get(taps.dtype, 1e-4)
    ranks = (s > small * s[:, :1]).sum(-1)
    worst = int(ranks.argmax())
    if ranks[worst] > d_v:
        raise SpecError(
            f"the tap at offset {frame.offsets[worst]} (head {worst}) has rank {int(ranks[worst])}, and a head of "
            f"d_v={d_v} holds at most {d_v}; use d_v={int(ranks[worst])}"
        )
    root = s[:, :d_v].sqrt()
    into, out = u[..., :d_v] * root[:, None], root[..., None] * vh[:, :d_v]
    return into.to(taps.dtype), out.to(taps.dtype)


def _grown(
    x: Float[Tensor, "h a b"], size: int, dim: int, zero: Float[Tensor, "h 1 1"]
) -> Float[Tensor, "h c d"]:
    """x with zeros up to `size` along one dimension."""
    missing = size - x.shape[dim]
    shape = [len(x), missing, x.shape[2]] if dim == 1 else [len(x), x.shape[1], missing]
    return x if not missing else torch.cat([x, zero.expand(*shape)], dim)


def _by(kernel: Offset) -> str:
    return " × ".join(map(str, kernel))


__all__ = ["Lifted", "lift", "sharpness_for", "shift_heads", "tap_of"]

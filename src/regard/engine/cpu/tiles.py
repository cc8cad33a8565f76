"""The CPU executor: softmax attention over groups of tiles, forward and backward; nothing is n × m.

    s = scale · q kᵀ + bias + mask      weights = softmax(s)      o = weights v      softcap: c·tanh(scale · q kᵀ / c)
    ds = weights ∘ (do vᵀ − δ)          δ = do·o − dlse

A call is a layout and a few options (TileAttention). Each piece of the layout goes through the same steps, whether
its keys are strided views or gathered copies: scores of all its parts side by side; bias and mask; a softmax, or,
where other pieces have the same rows, exponentials that are merged by log-sum-exp; dropout; the product with the
values. Backward, exp(s − lse) with the merged lse is the weight of a pair in the whole softmax, so each piece
adds its share of the exact gradients. Weights of a softmax over all keys are saved if they are few.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import frexp, inf, prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import repeat
from jaxtyping import Float, Int
from torch import Tensor

from ... import compat
from ...errors import BackendError
from ...pattern import At, Pattern, positions
from ...position import ByDistance
from .. import reference_backend
from ..call import Call, computed_in, suppress_no_batching, visible_ranges, without_graph
from . import kernels
from .gathered_layout import GatheredLayout, GatheredPiece
from .kernels import Buffers, with_buffers
from .layout import Layout, Piece, TileGroup

AnyPiece = Piece | GatheredPiece
Tensors = dict[str, Tensor]  # by name
Gradients = tuple[Tensor | None, ...]
Weights = list[Tensor | None]  # of each piece its weights, or None where they are computed a second time


@dataclass
class Executor:
    """One pass over the pieces of a call."""

    call: "TileAttention"
    scale: float  # of the products
    buffers: Buffers
    budget: int = 0  # how many weights may still be saved for the backward pass
    weights: Weights = field(default_factory=list)

    @cached_property
    def generator(self) -> torch.Generator:
        """Sampled in the same order forward and backward, it gives the same numbers."""
        return torch.Generator().manual_seed(self.call.seed)

    def dropout(self, weights: Tensor) -> Tensor | None:
        """What dropout multiplies weights with, 0 or 1/(1 − p)."""
        if not self.call.dropout_p:
            return None
        stay = 1.0 - self.call.dropout_p
        return torch.empty_like(weights).bernoulli_(stay, generator=self.generator).div_(stay)

    def save(self, shape: tuple[int, int, int]) -> Tensor | None:
        """Memory for the weights of the next piece; None if the budget is spent."""
        fits = prod(shape) <= self.budget
        self.budget -= prod(shape) if fits else 0
        self.weights.append(self.buffers.like.new_empty(shape) if fits else None)
        return self.weights[-1]

    def forward(self, piece: AnyPiece, rows: Tensors, keys: Tensors) -> None:
        buffers, o = self.buffers, piece.rows_of(rows["o"])
        q = piece.load_rows(rows["q"], "q", buffers)
        k, v = piece.load_keys(keys["k"], "k", buffers), piece.load_keys(keys["v"], "v", buffers)
        w = self._scores(piece, q, k, rows, self.save(piece.score_shape) if self.call.one_softmax else None)
        if self.call.one_softmax:
            torch.softmax(w, -1, out=w)
            piece.store(o, kernels.mix(w, v, piece.output(o, "o", buffers)))
            return
        lse = piece.rows_of(rows["lse"])
        largest, total = kernels.exponentials_(w)
        if (dropout := self.dropout(w)) is not None:
            w.mul_(dropout)
        part = kernels.mix(w, v, piece.output(o, "o", buffers)).div_(total)
        part_lse = largest.add_(total.log_()).squeeze(-1)
        if piece.fresh:
            piece.store(o, part)
            piece.store(lse, part_lse)
        else:
            assert isinstance(piece, Piece)
            kernels.join(o, lse, piece.in_order(part), piece.in_order(part_lse))

    def _scores(
        self, piece: AnyPiece, q: Tensor, k: list[Tensor], rows: Tensors, into: Tensor | None = None
    ) -> Float[Tensor, "t r keys"]:
        """Of all parts side by side, with softcap, bias and mask."""
        s = self.buffers("w", *piece.score_shape) if into is None else into
        e, mask, softcap = rows.get("e"), piece.mask(q.dtype), self.call.softcap
        if e is None and softcap is None:
            return kernels.scores(q, k, self.scale, s, self.buffers, mask)
        assert isinstance(piece, Piece)
        kernels.product(q, k[0].mT, self.scale if softcap is None else self.scale / softcap, s)
        if softcap is not None:
            s.tanh_()
            torch.mul(s, s, out=self.buffers("tanh²", *piece.score_shape))
            s.mul_(softcap)
        if e is not None:
            s.add_(piece.subgroup.bias_of(e[piece.heads], self.call.distances[0]))
        return s if mask is None else s.add_(mask)

    def backward(self, piece: AnyPiece, rows: Tensors, keys: dict[str, Any], saved: Tensor | None) -> None:
        """Add the gradients of a piece. saved: its weights, if they were saved."""
        buffers, de = self.buffers, rows.get("de")
        q, do = piece.load_rows(rows["q"], "q", buffers), piece.load_rows(rows["do"], "do", buffers)
        k, v = piece.load_keys(keys["k"], "k", buffers), piece.load_keys(keys["v"], "v", buffers)
        w = self._weights(piece, q, k, rows) if saved is None else saved
        # Where parts are put side by side, the scale is applied in that step, and ds carries it on to dq and dk.
        inner, outer = (self.scale, 1.0) if len(v) > 1 else (1.0, self.scale)
        ds = buffers("ds", *piece.score_shape) if de is None else kernels.padded(piece.score_shape, buffers)
        kernels.scores(do, v, inner, ds, buffers)
        dropout = self.dropout(ds)
        ds = ds if dropout is None else ds.mul_(dropout)
        if piece.alone and de is None:
            # δ = Σ weights ∘ do vᵀ is nearer than do·o, above all where a row has one key and ds is 0.
            compat.softmax_backward_(ds, w)
        else:
            ds.sub_(self._row(piece, rows["delta"])).mul_(w)
        if "dlse" in rows:
            ds.addcmul_(w, self._row(piece, rows["dlse"]))
        if de is not None:
            assert isinstance(piece, Piece)
            diagonals = piece.subgroup.diagonals(self.call.distances[0])
            kernels.add_along_diagonals(de[piece.heads], ds, diagonals)
        if self.call.softcap is not None:  # d tanh = 1 − tanh²
            ds.addcmul_(ds, buffers("tanh²", *piece.score_shape), value=-1.0)
        dq = piece.rows_of(rows["dq"])
        piece.store(dq, kernels.mix(ds, k, piece.output(dq, "dq", buffers), outer))
        piece.add_to_keys(keys, "dk", ds, q, outer, buffers)
        piece.add_to_keys(keys, "dv", w if dropout is None else w.mul_(dropout), do, 1.0, buffers)

    def _row(self, piece: AnyPiece, x: Tensor) -> Float[Tensor, "t r 1"]:
        """One number per row."""
        return piece.load_rows(x, "row", self.buffers)[..., None]

    def _weights(
        self, piece: AnyPiece, q: Tensor, k: list[Tensor], rows: Tensors
    ) -> Float[Tensor, "t r keys"]:
        """In the softmax over all keys of a row. Where the piece has all of them its own softmax is nearer than
        exp(s − lse), as lse is rounded."""
        s = self._scores(piece, q, k, rows)
        if not piece.alone:
            return kernels.exp_(s.sub_(self._row(piece, rows["lse"])))
        torch.softmax(s, -1, out=s)
        if piece.has_empty_row and "lse" in rows:
            s.masked_fill_(self._row(piece, rows["lse"]) == inf, 0.0)
        return s

    # Groups that PyTorch's fused op runs, which holds no scores.

    def fused(self, group: TileGroup, rows: Tensors, keys: Tensors) -> None:
        """The bias is a view of e, which the op adds as a mask; the rows are in reverse order then."""
        q, o, lse = (group.rows_of(rows[x]) for x in ("q", "o", "lse"))
        k, v = (group.keys_of(keys[x]) for x in ("k", "v"))
        e = rows.get("e")
        triangle = group.triangle and e is None
        mask = None if triangle or (masks := group.mask(q.dtype)) is None else masks[0]
        if e is not None:
            q, bias = q.flip(2), group.bias_of(e, self.call.distances[0])[:, None]
            bias = bias if mask is None else bias + mask
            mask = bias if bias.stride(-1) == 1 else bias.contiguous()
        part, part_lse = kernels.fused_forward(q, k, v, self.scale, mask, triangle, group.empty_rows)
        if e is not None:
            part, part_lse = part.flip(2), part_lse.flip(2)
        kernels.join(o, lse, part, part_lse)

    def fused_backward(self, group: TileGroup, rows: Tensors, keys: Tensors) -> None:
        """The op subtracts δ = do·o from each do·v; one more column, v 0, o 1, do −dlse, makes that δ − dlse."""
        do, v, o = rows["do"], keys["v"], rows["o"]
        if "dlse" in rows:
            do, v = torch.cat([do, -rows["dlse"][..., None]], -1), F.pad(v, (0, 1))
            o = F.pad(o, (0, 1), value=1.0)
        k, dv = keys["k"], keys["dv"]
        do, q, o, lse = map(group.rows_of, (do, rows["q"], o, rows["lse"]))
        saved = q, group.keys_of(k), group.keys_of(v), o, lse
        mask = None if group.triangle or (masks := group.mask(q.dtype)) is None else masks[0]
        dq, dk, dv_ = kernels.fused_backward(do, saved, self.scale, mask, group.triangle)
        group.rows_of(rows["dq"]).add_(dq)
        group.add_to_keys(keys["dk"], dk)
        group.add_to_keys(dv, dv_[..., : dv.shape[-1]])


# A call.


@dataclass(frozen=True, eq=False)
class TileAttention:
    """(q, k, v) → (o, lse) over the pairs of a pattern: all that a call needs besides its tensors."""

    layouts: tuple[Layout, ...] | tuple[GatheredLayout]  # one for all batch rows, or one for each
    scale: float
    pattern_and_offset: tuple[Pattern, At | Tensor] | None = None  # for double backward
    lengths: Int[Tensor, "b *two"] | None = None  # as `Call.lengths`; hidden keys are never read
    dropout_p: float = 0.0
    seed: int = 0
    grad: bool = True  # whether something may be differentiated: weights are saved for it
    softcap: float | None = None

    def __call__(
        self,
        q: Float[Tensor, "b h n d_k"],
        k: Float[Tensor, "b h_kv m d_k"],
        v: Float[Tensor, "b h_kv m d_v"],
    ) -> Float[Tensor, "b h n d_v"]:
        """o alone, in float32 or float64."""
        if self.grad:
            return _apply(q, k, v, None, self)[0]
        return with_buffers(self.forward, q, k, v)[0]

    @cached_property
    def one_softmax(self) -> bool:
        """Whether each row's keys are all in one piece; there is no log-sum-exp then."""
        return self.layouts[0].concatenated

    @property
    def by_products(self) -> bool:
        """Whether the scores are changed in a manner that the fused op does not know."""
        return bool(self.dropout_p) or self.softcap is not None

    # The bias is a vector e of each head; entry x is the bias at distance x + the smallest distance.

    def along(self, bias: ByDistance | None, dtype: torch.dtype) -> Tensor | None:
        return None if bias is None else bias.along(*self.distances).to(dtype)

    @cached_property
    def distances(self) -> tuple[int, int]:
        """The smallest and the largest."""
        layout = self.layouts[0]
        assert isinstance(layout, Layout)
        return -(layout.start + layout.step * max(layout.n - 1, 0)), layout.m - 1 - layout.start

    # Forward.

    def forward(
        self, buffers: Buffers, q: Tensor, k: Tensor, v: Tensor, e: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Weights]:
        """o, lse, and the weights that were saved; in float32 or float64."""
        rows, keys, scale, _ = self._inputs(q, k, v, e)
        rows["o"] = q.new_empty(*q.shape[:3], v.shape[-1])
        if not self.one_softmax:
            rows["lse"] = q.new_full(q.shape[:3], -inf)
        numbers = sum(x.numel() for x in (q, k, v, rows["o"]))
        run = Executor(self, scale, buffers, kernels.max_saved(numbers) if self.grad else 0)
        for layout, of_rows, of_keys in self._heads(rows, keys):
            layout = layout.unfused if self.by_products else layout
            all_fused = e is not None and not self.by_products
            if all_fused or not layout.overwrites:
                of_rows["o"].zero_()
            for group in layout.with_bias if all_fused else layout.fused:
                run.fused(group, of_rows, of_keys)
            for piece in () if all_fused else layout.pieces(of_rows["q"].shape[0]):
                run.forward(piece, of_rows, of_keys)
        return rows["o"], rows.get("lse"), run.weights

    def _heads(self, rows: Tensors, keys: Tensors) -> Iterator[tuple[Any, Tensors, Tensors]]:
        """(layout, (b·h_kv, …) of each of `rows`, which have b and h in front, the same of `keys`), as views.

        Once for each query head of a group of heads, as they share their keys; for each batch row too, if batch rows
        differ in their lengths or layouts. A gathered layout takes all at once.
        """
        layouts, b = self.layouts, rows["q"].shape[0]
        if isinstance(layouts[0], GatheredLayout):
            yield layouts[0], rows, keys
            return
        batch = [(slice(None), layouts[0])]
        if self.lengths is not None or len(layouts) > 1:
            ranges = visible_ranges(self.lengths, b, layouts[0].m)
            by_row = enumerate(zip(layouts * b if len(layouts) == 1 else layouts, ranges))
            batch = [(slice(r, r + 1), layout.within(*limits)) for r, (layout, limits) in by_row]
        group = rows["q"].shape[1] // keys["k"].shape[1]
        for batch_rows, layout in batch:
            for member in range(group):
                of_rows = {name: x[batch_rows, member::group].flatten(0, 1) for name, x in rows.items()}
                yield layout, of_rows, {name: x[batch_rows].flatten(0, 1) for name, x in keys.items()}

    def _inputs(
        self, q: Tensor, k: Tensor, v: Tensor, e: Tensor | None
    ) -> tuple[Tensors, dict[str, Any], float, float]:
        """Rows and keys as both passes read them, the scale of the products, and the factor that is left for dq.

        The fused op scales after the products forward and within them backward: unless the scale is a power of two,
        its scores differ in their last bit, and then exp(score − lse) is not the weight there was. So q is scaled.
        """
        scale, factor = self.scale, 1.0
        rounds = not self.one_softmax and self.softcap is None and abs(frexp(scale)[0]) != 0.5
        terms = self.lengths is not None or e is not None
        if rounds and (terms or any(layout.fused for layout in self.layouts)):
            q, scale, factor = q * scale, 1.0, scale
        rows: Tensors = {"q": q.contiguous()}
        if e is not None:
            rows["e"] = repeat(e, "h x -> b h x", b=len(q)).contiguous()
        return rows, {"k": with_flat_heads(k), "v": with_flat_heads(v)}, scale, factor

    # Backward.

    def backward(self, buffers: Buffers, do: Tensor, saved: "Saved", of_bias: bool) -> Gradients:
        """The gradients of q, k, v and e from those of o and lse."""
        rows, keys, scale, factor = self._inputs(saved.q, saved.k, saved.v, saved.e)
        do, gathered = do.contiguous(), isinstance(self.layouts[0], GatheredLayout)
        rows |= {"do": do, "dq": torch.empty_like(rows["q"])}
        if saved.o is not None and saved.lse is not None:  # not one softmax: pieces are merged
            # With lse = +∞, exp(score − lse) is 0 in an empty row, not NaN.
            lse, o = saved.lse.masked_fill(saved.lse == -inf, inf), saved.o.contiguous()
            rows |= {"lse": lse, "o": o, "delta": _dots(do, o)}
            rows |= {} if saved.grad_lse is None else {"dlse": saved.grad_lse}
        if of_bias and saved.e is not None:
            rows["de"] = torch.zeros_like(rows["e"])
        for x in ("k", "v"):
            keys["d" + x] = [] if gathered else torch.zeros_like(keys[x])
        run = Executor(self, scale, buffers)
        weights = iter(saved.weights)
        for layout, of_rows, of_keys in self._heads(rows, keys):
            layout = layout.unfused if saved.e is not None or self.by_products else layout
            if not layout.overwrites:
                of_rows["dq"].zero_()
            for group in layout.fused:
                run.fused_backward(group, of_rows, of_keys)
            for piece in layout.pieces(of_rows["q"].shape[0]):
                run.backward(piece, of_rows, of_keys, next(weights, None))
        dq = rows["dq"] if factor == 1.0 else rows["dq"].mul_(factor)
        de = rows["de"].sum(0) if "de" in rows else None
        for x in ("k", "v") if gathered else ():
            parts = keys["d" + x]  # of some heads each
            keys["d" + x] = (parts[0] if len(parts) == 1 else torch.cat(parts)).view(keys[x].shape)
        return dq, keys["dk"], keys["dv"], de


def with_flat_heads(x: Float[Tensor, "b h m d"]) -> Float[Tensor, "b h m d"]:
    """x, copied unless each head is contiguous and they are evenly spaced: a part of a longer cache is not copied."""
    (b, h, _, d), strides = x.shape, x.stride()
    return x if strides[2:] == (d, 1) and (b == 1 or strides[0] == h * strides[1]) else x.contiguous()


class Saved(NamedTuple):
    """What the backward pass reads."""

    q: Tensor
    k: Tensor
    v: Tensor
    e: Tensor | None = None
    o: Tensor | None = None
    lse: Tensor | None = None
    weights: Weights | tuple = ()
    grad_lse: Tensor | None = None


def _dots(a: Tensor, b: Tensor) -> Tensor:
    """Σ a ∘ b over the last axis, head by head: no third tensor of that size."""
    out = a.new_empty(a.shape[:-1])
    for x, y, into in zip(a.flatten(0, 1), b.flatten(0, 1), out.flatten(0, 1)):
        torch.sum(x * y, -1, out=into)
    return out


# Autograd.


class _Attend(torch.autograd.Function):
    """(q, k, v, e) → (o, lse)."""

    @staticmethod
    def forward(ctx, q, k, v, e, call):
        o, lse, weights = with_buffers(call.forward, q, k, v, e)
        ctx.save_for_backward(q, k, v, e, None if lse is None else o, lse, *weights)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx, grad, grad_lse):
        q, k, v, e, o, lse, *weights = ctx.saved_tensors
        if grad is None and grad_lse is None:
            return (None,) * 5
        if not torch.is_grad_enabled():  # else create_graph=True: these gradients will be differentiated
            with suppress_no_batching():
                do = torch.zeros_like(o) if grad is None else grad
                saved = Saved(q, k, v, e, o, lse, weights, grad_lse)
                return *with_buffers(ctx.call.backward, do, saved, ctx.needs_input_grad[3]), None
        with torch.enable_grad():
            grads = _double_backward((grad, grad_lse), (q, k, v), e, ctx.call)
        return *without_graph(grads), None


_apply = compat.apply_of(_Attend)


def _double_backward(grads: tuple, inputs: tuple, e: Tensor | None, call: TileAttention) -> Gradients:
    """The gradients of q, k, v and e by the formula, which can be differentiated. grads: of o and lse."""
    if call.dropout_p or call.pattern_and_offset is None:
        raise BackendError(
            "double backward (create_graph=True) is not supported by backend='tiles' with dropout; use backend='sdpa'"
        )
    (q, k, v), (pattern, at), bias = inputs, call.pattern_and_offset, None
    if e is not None:
        i = positions(pattern, q.shape[2], k.shape[2], at, q.device)
        bias = e[:, torch.arange(k.shape[2], device=q.device) - i[:, None] - call.distances[0]]
    terms: dict[str, Any] = {"lengths": call.lengths, "scale": call.scale, "softcap": call.softcap}
    results = reference_backend.gradients(grads, Call(q, k, v, pattern, bias=bias, at=at, **terms))
    if e is None or bias is None or results[3] is None:
        return *results[:3], None
    return *results[:3], torch.autograd.grad(bias, e, results[3], create_graph=True)[0]


def attend(
    q: Float[Tensor, "b h n d_k"],
    k: Float[Tensor, "b h_kv m d_k"],
    v: Float[Tensor, "b h_kv m d_v"],
    call: TileAttention,
    bias: ByDistance | None = None,
) -> tuple[Float[Tensor, "b h n d_v"], Float[Tensor, "b h n"]]:
    """softmax(scale · q kᵀ + bias) v over the pairs of a merged layout, and ln Σ exp of each row.

    Both are differentiable; lse is float32 for half types. Dropout removes weights after the softmax: lse is without.
    """
    dtype = computed_in(q.dtype)
    if call.dropout_p and not call.seed:
        call = replace(call, seed=int(torch.randint(1 << 62, ())))
    e = call.along(bias, dtype)
    o, lse = _Attend.apply(q.to(dtype), k.to(dtype), v.to(dtype), e, call)
    return o.to(q.dtype), lse


def attend_backward(
    grads: tuple[Tensor, Tensor | None],
    saved: Sequence[Tensor],
    call: TileAttention,
    bias: ByDistance | None,
    of_bias: bool,
) -> Gradients:
    """The gradients of q, k, v, table and slopes, for an operation that a compiler sees as one. grads: of o and lse;
    saved: q, k, v, o, lse."""
    dtype = computed_in(grads[0].dtype)
    do, q, k, v, o, lse = (x.to(dtype) for x in (grads[0], *saved))
    grad_lse = None if grads[1] is None else grads[1].to(dtype)
    inputs = Saved(q, k, v, call.along(bias, dtype), o, lse, grad_lse=grad_lse)
    *gradients, de = with_buffers(call.backward, do, inputs, of_bias and bias is not None)
    if bias is None or de is None:
        return *gradients, None, None
    return *gradients, *bias.along_backward(de, *call.distances)

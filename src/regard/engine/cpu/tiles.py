"""The CPU executor: softmax attention over groups of tiles, forward and backward; nothing is n × m.

    s = scale · q kᵀ + bias + mask      weights = softmax(s)      o = weights v
    ds = weights ∘ (do vᵀ − δ)          δ = do·o − dlse

A call is a layout and a few options (TileAttention). Each piece of the layout goes through the same steps, whether
its keys are strided views or gathered copies: scores of all its parts side by side; bias and mask; a softmax, or,
where other pieces have the same rows, exponentials that are merged by log-sum-exp; dropout; the product with the
values. Backward, exp(s − lse) with the merged lse is the weight of a pair in the whole softmax, so each piece
adds its share of the exact gradients. Weights of a softmax over all keys are saved if they are few.

Softcap, sink logits or a mask per head would be further terms of `Executor._scores` and `Executor._weights`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import frexp, inf
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ... import compat
from ...errors import BackendError
from ...pattern import Pattern
from ...position import ByDistance
from .. import double_backward
from .distance_bias import along, along_backward, for_each_batch_row
from .executor import Executor
from .gathered_layout import GatheredLayout, taken
from .layout import Layout, Named, by_key_head
from .memory import MAX_SAVED_WEIGHTS, Buffers, SavedWeights, Weights, give_back, huge_pages, with_buffers


def working(dtype: torch.dtype) -> torch.dtype:
    """What a call on the CPU is computed in: half types in float32, which is as fast here and exact."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True, eq=False)
class TileAttention:
    """(q, k, v) → (o, lse) over the pairs of a pattern: all that a call needs besides its tensors."""

    layouts: tuple[Layout, ...] | GatheredLayout  # one for all batch rows, or one for each
    scale: float
    place: tuple[Pattern, int, int] | None = None  # pattern, start, step, which double backward reads
    lengths: Int[Tensor, " b"] | None = None  # keys from there on are never read
    dropout_p: float = 0.0
    seed: int = 0
    learns: bool = True  # whether something may be differentiated: weights are saved for it

    def __call__(
        self,
        q: Float[Tensor, "b h n d_k"],
        k: Float[Tensor, "b h_kv m d_k"],
        v: Float[Tensor, "b h_kv m d_v"],
    ) -> Float[Tensor, "b h n d_v"]:
        """o alone, in float32 or float64."""
        if self.learns:
            return _Attend.apply(q, k, v, None, self)[0]
        return with_buffers(self.forward, q, k, v)[0]

    @cached_property
    def one_softmax(self) -> bool:
        """Whether each row's keys are all in one piece; there is no log-sum-exp then."""
        return isinstance(self.layouts, GatheredLayout) or self.layouts[0].concatenated

    # The bias is a vector e of each head; entry x is the bias at distance x − far.

    @property
    def far(self) -> int:
        """The position of the last query."""
        assert not isinstance(self.layouts, GatheredLayout)
        one = self.layouts[0]
        return one.start + one.step * max(one.n - 1, 0)

    @property
    def reach(self) -> tuple[int, int]:
        """The smallest and the largest distance."""
        assert not isinstance(self.layouts, GatheredLayout)
        return -self.far, self.layouts[0].m - 1 - self.layouts[0].start

    # Forward.

    def forward(
        self, buffers: Buffers, q: Tensor, k: Tensor, v: Tensor, e: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, SavedWeights]:
        """o, lse, and the weights that were saved; in float32 or float64."""
        if isinstance(self.layouts, GatheredLayout) and self.layouts.fused:
            return self._fused_gathered(self.layouts, buffers, q, k, v), None, SavedWeights(q, 0)
        q, scale, _ = self._scaled(q, e)
        q, k, v = (x.contiguous() for x in (q, k, v))
        saved = self._saved(q, k, v)
        rows: Named = {"q": q, "o": huge_pages(q.new_empty(*q.shape[:3], v.shape[-1]))}
        if not self.one_softmax:
            rows["o"].zero_()
            rows["lse"] = q.new_full(q.shape[:3], -inf)
        if e is not None:
            rows["e"] = for_each_batch_row(e, len(q))
        run = self._executor(scale, buffers, saved if self.one_softmax else None)
        for layout, of_rows, of_keys in self._heads(rows, {"k": k, "v": v}):
            bias = of_rows.pop("e", None)
            if isinstance(layout, Layout):
                if bias is not None and not self.dropout_p:
                    run.fused_with_bias(layout, of_rows, of_keys, bias)
                    continue
                layout = layout.unfused if self.dropout_p else layout
                for group in layout.fused:
                    run.fused(group, of_rows, of_keys)
            for piece, views in layout.bind(of_rows, of_keys, {}):
                run.forward(piece, views, bias)
        return rows["o"], rows.get("lse"), saved

    def _executor(self, scale: float, buffers: Buffers, saved: SavedWeights | None) -> Executor:
        far = 0 if self.one_softmax else self.far
        return Executor(scale, self.one_softmax, buffers, saved, self.dropout_p, self.seed, far)

    def _heads(self, rows: Named, keys: Named) -> Iterator[tuple[Layout | GatheredLayout, Named, Named]]:
        if isinstance(self.layouts, GatheredLayout):
            return iter([(self.layouts, rows, keys)])
        return by_key_head(self.layouts, self.lengths, rows, keys)

    def _saved(self, q: Tensor, k: Tensor, v: Tensor) -> SavedWeights:
        if isinstance(self.layouts, GatheredLayout):
            return SavedWeights(q, self.layouts.saved, pooled=False)
        return SavedWeights(q, max_saved(q, k, v) if self.learns and self.one_softmax else 0)

    def _scaled(self, q: Tensor, e: Tensor | None) -> tuple[Tensor, float, float]:
        """q and the scale of its products, and the factor that is left for dq.

        The fused op scales after the products forward and within them backward: unless the scale is a power of two,
        its scores differ in their last bit, and then exp(score − lse) is not the weight there was.
        """
        fused = not self.one_softmax and (
            self.lengths is not None or e is not None or any(one.fused for one in self.layouts)  # type: ignore[union-attr]
        )
        same = not fused or abs(frexp(self.scale)[0]) == 0.5
        return (q, self.scale, 1.0) if same else (q * self.scale, 1.0, self.scale)

    def _fused_gathered(
        self, layout: GatheredLayout, buffers: Buffers, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """o alone, by the fused op: one tile is one head of one row of its batch. As few steps as possible: Python
        takes a tenth of a short call."""
        d, parts = q.shape[-1], []
        for piece, views in layout.bind({"q": q}, {"k": k, "v": v}, {}):
            t, r, l = piece.scores
            q_ = taken(views["q"], piece.rows, (t, 1, r, d), "q", buffers)
            k_ = taken(views["k"], piece.index, (t, 1, l, d), "k", buffers)
            v_ = taken(views["v"], piece.index, (t, 1, l, d), "v", buffers)
            o = compat.flash_forward_direct(q_, k_, v_, 0.0, False, attn_mask=piece.mask4, scale=self.scale)[
                0
            ]
            parts.append(o if piece.place is None else o.view(-1, d).index_select(0, piece.place))
        return _joined(parts).view(q.shape)

    # Backward.

    def backward(
        self, buffers: Buffers, do: Tensor, saved: "Saved", of_bias: bool
    ) -> tuple[Tensor | None, ...]:
        """The gradients of q, k, v and e from those of o and lse."""
        q, scale, outside = self._scaled(saved.q, saved.e)
        do, q, k, v = (x.contiguous() for x in (do, q, saved.k, saved.v))
        gathered = isinstance(self.layouts, GatheredLayout)
        rows: Named = {"do": do, "q": q, "dq": huge_pages(torch.empty_like(q))}
        if not self.one_softmax:
            rows["dq"].zero_()
            rows |= self._merged_rows(do, saved)
        if saved.e is not None:
            rows["e"] = for_each_batch_row(saved.e, len(q))
            rows["de"] = torch.zeros_like(rows["e"])
        keys: Named = {"k": k, "v": v}
        grads: Any = {"dk": [], "dv": []}
        if not gathered:
            grads = {"d" + name: huge_pages(torch.empty_like(x)).zero_() for name, x in keys.items()}
            keys |= grads
        run = self._executor(scale, buffers, None)
        weights = iter(saved.weights)
        for layout, of_rows, of_keys in self._heads(rows, keys):
            e, de = of_rows.pop("e", None), of_rows.pop("de", None)
            if isinstance(layout, Layout):
                layout = layout.unfused if e is not None or self.dropout_p else layout
                for group in layout.fused:
                    run.fused_backward(group, of_rows, of_keys)
                of_rows.pop("o", None)
            of_grads = grads if gathered else {name: of_keys.pop(name) for name in grads}
            for piece, views in layout.bind(of_rows, of_keys, of_grads):  # type: ignore[arg-type]
                run.backward(piece, views, next(weights, None), (e, de if of_bias else None))
        dq = rows["dq"] if outside == 1.0 else rows["dq"].mul_(outside)
        de = rows["de"].sum(0) if of_bias and "de" in rows else None
        dk, dv = (_joined(g).view(x.shape) if gathered else g for g, x in zip(grads.values(), (k, v)))
        return dq, dk, dv, de

    def _merged_rows(self, do: Tensor, saved: "Saved") -> Named:
        """What pieces that are merged read of each row: lse, δ, and the gradient of lse."""
        assert saved.o is not None and saved.lse is not None and not isinstance(self.layouts, GatheredLayout)
        # With lse = +∞, exp(score − lse) is 0 in an empty row, not NaN.
        rows = {"lse": saved.lse.masked_fill(saved.lse == -inf, inf), "o": saved.o.contiguous()}
        alone = [(one.unfused if self.dropout_p else one).all_alone for one in self.layouts]
        if saved.e is not None or not all(alone):
            rows["delta"] = _dots(do, rows["o"])
        return rows if saved.grad_lse is None else rows | {"dlse": saved.grad_lse}


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


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def max_saved(q: Tensor, k: Tensor, v: Tensor) -> int:
    """How many weights are saved for the backward pass at most: as many numbers as q, k, v and o have together."""
    o = q.numel() // max(q.shape[-1], 1) * v.shape[-1]
    return min(q.numel() + k.numel() + v.numel() + o, MAX_SAVED_WEIGHTS)


# Autograd.


class _Attend(torch.autograd.Function):
    """(q, k, v, e) → (o, lse)."""

    @staticmethod
    def forward(ctx, q, k, v, e, call):
        o, lse, saved = with_buffers(call.forward, q, k, v, e)
        ctx.save_for_backward(q, k, v, e, None if lse is None else o, lse, *saved.weights)
        ctx.call, ctx.blocks = call, saved.blocks
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx, grad, grad_lse):
        q, k, v, e, o, lse, *weights = ctx.saved_tensors
        if grad is None and grad_lse is None:
            return (None,) * 5
        if torch.is_grad_enabled():  # create_graph=True: these gradients will be differentiated
            return *_double_backward((grad, grad_lse), (q, k, v), e, ctx.call), None
        grad = torch.zeros_like(o) if grad is None else grad
        saved = Saved(q, k, v, e, o, lse, weights, grad_lse)
        grads = with_buffers(ctx.call.backward, grad, saved, ctx.needs_input_grad[3])
        give_back(weights, ctx.blocks)
        return *grads, None


def _double_backward(
    grads: tuple, inputs: tuple, e: Tensor | None, call: TileAttention
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v and e by the formula, which can be differentiated. grads: of o and lse."""
    if call.dropout_p or call.place is None:
        raise BackendError(
            "double backward (create_graph=True) is not supported by backend='tiles' with dropout; use backend='sdpa'"
        )
    if e is None:
        by = double_backward.Weighting(*call.place, call.scale, call.lengths)
        return *double_backward.gradients(grads, inputs, by), None
    (q, k, _), (_, start, step) = inputs, call.place
    i = start + step * torch.arange(q.shape[2])
    bias = e[:, torch.arange(k.shape[2]) - i[:, None] + call.far]
    by = double_backward.Weighting(*call.place, call.scale, call.lengths, bias)
    *results, of_bias = double_backward.gradients(grads, inputs, by)
    of_e = None if of_bias is None else torch.autograd.grad(bias, e, of_bias, create_graph=True)[0]
    return *results, of_e


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
    dtype = working(q.dtype)
    if call.dropout_p and not call.seed:
        call = replace(call, seed=int(torch.randint(1 << 62, ())))
    e = None if bias is None else along(bias, *call.reach).to(dtype)
    o, lse = _Attend.apply(q.to(dtype), k.to(dtype), v.to(dtype), e, call)
    return o.to(q.dtype), lse.to(torch.promote_types(q.dtype, torch.float32))


# The same without a graph, for operations that a compiler sees as one.


def run(
    q: Tensor, k: Tensor, v: Tensor, call: TileAttention, bias: ByDistance | None = None
) -> tuple[Float[Tensor, "b h n d_v"], Float[Tensor, "b h n"]]:
    dtype = working(q.dtype)
    e = None if bias is None else along(bias, *call.reach).to(dtype)
    o, lse, _ = with_buffers(call.forward, q.to(dtype), k.to(dtype), v.to(dtype), e)
    return o, lse


def run_backward(
    grad: Tensor, saved: Saved, call: TileAttention, bias: ByDistance | None = None, of_bias: bool = False
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v, table and slopes; saved.e is made from the bias."""
    dtype = working(grad.dtype)
    tensors = {x: getattr(saved, x) for x in ("q", "k", "v", "o", "lse", "grad_lse")}
    tensors = {name: None if x is None else x.to(dtype) for name, x in tensors.items()}
    e = None if bias is None else along(bias, *call.reach).to(dtype)
    of_bias = of_bias and bias is not None
    *grads, de = with_buffers(call.backward, grad.to(dtype), Saved(**tensors, e=e), of_bias)
    if bias is None or de is None:
        return *grads, None, None
    return *grads, *along_backward(de, bias, *call.reach)

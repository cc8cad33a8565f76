"""Short sequences on the CPU by products over tiles: two forward, four backward, the weights kept between if few.

    s = scale · q kᵀ + mask      weights = softmax(s)      o = weights v

PyTorch's fused op works in blocks of 32 or 64 queries there, and visits every key; this visits the keys that a tile
of queries sees. Where those are few and nothing learns, the fused op runs the tiles: one step instead of three.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ...pattern import Pattern
from .. import double_backward
from . import flash_op as flash_cpu
from . import gathered
from .products import Room, within

NEAR = 1 << 18  # scores at a time: 1 MiB in float32 stays in the caches
FEW = 80  # keys of a tile up to which the fused op is quicker

Place = tuple[Pattern, int, int, float]  # pattern, start, step, scale


class Short:
    """(q, k, v) → o over the allowed pairs, cut into tiles; differentiable if `learns`."""

    def __init__(
        self,
        allowed: Bool[Tensor, "n m"],
        lay: gathered.Lay,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        place: Place,
        learns: bool,
    ):
        self.place, self.scale, self.learns = (*place, None), place[-1], learns
        heads, group = q.shape[0] * q.shape[1], q.shape[1] // k.shape[1]
        near = NEAR // (lay.pairs * group)
        some = min(max(near, 1) * group, heads)  # heads at a time
        tiles = gathered.tiles(allowed, some, group, lay, q.dtype)
        self.fused = not learns and lay.keys <= FEW and q.shape[-1] == v.shape[-1]
        self.weights = heads * lay.tiles, lay.rows, lay.keys
        self.keeps = learns and heads * lay.pairs <= gathered.KEPT
        self.cuts = [Cut(tiles, lay, group, min(some, heads - a)) for a in range(0, heads, some)]

    def __call__(
        self,
        q: Float[Tensor, "b h n d_k"],
        k: Float[Tensor, "b h_kv m d_k"],
        v: Float[Tensor, "b h_kv m d_v"],
    ) -> Float[Tensor, "b h n d_v"]:
        return _Attend.apply(q, k, v, self) if self.learns else within(self.forward, q, k, v)[0]

    def forward(self, room: Room, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        """o, and the weights if they are kept."""
        if self.fused:
            return self._by_op(room, q, k, v), None
        o = q.new_empty((*q.shape[:3], v.shape[-1]))
        weights = q.new_empty(self.weights) if self.keeps else None
        for cut, q_, k_, v_, w, o_ in self._cut(q, k, v, weights, o):
            q_, k_, v_ = cut.queries(q_, room, "q"), cut.keys(k_, room, "k"), cut.keys(v_, room, "v")
            w = self._weigh(cut, q_, k_, room("w", *cut.scores) if w is None else w)
            torch.bmm(w, v_, out=cut.room_for(o_, room, "o"))
            cut.put(o_, room, "o")
        return o, weights

    def _weigh(self, cut: "Cut", q: Tensor, k: Tensor, w: Tensor) -> Tensor:
        torch.baddbmm(cut.mask, q, k.mT, alpha=self.scale, out=w)
        return torch.softmax(w, -1, out=w)

    def _by_op(self, room: Room, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """o alone, by the fused op: one tile is one head of one row of its batch.

        As few steps as can be: Python takes a tenth of a short call.
        """
        d, attend, found = q.shape[-1], flash_cpu.quick(), []
        for cut, q_, k_, v_, _ in self._cut(q, k, v, None):
            t, r, l = cut.scores
            q_ = q_.reshape(t, 1, r, d) if cut.rows is None else cut.queries(q_, room, "q")[:, None]
            if cut.index is None:
                k_, v_ = k_.reshape(t, 1, l, d), v_.reshape(t, 1, l, d)
            else:
                torch.index_select(k_.reshape(-1, d), 0, cut.index, out=room("k", t * l, d))
                torch.index_select(v_.reshape(-1, d), 0, cut.index, out=room("v", t * l, d))
                k_, v_ = room("k", t, 1, l, d), room("v", t, 1, l, d)  # the same memory
            o = attend(q_, k_, v_, 0.0, False, attn_mask=cut.mask4, scale=self.scale)[0]
            found.append(o if cut.place is None else o.view(-1, d).index_select(0, cut.place))
        return _joined(found).view(q.shape)

    def backward(
        self, room: Room, q: Tensor, k: Tensor, v: Tensor, weights: Tensor | None, do: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v."""
        grad_q = torch.empty_like(q, memory_format=torch.contiguous_format)
        grad_k, grad_v = [], []
        for cut, q_, k_, v_, w, do_, dq in self._cut(q, k, v, weights, do, grad_q):
            q_, do_ = cut.queries(q_, room, "q"), cut.clear(cut.queries(do_, room, "do"))
            k_, v_ = cut.keys(k_, room, "k"), cut.keys(v_, room, "v")
            w = self._weigh(cut, q_, k_, room("w", *cut.scores)) if w is None else w
            ds = torch.bmm(do_, v_.mT, out=room("s", *cut.scores))
            torch.ops.aten._softmax_backward_data.out(ds, w, -1, ds.dtype, grad_input=ds)
            into = cut.room_for(dq, room, "dq")
            torch.baddbmm(into, ds, k_, beta=0, alpha=self.scale, out=into)
            cut.put(dq, room, "dq")
            into = room("dk", *k_.shape)
            torch.baddbmm(into, ds.mT, q_, beta=0, alpha=self.scale, out=into)
            grad_k.append(cut.sum(into))
            grad_v.append(cut.sum(torch.bmm(w.mT, do_, out=room("dv", *v_.shape))))
        return grad_q, _joined(grad_k).view(k.shape), _joined(grad_v).view(v.shape)

    def _cut(
        self, q: Tensor, k: Tensor, v: Tensor, weights: Tensor | None, *more: Tensor
    ) -> Iterator[tuple[Any, ...]]:
        """For some heads at a time: their tables, and what belongs to them of each tensor."""
        if len(self.cuts) == 1:
            return iter([(self.cuts[0], q, k, v, weights, *more)])
        share = self.cuts[0].heads / (q.shape[0] * q.shape[1])
        flat = [x.reshape(-1, x.shape[-1]) for x in (q, k, v, *more)]
        parts = [x.split(round(len(x) * share)) for x in flat]
        saved = [None] * len(self.cuts) if weights is None else weights.split(self.cuts[0].scores[0])
        return zip(self.cuts, *parts[:3], saved, *parts[3:])


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class Cut:
    """The tables of some heads: what is copied from where, and back."""

    def __init__(self, tiles: gathered.Tiles, lay: gathered.Lay, group: int, heads: int):
        (_, count, r, l), n, m = lay, tiles.n, tiles.m
        self.heads, self.scores, self.n = heads, (heads * count, r, l), n
        self.mask = tiles.mask[0] if count == 1 else tiles.mask[: heads * count]
        self.mask4 = self.mask.view(-1, 1, r, l)
        self.rows = None if tiles.rows is None else tiles.rows[: heads * count * r]
        self.place = None if tiles.place is None else tiles.place[: heads * n]
        self.filled = count * r > n
        self.index = None if tiles.keys is None else tiles.keys[: heads * count * l]
        self.copies, self.first = tiles.copies[: heads * tiles.held], tiles.first[: heads // group * m]

    def queries(self, x: Float[Tensor, "... d"], room: Room, name: str) -> Float[Tensor, "t r d"]:
        """The queries of each tile."""
        return _taken(x, self.rows, (*self.scores[:2], x.shape[-1]), room, name)

    def keys(self, x: Float[Tensor, "... d"], room: Room, name: str) -> Float[Tensor, "t l d"]:
        """The keys of each tile."""
        return _taken(x, self.index, (self.scores[0], self.scores[2], x.shape[-1]), room, name)

    def clear(self, do: Float[Tensor, "t r d"]) -> Float[Tensor, "t r d"]:
        """Without what only fills the last tile of a head."""
        if self.filled:
            do.view(self.heads, -1, do.shape[-1])[:, self.n :] = 0.0
        return do

    def room_for(self, x: Float[Tensor, "... d"], room: Room, name: str) -> Float[Tensor, "t r d"]:
        """What `put` brings to x: x itself where the queries lie in order."""
        shape = (*self.scores[:2], x.shape[-1])
        return x.view(shape) if self.place is None else room(name, *shape)

    def put(self, x: Float[Tensor, "... d"], room: Room, name: str) -> None:
        """Each query's row to its place."""
        if self.place is not None:
            (t, r, _), d = self.scores, x.shape[-1]
            torch.index_select(room(name, t * r, d), 0, self.place, out=x.view(-1, d))

    def sum(self, x: Float[Tensor, "t l d"]) -> Float[Tensor, "rows d"]:
        """Over all copies of each key, in one order only."""
        x = x.view(-1, x.shape[-1])
        return x.clone() if self.index is None else F.embedding_bag(self.copies, x, self.first, mode="sum")


def _taken(
    x: Float[Tensor, "... d"],
    index: Int[Tensor, " taken"] | None,
    shape: tuple[int, int, int],
    room: Room,
    name: str,
) -> Float[Tensor, "t size d"]:
    """Rows in order, or taken by their indices into the room."""
    if index is None:
        return x.reshape(shape)
    d = shape[-1]
    torch.index_select(x.reshape(-1, d), 0, index, out=room(name, len(index), d))
    return room(name, *shape)  # the same memory


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, short):
        o, weights = within(short.forward, q, k, v)
        ctx.save_for_backward(q, k, v, weights)
        ctx.short = short
        return o

    @staticmethod
    def backward(ctx, grad):
        q, k, v, weights = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: these gradients will be differentiated again
            return *double_backward.gradients(
                (grad, None), (q, k, v), double_backward.Weighting(*ctx.short.place)
            ), None
        return *within(ctx.short.backward, q, k, v, weights, grad), None

"""Short sequences on the CPU by products over tiles: two forward, four backward, the weights kept between.

    s = scale · q kᵀ + mask      weights = softmax(s)      o = weights v

PyTorch's fused op works in blocks of 32 or 64 queries there, and visits every key; this visits the keys that a tile
of queries sees.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..pattern import Pattern
from . import gathered, twice
from .products import Room

NEAR = 1 << 18  # scores at a time: 1 MiB in float32 stays in the caches
_rooms: list[Room] = []  # not in use: a call takes one and puts it back, so that no two write to the same

Place = tuple[Pattern, int, int, float]  # pattern, start, step, scale


class Short:
    """(q, k, v) → o over the allowed pairs, cut into tiles; differentiable if `learns`."""

    def __init__(
        self,
        allowed: Bool[Tensor, "n m"],
        lay: gathered.Lay,
        q: Tensor,
        k: Tensor,
        place: Place,
        learns: bool,
    ):
        (self.n, self.m), (_, self.count, self.rows, self.keys) = allowed.shape, lay
        self.place, self.scale, self.learns = (*place, None), place[-1], learns
        self.heads, self.group = q.shape[0] * q.shape[1], q.shape[1] // k.shape[1]
        some = max(NEAR // (self.count * self.rows * self.keys * self.group), 1) * self.group
        self.some = min(some, self.heads)  # heads at a time
        self.tiles = gathered.tiles(allowed, self.some, self.group, lay, q.dtype)

    def __call__(
        self,
        q: Float[Tensor, "b h n d_k"],
        k: Float[Tensor, "b h_kv m d_k"],
        v: Float[Tensor, "b h_kv m d_v"],
    ) -> Float[Tensor, "b h n d_v"]:
        return _Attend.apply(q, k, v, self) if self.learns else _within(self.forward, q, k, v)[0]

    def forward(self, room: Room, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        """o, and the weights if it learns."""
        shape, d_v = q.shape[:3], v.shape[-1]
        o = q.new_empty(self.heads * self.n, d_v)
        weights = q.new_empty(self.heads * self.count, self.rows, self.keys) if self.learns else None
        q, k, v = _flat(q), _flat(k), _flat(v)
        for a in range(0, self.heads, self.some):
            q_ = self._rows(q, a, room, "q")
            k_, v_ = self._keys(k, a, room, "k"), self._keys(v, a, room, "v")
            s = (
                room("s", len(q_), self.rows, self.keys)
                if weights is None
                else self._of(weights, a, self.count)
            )
            into = self._of(o, a, self.n)
            o_ = into.view(len(q_), -1, d_v) if self.tiles.place is None else room("o", *q_.shape[:2], d_v)
            torch.bmm(torch.softmax(self._scores(q_, k_, s), -1, out=s), v_, out=o_)
            self._placed(o_, into)
        return o.view(*shape, d_v), weights

    def backward(
        self, room: Room, q: Tensor, k: Tensor, v: Tensor, weights: Tensor, do: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v."""
        dq, dk, dv = grads = tuple(
            torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)
        )
        dq, dk, dv = _flat(dq), _flat(dk), _flat(dv)
        q, k, v, do = _flat(q), _flat(k), _flat(v), _flat(do)
        for a in range(0, self.heads, self.some):
            q_, do_ = self._rows(q, a, room, "q"), self._rows(do, a, room, "do")
            k_, v_ = self._keys(k, a, room, "k"), self._keys(v, a, room, "v")
            if self.tiles.filled:
                do_.view(-1, self.count * self.rows, do.shape[-1])[:, self.n :] = 0.0
            w, into = self._of(weights, a, self.count), self._of(dq, a, self.n)
            ds = torch.bmm(do_, v_.mT, out=room("ds", *w.shape))
            torch.ops.aten._softmax_backward_data.out(ds, w, -1, ds.dtype, grad_input=ds)
            dq_ = into.view(q_.shape) if self.tiles.place is None else room("dq", *q_.shape)
            torch.baddbmm(dq_, ds, k_, beta=0, alpha=self.scale, out=dq_)
            self._placed(dq_, into)
            dk_ = room("dk", *k_.shape)
            torch.baddbmm(dk_, ds.mT, q_, beta=0, alpha=self.scale, out=dk_)
            self._summed(dk_, dk, a)
            self._summed(torch.bmm(w.mT, do_, out=room("dv", *v_.shape)), dv, a)
        return grads[0], grads[1], grads[2]

    def _of(self, x: Tensor, a: int, each: int) -> Tensor:
        """What belongs to some heads from a on, `each` of x to a head."""
        return x[a * each : (a + self.some) * each]

    def _rows(self, x: Float[Tensor, "rows d"], a: int, room: Room, name: str) -> Float[Tensor, "t r d"]:
        """The queries of the tiles of these heads."""
        return _taken(self._of(x, a, self.n), self.tiles.rows, self.count, self.n, self.rows, room, name)

    def _keys(self, x: Float[Tensor, "keys d"], a: int, room: Room, name: str) -> Float[Tensor, "t l d"]:
        """The keys of the tiles of these heads."""
        x = x[a // self.group * self.m : (a + self.some) // self.group * self.m]
        return _taken(x, self.tiles.keys, self.count * self.group, self.m, self.keys, room, name)

    def _scores(self, q: Tensor, k: Tensor, s: Tensor) -> Tensor:
        mask = self.tiles.mask
        if len(mask) == 1:
            return torch.baddbmm(mask[0], q, k.mT, alpha=self.scale, out=s)
        torch.baddbmm(s, q, k.mT, beta=0, alpha=self.scale, out=s).view(-1, *mask.shape).add_(mask)
        return s

    def _placed(self, x: Float[Tensor, "t r d"], into: Float[Tensor, "rows d"]) -> None:
        """Each query's row to where it belongs; what fills the last tile is left out."""
        if self.tiles.place is not None:
            torch.index_select(_flat(x), 0, self.tiles.place[: len(into)], out=into)

    def _summed(self, x: Float[Tensor, "t l d"], into: Float[Tensor, "keys d"], a: int) -> None:
        """The sum over all copies of each key, in one order only."""
        into = into[a // self.group * self.m : (a + self.some) // self.group * self.m]
        if self.tiles.keys is None:
            into.copy_(_flat(x))
            return
        heads = len(x) // self.count
        copies, first = self.tiles.copies[: heads * self.tiles.held], self.tiles.first[: len(into)]
        into.copy_(F.embedding_bag(copies, _flat(x), first, mode="sum"))


def _flat(x: Tensor) -> Float[Tensor, "rows d"]:
    return x.reshape(-1, x.shape[-1])


def _taken(
    x: Float[Tensor, "rows d"],
    index: Int[Tensor, " taken"] | None,
    tiles: int,
    each: int,
    size: int,
    room: Room,
    name: str,
) -> Float[Tensor, "t size d"]:
    """Rows in tiles of `size`, so many tiles for `each` rows: as they lie, or taken by their indices."""
    if index is None:
        return x.view(-1, size, x.shape[-1])
    index = index[: len(x) // each * tiles * size]
    return torch.index_select(x, 0, index, out=room(name, len(index), x.shape[-1])).view(
        -1, size, x.shape[-1]
    )


def _within(run: Callable[..., Any], q: Tensor, *rest: Tensor) -> Any:
    """run(room, q, …) in a room that nobody else is in: fresh memory would cost as much as the products."""
    try:
        room = _rooms.pop()
    except IndexError:
        room = Room(q)
    if room.like.dtype != q.dtype:
        room = Room(q)
    try:
        return run(room, q, *rest)
    finally:
        _rooms.append(room)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, short):
        o, weights = _within(short.forward, q, k, v)
        ctx.save_for_backward(q, k, v, weights)
        ctx.short = short
        return o

    @staticmethod
    def backward(ctx, grad):
        q, k, v, weights = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: these gradients will be differentiated again
            return *twice.gradients(grad, None, q, k, v, *ctx.short.place), None
        return *_within(ctx.short.backward, q, k, v, weights, grad), None

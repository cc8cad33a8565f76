"""Tiles of attention by batched products, which run near the peak of the cores as long as the scores stay in caches.

    s = scale · q kᵀ + mask      weights = exp(s − lse)      ds = weights ∘ (do vᵀ − δ)

exp(x) is 2^(x log₂ e) here: over −∞ MKL's exp takes eight times as long, exp2 no longer than elsewhere.
"""

from collections.abc import Callable
from math import e, inf, log2, prod
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from .pages import large

LOG2E = log2(e)
VIEWS = 256  # of a room that are kept: one that lives long meets many shapes


class Room:
    """Memory that one call after another writes to: fresh pages cost as much as the products."""

    def __init__(self, like: Tensor):
        self.like = like.new_empty(0)
        self.held: dict[str, Tensor] = {}
        self.views: dict[tuple, Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        """A tensor of this shape with anything in it, good until this name is asked for again."""
        if (found := self.views.get((name, *shape))) is not None:
            return found
        with torch.inference_mode(False):  # what is made in inference could not be written to later
            return self._made(name, shape)

    def _made(self, name: str, shape: tuple[int, ...]) -> Tensor:
        count = prod(shape)
        if name not in self.held or len(self.held[name]) < count:
            self.held[name] = large(self.like.new_empty(count))
            self.views = {key: view for key, view in self.views.items() if key[0] != name}
        if len(self.views) >= VIEWS:
            self.views.clear()
        self.views[name, *shape] = found = self.held[name][:count].view(shape)
        return found


_rooms: list[Room] = []  # not in use: a call takes one and puts it back, so that no two write to the same


def within(run: Callable[..., Any], q: Tensor, *rest: Any) -> Any:
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


def forward(
    q: Float[Tensor, "t r d_k"],
    k: Float[Tensor, "t l d_k"],
    v: Float[Tensor, "t l d_v"],
    scale: float,
    mask: Float[Tensor, "r l"] | None,
    room: Room,
    into: Float[Tensor, "t r d_v"] | None = None,
) -> tuple[Float[Tensor, "t r d_v"], Float[Tensor, "t r"]]:
    """o, written to `into` or to the room, and lse; mask: 0 or −∞, added. A row without pairs has zeros and −∞."""
    s = _scores(q, k, scale, mask, room)
    most = s.amax(-1, keepdim=True)
    _exp(s.sub_(most.clamp_min(torch.finfo(s.dtype).min)))  # −∞ − (−∞) would be NaN
    total = s.sum(-1, keepdim=True).clamp_min_(1.0)  # the largest alone makes 1, an empty row 0
    into = room("o", *q.shape[:2], v.shape[-1]) if into is None else into
    o = torch.bmm(s, v, out=into).div_(total)
    return o, most.add_(total.log_()).squeeze(-1)


def backward(
    do: Float[Tensor, "t r d_v"],
    q: Float[Tensor, "t r d_k"],
    k: Float[Tensor, "t l d_k"],
    v: Float[Tensor, "t l d_v"],
    lse: Float[Tensor, "t r"],
    delta: Float[Tensor, "t r"] | None,
    dlse: Float[Tensor, "t r"] | None,
    scale: float,
    mask: Float[Tensor, "r l"] | None,
    hollow: bool,
    room: Room,
) -> tuple[Float[Tensor, "t r l"], Float[Tensor, "t r l"]]:
    """The weights and the gradients of the scores, both in the room.

    lse and δ = do·o may be those of a larger set of pairs, of which these are a part; lse = +∞ in a row without any.
    With δ = None these are all there are: their softmax is nearer than exp(s − lse), as lse is rounded, and
    δ = Σ weights ∘ do vᵀ nearer than do·o, above all in a row with one key, where ds is 0. hollow: some row is empty.
    """
    s = _scores(q, k, scale, mask, room)
    ds = torch.bmm(do, v.mT, out=room("ds", *s.shape))
    if delta is None:
        weights = torch.softmax(s, -1, out=s)
        if hollow:
            weights.masked_fill_((lse == inf)[..., None], 0.0)
        torch.ops.aten._softmax_backward_data.out(ds, weights, -1, ds.dtype, grad_input=ds)
    else:
        weights = _exp(s.sub_(lse[..., None]))
        ds.sub_(delta[..., None]).mul_(weights)
    if dlse is not None:
        ds.addcmul_(weights, dlse[..., None])
    return weights, ds


def _scores(q: Tensor, k: Tensor, scale: float, mask: Tensor | None, room: Room) -> Tensor:
    s = room("s", *q.shape[:2], k.shape[1])
    torch.baddbmm(s, q, k.mT, beta=0, alpha=scale, out=s)
    return s if mask is None else s.add_(mask)


def _exp(x: Tensor) -> Tensor:
    return x.mul_(LOG2E).exp2_()

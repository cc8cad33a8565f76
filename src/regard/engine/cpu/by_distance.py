"""Attention with a bias by distance, and with dropout, on the CPU: tiles of scores, and nothing n × m.

    s = scale · q kᵀ + e[j − i]      p = exp(s − lse)      δ = do·o − dlse
    ds = p ∘ (do vᵀ − δ)             de[x] = Σ ds over the pairs with j − i = x

With the rows of a tile in reverse order, the bias is e[x₀ + a·r + c·l], a and c positive: a view of e, never
copied, and its gradient is a sum along the anti-diagonals of the tile, which are the columns of a view as well.

Forward is the fused op with that view for a mask. Backward and dropout make the scores, many heads at once: every
PyTorch operation waits for all threads, and on a busy machine that wait, not the work, would be the time. They are
in base 2: PyTorch's CPU exp falls to a tenth of its speed where a result is not a normal float, exp2 does not.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from math import inf, log2
from operator import add

import torch
from einops import einsum, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ...errors import BackendError
from ...pattern import Pattern
from ...position import ByDistance
from .. import double_backward
from ..merge import join
from . import flash_op as flash_cpu
from .batch import Batch, Program, lanes, working

LOG2E = log2(2.718281828459045)
PAIRS = 1 << 21  # scores held at once, of all heads together: 8 MiB in float32
ROWS = 64  # as many rows at least, as far as there are: products of fewer are slow


def attend(
    q: Float[Tensor, "b h n d_k"],
    k: Float[Tensor, "b h_kv m d_k"],
    v: Float[Tensor, "b h_kv m d_v"],
    way: Program,
    bias: ByDistance | None = None,
    *,
    scale: float,
    lengths: Int[Tensor, " b"] | None = None,
    dropout_p: float = 0.0,
    pattern: Pattern | None = None,
) -> tuple[Float[Tensor, "b h n d_v"], Float[Tensor, "b h n"]]:
    """softmax(scale · q kᵀ + bias) v over the program's pairs, and ln Σ exp of each row; both differentiable.

    Dropout takes weights away after the softmax, so lse does not know of it; it draws from PyTorch's generator.
    pattern: the same pairs, for second derivatives.
    """
    dtype = working(q.dtype)
    seed = int(torch.randint(1 << 62, ())) if dropout_p else 0
    job = Job(way, scale, lengths, dropout_p, seed, pattern)
    e = None if bias is None else along(bias, *job.reach).to(dtype)
    o, lse = _Attend.apply(q.to(dtype), k.to(dtype), v.to(dtype), e, job)
    return o.to(q.dtype), lse.to(torch.promote_types(q.dtype, torch.float32))


def run(
    q: Tensor, k: Tensor, v: Tensor, bias: ByDistance | None, job: "Job"
) -> tuple[Float[Tensor, "b h n d_v"], Float[Tensor, "b h n"]]:
    """attend without a graph, for the opaque operation of walk.py."""
    dtype = working(q.dtype)
    e = None if bias is None else along(bias, *job.reach).to(dtype)
    return forward(q.to(dtype), k.to(dtype), v.to(dtype), e, job)


def run_backward(
    grad: Tensor,
    grad_lse: Tensor | None,
    saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    bias: ByDistance | None,
    job: "Job",
    of_bias: bool,
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v, table and slopes. saved: q, k, v, o, lse."""
    dtype = working(grad.dtype)
    grad, q, k, v, o, lse = (x.to(dtype) for x in (grad, *saved))
    grad_lse = None if grad_lse is None else grad_lse.to(dtype)
    e = None if bias is None else along(bias, *job.reach).to(dtype)
    *grads, of_e = backward(grad, grad_lse, q, k, v, e, o, lse, job, of_bias and bias is not None)
    return *grads, *(
        (None, None) if bias is None or of_e is None else _along_backward(of_e, bias, *job.reach)
    )


def along(bias: ByDistance, low: int, high: int) -> Float[Tensor, "h x"]:
    """The bias at distances low … high. Its gradient is a sum in one order; that of indexing is not."""
    parts, reach = [], bias.reach
    if bias.table is not None:
        near = bias.table[:, max(low + reach, 0) : max(high + reach + 1, 0)]
        first = bias.table[:, :1].expand(-1, max(min(high + 1, -reach) - low, 0))
        last = bias.table[:, -1:].expand(-1, max(high - max(low - 1, reach), 0))
        parts.append(torch.cat([first, near, last], -1))
    if bias.slopes is not None:
        distances = torch.arange(low, high + 1, dtype=bias.slopes.dtype).abs()
        parts.append(-einsum(bias.slopes, distances, "h, x -> h x"))
    return reduce(add, parts)


def _along_backward(
    de: Float[Tensor, "h x"], bias: ByDistance, low: int, high: int
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of table and slopes: far distances are summed into the ends of the table."""
    table, slopes, reach = None, None, bias.reach
    if bias.table is not None:
        table = torch.zeros_like(bias.table, dtype=de.dtype)
        first, last = max(low, -reach), min(high, reach)
        if first <= last:
            table[:, first + reach : last + reach + 1] = de[:, first - low : last - low + 1]
        table[:, 0] += de[:, : max(min(high + 1, -reach) - low, 0)].sum(-1)
        table[:, -1] += de[:, max(reach + 1 - low, 0) :].sum(-1)
    if bias.slopes is not None:
        slopes = -einsum(de, torch.arange(low, high + 1, dtype=de.dtype).abs(), "h x, x -> h")
    return table, slopes


@dataclass(frozen=True, eq=False)
class Job:
    """What is asked for, beside the tensors. Entry x of e is the bias at distance x − far."""

    way: Program
    scale: float
    lengths: Int[Tensor, " b"] | None
    dropout_p: float = 0.0
    seed: int = 0
    pattern: Pattern | None = None

    @property
    def far(self) -> int:
        """Where the last query stands."""
        return self.way.start + self.way.step * max(self.way.n - 1, 0)

    @property
    def reach(self) -> tuple[int, int]:
        """The least and the largest distance."""
        return -self.far, self.way.m - 1 - self.way.start

    def kept(self) -> "Kept":
        return Kept(self.dropout_p, torch.Generator().manual_seed(self.seed))


@dataclass(frozen=True)
class Kept:
    """What dropout multiplies weights with, 0 or 1/(1 − p); drawn twice in the same order it is the same."""

    dropout_p: float
    generator: torch.Generator

    def like(self, s: Float[Tensor, "*s"]) -> Float[Tensor, "*s"] | None:
        if not self.dropout_p:
            return None
        stay = 1.0 - self.dropout_p
        return torch.empty_like(s).bernoulli_(stay, generator=self.generator).div_(stay)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, e, job):
        o, lse = forward(q, k, v, e, job)
        ctx.save_for_backward(q, k, v, e, o, lse)
        ctx.job = job
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx, grad, grad_lse):
        q, k, v, e, o, lse = ctx.saved_tensors
        if grad is None and grad_lse is None:
            return (None,) * 5
        if torch.is_grad_enabled():  # create_graph=True: these gradients will be differentiated again
            return *_twice(grad, grad_lse, q, k, v, e, ctx.job), None
        grad = torch.zeros_like(o) if grad is None else grad
        return *backward(grad, grad_lse, q, k, v, e, o, lse, ctx.job, ctx.needs_input_grad[3]), None


def _twice(grad, grad_lse, q, k, v, e, job: Job) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v and e by the formula, so that they have gradients themselves."""
    if job.dropout_p or job.pattern is None:
        raise BackendError(
            "double backward (create_graph=True) is not supported by backend='tiles' with dropout; use backend='sdpa'"
        )
    place = job.pattern, job.way.start, job.way.step, job.scale, job.lengths
    if e is None:
        return *double_backward.gradients(
            (grad, grad_lse), (q, k, v), double_backward.Weighting(*place)
        ), None
    i = job.way.start + job.way.step * torch.arange(job.way.n)
    bias = e[:, torch.arange(job.way.m) - i[:, None] + job.far]
    *grads, of_bias = double_backward.gradients(
        (grad, grad_lse), (q, k, v), double_backward.Weighting(*place, bias)
    )
    of_e = None if of_bias is None else torch.autograd.grad(bias, e, of_bias, create_graph=True)[0]
    return *grads, of_e


def forward(
    q: Float[Tensor, "b h n d_k"],
    k: Float[Tensor, "b h_kv m d_k"],
    v: Float[Tensor, "b h_kv m d_v"],
    e: Float[Tensor, "h x"] | None,
    job: "Job",
) -> tuple[Float[Tensor, "b h n d_v"], Float[Tensor, "b h n"]]:
    """o and lse, in float32 or float64."""
    q, k, v = (x.contiguous() for x in (q, k, v))
    o, lse = q.new_zeros(*q.shape[:3], v.shape[-1]), q.new_full(q.shape[:3], -inf)
    kept, e = job.kept(), _of_rows(e, q)
    for left, (queries, out, logs, bias), (of_k, of_v) in lanes(job.way, job.lengths, (q, o, lse, e), (k, v)):
        for batch in left.calls():
            for tile in _tiles(batch, bias, job.far, whole=not job.dropout_p):
                run = _dropped if job.dropout_p else _fused
                part, part_lse = run(tile, queries, of_k, of_v, job.scale, kept)
                join(tile.batch.rows_of(out), tile.batch.rows_of(logs), part.flip(2), part_lse.flip(2))
    return o, lse


def _fused(tile: "Tile", q: Tensor, k: Tensor, v: Tensor, scale: float, kept: Kept) -> tuple[Tensor, Tensor]:
    """o and lse of a tile by the fused op, the bias a view of e."""
    return flash_cpu.forward(tile.rows(q), tile.keys(k), tile.keys(v), scale, tile.allowed, tile.bias)


def _dropped(
    tile: "Tile", q: Tensor, k: Tensor, v: Tensor, scale: float, kept: Kept
) -> tuple[Tensor, Tensor]:
    """o and lse of a tile, some weights taken away."""
    s = tile.scores(tile.rows(q), k, scale)
    most = s.amax(-1, keepdim=True).clamp_(min=torch.finfo(s.dtype).min)  # −∞ − most is −∞ again
    s.sub_(most).exp2_()
    total = s.sum(-1, keepdim=True)
    drop = kept.like(s)
    o = (s if drop is None else s.mul_(drop)) @ tile.keys(v)
    o.div_(total.masked_fill(total == 0, 1.0))
    return o, most.add_(total.log2_()).div_(LOG2E).squeeze(-1)


def backward(
    grad: Float[Tensor, "b h n d_v"],
    grad_lse: Float[Tensor, "b h n"] | None,
    q: Float[Tensor, "b h n d_k"],
    k: Float[Tensor, "b h_kv m d_k"],
    v: Float[Tensor, "b h_kv m d_v"],
    e: Float[Tensor, "h x"] | None,
    o: Float[Tensor, "b h n d_v"],
    lse: Float[Tensor, "b h n"],
    job: "Job",
    of_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of q, k, v and e from those of o and lse."""
    grad, q, k, v = (x.contiguous() for x in (grad, q, k, v))
    delta = einsum(grad, o, "b h n d, b h n d -> b h n")
    delta = delta if grad_lse is None else delta - grad_lse
    lse = lse.masked_fill(lse == -inf, inf) * LOG2E  # 2^(score − lse) is then 0 in an empty row, not NaN
    kept, e = job.kept(), _of_rows(e, q)
    dq, dk, dv, de = (torch.zeros_like(x) for x in (q, k, v, e))
    room = Room()
    queries, keys = (grad, q, lse, delta, dq, e, de), (k, v, dk, dv)
    for left, of_rows, of_keys in lanes(job.way, job.lengths, queries, keys):
        for batch in left.calls():
            for tile in _tiles(batch, of_rows[5], job.far):
                _tile_backward(tile, of_rows, of_keys, job.scale, kept, room if of_bias else None)
    return dq, dk, dv, de.sum(0) if of_bias else None


def _tile_backward(
    tile: "Tile",
    of_rows: tuple[Tensor, ...],
    of_keys: tuple[Tensor, ...],
    scale: float,
    kept: Kept,
    room: "Room | None",
) -> None:
    """Adds the gradients of one tile: q kᵀ again, the weights, do vᵀ, and three products; room: of the bias too."""
    do, q, lse, delta = map(tile.rows, of_rows[:4])
    (dq, _, de), (k, v, dk, dv) = of_rows[4:], of_keys
    p = tile.scores(q, k, scale).sub_(lse[..., None]).exp2_()
    drop = kept.like(p)
    ds = do @ tile.keys(v).mT if room is None else room.product(do, tile.keys(v))
    ds = ds if drop is None else ds.mul_(drop)
    ds.sub_(delta[..., None]).mul_(p)
    tile.batch.rows_of(dq).add_((ds @ tile.keys(k)).flip(2), alpha=scale)
    _add_to_keys(tile.batch, dk, ds.mT, q, scale)
    _add_to_keys(tile.batch, dv, (p if drop is None else p.mul_(drop)).mT, do, 1.0)
    if room is not None:
        tile.add_to_bias(de, ds)


def _add_to_keys(
    batch: Batch,
    into: Float[Tensor, "lanes m d"],
    left: Float[Tensor, "lanes t l r"],
    right: Float[Tensor, "lanes t r d"],
    scale: float,
) -> None:
    """into[the keys of tile t] += scale · left[t] right[t]; of one tile, the product is added where it is made."""
    if batch.tiles == 1:
        batch.keys_of(into)[:, 0].baddbmm_(left[:, 0], right[:, 0], alpha=scale)
    else:
        batch.add_to_keys(into, (left @ right).mul_(scale))


class Room:
    """Space for the ds of tile after tile, each row followed by `rows` zeros: see Tile.add_to_bias."""

    def __init__(self):
        self.held = torch.empty(0)

    def product(
        self, do: Float[Tensor, "lanes t r d"], v: Float[Tensor, "lanes t l d"]
    ) -> Float[Tensor, "lanes t r l"]:
        """do vᵀ, written there."""
        shape = (*do.shape[:3], v.shape[2] + do.shape[2])
        if self.held.shape != shape or self.held.dtype != do.dtype:
            self.held = do.new_zeros(shape)
        ds = self.held[..., : v.shape[2]]
        torch.bmm(do.flatten(0, 1), v.mT.flatten(0, 1), out=ds.flatten(0, 1))
        return ds


def _of_rows(e: Tensor | None, q: Tensor) -> Float[Tensor, "b h x"]:
    """e for each batch row, so that it goes along with the heads; one zero where there is none."""
    if e is None:
        return q.new_zeros(*q.shape[:2], 0)
    return repeat(e, "h x -> b h x", b=len(q)).contiguous()


# Tiles


@dataclass(frozen=True, eq=False)
class Tile:
    """Some tiles of a batch, or some rows of one, in every lane; rows in reverse order."""

    batch: Batch
    allowed: Bool[Tensor, "r l"] | None
    bias: Float[Tensor, "lanes 1 r l"] | None
    first: int  # the entry of e of the last row and the first key
    steps: tuple[int, int]  # from there, one row back and one key on

    def rows(self, x: Float[Tensor, "lanes n *d"]) -> Float[Tensor, "lanes t r *d"]:
        return self.batch.rows_of(x).flip(2)

    def keys(self, x: Float[Tensor, "lanes m d"]) -> Float[Tensor, "lanes t l d"]:
        return self.batch.keys_of(x)

    def scores(
        self, q: Float[Tensor, "lanes t r d"], k: Float[Tensor, "lanes m d"], scale: float
    ) -> Float[Tensor, "lanes t r l"]:
        """scale · q kᵀ + bias, and −∞ where a pair is not allowed; in base 2."""
        s = q * (scale * LOG2E) @ self.keys(k).mT
        s = s if self.bias is None else s.add_(self.bias, alpha=LOG2E)
        return s if self.allowed is None else s.masked_fill_(~self.allowed, -inf)

    def add_to_bias(self, into: Float[Tensor, "lanes x"], ds: Float[Tensor, "lanes t r l"]) -> None:
        """into[first + a·r + c·l] += Σ_t ds[t, r, l], for steps (a, c).

        Where a = c: read with a pitch of one less, row r is shifted by r, and what shifts in is a zero.
        """
        (a, c), (n_lanes, t, r, l) = self.steps, ds.shape
        if a == c:
            pitch = l + r - 1
            shifted = ds.as_strided((n_lanes * t, r, pitch), (r * (l + r), pitch, 1))
            columns = torch.bmm(ds.new_ones(1, 1, r).expand(n_lanes * t, 1, r), shifted)  # a sum, but quicker
            columns = columns.view(n_lanes, t, pitch).sum(1)
            into[:, self.first : self.first + c * (pitch - 1) + 1 : c] += columns
            return
        ds = ds.sum(1)
        some = c // a if c % a == 0 else 1  # so many rows reach no entry twice
        for low in range(0, r, some):
            rows, there = ds[:, low : low + some], into[:, self.first + a * low :]
            there.as_strided(rows.shape, (into.stride(0), a, c)).add_(rows)


def _tiles(batch: Batch, e: Float[Tensor, "lanes x"], far: int, whole: bool = False) -> Iterator[Tile]:
    """The batch in tiles of about PAIRS pairs in all lanes, each with its bias; whole, if nothing is held."""
    steps = batch.step * batch.row_step, batch.key_step
    biased = e.shape[1] > 0
    alike = not biased or batch.key_hop == batch.step * batch.row_hop  # all tiles at the same distances
    allowed = None if batch.allowed is None else batch.allowed.flip(0)
    view = whole and (not biased or (allowed is None and batch.key_step == 1))
    tiles = batch.tiles if view else PAIRS // (batch.rows * batch.keys * len(e))
    rows = batch.rows if tiles else max(PAIRS // (batch.keys * len(e)), ROWS)
    tiles = max(tiles, 1) if alike else 1
    for r in range(0, batch.rows, rows):
        some = batch.some_rows(r, min(rows, batch.rows - r))
        part = None if allowed is None else allowed[batch.rows - r - some.rows : batch.rows - r]
        for t in range(0, batch.tiles, tiles):
            piece = some.tile(t, min(tiles, batch.tiles - t))
            last = piece.start + piece.step * (piece.row + piece.row_step * (piece.rows - 1))
            first = piece.key - last + far
            shape, strides = (len(e), 1, piece.rows, piece.keys), (e.stride(0), 0, *steps)
            bias = e[:, first:].as_strided(shape, strides) if biased else None
            yield Tile(piece, part, bias, first, steps)

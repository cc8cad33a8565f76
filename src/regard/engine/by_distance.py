"""Attention with a bias by distance, and with dropout, on the CPU: tiles of scores, and nothing n × m.

    s = scale · q kᵀ + e[j − i]      p = exp(s − lse)      δ = do·o − dlse
    ds = p ∘ (do vᵀ − δ)             de[x] = Σ ds over the pairs with j − i = x

With the rows of a tile in reverse order, the bias is e[x₀ + a·r + c·l], a and c positive: a view of e, never
copied, and its gradient is a sum along the anti-diagonals of the tile, which are the columns of a view as well.

Scores and lse are in base 2 inside: PyTorch's CPU exp falls to a tenth of its speed where a result is not a
normal float, exp2 does not.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from math import inf, log2
from operator import add

import torch
from einops import einsum, rearrange
from jaxtyping import Float, Int
from torch import Tensor

from ..position import ByDistance
from .batches import Batch, Program, program, working
from .merge import join
from .plan import Plan

LOG2E = log2(2.718281828459045)
PAIRS = 1 << 18  # scores held at once: 1 MiB in float32, about the second-level cache of a core


def attend(
    q: Float[Tensor, "b h n d_k"],
    k: Float[Tensor, "b h_kv m d_k"],
    v: Float[Tensor, "b h_kv m d_v"],
    plan: Plan | Program,
    bias: ByDistance | None = None,
    *,
    scale: float,
    lengths: Int[Tensor, " b"] | None = None,
    dropout_p: float = 0.0,
) -> tuple[Float[Tensor, "b h n d_v"], Float[Tensor, "b h n"]]:
    """softmax(scale · q kᵀ + bias) v over the plan's pairs, and ln Σ exp of each row; both differentiable.

    Dropout takes weights away after the softmax, so lse does not know of it; it draws from PyTorch's generator.
    """
    way = plan if isinstance(plan, Program) else program(plan.pattern, plan.n, plan.m, plan.start, plan.step)
    dtype = working(q.dtype)
    far = way.start + way.step * max(way.n - 1, 0)  # where the last query stands
    e = None if bias is None else along(bias, -far, way.m - 1 - way.start).to(dtype)
    seed = int(torch.randint(1 << 62, ())) if dropout_p else 0
    job = Job(way, scale, lengths, far, dropout_p, seed)
    o, lse = _Attend.apply(q.to(dtype), k.to(dtype), v.to(dtype), e, job)
    return o.to(q.dtype), lse.to(torch.promote_types(q.dtype, torch.float32))


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


@dataclass(frozen=True, eq=False)
class Job:
    """What is asked for, beside the tensors. Entry x of e is the bias at distance x − far."""

    way: Program
    scale: float
    lengths: Int[Tensor, " b"] | None
    far: int
    dropout_p: float
    seed: int

    def heads(self, q: Tensor, k: Tensor) -> Iterator[tuple[tuple[int, int], tuple[int, int], Batch]]:
        """(batch row, head) of queries, of the keys they read, and a batch of tiles, always in this order."""
        group = q.shape[1] // k.shape[1]
        lengths = [self.way.m] * len(q) if self.lengths is None else self.lengths.tolist()
        ways = {m: self.way.before(m) for m in set(lengths)}
        for b, m in enumerate(lengths):
            for h in range(q.shape[1]):
                for batch in ways[m].batches:
                    yield (b, h), (b, h // group), batch.as_one() if batch.one_stretch else batch

    def kept(self) -> "Kept":
        return Kept(self.dropout_p, torch.Generator().manual_seed(self.seed))


@dataclass(frozen=True)
class Kept:
    """What dropout multiplies weights with, 0 or 1/(1 − p); drawn twice in the same order it is the same."""

    dropout_p: float
    generator: torch.Generator

    def like(self, s: Float[Tensor, "t r l"]) -> Float[Tensor, "t r l"] | None:
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
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, grad_lse):
        q, k, v, e, o, lse = ctx.saved_tensors
        if grad is None and grad_lse is None:
            return (None,) * 5
        grad = torch.zeros_like(o) if grad is None else grad
        return *backward(grad, grad_lse, q, k, v, e, o, lse, ctx.job, ctx.needs_input_grad[3]), None


def forward(
    q: Float[Tensor, "b h n d_k"],
    k: Float[Tensor, "b h_kv m d_k"],
    v: Float[Tensor, "b h_kv m d_v"],
    e: Float[Tensor, "h x"] | None,
    job: Job,
) -> tuple[Float[Tensor, "b h n d_v"], Float[Tensor, "b h n"]]:
    """o and lse, in float32 or float64."""
    o, lse = q.new_zeros(*q.shape[:3], v.shape[-1]), q.new_full(q.shape[:3], -inf)
    kept, e = job.kept(), None if e is None else e * LOG2E
    for at, kv, batch in job.heads(q, k):
        for tile in _tiles(batch, None if e is None else e[at[1]], job.far, q.dtype):
            s = tile.scores(q[at], k[kv], job.scale)
            most = s.amax(-1, keepdim=True).clamp_(min=torch.finfo(s.dtype).min)  # −∞ − most is −∞ again
            s.sub_(most).exp2_()
            total = s.sum(-1, keepdim=True)
            drop = kept.like(s)
            part = torch.bmm(s if drop is None else s.mul_(drop), tile.keys(v[kv]))
            part.div_(total.masked_fill(total == 0, 1.0))
            part_lse = most.add_(total.log2_()).div_(LOG2E).squeeze(-1)
            join(
                tile.batch.rows_of(o[at][None])[0],
                tile.batch.rows_of(lse[at][None])[0],
                part.flip(1),
                part_lse.flip(1),
            )
    return o, lse


def backward(
    grad: Float[Tensor, "b h n d_v"],
    grad_lse: Float[Tensor, "b h n"] | None,
    q: Float[Tensor, "b h n d_k"],
    k: Float[Tensor, "b h_kv m d_k"],
    v: Float[Tensor, "b h_kv m d_v"],
    e: Float[Tensor, "h x"] | None,
    o: Float[Tensor, "b h n d_v"],
    lse: Float[Tensor, "b h n"],
    job: Job,
    of_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of q, k, v and e from those of o and lse."""
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    de = torch.zeros_like(e) if e is not None and of_bias else None
    delta = einsum(grad, o, "b h n d, b h n d -> b h n")
    delta = delta if grad_lse is None else delta - grad_lse
    lse = lse.masked_fill(lse == -inf, inf) * LOG2E  # 2^(score − lse) is then 0 in an empty row, not NaN
    kept, e = job.kept(), None if e is None else e * LOG2E
    for at, kv, batch in job.heads(q, k):
        for tile in _tiles(batch, None if e is None else e[at[1]], job.far, q.dtype):
            p = tile.scores(q[at], k[kv], job.scale)
            p.sub_(tile.rows(lse[at])[..., None]).exp2_()
            do, drop = tile.rows(grad[at]), kept.like(p)
            ds = tile.room(p)
            ds.baddbmm_(do, tile.keys(v[kv]).mT, beta=0)
            ds = ds if drop is None else ds.mul_(drop)
            ds.sub_(tile.rows(delta[at])[..., None]).mul_(p)
            tile.add_to_rows(dq[at], torch.bmm(ds, tile.keys(k[kv])).mul_(job.scale))
            tile.add_to_keys(dk[kv], ds, tile.rows(q[at]), job.scale)
            tile.add_to_keys(dv[kv], p if drop is None else p.mul_(drop), do)
            if de is not None:
                tile.add_to_bias(de[at[1]], ds)
    return dq, dk, dv, de


# Tiles


@dataclass(frozen=True, eq=False)
class Tile:
    """Some tiles of a batch, or some rows of one; rows in reverse order. added: bias and mask, in base 2."""

    batch: Batch
    added: Float[Tensor, "1 r l"] | None
    first: int  # the entry of e of the last row and the first key
    steps: tuple[int, int]  # from there, one row back and one key on

    def rows(self, x: Float[Tensor, "n *d"]) -> Float[Tensor, "t r *d"]:
        return self.batch.rows_of(x[None])[0].flip(1)

    def keys(self, x: Float[Tensor, "m d"]) -> Float[Tensor, "t l d"]:
        return self.batch.keys_of(x[None])[0]

    def scores(
        self, q: Float[Tensor, "n d"], k: Float[Tensor, "m d"], scale: float
    ) -> Float[Tensor, "t r l"]:
        """scale · q kᵀ + bias, and −∞ where a pair is not allowed; in base 2."""
        given, beta = (q.new_zeros(1), 0) if self.added is None else (self.added, 1)
        return torch.baddbmm(given, self.rows(q), self.keys(k).mT, beta=beta, alpha=scale * LOG2E)

    def room(self, like: Float[Tensor, "t r l"]) -> Float[Tensor, "t r l"]:
        """Space for ds, each row followed by rows − 1 zeros, so that add_to_bias can shift row r by r."""
        t, r, l = like.shape
        room = like.new_empty(t, r, l + r - 1)
        room[..., l:] = 0.0
        return room[..., :l]

    def add_to_rows(self, into: Float[Tensor, "n d"], part: Float[Tensor, "t r d"]) -> None:
        self.batch.rows_of(into[None])[0].add_(part.flip(1))

    def add_to_keys(
        self,
        into: Float[Tensor, "m d"],
        weights: Float[Tensor, "t r l"],
        rows: Float[Tensor, "t r d"],
        by: float = 1.0,
    ) -> None:
        """into[key l of tile t] += by · Σ_r weights[t, r, l] · rows[t, r]; tiles that share a key in turn."""
        apart = self.batch.phases if self.batch.key_hop else self.batch.tiles
        for phase in range(min(apart, self.batch.tiles)):
            some = slice(phase, None, apart)
            there = self.batch.tile(phase, len(weights[some]), apart).keys_of(into[None])[0]
            there.baddbmm_(weights[some].mT, rows[some], alpha=by)

    def add_to_bias(self, into: Float[Tensor, " x"], ds: Float[Tensor, "t r l"]) -> None:
        """into[first + a·r + c·l] += Σ_t ds[t, r, l], for steps (a, c)."""
        (a, c), (_, r, l) = self.steps, ds.shape
        if a == c:
            columns = ds.as_strided((len(ds), r, l + r - 1), (ds.stride(0), ds.stride(1) - 1, 1))
            into[self.first : self.first + c * (l + r - 2) + 1 : c] += columns.sum((0, 1))
            return
        ds = ds.sum(0)
        some = c // a if c % a == 0 else 1  # so many rows reach no entry twice
        for low in range(0, r, some):
            rows = ds[low : low + some]
            there = into[self.first + a * low :]
            there.as_strided(rows.shape, (a * into.stride(0), c * into.stride(0))).add_(rows)


def _tiles(batch: Batch, e: Float[Tensor, " x"] | None, far: int, dtype: torch.dtype) -> Iterator[Tile]:
    """The batch in tiles of at most PAIRS pairs, as far as one row goes, each with its bias and mask."""
    steps = batch.step * batch.row_step, batch.key_step
    alike = e is None or batch.key_hop == batch.step * batch.row_hop  # all tiles at the same distances
    allowed = None if batch.allowed is None else batch.allowed.flip(0)
    tiles = PAIRS // (batch.rows * batch.keys) if alike else 0
    tiles, rows = max(tiles, 1), batch.rows if tiles else max(PAIRS // batch.keys, 1)
    for r in range(0, batch.rows, rows):
        some = batch.some_rows(r, min(rows, batch.rows - r))
        hidden = None if allowed is None else ~allowed[batch.rows - r - some.rows : batch.rows - r]
        added = None
        for t in range(0, batch.tiles, tiles):
            piece = some.tile(t, min(tiles, batch.tiles - t))
            last = piece.start + piece.step * (piece.row + piece.row_step * (piece.rows - 1))
            first = piece.key - last + far
            if t == 0 or not alike:
                added = _added(e, first, steps, hidden, (piece.rows, piece.keys), dtype)
            yield Tile(piece, added, first, steps)


def _added(
    e: Float[Tensor, " x"] | None,
    first: int,
    steps: tuple[int, int],
    hidden: Tensor | None,
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> Float[Tensor, "1 r l"] | None:
    """e[first + a·r + c·l], −∞ where hidden; None for zeros everywhere."""
    if e is None and hidden is None:
        return None
    view = torch.zeros(shape, dtype=dtype) if e is None else e[first:].as_strided(shape, steps)
    view = view if hidden is None else view.masked_fill(hidden, -inf)
    return rearrange(view, "r l -> 1 r l")

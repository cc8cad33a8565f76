"""Tiles on the CPU by products, the keys of a tile side by side: one row of scores, one softmax, nothing to join.

    s = scale · q [k_band, k_shared]ᵀ + mask      weights = softmax(s)      o = weights [v_band, v_shared]

Nothing is gathered: the band of each tile is a view that overlaps those of its neighbours, and what all rows share is
one long product. PyTorch's batched product writes to one stretch of memory only, so the step that scales and masks
the scores of a band also puts them beside the others.
"""

from math import prod
from weakref import ref

import torch
from jaxtyping import Float
from torch import Tensor

from ...pattern import Pattern
from .. import double_backward
from . import stretches
from .batch import Batch, lanes
from .pages import large
from .products import Room, within
from .stretches import Lay, Piece

BLOCK = 1 << 20  # numbers of memory for weights that are asked for at once
SPARE = 16  # blocks that stay for calls to come: 64 MiB in float32

Place = tuple[Pattern, int, int, float]  # pattern, start, step, scale
Kept = list[Tensor | None]  # of each piece its weights, or None where they are made again
Blocks = list[ref[Tensor]]


class Abreast:
    """(q, k, v) → o over the pairs of a pattern; differentiable if `learns`."""

    def __init__(self, lay: Lay, place: Place, learns: bool):
        self.lay, self.place, self.scale, self.learns = lay, (*place, None), place[-1], learns

    def __call__(
        self,
        q: Float[Tensor, "b h n d_k"],
        k: Float[Tensor, "b h_kv m d_k"],
        v: Float[Tensor, "b h_kv m d_v"],
    ) -> Float[Tensor, "b h n d_v"]:
        return _Attend.apply(q, k, v, self) if self.learns else within(self.forward, q, k, v)[0]

    def forward(self, room: Room, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Kept, Blocks]:
        """o, what is kept of the weights, and the blocks of memory it lies in."""
        q, k, v = (x.contiguous() for x in (q, k, v))
        o = large(q.new_empty(*q.shape[:3], v.shape[-1]))
        kept: Kept = []
        memory = _Memory(q, _most(q, k, v) if self.learns else 0)
        for _, (queries, out), keys in lanes(self.lay.program, None, (q, o), (k, v)):
            for piece in self.lay.pieces(len(queries)):
                kept.append(memory.take(piece.scores))
                of_keys, of_values = map(piece.keys_of, keys)
                w = self._weigh(piece, piece.rows_of(queries), of_keys, kept[-1], room)
                _mix(w, of_values, piece.rows_of(out), room)
        return o, kept, memory.blocks

    def _weigh(self, piece: Piece, q: Tensor, keys: list[Tensor], into: Tensor | None, room: Room) -> Tensor:
        w = room("w", *piece.scores) if into is None else into
        _scores(q, keys, self.scale, piece.masks(q.dtype), w, room)
        return torch.softmax(w, -1, out=w)

    def backward(
        self, room: Room, q: Tensor, k: Tensor, v: Tensor, kept: Kept, do: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v."""
        q, k, v, do = (x.contiguous() for x in (q, k, v, do))
        dq = large(torch.empty_like(q))
        dk, dv = (large(torch.empty_like(x)).zero_() for x in (k, v))
        weights = iter(kept)
        for _, rows, keys in lanes(self.lay.program, None, (q, do, dq), (k, v, dk, dv)):
            for piece in self.lay.pieces(len(rows[0])):
                q_, do_, dq_ = map(piece.rows_of, rows)
                of_keys, of_values = map(piece.keys_of, keys[:2])
                if (w := next(weights)) is None:
                    w = self._weigh(piece, q_, of_keys, None, room)
                ds = room("ds", *piece.scores)
                _scores(do_, of_values, self.scale, None, ds, room)  # ds carries the scale on to dq and dk
                torch.ops.aten._softmax_backward_data.out(ds, w, -1, ds.dtype, grad_input=ds)
                _mix(ds, of_keys, dq_, room)
                _add(keys[2], piece, ds, q_, room)
                _add(keys[3], piece, w, do_, room)
        return dq, dk, dv


def _most(q: Tensor, k: Tensor, v: Tensor) -> int:
    """The most weights that are kept for the backward pass: as many numbers as q, k, v and o have together."""
    o = q.numel() // max(q.shape[-1], 1) * v.shape[-1]
    return min(q.numel() + k.numel() + v.numel() + o, stretches.KEPT)


class _Memory:
    """So many numbers for weights, in blocks; those that a call before gave back come first."""

    def __init__(self, like: Tensor, most: int):
        self.like, self.left, self.block = like, most, like.new_empty(0)
        self.blocks: Blocks = []

    def take(self, shape: tuple[int, int, int]) -> Tensor | None:
        size = prod(shape)
        if size > self.left:
            return None
        if size > len(self.block):
            self.block = self._another(size)
            self.blocks.append(ref(self.block))
        found, self.block = self.block[:size].view(shape), self.block[size:]
        self.left -= size
        return found

    def _another(self, size: int) -> Tensor:
        try:
            block = _spare.pop()
        except IndexError:
            block = None
        if block is None or block.dtype != self.like.dtype or len(block) < size:
            block = large(self.like.new_empty(max(BLOCK, size)))
        return block


_spare: list[Tensor] = []  # blocks that nobody reads: fresh pages cost as much as the products
_graph_is_kept = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)


def _give_back(kept: Kept, blocks: Blocks) -> None:
    """These blocks, if this was the last time that they were read.

    What a hook for saved tensors gave in place of the weights may lie in memory of its own, which stays its own.
    """
    if not _graph_is_kept():
        own = [block for block in (each() for each in blocks) if block is not None]
        read = {id(w._base) for w in kept if w is not None}
        _spare.extend(block for block in own if id(block) in read)
        del _spare[SPARE:]


def _scores(
    rows: Float[Tensor, "t r d"],
    parts: list[Tensor],
    scale: float,
    masks: Float[Tensor, "c r l"] | None,
    into: Float[Tensor, "t r keys"],
    room: Room,
) -> None:
    """into = scale · rows partᵀ for all parts side by side, the masks added in the first, the band."""
    for part, columns in _beside(parts, into):
        if part is not parts[0] and len(part) == 1:
            flat = columns.flatten(0, 1)
            torch.addmm(flat, rows.flatten(0, 1), part[0].mT, beta=0, alpha=scale, out=flat)
            continue
        found = into if len(parts) == 1 else room("part", *columns.shape)
        torch.bmm(rows, part.mT, out=found)
        if part is parts[0] and masks is not None:
            _masked(found, scale, masks, columns)
        else:
            torch.mul(found, scale, out=columns)


def _masked(
    found: Float[Tensor, "t r l"],
    scale: float,
    masks: Float[Tensor, "c r l"],
    into: Float[Tensor, "t r l"],
) -> None:
    """into = scale · found + the mask whose turn it is."""
    cycle = len(masks)
    if cycle == 1:
        torch.add(masks, found, alpha=scale, out=into)
        return
    whole = len(found) // cycle * cycle
    some, to = (x[:whole].unflatten(0, (-1, cycle)) for x in (found, into))
    torch.add(masks, some, alpha=scale, out=to)
    if whole < len(found):
        torch.add(masks[: len(found) - whole], found[whole:], alpha=scale, out=into[whole:])


def _mix(
    weights: Float[Tensor, "t r keys"], parts: list[Tensor], into: Float[Tensor, "t r d"], room: Room
) -> None:
    """into = Σ weights part over all parts."""
    direct = into.is_contiguous()
    found = into if direct else room("mixed", *into.shape)
    for part, columns in _beside(parts, weights):
        if part is parts[0]:
            torch.bmm(columns, part, out=found)
        elif len(part) == 1:
            found.flatten(0, 1).addmm_(columns.flatten(0, 1), part[0])
        else:
            found.baddbmm_(columns, part)
    if not direct:
        into.copy_(found)


def _add(
    grad: Float[Tensor, "lanes m d"],
    piece: Piece,
    of_pairs: Float[Tensor, "t r keys"],
    of_rows: Float[Tensor, "t r d"],
    room: Room,
) -> None:
    """grad[key l of tile t] += Σ_r of_pairs[t, r, l] · of_rows[t, r], in one order only."""
    mine, band = grad[piece.lanes], piece.band
    _add_band(mine, band, of_pairs[..., : band.keys].mT, of_rows, room)
    at = band.keys
    for part in piece.of.shared:
        into, columns = part.keys_of(mine)[:, 0], of_pairs[..., at : at + part.keys]
        if len(into) == 1:
            into[0].addmm_(columns.flatten(0, 1).mT, of_rows.flatten(0, 1))
        else:
            into.add_(torch.bmm(columns.mT, of_rows, out=room("part", *into.shape)))
        at += part.keys


def _add_band(
    grad: Float[Tensor, "lanes m d"],
    band: Batch,
    of_pairs: Float[Tensor, "t l r"],
    of_rows: Float[Tensor, "t r d"],
    room: Room,
) -> None:
    """Where a band is some hops long, the tiles so many apart fill one stretch of memory without a gap."""
    tiles, l, d = band.tiles, band.keys, grad.shape[-1]
    apart = 1 if tiles == 1 else l // band.key_hop
    if len(grad) == 1 and band.key_step == 1 and (tiles == 1 or apart * band.key_hop == l):
        for phase in range(min(apart, tiles)):
            some = of_rows[phase::apart]
            first = band.key + phase * band.key_hop
            into = grad[0, first : first + len(some) * l].view(-1, l, d)
            into.baddbmm_(of_pairs[phase::apart], some)
        return
    part = torch.bmm(of_pairs, of_rows, out=room("part", len(of_rows), l, d))
    band.add_to_keys(grad, part.unflatten(0, (len(grad), tiles)))


def _beside(parts: list[Tensor], of_all: Float[Tensor, "t r keys"]) -> list[tuple[Tensor, Tensor]]:
    """Each part with its columns."""
    return list(zip(parts, of_all.split([part.shape[1] for part in parts], -1)))


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, way):
        o, kept, ctx.blocks = within(way.forward, q, k, v)
        ctx.save_for_backward(q, k, v, *kept)
        ctx.way = way
        return o

    @staticmethod
    def backward(ctx, grad):
        q, k, v, *kept = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: these gradients will be differentiated again
            return *double_backward.gradients(
                (grad, None), (q, k, v), double_backward.Weighting(*ctx.way.place)
            ), None
        found = within(ctx.way.backward, q, k, v, kept, grad)
        _give_back(kept, ctx.blocks)
        return *found, None

"""What the CPU executor does with one piece of scores, forward and backward, or with one group by the fused op."""

from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ... import compat
from ..merge import join
from . import fused_op, kernels
from .distance_bias import TileBias, padded
from .gathered_layout import GatheredPiece
from .groups import TileGroup
from .layout import Layout, Named, Piece
from .memory import Buffers, SavedWeights

AnyPiece = Piece | GatheredPiece


@dataclass
class Executor:
    """One pass over the pieces of a call."""

    scale: float
    one_softmax: bool  # each row's keys are all in one piece
    buffers: Buffers
    saved: SavedWeights | None = None  # where forward puts the weights
    dropout_p: float = 0.0
    seed: int = 0
    far: int = 0  # the position of the last query; entry x of e is the bias at distance x − far
    last_mask: tuple[Any, Tensor | None] = (None, None)

    @cached_property
    def generator(self) -> torch.Generator:
        """Sampled in the same order forward and backward, it gives the same numbers."""
        return torch.Generator().manual_seed(self.seed)

    def dropout(self, weights: Tensor) -> Tensor | None:
        """What dropout multiplies weights with, 0 or 1/(1 − p)."""
        if not self.dropout_p:
            return None
        stay = 1.0 - self.dropout_p
        return torch.empty_like(weights).bernoulli_(stay, generator=self.generator).div_(stay)

    def forward(self, piece: AnyPiece, views: dict[str, Any], e: Tensor | None) -> None:
        buffers = self.buffers
        q = piece.load_rows(views["q"], "q", buffers)
        k, v = piece.load_keys(views["k"], "k", buffers), piece.load_keys(views["v"], "v", buffers)
        w = None if self.saved is None else self.saved.take(piece.scores)
        w = self._scores(piece, q if e is None else q.flip(1), k, e, w)
        if self.one_softmax:
            torch.softmax(w, -1, out=w)
            o = piece.output(views["o"], "o", buffers)
            kernels.mix(w, v, o)
            piece.store(views["o"], o)
            return
        o, lse = views["o"], views["lse"]
        largest, total = kernels.exponentials_(w)
        if (dropout := self.dropout(w)) is not None:
            w.mul_(dropout)
        direct = piece.fresh and e is None and o.is_contiguous()
        part = kernels.mix(w, v, o if direct else buffers("o", *o.shape)).div_(total)
        part_lse = largest.add_(total.log_()).squeeze(-1)
        if e is not None:
            part, part_lse = part.flip(1), part_lse.flip(1)
        if not piece.fresh:
            join(o, lse, part, part_lse)
            return
        lse.copy_(part_lse)
        if not direct:
            o.copy_(part)

    def _scores(
        self, piece: AnyPiece, q: Tensor, k: list[Tensor], e: Tensor | None, into: Tensor | None
    ) -> Float[Tensor, "t r keys"]:
        """Of all parts side by side, with bias and mask; with a bias the rows are in reverse order."""
        s = self.buffers("w", *piece.scores) if into is None else into
        mask = self._mask(piece, q.dtype)
        if e is None:
            return kernels.scores(q, k, self.scale, s, self.buffers, mask)
        assert isinstance(piece, Piece)
        bias = self.bias(piece, e)
        torch.bmm(q, k[0].mT, out=s)
        torch.add(bias, s, alpha=self.scale, out=s)
        return s if mask is None else s.add_(mask.flip(1))

    def bias(self, piece: Piece, e: Float[Tensor, "heads x"]) -> Float[Tensor, "some r l"]:
        tiles = piece.tiles
        return TileBias.of(tiles, self.far).view(e[piece.heads], tiles.rows, tiles.keys)

    def _mask(self, piece: AnyPiece, dtype: torch.dtype) -> Tensor | None:
        """A large mask is evaluated once for the pieces of one group, which follow one another."""
        if isinstance(piece, GatheredPiece) or not piece.step.group.split:
            return piece.mask(dtype)
        if self.last_mask[0] is not piece.step:
            self.last_mask = piece.step, piece.mask(dtype)
        return self.last_mask[1]

    def backward(
        self,
        piece: AnyPiece,
        views: dict[str, Any],
        saved: Tensor | None,
        bias: tuple[Tensor | None, Tensor | None],
    ) -> None:
        """Add the gradients of a piece. bias: e, and de if it is needed."""
        buffers, (e, de) = self.buffers, bias
        q, do = (piece.load_rows(views[x], x, buffers) for x in ("q", "do"))
        q, do = (q, do) if e is None else (q.flip(1), do.flip(1))
        k, v = piece.load_keys(views["k"], "k", buffers), piece.load_keys(views["v"], "v", buffers)
        w = self._weights(piece, q, k, e, _row(views, "lse", e)) if saved is None else saved
        # Where parts are put side by side, the scale is applied in that step, and ds carries it on to dq and dk.
        inner, outer = (self.scale, 1.0) if len(v) > 1 else (1.0, self.scale)
        ds = buffers("ds", *piece.scores) if de is None else padded(piece.scores, buffers)
        kernels.scores(do, v, inner, ds, buffers)
        dropout = self.dropout(ds)
        ds = ds if dropout is None else ds.mul_(dropout)
        if piece.alone and de is None:
            # δ = Σ weights ∘ do vᵀ is nearer than do·o, above all where a row has one key and ds is 0.
            compat.softmax_backward_(ds, w)
        else:
            delta = _row(views, "delta", e)
            assert delta is not None
            ds.sub_(delta[..., None]).mul_(w)
        if (dlse := _row(views, "dlse", e)) is not None:
            ds.addcmul_(w, dlse[..., None])
        self._add_dq(piece, views["dq"], ds, k, outer, reverse=e is not None)
        piece.add_to_keys(views["dk"], ds, q, outer, buffers)
        piece.add_to_keys(views["dv"], w if dropout is None else w.mul_(dropout), do, 1.0, buffers)
        if de is not None:
            assert isinstance(piece, Piece)
            TileBias.of(piece.tiles, self.far).add_gradient(de[piece.heads], ds)

    def _weights(
        self, piece: AnyPiece, q: Tensor, k: list[Tensor], e: Tensor | None, lse: Tensor | None
    ) -> Float[Tensor, "t r keys"]:
        """In the softmax over all keys of a row. Where the piece has all of them its own softmax is nearer than
        exp(s − lse), as lse is rounded."""
        s = self._scores(piece, q, k, e, None)
        if not piece.alone:
            assert lse is not None
            return kernels.exp_(s.sub_(lse[..., None]))
        torch.softmax(s, -1, out=s)
        if piece.has_empty_row and lse is not None:
            s.masked_fill_((lse == inf)[..., None], 0.0)
        return s

    def _add_dq(
        self, piece: AnyPiece, dq: Tensor, ds: Tensor, k: list[Tensor], alpha: float, reverse: bool
    ) -> None:
        if piece.fresh and not reverse:
            out = piece.output(dq, "dq", self.buffers)
            piece.store(dq, kernels.mix(ds, k, out, alpha))
        elif dq.is_contiguous() and not reverse:
            kernels.mix(ds, k, dq, alpha, add=True)
        else:
            part = kernels.mix(ds, k, self.buffers("dq", *dq.shape), alpha)
            dq.add_(part.flip(1) if reverse else part)

    # Groups that PyTorch's fused op runs, which holds no scores.

    def fused(self, group: TileGroup, rows: Named, keys: Named) -> None:
        q, o, lse = (group.rows_of(rows[x]) for x in ("q", "o", "lse"))
        k, v = (group.keys_of(keys[x]) for x in ("k", "v"))
        join(o, lse, *fused_op.forward(q, k, v, self.scale, **_fused_mask(group)))

    def fused_with_bias(self, layout: Layout, rows: Named, keys: Named, e: Tensor) -> None:
        """All groups; the bias is a view of e, which the op adds as a mask."""
        for group in layout.with_bias:
            q, o, lse = (group.rows_of(rows[x]) for x in ("q", "o", "lse"))
            k, v = (group.keys_of(keys[x]) for x in ("k", "v"))
            bias = TileBias.of(group, self.far).view(e, group.rows, group.keys)[:, None]
            allowed = None if (pairs := group.allowed) is None else pairs.flip(0)
            part, part_lse = fused_op.forward(q.flip(2), k, v, self.scale, allowed, bias)
            join(o, lse, part.flip(2), part_lse.flip(2))

    def fused_backward(self, group: TileGroup, rows: Named, keys: Named) -> None:
        """The op subtracts δ = do·o from each do·v; one more column, v 0, o 1, do −dlse, makes that δ − dlse."""
        do, v, o = rows["do"], keys["v"], rows["o"]
        if "dlse" in rows:
            do, v = torch.cat([do, -rows["dlse"][..., None]], -1), F.pad(v, (0, 1))
            o = F.pad(o, (0, 1), value=1.0)
        k, dv = keys["k"], keys["dv"]
        for part in group.within(len(k) * max(k.shape[-1], v.shape[-1])):
            do_, q_, o_, lse_ = map(part.rows_of, (do, rows["q"], o, rows["lse"]))
            forward = fused_op.Forward(q_, part.keys_of(k), part.keys_of(v), o_, lse_)
            dq, dk_, dv_ = fused_op.backward(do_, forward, self.scale, **_fused_mask(part))
            part.rows_of(rows["dq"]).add_(dq)
            part.add_to_keys(keys["dk"], dk_)
            part.add_to_keys(dv, dv_[..., : dv.shape[-1]])


def _row(views: dict[str, Any], name: str, e: Tensor | None) -> Tensor | None:
    """One number per row; with a bias the rows are in reverse order."""
    x = views.get(name)
    return x if x is None or e is None else x.flip(1)


def _fused_mask(group: TileGroup) -> dict[str, Any]:
    return {"triangle": True} if group.triangle else {"allowed": group.allowed}

"""Layouts: which groups of tiles a call runs, in which order, cut into the pieces that are computed at once."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from . import kernels
from .groups import TileGroup, fused_nanoseconds, products_nanoseconds
from .memory import Buffers

Named = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Step:
    """A group in the order in which groups run."""

    group: TileGroup
    fresh: bool  # no group before it writes to its rows
    alone: bool  # no other group does


@dataclass(frozen=True, eq=False)
class Piece:
    """What is computed at once: tiles of one head, rows of its one tile, or one tile of several heads."""

    step: Step
    index: int  # among the pieces of its group
    first: int  # the tile of its group with which it begins
    tiles: TileGroup  # its tiles alone
    heads: slice

    @property
    def fresh(self) -> bool:
        return self.step.fresh

    @property
    def alone(self) -> bool:
        return self.step.alone

    @cached_property
    def scores(self) -> tuple[int, int, int]:
        """Tiles of all its heads, rows, keys."""
        return self.tiles.tiles * (self.heads.stop - self.heads.start), self.tiles.rows, self.tiles.all_keys

    def mask(self, dtype: torch.dtype) -> Float[Tensor, "c r l"] | None:
        """What is added to the scores of its own keys, to tile after tile in turn."""
        mask, cycle = self.step.group.mask(dtype), self.step.group.cycle
        if mask is None or cycle == 1:
            return mask
        t = self.first % cycle
        return mask[t : t + self.tiles.tiles]

    @property
    def has_empty_row(self) -> bool:
        return self.step.group.has_empty_row

    # A strided piece is read and written where it is; see gathered_layout.py for one that is copied.

    def load_rows(self, x: Tensor, name: str, buffers: Buffers) -> Float[Tensor, "t r *d"]:
        return x

    def load_keys(self, parts: list[Tensor], name: str, buffers: Buffers) -> list[Tensor]:
        return parts

    def output(self, x: Tensor, name: str, buffers: Buffers) -> Float[Tensor, "t r d"]:
        """Contiguous memory for what `store` brings to x: x itself where it can be."""
        return x if x.is_contiguous() else buffers(name, *x.shape)

    def store(self, x: Tensor, value: Tensor) -> None:
        if value is not x:
            x.copy_(value)

    def add_to_keys(
        self, grad: Tensor, of_pairs: Tensor, of_rows: Tensor, alpha: float, buffers: Buffers
    ) -> None:
        """grad[key l of tile t] += alpha · Σ_r of_pairs[t, r, l] · of_rows[t, r]; grad: its heads."""
        kernels.add_to_keys(grad, self.tiles, of_pairs, of_rows, alpha, buffers)


@dataclass(frozen=True, eq=False)
class Layout:
    """The groups of a pattern over n queries and m keys; their sets of pairs are disjoint."""

    n: int
    m: int
    start: int  # query r is at position start + step · r
    step: int
    groups: tuple[TileGroup, ...]

    @cached_property
    def computed(self) -> int:
        return sum(group.pairs for group in self.groups)

    @property
    def concatenated(self) -> bool:
        """Whether all keys of a tile are in one softmax, and every row is in exactly one group."""
        return bool(self.groups) and self.groups[0].concatenated

    @property
    def tile_rows(self) -> int:
        """The rows of its usual tile."""
        return max((group.rows for group in self.groups), default=0)

    def before(self, m: int) -> "Layout":
        """The same with the keys from m on hidden."""
        if m >= self.m:
            return self
        return replace(self, m=m, groups=tuple(left for group in self.groups for left in group.before(m)))

    @cached_property
    def unfused(self) -> "Layout":
        """The same for bias and dropout: small tiles, each group at one distance, all by products."""
        return replace(self, groups=tuple(part for group in self._as_run for part in group.small_tiles()))

    @cached_property
    def with_bias(self) -> tuple[TileGroup, ...]:
        """The groups that the fused op runs with a bias: complete where nothing but a view of the bias is read."""
        groups: list[TileGroup] = []
        for group in self._as_run:
            one_distance = group.tiles == 1 or group.key_shift == group.step * group.row_shift
            view = group.masked_by is None and group.key_step == 1 and one_distance
            groups += [group] if view else group.small_tiles()
        return tuple(groups)

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The groups in the order in which they run: the fused op's, those of several heads, the others."""
        groups = sorted(self._as_run, key=lambda group: (not group.fused, group.by_head))
        times = np.zeros(self.n, dtype=np.int64)
        for group in groups:
            times[group.row_numbers] += 1
        written, steps = np.zeros(self.n, dtype=bool), []
        for group in groups:
            at = group.row_numbers
            steps.append(Step(group, not written[at].any(), bool((times[at] == 1).all())))
            written[at] = True
        return tuple(steps)

    @cached_property
    def _as_run(self) -> list[TileGroup]:
        return [group.as_one() if group.mergeable else group for group in self.groups]

    @cached_property
    def all_alone(self) -> bool:
        return all(step.alone for step in self.steps)

    @cached_property
    def fused(self) -> tuple[TileGroup, ...]:
        return tuple(step.group for step in self.steps if step.group.fused)

    def pieces(self, heads: int) -> list[Piece]:
        """The pieces that products run: those of several heads, then the others head by head."""
        if heads not in self._pieces:
            several: list[list[Piece]] = []
            one: list[list[Piece]] = []
            for step in self.steps:
                if not step.group.fused:
                    pieces = [Piece(step, i, *each) for i, each in enumerate(step.group.pieces(heads))]
                    (one if step.group.by_head else several).append(pieces)
            by_head = [p for h in range(heads) for pieces in one for p in pieces if p.heads.start == h]
            self._pieces[heads] = [p for pieces in several for p in pieces] + by_head
        return self._pieces[heads]

    @cached_property
    def _pieces(self) -> dict[int, list[Piece]]:
        return {}

    def bind(self, rows: Named, keys: Named, grads: Named) -> Iterator[tuple[Piece, dict[str, Any]]]:
        """Each piece in running order, with its views of rows, keys and the heads of gradients of keys."""
        views: dict[Step, list[tuple[str, list[Any]]]] = {}
        heads = len(next(iter(rows.values())))
        for step in self.steps:
            group = step.group
            if not group.fused:
                views[step] = [
                    *((name, group.cut_rows(x)) for name, x in rows.items()),
                    *((name, group.cut_keys(x)) for name, x in keys.items()),
                    *((name, group.cut_heads(x)) for name, x in grads.items()),
                ]
        for piece in self.pieces(heads):
            yield piece, {name: of_group[piece.index] for name, of_group in views[piece.step]}

    def nanoseconds(self, heads: int = 8, grad: bool = True, saved: int = 0) -> float:
        """An estimate on two cores, for heads of 64 in float32, where a pair of full SDPA takes 1.8, with
        gradients 6.4, and a pair of masked SDPA 2.2 and 7.1. Fitted to bench/cpu_patterns.py --group small.
        saved: how many weights are saved for the backward pass."""
        if self.concatenated:
            return self._concatenated_nanoseconds(heads, grad, saved)
        start = 1.5e6 if grad else 0.5e6
        costs = (
            (fused_nanoseconds if group.fused else products_nanoseconds)(group, heads, grad)
            for group in self._as_run
        )
        return start + sum(costs, 0.0)

    def _concatenated_nanoseconds(self, heads: int, grad: bool, saved: int) -> float:
        """Pairs, more for weights that are computed a second time; rows, more for each shared part; groups."""
        rows = [group.tiles * group.rows for group in self.groups]
        shared = sum(r * len(group.shared) for r, group in zip(rows, self.groups))
        if not grad:
            per_head = self.computed * 2.3 + sum(rows) * 60.0 + shared * 60.0
            return heads * per_head + len(rows) * 1e5 + 7e5
        per_head = self.computed * 8.2 + sum(rows) * 100.0 + shared * 400.0
        recomputed = max(heads * self.computed - saved, 0)
        return heads * per_head + recomputed * 4.0 + len(rows) * 3e5 + 3e6


def by_key_head(
    layouts: tuple[Layout, ...], lengths: Tensor | None, rows: Named, keys: Named
) -> Iterator[tuple[Layout, Named, Named]]:
    """(layout, (b·h_kv, …) of each of `rows`, which have b and h in front, the same of `keys`), as views.

    Once for each query head of a group of heads, as they share their keys; for each batch row too, if batch rows
    differ in their lengths or layouts.
    """
    q, k = next(iter(rows.values())), next(iter(keys.values()))
    b, group = len(q), q.shape[1] // k.shape[1]
    if lengths is None and len(layouts) == 1:
        batch = [(slice(None), layouts[0])]
    else:
        each = layouts * b if len(layouts) == 1 else layouts
        visible = [one.m for one in each] if lengths is None else lengths.tolist()
        batch = [(slice(r, r + 1), _before(one, m)) for r, (one, m) in enumerate(zip(each, visible))]
    for batch_rows, left in batch:
        for member in range(group):
            yield (
                left,
                {name: x[batch_rows, member::group].flatten(0, 1) for name, x in rows.items()},
                {name: x[batch_rows].flatten(0, 1) for name, x in keys.items()},
            )


@lru_cache(maxsize=256)
def _before(layout: Layout, m: int) -> Layout:
    return layout.before(m)

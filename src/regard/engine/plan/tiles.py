"""What a word says of a tile of rows: intervals on the other axis, and perhaps a residue.

A word is a conjunction of few relations between x, a position on the axis of the tiles, and y, one on the
axis of the parts: a band on x − y, a range, a residue, the same block. (A transposed plan swaps the axes.)
For a tile, a word gives an *outer* interval of y (some x of the tile allows it) and an *inner* one (all do).
"""

from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd, lcm

import numpy as np
from numpy.typing import NDArray

from ... import pattern as word
from ...pattern import Pattern
from ...progression import FAR, Ints

LIMITS = {
    "positions": 1 << 40,
    "tiles": 1 << 18,
    "cells": 1 << 23,
    "outcomes": 12,
    "residues": 1 << 17,
    "words": 16,
}


class NoPlan(Exception):
    """No short list of progressions describes this pattern; the message says why, `auto` repeats it."""


def limit(what: str, got: int, why: str) -> None:
    if got > LIMITS[what]:
        raise NoPlan(f"{why}: {got} {what}, and the planner stops at {LIMITS[what]}")


@dataclass(frozen=True)
class Axis:
    """Index r of count stands at position start + step · r."""

    count: int
    start: int = 0
    step: int = 1

    def index(self, position: Ints) -> Ints:
        """The first index that stands at or after a position, within 0 … count."""
        return np.clip(-((self.start - position) // self.step), 0, self.count)


@dataclass(frozen=True)
class Relations:
    """What a word asks of (x, y), all at once."""

    near: int = -FAR  # near ≤ x − y ≤ far
    far: int = FAR
    block: int = 0  # x and y in the same block of this size; 0: anywhere
    x_below: int = FAR
    y_below: int = FAR
    x_class: tuple[int, int] = (1, 0)  # (k, residue): x ≡ residue mod k
    y_class: tuple[int, int] = (1, 0)
    apart: int = 1  # divides x − y

    def swapped(self) -> "Relations":
        return replace(
            self,
            near=-self.far,
            far=-self.near,
            x_below=self.y_below,
            y_below=self.x_below,
            x_class=self.y_class,
            y_class=self.x_class,
        )

    @property
    def period(self) -> int:
        """Rows this far apart on the axis of x agree in every residue."""
        return lcm(self.x_class[0], self.apart)


def relations(of: Pattern, swap: bool) -> Relations:
    """The relations of a word, x being the query and y the key; the other way round with swap."""
    largest = max((v for v in vars(of).values() if isinstance(v, int)), default=0)
    limit("positions", largest, f"{of!r} reaches past any sequence")
    match of:
        case word.full():
            found = Relations()
        case word.causal():
            found = Relations(near=0)
        case word.window():
            found = Relations(near=-of.ahead, far=of.before)
        case word.dilated():
            found = Relations(near=-of.reach * of.step, far=of.reach * of.step, apart=of.step)
        case word.every():
            found = Relations(y_class=(of.k, of.offset))
        case word.strided():
            found = Relations(apart=of.k)
        case word.rows():
            found = Relations(x_class=(of.k, of.offset))
        case word.sinks():
            found = Relations(y_below=of.m)
        case word.prefix():
            found = Relations(x_below=of.m, y_below=of.m)
        case word.blocks():
            found = Relations(block=of.size)
        case _:
            raise NoPlan(f"{of!r} carries data, so its keys are known only when it runs")
    return found.swapped() if swap else found


@dataclass(frozen=True, eq=False)
class Tiles:
    """Runs of rows of one axis: first row, one row step for all, number of rows."""

    axis: Axis
    hop: int
    first: Ints
    rows: Ints

    @cached_property
    def low(self) -> Ints:
        return self.axis.start + self.axis.step * self.first

    @cached_property
    def high(self) -> Ints:
        return self.low + self.stride * (self.rows - 1)

    @property
    def stride(self) -> int:
        """From one position of a tile to the next; 0 where there is one row, which agrees with itself."""
        return self.axis.step * self.hop if self.axis.count > 1 else 0

    def sample(self, most: int) -> "Tiles":
        by = -(-len(self.first) // most) or 1
        return replace(self, first=self.first[::by], rows=self.rows[::by])


def lay(axis: Axis, tile: int, hop: int, cuts: Ints, classes: Ints) -> Tiles:
    """Tiles of at most `tile` rows, all of one class mod hop, none across a cut (a row index)."""
    edges = np.unique(np.concatenate([[0], cuts, [axis.count]]).astype(np.int64))
    limit("tiles", (len(edges) - 1) * len(classes), f"one residue class mod {hop} a tile")
    begin, end = edges[:-1, None], edges[1:, None]
    first = begin + (classes - begin) % hop
    count = np.maximum(-((first - end) // hop), 0).ravel()
    many = -(-count // tile)
    limit("tiles", int(many.sum()), f"{axis.count} rows in tiles of {tile}, row step {hop}")
    run = np.repeat(np.arange(len(many)), many)
    nth = np.arange(len(run)) - np.repeat(np.cumsum(many) - many, many)
    return Tiles(axis, hop, first.ravel()[run] + nth * tile * hop, np.minimum(count[run] - nth * tile, tile))


@dataclass(frozen=True, eq=False)
class Reading:
    """A word as the tiles see it: y in [lo, hi) of outer and inner, y ≡ residue mod modulus."""

    outer: tuple[Ints, Ints]
    inner: tuple[Ints, Ints]
    modulus: int
    residue: Ints

    def without_residue(self) -> "Reading":
        """The same with less known: no y is allowed for sure."""
        nowhere = (self.outer[0], self.outer[0])
        return Reading(self.outer, nowhere, 1, np.zeros_like(self.residue))

    def value(self, lo: Ints) -> NDArray[np.int8]:
        """ALL, SOME or NONE of the cells that start at lo, where the residue is right."""
        (a, b), (c, d) = self.outer, self.inner
        outer = (lo >= a[:, None]) & (lo < b[:, None])
        return outer.astype(np.int8) + ((lo >= c[:, None]) & (lo < d[:, None]))


def read(rel: Relations, tiles: Tiles, ys: Axis) -> Reading:
    """Outer and inner interval, and the residue of y, of one word for every tile."""
    x0, x1 = tiles.low, tiles.high
    outer_lo, outer_hi = x0 - rel.far, x1 - rel.near
    inner_lo, inner_hi = x1 - rel.far, x0 - rel.near
    some, each = x0 < rel.x_below, x1 < rel.x_below
    if rel.block:
        b0, b1 = x0 // rel.block * rel.block, x1 // rel.block * rel.block
        outer_lo, outer_hi = np.maximum(outer_lo, b0), np.minimum(outer_hi, b1 + rel.block - 1)
        inner_lo, inner_hi = np.maximum(inner_lo, b0), np.minimum(inner_hi, b0 + rel.block - 1)
        each = each & (b0 == b1)
    if rel.x_class[0] > 1:
        nth, by = _solve(x0, tiles.stride, *rel.x_class)
        some, each = some & (nth < tiles.rows), each & (nth == 0) & ((by == 1) | (tiles.rows == 1))
    modulus, residue = rel.y_class[0], np.full_like(x0, rel.y_class[1])
    if rel.apart > 1:
        modulus = gcd(tiles.stride, rel.apart)  # what all rows of a tile agree on
        residue, each = x0 % modulus, each & (modulus == rel.apart)
    residue, modulus = _solve(np.full_like(x0, ys.start), ys.step, modulus, residue)
    some, residue = some & (residue < FAR), residue % modulus

    def clip(lo: Ints, hi: Ints, real: NDArray[np.bool_], empty: Ints | int) -> tuple[Ints, Ints]:
        lo, hi = ys.index(lo), ys.index(np.minimum(hi, rel.y_below - 1) + 1)
        real = real & (lo < hi)
        return np.where(real, lo, empty), np.where(real, hi, empty)

    outer = clip(outer_lo, outer_hi, some, 0)
    return Reading(outer, clip(inner_lo, inner_hi, some & each, outer[0]), modulus, residue)


def _solve(start: Ints, step: int, k: int, residue: Ints | int) -> tuple[Ints, int]:
    """(t, by): start + step · t ≡ residue (mod k) for t, t + by, …; t = FAR where none does."""
    g = gcd(step, k)
    by = k // g
    apart = residue - start
    t = apart // g * pow(step // g, -1, by) % by
    return np.where(apart % g == 0, t, FAR), by


def row_steps(pattern: Pattern, step: int, by_keys: bool) -> list[int]:
    """How far apart the members of a tile may lie: neighbours, or such as agree in the residues of a word.

    step: between the positions of two queries.
    """
    try:
        periods = [relations(word, by_keys).period for word in dict.fromkeys(pattern.leaves())]
    except NoPlan:
        return [1]
    apart = 1 if by_keys else step
    return sorted({1, *(period // gcd(period, apart) for period in periods)})

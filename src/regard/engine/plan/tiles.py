"""What a word asks of a tile of rows: intervals on the other axis, and perhaps a residue.

A tile is a run of positions x on one axis; its keys (in a plan by keys, its query rows) are positions y on the other.
For a tile, a word gives an *outer* interval of y (allowed for some x of the tile) and an *inner* one (for all).
Relations are read with x as the query; a plan by keys transposes them first.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd, lcm

import numpy as np
from numpy.typing import NDArray

from ...pattern import Pattern, Relation, Word
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
    """No short list of progressions describes this pattern; the message gives the reason, and `auto` repeats it."""


def limit(what: str, got: int, why: str) -> None:
    if got > LIMITS[what]:
        raise NoPlan(f"{why}: {got} {what}, and the planner stops at {LIMITS[what]}")


def relations(pattern: Pattern, by_keys: bool) -> dict[Pattern, Relation]:
    """The relation of each word of the pattern, in reading order; transposed in a plan by keys."""
    out: dict[Pattern, Relation] = {}
    for word in dict.fromkeys(pattern.leaves()):
        if not isinstance(word, Word):
            raise NoPlan(f"{word!r} carries data, so its keys are known only when it runs")
        relation = word.relation
        limit("positions", relation.largest, f"{word!r} reaches beyond any sequence")
        out[word] = relation.transposed() if by_keys else relation
    return out


def residue_period(relation: Relation) -> int:
    """Rows this far apart agree in every residue that the relation asks of x."""
    return lcm(relation.query_class[0], relation.divisor)


def row_steps(pattern: Pattern, step: int, by_keys: bool) -> list[int]:
    """The steps between the rows of a tile that are worth trying: 1, or a step at which a word's residues agree.

    step: between the positions of two queries.
    """
    try:
        periods = {residue_period(relation) for relation in relations(pattern, by_keys).values()}
    except NoPlan:
        return [1]
    apart = 1 if by_keys else step
    return sorted({1, *(period // gcd(period, apart) for period in periods)})


@dataclass(frozen=True)
class Axis:
    """Index r of count is at position start + step · r."""

    count: int
    start: int = 0
    step: int = 1

    def index(self, position: Ints) -> Ints:
        """The first index at or after a position, within 0 … count."""
        return np.clip(-((self.start - position) // self.step), 0, self.count)


@dataclass(frozen=True, eq=False)
class Tiles:
    """Runs of rows of one axis: first row, one row step for all, number of rows."""

    axis: Axis
    row_step: int
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
        return self.axis.step * self.row_step if self.axis.count > 1 else 0

    def sample(self, max_tiles: int) -> "Tiles":
        by = -(-len(self.first) // max_tiles) or 1
        return replace(self, first=self.first[::by], rows=self.rows[::by])


def cut_tiles(axis: Axis, tile: int, row_step: int, cuts: Ints, classes: Ints) -> Tiles:
    """Tiles of at most `tile` rows, all of one residue class mod row_step, none across a cut (a row index)."""
    edges = np.unique(np.concatenate([[0], cuts, [axis.count]]).astype(np.int64))
    limit("tiles", (len(edges) - 1) * len(classes), f"one residue class mod {row_step} per tile")
    begin, end = edges[:-1, None], edges[1:, None]
    first = begin + (classes - begin) % row_step
    count = np.maximum(-((first - end) // row_step), 0).ravel()
    tiles = -(-count // tile)
    limit("tiles", int(tiles.sum()), f"{axis.count} rows in tiles of {tile}, row step {row_step}")
    run = np.repeat(np.arange(len(tiles)), tiles)
    nth = np.arange(len(run)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    first = first.ravel()[run] + nth * tile * row_step
    return Tiles(axis, row_step, first, np.minimum(count[run] - nth * tile, tile))


@dataclass(frozen=True, eq=False)
class Bounds:
    """A word for each tile: y in [lo, hi) of outer and inner, y ≡ residue mod modulus."""

    outer: tuple[Ints, Ints]
    inner: tuple[Ints, Ints]
    modulus: int
    residue: Ints

    def without_residue(self) -> "Bounds":
        """The same with less known: no y is certain to be allowed for all rows."""
        nowhere = (self.outer[0], self.outer[0])
        return Bounds(self.outer, nowhere, 1, np.zeros_like(self.residue))

    def value(self, lo: Ints) -> NDArray[np.int8]:
        """ALL, SOME or NONE (cells.py) of the cells that start at lo, where the residue is right."""
        (a, b), (c, d) = self.outer, self.inner
        outer = (lo >= a[:, None]) & (lo < b[:, None])
        return outer.astype(np.int8) + ((lo >= c[:, None]) & (lo < d[:, None]))


def bounds(relation: Relation, tiles: Tiles, ys: Axis) -> Bounds:
    """Outer and inner interval, and the residue of y, of one word for every tile."""
    x0, x1 = tiles.low, tiles.high
    outer_lo, outer_hi = x0 - relation.far, x1 - relation.near
    inner_lo, inner_hi = x1 - relation.far, x0 - relation.near
    some, each = x0 < relation.query_below, x1 < relation.query_below
    for size in relation.blocks:
        b0, b1 = x0 // size * size, x1 // size * size
        outer_lo, outer_hi = np.maximum(outer_lo, b0), np.minimum(outer_hi, b1 + size - 1)
        inner_lo, inner_hi = np.maximum(inner_lo, b0), np.minimum(inner_hi, b0 + size - 1)
        each = each & (b0 == b1)
    if relation.query_class[0] > 1:
        nth, by = _solve(x0, tiles.stride, *relation.query_class)
        some, each = some & (nth < tiles.rows), each & (nth == 0) & ((by == 1) | (tiles.rows == 1))
    modulus, residue = relation.key_class[0], np.full_like(x0, relation.key_class[1])
    if relation.divisor > 1:
        shared = gcd(tiles.stride, relation.divisor)  # what all rows of a tile agree on
        each = each & (shared == relation.divisor)
        modulus, residue, possible = _both_residues(modulus, residue, shared, x0 % shared)
        some = some & possible
    residue, modulus = _solve(np.full_like(x0, ys.start), ys.step, modulus, residue)
    some, residue = some & (residue < FAR), residue % modulus

    last = relation.key_below - 1
    outer = _indices(ys, outer_lo, np.minimum(outer_hi, last), some, 0)
    inner = _indices(ys, inner_lo, np.minimum(inner_hi, last), some & each, outer[0])
    return Bounds(outer, inner, modulus, residue)


def _indices(ys: Axis, lo: Ints, hi: Ints, real: NDArray[np.bool_], empty: Ints | int) -> tuple[Ints, Ints]:
    """The indices of the positions lo … hi, as a half-open interval; where there are none, one at `empty`."""
    lo, hi = ys.index(lo), ys.index(hi + 1)
    real = real & (lo < hi)
    return np.where(real, lo, empty), np.where(real, hi, empty)


def _both_residues(k: int, r: Ints, l: int, s: Ints) -> tuple[int, Ints, NDArray[np.bool_]]:
    """The modulus and residue of y ≡ r (mod k) and y ≡ s (mod l), and whether there is any such y."""
    if k == 1:
        return l, s, np.ones(len(s), dtype=bool)
    limit("positions", lcm(k, l), "two residues of one word")
    t, _ = _solve(r, k, l, s)
    possible = t < FAR
    return lcm(k, l), np.where(possible, r + k * np.where(possible, t, 0), 0), possible


def _solve(start: Ints, step: int, k: int, residue: Ints | int) -> tuple[Ints, int]:
    """(t, by): start + step · t ≡ residue (mod k) for t, t + by, …; t = FAR where none does."""
    g = gcd(step, k)
    by = k // g
    difference = np.asarray(residue - start)
    quotient = difference // g
    if by > 1 << 30:  # the product could overflow int64: use Python's integers
        quotient = quotient.astype(object)
    t = (quotient * pow(step // g, -1, by) % by).astype(np.int64)
    return np.where(difference % g == 0, t, FAR), by

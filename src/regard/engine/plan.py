"""Which keys a run of queries visits: tiles of queries, and for each a few progressions of keys.

    computed = Σ rows × keys over the parts ≥ needed = the pairs of the pattern

A pass is a set of tiles; the passes of a plan hold disjoint sets of pairs, so their partial results join by
log-sum-exp. All arrays are numpy int64 on the host; whoever runs a plan moves what it needs.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..pattern import Pattern
from ..progression import Ints


class NoPlan(Exception):
    """No short list of progressions describes this pattern; the message says why, `auto` repeats it."""


@dataclass(frozen=True, eq=False)
class Pass:
    """Tiles of queries with their progressions of keys (in a transposed plan: tiles of keys, parts of rows)."""

    pattern: Pattern  # exactly the pairs of this pass: a ragged part is masked by pattern.allows(i, j)
    tiles: Ints  # (t, 3): first row, row step, number of rows
    offsets: Ints  # (t + 1,): the parts of tile t are parts[offsets[t] : offsets[t + 1]]
    parts: Ints  # (p, 4): first key, key step, number of keys, 1 = full (every pair allowed) or 0 = ragged

    @cached_property
    def computed(self) -> int:
        """Σ rows × keys."""
        rows = np.repeat(self.tiles[:, 2], np.diff(self.offsets))
        return int((rows * self.parts[:, 2]).sum())

    @cached_property
    def most_parts(self) -> int:
        """The largest number of progressions in one tile."""
        return int(np.diff(self.offsets).max(initial=0))


@dataclass(frozen=True, eq=False)
class Plan:
    """Every allowed pair lies in exactly one part of one tile of one pass; a full part holds no other."""

    pattern: Pattern
    n: int
    m: int
    start: int  # query r stands at start + step · r
    step: int
    passes: tuple[Pass, ...]
    needed: int  # the pairs of the pattern

    @cached_property
    def computed(self) -> int:
        return sum(one.computed for one in self.passes)

    @property
    def waste(self) -> float:
        """computed / needed; 1.0 where nothing is allowed and nothing computed."""
        return self.computed / self.needed if self.needed else 1.0 + self.computed

    @property
    def most_parts(self) -> int:
        """The largest number of progressions in one tile, over all passes."""
        return max((one.most_parts for one in self.passes), default=0)


def plan(pattern: Pattern, n: int, m: int, start: int, step: int, tile: int = 128) -> Plan:
    """The plan of a pattern without data: query r of n stands at start + step · r, over keys 0 … m − 1."""
    return _whole(pattern, n, m, start, step, n, m, tile)


def transposed(pattern: Pattern, n: int, m: int, start: int, step: int, tile: int = 128) -> Plan:
    """The same pairs read from the keys: tiles are of keys, parts are progressions of query rows."""
    return _whole(pattern, n, m, start, step, m, n, tile)


def _whole(pattern: Pattern, n: int, m: int, start: int, step: int, rows: int, keys: int, tile: int) -> Plan:
    """Every pair, masked: where the cells of the planner will stand."""
    first = np.arange(0, rows if keys else 0, tile, dtype=np.int64)
    tiles = np.stack([first, np.ones_like(first), np.minimum(rows - first, tile)], axis=1)
    parts = np.tile(np.array([[0, 1, keys, 0]], dtype=np.int64), (len(first), 1))
    one = Pass(pattern, tiles, np.arange(len(first) + 1, dtype=np.int64), parts)
    return Plan(pattern, n, m, start, step, (one,), pattern.count(n, m, (start, step)))

"""Which keys a run of queries visits: tiles of queries, and for each a few progressions of keys.

    computed = Σ rows × keys over the parts ≥ needed = the pairs of the pattern

A pass is a set of tiles; the passes of a plan hold disjoint sets of pairs, so their partial results merge by
log-sum-exp. All arrays are numpy int64 on the host; a backend moves what it needs to its device.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, reduce
from math import lcm
from operator import and_, or_

import numpy as np

from ..pattern import Not, Pattern, Relation, Word, full, neighborhood
from ..pattern.clauses import Clause, clauses, conjuncts
from ..pattern.parts import (
    MASKED_PAIR_COST,
    MAX_PARTS,
    PART_COST,
    Axis,
    NoPlan,
    Tiles,
    common_row_step,
    cut_tiles,
    divide,
    limit,
    relations,
)
from ..progression import FAR, Ints

TILE_COST = 128  # of one more tile, per row, in pairs: reading q, writing o, merging with other passes
SAMPLE_TILES = 256  # tiles on which candidates are compared


@dataclass(frozen=True, eq=False)
class Pass:
    """Tiles of queries, each with progressions of keys; in a transposed plan tiles of keys, parts of rows."""

    pattern: Pattern  # exactly the pairs of this pass: a partial part is masked by pattern.allows(i, j)
    tiles: Ints  # (t, 3): first row, row step, number of rows
    offsets: Ints  # (t + 1,): the parts of tile t are parts[offsets[t] : offsets[t + 1]]
    parts: Ints  # (p, 4): first key, key step, number of keys, 1 = full (every pair allowed) or 0 = partial

    @cached_property
    def computed(self) -> int:
        """Σ rows × keys."""
        rows = np.repeat(self.tiles[:, 2], np.diff(self.offsets))
        return int((rows * self.parts[:, 2]).sum())

    @cached_property
    def max_parts(self) -> int:
        """The largest number of progressions in one tile."""
        return int(np.diff(self.offsets).max(initial=0))


@dataclass(frozen=True, eq=False)
class Plan:
    """Every allowed pair is in exactly one part of one tile of one pass; a full part holds only allowed pairs.

    A row without an allowed key may be in no tile; where no pair is allowed there is no pass.
    """

    pattern: Pattern
    n: int
    m: int
    start: int  # query r is at position start + step · r
    step: int
    passes: tuple[Pass, ...]

    @cached_property
    def computed(self) -> int:
        return sum(tile_pass.computed for tile_pass in self.passes)

    @property
    def max_parts(self) -> int:
        """The largest number of progressions in one tile, over all passes."""
        return max((tile_pass.max_parts for tile_pass in self.passes), default=0)


@dataclass(frozen=True)
class Tiling:
    """How to cut a pattern into tiles: the step between rows, and no tile across a multiple of `grid`."""

    pattern: Pattern
    row_step: int = 1
    grid: int = 0


@dataclass(frozen=True)
class Request:
    """One plan: tiles along xs, parts along ys; by_keys: xs are the keys."""

    xs: Axis
    ys: Axis
    tile: int
    by_keys: bool

    @classmethod
    def of(cls, n: int, m: int, start: int, step: int, tile: int, by_keys: bool) -> "Request":
        queries, keys = Axis(n, start, step), Axis(m)
        return cls(keys, queries, tile, True) if by_keys else cls(queries, keys, tile, False)

    def row_step(self, pattern: Pattern) -> int:
        return common_row_step(pattern, self.xs.step, self.by_keys)

    def tiles(self, tiling: Tiling) -> Tiles:
        """No tile crosses the end of a range of x, or a multiple of the grid."""
        below = {r.query_below for r in relations(tiling.pattern, self.by_keys).values()} - {FAR}
        ends = np.array(sorted(below), dtype=np.int64)
        if tiling.grid:
            last = self.xs.start + self.xs.step * self.xs.count
            multiples = np.arange(self.xs.start // tiling.grid, last // tiling.grid + 1)
            ends = np.append(ends, multiples * tiling.grid)
        return cut_tiles(self.xs, self.tile, tiling.row_step, self.xs.index(ends))

    def cost(self, tiling: Tiling) -> tuple[float, Pass | None]:
        """What a pass costs, in pairs, estimated from a sample of its tiles; and the pass, if these are all."""
        priced = replace(tiling, pattern=_without_row_classes(tiling.pattern, self.by_keys))
        tiles = self.tiles(priced)
        sample = tiles.sample(SAMPLE_TILES)
        sampled = self.make_pass(priced, sample)
        rows = (sampled.tiles[:, 2] + self.tile) / 2  # a short tile is not cheaper in proportion
        keys = sampled.parts[:, 2] * np.where(sampled.parts[:, 3], 1, MASKED_PAIR_COST) + PART_COST
        cost = (np.repeat(rows, np.diff(sampled.offsets)) * keys).sum() + rows.sum() * TILE_COST
        penalty = 1 if sampled.max_parts <= MAX_PARTS else 2
        complete = len(tiles.first) == len(sample.first) and priced == tiling
        scale = len(tiles.first) / max(len(sample.first), 1)
        return penalty * float(cost) * scale, sampled if complete else None

    def merged_passes(self, tilings: tuple[Tiling, ...]) -> int:
        """The number of passes that have rows of an earlier pass, so that their results are merged."""
        return sum(x.pattern == _without_row_classes(x.pattern, self.by_keys) for x in tilings[1:])

    def make_pass(self, tiling: Tiling, tiles: Tiles) -> Pass:
        """The parts of these tiles; a tile without an allowed key is left out."""
        offsets, parts = divide(tiling.pattern, tiles, self.ys, self.by_keys)
        table = np.stack([tiles.first, np.full_like(tiles.first, tiling.row_step), tiles.rows], axis=1)
        used = np.flatnonzero(np.diff(offsets))
        return Pass(tiling.pattern, table[used], np.append(offsets[used], offsets[-1]), parts)


def plan(
    pattern: Pattern, n: int, m: int, start: int, step: int, tile: int = 128, by_keys: bool = False
) -> Plan:
    """The plan of a pattern without data: query r of n is at position start + step · r, over keys 0 … m − 1.

    by_keys: the same pairs read from the keys: tiles are of keys, parts are progressions of query rows.
    """
    if isinstance(result := _cached(pattern, n, m, start, step, tile, by_keys), str):
        raise NoPlan(result)
    return result


def why_masked(pattern: Pattern, n: int, m: int, start: int, step: int, tile: int = 128) -> str | None:
    """Why tiles are no good choice at these sizes, so that a mask is; None: there is a good plan."""
    if n == 0 or m == 0:
        return "there are no pairs"
    try:
        parts = plan(pattern, n, m, start, step, tile).max_parts
    except NoPlan as why:
        return str(why)
    too_many = parts > MAX_PARTS and not isinstance(pattern, neighborhood)
    return f"{parts} progressions per tile; past {MAX_PARTS} a mask is faster" if too_many else None


@lru_cache(maxsize=256)
def _cached(pattern: Pattern, n: int, m: int, start: int, step: int, tile: int, by_keys: bool) -> Plan | str:
    """The plan, or the reason why there is none: both are computed once."""
    request, similar = (
        Request.of(*x, step, tile, by_keys) for x in ((n, m, start), _similar_sizes(n, m, start))
    )
    try:
        if isinstance(pattern, neighborhood):
            passes = _grid_passes(pattern, request) if n and m else ()
        else:
            passes = _cheapest_passes(pattern.expanded(), request, similar) if n and m else ()
    except NoPlan as why:
        return str(why)
    return Plan(pattern, n, m, start, step, passes)


def _similar_sizes(n: int, m: int, start: int) -> tuple[int, int, int]:
    """Sizes at least as large, in place of which others have the same: a new length or offset often has sizes for
    which the candidates have been compared before."""
    first = _rounded(start) if start >= 0 else -_rounded(-start)
    return _rounded(n), first + _rounded(m - start) if 0 <= start <= m else _rounded(m), first


def _rounded(size: int) -> int:
    """The next number with three significant bits: four of them are between two powers of two."""
    digits = max(size.bit_length() - 3, 0)
    return -(-size >> digits) << digits


def _grid_passes(grid: neighborhood, request: Request) -> tuple[Pass, ...]:
    """The lines of a grid are progressions."""
    if not request.xs == request.ys == Axis(grid.size):
        raise NoPlan(f"queries and keys are not all {grid.size} positions of the grid")
    limit("lines", grid.size // grid.grid[-1], repr(grid))
    limit("bits", sum(grid.fields), f"the coordinates of {grid!r}")
    return (Pass(grid, *grid.tiles(request.tile, request.by_keys)),)


def _cheapest_passes(pattern: Pattern, request: Request, similar: Request) -> tuple[Pass, ...]:
    """The passes of the candidate that is the cheapest at similar sizes."""
    limit("words", len(set(pattern.leaves())), "a pattern this long is masked")
    try:
        best, made = _cheapest(pattern, similar)
    except NoPlan:  # the larger sizes may be too large
        similar = request
        best, made = _cheapest(pattern, request)
    known = made if similar == request else {}
    passes = (known.get(tiling) or request.make_pass(tiling, request.tiles(tiling)) for tiling in best)
    return tuple(tile_pass for tile_pass in passes if len(tile_pass.parts))


@lru_cache(maxsize=256)
def _cheapest(pattern: Pattern, request: Request) -> tuple[tuple[Tiling, ...], dict[Tiling, Pass | None]]:
    """The cheapest candidate, by a sample of its tiles; and the passes of those whose sample was all."""
    candidates, costs, reasons = list(_candidates(pattern, request)), {}, []
    made: dict[Tiling, Pass | None] = {}
    for tilings in candidates if len(candidates) > 1 else ():
        try:
            priced = [request.cost(tiling) for tiling in tilings]
            costs[tilings] = sum(cost for cost, _ in priced)
            made |= zip(tilings, (tile_pass for _, tile_pass in priced))
        except NoPlan as why:
            reasons.append(why)
    if len(reasons) == len(candidates):
        raise reasons[0]
    best = min(costs, key=lambda x: (costs[x], request.merged_passes(x))) if costs else candidates[0]
    return best, {tiling: made[tiling] for tiling in best if tiling in made}


def _candidates(pattern: Pattern, request: Request) -> Iterator[tuple[Tiling, ...]]:
    """Neighboring rows; residue classes; each `|` by itself: disjoint passes, the later without the earlier."""
    groups: dict[tuple[int, int], list[Clause]] = {}  # by row step and key step
    for clause in clauses(pattern):
        positive = reduce(and_, (factor for factor in clause if not isinstance(factor, Not)), full())
        key_step = lcm(*(r.key_class[0] for r in relations(positive, request.by_keys).values()))
        groups.setdefault((request.row_step(positive), key_step), []).append(clause)
    steps = {row_step for row_step, _ in groups}
    common = {step} if (step := request.row_step(pattern)) < request.xs.count else set()
    span = request.tile * request.xs.step
    sizes = {size for r in relations(pattern, request.by_keys).values() for size in r.blocks}
    grids = {b for b in sizes if 4 * b >= span} | {span // b * b for b in sizes if b <= span}
    yield from ((Tiling(pattern, 1, grid),) for grid in sorted(grids or {0}))
    yield from ((Tiling(pattern, step),) for step in sorted((steps | common) - {1}))
    if len(steps) > 1:
        by_step = [
            (step, [c for key in groups for c in groups[key] if key[0] == step]) for step in sorted(steps)
        ]
        yield from (_split(by_step), _split(by_step[::-1]))
    if len({key_step for _, key_step in groups} - {1}) > 1:
        # Two residue classes of keys have few keys in common; those are masked in the later pass.
        yield _split([(key[0], groups[key]) for key in sorted(groups, reverse=True)])


def _split(groups: list[tuple[int, list[Clause]]]) -> tuple[Tiling, ...]:
    """One pass per group, each less the groups before it: C & E − C & W is C & E & ~W."""
    tilings: list[Tiling] = []
    earlier: list[Clause] = []
    for row_step, group in groups:
        remaining: list[tuple[Clause, Clause]] = []  # each clause, and what earlier ones exclude from it
        for clause in group:
            remainders = [tuple(f for f in other if f not in clause) for other in earlier]
            if all(remainders):  # else this clause lies within an earlier one
                remaining.append((clause, tuple(~reduce(and_, remainder) for remainder in remainders)))
        earlier += group
        if not remaining:
            continue
        common = [x for x in remaining[0][1] if all(x in excluded for _, excluded in remaining)]
        terms = (reduce(and_, (*c, *(x for x in excluded if x not in common))) for c, excluded in remaining)
        tilings.append(Tiling(reduce(and_, (reduce(or_, terms), *common)), row_step))
    return tuple(tilings)


def _without_row_classes(pattern: Pattern, by_keys: bool) -> Pattern:
    """The pattern without `~rows(k)` (by keys: `~every(k)`): to leave out whole rows of a tile costs nothing."""
    first, *conditions = conjuncts(pattern)
    return reduce(and_, (x for x in conditions if not _leaves_out_rows(x, by_keys)), first)


def _leaves_out_rows(condition: Pattern, by_keys: bool) -> bool:
    """Whether it is a condition on a residue of the tile's rows, negated, and nothing else."""
    if not isinstance(condition, Not) or not isinstance(word := condition.inner, Word):
        return False
    relation = relations(word, by_keys)[word]
    return relation.query_class[0] > 1 and relation == Relation(query_class=relation.query_class)

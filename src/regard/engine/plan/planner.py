"""Which keys a run of queries visits: tiles of queries, and for each a few progressions of keys.

    computed = Σ rows × keys over the parts ≥ needed = the pairs of the pattern

A pass is a set of tiles; the passes of a plan hold disjoint sets of pairs, so their partial results join by
log-sum-exp. All arrays are numpy int64 on the host; whoever runs a plan moves what it needs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, reduce
from math import gcd, lcm
from operator import and_, or_

import numpy as np

from ...pattern import Both, Either, Not, Pattern, every, full, rows
from ...progression import FAR, Ints
from .cells import ALL, MOST, NONE, PART, RAGGED, SOME, divide, kleene
from .tiles import Axis, NoPlan, Relations, Tiles, lay, limit, relations

TILE = 128  # what one more tile costs a row, in pairs: reading q, writing o, joining with other passes
SAMPLE = 256  # tiles on which ways are compared
CLAUSES = 8  # the most clauses an `|` is split into


@dataclass(frozen=True, eq=False)
class Pass:
    """Tiles of queries, each with progressions of keys; in a transposed plan tiles of keys, parts of rows."""

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
    def max_parts(self) -> int:
        """The largest number of progressions in one tile."""
        return int(np.diff(self.offsets).max(initial=0))


@dataclass(frozen=True, eq=False)
class Plan:
    """Every allowed pair lies in exactly one part of one tile of one pass; a full part holds no other.

    A row that sees nothing may be in no tile; where no pair is allowed there is no pass.
    """

    pattern: Pattern
    n: int
    m: int
    start: int  # query r stands at start + step · r
    step: int
    passes: tuple[Pass, ...]

    @cached_property
    def needed(self) -> int:
        """The pairs of the pattern."""
        return self.pattern.count(self.n, self.m, (self.start, self.step))

    @cached_property
    def computed(self) -> int:
        return sum(one.computed for one in self.passes)

    @property
    def waste(self) -> float:
        """computed / needed; 1.0 where nothing is allowed and nothing computed."""
        return self.computed / self.needed if self.needed else 1.0 + self.computed

    @property
    def max_parts(self) -> int:
        """The largest number of progressions in one tile, over all passes."""
        return max((one.max_parts for one in self.passes), default=0)


@dataclass(frozen=True)
class Way:
    """One way to lay the tiles of a pass: row step `hop`, no tile across a multiple of `grid`."""

    pattern: Pattern
    hop: int = 1
    grid: int = 0


@dataclass(frozen=True)
class Question:
    """One direction of one plan: tiles along xs, parts along ys; swap: xs are the keys."""

    xs: Axis
    ys: Axis
    tile: int
    swap: bool

    def relations(self, pattern: Pattern) -> list[Relations]:
        return [relations(word, self.swap) for word in dict.fromkeys(pattern.leaves())]

    def hop(self, pattern: Pattern) -> int:
        """The row step at which all rows of a tile agree in every residue; 1 where it is out of reach."""
        period = lcm(*(rel.period for rel in self.relations(pattern)))
        return period // gcd(period, self.xs.step) if period < FAR else 1

    def tiles(self, way: Way) -> Tiles:
        """No tile crosses the end of a range of x, or a multiple of the grid."""
        found = self.relations(way.pattern)
        ends = np.array([rel.x_below for rel in found if rel.x_below < FAR], dtype=np.int64)
        if way.grid:
            last = self.xs.start + self.xs.step * self.xs.count
            ends = np.append(ends, np.arange(self.xs.start // way.grid, last // way.grid + 1) * way.grid)
        return lay(self.xs, self.tile, way.hop, self.xs.index(ends), self.classes(way))

    def classes(self, way: Way) -> Ints:
        """The residues mod hop whose rows may see anything at all."""
        c = np.arange(min(way.hop, self.xs.count), dtype=np.int64)
        x = self.xs.start + self.xs.step * c
        values = {}
        for word in dict.fromkeys(way.pattern.leaves()):
            k, residue = relations(word, self.swap).x_class
            known = k > 1 and self.xs.step * way.hop % k == 0
            values[word] = np.where(known, np.where(x % k == residue, ALL, NONE), SOME).astype(np.int8)
        return c[kleene(way.pattern, values) > NONE]

    def answer(self, way: Way) -> Pass:
        return self._visit(way, self.tiles(way))

    def cost(self, way: Way) -> float:
        """What a pass costs, in pairs, guessed from a sample of its tiles."""
        way = replace(way, pattern=_core(way.pattern, self.swap))
        tiles = self.tiles(way)
        some = tiles.sample(SAMPLE)
        one = self._visit(way, some)
        seen = (one.tiles[:, 2] + self.tile) / 2  # a short tile is not cheaper in proportion
        keys = one.parts[:, 2] * np.where(one.parts[:, 3], 1, RAGGED) + PART
        cost = (np.repeat(seen, np.diff(one.offsets)) * keys).sum() + seen.sum() * TILE
        dear = 1 if one.max_parts <= MOST else 2
        return dear * float(cost) * len(tiles.first) / max(len(some.first), 1)

    def _visit(self, way: Way, tiles: Tiles) -> Pass:
        """The parts of these tiles; a tile that sees nothing is left out."""
        offsets, parts = divide(way.pattern, tiles, self.ys, self.swap)
        table = np.stack([tiles.first, np.full_like(tiles.first, way.hop), tiles.rows], axis=1)
        seen = np.flatnonzero(np.diff(offsets))
        return Pass(way.pattern, table[seen], np.append(offsets[seen], offsets[-1]), parts)


def plan(pattern: Pattern, n: int, m: int, start: int, step: int, tile: int = 128) -> Plan:
    """The plan of a pattern without data: query r of n stands at start + step · r, over keys 0 … m − 1."""
    return _kept(pattern, n, m, start, step, tile, False)()


def transposed(pattern: Pattern, n: int, m: int, start: int, step: int, tile: int = 128) -> Plan:
    """The same pairs read from the keys: tiles are of keys, parts are progressions of query rows."""
    return _kept(pattern, n, m, start, step, tile, True)()


@lru_cache(maxsize=256)
def _kept(
    pattern: Pattern, n: int, m: int, start: int, step: int, tile: int, swap: bool
) -> Callable[[], Plan]:
    """A call that gives the plan, or raises the reason why there is none: both are found once."""
    queries, keys = Axis(n, start, step), Axis(m)
    question = Question(keys, queries, tile, True) if swap else Question(queries, keys, tile, False)
    try:
        passes = _best(pattern, question) if n and m else ()
    except NoPlan as why:
        reason = str(why)

        def refuse() -> Plan:
            raise NoPlan(reason)

        return refuse
    found = Plan(pattern, n, m, start, step, passes)
    return lambda: found


def _best(pattern: Pattern, question: Question) -> tuple[Pass, ...]:
    """The cheapest of the ways; they are compared on a sample of tiles."""
    limit("words", len(set(pattern.leaves())), "a pattern this long is masked")
    ways, costs, reasons = list(_ways(pattern, question)), {}, []
    for several in ways if len(ways) > 1 else ():
        try:
            costs[several] = sum(map(question.cost, several))
        except NoPlan as why:
            reasons.append(why)
    if len(reasons) == len(ways):
        raise reasons[0]
    best = min(costs, key=costs.__getitem__) if costs else ways[0]
    found = map(question.answer, best)
    return tuple(one for one in found if len(one.parts))


def _ways(pattern: Pattern, question: Question) -> Iterator[tuple[Way, ...]]:
    """Neighbours; residue classes; each `|` by itself: disjoint passes, the later without the earlier."""
    groups: dict[tuple[int, int], list[Clause]] = {}  # by row step and key step
    for clause in clauses(pattern):
        positive = reduce(and_, (factor for factor in clause if not isinstance(factor, Not)), full())
        key_step = lcm(*(rel.y_class[0] for rel in question.relations(positive)))
        groups.setdefault((question.hop(positive), key_step), []).append(clause)
    hops = {hop for hop, _ in groups}
    together = {hop} if (hop := question.hop(pattern)) < question.xs.count else set()
    span = question.tile * question.xs.step
    sizes = {rel.block for rel in question.relations(pattern) if rel.block}
    grids = {b for b in sizes if 4 * b >= span} | {span // b * b for b in sizes if b <= span}
    yield from ((Way(pattern, 1, grid),) for grid in sorted(grids or {0}))
    yield from ((Way(pattern, hop),) for hop in sorted((hops | together) - {1}))
    if len(hops) > 1:
        by_hop = [(hop, [c for key in groups for c in groups[key] if key[0] == hop]) for hop in sorted(hops)]
        yield from (_split(by_hop), _split(by_hop[::-1]))
    if len({key_step for _, key_step in groups} - {1}) > 1:  # two combs meet in few keys, found by masking
        yield _split([(key[0], groups[key]) for key in sorted(groups, reverse=True)])


Clause = tuple[Pattern, ...]  # words and negated words, all of which hold


def clauses(pattern: Pattern) -> list[Clause]:
    """The pattern as an `|` of clauses, as long as they are few."""

    def both(a: list[Clause], b: list[Clause]) -> list[Clause]:
        return [tuple(dict.fromkeys(x + y)) for x in a for y in b]

    match pattern:
        case Either():
            found = clauses(pattern.left) + clauses(pattern.right)
        case Both():
            found = both(clauses(pattern.left), clauses(pattern.right))
        case Not(Not() as inner):
            found = clauses(inner.inner)
        case Not(Either() as inner):
            found = both(clauses(~inner.left), clauses(~inner.right))
        case Not(Both() as inner):
            found = clauses(~inner.left) + clauses(~inner.right)
        case _:
            found = [(pattern,)]
    return found if len(found) <= CLAUSES else [(pattern,)]


def _split(groups: list[tuple[int, list[Clause]]]) -> tuple[Way, ...]:
    """A pass a group, each less the groups before it: C & E − C & W is C & E & ~W."""
    ways: list[Way] = []
    taken: list[Clause] = []
    for hop, group in groups:
        kept: list[tuple[Clause, Clause]] = []  # what holds, what was taken
        for clause in group:
            rests = [tuple(f for f in other if f not in clause) for other in taken]
            if all(rests):  # else this clause lies within an earlier one
                kept.append((clause, tuple(~reduce(and_, rest) for rest in rests)))
        common = [less for less in kept[0][1] if all(less in other for _, other in kept)] if kept else []
        each = [reduce(and_, (*clause, *(x for x in less if x not in common))) for clause, less in kept]
        ways += [Way(reduce(and_, (reduce(or_, each), *common)), hop)] if kept else []
        taken += group
    return tuple(ways)


def _core(pattern: Pattern, swap: bool) -> Pattern:
    """The pattern without `~rows(k)` (for keys: `~every(k)`): to leave out whole rows of a tile costs nothing."""
    match pattern:
        case Both(left, Not(rows() | every() as own)) if isinstance(own, every if swap else rows):
            return _core(left, swap)
        case Both(left, right):
            return _core(left, swap) & _core(right, swap)
        case Either(left, right):
            return _core(left, swap) | _core(right, swap)
        case _:
            return pattern

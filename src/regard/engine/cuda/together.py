"""Heads that lie one behind the other in memory, as one long sequence of rows whose tiles are dealt together.

With 16 heads and 396 programs a head has 24, and 12 programs stand idle; a tile is a tenth of a program's work and
cannot be parted. Dealt together, every program has work, and the long tiles of all heads are begun first. The kernels
do not notice: row r of head h is row h·n + r, and so is its place in the mask, if the mask does not notice either.
Only tiles of keys that programs share stay apart: those of one head read the same rows at one time.
"""

from dataclasses import replace

from ...pattern import Pattern, blocks, causal, dilated, every, full, rows, strided, window
from .launches import Layout, wide
from .route import Route
from .schedule import repeated

MOST = 1 << 18  # blocks in one table: 12 MiB
FARTHEST = 1 << 28  # positions that the kernels tell apart from "no bound"
ANYWHERE, PERIODIC = (full, causal, window, strided, dilated), (every, rows, blocks)


def end_to_end(way: Route, step: int, given: tuple[Layout, ...]) -> tuple[Route, tuple[Layout, ...]]:
    """The route and the layouts of all heads as one, where that can be; else as they are.

    step: between the positions of two queries; those of two keys are 1 apart, so it must be 1.
    """
    b, h, n, d = given[0].shape
    times = b * h
    size = times * sum(len(one.work.blocks) for one in way.steps)
    if times == 1 or step != 1 or size > MOST or times * n > FARTHEST:
        return way, given
    words = [p for one in way.steps for p in (one.work.pattern, one.kept) if p is not None]
    long = tuple(x._replace(shape=(1, 1, times * n, d)) for x in given)
    alike = all(x.shape == given[0].shape and _behind(x) for x in given)
    if not alike or wide(*long) or not all(moves(p, n) for p in words):
        return way, given
    return replace(
        way, steps=tuple(replace(one, work=repeated(one.work, times, n)) for one in way.steps)
    ), long


def _behind(x: Layout) -> bool:
    b, h, n, _ = x.shape
    return (h == 1 or x.stride[1] == n * x.stride[2]) and (b == 1 or x.stride[0] == h * n * x.stride[2])


def moves(pattern: Pattern, n: int) -> bool:
    """Whether the pattern allows the same pairs when i and j both move by n."""
    return all(
        isinstance(leaf, ANYWHERE) or (isinstance(leaf, PERIODIC) and n % leaf.period == 0)
        for leaf in pattern.leaves()
    )

"""Blocks that a straight line cuts: what is hidden there follows from row and place of a pair, not from its key.

A bound cuts a run of neighbouring keys where place − limit(row) changes sign. That difference, cut off at 0 and 1, is
one addition; Hopper has twice as many units for those as for comparing and choosing (NVIDIA's tables).
"""

import numpy as np
from numpy.typing import NDArray

from ...pattern import Pattern, every
from ...progression import Ints
from ..plan.verdict import Run, verdict
from .band import Band

# Marks of blocks: places past the last key, past the upper, before the lower bound; that some are free of the bound.
END, UPPER, LOWER, FREES = 16, 32, 64, 128
NOWHERE = (1, 1)  # no place leaves 1 when divided by 1

Some = NDArray[np.bool_]
Free = tuple[int, int]  # (k, r): places ≡ r mod k


def lines(found: Band, cut: Ints, i: Run, j: Run, alone: Some, short: Some) -> tuple[Ints, tuple[Free, Free]]:
    """The marks of blocks of keys j, where i are the queries of their tiles and `cut` is what `band.marks` said.

    And where keys are free of the lower and of the upper bound, in the blocks that are marked so.
    Each query sees a key of a block that a bound cuts: its largest score is that of a pair that counts.
    """
    run = alone & (i.step == 1) & (j.step == 1) & ~short
    lower, upper = run & (cut == 1), run & (cut == 2)
    if found.before is not None:
        lower &= j.last >= i.last - found.before
    if found.after is not None:
        upper &= j.first <= i.first + found.after
    marks = np.where(short & (cut == 0), END, cut)
    marks, below = _marked(marks, LOWER, lower, found.low, i, j)
    marks, above = _marked(marks, UPPER, upper, found.high, i, j)
    return marks, (below, above)


def _marked(marks: Ints, mark: int, some: Some, word: Pattern | None, i: Run, j: Run) -> tuple[Ints, Free]:
    """Mark some blocks; those in which a word sets keys free too, if they stand at the same places in all of them."""
    if word is None:
        return np.where(some, mark, marks), NOWHERE
    if not isinstance(word, every):
        return np.where(some & verdict(word, i, j).none, mark, marks), NOWHERE
    at = (word.offset - j.first) % word.k  # the first place of a free key
    free = some & (at < j.count)
    marks = np.where(some & ~free, mark, marks)
    places = np.unique(at[free])
    if len(places) != 1:
        return marks, NOWHERE
    return np.where(free, mark + FREES, marks), (word.k, int(places[0]))

"""The words of a block, as the Hopper kernels read them: its columns, and which of its pairs they count."""

from typing import Any

import numpy as np

from regard.engine.cuda.mask import END, FREES, LOWER, UPPER

R = 64  # members of a tile, columns of a block
LIST = 5 * R  # words of a list: R members, then 4 words of 16 bits for each member of the tile
ROW, COLUMN = np.arange(R)[:, None], np.arange(R)
FAR = 1 << 30


def columns_of(words: np.ndarray, S: Any, lists: np.ndarray) -> np.ndarray:
    """The member in each column of a block, −1 in empty ones."""
    a, b, c1, a1, b1, c2, a2, b2, end = words[:9]
    if S.spread is not None:
        found = a + lists.reshape(-1, LIST)[b, :R]
    else:
        found = a + b * COLUMN
        if S.SEGMENTS > 1:
            found = np.where(c1 > COLUMN, found, a1 + b1 * COLUMN)
        if S.SEGMENTS > 2:
            found = np.where(c2 > COLUMN, found, a2 + b2 * COLUMN)
    return np.where(end > COLUMN, found, -1)


def counted_pairs(words: np.ndarray, columns: np.ndarray, given: dict[str, Any], out: str) -> np.ndarray:
    """Which pairs of a member of the tile and a column are counted, by the tests of the kernel that computes `out`.

    given: the arguments of the kernel.
    """
    S = given["S"]
    if S.CHAINED:
        return ~_past_lines(words)
    if S.spread is not None:
        bits = given["LISTS"].reshape(-1, LIST)[words[1], R:].reshape(R, 4)
        return bits[:, COLUMN % 8 // 2] >> (COLUMN // 8 * 2 + COLUMN % 2) & 1 == 1
    own, marks = words[10] + words[11] * COLUMN, words[9]
    if out == "dk":
        tested = marks & (7 if S.allowed is not None else S.MARKS & 3)
        return _by_bounds(tested, given["start"] + given["step"] * columns[None], own[:, None], S)
    i, tested = given["start"] + given["step"] * own[:, None], marks & 7 if S.MARKS & 7 else 0
    found = _by_bounds(tested, i, columns[None], S, one_noted=not S.MARKS & 8)
    return found & ~_past_line(words, i[0, 0], S) if out == "o" and S.allowed is None else found


def _by_bounds(tested: int, i: np.ndarray, j: np.ndarray, S: Any, one_noted: bool = False) -> np.ndarray:
    """The pairs within the bounds that are tested, or else those allowed; a key below 0 is in no pair.

    one_noted: a kernel that has no test of both bounds compares one number of each key, the last it noted.
    """
    if tested and S.allowed is not None:
        return S.allowed(i, j) & (j >= 0) | np.zeros((R, R), dtype=bool)
    allowed = np.ones((R, R), dtype=bool)
    if not tested & 3:
        return allowed
    high, low = np.where(j >= 0, S.high_of(j), -FAR), np.where(j >= 0, S.low_of(j), FAR)
    if tested & 1:
        allowed &= (low if tested & 2 and one_noted else high) >= S.lowest(i)
    if tested & 2:
        allowed &= low <= S.highest(i)
    return allowed


def _past_lines(words: np.ndarray) -> np.ndarray:
    """The pairs that `static.hide_past_lines` hides: by what the words of a block of chained passes say."""
    most, least, end, marks = words[[2, 3, 8, 9]]
    below = (marks & LOWER != 0) & (most < ROW - COLUMN)
    above = (marks & UPPER != 0) & (least < COLUMN - ROW)
    return below | above | (marks & 1 != 0) & (end <= COLUMN)


def _past_line(words: np.ndarray, i: int, S: Any) -> np.ndarray:
    """The pairs that `static.hide_past_line` hides, in forward; i: the position of the first query."""
    first, end, marks = words[[0, 8, 9]]
    period, at = S.below if marks & LOWER else S.above
    bound = (period == 1) | (marks & FREES == 0) | (COLUMN % period != at)
    if marks & LOWER:
        return (first - S.lowest(i) < ROW - COLUMN) & bound
    if marks & UPPER:
        return (S.highest(i) - first < COLUMN - ROW) & bound
    return (marks & END != 0) & (end <= COLUMN) | np.zeros((R, R), dtype=bool)

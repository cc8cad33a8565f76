"""The words of a block, as the Hopper kernels read them: its columns, and which of its pairs they count."""

from typing import Any

import numpy as np

R = 64  # members of a tile, columns of a block
MASK = 128  # words of a mask, one for each thread; if tiles are boxes, lists of R members follow the masks
ROW, COLUMN = np.arange(R)[:, None], np.arange(R)


def columns_of(words: np.ndarray, S: Any, masks: np.ndarray) -> np.ndarray:
    """The member in each column of a block, −1 in empty ones."""
    a, b, c1, a1, b1, c2, a2, b2, end = words[:9]
    if S.spread is not None:
        found = a + masks[b : b + R]
    else:
        found = a + b * COLUMN
        if S.SEGMENTS > 1:
            found = np.where(c1 > COLUMN, found, a1 + b1 * COLUMN)
        if S.SEGMENTS > 2:
            found = np.where(c2 > COLUMN, found, a2 + b2 * COLUMN)
    return np.where(end & 255 > COLUMN, found, -1)


def counted_pairs(words: np.ndarray, masks: np.ndarray) -> np.ndarray:
    """Which pairs of a member of the tile and a column are counted."""
    if not words[9] & 1:
        return np.ones((R, R), dtype=bool)
    word = masks.ravel()[(words[8] >> 8) * MASK + ROW // 16 * 32 + ROW % 8 * 4 + COLUMN % 8 // 2]
    return word >> (COLUMN // 8 * 4 + ROW % 16 // 8 * 2 + COLUMN % 2) & 1 == 1

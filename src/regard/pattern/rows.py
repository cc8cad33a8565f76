"""The pairs of batch rows that differ in their query offsets, in their data, or in the keys that they may see."""

from collections import Counter
from dataclasses import fields, replace
from typing import Any

from torch import Tensor

from ..progression import CHUNK
from . import counting
from .algebra import At, Both, Either, Not, Pattern, query_offset
from .word import Word
from .words import sinks


def count_rows(
    pattern: Pattern, n: int, m: int, rows: int, at: At | Tensor = None, lengths: Tensor | None = None
) -> int:
    """How many pairs are allowed for one head in all batch rows; where data differ by head, in all heads of the data.

    at: the query offset, or one per row. lengths: (rows,) or (rows, 2), as `attention` takes them.
    """
    ends = [[m]] * rows if lengths is None else lengths.view(rows, -1).tolist()
    offsets = at.tolist() if isinstance(at, Tensor) else [at] * rows
    data = range(rows) if pattern.data_shape[0] > 1 else [0] * rows
    alike = Counter(zip(data, offsets, ((0, *row)[-2:] for row in ends)))
    pairs = 0
    for (row, offset, (first, end)), times in alike.items():
        words = _of_row(pattern, row)
        words = words if (first, end) == (0, m) else words & sinks(end) - sinks(first)
        pairs += times * words.count(n, m, query_offset(pattern, n, m, offset))
    return pairs


def empty_rows(pattern: Pattern, n: int, m: int, start: int, step: int) -> int:
    """How many of the n queries have no key; long sequences without a number for each query."""
    if n <= CHUNK or pattern._enumerated or not all(isinstance(leaf, Word) for leaf in pattern.leaves()):
        return int((pattern.row_counts(n, m, (start, step)) == 0).sum())
    return counting.empty_rows(pattern.terms(), n, m, start, step)


def _of_row(pattern: Pattern, row: int) -> Pattern:
    """The same pattern with the data of one batch row."""

    def of_word(word: Pattern) -> Pattern:
        if word.varies[0] == 1:
            return word
        data: Any = word  # a frozen dataclass
        own = {f.name: getattr(data, f.name) for f in fields(data)}
        return replace(data, **{k: x[row : row + 1] for k, x in own.items() if isinstance(x, Tensor)})

    return pattern.fold(of_word, Both, Either, Not)

"""The pairs of batch rows that differ in their query offsets, or in the keys that they may see."""

from collections import Counter

from torch import Tensor

from . import data
from .algebra import At, Pattern, query_offset
from .words import sinks


def count_rows(
    pattern: Pattern, n: int, m: int, rows: int, at: At | Tensor = None, lengths: Tensor | None = None
) -> int:
    """How many pairs are allowed for one head in all batch rows; where data differ by head, in all heads of the data.

    at: the query offset, or one per row. lengths: (rows,) or (rows, 2), as `attention` takes them. Where each row has
    an offset and data of its own, every row counts with the mean of the data.
    """
    of_data = pattern.data_shape[0]
    if of_data > 1 and lengths is not None and not isinstance(at, Tensor):
        seen = lengths.view(rows, -1)
        inside = data.lengths(seen[:, -1]) - data.lengths(seen[:, 0] * (seen.shape[1] - 1))
        return (pattern & inside).count(n, m, query_offset(pattern, n, m, at))
    ends = [[m]] * rows if lengths is None else lengths.view(rows, -1).tolist()
    offsets = at.tolist() if isinstance(at, Tensor) else [at] * rows
    pairs = 0
    for (offset, (first, end)), times in Counter(zip(offsets, ((0, *row)[-2:] for row in ends))).items():
        words = pattern if (first, end) == (0, m) else pattern & sinks(end) - sinks(first)
        pairs += times * words.count(n, m, query_offset(pattern, n, m, offset))
    return pairs // of_data

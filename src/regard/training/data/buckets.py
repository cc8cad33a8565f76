"""Batches of few shapes: lengths are rounded up, so that batches repeat shapes and a GPU can replay whole updates."""

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from .rows import IGNORED, Batch
from .tokens import PAD

MIN_UNIT = 4  # the smallest step between two bucket sizes


def bucket_size(length: int) -> int:
    """The length rounded up to one of eight sizes per power of two, and to a multiple of 4.

    >>> [bucket_size(n) for n in (1, 4, 5, 17, 33, 65, 120)]
    [4, 4, 8, 20, 40, 80, 128]
    """
    unit = max(MIN_UNIT, (1 << max(length - 1, 0).bit_length()) // 8)
    return -(-length // unit) * unit


def bucket_shape(longest: list[int], max_tokens: int) -> tuple[int, ...]:
    """The shape of a batch whose longest rows have these lengths: the number of rows, then the size of each side."""
    sizes = [bucket_size(n) for n in longest]
    return max(max_tokens // sum(sizes), 1), *sizes


def cut_by_shape(
    rows: Int[Tensor, " rows"], lengths: Int[Tensor, "rows sides"], max_tokens: int
) -> tuple[Int[Tensor, " rows"], list[tuple[int, int]], int]:
    """Rows of one shape after the other, their ranges, and the number of tokens of the batches, padding included.

    Rows that fill less than half a batch of their shape join a larger shape.
    """
    largest = int(lengths.max())
    table = torch.tensor([bucket_size(n) for n in range(largest + 1)])
    sizes = table[lengths[rows]]
    cells: dict[tuple[int, ...], list[int]] = {}
    for row, cell in zip(rows.tolist(), map(tuple, sizes.tolist()), strict=True):
        cells.setdefault(cell, []).append(row)
    order: list[int] = []
    cuts: list[tuple[int, int]] = []
    padded = 0
    while cells:
        cell = min(cells, key=lambda c: c[::-1])  # the last side decides: it never shrinks when rows move
        waiting = cells.pop(cell)
        count = bucket_shape(list(cell), max_tokens)[0]
        while len(waiting) >= count or (waiting and (2 * len(waiting) >= count or not cells)):
            part, waiting = waiting[:count], waiting[count:]
            cuts.append((len(order), len(order) + len(part)))
            order += part
            padded += count * sum(cell)
        if waiting:
            cells.setdefault(_next(cell, cells), []).extend(waiting)
    return torch.tensor(order), cuts, padded


def _next(cell: tuple[int, ...], cells: dict[tuple[int, ...], list[int]]) -> tuple[int, ...]:
    """The shape that the remaining rows of this one move to: the next one, enlarged where they need it."""
    following = min(cells, key=lambda c: c[::-1])
    return tuple(max(pair) for pair in zip(cell, following, strict=True))


def pad_to_bucket(batch: Batch, rows: int) -> Batch:
    """The batch with its lengths rounded up and with `rows` rows; what is added is not predicted."""
    inputs = {}
    for name, t in batch.inputs.items():
        fill = IGNORED if name in ("targets", "labels") else 1 if name.endswith("lengths") else PAD
        is_ids = t.dim() == 2 and not t.is_floating_point()
        more = bucket_size(t.shape[1]) - t.shape[1] if is_ids else 0
        right = (0, more) if is_ids else (0, 0) * (t.dim() - 1)
        inputs[name] = F.pad(t, (*right, 0, rows - t.shape[0]), value=fill)
    return Batch(inputs, batch.predicted)

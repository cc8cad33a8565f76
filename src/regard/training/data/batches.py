"""Batches of similar size: rows of similar length together, so that there is little padding; or packed texts."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from ...errors import SpecError
from .buckets import cut_by_shape

# Twice as long rows take longer on a CPU, and shorter ones leave more padding.
PACKED_ROW_TOKENS = 128


@dataclass(frozen=True)
class Plan:
    """The batches of one epoch: batch i is the rows `rows[cuts[i]]`."""

    rows: Int[Tensor, " rows"]
    cuts: tuple[tuple[int, int], ...]
    real: int  # tokens of the rows
    padded: int  # tokens of the batches, padding included

    def __len__(self) -> int:
        return len(self.cuts)

    def __getitem__(self, i: int) -> Int[Tensor, " b"]:
        start, stop = self.cuts[i]
        return self.rows[start:stop]

    @property
    def padding_share(self) -> float:
        """The share of padding in the tokens of the batches."""
        return 1.0 - self.real / self.padded if self.padded else 0.0


def by_tokens(
    lengths: Int[Tensor, "rows sides"],
    max_tokens: int,
    *,
    packed: bool = False,
    bucketed: bool = False,
    seed: int = 0,
    epoch: int = 0,
) -> Plan:
    """Every row once, in batches of at most `max_tokens` tokens, padding included.

    Rows are sorted by length, equal lengths in random order, then split into batches; the batches come in random
    order. Packed texts instead share rows, whatever their lengths; bucketed batches have few shapes. `seed` and
    `epoch` determine the order. A row has one length per side (source, target).
    """
    if not len(lengths):
        raise SpecError("there are no rows to make batches of")
    longest = int(lengths.sum(1).max())
    if longest > max_tokens:
        raise SpecError(
            f"a row of {longest} tokens does not fit into a batch of {max_tokens}; raise tokens, or drop long rows"
        )
    random = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    rows = torch.randperm(len(lengths), generator=random)
    if packed:
        return _packed(rows, lengths.sum(1), max_tokens)
    if bucketed:
        rows, cuts, padded = cut_by_shape(rows, lengths, max_tokens)
        order = torch.randperm(len(cuts), generator=random).tolist()
        return Plan(rows, tuple(cuts[o] for o in order), int(lengths.sum()), padded)
    for side in range(lengths.shape[1]):  # stable sorts: the last side is the primary key
        rows = rows[lengths[rows, side].argsort(stable=True)]
    sizes = lengths[rows]
    cuts = _cut(sizes, max_tokens)
    order = torch.randperm(len(cuts), generator=random).tolist()
    padded = sum((b - a) * int(sizes[a:b].amax(0).sum()) for a, b in cuts)
    return Plan(rows, tuple(cuts[o] for o in order), int(lengths.sum()), padded)


def packed_width(lengths: Int[Tensor, "rows sides"], max_tokens: int) -> int:
    """The length of a row of packed texts: enough for the longest text, and for several short ones."""
    return max(int(lengths.max()), min(PACKED_ROW_TOKENS, max_tokens))


def _packed(rows: Int[Tensor, " rows"], lengths: Int[Tensor, " rows"], max_tokens: int) -> Plan:
    """Texts in random order, as many per batch as its rows hold; each batch lists them in the order of its rows."""
    width = packed_width(lengths[:, None], max_tokens)
    max_rows = max_tokens // width
    ids, sizes = rows.tolist(), lengths[rows].tolist()
    order: list[int] = []
    cuts, padded, start = [], 0, 0
    while start < len(ids):
        stop, total = start, 0
        while stop < len(ids) and total + sizes[stop] <= max_rows * width:
            stop, total = stop + 1, total + sizes[stop]
        while len(layout := _first_fit(sizes[start:stop], width)) > max_rows:
            stop -= 1
        order += [ids[start + i] for row in layout for i in row]
        padded += len(layout) * max(sum(sizes[start + i] for i in row) for row in layout)
        cuts.append((start, stop))
        start = stop
    return Plan(torch.tensor(order), tuple(cuts), int(lengths.sum()), padded)


def _first_fit(sizes: list[int], width: int) -> list[list[int]]:
    """First-fit decreasing: the longest first, each in the first row with enough room.

    >>> _first_fit([3, 6, 2, 5, 4], 10)
    [[1, 4], [3, 0, 2]]
    """
    layout: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        row = next((r for r, left in enumerate(room) if left >= sizes[i]), len(room))
        if row == len(room):
            layout.append([])
            room.append(width)
        layout[row].append(i)
        room[row] -= sizes[i]
    return layout


def _cut(sizes: Int[Tensor, "rows sides"], max_tokens: int) -> list[tuple[int, int]]:
    """Ranges of rows whose number × longest sides is at most max_tokens."""
    if bool((sizes == sizes[0]).all()):
        each = max_tokens // int(sizes[0].sum())
        return [(a, min(a + each, len(sizes))) for a in range(0, len(sizes), each)]
    cuts, start = [], 0
    longest = [0] * sizes.shape[1]
    for i, row in enumerate(sizes.tolist()):
        grown = [max(w, r) for w, r in zip(longest, row, strict=True)]
        if (i + 1 - start) * sum(grown) > max_tokens:
            cuts.append((start, i))
            start, grown = i, row
        longest = grown
    return [*cuts, (start, len(sizes))]


@dataclass
class Stream:
    """Batches, epoch after epoch. `epoch` and `index` are its whole state, so a run can resume from them.

    The batches and their order do not depend on the number of ranks, so a run may resume with another number.
    """

    lengths: Int[Tensor, "rows sides"]
    max_tokens: int
    seed: int = 0
    epoch: int = 0
    index: int = 0  # of the next batch
    packed: bool = False
    bucketed: bool = False
    rank: int = 0
    world: int = 1
    plan: Plan | None = None

    def next(self) -> Int[Tensor, " b"]:
        """The rows of the next batch, for all ranks."""
        if not self.left():
            self.epoch, self.index, self.plan = self.epoch + 1, 0, None
            self.left()
        assert self.plan is not None
        rows = self.plan[self.index]
        self.index += 1
        return rows

    def left(self) -> int:
        """The number of batches left in this epoch."""
        if self.plan is None:
            self.plan = by_tokens(
                self.lengths,
                self.max_tokens,
                packed=self.packed,
                bucketed=self.bucketed,
                seed=self.seed,
                epoch=self.epoch,
            )
        return len(self.plan) - self.index

    def share(self, batches: int) -> list[Int[Tensor, " b"]]:
        """This rank's part of the next batches: complete batches while every rank gets one, then its rows of each.

        All ranks get equally many parts; a part may have no rows.
        """
        rows = [self.next() for _ in range(batches)]
        complete = batches - batches % self.world
        split = [r[self.rank :: self.world] for r in rows[complete:]]
        return rows[:complete][self.rank :: self.world] + split

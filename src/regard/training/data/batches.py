"""Batches of about one size: rows of like length together, so that little is padding; or texts packed."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from ...errors import SpecError

# Tokens of a packed row: attending within rows twice as wide takes longer on a CPU, and narrower ones fill less well.
ROW = 128


@dataclass(frozen=True)
class Plan:
    """The batches of one epoch: batch i is the rows `rows[cuts[i]]`."""

    rows: Int[Tensor, " rows"]
    cuts: tuple[tuple[int, int], ...]
    real: int  # tokens of the rows
    padded: int  # tokens of the batches, padding too

    def __len__(self) -> int:
        return len(self.cuts)

    def __getitem__(self, i: int) -> Int[Tensor, " b"]:
        start, stop = self.cuts[i]
        return self.rows[start:stop]

    @property
    def waste(self) -> float:
        """The share of padding."""
        return 1.0 - self.real / self.padded if self.padded else 0.0


def by_tokens(
    lengths: Int[Tensor, "rows sides"], most: int, *, packed: bool = False, seed: int = 0, epoch: int = 0
) -> Plan:
    """Every row once, in batches of at most `most` tokens, padding counted.

    Rows are sorted by length, equal lengths in random order, then cut; the batches come in random order. Packed
    texts share rows instead, several in each, whatever their lengths. seed and epoch decide all of it. A row has one
    length a side (source, target).
    """
    if not len(lengths):
        raise SpecError("there is no row to make a batch of")
    longest = int(lengths.sum(1).max())
    if longest > most:
        raise SpecError(
            f"a row of {longest} tokens does not fit a batch of {most}; raise it, or drop long rows"
        )
    noise = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    rows = torch.randperm(len(lengths), generator=noise)
    if packed:
        return _packed(rows, lengths.sum(1), most)
    for side in range(lengths.shape[1]):  # stable sorts: the last side counts most
        rows = rows[lengths[rows, side].argsort(stable=True)]
    sizes = lengths[rows]
    cuts = _cut(sizes, most)
    order = torch.randperm(len(cuts), generator=noise).tolist()
    padded = sum((b - a) * int(sizes[a:b].amax(0).sum()) for a, b in cuts)
    return Plan(rows, tuple(cuts[o] for o in order), int(lengths.sum()), padded)


def width(lengths: Int[Tensor, "rows sides"], most: int) -> int:
    """The tokens of a row of packed texts: the longest fits, and several short ones do."""
    return max(int(lengths.max()), min(ROW, most))


def _packed(rows: Int[Tensor, " rows"], lengths: Int[Tensor, " rows"], most: int) -> Plan:
    """Texts in random order, as many as fill the rows of a batch; they come in the order in which they lie there."""
    wide = width(lengths[:, None], most)
    ids, sizes = rows.tolist(), lengths[rows].tolist()
    order: list[int] = []
    cuts, padded, start = [], 0, 0
    while start < len(ids):
        stop, held = start, 0
        while stop < len(ids) and held + sizes[stop] <= most // wide * wide:
            stop, held = stop + 1, held + sizes[stop]
        while len(lying := _fitted(sizes[start:stop], wide)) > most // wide:
            stop -= 1
        order += [ids[start + i] for row in lying for i in row]
        padded += len(lying) * max(sum(sizes[start + i] for i in row) for row in lying)
        cuts.append((start, stop))
        start = stop
    return Plan(torch.tensor(order), tuple(cuts), int(lengths.sum()), padded)


def _fitted(sizes: list[int], wide: int) -> list[list[int]]:
    """The longest first, each in the first row that has room for it.

    >>> _fitted([3, 6, 2, 5, 4], 10)
    [[1, 4], [3, 0, 2]]
    """
    lying: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        row = next((r for r, left in enumerate(room) if left >= sizes[i]), len(room))
        if row == len(room):
            lying.append([])
            room.append(wide)
        lying[row].append(i)
        room[row] -= sizes[i]
    return lying


def _cut(sizes: Int[Tensor, "rows sides"], most: int) -> list[tuple[int, int]]:
    """Stretches of rows whose number × longest sides stays within `most`."""
    if bool((sizes == sizes[0]).all()):
        each = most // int(sizes[0].sum())
        return [(a, min(a + each, len(sizes))) for a in range(0, len(sizes), each)]
    cuts, start = [], 0
    widest = [0] * sizes.shape[1]
    for i, row in enumerate(sizes.tolist()):
        grown = [max(w, r) for w, r in zip(widest, row, strict=True)]
        if (i + 1 - start) * sum(grown) > most:
            cuts.append((start, i))
            start, grown = i, row
        widest = grown
    return [*cuts, (start, len(sizes))]


@dataclass
class Stream:
    """Batch after batch, epoch after epoch. Where it stands is two numbers, so it can go on from there.

    The batches and their order do not depend on how many ranks share them, so another number of ranks may go on.
    """

    lengths: Int[Tensor, "rows sides"]
    most: int
    seed: int = 0
    epoch: int = 0
    index: int = 0  # of the next batch
    packed: bool = False
    rank: int = 0
    world: int = 1
    plan: Plan | None = None

    def next(self) -> Int[Tensor, " b"]:
        """The rows of the next batch, whosever they are."""
        if not self.left():
            self.epoch, self.index, self.plan = self.epoch + 1, 0, None
            self.left()
        assert self.plan is not None
        rows = self.plan[self.index]
        self.index += 1
        return rows

    def left(self) -> int:
        """The batches this epoch still has."""
        if self.plan is None:
            self.plan = by_tokens(
                self.lengths, self.most, packed=self.packed, seed=self.seed, epoch=self.epoch
            )
        return len(self.plan) - self.index

    def share(self, batches: int) -> list[Int[Tensor, " b"]]:
        """This rank's part of the next batches: whole ones while every rank gets one, then its rows of each.

        All ranks get equally many parts; the rows of one may be none.
        """
        rows = [self.next() for _ in range(batches)]
        whole = batches - batches % self.world
        return rows[:whole][self.rank :: self.world] + [r[self.rank :: self.world] for r in rows[whole:]]

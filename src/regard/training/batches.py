"""Batches of about one size: rows of like length together, so that little of a batch is padding."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from ..errors import SpecError


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
    lengths: Int[Tensor, "rows sides"], most: int, *, seed: int = 0, epoch: int = 0, world: int = 1
) -> Plan:
    """Every row once, in batches of at most `most` tokens, padding counted.

    Rows are sorted by length, equal lengths in random order, then cut; the batches come in random order. seed
    and epoch decide all of it. A row has one length a side (source, target). The number of batches is a
    multiple of `world`, so that as many ranks have equally many: the largest ones are halved for it.
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
    for side in range(lengths.shape[1]):  # stable sorts: the last side counts most
        rows = rows[lengths[rows, side].argsort(stable=True)]
    sizes = lengths[rows]
    cuts = _shared(_cut(sizes, most), world)
    order = torch.randperm(len(cuts), generator=noise).tolist()
    padded = sum((b - a) * int(sizes[a:b].amax(0).sum()) for a, b in cuts)
    return Plan(rows, tuple(cuts[o] for o in order), int(lengths.sum()), padded)


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


def _shared(cuts: list[tuple[int, int]], world: int) -> list[tuple[int, int]]:
    while len(cuts) % world:
        start, stop = max(cuts, key=lambda c: c[1] - c[0])
        if stop - start < 2:
            raise SpecError(
                f"{len(cuts)} batches of one row cannot be shared by {world} ranks; give more rows"
            )
        at, middle = cuts.index((start, stop)), (start + stop) // 2
        cuts[at : at + 1] = [(start, middle), (middle, stop)]
    return cuts


@dataclass
class Stream:
    """Batch after batch, epoch after epoch. Where it stands is two numbers, so it can go on from there."""

    lengths: Int[Tensor, "rows sides"]
    most: int
    seed: int = 0
    epoch: int = 0
    index: int = 0  # of the next batch, counted for all ranks together
    rank: int = 0
    world: int = 1
    plan: Plan | None = None

    def next(self) -> Int[Tensor, " b"]:
        """The rows of this rank's next batch."""
        plan = self.plan or self._epoch()
        if self.index >= len(plan):
            self.epoch, self.index = self.epoch + 1, 0
            plan = self._epoch()
        rows = plan[self.index + self.rank]
        self.index += self.world
        return rows

    def _epoch(self) -> Plan:
        self.plan = by_tokens(self.lengths, self.most, seed=self.seed, epoch=self.epoch, world=self.world)
        return self.plan

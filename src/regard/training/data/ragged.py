"""Rows of ids of different lengths in one flat tensor: no memory for padding, and padding a batch is one gather."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor


@dataclass(frozen=True)
class Ragged:
    """Row r is ids[starts[r] : starts[r] + lengths[r]]."""

    ids: Int[Tensor, " total"]
    starts: Int[Tensor, " rows"]
    lengths: Int[Tensor, " rows"]

    @staticmethod
    def of(rows: Sequence[Sequence[int]]) -> "Ragged":
        lengths = torch.tensor([len(r) for r in rows])
        flat = torch.tensor([i for r in rows for i in r], dtype=torch.int32)
        return Ragged(flat, lengths.cumsum(0) - lengths, lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def pad(self, rows: Int[Tensor, " b"], pad: int) -> tuple[Int[Tensor, "b n"], Int[Tensor, " b"]]:
        """These rows padded at their ends, and their lengths.

        >>> Ragged.of([[5, 6], [], [7, 8, 9]]).pad(torch.tensor([2, 0]), pad=0)[0].tolist()
        [[7, 8, 9], [5, 6, 0]]
        """
        lengths = self.lengths[rows]
        index = torch.arange(int(lengths.max()))
        real = index < lengths[:, None]
        at = (self.starts[rows, None] + index).masked_fill_(~real, 0)
        if not len(self.ids):
            return torch.full(real.shape, pad), lengths
        return self.ids[at].long().masked_fill_(~real, pad), lengths

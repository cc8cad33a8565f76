"""Rows that are never twice the same: sentences of which some tokens are hidden.

What is drawn comes from PyTorch's own random state. A run seeds it and its checkpoints keep it, so a run that goes
on draws what it would have drawn.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ...errors import SpecError
from .ragged import Ragged
from .rows import IGNORED, Batch
from .tokens import PAD, SPECIAL


@dataclass(frozen=True)
class Hidden:
    """Sentences of which some tokens are to be guessed; which ones is drawn for each batch."""

    tokens: Ragged
    mask: int  # the id that stands where a token stood; ids below it may stand there too
    share: int | float = 0.15

    def __post_init__(self):
        if not 0 < self.share <= 1:
            raise SpecError(
                f"share={self.share} of the tokens hidden; a number above 0, at most 1, is needed"
            )

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def sizes(self) -> Int[Tensor, "rows sides"]:
        return self.tokens.lengths[:, None]

    def batch(self, rows: Int[Tensor, " b"]) -> Batch:
        tokens, lengths = self.tokens.pad(rows, PAD)
        hidden = _chosen(lengths, tokens.shape[1], self.share)
        return _asked(_shown(tokens, hidden, self.mask), tokens, lengths, hidden)

    def once(self, seed: int) -> "Asked":
        """Drawn once for all, to validate with: the same tokens hidden however the rows are batched."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            tokens, lengths = self.tokens.pad(torch.arange(len(self)), PAD)
            hidden = _chosen(lengths, tokens.shape[1], self.share)
            shown = _shown(tokens, hidden, self.mask)
        real = torch.arange(tokens.shape[1]) < lengths[:, None]

        def flat(x: Int[Tensor, "rows n"]) -> Ragged:
            return Ragged(x[real].int(), self.tokens.lengths.cumsum(0) - lengths, lengths)

        return Asked(flat(tokens), flat(shown), flat(hidden.long()))


@dataclass(frozen=True)
class Asked:
    """Sentences, what is shown of them, and which tokens are to be guessed: 1 where one is."""

    tokens: Ragged
    shown: Ragged
    hidden: Ragged

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def sizes(self) -> Int[Tensor, "rows sides"]:
        return self.tokens.lengths[:, None]

    def batch(self, rows: Int[Tensor, " b"]) -> Batch:
        tokens, lengths = self.tokens.pad(rows, PAD)
        return _asked(self.shown.pad(rows, PAD)[0], tokens, lengths, self.hidden.pad(rows, 0)[0] == 1)


def _chosen(lengths: Int[Tensor, " b"], n: int, share: float) -> Bool[Tensor, "b n"]:
    """share · length tokens of each row, at least one."""
    drawn = torch.rand(len(lengths), n).masked_fill_(torch.arange(n) >= lengths[:, None], 2.0)
    many = (lengths * share).round().clamp(min=1)
    return (drawn.argsort(-1).argsort(-1) < many[:, None]) & (drawn < 2.0)


def _shown(tokens: Int[Tensor, "b n"], hidden: Bool[Tensor, "b n"], mask: int) -> Int[Tensor, "b n"]:
    """Of ten hidden tokens eight show the mask, one another token and one itself, so that all are read with care."""
    drawn = torch.rand(tokens.shape)
    others = torch.randint(len(SPECIAL), max(mask, len(SPECIAL) + 1), tokens.shape)
    shown = torch.where(drawn < 0.8, mask, torch.where(drawn < 0.9, others, tokens))
    return torch.where(hidden, shown, tokens)


def _asked(
    shown: Int[Tensor, "b n"],
    tokens: Int[Tensor, "b n"],
    lengths: Int[Tensor, " b"],
    hidden: Bool[Tensor, "b n"],
) -> Batch:
    wanted = tokens.masked_fill(~hidden, IGNORED)
    return Batch({"tokens": shown, "lengths": lengths, "wanted": wanted}, int(hidden.sum()))

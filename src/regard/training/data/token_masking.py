"""Random token masking, as in BERT: sentences of which some tokens are to be predicted.

Random numbers come from PyTorch's global generator. A run seeds it and its checkpoints store its state, so a resumed
run masks the same tokens as an uninterrupted one.
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
class MaskedSentences:
    """Sentences with masked tokens; the masked positions are sampled again for each batch."""

    tokens: Ragged
    mask: int  # id of the mask token; a masked position may also show a random id below it
    share: int | float = 0.15

    def __post_init__(self):
        if not 0 < self.share <= 1:
            raise SpecError(f"share={self.share} of the tokens masked; it needs to be above 0 and at most 1")

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def sizes(self) -> Int[Tensor, "rows sides"]:
        return self.tokens.lengths[:, None]

    def batch(self, rows: Int[Tensor, " b"]) -> Batch:
        tokens, lengths = self.tokens.pad(rows, PAD)
        masked = _masked_positions(lengths, tokens.shape[1], self.share)
        return _batch(_masked_input(tokens, masked, self.mask), tokens, lengths, masked)

    def fixed(self, seed: int) -> "FixedMaskedSentences":
        """The positions sampled once, for validation: the same tokens are masked however the rows are batched."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            tokens, lengths = self.tokens.pad(torch.arange(len(self)), PAD)
            masked = _masked_positions(lengths, tokens.shape[1], self.share)
            inputs = _masked_input(tokens, masked, self.mask)
        real = torch.arange(tokens.shape[1]) < lengths[:, None]

        def flat(x: Int[Tensor, "rows n"]) -> Ragged:
            return Ragged(x[real].int(), self.tokens.lengths.cumsum(0) - lengths, lengths)

        return FixedMaskedSentences(flat(tokens), flat(inputs), flat(masked.long()))


@dataclass(frozen=True)
class FixedMaskedSentences:
    """Sentences, the model's input, and 1 at the positions to be predicted."""

    tokens: Ragged
    inputs: Ragged
    masked: Ragged

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def sizes(self) -> Int[Tensor, "rows sides"]:
        return self.tokens.lengths[:, None]

    def batch(self, rows: Int[Tensor, " b"]) -> Batch:
        tokens, lengths = self.tokens.pad(rows, PAD)
        return _batch(self.inputs.pad(rows, PAD)[0], tokens, lengths, self.masked.pad(rows, 0)[0] == 1)


def _masked_positions(lengths: Int[Tensor, " b"], n: int, share: float) -> Bool[Tensor, "b n"]:
    """share · length random positions of each row, at least one."""
    random = torch.rand(len(lengths), n).masked_fill_(torch.arange(n) >= lengths[:, None], 2.0)
    count = (lengths * share).round().clamp(min=1)
    return (random.argsort(-1).argsort(-1) < count[:, None]) & (random < 2.0)


def _masked_input(tokens: Int[Tensor, "b n"], masked: Bool[Tensor, "b n"], mask: int) -> Int[Tensor, "b n"]:
    """Of ten masked positions eight show the mask token, one a random token and one its own, as in BERT."""
    random = torch.rand(tokens.shape)
    others = torch.randint(len(SPECIAL), max(mask, len(SPECIAL) + 1), tokens.shape)
    shown = torch.where(random < 0.8, mask, torch.where(random < 0.9, others, tokens))
    return torch.where(masked, shown, tokens)


def _batch(
    inputs: Int[Tensor, "b n"],
    tokens: Int[Tensor, "b n"],
    lengths: Int[Tensor, " b"],
    masked: Bool[Tensor, "b n"],
) -> Batch:
    targets = tokens.masked_fill(~masked, IGNORED)
    return Batch({"tokens": inputs, "lengths": lengths, "targets": targets}, int(masked.sum()))

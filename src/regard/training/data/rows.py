"""The rows of a data set, and the batches made of them."""

import hashlib
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .image_augmentation import random_affine
from .ragged import Ragged
from .tokens import END, PAD, START

IGNORED = -100  # the target of a position that is not predicted, as in torch.nn.functional.cross_entropy


class Batch(NamedTuple):
    """The inputs of a task by name, and the number of predictions."""

    inputs: dict[str, Tensor]
    predicted: int

    def to(self, device: torch.device) -> "Batch":
        """On a device. Copies to a GPU come from pinned memory: from other memory they would synchronize."""
        source = self.pinned() if device.type == "cuda" else self
        inputs = {name: t.to(device, non_blocking=True) for name, t in source.inputs.items()}
        return Batch(inputs, self.predicted)

    def pinned(self) -> "Batch":
        """In pinned memory, if it is on the CPU."""
        inputs = {name: t.pin_memory() if t.is_cpu else t for name, t in self.inputs.items()}
        return Batch(inputs, self.predicted)


@dataclass(frozen=True)
class Pairs:
    """Source and target sentences."""

    source: Ragged
    target: Ragged

    def __len__(self) -> int:
        return len(self.source)

    @property
    def sizes(self) -> Int[Tensor, "rows sides"]:
        """Tokens per row: of the source, and of the target with its start or end token."""
        return torch.stack([self.source.lengths, self.target.lengths + 1], 1)

    def batch(self, rows: Int[Tensor, " b"]) -> Batch:
        source, source_lengths = self.source.pad(rows, PAD)
        target, lengths = self.target.pad(rows, PAD)
        b, n = target.shape
        shifted = torch.cat([torch.full((b, 1), START), target], 1)
        targets = torch.cat([target, torch.full((b, 1), PAD)], 1)
        targets[torch.arange(b), lengths] = END
        targets.masked_fill_(torch.arange(n + 1) > lengths[:, None], IGNORED)
        inputs = {"source": source, "source_lengths": source_lengths, "target": shifted, "targets": targets}
        return Batch(inputs, int(lengths.sum()) + b)


@dataclass(frozen=True)
class Windows:
    """Windows of one long text: row r is tokens r·step … r·step + context − 1, and the token after each.

    With random_offset a window begins anywhere within its step, sampled again for each batch: an epoch then reads
    the text about once, and every epoch differently.
    """

    ids: Int[Tensor, " total"]
    context: int
    step: int = 1
    random_offset: bool = False

    def __len__(self) -> int:
        return max((len(self.ids) - self.context - 1) // self.step + 1, 0)

    @property
    def sizes(self) -> Int[Tensor, "rows sides"]:
        return torch.full((len(self), 1), self.context)

    def batch(self, rows: Int[Tensor, " b"]) -> Batch:
        start = rows * self.step
        if self.random_offset:
            last = len(self.ids) - self.context - 1
            start = (start + torch.randint(self.step, rows.shape)).clamp(max=last)
        at = start[:, None] + torch.arange(self.context)
        return Batch({"tokens": self.ids[at].long(), "targets": self.ids[at + 1].long()}, at.numel())


@dataclass(frozen=True)
class Labeled:
    """Sentences or images, and their classes. Images may be augmented, differently in each batch."""

    inputs: Ragged | Float[Tensor, "rows c height width"]
    labels: Int[Tensor, " rows"]
    augmentation: random_affine | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def sizes(self) -> Int[Tensor, "rows sides"]:
        if isinstance(self.inputs, Ragged):
            return self.inputs.lengths[:, None]
        return torch.ones(len(self), 1, dtype=torch.long)

    def batch(self, rows: Int[Tensor, " b"]) -> Batch:
        labels = self.labels[rows]
        if not isinstance(self.inputs, Ragged):
            images = self.inputs[rows]
            if self.augmentation is not None:
                images = self.augmentation(images)
            return Batch({"images": images, "labels": labels}, len(rows))
        tokens, lengths = self.inputs.pad(rows, PAD)
        return Batch({"tokens": tokens, "lengths": lengths, "labels": labels}, len(rows))


def fingerprint(rows: Any) -> str:
    """A checksum of the rows and their order."""
    digest = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, Tensor):
            digest.update(part.contiguous().numpy().data)
        elif is_dataclass(part):
            for field in fields(part):
                add(getattr(part, field.name))

    add(rows)
    return digest.hexdigest()

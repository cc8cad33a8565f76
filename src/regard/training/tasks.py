"""What is learned: how a task's rows become a batch, and a batch a loss.

A task's module holds the model and gives, for one batch, the smoothed loss and the plain one, both summed over
what is predicted, so that batches of any size can be added up before they are divided.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..errors import SpecError
from ..nn.embedding import LanguageHead, MaskedHead
from ..nn.stack import EncoderDecoder, Stack
from .loss import IGNORED, cross_entropy
from .moves import moves
from .ragged import Ragged
from .tokens import END, PAD, START


class Batch(NamedTuple):
    """Tensors by name, and how many predictions they hold."""

    given: dict[str, Tensor]
    predicted: int

    def to(self, device: torch.device) -> "Batch":
        """On a device; pages that stay in place, as a copy from others waits for all that the GPU has to do."""
        if device.type == "cuda":
            return Batch({name: _sent(t, device) for name, t in self.given.items()}, self.predicted)
        return Batch({name: t.to(device) for name, t in self.given.items()}, self.predicted)


def _sent(t: Tensor, device: torch.device) -> Tensor:
    return (t.pin_memory() if t.is_cpu else t).to(device, non_blocking=True)


def laid(batch: Batch, wide: int) -> Batch:
    """The same texts end to end in rows of at most so many tokens, and which text each token belongs to.

    Each token left at the end of a row is a text of its own, past the last: it stands at position 0.
    """
    given = dict(batch.given)
    lengths = given.pop("lengths", None)
    if lengths is None or "tokens" not in given:
        raise SpecError(
            f"packed=True lays texts end to end, and these rows are {' and '.join(batch.given)}; it is for texts "
            f"that are classified, or of which words are hidden"
        )
    real = torch.arange(given["tokens"].shape[1]) < lengths[:, None]
    at, shape = _lying(lengths.tolist(), wide)
    blank = {"tokens": PAD, "wanted": IGNORED}
    for name in [name for name in blank if name in given]:
        given[name] = (
            torch.full(shape, blank[name]).flatten().index_copy(0, at, given[name][real]).view(shape)
        )
    which = torch.arange(len(lengths)).repeat_interleave(lengths)
    rest = len(lengths) + torch.arange(shape[0] * shape[1])
    given["texts"] = rest.index_copy(0, at, which).view(shape)
    return Batch(given, batch.predicted)


def _lying(lengths: list[int], wide: int) -> tuple[Int[Tensor, " total"], tuple[int, int]]:
    """Where the tokens of the texts lie, row after row, each begun when the next text does not fit; and the shape."""
    rows, ends, row, end = [], [], 0, 0
    for length in lengths:
        row, end = (row + 1, length) if end + length > wide else (row, end + length)
        rows.append(row)
        ends.append(end)
    n = max(ends)
    starts = torch.tensor([r * n + e - length for r, e, length in zip(rows, ends, lengths, strict=True)])
    many = torch.tensor(lengths)
    within = torch.arange(sum(lengths)) - (many.cumsum(0) - many).repeat_interleave(many)
    return starts.repeat_interleave(many) + within, (row + 1, n)


def apart(
    states: Float[Tensor, "b n d"], texts: Int[Tensor, "b n"], many: int
) -> tuple[Float[Tensor, "many longest d"], Int[Tensor, " many"]]:
    """The states of each of so many texts in a row of its own, and how many count there."""
    lengths = torch.bincount(texts.flatten(), minlength=many)[:many]
    order = texts.flatten().argsort(stable=True)  # the tokens of text 0, of text 1, …
    at = (lengths.cumsum(0) - lengths)[:, None] + torch.arange(int(lengths.max()), device=texts.device)
    return states.flatten(0, 1)[order[at.clamp(max=len(order) - 1)]], lengths


@dataclass(frozen=True)
class Pairs:
    """Source and target sentences."""

    source: Ragged
    target: Ragged

    def __len__(self) -> int:
        return len(self.source)

    @property
    def sizes(self) -> Int[Tensor, "rows sides"]:
        """The tokens of each row: the source, and the target with its start or end."""
        return torch.stack([self.source.lengths, self.target.lengths + 1], 1)

    def batch(self, rows: Int[Tensor, " b"]) -> Batch:
        source, source_lengths = self.source.pad(rows, PAD)
        target, lengths = self.target.pad(rows, PAD)
        b, n = target.shape
        shifted = torch.cat([torch.full((b, 1), START), target], 1)
        wanted = torch.cat([target, torch.full((b, 1), PAD)], 1)
        wanted[torch.arange(b), lengths] = END
        wanted.masked_fill_(torch.arange(n + 1) > lengths[:, None], IGNORED)
        given = {"source": source, "source_lengths": source_lengths, "target": shifted, "wanted": wanted}
        return Batch(given, int(lengths.sum()) + b)


class Translation(nn.Module):
    """−log p(target | source), token by token."""

    def __init__(self, model: EncoderDecoder, smoothing: float = 0.0):
        super().__init__()
        self.model, self.smoothing = model, smoothing

    def forward(
        self,
        source: Int[Tensor, "b m"],
        source_lengths: Int[Tensor, " b"],
        target: Int[Tensor, "b n"],
        wanted: Int[Tensor, "b n"],
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        decoder = self.model.decoder
        context = self.model.encode(source, source_lengths)
        states = decoder.states(target, context, context_lengths=source_lengths)
        return token_loss(decoder, states, wanted, self.smoothing if self.training else 0.0)


def token_loss(
    stack: Stack, states: Float[Tensor, "b n d"], wanted: Int[Tensor, "b n"], smoothing: float
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """The loss of what the head would say, chunk by chunk."""
    assert isinstance(stack.head, LanguageHead | MaskedHead)
    x, table, bias = stack.head.inputs(states, stack.embedding.table)
    return cross_entropy(x, table, wanted, bias, smoothing=smoothing)


@dataclass(frozen=True)
class Stretches:
    """Windows of one long text: row r is its tokens r·step … r·step + context, and what follows each.

    A loose window begins anywhere within its step, drawn for each batch: an epoch then reads all of the text about
    once, and no two read it alike.
    """

    ids: Int[Tensor, " total"]
    context: int
    step: int = 1
    loose: bool = False

    def __len__(self) -> int:
        return max((len(self.ids) - self.context - 1) // self.step + 1, 0)

    @property
    def sizes(self) -> Int[Tensor, "rows sides"]:
        return torch.full((len(self), 1), self.context)

    def batch(self, rows: Int[Tensor, " b"]) -> Batch:
        start = rows * self.step
        if self.loose:
            last = len(self.ids) - self.context - 1
            start = (start + torch.randint(self.step, rows.shape)).clamp(max=last)
        at = start[:, None] + torch.arange(self.context)
        return Batch({"tokens": self.ids[at].long(), "wanted": self.ids[at + 1].long()}, at.numel())


class Language(nn.Module):
    """−log p(next token | those before)."""

    def __init__(self, model: Stack, smoothing: float = 0.0):
        super().__init__()
        self.model, self.smoothing = model, smoothing

    def forward(
        self, tokens: Int[Tensor, "b n"], wanted: Int[Tensor, "b n"]
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        states = self.model.states(tokens)
        return token_loss(self.model, states, wanted, self.smoothing if self.training else 0.0)


@dataclass(frozen=True)
class Labelled:
    """Sentences, or images, and their classes. Images may be moved, anew for each batch."""

    inputs: Ragged | Float[Tensor, "rows c height width"]
    labels: Int[Tensor, " rows"]
    moved: moves | None = None

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
            images = self.inputs[rows] if self.moved is None else self.moved(self.inputs[rows])
            return Batch({"images": images, "labels": labels}, len(rows))
        tokens, lengths = self.inputs.pad(rows, PAD)
        return Batch({"tokens": tokens, "lengths": lengths, "labels": labels}, len(rows))


class Guessing(nn.Module):
    """−log p(hidden token | the sentence around it)."""

    def __init__(self, model: Stack, smoothing: float = 0.0):
        super().__init__()
        self.model, self.smoothing = model, smoothing

    def forward(
        self,
        tokens: Int[Tensor, "b n"],
        wanted: Int[Tensor, "b n"],
        lengths: Int[Tensor, " b"] | None = None,
        texts: Int[Tensor, "b n"] | None = None,
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        states = self.model.states(tokens, lengths=lengths, documents=texts)
        return token_loss(self.model, states, wanted, self.smoothing if self.training else 0.0)


class Classification(nn.Module):
    """−log p(class | sentence or image)."""

    def __init__(self, model: nn.Module, smoothing: float = 0.0):
        super().__init__()
        self.model: Any = model  # a Stack or a Vision
        self.smoothing = smoothing

    def forward(
        self,
        labels: Int[Tensor, " rows"],
        images: Float[Tensor, "rows c height width"] | None = None,
        tokens: Int[Tensor, "b n"] | None = None,
        lengths: Int[Tensor, " rows"] | None = None,
        texts: Int[Tensor, "b n"] | None = None,
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        if images is not None:
            scores = self.model(images)
        elif texts is None:
            scores = self.model(tokens, lengths=lengths)
        else:
            states = self.model.states(tokens, documents=texts)
            scores = self.model.read(*apart(states, texts, len(labels)))
        plain = F.cross_entropy(scores, labels, reduction="sum")
        if not self.smoothing or not self.training:
            return plain, plain.detach()
        loss = F.cross_entropy(scores, labels, reduction="sum", label_smoothing=self.smoothing)
        return loss, plain.detach()

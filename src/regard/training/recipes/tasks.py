"""Training tasks: modules that contain a model and compute its loss on a batch.

A task returns the smoothed loss and the unsmoothed one, both summed over the predictions, so that batches of any size
can be accumulated before the sum is divided.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ...nn.embedding import LanguageHead, MaskedHead
from ...nn.stack import EncoderDecoder, Stack
from ..data.packing import unpack
from ..loop.consistency import consistent_cross_entropy
from ..loop.loss import cross_entropy


class Translation(nn.Module):
    """−log p(target | source), token by token.

    consistency: with a weight above 0 every sentence is read twice, with different dropout masks, and the divergence
    of the two predictions is added to the loss.
    """

    def __init__(self, model: EncoderDecoder, smoothing: float = 0.0, consistency: float = 0.0):
        super().__init__()
        self.model, self.smoothing, self.consistency = model, smoothing, consistency

    def forward(
        self,
        source: Int[Tensor, "b m"],
        source_lengths: Int[Tensor, " b"],
        target: Int[Tensor, "b n"],
        targets: Int[Tensor, "b n"],
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        decoder, twice = self.model.decoder, self.training and self.consistency > 0
        if twice:
            source, source_lengths, target = (torch.cat([t, t]) for t in (source, source_lengths, target))
        context = self.model.encode(source, source_lengths)
        states = decoder.states(target, context, context_lengths=source_lengths)
        smoothing = self.smoothing if self.training else 0.0
        if not twice:
            return token_loss(decoder, states, targets, smoothing)
        assert isinstance(decoder.head, LanguageHead)
        x, table, bias = decoder.head.inputs(states, decoder.embedding.table)
        return consistent_cross_entropy(x, table, targets, bias, weight=self.consistency, smoothing=smoothing)


def token_loss(
    stack: Stack, states: Float[Tensor, "b n d"], targets: Int[Tensor, "b n"], smoothing: float
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """The loss of the head's logits, computed in chunks."""
    assert isinstance(stack.head, LanguageHead | MaskedHead)
    x, table, bias = stack.head.inputs(states, stack.embedding.table)
    return cross_entropy(x, table, targets, bias, smoothing=smoothing)


class LanguageModeling(nn.Module):
    """−log p(next token | earlier tokens)."""

    def __init__(self, model: Stack, smoothing: float = 0.0):
        super().__init__()
        self.model, self.smoothing = model, smoothing

    def forward(
        self, tokens: Int[Tensor, "b n"], targets: Int[Tensor, "b n"]
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        states = self.model.states(tokens)
        return token_loss(self.model, states, targets, self.smoothing if self.training else 0.0)


class MaskedLanguageModeling(nn.Module):
    """−log p(masked token | the other tokens)."""

    def __init__(self, model: Stack, smoothing: float = 0.0):
        super().__init__()
        self.model, self.smoothing = model, smoothing

    def forward(
        self,
        tokens: Int[Tensor, "b n"],
        targets: Int[Tensor, "b n"],
        lengths: Int[Tensor, " b"] | None = None,
        texts: Int[Tensor, "b n"] | None = None,
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        states = self.model.states(tokens, lengths=lengths, documents=texts)
        return token_loss(self.model, states, targets, self.smoothing if self.training else 0.0)


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
            scores = self.model.read(*unpack(states, texts, len(labels)))
        plain = F.cross_entropy(scores, labels, reduction="sum")
        if not self.smoothing or not self.training:
            return plain, plain.detach()
        loss = F.cross_entropy(scores, labels, reduction="sum", label_smoothing=self.smoothing)
        return loss, plain.detach()

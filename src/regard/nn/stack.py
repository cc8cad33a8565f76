"""Encoders and decoders: an embedding, blocks, a norm, a head."""

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .. import pattern as hide
from .. import spec
from ..engine.call import Bias
from ..errors import ShapeError
from ..pattern import Pattern
from ..position import learned
from . import position as positions
from .block import Block
from .cache import Cache
from .dropout import dropout
from .embedding import ClassifierHead, Embedding, LanguageHead, MaskedHead, Pooler
from .initialization import initialise
from .norm import norm


class Stack(nn.Module):
    """The module of an Encoder or a Decoder: ids (or vectors) in, what the head gives out."""

    def __init__(self, declared: spec.Encoder | spec.Decoder):
        super().__init__()
        self.spec = declared
        block = declared.block
        self.position: Any = None
        if declared.position is not None and declared.position.acts == "query_key":  # it holds no weights
            block = replace(block, attention=replace(block.attention, position=declared.position))
        elif declared.position is not None:
            size = block.attention.sizes
            self.position = positions.build(declared.position, heads=size.heads, d_k=size.d_k, d_v=size.d_v)
        self.embedding: Any = None if declared.embedding is None else Embedding(declared.embedding)
        self.blocks = nn.ModuleList(Block(block) for _ in range(declared.layers))
        after = declared.has_final_norm
        self.norm = norm(block.norm, block.d_model, block.eps, block.norm_bias) if after else nn.Identity()
        self.head = head(declared)
        initialise(self, declared.init, declared.layers)

    def forward(
        self,
        x: Int[Tensor, "b n"] | Float[Tensor, "b n d_model"],
        context: Float[Tensor, "b m d_context"] | None = None,
        *,
        lengths: Int[Tensor, " b"] | None = None,
        context_lengths: Int[Tensor, " b"] | None = None,
        types: Int[Tensor, "b n"] | None = None,
        documents: Int[Tensor, "b n"] | None = None,
        pattern: Pattern | Tensor | None = None,
        cache: Cache | None = None,
        return_weights: bool = False,
    ):
        """Logits, class scores, or states where there is no head; with return_weights also a list of weights.

        lengths: real tokens a row, the rest is padding at its end. documents: texts laid end to end, by number;
        none sees another, and positions begin anew in each. pattern: further restricts who sees whom.
        cache: keeps what was seen, so that each call brings only new tokens.
        """
        kept: list[dict[str, Tensor]] | None = [{} for _ in self.blocks] if return_weights else None
        x = self.states(
            x,
            context,
            lengths=lengths,
            context_lengths=context_lengths,
            types=types,
            documents=documents,
            pattern=pattern,
            cache=cache,
            keep=kept,
        )
        out = self.read(x, lengths)
        return (out, kept) if return_weights else out

    def states(
        self,
        x: Int[Tensor, "b n"] | Float[Tensor, "b n d_model"],
        context: Float[Tensor, "b m d_context"] | None = None,
        *,
        lengths: Int[Tensor, " b"] | None = None,
        context_lengths: Int[Tensor, " b"] | None = None,
        types: Int[Tensor, "b n"] | None = None,
        documents: Int[Tensor, "b n"] | None = None,
        pattern: Pattern | Tensor | None = None,
        cache: Cache | None = None,
        keep: list[dict[str, Tensor]] | None = None,
    ) -> Float[Tensor, "b n d_model"]:
        """What the head reads. A list of dictionaries given as `keep`, one a block, receives the weights."""
        x = self._embed(x, types, cache, documents)
        bias = self._bias(x, cache)
        if documents is not None:
            pattern = _within(documents, pattern)
        for i, block in enumerate(self.blocks):
            given: dict[str, Any] = {
                "lengths": lengths,
                "context_lengths": context_lengths,
                "pattern": pattern,
                "bias": bias,
                "cache": cache and cache.layers[i],
                "keep": keep and keep[i],
            }
            if self.spec.checkpoint and torch.is_grad_enabled():
                x = checkpoint(block, x, context, use_reentrant=False, **given)
            else:
                x = block(x, context, **given)
        return self.norm(x)

    def read(
        self, x: Float[Tensor, "b n d_model"], lengths: Int[Tensor, " b"] | None = None
    ) -> Float[Tensor, "b ..."]:
        """What the head makes of states: logits, class scores, or the states where there is none."""
        match self.head:
            case None:
                return x
            case LanguageHead() | MaskedHead():
                return self.head(x, self.embedding.table)
            case ClassifierHead():
                return self.head(x, lengths)
        return self.head(x)

    def cache(self) -> Cache:
        """An empty cache for this stack."""
        return Cache(len(self.blocks))

    def _embed(
        self, x: Tensor, types: Tensor | None, cache: Cache | None, documents: Tensor | None
    ) -> Tensor:
        if documents is not None and cache is not None:
            raise ShapeError("documents and a cache at once: a text that is written on is a row of its own")
        if self.embedding is None:
            return x
        if x.is_floating_point():
            raise ShapeError(f"this stack has an embedding and takes token ids, not {x.dtype} vectors")
        if documents is not None:
            return self.embedding(x, types=types, places=places(documents))
        start = 0 if cache is None else cache.offset
        length = x.shape[1] + (0 if cache is None else cache.filled)
        return self.embedding(x, types=types, start=start, length=length)

    def _bias(self, x: Tensor, cache: Cache | None) -> Bias:
        """The bias of a position that all layers share."""
        if self.position is None:
            return None
        start = 0 if cache is None else cache.offset
        filled = x.shape[1] + (0 if cache is None else cache.filled)
        if (own := self.position.by_distance(filled - 1)) is not None:
            return own
        along = torch.arange(x.shape[1], device=x.device)
        where = along + (start[:, None] if isinstance(start, Tensor) else start)
        return self.position(where, torch.arange(filled, device=x.device))


def places(documents: Int[Tensor, "b n"]) -> Int[Tensor, "b n"]:
    """How far each token is from the first of its document.

    >>> places(torch.tensor([[4, 4, 4, 7, 9, 9]])).tolist()
    [[0, 1, 2, 0, 0, 1]]
    """
    along = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    first = torch.ones_like(documents, dtype=torch.bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return along - along.where(first, 0).cummax(1).values


def _within(ids: Int[Tensor, "b n"], pattern: Pattern | Tensor | None) -> Pattern | Tensor:
    own = hide.documents(ids)
    if pattern is None or isinstance(pattern, Pattern):
        return own if pattern is None else pattern & own
    return pattern & own.allowed(ids.shape[1], ids.shape[1], device=ids.device)


def head(declared: spec.Encoder | spec.Decoder) -> nn.Module | None:
    match declared.head, declared.embedding:
        case spec.LanguageHead() as h, spec.Embedding() as e:
            return LanguageHead(h, e)
        case spec.MaskedHead() as h, spec.Embedding() as e:
            return MaskedHead(h, e)
        case spec.ClassifierHead() as h, _:
            return ClassifierHead(h, declared.d_model)
        case spec.Pooler() as h, _:
            return Pooler(h, declared.d_model)
    return None


class EncoderDecoder(nn.Module):
    """The Transformer: logits for each next target token, given the source and the target so far."""

    def __init__(self, declared: spec.EncoderDecoder):
        super().__init__()
        self.spec = declared
        self.encoder, self.decoder = Stack(declared.encoder), Stack(declared.decoder)
        if declared.share_embedding:
            self.decoder.embedding.table = self.encoder.embedding.table

    def encode(
        self,
        source: Int[Tensor, "b m"] | Float[Tensor, "b m d_source"],
        lengths: Int[Tensor, " b"] | None = None,
    ) -> Float[Tensor, "b m d_source"]:
        return self.encoder(source, lengths=lengths)

    def forward(
        self,
        source: Int[Tensor, "b m"] | Float[Tensor, "b m d_source"],
        target: Int[Tensor, "b n"] | Float[Tensor, "b n d_target"],
        *,
        source_lengths: Int[Tensor, " b"] | None = None,
        target_lengths: Int[Tensor, " b"] | None = None,
        return_weights: bool = False,
    ):
        """Logits (b, n, vocab); with return_weights also those of the encoder and of the decoder.

        Padding at the end of the target needs no mask: the past does not look there. `target_lengths` hides
        it all the same, for patterns that do.
        """
        if not return_weights:
            states = self.encode(source, source_lengths)
            return self.decoder(target, states, lengths=target_lengths, context_lengths=source_lengths)
        states, encoded = self.encoder(source, lengths=source_lengths, return_weights=True)
        logits, decoded = self.decoder(
            target, states, lengths=target_lengths, context_lengths=source_lengths, return_weights=True
        )
        return logits, {"encoder": encoded, "decoder": decoded}


class Vision(nn.Module):
    """Patches → vectors → encoder → class scores (or states)."""

    def __init__(self, declared: spec.Vision):
        super().__init__()
        self.spec = declared
        d_model = declared.d_model
        self.patches = nn.Conv2d(declared.channels, d_model, declared.patch, stride=declared.patch)
        self.class_token = nn.Parameter(torch.zeros(d_model)) if declared.class_token else None
        where = declared.position or learned(declared.tokens)
        self.position = positions.build(where, d_model=d_model)
        self.encoder = Stack(declared.encoder)
        self.head = None if declared.head is None else ClassifierHead(declared.head, d_model)
        initialise(self.patches, declared.encoder.init)

    def forward(self, images: Float[Tensor, "b c height width"], *, return_weights: bool = False):
        """Class scores (b, classes), or states (b, tokens, d_model) without a head."""
        if tuple(images.shape[-2:]) != tuple(self.spec.image) or images.shape[1] != self.spec.channels:
            want = (self.spec.channels, *self.spec.image)
            raise ShapeError(
                f"images of {tuple(images.shape[1:])}; declared is (channels, height, width) = {want}"
            )
        x = self.patches(images).flatten(2).transpose(1, 2)
        on_grid = getattr(self.spec.position, "grid", None) is not None
        if on_grid:
            x = self.position(x, torch.arange(x.shape[1], device=x.device))
        if self.class_token is not None:
            x = torch.cat([self.class_token.expand(len(x), 1, -1), x], 1)
        if not on_grid:
            x = self.position(x, torch.arange(x.shape[1], device=x.device), x.shape[1])
        x = dropout(x, self.spec.dropout, self.training)
        x, kept = self.encoder(x, return_weights=True) if return_weights else (self.encoder(x), None)
        out = x if self.head is None else self.head(x)
        return (out, kept) if return_weights else out

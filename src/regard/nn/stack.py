"""Encoders and decoders: an embedding, blocks, a norm, a head."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .. import compat, spec
from .. import pattern as patterns
from ..engine.attention import Patterns
from ..engine.backends import backend, named
from ..engine.call import Bias
from ..errors import ShapeError, not_an_argument_of
from ..pattern import Pattern, per_head
from ..pattern.packed import document_positions
from ..position import learned
from . import position as positions
from .attention import Complete
from .block import Block, Residual
from .branch_end import computed_in
from .cache import Cache
from .dropout import dropout
from .embedding import ClassifierHead, Embedding, LanguageHead, MaskedHead, Pooler
from .initialization import initialize
from .norm import norm


class Stack(nn.Module):
    """The module of an Encoder or a Decoder: ids (or vectors) in, the output of the head out."""

    def __init__(self, declared: spec.Encoder | spec.Decoder):
        super().__init__()
        self.spec = declared
        block = declared.block
        self.position: Any = None
        if declared.position is not None and declared.position.acts == "query_key":  # it has no parameters
            block = replace(block, attention=replace(block.attention, position=declared.position))
        elif declared.position is not None:
            size = block.attention.sizes
            self.position = positions.build(declared.position, heads=size.heads, d_k=size.d_k, d_v=size.d_v)
        self.embedding: Any = None if declared.embedding is None else Embedding(declared.embedding)
        self.blocks = nn.ModuleList(Block(block) for _ in range(declared.layers))
        eps, after = declared.norm_eps, declared.has_final_norm
        self.norm = norm(block.norm, block.d_model, eps, block.norm_bias) if after else nn.Identity()
        self.head = head(declared)
        initialize(self, declared.init, declared.layers)

    def forward(
        self,
        x: Int[Tensor, "b n"] | Float[Tensor, "b n d_model"],
        context: Float[Tensor, "b m d_context"] | None = None,
        *,
        lengths: Int[Tensor, " b"] | None = None,
        context_lengths: Int[Tensor, " b"] | None = None,
        types: Int[Tensor, "b n"] | None = None,
        documents: Int[Tensor, "b n"] | None = None,
        pattern: Patterns = None,
        cache: Cache | None = None,
        return_weights: bool = False,
        **foreign: Any,
    ):
        """Logits, class scores, or states where there is no head; with return_weights also the attention weights.

        lengths: the number of real tokens per row; the rest is padding at its end. documents: the document of each
        token, where a row holds several: no token attends to another document, and positions start at 0 in each,
        those of the patterns too (every, sinks, blocks, …), as in `rg.documents(ids, pattern)`.
        pattern: restricts the declared pattern further; a list has one per head. cache: holds earlier keys and
        values, so that each call passes only new tokens. return_weights: a list with a dictionary per block, "self"
        and "cross".
        """
        if foreign:
            raise not_an_argument_of(self, foreign)
        weights: list[dict[str, Tensor]] | None = [{} for _ in self.blocks] if return_weights else None
        x = self.states(
            x,
            context,
            lengths=lengths,
            context_lengths=context_lengths,
            types=types,
            documents=documents,
            pattern=pattern,
            cache=cache,
            weights=weights,
        )
        out = self.read(x, lengths)
        return (out, weights) if return_weights else out

    def states(
        self,
        x: Int[Tensor, "b n"] | Float[Tensor, "b n d_model"],
        context: Float[Tensor, "b m d_context"] | None = None,
        *,
        lengths: Int[Tensor, " b"] | None = None,
        context_lengths: Int[Tensor, " b"] | None = None,
        types: Int[Tensor, "b n"] | None = None,
        documents: Int[Tensor, "b n"] | None = None,
        pattern: Patterns = None,
        cache: Cache | None = None,
        weights: list[dict[str, Tensor]] | None = None,
    ) -> Float[Tensor, "b n d_model"]:
        """The input of the head. `weights`, a list with a dictionary per block, receives the attention weights."""
        fuses = any(block.fuses_ends for block in self.blocks if isinstance(block, Block))
        fuses = fuses and not compat.has_hooks(*self.blocks)  # a hook expects tensors
        begins = fuses and self._begins_with_norm()
        x = self._embed(x, types, cache, documents, drops=not begins)
        bias = self._bias(x, cache)
        states: Any = Residual(None, x, self.embedding.spec.dropout) if begins else x
        allowed: Patterns | Complete = pattern
        if documents is not None:
            allowed = _within_documents(documents, pattern, self.spec.block.attention.pattern)
        for i, block in enumerate(self.blocks):
            options: dict[str, Any] = {
                "lengths": lengths,
                "context_lengths": context_lengths,
                "pattern": allowed,
                "bias": bias,
                "cache": cache and cache.layers[i],
                "weights": weights and weights[i],
            }
            if self.spec.checkpoint and torch.is_grad_enabled():
                if (name := named()) != "auto":  # the block is computed again, perhaps in another thread
                    options["context_fn"] = lambda name=name: (nullcontext(), backend(name))
                states = checkpoint(block, states, context, use_reentrant=False, **options)
            elif fuses:
                states = block(states, context, continues=True, **options)
            else:
                states = block(states, context, **options)
        # What reads the states are products again, so the norm is written in their dtype.
        if isinstance(states, Residual):
            return states.normed(self.norm, computed_in(states.like))[1]
        return self.norm(states)

    def read(
        self, x: Float[Tensor, "b n d_model"], lengths: Int[Tensor, " b"] | None = None
    ) -> Float[Tensor, "b ..."]:
        """The output of the head for states: logits, class scores, or the states where there is no head."""
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

    def _begins_with_norm(self) -> bool:
        """Whether the embedding's dropout can be computed with the norm of the first block."""
        if self.embedding is None or compat.has_hooks(self.embedding) or self.spec.checkpoint:
            return False
        block = self.spec.block
        return self.training and len(self.blocks) > 0 and block.norm_at == "pre" and block.residual

    def _embed(
        self, x: Tensor, types: Tensor | None, cache: Cache | None, documents: Tensor | None, drops: bool
    ) -> Tensor:
        if documents is not None and cache is not None:
            raise ShapeError("documents and a cache cannot be combined; give each text a row of its own")
        if cache is not None and len(cache.layers) != len(self.blocks):
            raise ShapeError(
                f"the cache has {len(cache.layers)} layers and this model {len(self.blocks)}; use model.cache()"
            )
        if self.embedding is None:
            return x
        if not isinstance(x, Tensor) or x.dim() < 2:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ShapeError(f"token ids of shape (b, n) are needed, one row per text, not {got}")
        if x.is_floating_point():
            raise ShapeError(f"this stack has an embedding and takes token ids, not {x.dtype} vectors")
        if documents is not None:
            return self.embedding(x, types=types, positions=document_positions(documents), drops=drops)
        start = 0 if cache is None else cache.offset
        length = x.shape[1] + (0 if cache is None else cache.filled)
        return self.embedding(x, types=types, start=start, length=length, drops=drops)

    def _bias(self, x: Tensor, cache: Cache | None) -> Bias:
        """The bias of a position that all layers share."""
        if self.position is None:
            return None
        start = 0 if cache is None else cache.offset
        filled = x.shape[1] + (0 if cache is None else cache.filled)
        if (bias := self.position.by_distance(filled - 1, x.device)) is not None:
            return bias
        index = torch.arange(x.shape[1], device=x.device)
        q_positions = index + (start[:, None] if isinstance(start, Tensor) else start)
        return self.position(q_positions, torch.arange(filled, device=x.device))


def _within_documents(
    ids: Int[Tensor, "b n"], given: Patterns, declared: Pattern
) -> Pattern | Tensor | Complete:
    """The given pattern within each document; where it or the declared one names positions, both of them."""
    given = per_head(given) if isinstance(given, Sequence) else given
    packed, n = patterns.documents(ids), ids.shape[1]
    counted = given if isinstance(given, Pattern) and not given.has_data else patterns.full()
    if declared.shift_period == counted.shift_period == 1:
        if given is None or isinstance(given, Pattern):
            return packed if given is None else given & packed
        return given & packed.allowed(n, n, device=ids.device)
    inner = declared if isinstance(counted, patterns.full) else declared & counted
    if isinstance(inner, per_head):
        # Equal heads share one pattern, so that they run together.
        of_pattern = {each: patterns.documents(ids, each) for each in inner.patterns}
        within: Pattern = per_head([of_pattern[each] for each in inner.patterns])
    else:
        within = patterns.documents(ids, inner)
    if given is None or given is counted:
        return Complete(within)
    if isinstance(given, Pattern):
        return Complete(within & given)
    return Complete(within.allowed(n, n, device=ids.device) & given)


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
    """The Transformer: logits for each next target token, given the source and the earlier target tokens."""

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
        **foreign: Any,
    ):
        """Logits (b, n, vocab); with return_weights also the attention weights of the encoder and of the decoder.

        Padding at the end of the target needs no mask where the decoder is causal; `target_lengths` masks it for
        other patterns.
        """
        if foreign:
            raise not_an_argument_of(self, foreign)
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
        self.registers = (
            nn.Parameter(torch.zeros(declared.registers, d_model)) if declared.registers else None
        )
        where = declared.position or learned(declared.tokens)
        self.position = positions.build(where, d_model=d_model)
        self.encoder = Stack(declared.encoder)
        self.head = None if declared.head is None else ClassifierHead(declared.head, d_model)
        initialize(self.patches, declared.encoder.init)

    def forward(
        self, images: Float[Tensor, "b c height width"], *, return_weights: bool = False, **foreign: Any
    ):
        """Class scores (b, classes), or states (b, tokens, d_model) without a head."""
        if foreign:
            raise not_an_argument_of(self, foreign)
        if tuple(images.shape[-2:]) != tuple(self.spec.image) or images.shape[1] != self.spec.channels:
            want = (self.spec.channels, *self.spec.image)
            raise ShapeError(
                f"images have shape {tuple(images.shape[1:])}; declared is (channels, height, width) = {want}"
            )
        x = self.patches(images).flatten(2).transpose(1, 2)
        on_grid = getattr(self.spec.position, "grid", None) is not None
        if on_grid:
            x = self.position(x, torch.arange(x.shape[1], device=x.device))
        front = [t for t in (self.class_token, self.registers) if t is not None]
        if front:
            x = torch.cat([*(t.view(-1, t.shape[-1]).expand(len(x), -1, -1) for t in front), x], 1)
        if not on_grid:
            x = self.position(x, torch.arange(x.shape[1], device=x.device), x.shape[1])
        x = dropout(x, self.spec.dropout, self.training)
        x, weights = self.encoder(x, return_weights=True) if return_weights else (self.encoder(x), None)
        out = x if self.head is None else self.head(x)
        return (out, weights) if return_weights else out

"""A model one token at a time: logits for what comes next, and rows that can be kept, dropped or doubled."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..errors import ShapeError, SpecError
from ..nn.embedding import LanguageHead
from ..nn.recurrent import RecurrentModel
from ..nn.stack import EncoderDecoder, Stack
from ..pattern import causal, full
from ..position import learned
from . import cpu_inference as quick


class StackSteps:
    """A decoder, alone or looking at a context."""

    def __init__(
        self,
        stack: Stack,
        context: Float[Tensor, "b m d"] | None = None,
        context_lengths: Int[Tensor, " b"] | None = None,
    ):
        self.stack, self.cache = stack, stack.cache()
        self.context, self.context_lengths = context, context_lengths

    def next(
        self, tokens: Int[Tensor, "b n"], lengths: Int[Tensor, " b"] | None = None
    ) -> Float[Tensor, "b vocab"]:
        """Logits after these tokens, which follow all those given before. lengths: how many count in each row."""
        states = self.stack.states(
            tokens, self.context, lengths=lengths, context_lengths=self.context_lengths, cache=self.cache
        )
        if lengths is None:
            last = states[:, -1]
        else:
            last = states[torch.arange(len(states), device=states.device), lengths - 1]
        return self.stack.read(last[:, None])[:, 0]

    def select(self, rows: Int[Tensor, " r"], same_context: bool = False) -> None:
        """Keep these rows in this order. same_context: each replaces one that looks at the same source."""
        self.cache.select(rows, same_context)
        if self.context is not None and not same_context:
            self.context = self.context[rows]
        if self.context_lengths is not None and not same_context:
            self.context_lengths = self.context_lengths[rows]


class QuickSteps(StackSteps):
    """A plain decoder: single tokens go the quick way."""

    def __init__(
        self,
        stack: Stack,
        context: Float[Tensor, "b m d"] | None = None,
        context_lengths: Int[Tensor, " b"] | None = None,
    ):
        super().__init__(stack, context, context_lengths)
        self.quick = quick.QuickDecoder(stack)
        self.beyond: Float[Tensor, "bh 1 m"] | None = None  # made when it is needed, and after rows changed

    def next(
        self, tokens: Int[Tensor, "b n"], lengths: Int[Tensor, " b"] | None = None
    ) -> Float[Tensor, "b vocab"]:
        if tokens.shape[1] > 1 or lengths is not None:
            return super().next(tokens, lengths)
        if self.context is not None and not self.cache.filled:
            self.quick.read(self.context, self.context_lengths, self.cache.layers)
        if self.context is not None and self.context_lengths is not None and self.beyond is None:
            self.beyond = self.quick.beyond(self.context_lengths, self.context.shape[1])
        return self.quick.next(tokens[:, 0], self.cache.layers, self.beyond)

    def select(self, rows: Int[Tensor, " r"], same_context: bool = False) -> None:
        super().select(rows, same_context)
        self.beyond = self.beyond if same_context else None


class RecurrentSteps:
    """A recurrent encoder-decoder: its state is all that is kept."""

    def __init__(self, model: RecurrentModel, source: Int[Tensor, "b m"], lengths: Int[Tensor, " b"] | None):
        self.model, self.encoded = model, model.encode(source, lengths)

    def next(
        self, tokens: Int[Tensor, "b n"], lengths: Int[Tensor, " b"] | None = None
    ) -> Float[Tensor, "b vocab"]:
        if lengths is not None and bool((lengths != tokens.shape[1]).any()):
            raise ShapeError("a recurrent model steps through targets of one length; start each row alike")
        for token in tokens.unbind(1):
            logits, self.encoded = self.model.step(token, self.encoded)
        return logits

    def select(self, rows: Int[Tensor, " r"], same_context: bool = False) -> None:
        self.encoded = self.encoded.select(rows)


Steps = StackSteps | RecurrentSteps


def steps(
    model: nn.Module, source: Int[Tensor, "b m"] | None, lengths: Int[Tensor, " b"] | None
) -> tuple[Steps, int | None]:
    """The model, ready for its first token, and how many positions it has (None: no limit)."""
    match model:
        case Stack(head=LanguageHead()) if source is None:
            return _stack_steps(model), positions(model)
        case EncoderDecoder() if source is not None and isinstance(model.decoder.head, LanguageHead):
            return _stack_steps(model.decoder, *_encoded(model, source, lengths)), positions(model.decoder)
        case RecurrentModel() if source is not None:
            return RecurrentSteps(model, source, lengths), None
        case Stack() | EncoderDecoder() | RecurrentModel():
            if source is None and not isinstance(model, Stack):
                raise ShapeError(f"{type(model).__name__} writes from a source; give source=")
            if source is not None and isinstance(model, Stack):
                raise ShapeError("a decoder on its own has no source to look at; give the tokens as prompt")
    raise SpecError(
        f"{type(model).__name__} gives no logits for a next token; a model with rg.LanguageHead() does"
    )


def _stack_steps(
    stack: Stack,
    context: Float[Tensor, "b m d"] | None = None,
    lengths: Int[Tensor, " b"] | None = None,
) -> StackSteps:
    # A row with nothing to look at gets zeros, which the quick way does not give.
    some = lengths is None or bool((lengths > 0).all())
    kind = QuickSteps if some and quick.covers(stack, causal()) else StackSteps
    return kind(stack, context, lengths)


def _encoded(
    model: EncoderDecoder, source: Int[Tensor, "b m"], lengths: Int[Tensor, " b"] | None
) -> tuple[Float[Tensor, "b m d"], Int[Tensor, " b"] | None]:
    """The source's states, and how many count; None where all do."""
    if lengths is not None and bool((lengths == source.shape[1]).all()):
        lengths = None
    if quick.covers(model.encoder, full()):
        return quick.encode(model.encoder, source, lengths), lengths
    return model.encode(source, lengths), lengths


def positions(stack: Stack) -> int | None:
    """How long a sequence a learned table holds."""
    declared = stack.spec.embedding and stack.spec.embedding.position
    return declared.entries if isinstance(declared, learned) else None

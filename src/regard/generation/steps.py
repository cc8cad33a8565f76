"""A model decoded step by step: logits for the next token, and batch rows that can be selected or repeated."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..errors import ShapeError, SpecError
from ..nn.cache import Moves
from ..nn.embedding import LanguageHead
from ..nn.recurrent import RecurrentModel
from ..nn.stack import EncoderDecoder, Stack
from ..pattern import causal, full
from ..position import learned
from . import cpu_inference


class StackSteps:
    """A decoder, alone or with cross-attention to a context."""

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
        """Logits after these tokens, which follow all earlier ones. lengths: how many are real in each row."""
        states = self.stack.states(
            tokens, self.context, lengths=lengths, context_lengths=self.context_lengths, cache=self.cache
        )
        if lengths is None:
            last = states[:, -1]
        else:
            last = states[torch.arange(len(states), device=states.device), lengths - 1]
        return self.stack.read(last[:, None])[:, 0]

    def select(self, rows: Int[Tensor, " r"], same_context: bool = False) -> None:
        """Keep these rows in this order. same_context: each replaces a row with the same source."""
        self.cache.select(rows, same_context)
        if self.context is not None and not same_context:
            self.context = self.context[rows]
        if self.context_lengths is not None and not same_context:
            self.context_lengths = self.context_lengths[rows]

    def repeat(self, width: int) -> None:
        """Every row `width` times: the beams of a row follow each other."""
        self.select(_repeated(self.cache.layers[0].own.rows, width, self.device))

    def select_beams(self, beams: Int[Tensor, " r"], rows: Int[Tensor, " left"] | None) -> None:
        """Keep these of the repeated rows. rows: the rows that they belong to, None where all rows stay."""
        self.select(beams, same_context=rows is None)

    @property
    def device(self) -> torch.device:
        return self.stack.embedding.table.device


class CpuSteps(StackSteps):
    """A decoder that cpu_inference supports: single tokens run there."""

    def __init__(
        self,
        stack: Stack,
        context: Float[Tensor, "b m d"] | None = None,
        context_lengths: Int[Tensor, " b"] | None = None,
    ):
        super().__init__(stack, context, context_lengths)
        self.decoder = cpu_inference.token_decoder(stack)
        # Of the context, for each layer; computed when needed, and again after the rows changed.
        self.parts: list[list[cpu_inference.ContextPart]] | None = None
        self.beams: cpu_inference.Beams | None = None

    def next(
        self, tokens: Int[Tensor, "b n"], lengths: Int[Tensor, " b"] | None = None
    ) -> Float[Tensor, "b vocab"]:
        if tokens.shape[1] > 1 or lengths is not None:
            return super().next(tokens, lengths)
        if self.context is not None and not self.cache.filled:
            self.decoder.read(self.context, self.context_lengths, self.cache.layers)
        self.context = None  # from now on its keys and values are read from the cache
        if self.parts is None:
            self.parts = self.decoder.context_parts(self.context_lengths, self.cache.layers)
        return self.decoder.next(tokens[:, 0], self.cache.layers, self.parts, self.beams)

    def select(self, rows: Int[Tensor, " r"], same_context: bool = False) -> None:
        super().select(rows, same_context)
        self.parts = self.parts if same_context else None

    def repeat(self, width: int) -> None:
        """The beams of a row share the keys and values of its context and, from equal lengths on, of its past."""
        own = self.cache.layers[0].own
        if own.lengths is None:
            self.beams = cpu_inference.Beams(own.rows, width, own.filled)
        else:
            self.cache.select(_repeated(own.rows, width, self.device), same_context=True)

    def select_beams(self, beams: Int[Tensor, " r"], rows: Int[Tensor, " left"] | None) -> None:
        if self.beams is None:
            self.cache.select(beams, same_context=True)
        else:
            self.beams.select(beams)
        if rows is not None:
            self._select_rows(rows)
        if self.beams is not None:
            self.beams.remove_unused(self.cache.layers)

    def _select_rows(self, rows: Int[Tensor, " left"]) -> None:
        moves = Moves(rows)
        for layer in self.cache.layers:
            if self.beams is not None:
                layer.own.select(rows, moves)
            layer.cross.select(rows, moves)
        self.parts = None
        if self.context_lengths is not None:
            self.context_lengths = self.context_lengths[rows]


class RecurrentSteps:
    """A recurrent encoder-decoder; its state takes the place of a cache."""

    def __init__(self, model: RecurrentModel, source: Int[Tensor, "b m"], lengths: Int[Tensor, " b"] | None):
        self.model, self.encoded = model, model.encode(source, lengths)

    def next(
        self, tokens: Int[Tensor, "b n"], lengths: Int[Tensor, " b"] | None = None
    ) -> Float[Tensor, "b vocab"]:
        if lengths is not None and bool((lengths != tokens.shape[1]).any()):
            raise ShapeError(
                "a recurrent model needs prompts of one length; start each row with as many tokens"
            )
        for token in tokens.unbind(1):
            logits, self.encoded = self.model.step(token, self.encoded)
        return logits

    def select(self, rows: Int[Tensor, " r"], same_context: bool = False) -> None:
        self.encoded = self.encoded.select(rows)

    def repeat(self, width: int) -> None:
        memory = self.encoded.memory
        self.select(_repeated(len(memory), width, memory.device))

    def select_beams(self, beams: Int[Tensor, " r"], rows: Int[Tensor, " left"] | None) -> None:
        self.select(beams)


Steps = StackSteps | RecurrentSteps


def _repeated(rows: int, width: int, device: torch.device) -> Int[Tensor, " r"]:
    return torch.arange(rows, device=device).repeat_interleave(width)


def steps(
    model: nn.Module, source: Int[Tensor, "b m"] | None, lengths: Int[Tensor, " b"] | None
) -> tuple[Steps, int | None]:
    """The model, ready for its first token, and its number of positions (None: no limit)."""
    match model:
        case Stack(head=LanguageHead()) if source is None:
            return _stack_steps(model), positions(model)
        case EncoderDecoder() if source is not None and isinstance(model.decoder.head, LanguageHead):
            return _stack_steps(model.decoder, *_encoded(model, source, lengths)), positions(model.decoder)
        case RecurrentModel() if source is not None:
            return RecurrentSteps(model, source, lengths), None
        case Stack() | EncoderDecoder() | RecurrentModel():
            if source is None and not isinstance(model, Stack):
                raise ShapeError(f"{type(model).__name__} reads a source; give source=")
            if source is not None and isinstance(model, Stack):
                raise ShapeError(
                    "a decoder without cross-attention takes no source; give the tokens as prompt"
                )
    match dict(model.named_children()):
        case {"module": Stack() | EncoderDecoder() | RecurrentModel()}:
            raise SpecError(f"{type(model).__name__} wraps a model; give the model itself: model.module")
    raise SpecError(
        f"{type(model).__name__} gives no logits for a next token; a model with rg.LanguageHead() is needed"
    )


def _stack_steps(
    stack: Stack,
    context: Float[Tensor, "b m d"] | None = None,
    lengths: Int[Tensor, " b"] | None = None,
) -> StackSteps:
    # Cross-attention to an empty source gives zeros, which cpu_inference does not support.
    no_empty_source = lengths is None or bool((lengths > 0).all())
    kind = CpuSteps if no_empty_source and cpu_inference.supports(stack, causal()) else StackSteps
    return kind(stack, context, lengths)


def _encoded(
    model: EncoderDecoder, source: Int[Tensor, "b m"], lengths: Int[Tensor, " b"] | None
) -> tuple[Float[Tensor, "b m d"], Int[Tensor, " b"] | None]:
    """The states of the source, and their real lengths; None where there is no padding."""
    if lengths is not None and bool((lengths == source.shape[1]).all()):
        lengths = None
    table = positions(model.encoder)
    # A source past the end of a learned table is left to the module, which resamples the table or refuses.
    within = table is None or source.shape[1] <= table
    if within and cpu_inference.supports(model.encoder, full()):
        return cpu_inference.encode(model.encoder, source, lengths), lengths
    return model.encode(source, lengths), lengths


def positions(stack: Stack) -> int | None:
    """The length of a learned table of positions; None without one."""
    declared = stack.spec.embedding and stack.spec.embedding.position
    return declared.entries if isinstance(declared, learned) else None

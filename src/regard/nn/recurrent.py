"""The recurrent baseline: an encoder-decoder that reads the source through one vector, or through attention.

    memory, state = encoder(source)                   all states (b, m, d_model), and the last of each row
    states        = decoder(target, state)            (b, n, d_model)
    weights       = softmax(score(states, memory))    (b, n, m); without attention there is none
    logits        = W [states; weights · memory] + b

Attention is Luong's global attention: a decoder state attends after its step, not before it, and the context vector
enters only the output. So all decoder states come from one call, and all context vectors from one product.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from einops import einsum, rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from ..engine.attention import attention
from ..errors import ShapeError, SpecError
from ..reference import additive_scores, bilinear_scores, softmax
from ..spec import Recurrent

State = Float[Tensor, "_layers _b _d"] | tuple[Tensor, Tensor]  # of an LSTM: hidden and cell state
_CELLS = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}


class Encoded(NamedTuple):
    """The encoded source. Decoding updates `state`; the rest does not change."""

    memory: Float[Tensor, "b m d_model"]
    state: State
    lengths: Int[Tensor, " b"] | None

    def select(self, rows: Int[Tensor, " b_new"]) -> "Encoded":
        """The batch rows in another order, or repeated, as beam search needs them."""
        lengths = None if self.lengths is None else self.lengths[rows]
        return Encoded(self.memory[rows], _each(self.state, lambda s: s[:, rows]), lengths)


class AdditiveScore(nn.Module):
    """vᵀ tanh(W_q q + W_k k): 2·d² + d parameters, and n·m·d intermediate values."""

    def __init__(self, d_model: int):
        super().__init__()
        self.w_q = nn.Linear(d_model, d_model, bias=False)
        self.w_k = nn.Linear(d_model, d_model, bias=False)
        self.v = nn.Linear(d_model, 1, bias=False)

    def forward(self, q: Float[Tensor, "b n d"], k: Float[Tensor, "b m d"]) -> Float[Tensor, "b n m"]:
        return additive_scores(q, k, self.w_q.weight.T, self.w_k.weight.T, self.v.weight[0])


class MultiplicativeScore(nn.Module):
    """qᵀ W k: d² parameters, one matrix product. W is `w_q.weight` transposed."""

    def __init__(self, d_model: int):
        super().__init__()
        self.w_q = nn.Linear(d_model, d_model, bias=False)

    def forward(self, q: Float[Tensor, "b n d"], k: Float[Tensor, "b m d"]) -> Float[Tensor, "b n m"]:
        return bilinear_scores(q, k, self.w_q.weight.T)


_SCORES = {"additive": AdditiveScore, "multiplicative": MultiplicativeScore}


class RecurrentModel(nn.Module):
    """Logits over the target vocabulary for each target position, given the earlier ones and the source.

    source_lengths: source tokens at and past source_lengths[b] are masked: the decoder starts from the state after
    each row's last real token, and padding gets no weight. A row of length 0 has a zero state and a zero context.
    Deep and bidirectional encoders pass the state of layer l to layer l of the decoder.
    """

    def __init__(self, spec: Recurrent):
        super().__init__()
        self.spec = spec
        d_model, cell = spec.d_model, _CELLS[spec.cell]
        between = spec.dropout if spec.layers > 1 else 0.0  # PyTorch warns of dropout with a single layer
        target_vocab = spec.vocab if spec.target_vocab is None else spec.target_vocab
        width = d_model // 2 if spec.bidirectional else d_model
        self.embed_source = nn.Embedding(spec.vocab, d_model)
        self.embed_target = nn.Embedding(target_vocab, d_model)
        self.encoder = cell(
            d_model, width, spec.layers, batch_first=True, dropout=between, bidirectional=spec.bidirectional
        )
        self.decoder = cell(d_model, d_model, spec.layers, batch_first=True, dropout=between)
        self.score = None if spec.attention == "none" else _SCORES[spec.attention](d_model)
        self.head = nn.Linear(d_model if self.score is None else 2 * d_model, target_vocab)
        self.dropout = nn.Dropout(spec.dropout)

    def forward(
        self,
        source: Int[Tensor, "b m"],
        target: Int[Tensor, "b n"],
        source_lengths: Int[Tensor, " b"] | None = None,
        return_weights: bool = False,
    ) -> Float[Tensor, "b n vocab"] | tuple[Float[Tensor, "b n vocab"], Float[Tensor, "b n m"]]:
        if return_weights and self.score is None:
            raise SpecError(
                f"{self.spec!r} has no attention, so it has no weights; call it without return_weights"
            )
        if len(source) != len(target):
            raise ShapeError(
                f"{len(source)} sources and {len(target)} targets; both need the same batch size"
            )
        logits, weights, _ = self._decode(target, self.encode(source, source_lengths), return_weights)
        if not return_weights:
            return logits
        assert weights is not None
        return logits, weights

    def encode(self, source: Int[Tensor, "b m"], source_lengths: Int[Tensor, " b"] | None = None) -> Encoded:
        """All states of the source, and the decoder's first state."""
        if source_lengths is None:
            memory, state = self.encoder(self.dropout(self.embed_source(source)))
            return Encoded(memory, self._concatenated(state), None)
        check_lengths(source_lengths, source)
        m = source.shape[1]
        embedded = self.embed_source(source.masked_fill(~_real(source_lengths, m), 0))
        # Packing refuses rows of length 0: such a row reads one token, and its state is set to zero afterwards.
        packed = pack_padded_sequence(
            self.dropout(embedded), source_lengths.clamp(min=1).cpu(), batch_first=True, enforce_sorted=False
        )
        padded, state = self.encoder(packed)
        memory, _ = pad_packed_sequence(padded, batch_first=True, total_length=m)
        empty = rearrange(source_lengths == 0, "b -> 1 b 1")
        state = _each(self._concatenated(state), lambda s: s.masked_fill(empty, 0.0))
        return Encoded(memory, state, source_lengths)

    def step(self, token: Int[Tensor, " b"], encoded: Encoded) -> tuple[Float[Tensor, "b vocab"], Encoded]:
        """Logits for the next token, and the state for the next step. Equals the full pass."""
        logits, _, state = self._decode(rearrange(token, "b -> b 1"), encoded, return_weights=False)
        return logits[:, 0], encoded._replace(state=state)

    def _decode(
        self, target: Int[Tensor, "b n"], encoded: Encoded, return_weights: bool
    ) -> tuple[Float[Tensor, "b n vocab"], Float[Tensor, "b n m"] | None, State]:
        states, state = self.decoder(self.dropout(self.embed_target(target)), encoded.state)
        weights, outputs = None, states
        if self.score is not None:
            context, weights = self._attend(states, encoded, return_weights)
            outputs = torch.cat([states, context], dim=-1)
        return self.head(self.dropout(outputs)), weights, state

    def _attend(
        self, states: Float[Tensor, "b n d"], encoded: Encoded, return_weights: bool
    ) -> tuple[Float[Tensor, "b n d"], Float[Tensor, "b n m"] | None]:
        """Σ_j weights_ij memory_j for each decoder state i. A source of length 0 gives zeros."""
        memory, lengths = encoded.memory, encoded.lengths
        if isinstance(self.score, MultiplicativeScore) and not return_weights:
            q, k = (rearrange(x, "b n d -> b 1 n d") for x in (self.score.w_q(states), memory))
            context = attention(q, k, k, lengths=lengths, scale=1.0)
            assert isinstance(context, Tensor)
            return rearrange(context, "b 1 n d -> b n d"), None
        assert self.score is not None
        allowed = None if lengths is None else rearrange(_real(lengths, memory.shape[1]), "b m -> b 1 m")
        weights = softmax(self.score(states, memory), allowed)
        return einsum(weights, memory, "b n m, b m d -> b n d"), weights

    def _concatenated(self, state: State) -> State:
        """Both directions of a layer concatenated: the decoder has half as many states of twice the width."""
        if not self.spec.bidirectional:
            return state
        # cuDNN needs a contiguous state.
        return _each(state, lambda s: rearrange(s, "(l two) b d -> l b (two d)", two=2).contiguous())


def _each(state: State, change: Callable[[Tensor], Tensor]) -> State:
    return (change(state[0]), change(state[1])) if isinstance(state, tuple) else change(state)


def _real(lengths: Int[Tensor, " b"], m: int) -> Bool[Tensor, "b m"]:
    return torch.arange(m, device=lengths.device) < rearrange(lengths, "b -> b 1")


def check_lengths(lengths: Int[Tensor, " b"], source: Int[Tensor, "b m"]) -> None:
    """Refuse lengths that are not one whole number per row of the source, from 0 to its width."""
    b, m = source.shape
    if tuple(lengths.shape) != (b,):
        raise ShapeError(
            f"source_lengths has shape {tuple(lengths.shape)}; one per batch row is needed: ({b},)"
        )
    if lengths.is_floating_point():
        raise ShapeError(
            f"source_lengths is {lengths.dtype}; whole numbers are needed: source_lengths.long()"
        )
    low, high = (int(lengths.min()), int(lengths.max())) if b else (0, 0)
    if low < 0 or high > m:
        raise ShapeError(f"source_lengths from {low} to {high} for a source of {m} tokens; use 0 … {m}")

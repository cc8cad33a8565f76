"""Conversion between PyTorch's attention modules and regard's: the same outputs, the same gradients.

    nn.MultiheadAttention         Attention
    nn.TransformerEncoderLayer    Block
    nn.TransformerDecoderLayer    Block with cross
    nn.TransformerEncoder         Encoder without embedding or head
    nn.TransformerDecoder         Decoder without embedding or head
    nn.Transformer                EncoderDecoder without embeddings or head

Three conventions differ, none of them in the weights:

- regard's modules take (b, n, d_model), always batch first; a PyTorch module may take (n, b, d_model).
- The pattern is declared in regard and passed at each call in PyTorch (`attn_mask`, `tgt_mask`).
- In regard True means "allowed"; in PyTorch's masks True means "excluded". Padding is `lengths` in regard.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..nn.attention import MultiHeadAttention
from ..nn.block import Block
from ..nn.stack import EncoderDecoder, Stack
from ..pattern import Pattern
from ..spec.base import require
from .torch_specs import READERS, declare, empty

OURS = (MultiHeadAttention, Block, Stack, EncoderDecoder)


def from_torch(module: nn.Module, *, pattern: Pattern | None = None) -> nn.Module:
    """regard's module with the weights of a PyTorch one; its `spec` is derived from the module.

    pattern: of the self-attention, which PyTorch gets only when called. By default, layers with
    cross-attention are causal and all others attend everywhere; for nn.Transformer it is the target's.
    Mode (train or eval), dtype, device and frozen weights are kept; the weights are copies.
    """
    _require_known(module, tuple(READERS), "from_torch")
    declared = declare(module, pattern)
    with torch.device("meta"):  # no initialization: the caller's random state is not changed
        ours = declared.build()
    pairs = list(_pairs(ours, module))
    _require_all(module, [pair.theirs for pair in pairs])
    for pair in pairs:
        pair.read()
    _zero_sinks(ours, next(module.parameters()))
    return ours.train(module.training)


def _zero_sinks(ours: nn.Module, like: Tensor) -> None:
    """add_zero_attn: a score of 0 that is not learned."""
    for part in ours.modules():
        if isinstance(part, MultiHeadAttention) and part.sink_logits is not None:
            zeros = torch.zeros(part.sink_logits.shape, dtype=like.dtype, device=like.device)
            part.sink_logits = nn.Parameter(zeros, requires_grad=False)


def to_torch(module: Any, *, batch_first: bool = True) -> nn.Module:
    """The PyTorch module with the weights of regard's; what PyTorch cannot express is an error that names it.

    A causal pattern is not carried over: pass `tgt_mask` or `attn_mask` at each call.
    Mode (train or eval), dtype, device and frozen weights are kept; the weights are copies.
    """
    _require_known(module, OURS, "to_torch")
    with torch.device("meta"):
        theirs = empty(module.spec, batch_first)
    pairs = list(_pairs(module, theirs))
    _require_all(module, [place for pair in pairs for place in pair.ours])
    for pair in pairs:
        pair.write()
    return theirs.train(module.training)


class Place(NamedTuple):
    """A parameter by the module that holds it and its name there."""

    module: Any
    name: str

    def get(self) -> nn.Parameter:
        found = getattr(self.module, self.name)
        require(
            isinstance(found, nn.Parameter),
            f"{self} is not an ordinary parameter (left out, pruned or parametrized); the copy needs one there",
        )
        return found

    def put(self, weight: Tensor, like: nn.Parameter) -> None:
        declared = tuple(self.get().shape)
        if weight.squeeze().shape == self.get().squeeze().shape:  # bias_k is (1, 1, d_model), ours (d_model,)
            weight = weight.reshape(declared)
        require(
            tuple(weight.shape) == declared,
            f"{self} takes {declared}, and the weight to copy is {tuple(weight.shape)}",
        )
        copied = weight.detach().clone(memory_format=torch.contiguous_format)
        setattr(self.module, self.name, nn.Parameter(copied, requires_grad=like.requires_grad))

    def __str__(self) -> str:
        return f"{type(self.module).__name__}.{self.name}"


class Pair(NamedTuple):
    """One parameter of PyTorch and that of regard, or the three that are stacked in it."""

    theirs: Place
    ours: tuple[Place, ...]

    def read(self) -> None:
        packed = self.theirs.get()
        for place, weight in zip(self.ours, packed.chunk(len(self.ours))):
            place.put(weight, like=packed)

    def write(self) -> None:
        parts = [place.get() for place in self.ours]
        require(
            len({p.requires_grad for p in parts}) == 1,
            f"w_q, w_k and w_v become one {self.theirs}, and only some are frozen; freeze all three or none",
        )
        packed = parts[0] if len(parts) == 1 else torch.cat([p.detach() for p in parts])
        self.theirs.put(packed, like=parts[0])


def _pairs(ours: Any, theirs: Any) -> Iterator[Pair]:
    """The corresponding weights, for both directions."""
    match ours:
        case EncoderDecoder():
            yield from _pairs(ours.encoder, theirs.encoder)
            yield from _pairs(ours.decoder, theirs.decoder)
        case Stack():
            for block, layer in zip(ours.blocks, theirs.layers):
                yield from _pairs(block, layer)
            if theirs.norm is not None:
                yield from _pairs(ours.norm, theirs.norm)
        case Block():
            for part, other in _parts(ours, theirs):
                yield from _pairs(part, other)
        case MultiHeadAttention():
            yield from _attention_pairs(ours, theirs)
        case nn.Linear() | nn.LayerNorm() | nn.RMSNorm():
            for name in ("weight", "bias"):
                if getattr(ours, name, None) is not None:
                    yield Pair(Place(theirs, name), (Place(ours, name),))


def _parts(ours: Any, theirs: Any) -> Iterator[tuple[nn.Module, nn.Module]]:
    yield ours.attention, theirs.self_attn
    yield ours.attention_norm, theirs.norm1
    if ours.spec.cross is not None:
        yield ours.cross, theirs.multihead_attn
        yield ours.cross_norm, theirs.norm2
    yield ours.feed_forward.w_in, theirs.linear1
    yield ours.feed_forward.w_out, theirs.linear2
    yield ours.feed_forward_norm, theirs.norm2 if ours.spec.cross is None else theirs.norm3


def _attention_pairs(ours: MultiHeadAttention, theirs: nn.MultiheadAttention) -> Iterator[Pair]:
    """in_proj_weight is w_q over w_k over w_v; with a context of another width there are three weights."""
    three = (ours.w_q, ours.w_k, ours.w_v)
    if theirs.in_proj_weight is not None:
        yield Pair(Place(theirs, "in_proj_weight"), tuple(Place(w, "weight") for w in three))
    else:
        for w, name in zip(three, ("q_proj_weight", "k_proj_weight", "v_proj_weight")):
            yield Pair(Place(theirs, name), (Place(w, "weight"),))
    if ours.extra_k is not None:
        yield Pair(Place(theirs, "bias_k"), (Place(ours, "extra_k"),))
        yield Pair(Place(theirs, "bias_v"), (Place(ours, "extra_v"),))
    if ours.spec.biases == "all":
        yield Pair(Place(theirs, "in_proj_bias"), tuple(Place(w, "bias") for w in three))
    yield from _pairs(ours.w_o, theirs.out_proj)


def _require_known(module: nn.Module, known: tuple[type, ...], who: str) -> None:
    *most, last = [t.__name__ for t in known]
    require(
        type(module) in known,
        f"{who} takes {', '.join(most)} or {last}, not {type(module).__name__} "
        f"(nor a subclass: it may compute something else)",
    )
    modes = {part.training for part in module.modules()}
    require(
        len(modes) == 1,
        "some parts are in training mode and some are not; call train() or eval() on the whole",
    )


def _require_all(module: nn.Module, places: Iterable[Place]) -> None:
    """Every weight is copied, and each one once: copies of a shared weight would drift apart."""
    seen: dict[int, Place] = {}
    for place in places:
        before = seen.setdefault(id(place.get()), place)
        require(
            before is place,
            f"{before} and {place} are one shared weight, and the copy would hold two; untie them",
        )
    left = [name for name, weight in module.named_parameters() if id(weight) not in seen]
    require(not left, f"{', '.join(left)}: the copy has no place for this; take it off first")

"""Declared counts compared with actual ones: the module's parameters and FLOPs measured by PyTorch."""

from dataclasses import replace
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from .. import spec
from ..costs.entry import cost
from ..nn.example_inputs import example_inputs
from ..pattern import full
from ..pattern.grid import grid_size
from .target import Part

N, M, B = 13, 11, 2


def counts_of(declared: spec.Spec, name: str | None = None) -> Part:
    """A spec as a target of the law of counts: rows (quantity, declared, actual), integers."""

    def call() -> list[tuple[str, int, int]]:
        priced = cost(declared, batch=B, **_lengths(declared))
        with torch.device("meta"):
            module = declared.build()
        rows = [("parameters", priced.parameters, sum(p.numel() for p in module.parameters()))]
        if _is_dense(declared):
            rows.append(("FLOPs of matrix products", priced.flops, _executed_flops(module, declared)))
        if isinstance(declared, spec.Attention) and declared.d_k is None and declared.d_v is None:
            if declared.pattern.differs_by_head:  # a pattern of this number of heads only
                return rows
            for heads in (1, 2):
                other = cost(replace(declared, heads=heads, kv_heads=None), batch=B, **_lengths(declared))
                full_heads = cost(replace(declared, kv_heads=None), batch=B, **_lengths(declared))
                rows.append((f"FLOPs with {heads} heads", full_heads.flops, other.flops))
        return rows

    return Part(name or repr(declared), "counts", call)


def _lengths(declared: spec.Spec) -> dict[str, Any]:
    match declared:
        case spec.Vision():
            return {}
        case spec.EncoderDecoder():
            return {"n": N, "m": M}
    attentions = [declared.attention] if isinstance(declared, spec.Block) else _attentions(declared)
    sizes = [grid_size(a.pattern) for a in attentions]
    return {"n": next((size for size in sizes if size is not None), N)}


def _blocks(declared: spec.Spec) -> list[Any]:
    match declared:
        case spec.EncoderDecoder():
            return [declared.encoder.block, declared.decoder.block]
        case spec.Encoder() | spec.Decoder():
            return [declared.block]
        case spec.Vision():
            return [declared.encoder.block]
    return []


def _is_dense(declared: spec.Spec) -> bool:
    """Whether every attention is full; with a pattern, the executed dense products exceed the counted ones."""
    attentions = _attentions(declared)
    return bool(attentions) and all(isinstance(a.pattern, full) for a in attentions)


def _attentions(declared: spec.Spec) -> list[spec.Attention]:
    return [declared] if isinstance(declared, spec.Attention) else [b.attention for b in _blocks(declared)]


def _executed_flops(module: torch.nn.Module, declared: spec.Spec) -> int:
    """The FLOPs of one call on the meta device, where attention runs as plain matrix products."""
    lengths = {"n": N, "m": N} | _lengths(declared)
    inputs = [x.to("meta") for x in example_inputs(declared, **lengths, batch=B)]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module.eval()(*inputs)
    return counter.get_total_flops()


def counted_specs() -> tuple[Part, ...]:
    """One small spec of each kind."""
    mlp = spec.FeedForward(24)
    block = spec.Block(spec.Attention(12, heads=3), mlp)
    return (
        counts_of(spec.Attention(12, heads=4)),
        counts_of(spec.Attention(12, heads=4, kv_heads=2, biases="output")),
        counts_of(spec.Encoder(block, 2, embedding=spec.Embedding(30, 12)), "Encoder, 2 layers 12 wide"),
        counts_of(spec.preset("tiny-gpt"), "tiny-gpt"),
        counts_of(spec.preset("tiny-vit"), "tiny-vit"),
    )

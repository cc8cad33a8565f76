"""Declarations whose counts are compared with the tensors made and the products that PyTorch's own counter sees."""

from dataclasses import replace
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from .. import spec
from ..costs.entry import cost
from ..pattern import full
from .target import Part

N, M, B = 13, 11, 2


def counts_of(declared: spec.Spec, name: str | None = None) -> Part:
    """The law's part of a declaration: (what, declared, found), whole numbers."""

    def call() -> list[tuple[str, int, int]]:
        told = cost(declared, batch=B, **_lengths(declared))
        with torch.device("meta"):
            module = declared.build()
        rows = [("parameters", told.parameters, sum(p.numel() for p in module.parameters()))]
        if _sees_all(declared):
            rows.append(("FLOPs of matrix products", told.flops, _executed(module, declared)))
        if isinstance(declared, spec.Attention) and declared.d_k is None and declared.d_v is None:
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
    return {"n": N}


def _blocks(declared: spec.Spec) -> list[Any]:
    match declared:
        case spec.EncoderDecoder():
            return [declared.encoder.block, declared.decoder.block]
        case spec.Encoder() | spec.Decoder():
            return [declared.block]
        case spec.Vision():
            return [declared.encoder.block]
    return []


def _sees_all(declared: spec.Spec) -> bool:
    """Whether no pattern leaves pairs out: else the decomposed path computes more than is needed."""
    attentions = (
        [declared] if isinstance(declared, spec.Attention) else [b.attention for b in _blocks(declared)]
    )
    return bool(attentions) and all(isinstance(a.pattern, full) for a in attentions)


def _executed(module: torch.nn.Module, declared: spec.Spec) -> int:
    """On the meta device attention runs as plain matrix products, which the counter sees."""
    with torch.device("meta"):
        match declared:
            case spec.Attention():
                given = [torch.zeros(B, N, declared.d_model)]
            case spec.Vision():
                given = [torch.zeros(B, declared.channels, *declared.image)]
            case spec.EncoderDecoder():
                given = [torch.zeros(B, M, dtype=torch.long), torch.zeros(B, N, dtype=torch.long)]
            case spec.Encoder(embedding=None):
                given = [torch.zeros(B, N, declared.d_model)]
            case _:
                given = [torch.zeros(B, N, dtype=torch.long)]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module.eval()(*given)
    return counter.get_total_flops()


def counted_specs() -> tuple[Part, ...]:
    """Small declarations of each kind."""
    mlp = spec.FeedForward(24)
    block = spec.Block(spec.Attention(12, heads=3), mlp)
    return (
        counts_of(spec.Attention(12, heads=4)),
        counts_of(spec.Attention(12, heads=4, kv_heads=2, biases="output")),
        counts_of(spec.Encoder(block, 2, embedding=spec.Embedding(30, 12)), "Encoder, 2 layers 12 wide"),
        counts_of(spec.preset("tiny-gpt"), "tiny-gpt"),
        counts_of(spec.preset("tiny-vit"), "tiny-vit"),
    )

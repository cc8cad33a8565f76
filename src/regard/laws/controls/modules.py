"""Small explicit modules on which the laws of models are tested, in correct and faulty variants."""

from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from ... import reference
from ...position import sinusoid
from ..target import Model, Projections


class SmallAttention(nn.Module):
    """Two heads of width 3 on d_model = 6. split: how columns become heads; fault: an error to make."""

    def __init__(self, split: str = "n (h d) -> h n d", positions: bool = False, fault: str = ""):
        super().__init__()
        self.split, self.positions, self.fault = split, positions, fault
        self.w_q, self.w_k, self.w_v, self.w_o = (nn.Linear(6, 6) for _ in range(4))

    def forward(
        self,
        x: Float[Tensor, "b n 6"],
        context: Float[Tensor, "b m 6"] | None = None,
        allowed: Tensor | None = None,
        causal: bool = False,
        lengths: Int[Tensor, " b"] | None = None,
    ) -> Float[Tensor, "b n 6"]:
        if self.positions:
            x = x + 3.0 * sinusoid(torch.arange(x.shape[1]), 6).to(x.dtype)
        source = x if context is None else context
        parts = ((self.w_q, x), (self.w_k, source), (self.w_v, source))
        q, k, v = (rearrange(w(s), f"b {self.split.replace('->', '-> b')}", h=2) for w, s in parts)
        visible = torch.ones(x.shape[1], source.shape[1], dtype=torch.bool)
        if causal and self.fault != "attends to the future":
            visible = visible.tril()
        if lengths is not None and self.fault != "attends to padding":
            visible = visible & (torch.arange(source.shape[1]) < lengths[:, None, None, None])
        if allowed is not None:
            visible = visible & allowed[:, None]
        if self.fault == "mixes the batch":
            k = k + 1e-3 * k.mean(0, keepdim=True)
        o = reference.attend(q, k, v, visible).o
        if self.fault == "dropout in evaluation":
            o = nn.functional.dropout(o, 0.1, training=True)
        return self.w_o(rearrange(o, "b h n d -> b n (h d)"))


def small_attention(name: str, seed: int = 0, **faults: Any) -> Model:
    """The small attention as a target; a faulty one makes the same claims as the correct one."""
    torch.manual_seed(seed)
    module = SmallAttention(**faults)

    def call(module, x, context=None, **options):
        return module(x, context, **options)

    def projections(module) -> Projections:
        def heads(w: Tensor, out: bool = False) -> Tensor:
            return rearrange(w, "e (h d) -> h d e" if out else "(h d) e -> h e d", h=2)

        b_q, b_k, b_v = (
            rearrange(getattr(module, w).bias, "(h d) -> h d", h=2) for w in ("w_q", "w_k", "w_v")
        )
        return Projections(
            heads(module.w_q.weight),
            heads(module.w_k.weight),
            heads(module.w_v.weight),
            heads(module.w_o.weight, out=True),
            b_q,
            b_k,
            b_v,
            module.w_o.bias,
        )

    return Model(
        name,
        module,
        call,
        d_model=6,
        heads=2,
        projections=projections,
        claims=frozenset({"mask", "causal", "lengths", "context", "float64", "float32", "grad"}),
        lacks=frozenset({"positions", "always causal"}),
    )


class SmallDecoder(nn.Module):
    """A language model of one causal layer with a small vocabulary and a cache. fault: an error to make."""

    def __init__(self, vocab: int = 5, fault: str = "", pre_norm: bool = True):
        super().__init__()
        self.fault, self.pre_norm = fault, pre_norm
        self.table, self.attention = nn.Embedding(vocab, 6), SmallAttention()
        self.norm, self.mlp, self.out = nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, vocab)

    def embed(self, x: Int[Tensor, "b n"], start: int = 0) -> Float[Tensor, "b n 6"]:
        positions = torch.arange(x.shape[1]) + (0 if self.fault == "restarts positions" else start)
        return self.table(x) + sinusoid(positions, 6).to(self.table.weight.dtype)

    def forward(
        self,
        x: Int[Tensor, "b n"],
        past: list[Tensor] | None = None,
        documents: Int[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b n vocab"]:
        start = past[0].shape[1] if past else 0
        e = self.embed(x, start)
        if past is not None:
            past[:] = [torch.cat([*past, e], 1)]
        source = e if past is None else past[0]
        n, m = x.shape[1], source.shape[1]
        visible = torch.ones(n, m, dtype=torch.bool)
        if self.fault != "attends to the future":
            visible = visible.tril(m - n)
        allowed = visible.expand(len(x), n, m)
        if documents is not None and self.fault != "mixes documents":
            allowed = allowed & (documents[:, :, None] == documents[:, None])
        y = e + self.attention(self.norm(e), self.norm(source), allowed=allowed)
        return self.out(y + self.mlp(self.norm(y)).relu())


def small_decoder(name: str, fault: str = "", seed: int = 0, vocab: int = 5) -> Model:
    """The small language model as a target."""
    torch.manual_seed(seed)

    def call(module, x, *, documents=None):
        return module(x, documents=documents)

    return Model(
        name,
        SmallDecoder(vocab, fault),
        call,
        architecture="decoder",
        vocab=vocab,
        layers=1,
        make_cache=lambda module, b, context=None: [],
        decode=lambda module, x, cache: module(x, past=cache),
        claims=frozenset({"always causal", "positions", "cache", "float64", "float32", "grad"}),
    )

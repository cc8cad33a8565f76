"""Attention as a traced module calls it: a stand-in for each fused call, with its pairs and its memory."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ..tree import Amounts, Pairs

FUSED = "scaled_dot_product_attention"


class Visible(NamedTuple):
    """The pairs of one call over all heads and rows: needed by its mask, computed by its kernel, and n · m."""

    needed: int
    computed: int
    full: int
    mask: str


@dataclass(frozen=True)
class Call:
    """One fused attention: its sizes and its pairs."""

    heads: int  # of all rows together
    n: int
    m: int
    d_k: int
    d_v: int
    pairs: Visible

    def forward(self, itemsize: int) -> Amounts:
        """Two products: 2 d_k a score, 2 d_v a weighted value."""
        per_pair = 2 * (self.d_k + self.d_v)
        rows = self.n * (self.d_k + self.d_v) + self.m * (self.d_k + self.d_v)
        return Amounts(
            operations=self.pairs.needed * per_pair,
            other=6 * self.pairs.needed - 2 * self.heads * self.n,  # scale, and softmax: 5m − 2 a row
            executed=self.pairs.computed * per_pair,
            bytes=itemsize * self.heads * rows,
        )

    def backward(self) -> Amounts:
        """Four products, and the scores once more, which a fused kernel does not keep."""
        twice = 4 * (self.d_k + self.d_v)
        again = 2 * self.d_k
        return Amounts(
            backward=twice * self.pairs.needed, executed_backward=(twice + again) * self.pairs.computed
        )

    def told(self, where: str) -> Pairs:
        p, each = self.pairs, max(1, self.heads)
        return Pairs(where, p.mask, p.needed // each, p.computed // each, p.full // each, "fused")


def visible(q: Tensor, k: Tensor, mask: Tensor | None, real: Tensor | None, causal: bool) -> Visible:
    """`real`: the values of the mask, where they are known. Of a bool, True = may look; of a number, −∞ = may not."""
    n, m = q.shape[-2], k.shape[-2]
    heads = q.shape[:-2].numel()
    full = heads * n * m
    if causal:  # aligned to the first key: row i sees keys 0 … i
        square = min(n, m)
        one = square * (square + 1) // 2 + max(0, n - m) * m
        return Visible(heads * one, heads * one, full, "causal")
    if mask is None:
        return Visible(full, full, full, "none")
    if real is None:
        return Visible(full, full, full, "a mask whose values are not known: charged in full")
    allowed = real if real.dtype == torch.bool else real > torch.finfo(torch.float32).min / 2
    share = full // max(1, allowed.numel())  # a mask is repeated over heads and rows
    return Visible(int(allowed.sum()) * share, full, full, "mask")


class Core(torch.autograd.Function):
    """Fused attention without its arithmetic: the result, what it saves, and gradients of the right sizes."""

    @staticmethod
    def forward(ctx, q, k, v, trace, call, tables):
        b, h, n = q.shape[0], q.shape[-3], q.shape[-2]
        out = q.new_empty(*q.shape[:-3], n, h, v.shape[-1]).transpose(-3, -2)
        lse = q.new_empty(b, h, n, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
        kept = [q.new_empty(*q.shape[:-1], k.shape[-2]) for _ in range(tables)]
        ctx.save_for_backward(q, k, v, out, lse, *kept)
        ctx.trace, ctx.call, ctx.place = trace, call, trace.where
        return out

    @staticmethod
    def backward(ctx, *grads):
        saved = ctx.saved_tensors
        ctx.trace.add(FUSED, ctx.call.backward(), ctx.place)
        return (*(torch.empty_like(x) for x in saved[:3]), None, None, None)


def attend(
    trace: Any,
    q: Float[Tensor, "*h n d_k"],
    k: Float[Tensor, "*h_kv m d_k"],
    v: Float[Tensor, "*h_kv m d_v"],
    pairs: Visible,
    tables: int = 0,
) -> Float[Tensor, "*h n d_v"]:
    """One call, counted. `tables`: how many n × m tables it keeps; a fused kernel keeps none."""
    heads = q.shape[:-2].numel()
    call = Call(heads, q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1], pairs)
    trace.add(FUSED, call.forward(q.element_size()))
    trace.pairs.append(call.told(trace.where))
    lifted = q if q.dim() >= 4 else q[(None,) * (4 - q.dim())]
    out = Core.apply(lifted, k, v, trace, call, tables)
    return out.reshape(*q.shape[:-1], v.shape[-1]) if q.dim() < 4 else out


def sdpa(trace: Any) -> Any:
    """A stand-in for F.scaled_dot_product_attention."""

    def scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=None,
        dropout_p=0.0,
        is_causal=False,
        scale=None,
        enable_gqa=False,
    ):
        real = None if attn_mask is None else trace.value_of(attn_mask)
        if not query.is_meta:
            query, key, value = (trace.to_meta(x) for x in (query, key, value))
        stored = 3 if dropout_p and trace.device == "cpu" else 0  # weights, noise, and weights times noise
        pairs = visible(query, key, attn_mask, real, is_causal)
        return attend(trace, query, key, value, pairs, stored)

    return scaled_dot_product_attention


def flex(trace: Any) -> Any:
    """A stand-in for flex_attention: the pairs its block mask computes, and those its function needs."""

    def flex_attention(query, key, value, score_mod=None, block_mask=None, *_, return_lse=False, **__):
        heads, n, m = query.shape[:-2].numel(), query.shape[-2], key.shape[-2]
        full = heads * n * m
        if block_mask is None:
            pairs = Visible(full, full, full, "none")
        else:
            computed = _blocks(block_mask, heads, n, m)
            needed, told = _needed(block_mask, heads, n, m)
            pairs = Visible(computed if needed is None else needed, computed, full, told)
        out = attend(trace, query, key, value, pairs)
        return (out, query.new_empty(query.shape[:-1], dtype=torch.float32)) if return_lse else out

    return flex_attention


def _blocks(mask: Any, heads: int, n: int, m: int) -> int:
    """Pairs in the blocks that a block mask keeps, over all heads and rows."""
    kept = mask.kv_num_blocks.sum()
    if mask.full_kv_num_blocks is not None:
        kept = kept + mask.full_kv_num_blocks.sum()
    rows = mask.kv_num_blocks.shape[0] * mask.kv_num_blocks.shape[1]
    height, width = mask.BLOCK_SIZE
    return min(int(kept) * height * width * heads // max(1, rows), heads * n * m)


def _needed(mask: Any, heads: int, n: int, m: int) -> tuple[int | None, str]:
    """Pairs for which its function says yes, where they are few enough to ask one by one."""
    name = getattr(mask.mask_mod, "__name__", "mask_mod")
    if n * m > 1 << 24:
        return None, f"{name}: too many pairs to ask, charged by blocks"
    device = mask.kv_num_blocks.device
    rows, columns = torch.arange(n, device=device)[:, None], torch.arange(m, device=device)[None, :]
    b, h = mask.kv_num_blocks.shape[:2]
    zero = torch.zeros((), dtype=torch.long, device=device)
    said = sum(
        int(mask.mask_mod(zero + i, zero + j, rows, columns).sum()) for i in range(b) for j in range(h)
    )
    return said * heads // max(1, b * h), name


def encoder_layer(trace: Any, args: tuple, kwargs: dict) -> Tensor:
    """torch._transformer_encoder_layer_fwd, the fast path of nn.TransformerEncoderLayer: all of it in one call."""
    src, width, heads, qkv, qkv_bias, out, out_bias = args[:7]
    norm1_w, norm1_b, norm2_w, norm2_b, w1, b1, w2, b2 = args[10:18]  # after gelu, norm_first and eps
    mask = args[18] if len(args) > 18 else kwargs.get("mask")
    x = fused_attention(trace, (src, src, src, width, heads, qkv, qkv_bias, out, out_bias, mask), {})[0]
    x = F.layer_norm(x, (width,), norm1_w, norm1_b)
    return F.layer_norm(F.linear(F.relu(F.linear(x, w1, b1)), w2, b2), (width,), norm2_w, norm2_b)


def fused_attention(trace: Any, args: tuple, kwargs: dict) -> tuple[Tensor, Tensor | None]:
    """torch._native_multi_head_attention, the fast path of nn.MultiheadAttention."""
    query, key, value, width, heads, qkv, qkv_bias, out, out_bias, *rest = args
    mask = rest[0] if rest else kwargs.get("mask")
    q, k, v = (
        F.linear(x, w, b).unflatten(-1, (heads, width // heads)).transpose(1, 2)
        for x, w, b in zip((query, key, value), qkv.chunk(3), qkv_bias.chunk(3))
    )
    real = None if mask is None else trace.value_of(mask)
    hidden = None if real is None else ~real.bool() if real.dim() > 2 else ~real.bool()[:, None, None, :]
    pairs = visible(q, k, mask, hidden, False)
    o = attend(trace, q, k, v, pairs).transpose(1, 2).flatten(-2)
    return F.linear(o, out, out_bias), None

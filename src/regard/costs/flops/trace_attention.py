"""Replacements for the fused attention calls of a traced module, which count their pairs, FLOPs and memory."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ..tree import Amounts, Pairs

FUSED = "scaled_dot_product_attention"
MAX_MASK_PAIRS = 1 << 24  # a mask_mod is evaluated up to this size


class CallPairs(NamedTuple):
    """The pairs of one call over all heads and batch rows: allowed by its mask, computed by its kernel, and n · m."""

    needed: int
    computed: int
    full: int
    mask: str


@dataclass(frozen=True)
class Call:
    """One fused attention call: its sizes and its pairs."""

    heads: int  # over all batch rows
    n: int
    m: int
    d_k: int
    d_v: int
    pairs: CallPairs

    def forward(self, itemsize: int) -> Amounts:
        """Two products: 2 d_k per score, 2 d_v per weighted value."""
        per_pair = 2 * (self.d_k + self.d_v)
        rows = self.n * (self.d_k + self.d_v) + self.m * (self.d_k + self.d_v)
        return Amounts(
            flops=self.pairs.needed * per_pair,
            elementwise_flops=6 * self.pairs.needed
            - 2 * self.heads * self.n,  # scale 1, softmax 5m − 2 per row
            executed_flops=self.pairs.computed * per_pair,
            bytes=itemsize * self.heads * rows,
        )

    def backward(self) -> Amounts:
        """Four products, and the scores once more, which a fused kernel does not save."""
        gradients = 4 * (self.d_k + self.d_v)
        scores = 2 * self.d_k
        return Amounts(
            backward_flops=gradients * self.pairs.needed,
            executed_backward_flops=(gradients + scores) * self.pairs.computed,
        )

    def per_head(self, path: str) -> Pairs:
        p, heads = self.pairs, max(1, self.heads)
        return Pairs(path, p.mask, p.needed // heads, p.computed // heads, p.full // heads, "fused")


def call_pairs(q: Tensor, k: Tensor, mask: Tensor | None, real: Tensor | None, causal: bool) -> CallPairs:
    """`real`: the values of the mask if they are known. In a bool mask True is allowed; in a float mask −∞ is not."""
    n, m = q.shape[-2], k.shape[-2]
    heads = q.shape[:-2].numel()
    full = heads * n * m
    if causal:  # aligned to the first key: query i may attend to keys 0 … i
        square = min(n, m)
        one = square * (square + 1) // 2 + max(0, n - m) * m
        return CallPairs(heads * one, heads * one, full, "causal")
    if mask is None:
        return CallPairs(full, full, full, "none")
    if real is None:
        return CallPairs(full, full, full, "a mask with unknown values: all pairs are counted")
    allowed = real if real.dtype == torch.bool else real > torch.finfo(torch.float32).min / 2
    repeats = full // max(1, allowed.numel())  # the mask is broadcast over heads and batch rows
    return CallPairs(int(allowed.sum()) * repeats, full, full, "mask")


class FusedAttention(torch.autograd.Function):
    """Fused attention without arithmetic: allocates the result, what is saved, and gradients of the right sizes."""

    @staticmethod
    def forward(ctx, q, k, v, trace, call, tables):
        b, h, n = q.shape[0], q.shape[-3], q.shape[-2]
        out = q.new_empty(*q.shape[:-3], n, h, v.shape[-1]).transpose(-3, -2)
        lse = q.new_empty(b, h, n, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
        stored = [q.new_empty(*q.shape[:-1], k.shape[-2]) for _ in range(tables)]
        ctx.save_for_backward(q, k, v, out, lse, *stored)
        ctx.trace, ctx.call, ctx.path = trace, call, trace.path
        return out

    @staticmethod
    def backward(ctx, *grads):
        saved = ctx.saved_tensors
        ctx.trace.add(FUSED, ctx.call.backward(), ctx.path)
        return (*(torch.empty_like(x) for x in saved[:3]), None, None, None)


def count_attention(
    trace: Any,
    q: Float[Tensor, "*h n d_k"],
    k: Float[Tensor, "*h_kv m d_k"],
    v: Float[Tensor, "*h_kv m d_v"],
    pairs: CallPairs,
    tables: int = 0,
) -> Float[Tensor, "*h n d_v"]:
    """One attention call, counted. `tables`: the number of n × m tables it saves; a fused kernel saves none."""
    heads = q.shape[:-2].numel()
    call = Call(heads, q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1], pairs)
    trace.add(FUSED, call.forward(q.element_size()))
    trace.pairs.append(call.per_head(trace.path))
    batched = q if q.dim() >= 4 else q[(None,) * (4 - q.dim())]
    out = FusedAttention.apply(batched, k, v, trace, call, tables)
    return out.reshape(*q.shape[:-1], v.shape[-1]) if q.dim() < 4 else out


def sdpa(trace: Any) -> Any:
    """The replacement for F.scaled_dot_product_attention."""

    def scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=None,
        dropout_p=0.0,
        is_causal=False,
        **_,  # scale and enable_gqa do not change the cost
    ):
        real = None if attn_mask is None else trace.value_of(attn_mask)
        if not query.is_meta:
            query, key, value = (trace.to_meta(x) for x in (query, key, value))
        tables = 3 if dropout_p and trace.device == "cpu" else 0  # weights, dropout mask, and their product
        pairs = call_pairs(query, key, attn_mask, real, is_causal)
        return count_attention(trace, query, key, value, pairs, tables)

    return scaled_dot_product_attention


def flex(trace: Any) -> Any:
    """The replacement for flex_attention: the pairs that its block mask computes, and that its mask_mod allows."""

    def flex_attention(query, key, value, score_mod=None, block_mask=None, *_, return_lse=False, **__):
        heads, n, m = query.shape[:-2].numel(), query.shape[-2], key.shape[-2]
        full = heads * n * m
        if block_mask is None:
            pairs = CallPairs(full, full, full, "none")
        else:
            computed = _block_pairs(block_mask, heads, n, m)
            needed, mask = _allowed_pairs(block_mask, heads, n, m)
            pairs = CallPairs(computed if needed is None else needed, computed, full, mask)
        out = count_attention(trace, query, key, value, pairs)
        return (out, query.new_empty(query.shape[:-1], dtype=torch.float32)) if return_lse else out

    return flex_attention


def _block_pairs(mask: Any, heads: int, n: int, m: int) -> int:
    """Pairs in the blocks that a block mask visits, over all heads and batch rows."""
    blocks = mask.kv_num_blocks.sum()
    if mask.full_kv_num_blocks is not None:
        blocks = blocks + mask.full_kv_num_blocks.sum()
    rows = mask.kv_num_blocks.shape[0] * mask.kv_num_blocks.shape[1]
    height, width = mask.BLOCK_SIZE
    return min(int(blocks) * height * width * heads // max(1, rows), heads * n * m)


def _allowed_pairs(mask: Any, heads: int, n: int, m: int) -> tuple[int | None, str]:
    """The number of pairs that mask_mod allows, or None if there are too many to evaluate; and its name."""
    name = getattr(mask.mask_mod, "__name__", "mask_mod")
    if n * m > MAX_MASK_PAIRS:
        return None, f"{name}: too many pairs to evaluate, counted by blocks"
    device = mask.kv_num_blocks.device
    rows, columns = torch.arange(n, device=device)[:, None], torch.arange(m, device=device)[None, :]
    b, h = mask.kv_num_blocks.shape[:2]
    zero = torch.zeros((), dtype=torch.long, device=device)
    allowed = sum(
        int(mask.mask_mod(zero + i, zero + j, rows, columns).sum()) for i in range(b) for j in range(h)
    )
    return allowed * heads // max(1, b * h), name


def encoder_layer(trace: Any, args: tuple, kwargs: dict) -> Tensor:
    """torch._transformer_encoder_layer_fwd, the fast path of nn.TransformerEncoderLayer, as its single steps."""
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
    allowed = None if real is None else ~real.bool() if real.dim() > 2 else ~real.bool()[:, None, None, :]
    pairs = call_pairs(q, k, mask, allowed, False)
    o = count_attention(trace, q, k, v, pairs).transpose(1, 2).flatten(-2)
    return F.linear(o, out, out_bias), None

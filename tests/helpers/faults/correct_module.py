"""A correct multi-head attention with grouped heads, rotary positions, a cache, padding, documents and dropout."""

import torch
import torch.nn.functional as F
from torch import nn

from faults.correct_attention import attention


class Attention(nn.Module):
    """concat_h softmax(Q_h K_hᵀ/√d_k) V_h · W_O; causal and rotary if requested."""

    def __init__(self, d_model=24, heads=4, kv_heads=2, causal=False, rotary=False, dropout=0.0):
        super().__init__()
        self.heads, self.kv_heads, self.d_k = heads, kv_heads, d_model // heads
        self.causal, self.rotary, self.dropout = causal, rotary, dropout
        self.w_q = nn.Linear(d_model, heads * self.d_k)
        self.w_k = nn.Linear(d_model, kv_heads * self.d_k)
        self.w_v = nn.Linear(d_model, kv_heads * self.d_k)
        self.w_o = nn.Linear(heads * self.d_k, d_model)

    def forward(self, x, context=None, *, lengths=None, allowed=None, documents=None, cache=None, shift=0):
        source = x if context is None else context
        q, k, v = self.split(self.w_q(x)), self.split(self.w_k(source)), self.split(self.w_v(source))
        start = shift if not cache else cache["k"].shape[2]
        if self.rotary:
            q, k = rotate(q, start), rotate(k, start)
        if cache is not None:
            k, v = extend(cache, k, v)
        allowed = None if allowed is None else allowed[:, None]
        o = attention(q, k, v, allowed=allowed, causal=self.causal, lengths=lengths, documents=documents)
        o = F.dropout(o, self.dropout, self.training)
        return self.w_o(self.join(o))

    def split(self, x):
        return x.unflatten(-1, (-1, self.d_k)).transpose(1, 2)

    def join(self, o):
        return o.transpose(1, 2).flatten(2)


def extend(cache, k, v):
    if cache:
        k, v = torch.cat([cache["k"], k], 2), torch.cat([cache["v"], v], 2)
    cache["k"], cache["v"] = k, v
    return k, v


def rotate(x, start=0):
    """Pairs of columns rotated by position · frequency."""
    n, d = x.shape[-2:]
    frequency = 100.0 ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    angle = torch.outer(torch.arange(start, start + n, dtype=torch.float64), frequency)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)

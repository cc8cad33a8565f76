"""Shared by the tests of the CPU tiles: patterns, tensors, the formula, and the error rule."""

from math import inf

import torch

from regard.engine.cpu import tiles
from regard.engine.cpu.strided_layout import layout
from regard.pattern import (
    blocks,
    causal,
    dilated,
    every,
    full,
    prefix,
    query_offset,
    rows,
    sinks,
    strided,
    window,
)

WORDS = [
    full(),
    causal(),
    window(5),
    window(9, 2),
    dilated(3, 4),
    every(7, 2),
    strided(6),
    rows(8, 3),
    sinks(3),
    prefix(20),
    blocks(12),
]
MIXED = [
    window(8) | every(16),
    causal() & (window(9) | every(8)),
    causal() & strided(8),
    window(4) | strided(16),
    window(6) | sinks(2),
    causal() | prefix(30),
    window(20) - every(5),
    window(3) | every(10) | every(15, 4),
    rows(16) | window(5),
    full() - window(30),
    sinks(0),
]


def small(pattern, n, m=None, at=None, tile=8):
    """A layout whose tiles are small, so that n = 101 has many of them."""
    m = n if m is None else m
    return layout(pattern, n, m, *query_offset(pattern, n, m, at), narrow=tile, wide=tile)


def tensors(b=2, h=2, h_kv=2, n=101, m=None, d_k=5, d_v=3, dtype=torch.float64, seed=0):
    m = n if m is None else m
    g = torch.Generator().manual_seed(seed)
    shapes = (b, h, n, d_k), (b, h_kv, m, d_k), (b, h_kv, m, d_v)
    return [torch.randn(s, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def attend(q, k, v, laid, scale, lengths=None):
    """Over the pairs of a layout."""
    return tiles.attend(q, k, v, tiles.TileAttention((laid,), scale, lengths=lengths))


def formula(q, k, v, allowed, scale):
    """softmax over the allowed pairs, and ln Σ exp; an empty row is zeros and −∞, without gradient."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    empty = ~allowed.any(-1, keepdim=True)
    scores = (q @ k.mT * scale).masked_fill(~(allowed | empty), -inf)
    o = scores.softmax(-1).masked_fill(empty, 0.0) @ v
    wide = scores if scores.dtype == torch.float64 else scores.float()
    return o, wide.logsumexp(-1).masked_fill(empty.squeeze(-1), -inf)


def with_gradients(f, *inputs):
    """o, lse, and the gradients of Σ c·o + Σ c'·lse (over finite lse)."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    o, lse = f(*inputs)
    g = torch.Generator().manual_seed(9)
    c = torch.randn(o.shape, generator=g, dtype=torch.float64).to(o.dtype)
    c_lse = torch.randn(lse.shape, generator=g, dtype=torch.float64).to(lse.dtype)
    total = (o * c).sum() + torch.where(lse > -inf, lse * c_lse, 0.0).sum()
    return [o, lse, *torch.autograd.grad(total, inputs)]


def assert_as_exact(fast, plain, ref):
    """max|fast − ref| ≤ 2 · max|plain − ref| + 4 ulp of max|ref|; in float64, where plain is ref, 1e-13."""
    for f, p, r in zip(fast, plain, ref, strict=True):
        assert f.shape == r.shape
        none = r == -inf
        assert torch.equal(f == -inf, none)
        f, p, r = (x.detach().double().masked_fill(none, 0.0) for x in (f, p, r))
        if r.numel():
            ulp = torch.finfo(fast[0].dtype).eps * 2.0 ** r.abs().max().clamp(min=1e-30).log2().floor()
            floor = 1e-13 * (1 + r.abs().max()) if fast[0].dtype == torch.float64 else 0.0
            assert (f - r).abs().max() <= 2 * (p - r).abs().max() + 4 * ulp + floor


def check(laid, allowed, q, k, v, scale=0.4, lengths=None):
    fast = with_gradients(lambda *x: attend(*x, laid, scale=scale, lengths=lengths), q, k, v)
    plain = with_gradients(lambda *x: formula(*x, allowed, scale), q, k, v)
    ref = with_gradients(lambda *x: formula(*x, allowed, scale), *(x.double() for x in (q, k, v)))
    assert fast[0].dtype == q.dtype
    assert_as_exact(fast, plain, ref)

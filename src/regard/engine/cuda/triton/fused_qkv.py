"""Short sequences: a head's whole table of scores is one tile, so one program does all of it, forward or backward.

The tensors come as a projection leaves them, the heads side by side, (b, n, h·d): queries at the start of a row
of X, keys and values somewhere in a row of C, which may be X itself. Nothing is saved for the gradients but these;
the weights are made again. So a training step reads q, k, v twice, writes o and the three gradients once, and a joint
projection has one joint gradient.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..call import LOG2E
from ..configs import padded
from ..prepared import launch_cached
from .common import share, stay


@triton.jit
def _part(X, row, stride, seen, d: tl.constexpr, D: tl.constexpr):
    """Pointers to d numbers of some rows, and where they are real."""
    c = tl.arange(0, D)
    return X + (row * stride)[:, None] + c[None, :], seen[:, None] & (c < d)[None, :]


@triton.jit
def _weights(q, k, i, j, seen, scale2, CAUSAL: tl.constexpr, PRECISION: tl.constexpr):
    """softmax(scale · q kᵀ); zeros in a row that may look nowhere."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale2
    allowed = seen[None, :]
    if CAUSAL:
        allowed = allowed & (j[None, :] <= i[:, None])
    scores = tl.where(allowed, scores, -float("inf"))
    top = tl.max(scores, 1)
    weights = tl.exp2(scores - tl.where(top == -float("inf"), 0.0, top)[:, None])
    total = tl.sum(weights, 1)
    return weights * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]


@triton.jit
def _keys(LIMITS, b, m, j, LENGTHS: tl.constexpr):
    if LENGTHS:
        return j < tl.minimum(tl.load(LIMITS + b), m)
    else:
        return j < m


@triton.jit(do_not_specialize=["below"])
def forward_kernel(
    X, C, O, LIMITS, SEED, x_n, c_m, k_at, v_at, n, m, below, scale2, boost,
    HEADS: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr, LENGTHS: tl.constexpr, DROPS: tl.constexpr,
    N: tl.constexpr, M: tl.constexpr, d_k: tl.constexpr, d_v: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """o of one head."""
    bh = tl.program_id(0)
    b, h = (bh // HEADS).to(tl.int64), bh % HEADS
    i, j = tl.arange(0, N), tl.arange(0, M)
    seen = _keys(LIMITS, b, m, j, LENGTHS)
    at, real = _part(X + b * n * x_n + h * d_k, i, x_n, i < n, d_k, DK)
    q = tl.load(at, mask=real, other=0.0)
    C += b * m * c_m
    at, real = _part(C + k_at + h // GROUP * d_k, j, c_m, seen, d_k, DK)
    k = tl.load(at, mask=real, other=0.0)
    at, real = _part(C + v_at + h // GROUP * d_v, j, c_m, seen, d_v, DV)
    v = tl.load(at, mask=real, other=0.0)
    weights = _weights(q, k, i, j, seen, scale2, CAUSAL, PRECISION)
    if DROPS:
        weights = tl.where(stay(SEED, i, bh, below, N, M), weights * boost, 0.0)
    o = tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    at, real = _part(O + (b * n * HEADS + h) * d_v, i, HEADS * d_v, i < n, d_v, DV)
    tl.store(at, o.to(O.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["below"])
def backward_kernel(
    X, C, DO, DX, DC, LIMITS, SEED, x_n, c_m, k_at, v_at, n, m, below, scale2, boost, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr, LENGTHS: tl.constexpr, DROPS: tl.constexpr,
    N: tl.constexpr, M: tl.constexpr, d_k: tl.constexpr, d_v: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of one key head, and dq of the query heads that share it."""
    pid = tl.program_id(0)
    KV: tl.constexpr = HEADS // GROUP
    b, h_kv = (pid // KV).to(tl.int64), pid % KV
    i, j = tl.arange(0, N), tl.arange(0, M)
    seen = _keys(LIMITS, b, m, j, LENGTHS)
    C += b * m * c_m
    at, real = _part(C + k_at + h_kv * d_k, j, c_m, seen, d_k, DK)
    k = tl.load(at, mask=real, other=0.0)
    at, real = _part(C + v_at + h_kv * d_v, j, c_m, seen, d_v, DV)
    v = tl.load(at, mask=real, other=0.0)
    dk = tl.zeros((M, DK), tl.float32)
    dv = tl.zeros((M, DV), tl.float32)
    for g in range(GROUP):  # a variable from outside must keep its shape: (N, …) has names of its own
        h = h_kv * GROUP + g
        at_i, real_i = _part(X + b * n * x_n + h * d_k, i, x_n, i < n, d_k, DK)
        q = tl.load(at_i, mask=real_i, other=0.0)
        at_i, real_i = _part(DO + (b * n * HEADS + h) * d_v, i, HEADS * d_v, i < n, d_v, DV)
        do = tl.load(at_i, mask=real_i, other=0.0)
        weights = _weights(q, k, i, j, seen, scale2, CAUSAL, PRECISION)
        dweights = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        kept = weights
        if DROPS:
            drawn = stay(SEED, i, (b * HEADS + h).to(tl.int32), below, N, M)
            kept = tl.where(drawn, weights * boost, 0.0)
            dweights = tl.where(drawn, dweights * boost, 0.0)
        dv = tl.dot(tl.trans(kept.to(do.dtype)), do, dv, input_precision=PRECISION)
        delta = tl.sum(weights * dweights, 1)
        dscores = (weights * (dweights - delta[:, None]) * scale).to(q.dtype)
        dq = tl.dot(dscores, k, input_precision=PRECISION)
        at_i, real_i = _part(DX + b * n * x_n + h * d_k, i, x_n, i < n, d_k, DK)
        tl.store(at_i, dq.to(DX.dtype.element_ty), mask=real_i)
        dk = tl.dot(tl.trans(dscores), q, dk, input_precision=PRECISION)
    DC += b * m * c_m
    at, real = _part(DC + k_at + h_kv * d_k, j, c_m, j < m, d_k, DK)
    tl.store(at, dk.to(DC.dtype.element_ty), mask=real)
    at, real = _part(DC + v_at + h_kv * d_v, j, c_m, j < m, d_v, DV)
    tl.store(at, dv.to(DC.dtype.element_ty), mask=real)


def forward(x: Tensor, context: Tensor | None, lengths: Tensor | None, seed: Tensor | None, asked) -> Tensor:
    """o, (b, n, h·d_v)."""
    x = x.contiguous()
    c = x if context is None else context.contiguous()
    o = x.new_empty(*x.shape[:2], asked.heads * asked.d_v)
    if o.numel() == 0 or c.shape[1] == 0:
        return o.zero_()
    numbers, sizes, warps = _settled(x, c, context is None, lengths, asked)
    tensors = x, c, o, x if lengths is None else lengths, x if seed is None else seed
    launch_cached(forward_kernel, len(x) * asked.heads, warps, tensors, numbers, sizes)
    return o


def backward(
    grad: Tensor, x: Tensor, context: Tensor | None, lengths: Tensor | None, seed: Tensor | None, asked
) -> tuple[Tensor, Tensor | None]:
    """The gradients of x and of the context, as they lie there."""
    x, grad = x.contiguous(), grad.contiguous()
    c = x if context is None else context.contiguous()
    dx = torch.empty_like(x)
    dc = dx if context is None else torch.empty_like(c)
    if x.numel() == 0 or c.numel() == 0:
        return dx.zero_(), None if context is None else dc.zero_()
    numbers, sizes, warps = _settled(x, c, context is None, lengths, asked)
    tensors = x, c, grad, dx, dc, x if lengths is None else lengths, x if seed is None else seed
    launch_cached(backward_kernel, len(x) * asked.kv_heads, warps, tensors, (*numbers, asked.scale), sizes)
    return dx, None if context is None else dc


def _settled(
    x: Tensor, c: Tensor, own: bool, lengths: Tensor | None, asked
) -> tuple[tuple[Any, ...], tuple[tuple[str, Any], ...], int]:
    """The numbers and sizes that both kernels are called with, and their warps."""
    queries, keys = asked.heads * asked.d_k, asked.kv_heads * asked.d_k
    begins = queries if own else 0
    n, m = x.shape[1], c.shape[1]
    below, boost = share(asked.dropout_p)
    numbers = x.shape[2], c.shape[2], begins, begins + keys, n, m, below, asked.scale * LOG2E, boost
    sizes = {
        "HEADS": asked.heads,
        "GROUP": asked.heads // asked.kv_heads,
        "CAUSAL": asked.causal,
        "LENGTHS": lengths is not None,
        "DROPS": below > 0,
        "N": padded(n),
        "M": padded(m),
        "d_k": asked.d_k,
        "d_v": asked.d_v,
        "DK": padded(asked.d_k),
        "DV": padded(asked.d_v),
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
    }
    return numbers, tuple(sizes.items()), 4 if max(sizes["N"], sizes["M"]) <= 64 else 8

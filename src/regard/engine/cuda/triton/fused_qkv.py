"""Short sequences: all scores of a head are one tile, so one program computes the head, forward or backward.

The tensors come as a projection leaves them, the heads side by side, (b, n, h·d): queries at the start of a row
of X, keys and values somewhere in a row of C, which may be X itself. Nothing is saved for the gradients but these;
the weights are recomputed. So a training step reads q, k, v twice, writes o and the three gradients once, and the
fused projection gets one fused gradient.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..call import LOG2E
from ..configs import padded
from ..prepared import launch_cached
from .common import dropout_threshold_16, kept_pairs


@triton.jit
def _pointers(X, row, stride, valid, d: tl.constexpr, D: tl.constexpr):
    """Pointers to d numbers of some rows, and which of them are inside the tensor."""
    c = tl.arange(0, D)
    return X + (row * stride)[:, None] + c[None, :], valid[:, None] & (c < d)[None, :]


@triton.jit
def _weights(q, k, i, j, valid, scale2, CAUSAL: tl.constexpr, PRECISION: tl.constexpr):
    """softmax(scale · q kᵀ); zeros in a row that has no allowed key."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale2
    allowed = valid[None, :]
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
    valid = _keys(LIMITS, b, m, j, LENGTHS)
    at, inside = _pointers(X + b * n * x_n + h * d_k, i, x_n, i < n, d_k, DK)
    q = tl.load(at, mask=inside, other=0.0)
    C += b * m * c_m
    at, inside = _pointers(C + k_at + h // GROUP * d_k, j, c_m, valid, d_k, DK)
    k = tl.load(at, mask=inside, other=0.0)
    at, inside = _pointers(C + v_at + h // GROUP * d_v, j, c_m, valid, d_v, DV)
    v = tl.load(at, mask=inside, other=0.0)
    weights = _weights(q, k, i, j, valid, scale2, CAUSAL, PRECISION)
    if DROPS:
        weights = tl.where(kept_pairs(SEED, i, bh, below, N, M), weights * boost, 0.0)
    o = tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    at, inside = _pointers(O + (b * n * HEADS + h) * d_v, i, HEADS * d_v, i < n, d_v, DV)
    tl.store(at, o.to(O.dtype.element_ty), mask=inside)


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
    valid = _keys(LIMITS, b, m, j, LENGTHS)
    C += b * m * c_m
    at, inside = _pointers(C + k_at + h_kv * d_k, j, c_m, valid, d_k, DK)
    k = tl.load(at, mask=inside, other=0.0)
    at, inside = _pointers(C + v_at + h_kv * d_v, j, c_m, valid, d_v, DV)
    v = tl.load(at, mask=inside, other=0.0)
    dk = tl.zeros((M, DK), tl.float32)
    dv = tl.zeros((M, DV), tl.float32)
    for g in range(GROUP):  # a variable from outside must keep its shape: (N, …) has names of its own
        h = h_kv * GROUP + g
        at_i, inside_i = _pointers(X + b * n * x_n + h * d_k, i, x_n, i < n, d_k, DK)
        q = tl.load(at_i, mask=inside_i, other=0.0)
        at_i, inside_i = _pointers(DO + (b * n * HEADS + h) * d_v, i, HEADS * d_v, i < n, d_v, DV)
        do = tl.load(at_i, mask=inside_i, other=0.0)
        weights = _weights(q, k, i, j, valid, scale2, CAUSAL, PRECISION)
        dweights = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        kept = weights
        if DROPS:
            is_kept = kept_pairs(SEED, i, (b * HEADS + h).to(tl.int32), below, N, M)
            kept = tl.where(is_kept, weights * boost, 0.0)
            dweights = tl.where(is_kept, dweights * boost, 0.0)
        dv = tl.dot(tl.trans(kept.to(do.dtype)), do, dv, input_precision=PRECISION)
        delta = tl.sum(weights * dweights, 1)
        dscores = (weights * (dweights - delta[:, None]) * scale).to(q.dtype)
        dq = tl.dot(dscores, k, input_precision=PRECISION)
        at_i, inside_i = _pointers(DX + b * n * x_n + h * d_k, i, x_n, i < n, d_k, DK)
        tl.store(at_i, dq.to(DX.dtype.element_ty), mask=inside_i)
        dk = tl.dot(tl.trans(dscores), q, dk, input_precision=PRECISION)
    DC += b * m * c_m
    at, inside = _pointers(DC + k_at + h_kv * d_k, j, c_m, j < m, d_k, DK)
    tl.store(at, dk.to(DC.dtype.element_ty), mask=inside)
    at, inside = _pointers(DC + v_at + h_kv * d_v, j, c_m, j < m, d_v, DV)
    tl.store(at, dv.to(DC.dtype.element_ty), mask=inside)


def forward(
    x: Tensor, context: Tensor | None, lengths: Tensor | None, seed: Tensor | None, options
) -> Tensor:
    """o, (b, n, h·d_v)."""
    x = x.contiguous()
    c = x if context is None else context.contiguous()
    o = x.new_empty(*x.shape[:2], options.heads * options.d_v)
    if o.numel() == 0 or c.shape[1] == 0:
        return o.zero_()
    numbers, sizes, warps = _arguments(x, c, context is None, lengths, options)
    tensors = x, c, o, x if lengths is None else lengths, x if seed is None else seed
    launch_cached(forward_kernel, len(x) * options.heads, warps, tensors, numbers, sizes)
    return o


def backward(
    grad: Tensor, x: Tensor, context: Tensor | None, lengths: Tensor | None, seed: Tensor | None, options
) -> tuple[Tensor, Tensor | None]:
    """The gradients of x and of the context, in their layout."""
    x, grad = x.contiguous(), grad.contiguous()
    c = x if context is None else context.contiguous()
    dx = torch.empty_like(x)
    dc = dx if context is None else torch.empty_like(c)
    if x.numel() == 0 or c.numel() == 0:
        return dx.zero_(), None if context is None else dc.zero_()
    numbers, sizes, warps = _arguments(x, c, context is None, lengths, options)
    tensors = x, c, grad, dx, dc, x if lengths is None else lengths, x if seed is None else seed
    launch_cached(
        backward_kernel, len(x) * options.kv_heads, warps, tensors, (*numbers, options.scale), sizes
    )
    return dx, None if context is None else dc


def _arguments(
    x: Tensor, c: Tensor, own: bool, lengths: Tensor | None, options
) -> tuple[tuple[Any, ...], tuple[tuple[str, Any], ...], int]:
    """Numbers, compile-time sizes and warps of both kernels."""
    queries, keys = options.heads * options.d_k, options.kv_heads * options.d_k
    begins = queries if own else 0
    n, m = x.shape[1], c.shape[1]
    below, boost = dropout_threshold_16(options.dropout_p)
    numbers = x.shape[2], c.shape[2], begins, begins + keys, n, m, below, options.scale * LOG2E, boost
    sizes = {
        "HEADS": options.heads,
        "GROUP": options.heads // options.kv_heads,
        "CAUSAL": options.causal,
        "LENGTHS": lengths is not None,
        "DROPS": below > 0,
        "N": padded(n),
        "M": padded(m),
        "d_k": options.d_k,
        "d_v": options.d_v,
        "DK": padded(options.d_k),
        "DV": padded(options.d_v),
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
    }
    return numbers, tuple(sizes.items()), 4 if max(sizes["N"], sizes["M"]) <= 64 else 8

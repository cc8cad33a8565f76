"""Short sequences: all scores of a head are one tile, so one program computes the head, forward or backward.

The tensors have the layout of a projection's output, heads side by side, (b, n, h·d): queries at the start of a row
of X, keys and values somewhere in a row of C, which may be X itself. Only these are saved for the gradients; the
weights are recomputed. So a training step reads q, k, v twice, writes o and the three gradients once, and the fused
projection gets one fused gradient.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..call import LOG2E, Config, padded
from ..prepared import PREPARED, Launch, Program
from .forward import ROUNDS, rows_of, store_rows


class Static(NamedTuple):
    """What a kernel is compiled for: N queries and M keys, padded as the widths are."""

    HEADS: int
    GROUP: int
    CAUSAL: bool
    LENGTHS: bool
    DROPS: bool
    N: int
    M: int
    d_k: int
    d_v: int
    DK: int
    DV: int
    PRECISION: str


@triton.jit
def _survivors(SEED, rows, where, cutoff, R: tl.constexpr, C: tl.constexpr):
    """Which of C weights in each of R rows are kept; each 128-bit Philox number decides for eight neighbors."""
    r = rows[:, None] + tl.zeros((1, C // 8), tl.int32)
    c = tl.arange(0, C // 8)[None, :] + tl.zeros((R, 1), tl.int32)
    x, y, z, w = tl.philox(tl.load(SEED), c, r, c * 0 + where, c * 0, ROUNDS)
    words = tl.join(tl.join(x, y), tl.join(z, w))
    numbers_16 = tl.join(words & 0xFFFF, words >> 16)
    return tl.reshape(numbers_16, (R, C)) >= cutoff.to(tl.uint32)


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
def _keys(C, LIMITS, b, h_kv, m, c_m, k_at, v_at, S: tl.constexpr):
    """Positions of the keys, which of them are valid, and k and v of one head."""
    j = tl.arange(0, S.M)
    valid = j < m
    if S.LENGTHS:
        valid = j < tl.minimum(tl.load(LIMITS + b), m)
    C += b * m * c_m
    k = rows_of(C + k_at + h_kv * S.d_k, j, c_m, valid, S.d_k, S.DK, True, False)
    v = rows_of(C + v_at + h_kv * S.d_v, j, c_m, valid, S.d_v, S.DV, True, False)
    return j, valid, k, v


@triton.jit(do_not_specialize=["cutoff"])
def forward_kernel(
    X, C, O, LIMITS, SEED, x_n, c_m, k_at, v_at, n, m, cutoff, scale2, upscale, scale, S: tl.constexpr
):  # fmt: skip
    """o of one head."""
    bh = tl.program_id(0)
    b, h = (bh // S.HEADS).to(tl.int64), bh % S.HEADS
    i = tl.arange(0, S.N)
    q = rows_of(X + b * n * x_n + h * S.d_k, i, x_n, i < n, S.d_k, S.DK, True, False)
    j, valid, k, v = _keys(C, LIMITS, b, h // S.GROUP, m, c_m, k_at, v_at, S)
    weights = _weights(q, k, i, j, valid, scale2, S.CAUSAL, S.PRECISION)
    if S.DROPS:
        weights = tl.where(_survivors(SEED, i, bh, cutoff, S.N, S.M), weights * upscale, 0.0)
    o = tl.dot(weights.to(v.dtype), v, input_precision=S.PRECISION)
    store_rows(O + (b * n * S.HEADS + h) * S.d_v, i, S.HEADS * S.d_v, o, i < n, S.d_v, S.DV, False)


@triton.jit(do_not_specialize=["cutoff"])
def backward_kernel(
    X, C, DO, DX, DC, LIMITS, SEED, x_n, c_m, k_at, v_at, n, m, cutoff, scale2, upscale, scale, S: tl.constexpr
):  # fmt: skip
    """dk and dv of one key head, and dq of the query heads that share it."""
    pid = tl.program_id(0)
    KV: tl.constexpr = S.HEADS // S.GROUP
    b, h_kv = (pid // KV).to(tl.int64), pid % KV
    i = tl.arange(0, S.N)
    j, valid, k, v = _keys(C, LIMITS, b, h_kv, m, c_m, k_at, v_at, S)
    dk = tl.zeros((S.M, S.DK), tl.float32)
    dv = tl.zeros((S.M, S.DV), tl.float32)
    for g in range(S.GROUP):
        h = h_kv * S.GROUP + g
        of_head = b * n * x_n + h * S.d_k
        q = rows_of(X + of_head, i, x_n, i < n, S.d_k, S.DK, True, False)
        DO_HEAD = DO + (b * n * S.HEADS + h) * S.d_v
        do = rows_of(DO_HEAD, i, S.HEADS * S.d_v, i < n, S.d_v, S.DV, True, False)
        weights = _weights(q, k, i, j, valid, scale2, S.CAUSAL, S.PRECISION)
        dweights = tl.dot(do, tl.trans(v), input_precision=S.PRECISION)
        weights_of_v = weights
        if S.DROPS:
            survives = _survivors(SEED, i, (b * S.HEADS + h).to(tl.int32), cutoff, S.N, S.M)
            weights_of_v = tl.where(survives, weights * upscale, 0.0)
            dweights = tl.where(survives, dweights * upscale, 0.0)
        dv = tl.dot(tl.trans(weights_of_v.to(do.dtype)), do, dv, input_precision=S.PRECISION)
        delta = tl.sum(weights * dweights, 1)
        dscores = (weights * (dweights - delta[:, None]) * scale).to(q.dtype)
        dq = tl.dot(dscores, k, input_precision=S.PRECISION)
        store_rows(DX + of_head, i, x_n, dq, i < n, S.d_k, S.DK, False)
        dk = tl.dot(tl.trans(dscores), q, dk, input_precision=S.PRECISION)
    DC += b * m * c_m
    store_rows(DC + k_at + h_kv * S.d_k, j, c_m, dk, j < m, S.d_k, S.DK, False)
    store_rows(DC + v_at + h_kv * S.d_v, j, c_m, dv, j < m, S.d_v, S.DV, False)


def forward(
    x: Tensor, context: Tensor | None, lengths: Tensor | None, seed: Tensor | None, options
) -> Tensor:
    """o, (b, n, h·d_v)."""
    x = x.contiguous()
    c = x if context is None else context.contiguous()
    o = x.new_empty(*x.shape[:2], options.heads * options.d_v)
    if o.numel() == 0 or c.shape[1] == 0:
        return o.zero_()
    _launch(forward_kernel, len(x) * options.heads, (x, c, o), context is None, lengths, seed, options)
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
    tensors = x, c, grad, dx, dc
    _launch(backward_kernel, len(x) * options.kv_heads, tensors, context is None, lengths, seed, options)
    return dx, None if context is None else dc


def _launch(
    kernel: Any, programs: int, tensors: tuple[Tensor, ...], own: bool, lengths: Tensor | None, seed: Tensor | None,
    options,
) -> None:  # fmt: skip
    """Run a kernel on these tensors; the first two are x and the context, or x again (own).

    Weights whose random 16-bit number is less than `cutoff` are dropped; the others are multiplied by `upscale`.
    Triton specializes on dtypes and on addresses divisible by 16, so both are part of the key.
    """
    x, c = tensors[:2]
    tensors = *tensors, x if lengths is None else lengths, x if seed is None else seed
    kinds = tuple((y.dtype, y.shape, y.data_ptr() % 16 == 0) for y in tensors)
    key = kernel, options, own, lengths is None, seed is None, kinds, x.device
    program = PREPARED.get(key)
    if program is None:
        begins = options.heads * options.d_k if own else 0
        n, m, d_k, d_v = x.shape[1], c.shape[1], options.d_k, options.d_v
        cutoff = min(round(options.dropout_p * 2**16), 2**16 - 1)
        upscale = 1.0 / (1.0 - cutoff / 2**16)
        sizes = Static(
            options.heads, options.heads // options.kv_heads, options.causal, lengths is not None, cutoff > 0,
            padded(n), padded(m), d_k, d_v, padded(d_k), padded(d_v), "ieee" if x.dtype == torch.float32 else "tf32",
        )  # fmt: skip
        launch = Launch(
            kernel, programs, Config(0, 0, 4 if max(sizes.N, sizes.M) <= 64 else 8, 1),
            x.shape[2], c.shape[2], begins, begins + options.kv_heads * d_k, n, m, cutoff,
            options.scale * LOG2E, upscale, options.scale, S=sizes,
        )  # fmt: skip
        inputs = tuple(range(len(tensors)))
        program = PREPARED.put(key, Program(inputs, [(launch, inputs)], {}, x.device))
    program.run(tensors)

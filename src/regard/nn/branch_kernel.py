"""Triton kernels of a training step between matrix products: the end of a residual branch with the next norm, and
ReLU with dropout.

Random bits come from Philox, four numbers per call, so one call serves four neighboring entries. The backward pass
samples the same bits again instead of storing a mask. Sums over rows are added in a fixed order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 528  # of the backward pass: four for each of an H200's 132 multiprocessors
ENTRIES = 2048  # of a tile: rows × columns
ROUNDS = 7  # of Philox: the fewest that pass the usual tests of randomness


@triton.jit
def _keeps(SEED, row, ROUNDS: tl.constexpr, threshold, D: tl.constexpr, R: tl.constexpr):
    """Whether each entry of these rows stays: (R, D)."""
    Q: tl.constexpr = D // 4
    counter = row[:, None] * Q + tl.arange(0, Q)[None, :]
    a, b, c, d = tl.randint4x(tl.load(SEED), counter, n_rounds=ROUNDS)
    bits = tl.reshape(tl.join(tl.join(a, b), tl.join(c, d)), (R, D))
    return (bits.to(tl.uint32, bitcast=True) >> 8).to(tl.int32) >= threshold


@triton.jit
def branch_end_kernel(
    X, Y, WEIGHT, BIAS, SEED, TOTAL, OUT, MEAN, RSTD, rows, d, eps, threshold, factor,
    RMS: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, DROPS: tl.constexpr, ROUNDS: tl.constexpr,
    D: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """total = x + dropout(y), out = norm(total), for R rows."""
    row, column = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, D)
    at = row[:, None].to(tl.int64) * d + column[None, :]
    inside = (row < rows)[:, None] & (column < d)[None, :]
    y = tl.load(Y + at, mask=inside, other=0.0).to(tl.float32)
    if DROPS:
        y = tl.where(_keeps(SEED, row, ROUNDS, threshold, D, R), y * factor, 0.0)
    total = (tl.load(X + at, mask=inside, other=0.0).to(tl.float32) + y).to(TOTAL.dtype.element_ty)
    tl.store(TOTAL + at, total, mask=inside)
    total = total.to(tl.float32)
    mean = tl.zeros((R,), tl.float32)
    if not RMS:
        mean = tl.sum(total, 1) / d
    centered = tl.where(inside, total - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centered * centered, 1) / d + eps)
    tl.store(MEAN + row, mean, mask=row < rows)
    tl.store(RSTD + row, rstd, mask=row < rows)
    out = centered * rstd[:, None]
    if HAS_WEIGHT:
        out *= tl.load(WEIGHT + column, mask=column < d, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        out += tl.load(BIAS + column, mask=column < d, other=0.0).to(tl.float32)[None, :]
    tl.store(OUT + at, out.to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def branch_end_backward_kernel(
    D_OUT, D_TOTAL, TOTAL, MEAN, RSTD, WEIGHT, SEED, DX, DY, D_WEIGHT, D_BIAS, rows, d, threshold, factor,
    RMS: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_TOTAL: tl.constexpr, DROPS: tl.constexpr, ROUNDS: tl.constexpr,
    D: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """The gradients of x and y for every n-th tile, of n programs, and this program's sums for weight and bias."""
    column = tl.arange(0, D)
    d_weight, d_bias = tl.zeros((D,), tl.float32), tl.zeros((D,), tl.float32)
    if HAS_WEIGHT:
        weight = tl.load(WEIGHT + column, mask=column < d, other=0.0).to(tl.float32)[None, :]
    for first in range(tl.program_id(0) * R, rows, tl.num_programs(0) * R):
        row = first + tl.arange(0, R)
        at = row[:, None].to(tl.int64) * d + column[None, :]
        inside = (row < rows)[:, None] & (column < d)[None, :]
        g = tl.load(D_OUT + at, mask=inside, other=0.0).to(tl.float32)
        total = tl.load(TOTAL + at, mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(MEAN + row, mask=row < rows, other=0.0)
        rstd = tl.load(RSTD + row, mask=row < rows, other=0.0)
        unit = tl.where(inside, (total - mean[:, None]) * rstd[:, None], 0.0)
        d_weight += tl.sum(g * unit, 0)
        d_bias += tl.sum(g, 0)
        if HAS_WEIGHT:
            g *= weight
        dx = g - unit * (tl.sum(g * unit, 1) / d)[:, None]
        if not RMS:
            dx -= (tl.sum(g, 1) / d)[:, None]
        dx *= rstd[:, None]
        if HAS_TOTAL:
            dx += tl.load(D_TOTAL + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(DX + at, dx.to(DX.dtype.element_ty), mask=inside)
        if DROPS:
            dx = tl.where(_keeps(SEED, row, ROUNDS, threshold, D, R), dx * factor, 0.0)
        tl.store(DY + at, dx.to(DY.dtype.element_ty), mask=inside)
    tl.store(D_WEIGHT + tl.program_id(0) * d + column, d_weight, mask=column < d)
    tl.store(D_BIAS + tl.program_id(0) * d + column, d_bias, mask=column < d)


@triton.jit
def relu_dropout_kernel(
    X, SEED, OUT, size, threshold, factor, ROUNDS: tl.constexpr, D: tl.constexpr, R: tl.constexpr
):
    row = tl.program_id(0) * R + tl.arange(0, R)
    at = row[:, None].to(tl.int64) * D + tl.arange(0, D)[None, :]
    x = tl.load(X + at, mask=at < size, other=0.0)
    keeps = (x > 0) & _keeps(SEED, row, ROUNDS, threshold, D, R)
    tl.store(
        OUT + at,
        tl.where(keeps, x.to(tl.float32) * factor, 0.0).to(OUT.dtype.element_ty),
        mask=at < size,
    )


@triton.jit
def relu_dropout_backward_kernel(D_OUT, OUT, DX, size, factor, B: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    g = tl.load(D_OUT + at, mask=at < size, other=0.0).to(tl.float32)
    positive = tl.load(OUT + at, mask=at < size, other=0.0) > 0
    tl.store(DX + at, tl.where(positive, g * factor, 0.0).to(DX.dtype.element_ty), mask=at < size)


def _dropping(p: float) -> tuple[int, float]:
    """How many of 2²⁴ numbers drop an entry, and the factor of the others."""
    dropped = min(round(p * (1 << 24)), (1 << 24) - 1)
    return dropped, (1 << 24) / ((1 << 24) - dropped)


def _tile(d: int) -> tuple[int, int]:
    """Columns, at least four for one call of Philox, and rows of a tile."""
    columns = max(triton.next_power_of_2(d), 4)
    return columns, max(1, ENTRIES // columns)


def branch_end(
    x: Tensor,
    y: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    factors: list[float],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """x + dropout(y), its norm in `dtype`, each row's mean and 1 / standard deviation. factors: p, eps, RMS norm."""
    p, eps, rms = factors
    x, y, d = x.contiguous(), y.contiguous(), x.shape[-1]
    rows = x.numel() // d
    total, out = torch.empty_like(x), torch.empty_like(x, dtype=dtype)
    statistics = torch.empty(2, rows, device=x.device, dtype=torch.float32)
    (columns, tile), (threshold, factor) = _tile(d), _dropping(p)
    if rows:
        branch_end_kernel[(triton.cdiv(rows, tile),)](
            x, y, weight, bias, seed, total, out, statistics[0], statistics[1], rows, d, eps, threshold, factor,
            RMS=bool(rms), HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None, DROPS=seed is not None,
            ROUNDS=ROUNDS, D=columns, R=tile,
        )  # fmt: skip
    return total, out, statistics


def branch_end_backward(
    grads: list[Tensor | None],
    total: Tensor,
    statistics: Tensor,
    weight: Tensor | None,
    seed: Tensor | None,
    factors: list[float],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, of y in `dtype`, of weight and of bias in float32. grads: of the norm, and of the sum."""
    (d_out, d_total), (p, _, rms) = (None if g is None else g.contiguous() for g in grads), factors
    d = total.shape[-1]
    rows = total.numel() // d
    dx, dy = torch.empty_like(total), torch.empty_like(total, dtype=dtype)
    (columns, tile), (threshold, factor) = _tile(d), _dropping(p)
    programs = max(min(PROGRAMS, triton.cdiv(rows, tile)), 1)
    sums = torch.empty(2, programs, d, device=total.device, dtype=torch.float32)
    branch_end_backward_kernel[(programs,)](
        d_out, d_total, total, statistics[0], statistics[1], weight, seed, dx, dy,
        sums[0], sums[1], rows, d, threshold, factor,
        RMS=bool(rms), HAS_WEIGHT=weight is not None, HAS_TOTAL=d_total is not None, DROPS=seed is not None,
        ROUNDS=ROUNDS, D=columns, R=tile,
    )  # fmt: skip
    return dx, dy, sums[0].sum(0), sums[1].sum(0)


def relu_dropout(x: Tensor, seed: Tensor, p: float) -> Tensor:
    x, (threshold, factor) = x.contiguous(), _dropping(p)
    out, columns, tile = torch.empty_like(x), 512, 4
    if x.numel():
        relu_dropout_kernel[(triton.cdiv(x.numel(), columns * tile),)](
            x, seed, out, x.numel(), threshold, factor, ROUNDS=ROUNDS, D=columns, R=tile
        )
    return out


def relu_dropout_backward(d_out: Tensor, out: Tensor, p: float) -> Tensor:
    d_out, dx = d_out.contiguous(), torch.empty_like(out)
    if out.numel():
        relu_dropout_backward_kernel[(triton.cdiv(out.numel(), ENTRIES),)](
            d_out, out, dx, out.numel(), _dropping(p)[1], B=ENTRIES
        )
    return dx

"""Triton kernels of a training step between matrix products: the end of a residual branch with the next norm, ReLU
with dropout, and the gradients of biases.

The bias of the product before is added here and not there, so that its gradient, a sum over rows, is computed while
the rows are in registers. Random bits come from Philox, 16 for each entry, so one call serves eight neighboring
entries. The backward pass of a branch end samples the same bits again instead of storing a mask. Sums over rows are
added in a fixed order.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

ENTRIES = 2048  # of a tile: rows × columns
PROGRAMS = 1056  # that share the rows where these are summed: eight for each of an H200's 132 multiprocessors
END_BACKWARD = (2048, 2, 528)  # entries of a tile, warps and programs of the backward pass of a branch end
COLUMNS = 512  # of a tile, at most, where a program does not need a whole row
SUM_COLUMNS, SUM_ROWS = 8, 256  # of a tile where the programs' sums are added up
ROUNDS = 7  # of Philox: the fewest that pass the usual tests of randomness


@triton.jit
def _keeps(SEED, row, first, per_row, ROUNDS: tl.constexpr, threshold, D: tl.constexpr, R: tl.constexpr):
    """Whether each entry of these rows stays, for D columns from `first` on: (R, D). per_row: calls of Philox."""
    Q: tl.constexpr = D // 8
    counter = row[:, None] * per_row + first // 8 + tl.arange(0, Q)[None, :]
    a, b, c, d = tl.randint4x(tl.load(SEED), counter, n_rounds=ROUNDS)
    words = tl.join(tl.join(a, b), tl.join(c, d)).to(tl.uint32, bitcast=True)
    halves = tl.join(words & 0xFFFF, words >> 16)
    return tl.reshape(halves, (R, D)).to(tl.int32) >= threshold


@triton.jit
def _entries(row, column, rows, d):
    """The offsets of these rows' and columns' entries, and whether each is inside of (rows, d): (R, D)."""
    return row[:, None].to(tl.int64) * d + column[None, :], (row < rows)[:, None] & (column < d)[None, :]


@triton.jit
def branch_end_kernel(
    X, Y, Y_BIAS, WEIGHT, BIAS, SEED, TOTAL, OUT, MEAN, RSTD, rows, d, eps, threshold, factor,
    RMS: tl.constexpr, HAS_X: tl.constexpr, HAS_Y_BIAS: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr, DROPS: tl.constexpr, ROUNDS: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """total = x + dropout(y + its bias), out = norm(total), for R rows."""
    row, column = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, D)
    at, inside = _entries(row, column, rows, d)
    y = tl.load(Y + at, mask=inside, other=0.0).to(tl.float32)
    x = tl.zeros((R, D), tl.float32)
    if HAS_X:
        x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_Y_BIAS:
        y += tl.load(Y_BIAS + column, mask=column < d, other=0.0).to(tl.float32)[None, :]
    if DROPS:
        y = tl.where(_keeps(SEED, row, 0, D // 8, ROUNDS, threshold, D, R), y * factor, 0.0)
    total = (x + y).to(TOTAL.dtype.element_ty)
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
    D_OUT, D_TOTAL, TOTAL, MEAN, RSTD, WEIGHT, SEED, DX, DY, SUMS, rows, d, threshold, factor,
    RMS: tl.constexpr, HAS_X: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_TOTAL: tl.constexpr, DROPS: tl.constexpr,
    ROUNDS: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """The gradients of x and y for every n-th tile, of n programs, and this program's sums over rows, which are the
    gradients of the norm's weight and bias and of the bias of y.
    """
    column = tl.arange(0, D)
    # Each row of a tile is summed separately until the end: adding them up at once would exchange data between warps.
    d_weight, d_bias = tl.zeros((R, D), tl.float32), tl.zeros((R, D), tl.float32)
    d_y_bias = tl.zeros((R, D), tl.float32)
    if HAS_WEIGHT:
        weight = tl.load(WEIGHT + column, mask=column < d, other=0.0).to(tl.float32)[None, :]
    for first in range(tl.program_id(0) * R, rows, tl.num_programs(0) * R):
        row = first + tl.arange(0, R)
        at, inside = _entries(row, column, rows, d)
        g = tl.load(D_OUT + at, mask=inside, other=0.0).to(tl.float32)
        total = tl.load(TOTAL + at, mask=inside, other=0.0).to(tl.float32)
        direct = tl.zeros((R, D), tl.float32)
        if HAS_TOTAL:
            direct = tl.load(D_TOTAL + at, mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(MEAN + row, mask=row < rows, other=0.0)
        rstd = tl.load(RSTD + row, mask=row < rows, other=0.0)
        unit = tl.where(inside, (total - mean[:, None]) * rstd[:, None], 0.0)
        d_weight += g * unit
        d_bias += g
        if HAS_WEIGHT:
            g *= weight
        dx = g - unit * (tl.sum(g * unit, 1) / d)[:, None]
        if not RMS:
            dx -= (tl.sum(g, 1) / d)[:, None]
        dx = dx * rstd[:, None] + direct
        if HAS_X:
            tl.store(DX + at, dx.to(DX.dtype.element_ty), mask=inside)
        if DROPS:
            dx = tl.where(_keeps(SEED, row, 0, D // 8, ROUNDS, threshold, D, R), dx * factor, 0.0)
        d_y_bias += tl.where(inside, dx, 0.0)
        tl.store(DY + at, dx.to(DY.dtype.element_ty), mask=inside)
    SUMS += tl.program_id(0) * 3 * d + column
    tl.store(SUMS, tl.sum(d_weight, 0), mask=column < d)
    tl.store(SUMS + d, tl.sum(d_bias, 0), mask=column < d)
    tl.store(SUMS + 2 * d, tl.sum(d_y_bias, 0), mask=column < d)


@triton.jit
def relu_dropout_kernel(
    X, BIAS, SEED, OUT, rows, d, threshold, factor, HAS_BIAS: tl.constexpr, DROPS: tl.constexpr,
    ROUNDS: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """dropout(relu(x + bias)) of R rows and D columns."""
    first = tl.program_id(1) * D
    row, column = tl.program_id(0) * R + tl.arange(0, R), first + tl.arange(0, D)
    at, inside = _entries(row, column, rows, d)
    x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(BIAS + column, mask=column < d, other=0.0).to(tl.float32)[None, :]
    keeps = x > 0
    if DROPS:
        keeps = keeps & _keeps(SEED, row, first, tl.cdiv(d, 8), ROUNDS, threshold, D, R)
    tl.store(OUT + at, tl.where(keeps, x * factor, 0.0).to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def relu_dropout_backward_kernel(
    D_OUT, OUT, DX, SUMS, rows, d, factor, D: tl.constexpr, R: tl.constexpr
):  # fmt: skip
    """The gradient of x for every n-th tile of D columns, of n programs, and this program's sums over rows."""
    column = tl.program_id(1) * D + tl.arange(0, D)
    sums = tl.zeros((R, D), tl.float32)
    for first in range(tl.program_id(0) * R, rows, tl.num_programs(0) * R):
        at, inside = _entries(first + tl.arange(0, R), column, rows, d)
        g = tl.load(D_OUT + at, mask=inside, other=0.0).to(tl.float32)
        positive = tl.load(OUT + at, mask=inside, other=0.0) > 0
        dx = tl.where(positive, g * factor, 0.0)
        sums += dx
        tl.store(DX + at, dx.to(DX.dtype.element_ty), mask=inside)
    tl.store(SUMS + tl.program_id(0) * d + column, tl.sum(sums, 0), mask=column < d)


@triton.jit
def column_sums_kernel(X, SUMS, rows, d, D: tl.constexpr, R: tl.constexpr):
    """The sums over every n-th tile of R rows, of n programs."""
    column = tl.program_id(1) * D + tl.arange(0, D)
    sums = tl.zeros((R, D), tl.float32)
    for first in range(tl.program_id(0) * R, rows, tl.num_programs(0) * R):
        at, inside = _entries(first + tl.arange(0, R), column, rows, d)
        sums += tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(SUMS + tl.program_id(0) * d + column, tl.sum(sums, 0), mask=column < d)


def _dropping(p: float) -> tuple[int, float]:
    """How many of 2¹⁶ numbers drop an entry, and the factor of the others."""
    dropped = min(round(p * (1 << 16)), (1 << 16) - 1)
    return dropped, (1 << 16) / ((1 << 16) - dropped)


def _tile(d: int, max_columns: int | None = None) -> tuple[int, int]:
    """Columns, at least eight for one call of Philox, and rows of a tile."""
    columns = max(triton.next_power_of_2(d), 8)
    columns = min(columns, max_columns or columns)
    return columns, max(1, ENTRIES // columns)


def _programs(rows: int, tile: int, across: int = 1) -> int:
    """Programs that share the rows, where `across` of them share a row."""
    return max(min(triton.cdiv(PROGRAMS, across), triton.cdiv(rows, tile)), 1)


def branch_end(
    x: Tensor | None,
    y: Tensor,
    parameters: Sequence[Tensor | None],
    seed: Tensor | None,
    factors: list[float],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """x + dropout(y + y_bias), its norm in `dtype`, each row's mean and 1 / standard deviation.

    Without x the sum is in the dtype of y. parameters: y_bias, then weight and bias of the norm. factors: p, eps,
    whether it is an RMS norm, and whether there is an x.
    """
    (p, eps, rms, _), (y_bias, weight, bias) = factors, parameters
    x, y, d = None if x is None else x.contiguous(), y.contiguous(), y.shape[-1]
    rows = y.numel() // d
    total, out = torch.empty_like(y if x is None else x), torch.empty_like(y, dtype=dtype)
    statistics = torch.empty(2, rows, device=y.device, dtype=torch.float32)
    (columns, tile), (threshold, factor) = _tile(d), _dropping(p)
    if rows:
        branch_end_kernel[(triton.cdiv(rows, tile),)](
            x, y, y_bias, weight, bias, seed, total, out, statistics[0], statistics[1], rows, d, eps, threshold,
            factor, RMS=bool(rms), HAS_X=x is not None, HAS_Y_BIAS=y_bias is not None,
            HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None, DROPS=seed is not None, ROUNDS=ROUNDS,
            D=columns, R=tile,
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
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, of y in `dtype`, and in float32 those of weight, bias and y_bias, (3, d).

    grads: of the norm, and of the sum. That of x is an empty tensor where there is no x.
    """
    (d_out, d_total), (p, _, rms, has_x) = (None if g is None else g.contiguous() for g in grads), factors
    d = total.shape[-1]
    rows = total.numel() // d
    dx = torch.empty_like(total) if has_x else total.new_empty(0)
    dy = torch.empty_like(total, dtype=dtype)
    entries, warps, programs = END_BACKWARD
    (columns, _), (threshold, factor) = _tile(d), _dropping(p)
    tile, warps = max(1, entries // columns), max(warps, columns // 1024)
    programs = max(min(programs, triton.cdiv(rows, tile)), 1)
    sums = torch.empty(programs, 3 * d, device=total.device, dtype=torch.float32)
    branch_end_backward_kernel[(programs,)](
        d_out, d_total, total, statistics[0], statistics[1], weight, seed, dx, dy, sums, rows, d, threshold, factor,
        RMS=bool(rms), HAS_X=bool(has_x), HAS_WEIGHT=weight is not None, HAS_TOTAL=d_total is not None,
        DROPS=seed is not None, ROUNDS=ROUNDS, D=columns, R=tile, num_warps=warps,
    )  # fmt: skip
    return dx, dy, _summed(sums).view(3, d)


def relu_dropout(x: Tensor, bias: Tensor | None, seed: Tensor | None, p: float) -> Tensor:
    x, d, (threshold, factor) = x.contiguous(), x.shape[-1], _dropping(p)
    out, (columns, tile) = torch.empty_like(x), _tile(d, COLUMNS)
    if x.numel():
        rows = x.numel() // d
        relu_dropout_kernel[(triton.cdiv(rows, tile), triton.cdiv(d, columns))](
            x, bias, seed, out, rows, d, threshold, factor, HAS_BIAS=bias is not None, DROPS=seed is not None,
            ROUNDS=ROUNDS, D=columns, R=tile,
        )  # fmt: skip
    return out


def relu_dropout_backward(d_out: Tensor, out: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """The gradients of x, and of its bias in float32."""
    d_out, d = d_out.contiguous(), out.shape[-1]
    dx, rows, (columns, tile) = torch.empty_like(out), out.numel() // max(d, 1), _tile(d, COLUMNS)
    across = triton.cdiv(d, columns)
    programs = _programs(rows, tile, across)
    sums = torch.empty(programs, d, device=out.device, dtype=torch.float32)
    if d:
        relu_dropout_backward_kernel[(programs, across)](
            d_out, out, dx, sums, rows, d, _dropping(p)[1], D=columns, R=tile
        )
    return dx, _summed(sums)


def column_sums(x: Tensor) -> Tensor:
    """The sums over all rows, in float32."""
    x, d = x.contiguous(), x.shape[-1]
    rows, (columns, tile) = x.numel() // max(d, 1), _tile(d, COLUMNS)
    across = triton.cdiv(d, columns)
    programs = _programs(rows, tile, across)
    sums = torch.empty(programs, d, device=x.device, dtype=torch.float32)
    if d:
        column_sums_kernel[(programs, across)](x, sums, rows, d, D=columns, R=tile)
    return _summed(sums)


def _summed(sums: Tensor) -> Tensor:
    """The sum over the programs: few columns for each program here, so that many run."""
    rows, d = sums.shape
    if rows == 1 or d == 0:
        return sums.sum(0)
    out = torch.empty(1, d, device=sums.device, dtype=torch.float32)
    column_sums_kernel[(1, triton.cdiv(d, SUM_COLUMNS))](sums, out, rows, d, D=SUM_COLUMNS, R=SUM_ROWS)
    return out[0]

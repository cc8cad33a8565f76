"""What stands between the products of a Transformer's layer, each in one pass over memory, forward and backward.

    join       sum = x + dropout(y);  z = (sum − mean) / √(var + eps) · g + b
    rectify    h = dropout(max(0, a + b))

Gradients of what all rows share are summed by a fixed number of programs, each over its rows, then over the programs:
the same bits in every run.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .configs import padded
from .once import Sizes, launch, share, stay

ROWS = 4  # at a time
PROGRAMS = 132 * 8  # that sum up: as many as an H200 holds at once
COLUMNS = 512  # of a tile of `rectify`


@triton.jit
def _tile(r, c, rows, d: tl.constexpr):
    """Where these rows and columns lie, and which of them are real."""
    return r.to(tl.int64)[:, None] * d + c[None, :], (r < rows)[:, None] & (c < d)[None, :]


@triton.jit(do_not_specialize=["rows", "below"])
def join_kernel(
    X, Y, G, B, SUM, Z, MEAN, RSTD, SEED, rows, below, boost, eps,
    ADDS: tl.constexpr, DROPS: tl.constexpr, BIAS: tl.constexpr, R: tl.constexpr, d: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """sum and z of R rows."""
    r, c = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, D)
    at, real = _tile(r, c, rows, d)
    x = tl.load(X + at, mask=real, other=0.0).to(tl.float32)
    if ADDS:
        y = tl.load(Y + at, mask=real, other=0.0).to(tl.float32)
        if DROPS:
            y = tl.where(stay(SEED, r, 0, below, R, D), y * boost, 0.0)
        x += y
        tl.store(SUM + at, x.to(SUM.dtype.element_ty), mask=real)
    mean = tl.sum(x, 1) / d
    x = tl.where(real, x - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 1) / d + eps)
    z = x * rstd[:, None] * tl.load(G + c, mask=c < d, other=0.0).to(tl.float32)[None, :]
    if BIAS:
        z += tl.load(B + c, mask=c < d, other=0.0).to(tl.float32)[None, :]
    tl.store(Z + at, z.to(Z.dtype.element_ty), mask=real)
    tl.store(MEAN + r, mean, mask=r < rows)
    tl.store(RSTD + r, rstd, mask=r < rows)


@triton.jit(do_not_specialize=["rows", "each", "below"])
def join_backward_kernel(
    SUM, MEAN, RSTD, G, DSUM, DZ, DX, DY, PART, SEED, rows, each, below, boost,
    GOES_ON: tl.constexpr, ADDS: tl.constexpr, DROPS: tl.constexpr,
    R: tl.constexpr, d: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """dx and dy of `each` rows, R at a time; their sums of dz·x̂ and dz to PART, (programs, 2, D)."""
    pid = tl.program_id(0)
    c = tl.arange(0, D)
    g = tl.load(G + c, mask=c < d, other=0.0).to(tl.float32)[None, :]
    of_g = tl.zeros((R, D), tl.float32)
    of_b = tl.zeros((R, D), tl.float32)
    for a in range(pid * each, (pid + 1) * each, R):
        r = a + tl.arange(0, R)
        at, real = _tile(r, c, rows, d)
        x = tl.load(SUM + at, mask=real, other=0.0).to(tl.float32)
        dz = tl.load(DZ + at, mask=real, other=0.0).to(tl.float32)
        rstd = tl.load(RSTD + r, mask=r < rows, other=0.0)[:, None]
        x = (x - tl.load(MEAN + r, mask=r < rows, other=0.0)[:, None]) * rstd
        of_g += dz * x
        of_b += dz
        dz = dz * g
        dx = rstd * (dz - (tl.sum(dz, 1) / d)[:, None] - x * (tl.sum(dz * x, 1) / d)[:, None])
        if GOES_ON:
            dx += tl.load(DSUM + at, mask=real, other=0.0).to(tl.float32)
        tl.store(DX + at, dx.to(DX.dtype.element_ty), mask=real)
        if ADDS:
            if DROPS:
                dx = tl.where(stay(SEED, r, 0, below, R, D), dx * boost, 0.0)
            tl.store(DY + at, dx.to(DY.dtype.element_ty), mask=real)
    tl.store(PART + pid * 2 * D + c, tl.sum(of_g, 0))
    tl.store(PART + (pid * 2 + 1) * D + c, tl.sum(of_b, 0))


@triton.jit(do_not_specialize=["rows", "below"])
def rectify_kernel(
    A, B, H, SEED, rows, below, boost,
    DROPS: tl.constexpr, BIAS: tl.constexpr, R: tl.constexpr, d: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """h of R rows and C columns."""
    pid = tl.program_id(0)
    PARTS: tl.constexpr = (d + C - 1) // C
    r, c = pid // PARTS * R + tl.arange(0, R), pid % PARTS * C + tl.arange(0, C)
    at, real = _tile(r, c, rows, d)
    h = tl.load(A + at, mask=real, other=0.0).to(tl.float32)
    if BIAS:
        h += tl.load(B + c, mask=c < d, other=0.0).to(tl.float32)[None, :]
    h = tl.where(h > 0.0, h, h * 0.0)  # NaN stays NaN
    if DROPS:
        h = tl.where(stay(SEED, r, pid % PARTS, below, R, C), h * boost, 0.0)
    tl.store(H + at, h.to(H.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["rows", "each"])
def rectify_backward_kernel(
    H, DH, DA, PART, rows, each, boost, R: tl.constexpr, d: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """da of `each` rows and C columns, and their sums to PART. What is above 0 was so, and stayed."""
    pid = tl.program_id(0)
    PARTS: tl.constexpr = (d + C - 1) // C
    c = pid % PARTS * C + tl.arange(0, C)
    of_b = tl.zeros((R, C), tl.float32)
    for a in range(pid // PARTS * each, (pid // PARTS + 1) * each, R):
        at, real = _tile(a + tl.arange(0, R), c, rows, d)
        h = tl.load(H + at, mask=real, other=0.0).to(tl.float32)
        da = tl.load(DH + at, mask=real, other=0.0).to(tl.float32)
        da = tl.where(h > 0.0, da * boost, 0.0)
        of_b += da
        tl.store(DA + at, da.to(DA.dtype.element_ty), mask=real)
    tl.store(PART + pid // PARTS * d + c, tl.sum(of_b, 0), mask=c < d)


def join(
    x: Tensor,
    y: Tensor | None,
    seed: Tensor | None,
    g: Tensor,
    b: Tensor | None,
    how: tuple[float, float],
    z: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum (empty without y), the mean and 1/√(var + eps) of each row; z is filled. how: dropout, eps."""
    rows, d = x.numel() // x.shape[-1], x.shape[-1]
    total = torch.empty_like(x) if y is not None else x.new_empty(0)
    mean, rstd = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2))
    below, boost = share(how[0] if y is not None else 0.0)
    tensors = (
        x,
        x if y is None else y,
        g,
        g if b is None else b,
        total,
        z,
        mean,
        rstd,
        x if seed is None else seed,
    )
    sizes = {"ADDS": y is not None, "DROPS": below > 0, "BIAS": b is not None, **_wide(d)}
    launch(
        join_kernel, triton.cdiv(rows, ROWS), 4, tensors, (rows, below, boost, how[1]), tuple(sizes.items())
    )
    return total, mean, rstd


def join_backward(
    d_sum: Tensor | None,
    dz: Tensor,
    saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None],
    dropout_p: float,
    of_y: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, of y (empty without one), and of g and b, two rows. saved: sum, mean, rstd, g, seed."""
    total, mean, rstd, g, seed = saved
    rows, d = total.numel() // total.shape[-1], total.shape[-1]
    dx = torch.empty_like(total)
    dy = total.new_empty(0) if of_y is None else torch.empty_like(total, dtype=of_y)
    programs, each = _shared(rows, PROGRAMS)
    part = torch.empty(programs, 2, padded(d), dtype=torch.float32, device=dx.device)
    below, boost = share(dropout_p if of_y is not None else 0.0)
    given = (dz if d_sum is None else d_sum, dz, dx, dy if of_y is not None else dx, part)
    sizes = {"GOES_ON": d_sum is not None, "ADDS": of_y is not None, "DROPS": below > 0, **_wide(d)}
    tensors = total, mean, rstd, g, *given, total if seed is None else seed
    launch(join_backward_kernel, programs, 4, tensors, (rows, each, below, boost), tuple(sizes.items()))
    return dx, dy, part.sum(0)[:, :d].contiguous()


def rectify(a: Tensor, b: Tensor | None, seed: Tensor | None, dropout_p: float) -> Tensor:
    """h, as a."""
    h = torch.empty_like(a)
    rows, d = a.numel() // a.shape[-1], a.shape[-1]
    below, boost = share(dropout_p)
    sizes: Sizes = (("DROPS", below > 0), ("BIAS", b is not None), *_narrow(d).items())
    tensors = a, a if b is None else b, h, a if seed is None else seed
    programs = triton.cdiv(rows, ROWS) * triton.cdiv(d, _narrow(d)["C"])
    launch(rectify_kernel, programs, 4, tensors, (rows, below, boost), sizes)
    return h


def rectify_backward(h: Tensor, dh: Tensor, dropout_p: float) -> tuple[Tensor, Tensor]:
    """The gradients of a and b."""
    rows, d = h.numel() // h.shape[-1], h.shape[-1]
    da = torch.empty_like(h)
    parts = triton.cdiv(d, _narrow(d)["C"])
    groups, each = _shared(rows, max(1, PROGRAMS // parts))
    part = torch.empty(groups, d, dtype=torch.float32, device=h.device)
    tensors, numbers = (h, dh, da, part), (rows, each, share(dropout_p)[1])
    launch(rectify_backward_kernel, groups * parts, 4, tensors, numbers, tuple(_narrow(d).items()))
    return da, part.sum(0)


def _shared(rows: int, programs: int) -> tuple[int, int]:
    """How many programs share the rows, and how many each takes: a multiple of ROWS."""
    each = ROWS * max(1, triton.cdiv(rows, ROWS * programs))
    return max(1, triton.cdiv(rows, each)), each


def _wide(d: int) -> dict[str, Any]:
    return {"R": ROWS, "d": d, "D": padded(d)}


def _narrow(d: int) -> dict[str, Any]:
    return {"R": ROWS, "d": d, "C": min(COLUMNS, padded(d))}

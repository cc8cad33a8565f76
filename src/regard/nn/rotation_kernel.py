"""Rotary positions on a GPU as one pass over memory, where PyTorch's operations would need about ten.

Each entry needs its own value and that of its partner in the pair, which lies near it in memory. Columns that are not
rotated are copied. The gradient is the rotation by the negative angle.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from ..position.angles import cos_sin

ENTRIES = 2048  # of a tile: rows × columns
MAX_CACHED_ANGLES = 1 << 21  # per table: 16 MiB for cosines and sines
MAX_TABLES = 8  # cached at a time


@triton.jit
def rotation_kernel(
    X, OUT, COS, SIN, heads, n, d, pairs, sign, x_b, x_h, x_n, o_b, o_h, o_n,
    INTERLEAVED: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """(a, b) → (a cos θ − b sin θ, b cos θ + a sin θ) for the pairs of N rows of a head; sign = −1: by −θ."""
    row, column = tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, D)
    batch, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    if INTERLEAVED:
        pair, is_first = column // 2, column % 2 == 0
        partner = tl.where(is_first, column + 1, column - 1)
    else:
        pair, is_first = column % pairs, column < pairs
        partner = tl.where(is_first, column + pairs, column - pairs)
    inside = (row < n)[:, None] & (column < d)[None, :]
    turned = inside & (column < 2 * pairs)[None, :]
    start = X + batch * x_b + head * x_h + row[:, None].to(tl.int64) * x_n
    x = tl.load(start + column[None, :], mask=inside, other=0.0).to(tl.float32)
    y = tl.load(start + partner[None, :], mask=turned, other=0.0).to(tl.float32)
    angle = row[:, None] * pairs + pair[None, :]
    cos = tl.load(COS + angle, mask=turned, other=1.0)
    sin = tl.load(SIN + angle, mask=turned, other=0.0)
    out = x * cos + y * sin * tl.where(is_first, -sign, sign)[None, :]
    into = OUT + batch * o_b + head * o_h + row[:, None].to(tl.int64) * o_n
    tl.store(into + column[None, :], out.to(OUT.dtype.element_ty), mask=inside)


def rotate(
    x: Float[Tensor, "b h n d"], width: int, start: int, step: int, base: int | float, pairing: str
) -> Float[Tensor, "b h n d"]:
    """x with pair i of the first `width` columns rotated by (start + step · r) · base^(−2i/width) in row r."""
    # A table that is made while a graph is captured lives in the graph's memory, so it is not cached.
    caches = not (x.is_cuda and torch.cuda.is_current_stream_capturing())
    angles = angle_table(start, step, x.shape[2], width, float(base), x.device, caches)
    return _Rotation.apply(x, angles, pairing == "interleaved", 1.0)


def angle_table(
    start: int, step: int, n: int, width: int, base: float, device: torch.device, caches: bool
) -> Float[Tensor, "2 n r"]:
    """Cosines and sines of n rows. A cached table has 2^k rows, so that batches of many lengths share few tables."""
    rows = triton.next_power_of_2(n)
    if not caches or rows * width > 2 * MAX_CACHED_ANGLES:
        return _angles(start, step, n, width, base, device)
    return _cached_angles(start, step, rows, width, base, device)[:, :n]


def _angles(
    start: int, step: int, n: int, width: int, base: float, device: torch.device
) -> Float[Tensor, "2 n r"]:
    with torch.inference_mode(False), torch.no_grad():  # an inference tensor could not be used in training
        positions = start + step * torch.arange(n, device=device)
        return cos_sin(positions, width, base).to(torch.float32).contiguous()


_cached_angles = lru_cache(maxsize=MAX_TABLES)(_angles)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, angles, interleaved, sign):
        ctx.angles, ctx.rest = angles, (interleaved, sign)
        return _launched(x, angles, interleaved, sign)

    @staticmethod
    def backward(ctx, grad):
        interleaved, sign = ctx.rest
        return _Rotation.apply(grad, ctx.angles, interleaved, -sign), None, None, None


def _launched(x: Tensor, angles: Tensor, interleaved: bool, sign: float) -> Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = torch.empty_like(x)
    (b, h, n, d), pairs = x.shape, angles.shape[2]
    columns = triton.next_power_of_2(d)
    rows = max(ENTRIES // columns, 1)
    rotation_kernel[(triton.cdiv(n, rows), b * h)](
        x, out, angles[0], angles[1], h, n, d, pairs, sign, *x.stride()[:3], *out.stride()[:3],
        INTERLEAVED=interleaved, D=columns, N=rows, num_warps=4,
    )  # fmt: skip
    return out

"""Rotary positions on a CPU with cached angles: equal to `position.rotate`, at the cost of one complex product.

A pair (a, b) rotated by θ is the complex number (a + ib) · e^(iθ). Its gradient is rotated by −θ.
"""

from functools import lru_cache

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from ..position.angles import cos_sin

EXACT = (torch.float32, torch.float64)
MAX_CACHED_ANGLES = 1 << 20  # per table: 8 MiB in float32


def rotate_along(
    x: Float[Tensor, "*b n d"], start: int, step: int, base: int | float, pairing: str
) -> Float[Tensor, "*b n d"]:
    """x with pair i of row r rotated by (start + step · r) · base^(−2i/d)."""
    n, d = x.shape[-2:]
    compute = _cached_rotations if n * d <= 2 * MAX_CACHED_ANGLES else _rotations
    return _Rotation.apply(x, compute(start, step, n, d, float(base), x.dtype), pairing)


def _rotations(
    start: int, step: int, n: int, d: int, base: float, dtype: torch.dtype
) -> Complex[Tensor, "n r"]:
    with torch.inference_mode(False):  # a cached inference tensor could not be used in training
        cos, sin = cos_sin(start + step * torch.arange(n, device="cpu"), d, base).to(dtype)
        return torch.complex(cos, sin)


_cached_rotations = lru_cache(maxsize=64)(_rotations)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rotations, pairing):
        ctx.rotations, ctx.pairing = rotations, pairing
        return _product(x, rotations, pairing)

    @staticmethod
    def backward(ctx, grad):
        return _Rotation.apply(grad, ctx.rotations.conj(), ctx.pairing), None, None


def _product(
    x: Float[Tensor, "*b n d"], rotations: Complex[Tensor, "n r"], pairing: str
) -> Float[Tensor, "*b n d"]:
    if pairing == "interleaved":
        pairs = x.unflatten(-1, (-1, 2))
        even = all(s % 2 == 0 for s in (pairs.storage_offset(), *pairs.stride()[:-1]))
        pairs = pairs if even and pairs.stride(-1) == 1 else pairs.contiguous()  # as view_as_complex requires
        return torch.view_as_real(torch.view_as_complex(pairs) * rotations).flatten(-2)
    cos, sin = rotations.real, rotations.imag
    out = torch.empty_like(x)
    (a, b), (first, second) = x.chunk(2, -1), out.chunk(2, -1)
    torch.mul(a, cos, out=first).addcmul_(b, sin, value=-1)
    torch.mul(a, sin, out=second).addcmul_(b, cos)
    return out

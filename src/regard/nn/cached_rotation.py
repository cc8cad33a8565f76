"""Rotations on a CPU by remembered angles: what `position.rotate` says, at the price of one product.

A pair (a, b) turned by θ is the complex number (a + ib) · e^(iθ). Its gradient is turned back, by −θ.
"""

from functools import lru_cache

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from ..position.angles import cos_sin

EXACT = (torch.float32, torch.float64)
KEPT = 1 << 20  # angles of a table that is remembered: 8 MiB in float32


def turned(
    x: Float[Tensor, "*b n d"], start: int, step: int, base: int | float, pairing: str
) -> Float[Tensor, "*b n d"]:
    """x with pair i of row r turned by (start + step · r) · base^(−2i/d)."""
    n, d = x.shape[-2:]
    made = _remembered if n * d <= 2 * KEPT else _turns
    return _Turned.apply(x, made(start, step, n, d, float(base), x.dtype), pairing)


def _turns(start: int, step: int, n: int, d: int, base: float, dtype: torch.dtype) -> Complex[Tensor, "n r"]:
    with torch.inference_mode(False):  # else it could not serve a training that comes later
        cos, sin = cos_sin(start + step * torch.arange(n), d, base).to(dtype)
        return torch.complex(cos, sin)


_remembered = lru_cache(maxsize=64)(_turns)


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, turns, pairing):
        ctx.turns, ctx.pairing = turns, pairing
        return _product(x, turns, pairing)

    @staticmethod
    def backward(ctx, grad):
        return _Turned.apply(grad, ctx.turns.conj(), ctx.pairing), None, None


def _product(
    x: Float[Tensor, "*b n d"], turns: Complex[Tensor, "n r"], pairing: str
) -> Float[Tensor, "*b n d"]:
    if pairing == "interleaved":
        pairs = x.unflatten(-1, (-1, 2))
        even = all(s % 2 == 0 for s in (pairs.storage_offset(), *pairs.stride()[:-1]))
        pairs = pairs if even and pairs.stride(-1) == 1 else pairs.contiguous()  # as complex numbers lie
        return torch.view_as_real(torch.view_as_complex(pairs) * turns).flatten(-2)
    cos, sin = turns.real, turns.imag
    out = torch.empty_like(x)
    (a, b), (first, second) = x.chunk(2, -1), out.chunk(2, -1)
    torch.mul(a, cos, out=first).addcmul_(b, sin, value=-1)
    torch.mul(a, sin, out=second).addcmul_(b, cos)
    return out

"""Attention straight from a fused QKV projection, on a GPU: queries, keys and values of all heads in one tensor.

For sequences so short that a head's scores are one tile, as sentences are. What moves is then only the projection
and its gradient: heads are neither split nor concatenated. Everything else goes through `attention`.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..pattern import Pattern, causal, full
from .call import eager

MAX_POSITIONS = 128  # of a tile
MAX_ELEMENTS = 128 * 64  # positions × width: what the registers hold


class Options(NamedTuple):
    """What a call computes, beside its tensors."""

    heads: int
    kv_heads: int
    d_k: int
    d_v: int
    causal: bool
    scale: float
    dropout_p: float = 0.0


def fits(
    x: Float[Tensor, "b n d_model"], source: Float[Tensor, "b m d_context"], d: int, pattern: Pattern
) -> bool:
    """Whether these kernels run a call with heads of width d: on CUDA, in 16 bits, short, full or causal."""
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    if not x.is_cuda or dtype not in (torch.bfloat16, torch.float16):
        return False
    if not torch.compiler.is_compiling() and not eager(x, source):
        return False
    n, m = x.shape[1], source.shape[1]
    if n > MAX_POSITIONS or m > MAX_POSITIONS or max(n, m, 64) * max(d, 16) > MAX_ELEMENTS:
        return False
    return isinstance(pattern, full) or (isinstance(pattern, causal) and source is x)


def attend(
    x: Float[Tensor, "b n w"],
    context: Float[Tensor, "b m w_context"] | None,
    lengths: Int[Tensor, " b"] | None,
    options: Options,
) -> Float[Tensor, "b n w_out"]:
    """softmax(scale · q kᵀ) v of every head, side by side: (b, n, heads · d_v).

    A row of x holds the queries, then keys and values; where a context is given, that holds the last two.
    """
    seed = torch.randint(2**31 - 1, (1,), device=x.device) if options.dropout_p else None
    return torch.ops.regard.fused_qkv(x, context, lengths, seed, *options)


# The operation. Defined by its schema: torch.library.custom_op would cost more time than a launch.

_OPTIONS = "int heads, int kv_heads, int d_k, int d_v, bool causal, float scale, float dropout_p"
_ARGUMENTS = f"Tensor x, Tensor? context, Tensor? lengths, Tensor? seed, {_OPTIONS}"
torch.library.define("regard::fused_qkv", f"({_ARGUMENTS}) -> Tensor")
torch.library.define("regard::fused_qkv_backward", f"(Tensor grad, {_ARGUMENTS}) -> (Tensor, Tensor)")


@torch.library.impl("regard::fused_qkv", ("cpu", "cuda"))
def _run(x, context, lengths, seed, *options):
    from .cuda.triton import fused_qkv as kernels

    return kernels.forward(x, context, lengths, seed, Options(*options))


@torch.library.register_fake("regard::fused_qkv")
def _(x, context, lengths, seed, *options):
    heads, _, _, d_v, *_ = options
    return x.new_empty(*x.shape[:2], heads * d_v)


@torch.library.impl("regard::fused_qkv_backward", ("cpu", "cuda"))
def _run_backward(grad, x, context, lengths, seed, *options):
    """Where there is no context, its gradient is an empty tensor: an operation cannot return None."""
    from .cuda.triton import fused_qkv as kernels

    dx, dc = kernels.backward(grad, x, context, lengths, seed, Options(*options))
    return dx, x.new_empty(0) if dc is None else dc


@torch.library.register_fake("regard::fused_qkv_backward")
def _(grad, x, context, lengths, seed, *options):
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    like = (0,) if context is None else context.shape
    return dx, torch.empty(like, dtype=x.dtype, device=x.device)


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:4])
    ctx.options = inputs[4:]


def _backward(ctx, grad):
    x, context, lengths, seed = ctx.saved_tensors
    dx, dc = torch.ops.regard.fused_qkv_backward(grad, x, context, lengths, seed, *ctx.options)
    return dx, None if context is None else dc, *(None,) * (2 + len(ctx.options))


torch.library.register_autograd("regard::fused_qkv", _backward, setup_context=_setup)

"""Attention straight from a joint projection, on a GPU: queries, keys and values of all heads side by side.

For sequences so short that a head's scores are one tile, as sentences are. What moves is then only the projection
and its gradient: no heads are cut out and none are put together again. The engine's door does all the rest.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..pattern import Pattern, causal, full
from .call import eager

LONGEST = 128  # positions of a tile
LARGEST = 128 * 64  # positions × width: what the registers hold


@dataclass(frozen=True)
class Asked:
    """What is asked for, beside the tensors."""

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
    """Whether this way takes a call with heads `d` wide: on CUDA, in 16 bits, short, full or causal over itself."""
    if not x.is_cuda or _computed(x) not in (torch.bfloat16, torch.float16):
        return False
    if not torch.compiler.is_compiling() and not eager(x, source):
        return False
    n, m = x.shape[1], source.shape[1]
    if n > LONGEST or m > LONGEST or max(n, m, 64) * max(d, 16) > LARGEST:
        return False
    return isinstance(pattern, full) or (isinstance(pattern, causal) and source is x)


def _computed(x: Tensor) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def attend(
    x: Float[Tensor, "b n w"],
    context: Float[Tensor, "b m w_context"] | None,
    lengths: Int[Tensor, " b"] | None,
    asked: Asked,
) -> Float[Tensor, "b n w_out"]:
    """softmax(scale · q kᵀ) v of every head, side by side: (b, n, heads · d_v).

    A row of x holds the queries, then keys and values; where a context is given, that holds the last two.
    """
    seed = torch.randint(2**31 - 1, (1,), device=x.device) if asked.dropout_p else None
    heads = [asked.heads, asked.kv_heads, asked.d_k, asked.d_v]
    return torch.ops.regard.joint(
        x, context, lengths, seed, heads, asked.causal, asked.scale, asked.dropout_p
    )


# The operation. Defined by its schema: torch.library.custom_op would cost more time than a launch.

torch.library.define(
    "regard::joint",
    "(Tensor x, Tensor? context, Tensor? lengths, Tensor? seed, int[] heads, bool causal, float scale, "
    "float dropout_p) -> Tensor",
)
torch.library.define(
    "regard::joint_backward",
    "(Tensor grad, Tensor x, Tensor? context, Tensor? lengths, Tensor? seed, int[] heads, bool causal, float scale, "
    "float dropout_p) -> (Tensor, Tensor)",
)


def _asked(heads: list[int], causal: bool, scale: float, dropout_p: float) -> Asked:
    h, h_kv, d_k, d_v = heads
    return Asked(h, h_kv, d_k, d_v, causal, scale, dropout_p)


@torch.library.impl("regard::joint", ("cpu", "cuda"))
def _run(x, context, lengths, seed, heads, causal, scale, dropout_p):
    from .cuda.triton import fused_qkv as kernels

    return kernels.forward(x, context, lengths, seed, _asked(heads, causal, scale, dropout_p))


@torch.library.register_fake("regard::joint")
def _(x, context, lengths, seed, heads, causal, scale, dropout_p):
    return x.new_empty(*x.shape[:2], heads[0] * heads[3])


@torch.library.impl("regard::joint_backward", ("cpu", "cuda"))
def _run_backward(grad, x, context, lengths, seed, heads, causal, scale, dropout_p):
    """Where there is no context, its gradient is an empty tensor: an operation cannot return None."""
    from .cuda.triton import fused_qkv as kernels

    asked = _asked(heads, causal, scale, dropout_p)
    dx, dc = kernels.backward(grad, x, context, lengths, seed, asked)
    return dx, x.new_empty(0) if dc is None else dc


@torch.library.register_fake("regard::joint_backward")
def _(grad, x, context, lengths, seed, heads, causal, scale, dropout_p):
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    like = (0,) if context is None else context.shape
    return dx, torch.empty(like, dtype=x.dtype, device=x.device)


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:4])
    ctx.rest = inputs[4:]


def _backward(ctx, grad):
    x, context, lengths, seed = ctx.saved_tensors
    dx, dc = torch.ops.regard.joint_backward(grad, x, context, lengths, seed, *ctx.rest)
    return dx, None if context is None else dc, *(None,) * 6


torch.library.register_autograd("regard::joint", _backward, setup_context=_setup)

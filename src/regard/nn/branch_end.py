"""What a training step on a GPU does between matrix products, each as one pass: operations that torch.compile keeps.

The end of a residual branch and the norm that follows it: total = x + dropout(y), out = norm(total). And ReLU with
dropout. Both sample dropout by themselves, from a seed of PyTorch's generator, and both add the bias of the product
before them, whose gradient then needs no pass of its own.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from .. import compat
from ..engine.call import eager

MAX_WIDTH = 8192  # of a row, which one program holds
MAX_COUNT = 1 << 31  # of random numbers: they are counted in 32 bits


def supports(norm: nn.Module, x: Tensor, dropout: int | float) -> bool:
    """Whether `branch_end` computes this norm after a branch on these vectors."""
    plain = type(norm) is nn.LayerNorm or (type(norm) is nn.RMSNorm and norm.eps is not None)
    return plain and dropout < 1 and x.shape[-1] <= MAX_WIDTH and not compat.has_hooks(norm) and on_gpu(x)


def on_gpu(x: Tensor) -> bool:
    """Whether these operations take x: on a GPU, floating point of at most 32 bits."""
    return (
        x.is_cuda
        and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and x.numel() < MAX_COUNT
        and (torch.compiler.is_compiling() or eager(x))
    )


def computed_in(x: Tensor) -> torch.dtype:
    """The dtype of a matrix product of x."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _seed(x: Tensor, p: int | float) -> Tensor | None:
    return torch.randint(2**31 - 1, (1,), device=x.device) if p else None


def branch_end(
    x: Float[Tensor, "b n d"] | None,
    y: Float[Tensor, "b n d"],
    norm: Any,
    p: int | float,
    dtype: torch.dtype,
    y_bias: Float[Tensor, " d"] | None = None,
) -> tuple[Float[Tensor, "b n d"], Float[Tensor, "b n d"]]:
    """x + dropout(y + y_bias), and its norm in this dtype. Without x: as if it were 0."""
    bias = getattr(norm, "bias", None)
    rms = isinstance(norm, nn.RMSNorm)
    factors = [float(p), float(norm.eps), float(rms), float(x is not None)]
    total, out, _ = torch.ops.regard.branch_end(x, y, y_bias, norm.weight, bias, _seed(y, p), factors, dtype)
    return total, out


def relu_dropout(
    x: Float[Tensor, "*b d"], p: int | float, bias: Float[Tensor, " d"] | None = None
) -> Float[Tensor, "*b d"]:
    """dropout(relu(x + bias)); the backward pass needs the output alone."""
    return torch.ops.regard.relu_dropout(x, bias, _seed(x, p), float(p))


# The operations. Defined by their schemas: torch.library.custom_op would cost more time than a launch.

torch.library.define(
    "regard::branch_end",
    "(Tensor? x, Tensor y, Tensor? y_bias, Tensor? weight, Tensor? bias, Tensor? seed, float[] factors,"
    " ScalarType dtype) -> (Tensor, Tensor, Tensor)",
)
torch.library.define(
    "regard::branch_end_backward",
    "(Tensor?[] grads, Tensor total, Tensor statistics, Tensor? weight, Tensor? seed, float[] factors,"
    " ScalarType dtype) -> (Tensor, Tensor, Tensor)",
)
torch.library.define("regard::relu_dropout", "(Tensor x, Tensor? bias, Tensor? seed, float p) -> Tensor")
torch.library.define(
    "regard::relu_dropout_backward", "(Tensor d_out, Tensor out, float p) -> (Tensor, Tensor)"
)


@torch.library.impl("regard::branch_end", ("cpu", "cuda"))
def _branch_end(x, y, *rest):
    from . import branch_kernel

    return branch_kernel.branch_end(x, y, rest[:3], *rest[3:])


@torch.library.impl("regard::branch_end_backward", ("cpu", "cuda"))
def _branch_end_backward(*arguments):
    from . import branch_kernel

    return branch_kernel.branch_end_backward(*arguments)


@torch.library.impl("regard::relu_dropout", ("cpu", "cuda"))
def _relu_dropout(*arguments):
    from . import branch_kernel

    return branch_kernel.relu_dropout(*arguments)


@torch.library.impl("regard::relu_dropout_backward", ("cpu", "cuda"))
def _relu_dropout_backward(*arguments):
    from . import branch_kernel

    return branch_kernel.relu_dropout_backward(*arguments)


def _like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)


@torch.library.register_fake("regard::branch_end")
def _(x, y, *rest):
    statistics = torch.empty(2, y.numel() // y.shape[-1], dtype=torch.float32, device=y.device)
    return _like(y if x is None else x), _like(y, rest[-1]), statistics


@torch.library.register_fake("regard::branch_end_backward")
def _(grads, total, statistics, weight, seed, factors, dtype):
    sums = torch.empty(3, total.shape[-1], dtype=torch.float32, device=total.device)
    return _like(total) if factors[3] else total.new_empty(0), _like(total, dtype), sums


@torch.library.register_fake("regard::relu_dropout")
def _(x, bias, seed, p):
    return _like(x)


@torch.library.register_fake("regard::relu_dropout_backward")
def _(d_out, out, p):
    return _like(out), torch.empty(out.shape[-1], dtype=torch.float32, device=out.device)


def _setup(ctx, inputs, output):
    x, y, y_bias, weight, bias, seed, factors, _ = inputs
    total, _, statistics = output
    ctx.save_for_backward(total, statistics, weight, seed)
    ctx.rest, ctx.has_x = (factors, y.dtype), x is not None
    ctx.dtypes = tuple(None if t is None else t.dtype for t in (weight, bias, y_bias))
    ctx.set_materialize_grads(False)


def _backward(ctx, d_total, d_out, *_):
    total, *saved = ctx.saved_tensors
    if d_out is None:  # a run that reads the sum alone
        d_out = torch.zeros_like(total)
    dx, dy, sums = torch.ops.regard.branch_end_backward([d_out, d_total], total, *saved, *ctx.rest)
    d_weight, d_bias, d_y_bias = (
        None if kind is None else d.to(kind) for d, kind in zip(sums, ctx.dtypes, strict=True)
    )
    return dx if ctx.has_x else None, dy, d_y_bias, d_weight, d_bias, *(None,) * 3


def _setup_relu(ctx, inputs, output):
    bias = inputs[1]
    ctx.save_for_backward(output)
    ctx.p, ctx.dtype = inputs[3], None if bias is None else bias.dtype


def _backward_relu(ctx, d_out):
    dx, d_bias = torch.ops.regard.relu_dropout_backward(d_out, *ctx.saved_tensors, ctx.p)
    return dx, None if ctx.dtype is None else d_bias.to(ctx.dtype), None, None


torch.library.register_autograd("regard::branch_end", _backward, setup_context=_setup)
torch.library.register_autograd("regard::relu_dropout", _backward_relu, setup_context=_setup_relu)

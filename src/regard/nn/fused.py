"""What a layer does between its products, as single operations on a GPU, for training.

A compiler makes these of several passes over memory, draws a random number for each element by itself, and keeps more
for the backward pass than it takes. Each is opaque to it.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..engine.whole import eager

WIDEST = 2048  # numbers of a row that a program holds


class Stream(NamedTuple):
    """States, and what the last branch gave and is not yet added: the next norm's pass does that as well."""

    x: Float[Tensor, "*b d"]
    y: Float[Tensor, "*b d"] | None = None


def fits(x: Float[Tensor, "*b d"]) -> bool:
    """Whether x is in training on a GPU, with products of 16 bits."""
    if not x.is_cuda or not torch.is_grad_enabled() or not torch.is_autocast_enabled("cuda"):
        return False
    return torch.compiler.is_compiling() or eager(x)


def streams(x: Float[Tensor, "*b d"], norms: Iterable[nn.Module]) -> bool:
    """Whether `join` takes such states, and these norms."""
    return (
        fits(x)
        and x.dtype == torch.float32
        and x.shape[-1] <= WIDEST
        and all(type(norm) is nn.LayerNorm for norm in norms)
    )


def join(
    x: Float[Tensor, "*b d"],
    y: Float[Tensor, "*b d"] | None,
    norm: Any,
    p: int | float,
    dtype: torch.dtype | None = None,
) -> tuple[Float[Tensor, "*b d"], Float[Tensor, "*b d"]]:
    """x + dropout(y), and its norm; in the dtype of products if none is given."""
    p = float(p) if norm.training and y is not None else 0.0
    dtype = dtype or torch.get_autocast_dtype("cuda")
    total, z, _, _ = torch.ops.regard.join(x, y, _seed(x, p), norm.weight, norm.bias, p, norm.eps, dtype)
    return x if y is None else total, z


def rectify(a: Float[Tensor, "*b d"], bias: Float[Tensor, " d"] | None, p: float) -> Float[Tensor, "*b d"]:
    """dropout(max(0, a + bias))."""
    return torch.ops.regard.rectify(a, bias, _seed(a, p), p)


def _seed(x: Tensor, p: float) -> Tensor | None:
    return torch.randint(2**31 - 1, (1,), device=x.device) if p else None


torch.library.define(
    "regard::join",
    "(Tensor x, Tensor? y, Tensor? seed, Tensor weight, Tensor? bias, float p, float eps, ScalarType dtype) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define(
    "regard::join_backward",
    "(Tensor? d_sum, Tensor dz, Tensor sum, Tensor mean, Tensor rstd, Tensor weight, Tensor? seed, "
    "ScalarType? of_y, float p) -> (Tensor, Tensor, Tensor)",
)
torch.library.define("regard::rectify", "(Tensor a, Tensor? bias, Tensor? seed, float p) -> Tensor")
torch.library.define("regard::rectify_backward", "(Tensor h, Tensor dh, float p) -> (Tensor, Tensor)")


@torch.library.impl("regard::join", ("cpu", "cuda"))
def _join(x, y, seed, weight, bias, p, eps, dtype):
    from ..engine.kernels import rows

    x, y = x.contiguous(), None if y is None else y.contiguous()
    z = torch.empty(x.shape, dtype=dtype, device=x.device)
    total, mean, rstd = rows.join(x, y, seed, weight, bias, (p, eps), z)
    return total, z, mean, rstd


@torch.library.register_fake("regard::join")
def _(x, y, seed, weight, bias, p, eps, dtype):
    total = x.new_empty(0 if y is None else x.shape)
    mean, rstd = (x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32) for _ in range(2))
    return total, x.new_empty(x.shape, dtype=dtype), mean, rstd


@torch.library.impl("regard::join_backward", ("cpu", "cuda"))
def _join_backward(d_sum, dz, total, mean, rstd, weight, seed, of_y, p):
    """The gradients of x, of y (empty where there is none), and of weight and bias, two rows."""
    from ..engine.kernels import rows

    d_sum = None if d_sum is None else d_sum.contiguous()
    saved = total.contiguous(), mean, rstd, weight, seed
    return rows.join_backward(d_sum, dz.contiguous(), saved, p, of_y)


@torch.library.register_fake("regard::join_backward")
def _(d_sum, dz, total, mean, rstd, weight, seed, of_y, p):
    dx = torch.empty(total.shape, dtype=total.dtype, device=total.device)
    dy = total.new_empty(0) if of_y is None else torch.empty(total.shape, dtype=of_y, device=total.device)
    return dx, dy, weight.new_empty(2, weight.shape[0], dtype=torch.float32)


def _setup_join(ctx, inputs, output):
    x, y, seed, weight, bias, ctx.p, *_ = inputs
    total, _, mean, rstd = output
    ctx.of_y, ctx.of_bias = (None if t is None else t.dtype for t in (y, bias))
    ctx.save_for_backward(x if y is None else total, mean, rstd, weight, seed)
    ctx.set_materialize_grads(False)


def _backward_join(ctx, d_sum, dz, *_):
    total, mean, rstd, weight, seed = ctx.saved_tensors
    if ctx.of_y is None:  # then x goes on by itself
        d_sum = None
    dz = torch.zeros_like(total) if dz is None else dz
    given = d_sum, dz, total, mean, rstd, weight, seed, ctx.of_y, ctx.p
    dx, dy, (dg, db) = torch.ops.regard.join_backward(*given)
    db = None if ctx.of_bias is None else db.to(ctx.of_bias)
    return dx, None if ctx.of_y is None else dy, None, dg.to(weight.dtype), db, None, None, None


torch.library.register_autograd("regard::join", _backward_join, setup_context=_setup_join)


@torch.library.impl("regard::rectify", ("cpu", "cuda"))
def _rectify(a, bias, seed, p):
    from ..engine.kernels import rows

    return rows.rectify(a.contiguous(), bias, seed, p)


@torch.library.register_fake("regard::rectify")
def _(a, bias, seed, p):
    return torch.empty(a.shape, dtype=a.dtype, device=a.device)


@torch.library.impl("regard::rectify_backward", ("cpu", "cuda"))
def _rectify_backward(h, dh, p):
    from ..engine.kernels import rows

    return rows.rectify_backward(h.contiguous(), dh.contiguous(), p)


@torch.library.register_fake("regard::rectify_backward")
def _(h, dh, p):
    da = torch.empty(h.shape, dtype=h.dtype, device=h.device)
    return da, h.new_empty(h.shape[-1], dtype=torch.float32)


def _setup_rectify(ctx, inputs, output):
    _, bias, _, ctx.p = inputs
    ctx.of_bias = None if bias is None else bias.dtype
    ctx.save_for_backward(output)


def _backward_rectify(ctx, dh):
    (h,) = ctx.saved_tensors
    da, db = torch.ops.regard.rectify_backward(h, dh, ctx.p)
    return da, None if ctx.of_bias is None else db.to(ctx.of_bias), None, None


torch.library.register_autograd("regard::rectify", _backward_rectify, setup_context=_setup_rectify)

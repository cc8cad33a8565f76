"""Position-wise networks in training on a CPU, their gradients worked out by hand.

The gradient passes through the hidden layer where it lies, so less that is as wide is written. For 1500 rows that is
1 to 9 % of the time of max(0, x W₁) W₂ and 2 to 4 % of that of a gated one; nothing at half the sizes
(bench/train_layers.py).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ..engine.call import readable
from .hooks import plain

# f, and how a gradient passes back through it, written where it lies
GATES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[..., Tensor]]] = {
    "swiglu": (F.silu, torch.ops.aten.silu_backward.grad_input),
    "geglu": (F.gelu, torch.ops.aten.gelu_backward.grad_input),
}


def fits(network: Any, x: Tensor) -> bool:
    """Whether `network`, a FeedForward, is one of these, as it was built, and is trained on these numbers."""
    declared = network.spec
    known = declared.activation in GATES if declared.gated else declared.activation == "relu"
    known = known and not (declared.dropout and network.training) and torch.is_grad_enabled()
    ready = known and x.dtype in (torch.float32, torch.float64) and readable(x)
    layers = (network.w_in, network.w_out, *([network.w_gate] if declared.gated else []))
    return ready and not torch.is_autocast_enabled("cpu") and plain(*layers)


def network(module: Any, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
    """What the module says of x."""
    rows = x.reshape(-1, x.shape[-1])
    into, out = (module.w_in.weight, module.w_in.bias), (module.w_out.weight, module.w_out.bias)
    y: Tensor
    if module.w_gate is None:
        y = Rectified.apply(rows, *into, *out)
    else:
        gate = module.w_gate
        y = Gated.apply(rows, *into, *out, gate.weight, gate.bias, module.spec.activation)
    return y.view(*x.shape[:-1], -1)


class Rectified(torch.autograd.Function):
    """max(0, x W₁ + b₁) W₂ + b₂."""

    @staticmethod
    def forward(ctx, x, w_in, b_in, w_out, b_out):
        hidden = F.linear(x, w_in, b_in).relu_()
        ctx.save_for_backward(x, w_in, b_in, w_out, b_out, hidden)
        return F.linear(hidden, w_out, b_out)

    @staticmethod
    def backward(ctx, grad):
        *given, hidden = ctx.saved_tensors
        x, w_in, b_in, w_out, b_out = given
        if torch.is_grad_enabled():  # create_graph=True: these gradients will be differentiated again
            y = F.linear(F.relu(F.linear(x, w_in, b_in)), w_out, b_out)
            return _again(y, given, ctx.needs_input_grad, grad)
        back = grad @ w_out
        torch.ops.aten.threshold_backward.grad_input(back, hidden, 0, grad_input=back)
        return _those(
            ctx.needs_input_grad,
            lambda: back @ w_in,
            lambda: back.T @ x,
            lambda: back.sum(0),
            lambda: grad.T @ hidden,
            lambda: grad.sum(0),
        )


class Gated(torch.autograd.Function):
    """(f(x W_g + b_g) ∘ (x W₁ + b₁)) W₂ + b₂."""

    @staticmethod
    def forward(ctx, x, w_in, b_in, w_out, b_out, w_gate, b_gate, name):
        gate, up = F.linear(x, w_gate, b_gate), F.linear(x, w_in, b_in)
        opened = GATES[name][0](gate)
        hidden = opened * up
        ctx.save_for_backward(x, w_in, b_in, w_out, b_out, w_gate, b_gate, gate, up, opened, hidden)
        ctx.name = name
        return F.linear(hidden, w_out, b_out)

    @staticmethod
    def backward(ctx, grad):
        *given, gate, up, opened, hidden = ctx.saved_tensors
        x, w_in, b_in, w_out, b_out, w_gate, b_gate = given
        f, through = GATES[ctx.name]
        needed = ctx.needs_input_grad[:-1]  # the name has none
        if torch.is_grad_enabled():
            inner = f(F.linear(x, w_gate, b_gate)) * F.linear(x, w_in, b_in)
            return *_again(F.linear(inner, w_out, b_out), given, needed, grad), None
        shut = grad @ w_out
        back = shut * opened
        through(shut.mul_(up), gate, grad_input=shut)
        found = _those(
            needed,
            lambda: (back @ w_in).addmm_(shut, w_gate),
            lambda: back.T @ x,
            lambda: back.sum(0),
            lambda: grad.T @ hidden,
            lambda: grad.sum(0),
            lambda: shut.T @ x,
            lambda: shut.sum(0),
        )
        return *found, None


def _those(needed: Sequence[bool], *makers: Callable[[], Tensor]) -> tuple[Tensor | None, ...]:
    return tuple(make() if need else None for make, need in zip(makers, needed, strict=True))


def _again(
    y: Tensor, given: Sequence[Any], needed: Sequence[bool], grad: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients by the formula, recorded."""
    wanted = [t for t, need in zip(given, needed, strict=True) if need]
    found = iter(torch.autograd.grad(y, wanted, grad, create_graph=True))
    return tuple(next(found) if need else None for need in needed)

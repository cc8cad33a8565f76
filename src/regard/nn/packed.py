"""Products of a training step in 16 bits, with weights cast once an update and gradients that are float32 at once.

Autocast casts each weight where it is used, and each gradient back: hundreds of small kernels an update. Here all
weights are copied by one kernel, layers with the same input are one product, and a weight's gradient leaves its
product in float32, as the optimizer takes it.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from .. import compat


class Packed:
    """The 16-bit copy of linear layers with the same input, whose outputs one product gives side by side."""

    def __init__(self, layers: Sequence[nn.Linear], dtype: torch.dtype):
        self.weights = [layer.weight for layer in layers]
        self.biases = [layer.bias for layer in layers if layer.bias is not None]
        device = self.weights[0].device
        rows = sum(len(w) for w in self.weights)
        self.weight = torch.empty(rows, self.weights[0].shape[1], dtype=dtype, device=device)
        self.bias = torch.empty(rows, dtype=dtype, device=device) if self.biases else None

    def copies(self) -> list[tuple[Tensor, Tensor]]:
        """Each part of the copy, and the parameter that it is a copy of."""
        sizes = [len(w) for w in self.weights]
        pairs = list(zip(self.weight.split(sizes), self.weights, strict=True))
        return (
            pairs if self.bias is None else [*pairs, *zip(self.bias.split(sizes), self.biases, strict=True)]
        )

    def __call__(self, x: Float[Tensor, "*b d"], adds_bias: bool = True) -> Float[Tensor, "*b w"]:
        """x Wᵀ + bias, in the copy's dtype. The gradients are those of the layers' own parameters."""
        bias, biases = (self.bias, self.biases) if adds_bias else (None, [])
        return torch.ops.regard.packed_linear(
            x.to(self.weight.dtype), self.weight, bias, self.weights, biases
        )


class Copies:
    """The copies of all layers of a model that can use one; valid inside `used`."""

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        self.of: list[tuple[Any, dict[str, Packed]]] = []
        for module in model.modules():
            groups: dict[str, list[Any]] = getattr(module, "packs", dict)()
            groups = {name: layers for name, layers in groups.items() if all(map(_is_plain, layers))}
            if groups:
                self.of.append((module, {name: Packed(layers, dtype) for name, layers in groups.items()}))
        pairs = [pair for _, packed in self.of for p in packed.values() for pair in p.copies()]
        self.targets, self.sources = [t for t, _ in pairs], [s for _, s in pairs]

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """A context in which the copies equal the weights and the model computes with them."""
        if self.targets:
            with torch.no_grad():
                compat.foreach_copy_(self.targets, self.sources)
        for module, packed in self.of:
            module.packed = packed
        try:
            yield
        finally:
            for module, _ in self.of:
                module.packed = {}


def _is_plain(layer: nn.Module) -> bool:
    return type(layer) is nn.Linear and layer.weight.dtype == torch.float32 and not compat.has_hooks(layer)


def product(
    packed: Packed | None, x: Float[Tensor, "*b d"], layers: Sequence[Any], adds_bias: bool = True
) -> Float[Tensor, "*b w"]:
    """The outputs of these linear layers side by side, by one product, of the packed copy where there is one."""
    if packed is not None:
        return packed(x, adds_bias)
    if len(layers) == 1 and adds_bias:
        return layers[0](x)
    biases = [layer.bias for layer in layers if adds_bias and layer.bias is not None]
    if len(layers) == 1:
        return F.linear(x, layers[0].weight)
    return F.linear(x, torch.cat([layer.weight for layer in layers]), torch.cat(biases) if biases else None)


# The operation. Defined by its schema, as those of branch_end.py.

torch.library.define(
    "regard::packed_linear",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor[] weights, Tensor[] biases) -> Tensor",
)
torch.library.define(
    "regard::packed_linear_backward",
    "(Tensor grad, Tensor x, Tensor weight, bool needs_dx, bool biased) -> (Tensor, Tensor, Tensor)",
)


@torch.library.impl("regard::packed_linear", ("cpu", "cuda"))
def _forward(x, weight, bias, weights, biases):
    return F.linear(x, weight, bias)


@torch.library.impl("regard::packed_linear_backward", ("cpu", "cuda"))
def _run_backward(grad, x, weight, needs_dx, biased):
    """The gradients of x, and in float32 of the weight and the bias; empty tensors where none is needed."""
    from .branch_kernel import column_sums

    grads, rows = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
    dx = (grads @ weight).view(x.shape) if needs_dx else x.new_empty(0)
    if grads.is_cuda:
        dw = torch.ops.aten.mm.dtype(grads.T, rows, torch.float32)
    else:  # under the interpreter
        dw = grads.T.float() @ rows.float()
    return dx, dw, column_sums(grads) if biased else dw.new_empty(0)


@torch.library.register_fake("regard::packed_linear")
def _(x, weight, bias, weights, biases):
    return x.new_empty(*x.shape[:-1], len(weight))


@torch.library.register_fake("regard::packed_linear_backward")
def _(grad, x, weight, needs_dx, biased):
    def like(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.float32, device=x.device)

    dx = torch.empty(x.shape if needs_dx else (0,), dtype=x.dtype, device=x.device)
    return dx, like(*weight.shape), like(len(weight) if biased else 0)


def _setup(ctx, inputs, output):
    x, weight, _, weights, biases = inputs
    ctx.save_for_backward(x, weight)
    ctx.sizes, ctx.biased = [len(w) for w in weights], bool(biases)


def _backward(ctx, grad):
    x, weight = ctx.saved_tensors
    needs_dx = ctx.needs_input_grad[0]
    dx, dw, db = torch.ops.regard.packed_linear_backward(grad, x, weight, needs_dx, ctx.biased)
    d_weights = list(dw.split(ctx.sizes))
    return dx if needs_dx else None, None, None, d_weights, list(db.split(ctx.sizes)) if ctx.biased else []


torch.library.register_autograd("regard::packed_linear", _backward, setup_context=_setup)

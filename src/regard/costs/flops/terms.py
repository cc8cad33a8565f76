"""Terms that every model is made of: a linear map, a norm, an activation, an addition. Amounts are plain arithmetic.

Elementwise FLOPs, with a square root, an exponential or an error function counted as one:

    layer norm  per vector of d    7d + 2   mean d, center d, variance 2d, eps and root 2, divide d, gain d, shift d
    RMS norm    per vector of d    4d + 2
    batch norm                     7 per value, and 2 per feature
    activations                    ACTIVATIONS per value, in which a gate adds 1
"""

from ..sizes import Scope
from ..tree import Amount, Amounts, Part

ACTIVATIONS = {
    "relu": 1, "gelu": 5, "gelu_tanh": 9, "silu": 4, "swiglu": 5, "geglu": 6, "tanh": 1, "sigmoid": 3,
    "leaky_relu": 2, "relu6": 2, "elu": 3, "selu": 4, "mish": 5, "softplus": 3, "hardswish": 5,
}  # fmt: skip
TOKEN_ID_BYTES = 8


def linear(name: str, scope: Scope, rows: Amount, d_in: Amount, d_out: Amount, bias: bool) -> Part:
    """y = x W (+ b): 2 · rows · d_in · d_out forward, twice that backward (gradients of x and of W)."""
    parameters = d_in * d_out + (d_out if bias else 0)
    moved = scope.itemsize * (rows * d_in + d_in * d_out + rows * d_out)
    return Part(name, product(2 * rows * d_in * d_out, parameters, moved))


def product(flops: Amount, parameters: Amount = 0, bytes: Amount = 0, gradients: int = 2) -> Amounts:
    """A matrix product, executed in full; its backward pass is as many products of the same size as gradients."""
    return Amounts(parameters, flops, gradients * flops, 0, flops, gradients * flops, bytes)


def elementwise(name: str, scope: Scope, values: Amount, each: Amount = 1, moved: Amount = 2) -> Part:
    """`each` FLOPs for every value; `moved` reads and writes for every value."""
    return Part(name, Amounts(elementwise_flops=each * values, bytes=scope.itemsize * moved * values))


def norm(name: str, kind: str, scope: Scope, rows: Amount, d: Amount, bias: bool = True) -> Part | None:
    """The norm of `rows` vectors of width d; None if the kind is "none"."""
    if kind == "none":
        return None
    shift = 1 if bias and kind != "rms" else 0
    each = (4 if kind == "rms" else 6) + shift
    flops = each * rows * d + 2 * d if kind == "batch" else rows * (each * d + 2)
    moved = scope.itemsize * 2 * rows * d
    return Part(name, Amounts((1 + shift) * d, elementwise_flops=flops, bytes=moved))


def lookup(scope: Scope, rows: Amount, vocab: Amount, d: Amount) -> Amounts:
    """A table of vocab vectors of width d, of which `rows` are read and written."""
    return Amounts(vocab * d, bytes=rows * (TOKEN_ID_BYTES + 2 * scope.itemsize * d))


def present(*parts: Part | bool | None) -> tuple[Part, ...]:
    """The parts whose condition holds: `present(condition and part, …)`."""
    return tuple(p for p in parts if isinstance(p, Part))

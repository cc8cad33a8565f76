"""Terms that every model is made of: a linear map, a norm, an activation, a sum. Amounts are plain arithmetic.

What is not a matrix product is counted a value at a time, a root, an exponential or an error function as one:

    layer norm  a vector of d      7d + 2   mean d, centre d, variance 2d, + eps and root 2, divide d, gain d, shift d
    RMS norm                       4d + 2
    batch norm                     7 a value: a vector's worth for each feature
    relu 1, silu 4, gelu 5, tanh form of gelu 9, tanh 1; a gate 1 more
"""

from ..sizes import Scope
from ..tree import Amount, Amounts, Part

ACTIVATIONS = {"relu": 1, "gelu": 5, "gelu_tanh": 9, "silu": 4, "swiglu": 5, "geglu": 6, "tanh": 1}


def linear(
    name: str, at: Scope, rows: Amount, d_in: Amount, d_out: Amount, bias: bool, note: str = ""
) -> Part:
    """y = x W (+ b) for so many rows: 2 · rows · d_in · d_out forward, twice that backward (to x and to W)."""
    product = 2 * rows * d_in * d_out
    return Part(
        name,
        Amounts(
            parameters=d_in * d_out + (d_out if bias else 0),
            operations=product,
            backward=2 * product,
            executed=product,
            executed_backward=2 * product,
            bytes=at.itemsize * (rows * d_in + d_in * d_out + rows * d_out),
        ),
        note=note,
    )


def elementwise(name: str, at: Scope, values: Amount, each: Amount = 1, moved: Amount = 2) -> Part:
    """So many operations for each of so many values, which are read and written: `moved` values each."""
    return Part(name, Amounts(other=each * values, bytes=at.itemsize * moved * values))


def norm(name: str, kind: str, at: Scope, rows: Amount, d: Amount, bias: bool = True) -> Part | None:
    """The norm of so many vectors of width d; None where there is none."""
    moved = at.itemsize * 2 * rows * d
    match kind:
        case "layer":
            parameters, other = (2 if bias else 1) * d, rows * ((7 if bias else 6) * d + 2)
        case "rms":
            parameters, other = d, rows * (4 * d + 2)
        case "batch":
            parameters, other = (2 if bias else 1) * d, (7 if bias else 6) * rows * d + 2 * d
        case _:
            return None
    return Part(name, Amounts(parameters=parameters, other=other, bytes=moved))


def some(*parts: Part | None) -> tuple[Part, ...]:
    return tuple(p for p in parts if p is not None)

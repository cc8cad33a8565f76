"""Products with constant matrices on a CPU, for inference: x · weightᵀ + bias in float32 or float64.

A product of few rows takes as long as reading its weight from memory. A matrix of 8-bit integers with one scale per
row, as `rg.save(…, weights="int8")` writes it, is read here as these integers in float16, half the bytes; they are
converted to float32 in registers, and every product and sum is that of float32.
"""

from collections.abc import Callable
from functools import cache, cached_property

import torch
from jaxtyping import Float
from torch import Tensor, nn

from .. import compat

LARGEST = 127  # of the 8-bit integers
MAX_HALF_ROWS = 64  # up to which reading half the bytes is faster than the packed float32 product


class ConstantLinear:
    """A linear layer, or several concatenated ones, whose weights do not change.

    Each layout of the weights is made when it is first needed.
    """

    def __init__(self, weights: list[Tensor], bias: Float[Tensor, " d_out"] | None = None):
        self.weights, self.bias = weights, bias

    @classmethod
    def of(cls, *layers: nn.Linear) -> "ConstantLinear":
        bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
        return cls([layer.weight for layer in layers], bias)

    def __call__(self, x: Float[Tensor, "b d_in"]) -> Float[Tensor, "b d_out"]:
        if len(x) > MAX_HALF_ROWS or self.integers is None:
            return self.packed(x)
        product, scale = self.integers
        y = product(x).mul_(scale)
        return y if self.bias is None else y.add_(self.bias)

    def add_to(self, x: Float[Tensor, "b d_out"], y: Float[Tensor, "b d_in"]) -> None:
        """x ← x + this product of y."""
        if len(x) > MAX_HALF_ROWS or self.integers is None or self.bias is not None:
            x.add_(self(y))
        else:
            product, scale = self.integers
            x.addcmul_(product(y), scale)

    @cached_property
    def packed(self) -> Callable[[Tensor], Tensor]:
        return compat.constant_product(self._weight(), self.bias)

    @cached_property
    def integers(self) -> tuple[Callable[[Tensor], Tensor], Float[Tensor, " d_out"]] | None:
        """The product with integers, and the scale of each column of its result."""
        found = None
        if self.weights[0].dtype == torch.float32 and _reads_half():
            found = integer_rows(self._weight())
        return None if found is None else (_half_product(found[0]), found[1])

    def _weight(self) -> Float[Tensor, "d_out d_in"]:
        return torch.cat(self.weights) if len(self.weights) > 1 else self.weights[0]


def integer_rows(weight: Float[Tensor, "n d"]) -> tuple[Float[Tensor, "n d"], Float[Tensor, " n"]] | None:
    """Integers from −127 to 127 and a scale per row whose product is this matrix, bit for bit; None where some row
    has none.
    """
    if len(weight) > 1 and integer_rows(weight[:1]) is None:  # a matrix of other values costs one row
        return None
    # The largest value of a row is 127 times its scale, rounded: the scale is this quotient or a neighbor of it.
    quotient = weight.abs().amax(1, keepdim=True) / LARGEST
    up, down = torch.full_like(quotient, torch.inf), torch.zeros_like(quotient)
    integers, scale = torch.empty_like(weight), torch.empty_like(quotient)
    missing = torch.arange(len(weight))
    for candidate in (quotient, quotient.nextafter(up), quotient.nextafter(down)):
        rows, factor = weight[missing], candidate[missing]
        rounded = (rows / factor).round_()
        equal = (rounded * factor == rows).all(1)
        integers[missing[equal]], scale[missing[equal]] = rounded[equal], factor[equal]
        missing = missing[~equal]
        if not len(missing):
            return integers, scale[:, 0]
    return None


def _half_product(weight: Tensor) -> Callable[[Tensor], Tensor]:
    packed, product = (
        torch.ops.quantized.linear_prepack_fp16(weight, None),
        torch.ops.quantized.linear_dynamic_fp16,
    )
    return lambda x: product(x, packed)


@cache
def _reads_half() -> bool:
    """The operators may be missing (PyTorch without FBGEMM), or round their inputs to half precision."""
    weight, x = torch.tensor([[1.0, 127.0], [-126.0, 3.0]]), torch.tensor([[1 + 2**-23, 2**-24]])
    try:
        return torch.equal(
            _half_product(weight)(x).double(), (x.double() @ weight.double().t()).float().double()
        )
    except (AttributeError, RuntimeError, TypeError):
        return False

"""Products with constant matrices on a CPU, for inference: x · weightᵀ + bias in float32 or float64.

A product of few rows takes as long as reading its weight from memory. A matrix of 8-bit integers with one scale per
row, as `rg.save(…, weights="int8")` writes it, is read here as these integers in float16, half the bytes; they are
converted to float32 in registers, and every product and sum is that of float32.
"""

from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn

from .. import compat

LARGEST = 127  # of the 8-bit integers
FEW_ROWS = 64  # up to this number another layout than the packed one may be faster
MAX_MKL_WEIGHTS = 1 << 20  # of a matrix; see _layout


class ConstantLinear:
    """A linear layer, or several concatenated ones, whose weights do not change.

    Each layout of the weights is made when it is first needed.
    """

    def __init__(self, weights: list[Tensor], bias: Float[Tensor, " d_out"] | None = None):
        self.weights, self.bias = weights, bias
        self.size = sum(w.numel() for w in weights)

    @classmethod
    def of(cls, *layers: nn.Linear) -> "ConstantLinear":
        bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
        return cls([layer.weight for layer in layers], bias)

    def __call__(self, x: Float[Tensor, "b d_in"]) -> Float[Tensor, "b d_out"]:
        layout = self._layout(len(x))
        if layout == "packed":
            return self.packed(x)
        if layout == "transposed":
            return (
                torch.mm(x, self.transposed)
                if self.bias is None
                else torch.addmm(self.bias, x, self.transposed)
            )
        assert self.integers is not None
        product, scale = self.integers
        y = product(x).mul_(scale)
        return y if self.bias is None else y.add_(self.bias)

    def add_to(self, x: Float[Tensor, "b d_out"], y: Float[Tensor, "b d_in"]) -> None:
        """x ← x + this product of y, by as few operations as the layout allows."""
        layout = "packed" if self.bias is not None else self._layout(len(x))
        if layout == "transposed":
            x.addmm_(y, self.transposed)
        elif layout == "integers" and self.integers is not None:
            product, scale = self.integers
            x.addcmul_(product(y), scale)
        else:
            x.add_(self(y))

    def _layout(self, rows: int) -> str:
        """The fastest layout for this number of rows, as measured on an AMD EPYC and an Intel Xeon with two threads.

        Half the bytes win where reading the weight takes longest: few rows, large matrices. On Intel's processors
        MKL's product of a small matrix is faster still, since it is called with less overhead.
        """
        if rows > FEW_ROWS:
            return "packed"
        if _mkl_is_fast() and self.size <= MAX_MKL_WEIGHTS:
            return "transposed"
        if self.integers is None or (_mkl_is_fast() and rows > FEW_ROWS // 2):
            return "packed"
        return "integers"

    @cached_property
    def transposed(self) -> Float[Tensor, "d_in d_out"]:
        return self._weight().t().contiguous()

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


@cache
def _mkl_is_fast() -> bool:
    """Whether this is a processor of Intel, for which MKL has its best kernels."""
    try:
        return torch.backends.mkl.is_available() and "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux
        return False

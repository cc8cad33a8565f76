"""FLOPs of PyTorch's operations: those of matrix products, and the operations known to contain none."""

import re
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry


def _cdist(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """‖a − b‖ of every pair: a difference and a square per entry, counted like one product."""
    return 2 * prod(a.shape[:-1]) * b.shape[-2] * a.shape[-1]


PRODUCTS: dict[str, Callable[..., int]] = {
    **dict.fromkeys(("dot", "vdot", "mv"), lambda a, *_, **__: 2 * a.numel()),
    "addmv": lambda c, a, *_, **__: 2 * a.numel(),
    "addbmm": lambda c, a, b, *_, **__: 2 * a.numel() * b.shape[-1],
    "addr": lambda c, a, b, *_, **__: 2 * a.numel() * b.numel(),
    # Of groups of rows with a matrix each (experts), every row is multiplied once.
    **dict.fromkeys(("_int_mm", "_grouped_mm"), lambda a, b, *_, **__: 2 * a.numel() * b.shape[-1]),
    "_cdist_forward": _cdist,
}


def product_flops(op: Any, args: tuple, kwargs: dict, out: Any) -> int | None:
    """FLOPs of the matrix products in this call; None if it has none."""
    packet = op.overloadpacket
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=out))
    name = op.__name__.split(".")[0].removesuffix("_")
    return PRODUCTS[name](*args, **kwargs) if name in PRODUCTS and op.namespace == "aten" else None


# Operations without a formula whose name says that they contain products, or that may.
UNKNOWN = re.compile(
    r"(mm|mv|conv|rnn|lstm|gru|fft|solve|cholesky|geqrf|ormqr|pdist|attention|transformer|trilinear|linalg_(?!vector))"
)


def has_no_product(op: Any) -> bool:
    """Whether an operation is known to contain no matrix product."""
    if torch.Tag.pointwise in op.tags or op.is_view:
        return True
    return op.namespace in ("aten", "prim", "prims") and UNKNOWN.search(op.__name__.split(".")[0]) is None

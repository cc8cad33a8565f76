"""FLOPs of PyTorch's operations: those of matrix products, and the operations known to contain none."""

import re
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from ...engine.compiled_ops import read_options


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


def _sparse(q: Tensor, k: Tensor, v: Tensor, extras: Any, pattern: str, offset: Any, factors: Any) -> int:
    """rg.attention by the pairs of its pattern: 2 d_k per score, 2 d_v per weighted value."""
    options = read_options(extras, pattern, offset, factors)[1]
    pairs = options.pattern.count(q.shape[-2], k.shape[-2], (options.start, options.step))
    return 2 * q.shape[:-2].numel() * pairs * (q.shape[-1] + v.shape[-1])


def _sparse_backward(grads: Any, saved: Any, pattern: str, offset: Any, factors: Any, of_bias: bool) -> int:
    """Two products for each of the forward pass; the scores that are computed again are not counted."""
    q, k, v = saved[:3]
    return 2 * _sparse(q, k, v, saved[5:], pattern, offset, factors)


def _fused_qkv(x: Tensor, context: Tensor | None, lengths: Any, seed: Any, sizes: Any, factors: Any) -> int:
    """Attention of a short sequence, with queries, keys and values side by side."""
    (b, n), m = x.shape[:2], (x if context is None else context).shape[1]
    heads, _, d_k, d_v, is_causal = sizes
    return 2 * b * heads * (n * (n + 1) // 2 if is_causal else n * m) * (d_k + d_v)


OWN: dict[str, Callable[..., int]] = {
    "sparse_attention": _sparse,
    "sparse_attention_backward": _sparse_backward,
    "fused_qkv": _fused_qkv,
    "fused_qkv_backward": lambda grad, *args: 2 * _fused_qkv(*args),
}


def product_flops(op: Any, args: tuple, kwargs: dict, out: Any) -> int | None:
    """FLOPs of the matrix products in this call; None if it has none."""
    packet = op.overloadpacket
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=out))
    name = op.__name__.split(".")[0].removesuffix("_")
    if op.namespace == "regard":
        return OWN[name](*args, **kwargs) if name in OWN else None
    return PRODUCTS[name](*args, **kwargs) if name in PRODUCTS and op.namespace == "aten" else None


# Operations without a formula whose name says that they contain products, or that may.
UNKNOWN = re.compile(
    r"((?<!cu)mm|mv|conv|rnn|lstm|gru|fft|solve|cholesky|geqrf|ormqr|pdist|attention|transformer|trilinear|linalg_(?!vector))"
)


def has_no_product(op: Any) -> bool:
    """Whether an operation is known to contain no matrix product."""
    if torch.Tag.pointwise in op.tags or op.is_view:
        return True
    return op.namespace in ("aten", "prim", "prims") and UNKNOWN.search(op.__name__.split(".")[0]) is None

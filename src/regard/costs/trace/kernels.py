"""What PyTorch's operations allocate while they run and free before they return, by device; their FLOPs.

The first is compared with its allocators by tests/costs/memory and bench/cost_memory.py. What is not listed needs
nothing. FLOPs are those of matrix products; operations are named that may contain some and have no formula.
"""

import re
from collections.abc import Callable
from functools import partial, reduce
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from ...engine.compiled_ops import options_of
from ...engine.cuda.call import one_launch
from .attention import Gpu, Need, backward_workspace, cpu_workspace

Needs = Callable[[tuple, list[Tensor]], int | Need]
_capabilities: Any = getattr(torch.cpu, "get_capabilities", dict)
NATIVE = bool(_capabilities().get("avx512_bf16"))  # whether the CPU multiplies bfloat16 itself


def workspace(name: str, args: tuple, outs: list[Tensor], device: str) -> int | Need:
    """The workspace of this operation, in bytes or as a formula."""
    needs = (CUDA if device == "cuda" else CPU).get(name.removesuffix("_"))
    return 0 if needs is None else needs(args, outs)


def _safe_softmax(args: tuple, outs: list[Tensor]) -> int:
    """A softmax, then zeros in rows without a key: a table of bools, and one of rows."""
    return outs[0].numel() + outs[0].numel() // max(outs[0].shape[-1], 1)


def _sum(args: tuple, outs: list[Tensor]) -> int | Need:
    """The sum of a table over its rows: the gradient of a bias."""
    x = args[0]
    if len(args) < 2 or not isinstance(args[1], list | tuple) or not x.dim() or not outs[0].numel():
        return 0
    axes = {a % x.dim() for a in args[1]}
    if axes != set(range(len(axes))) or len(axes) == x.dim():
        return 0
    return Need(sum_needs, (x.shape[: len(axes)].numel(), x.shape[len(axes) :].numel()))


def sum_needs(rows: int, columns: int, gpu: Gpu) -> int:
    """The scratch memory of PyTorch's sum over the rows of a table on a GPU: 132 MiB for 8192 × 3072.

    The rows are split among blocks of 128 threads until every multiprocessor has sixteen blocks; each thread stores
    one partial result, four columns wide.
    """
    if rows < 1 or columns < 1:
        return 0
    vector = 4 if columns % 4 == 0 else 2 if columns % 2 == 0 else 1
    most, across = 512 // vector, columns // vector
    height = min(_power(rows, most), most // min(_power(across, most), 32))
    width = min(_power(across, most), most // height)
    each, grid = -(-rows // height), -(-across // width)
    fill = gpu.multiprocessors * (2048 // (width * height))
    if rows < min(16 * height, 256) or each < 256 or grid > fill:
        return 0
    shares = max(min(-(-fill // grid), -(-each // 16)), -(-each // 256))
    return 4 * columns * shares * width * vector if shares > 1 else 0


def _power(size: int, most: int) -> int:
    """The largest power of two that is at most `size` and `most`."""
    return 1 << (min(size, most).bit_length() - 1)


def sort_needs(rows: int, vocab: int, d: int, gpu: Gpu) -> int:
    """The gradient of an embedding with more than 3072 ids sorts them and sums runs of ten."""
    if rows <= 3072:
        return 0
    return 4 * d * (rows // 10 + min(rows, vocab)) + 48 * rows + (800 << 10 if vocab > 1 << 15 else 0)


def by_one_launch(args: tuple) -> bool:
    """Whether our Triton kernels compute all gradients by one launch. args: those of compiled_ops.sparse_backward."""
    (q, k, v, _, _, *extras), options = args[1], options_of(*args[2:5])
    (b, h, n, d), m = q.shape, k.shape[2]
    place = options.pattern, n, m, options.start, options.step
    return not any(x.numel() for x in extras) and one_launch(place, b * h, max(d, v.shape[-1]), q.dtype)


def _sparse_backward(args: tuple, outs: list[Tensor]) -> int:
    """Our Triton kernels: one launch needs nothing; several add up one gradient, in 16 bits two, in float32."""
    q, k, v = args[1][:3]
    if by_one_launch(args):
        return 0
    return 4 * q.numel() if q.element_size() == 4 else 4 * (k.numel() + v.numel())


def _low_product(args: tuple, outs: list[Tensor]) -> int:
    """oneDNN adds up 16-bit products in float32 beside the result; a CPU that has such products does so by blocks.

    A block has up to 256 rows and 64 columns; beside it are the columns of the second factor, with their depth in
    multiples of 32, and where the first factor is transposed its rows (as measured on an AMD EPYC with AVX-512).
    """
    if outs[0].dtype not in (torch.bfloat16, torch.float16):  # conjugates are copied that BLAS cannot read
        return sum(x.nbytes for x in args[-2:] if x.is_conj() and (x.dim() == 3 or x.stride(-1) == 1))
    if len(args) >= 2 and outs[0].numel() * args[-2].shape[-1] <= 16**3:
        return 0  # too small for oneDNN
    if not NATIVE or len(args) < 2:
        return 4 * outs[0].numel()
    first = args[-2]
    rows, depth = min(first.shape[-2], 256), -(-first.shape[-1] // 32) * 32
    copied = 2 * rows * depth + 128 if first.stride(-1) != 1 else 0
    return 4 * rows * min(outs[0].shape[-1], 64) + 128 * depth + 1024 + copied


def _cast(args: tuple, outs: list[Tensor]) -> int:
    """The CPU copies arguments of another dtype to the one in which it computes; bools are summed as int64."""
    tensors = [x for x in args if isinstance(x, Tensor) and x.dim()]
    common = reduce(torch.promote_types, (x.dtype for x in (*tensors, outs[0])))
    copied = [*tensors, *outs[: outs[0] is args[0]]]  # in place, the result is a copy first
    return sum(x.numel() * common.itemsize for x in copied if x.dtype != common)


def _copies(args: tuple, outs: list[Tensor]) -> int:
    """Copies of the first two tensors where they are not contiguous."""
    return sum(x.nbytes for x in args[:2] if isinstance(x, Tensor) and not x.is_contiguous())


def _one_layout(args: tuple, outs: list[Tensor]) -> int:
    """Copies of what is not laid out as the first tensor: contiguous, or with its channels last."""
    tensors = [*(x for i, x in enumerate(args) if isinstance(x, Tensor) and i != 1), *outs]
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(args[0].dim(), torch.contiguous_format)
    form = last if args[0].is_contiguous(memory_format=last) else torch.contiguous_format
    return sum(x.nbytes for x in tensors if not x.is_contiguous(memory_format=form))


def _upsample(neighbors: int, args: tuple, outs: list[Tensor]) -> int:
    """The neighbors of each position along each axis, and their weights; or, for small images, copies of both sides
    with the channels last, in which the kernels are vectorized. Three channels are copied if there is one thread."""
    x, out = args[0], outs[0]
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim(), torch.contiguous_format)
    there = x.dim() > 3 and x.is_contiguous(memory_format=last)
    small = x.dim() == 4 and sum(out.shape[2:]) <= 128
    colored = x.dim() == 4 and neighbors == 2 and x.shape[1] == 3 and torch.get_num_threads() == 1
    if neighbors == 4 or not (small or colored or (there and x.shape[1] > 3)):
        return neighbors * (8 + x.itemsize) * sum(out.shape[2:])
    return sum(y.nbytes for y in (x, out) if not y.is_contiguous(memory_format=last))


def _fft(args: tuple, outs: list[Tensor]) -> int:
    """MKL copies its input unless the axes that are not transformed can be viewed as one."""
    x, axes = args[0], {a % args[0].dim() for a in args[1]}
    if x.is_complex() and not outs[0].is_complex() and len(axes) > 1:
        return 2 * x.nbytes  # the other axes are transformed first
    kept = [(x.stride(k), x.shape[k]) for k in range(x.dim()) if k not in axes and x.shape[k] > 1]
    apart = any(wide != step * size for (wide, _), (step, size) in pairwise(sorted(kept, reverse=True)))
    return apart * x.nbytes


def _batch_norm_backward(args: tuple, outs: list[Tensor]) -> int:
    """A copy of the input if it and the gradient are contiguous with equal strides, else one number per channel."""
    grad, x = args[:2]
    dense = x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last)
    return x.nbytes if dense and grad.stride() == x.stride() else 4 * x.shape[1]


CUDA: dict[str, Needs] = {
    "_safe_softmax": _safe_softmax,
    # The kernel stores the product of the gradient and the output.
    "_softmax_backward_data": lambda args, outs: args[0].nbytes,
    "sum": _sum,
    "embedding_dense_backward": lambda args, outs: Need(sort_needs, (args[1].numel(), *outs[0].shape)),
    "sparse_attention_backward": _sparse_backward,
}
NAMES: dict[str, Needs] = {  # on the CPU; names with the same needs are separated by spaces
    # As the engine calls them; F.scaled_dot_product_attention is replaced as a whole (attention.py).
    "_scaled_dot_product_flash_attention_for_cpu": lambda args, outs: cpu_workspace(*args[:3]),
    "_scaled_dot_product_flash_attention_for_cpu_backward": lambda a, o: backward_workspace("cpu", *a[1:4]),
    # The loss of every entry, before their mean or sum.
    "mse_loss smooth_l1_loss": lambda args, outs: 0 if outs[0].dim() else 2 * args[0].nbytes,
    "binary_cross_entropy_with_logits": lambda args, outs: 2 * args[0].nbytes - outs[0].nbytes,
    "soft_margin_loss_backward": lambda args, outs: args[1].nbytes,
    "huber_loss": lambda args, outs: args[0].nbytes - outs[0].nbytes,
    "_safe_softmax": _safe_softmax,
    "logsumexp": lambda args, outs: args[0].nbytes + outs[0].nbytes,  # exp(x − maximum), and the maxima
    # First a tensor like the input, and a copy of an input that is not contiguous.
    "im2col": lambda args, outs: args[0].nbytes * (2 - args[0].is_contiguous()),
    "col2im": lambda args, outs: args[0].nbytes * (not args[0].is_contiguous()),
    # How many entries each mean has: a one for each, their sums, and where there are none.
    "scatter_reduce": lambda a, o: (a[4] == "mean") * (a[3].nbytes + o[0].nbytes + o[0].numel()),
    "index_reduce": lambda a, o: (a[4] == "mean") * (max(a[3].nbytes, o[0].numel()) + o[0].nbytes),
    "upsample_nearest1d _upsample_nearest_exact1d": partial(_upsample, 1),
    "upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d": partial(
        _upsample, 1
    ),
    "upsample_linear1d upsample_bilinear2d upsample_trilinear3d": partial(_upsample, 2),
    "upsample_bicubic2d": partial(_upsample, 4),
    # 16-bit means are those of a copy in float32.
    "mean": lambda a, o: (
        4 * (a[0].numel() + (o[0].dtype == a[0].dtype) * o[0].numel()) * (a[0].itemsize == 2)
    ),
    # One axis after the other.
    "_upsample_bilinear2d_aa _upsample_bicubic2d_aa": lambda a, o: (
        a[0].nbytes // a[0].shape[3] * o[0].shape[3]
    ),
    # Sorted in a copy, unless the values of each median are next to each other.
    "median nanmedian": lambda args, outs: (1 not in map(args[0].stride, args[1:2])) * args[0].nbytes,
    "kthvalue": lambda args, outs: args[0].nbytes + 8 * args[0].numel(),  # copies of values and positions
    "add sub mul div pow maximum minimum eq ne lt le gt ge sum cumsum prod": _cast,
    "max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d": _one_layout,
    "max_pool2d_with_indices_backward avg_pool2d_backward _adaptive_avg_pool2d_backward": _one_layout,
    "reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d fractional_max_pool2d": _one_layout,
    "max_pool3d_with_indices avg_pool3d": _one_layout,
    "_fft_r2c _fft_c2c _fft_c2r" if torch.backends.mkl.is_available() else "": _fft,
    "_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data": _copies,
    "native_layer_norm native_layer_norm_backward": _copies,
    "abs angle": lambda args, outs: args[0].is_complex() * args[0].nbytes,
    # Both sides with two more columns: the squares, and ones.
    "_euclidean_dist": lambda args, outs: sum(x.nbytes // x.shape[-1] * (x.shape[-1] + 2) for x in args),
    "native_batch_norm": lambda args, outs: 8 * args[0].shape[1] if args[0].is_contiguous() else 0,
    "native_batch_norm_backward": _batch_norm_backward,
    "native_group_norm_backward": lambda args, outs: 8 * args[5] * args[6],  # two numbers per row and channel
    "mm addmm bmm baddbmm": _low_product,
}
CPU = {name: needs for names, needs in NAMES.items() for name in names.split()}


def _sparse_flops(q: Tensor, k: Tensor, v: Tensor, rest: Any, pattern: str, offset: Any, factors: Any) -> int:
    """rg.attention by the pairs of its pattern: 2 d_k per score, 2 d_v per weighted value."""
    options = options_of(pattern, offset, factors)
    pairs = options.pattern.count(q.shape[-2], k.shape[-2], (options.start, options.step))
    return 2 * q.shape[:-2].numel() * pairs * (q.shape[-1] + v.shape[-1])


def _fused_qkv(x: Tensor, context: Tensor | None, lengths: Any, seed: Any, *options: Any) -> int:
    """Attention of a short sequence, with queries, keys and values side by side."""
    (b, n), m = x.shape[:2], (x if context is None else context).shape[1]
    heads, _, d_k, d_v, is_causal, *_ = options
    return 2 * b * heads * (n * (n + 1) // 2 if is_causal else n * m) * (d_k + d_v)


FORMULAS: dict[str, Callable[..., int]] = {
    **dict.fromkeys(("aten.dot", "aten.vdot", "aten.mv"), lambda a, *_, **__: 2 * a.numel()),
    "aten.addmv": lambda c, a, *_, **__: 2 * a.numel(),
    "aten.addbmm": lambda c, a, b, *_, **__: 2 * a.numel() * b.shape[-1],
    "aten.addr": lambda c, a, b, *_, **__: 2 * a.numel() * b.numel(),
    # Groups of rows have a matrix each (experts): every row is multiplied once.
    **dict.fromkeys(("aten._int_mm", "aten._grouped_mm"), lambda a, b, *_, **__: 2 * a.numel() * b.shape[-1]),
    # ‖a − b‖ of every pair: a difference and a square per entry, counted like one product.
    "aten._cdist_forward": lambda a, b, *_, **__: 2 * a.numel() * b.shape[-2],
    "aten._euclidean_dist": lambda a, b, *_, **__: 2 * a.numel() * b.shape[-2],
    "regard.sparse_attention": _sparse_flops,
    # The backward pass: two products for each of the forward pass; scores that are computed again are not counted.
    "regard.sparse_attention_backward": lambda _, s, *o: 2 * _sparse_flops(s[0], s[1], s[2], s[5:], *o[:3]),
    "regard.fused_qkv": _fused_qkv,
    "regard.fused_qkv_backward": lambda grad, *args: 2 * _fused_qkv(*args),
}


def product_flops(op: Any, args: tuple, kwargs: dict, out: Any) -> int | None:
    """FLOPs of the matrix products in this call; None if it has none."""
    if op.overloadpacket in flop_registry:
        return int(flop_registry[op.overloadpacket](*args, **kwargs, out_val=out))
    formula = FORMULAS.get(f"{op.namespace}.{op.__name__.split('.')[0].removesuffix('_')}")
    return None if formula is None else formula(*args, **kwargs)


# Names of operations without a formula that contain matrix products, or may contain some.
UNKNOWN = re.compile(
    r"((?<!cu)mm|mv|conv|rnn|lstm|gru|fft|solve|cholesky|geqrf|ormqr|pdist|attention|transformer|trilinear|linalg_(?!vector))"
)


def has_no_product(op: Any) -> bool:
    """Whether an operation is known to contain no matrix product."""
    builtin = op.namespace in ("aten", "prim", "prims", "profiler")
    named = UNKNOWN.search(op.__name__.split(".")[0])
    return torch.Tag.pointwise in op.tags or (builtin and named is None)

"""How long dense attention takes on a GPU by `sdpa` and by `triton`: what the choice between the two rests on.
Packed documents, each of which is dense, are estimated by the same numbers.

    seconds = pairs · pair + keys · key + rows · row

Pairs are counted in tiles of 64 queries. The longest tile, which no other program shares, has `keys` keys; rows are
the queries of all heads. The numbers are fitted to one H200 (bench/auto_choice.py --dense, 266 calls, and 100 longer
ones). Of these, forward passes of 50 µs or more: 84 % of the estimates are within 10 % for `sdpa`, 99 % within 25 %;
for `triton`, without what is prepared, 53 % and 85 % (the lowest are calls of few queries over many keys).

On Hopper and Blackwell data-center GPUs PyTorch prefers cuDNN's kernels for 16-bit types, which build a plan on the
CPU for each new shape. Without gradients, where lengths vary most, `sdpa` takes a kernel that builds none unless
cuDNN's gains more than its plan costs. (Training repeats its shapes.)
"""

from math import ceil, inf
from typing import NamedTuple

import torch

from ..pattern import causal
from .call import CallFacts

TILE = 64  # queries


class DenseTime(NamedTuple):
    """Seconds of a pair, of a key of the longest tile, and of a row."""

    pair: float
    key: float
    row: float


# By the width of a head: the forward pass, and both passes.
Times = dict[int, tuple[DenseTime, DenseTime]]
SDPA: Times = {
    64: (DenseTime(5.0e-13, 8.5e-9, 1.3e-10), DenseTime(1.85e-12, 2.5e-8, 8e-10)),
    128: (DenseTime(7.4e-13, 1.1e-8, 1.9e-10), DenseTime(3.0e-12, 2.5e-8, 1.1e-9)),
    256: (DenseTime(1.34e-12, 1.9e-8, 3.1e-10), DenseTime(7.2e-12, 6e-8, 2.1e-9)),
}
# Forward passes by PyTorch's FlashAttention-2 (bench/gpu_sdpa_kernels.py): seconds of a pair and of a query of a
# long tile; it divides the keys of few queries.
SDPA_FLASH = {64: (9e-13, 8e-9), 128: (1.55e-12, 1.2e-8), 256: (3.6e-12, 2e-8)}
SDPA_FLOAT32: Times = {
    64: (DenseTime(6.2e-12, 1.0e-7, 1.6e-10), DenseTime(2.2e-11, 2.7e-7, 2.1e-9)),
    128: (DenseTime(1.0e-11, 9.4e-8, 1.5e-10), DenseTime(4.3e-11, 2.5e-7, 0.0)),
    256: (DenseTime(2.0e-11, 1.6e-7, 1.7e-9), DenseTime(8.9e-11, 3.5e-7, 1.4e-8)),
}
# The kernels for Hopper; heads up to 32 wide run on the general ones.
TRITON: Times = {
    32: (DenseTime(7.5e-13, 6.4e-9, 0.0), DenseTime(2.6e-12, 1e-8, 4e-10)),
    64: (DenseTime(4.6e-13, 8.0e-9, 1.25e-10), DenseTime(2.1e-12, 1e-8, 4e-10)),
    96: (DenseTime(6.2e-13, 1.0e-8, 1.9e-10), DenseTime(3.2e-12, 1e-8, 7.4e-10)),
    128: (DenseTime(7.2e-13, 7.5e-9, 2.7e-10), DenseTime(3.5e-12, 1e-8, 7.7e-10)),
    256: (DenseTime(1.5e-12, 8.9e-9, 7.4e-10), DenseTime(9.5e-12, 3.7e-8, 1.4e-9)),
}
# On Hopper, where products of float32 are split.
TRITON_FLOAT32: Times = {
    32: (DenseTime(2.8e-12, 3.5e-9, 5.1e-10), DenseTime(1.2e-11, 2e-8, 3e-9)),
    64: (DenseTime(4.3e-12, 7.9e-9, 2.0e-9), DenseTime(2.3e-11, 5e-8, 5e-9)),
    128: (DenseTime(7.5e-12, 9.9e-9, 2.1e-9), DenseTime(6.3e-11, 1.35e-7, 5e-9)),
    256: (DenseTime(5.9e-11, 7.4e-9, 4.0e-9), DenseTime(3.2e-10, 7.9e-7, 2.1e-8)),
}
# The general kernels, against those for Hopper: heads of two widths (192 and 128) take twice as long. Other GPUs run
# the general kernels alone. They have not been measured there, and with this factor they are not chosen.
TWO_WIDTHS, OTHER_GPU = 2.0, 8.0
# So many programs run at a time; a tile that is longer than a program's share, and by so many blocks, is divided.
PROGRAMS, MIN_EXCESS = 528, 4
# The CPU prepares a call of the Triton kernels when a length is new (and plans one of cuDNN when a shape is): so many
# seconds forward, and per block of 64 × 64 pairs. It is counted as if each length came so many times. A cache grows
# with every query, so that of one query comes about as often as a model has layers.
PREPARE, PREPARE_BLOCK, REUSED = 5e-3, 4e-8, 100
PREPARE_ONE_QUERY, LAYERS = 7e-5, 20
# Seconds per byte of k and v where one query of a head reads them.
READ_SDPA, READ_FLASH, READ_TRITON, READ_TRITON_FLOAT32 = 2.6e-13, 3.5e-13, 2.2e-13, 4.3e-13
# A plan of cuDNN. So much longer than by cuDNN a masked pair takes by PyTorch's memory-efficient kernel, of one query
# and of more (bench/gpu_sdpa_kernels.py).
CUDNN_PLAN, EFFICIENT_QUERY_PAIR, EFFICIENT_PAIR = 4e-2, 3.6e-10, 3e-12
PREFER_CUDNN = (9, 0), (10, 0), (10, 3)  # capabilities


def sdpa_dense(f: CallFacts) -> float:
    """PyTorch's attention without a mask, and the share of a call in cuDNN's plan."""
    return _flash_seconds(f) if avoids_plan(f) else _sdpa_seconds(f) + _cudnn_plan(f)


def sdpa_plan(f: CallFacts) -> float:
    """What is added to a call with a mask: its share in cuDNN's plan, or what it takes longer without."""
    longer = f.pairs * (EFFICIENT_QUERY_PAIR if f.n == 1 else EFFICIENT_PAIR)
    return min(_cudnn_plan(f), longer)


def avoids_plan(f: CallFacts) -> bool:
    """Whether `sdpa` runs this call by a kernel of PyTorch that builds no plan, in place of cuDNN's."""
    share = _cudnn_plan(f)
    if f.unmasked:
        return share > 0.0 and f.d_k == f.d_v and _flash_seconds(f) < _sdpa_seconds(f) + share
    return sdpa_plan(f) < share


def _cudnn_plan(f: CallFacts) -> float:
    """Seconds, as a share of one call; 0 where cuDNN does not run it, or where shapes are repeated in training."""
    if f.device_type != "cuda" or f.dtype.itemsize != 2 or f.dropout_p or f.grad or f.bias_grad:
        return 0.0
    fits = f.d_k % 8 == f.d_v % 8 == 0 and max(f.d_k, f.d_v) <= 256 and max(f.batch, f.heads) < 1 << 16
    if not fits or not f.pairs or not _prefers_cudnn(f.device):
        return 0.0
    return CUDNN_PLAN / (LAYERS if f.n == 1 else REUSED)


def _prefers_cudnn(device: str) -> bool:
    """Without a GPU here, a call is explained as on an H200. (Where cuDNN is switched off, PyTorch itself takes the
    kernels without a plan.)"""
    if not torch.cuda.is_available():
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) in PREFER_CUDNN


def _sdpa_seconds(f: CallFacts) -> float:
    """By cuDNN; in float32 one query is a tile, too: its keys are not divided."""
    single = f.dtype == torch.float32
    if f.n == 1 and not single:
        return _bytes_read(f) * READ_SDPA
    return _seconds(f, SDPA_FLOAT32 if single else SDPA, f.m)


def _flash_seconds(f: CallFacts) -> float:
    if f.n == 1:
        return _bytes_read(f) * READ_FLASH
    pair, query = next(SDPA_FLASH[width] for width in SDPA_FLASH if f.d_k <= width)
    return _pairs(f) * pair + min(f.n, f.m) * query


def triton_dense(f: CallFacts) -> float:
    """The Triton kernels on the same call, and its share of what the CPU prepares.

    Training with as many queries as keys stays with PyTorch's kernels, whose memory `rg.cost` knows exactly. In 16
    bits between n = 2048 and 4096, `backend="triton"` took 0.61 to 1.45 times as long, in the median 0.90 (29 calls).
    """
    if f.grad and f.n == f.m and not f.needs_lse:  # which PyTorch's attention does not give
        return inf
    single = f.dtype == torch.float32
    # Without a GPU here, a call is explained as on an H200.
    is_hopper = not torch.cuda.is_available() or torch.cuda.get_device_capability(f.device)[0] == 9
    if f.n == 1:
        read = READ_TRITON_FLOAT32 if single else READ_TRITON * (1.0 if is_hopper else OTHER_GPU)
        return _bytes_read(f) * read + PREPARE_ONE_QUERY / LAYERS
    factor = TWO_WIDTHS if f.d_k != f.d_v and not single else 1.0
    factor = factor if is_hopper else OTHER_GPU
    blocks = _pairs(f) / TILE**2
    prepare = (2 if f.grad else 1) * (PREPARE + blocks * PREPARE_BLOCK)
    longest = min(f.m, TILE * (blocks / PROGRAMS + MIN_EXCESS))
    return factor * _seconds(f, TRITON_FLOAT32 if single else TRITON, longest) + prepare / REUSED


def triton_documents(f: CallFacts, pairs: float) -> float:
    """The Triton kernels on packed documents. pairs: in tiles, of all heads and batch rows."""
    time = _of_width(f, TRITON)
    return pairs * time.pair + f.flat_heads * f.n * time.row


def _seconds(f: CallFacts, times: Times, longest: int | float) -> float:
    """longest: the keys of the longest tile."""
    time = _of_width(f, times)
    return _pairs(f) * time.pair + longest * time.key + f.flat_heads * f.n * time.row


def _of_width(f: CallFacts, times: Times) -> DenseTime:
    widest = max(f.d_k, f.d_v)
    return next((times[width] for width in times if widest <= width), times[256])[f.grad]


def _pairs(f: CallFacts) -> float:
    """Of whole tiles; of a causal pattern those of past keys."""
    rows = f.flat_heads * ceil(f.n / TILE) * TILE
    return rows * f.m * (0.5 if isinstance(f.pattern, causal) and f.n > 1 else 1.0)


def _bytes_read(f: CallFacts) -> int:
    return f.batch * f.kv_heads * f.m * (f.d_k + f.d_v) * f.dtype.itemsize

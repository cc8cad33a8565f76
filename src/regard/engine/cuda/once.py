"""What the kernels of a training step share: launching what was launched before at little cost, and dropout."""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .configs import Config
from .prepared import Launch
from .triton.bias_and_dropout import ROUNDS

Sizes = tuple[tuple[str, Any], ...]


def launch(
    kernel: Any,
    programs: int,
    warps: int,
    tensors: tuple[Tensor, ...],
    numbers: tuple[Any, ...],
    sizes: Sizes,
) -> None:
    """Run a kernel over the tensors, then numbers, then what is known when it is compiled."""
    kinds = tuple((x.dtype, x.data_ptr() % 16 == 0) for x in tensors)
    _ready(kernel, programs, warps, numbers, sizes, kinds, tensors[0].device)(*tensors)


@lru_cache(maxsize=1024)
def _ready(
    kernel: Any,
    programs: int,
    warps: int,
    numbers: tuple[Any, ...],
    sizes: Sizes,
    kinds: tuple[tuple[torch.dtype, bool], ...],
    device: torch.device,
) -> Launch:
    """One for each kind of call: Triton compiles for the dtypes and for addresses that divide by 16."""
    return Launch(kernel, programs, Config(0, 0, warps, 1), *numbers, **dict(sizes))


def share(dropout_p: float) -> tuple[int, float]:
    """Numbers of 16 bits below the first are dropped; what stays is multiplied by the second."""
    below = min(round(dropout_p * 2**16), 2**16 - 1)
    return below, 1.0 / (1.0 - below / 2**16)


@triton.jit
def stay(SEED, rows, where, below, R: tl.constexpr, C: tl.constexpr):
    """Which of C numbers in each of R rows stay; a Philox number of 128 bits decides for eight neighbours."""
    r = rows[:, None] + tl.zeros((1, C // 8), tl.int32)
    c = tl.arange(0, C // 8)[None, :] + tl.zeros((R, 1), tl.int32)
    x, y, z, w = tl.philox(tl.load(SEED), c, r, c * 0 + where, c * 0, ROUNDS)
    words = tl.join(tl.join(x, y), tl.join(z, w))
    halves = tl.join(words & 0xFFFF, words >> 16)
    return tl.reshape(halves, (R, C)) >= below.to(tl.uint32)

"""Dropout. On a CPU most of the time of PyTorch's own goes into one random float per entry; 16 bits suffice."""

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ..engine.call import readable


def dropout(x: Float[Tensor, "*shape"], p: int | float, training: bool) -> Float[Tensor, "*shape"]:
    """x · mask / (1 − p), where each entry of the mask is 1 with probability 1 − p; x itself in evaluation."""
    if not training or p == 0:
        return x
    if p == 1 or not readable(x) or not x.numel():
        return F.dropout(x, p, True)
    return x * factors(x, p)


def factors(x: Float[Tensor, "*shape"], p: int | float) -> Float[Tensor, "*shape"]:
    """0 or 1/(1 − p) for each entry of x; p is rounded to a multiple of 1/65,536 and the factor matches it."""
    dropped = min(round(p * 65536), 65535)
    # The seed comes from PyTorch's generator, so that saving and restoring its state is enough.
    seed = int(torch.randint(1 << 62, ()))
    words = np.random.SFC64(seed).random_raw(-(-x.numel() // 4))
    bits = torch.from_numpy(words).view(torch.int16)[: x.numel()].view(x.shape)
    mask = torch.ge(bits, dropped - 32768, out=torch.empty_like(x, memory_format=torch.contiguous_format))
    return mask.mul_(65536 / (65536 - dropped))

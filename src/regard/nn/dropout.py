"""Dropout. On a CPU PyTorch's own spends most of its time on drawing one float a number; 16 bits do as well."""

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ..engine.call import readable


def dropout(x: Float[Tensor, "*shape"], p: int | float, training: bool) -> Float[Tensor, "*shape"]:
    """x · kept / (1 − p), each number kept with probability 1 − p; x itself where nothing is trained."""
    if not training or p == 0:
        return x
    if p == 1 or not readable(x) or not x.numel():
        return F.dropout(x, p, True)
    return x * factors(x, p)


def factors(x: Float[Tensor, "*shape"], p: int | float) -> Float[Tensor, "*shape"]:
    """0, or 1/(1 − p), for each number of x: p to the nearest of 65,536 steps, the factor exactly right for it."""
    dropped = min(round(p * 65536), 65535)
    # The seed comes from PyTorch's generator: its state is all there is to save, and to set.
    seed = int(torch.randint(1 << 62, ()))
    words = np.random.SFC64(seed).random_raw(-(-x.numel() // 4))
    bits = torch.from_numpy(words).view(torch.int16)[: x.numel()].view(x.shape)
    kept = torch.ge(bits, dropped - 32768, out=torch.empty_like(x, memory_format=torch.contiguous_format))
    return kept.mul_(65536 / (65536 - dropped))

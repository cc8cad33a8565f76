"""Random convolutions, of every kind that can be lifted."""

import random

import torch
from torch import nn


def random_convolution(seed: int, dtype: torch.dtype = torch.float64) -> nn.Conv1d | nn.Conv2d:
    """1-D or 2-D, any kernel, dilation, stride, groups, padding and padding mode; outputs of unit size."""
    pick = random.Random(seed)
    axes, groups = pick.choice((1, 2)), pick.choice((1, 1, 2, 3))
    same = pick.random() < 0.2
    each = [(pick.choice((1, 3)) if same else pick.randint(1, 4)) for _ in range(axes)]
    conv = (nn.Conv1d if axes == 1 else nn.Conv2d)(
        groups * pick.randint(1, 3),
        groups * pick.randint(1, 3),
        tuple(each),
        dilation=tuple(pick.randint(1, 3) for _ in range(axes)),
        stride=1 if same else tuple(pick.randint(1, 3) for _ in range(axes)),
        padding="same" if same else tuple(pick.randint(0, 3) for _ in range(axes)),
        groups=groups,
        bias=pick.random() < 0.7,
        padding_mode=pick.choice(("zeros", "circular", "reflect", "replicate")),
        dtype=dtype,
    )
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        fan = conv.weight[0].numel()
        for p in conv.parameters():
            p.copy_(torch.randn(p.shape, generator=rng, dtype=dtype) / fan**0.5)
    return conv


def inputs_for(conv: nn.Conv1d | nn.Conv2d, batch: int, seed: int) -> torch.Tensor:
    size = (23,) if isinstance(conv, nn.Conv1d) else (11, 13)
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(batch, conv.in_channels, *size, generator=rng, dtype=conv.weight.dtype)

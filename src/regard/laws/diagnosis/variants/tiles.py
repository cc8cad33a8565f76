"""Faults of tiles: padding that is not masked, a dropped tail, limits of a kernel."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ..formula import Call
from .make import variant as _v


def _padded(size: int) -> Any:
    """Zero keys up to a multiple of `size`: each has a score of 0 and a value of 0."""

    def normalize(s: Tensor, ok: Tensor | None) -> Tensor:
        m = s.shape[-1]
        return F.pad(s, (0, -m % size)).softmax(-1)[..., :m]

    return normalize


def _without_tail(size: int) -> Any:
    """Keys past the last full tile are dropped; calls of less than one tile are right."""

    def inputs(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        m = k.shape[-2] // size * size
        return (q, k, v) if m == 0 else (q, k[..., :m, :], v[..., :m, :])

    return inputs


def _first(limit: int) -> Any:
    return lambda q, k, v: (q, k[..., :limit, :], v[..., :limit, :])


def _narrow(limit: int) -> Any:
    return lambda q, k: q[..., :limit] @ k[..., :limit].mT


def _cut_mask(i: Tensor, j: Tensor, call: Call) -> Tensor:
    return call.options["allowed"][..., : call.k.shape[-2]]


TILES = (
    *(
        _v(
            f"the keys are padded with zeros to a multiple of {size}, and the padding is not masked",
            "tile padding not masked",
            "mask the keys past m in the last tile",
            normalize=_padded(size),
        )
        for size in (2, 4, 8, 16, 32, 64, 128)
    ),
    *(
        _v(
            f"the keys past the last full tile of {size} are dropped",
            "tail dropped",
            "process the last, partial tile",
            inputs=_without_tail(size),
            mask=_cut_mask,
        )
        for size in (2, 3, 4, 8, 16, 32, 64, 128)
    ),
    *(
        _v(
            f"only the first {limit} keys are used",
            "keys dropped",
            "include every key",
            inputs=_first(limit),
            mask=_cut_mask,
        )
        for limit in (64, 128, 256, 512, 1024, 2048)
    ),
    *(
        _v(
            f"only the first {limit} columns of the width enter the scores",
            "part of the width",
            "sum over all of d_k",
            scores=_narrow(limit),
        )
        for limit in (32, 64, 128)
    ),
)

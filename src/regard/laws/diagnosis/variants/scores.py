"""Faults of the scores before softmax."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from .make import variant as _v


def _half_width(q: Tensor, k: Tensor) -> Tensor:
    d = max(1, q.shape[-1] // 2)
    return q[..., :d] @ k[..., :d].mT


def _distance(power: float) -> Any:
    def scores(q: Tensor, k: Tensor) -> Tensor:
        return -((q[..., :, None, :] - k[..., None, :, :]).square().sum(-1).clamp(min=1e-300) ** power)

    return scores


def _transposed(q: Tensor, k: Tensor) -> Tensor:
    s = q @ k.mT
    return s.mT if s.shape[-1] == s.shape[-2] else s


SCORES = (
    _v(
        "the scores have the wrong sign",
        "sign of the scores",
        "use +q·k",
        scores=lambda q, k: -(q @ k.mT),
    ),
    _v(
        "the scores are transposed: k qᵀ instead of q kᵀ",
        "scores transposed",
        "compute q kᵀ, queries in rows",
        scores=_transposed,
    ),
    _v(
        "q and k are normalized: cosine similarity instead of q·k",
        "cosine scores",
        "use the plain dot product",
        scores=lambda q, k: F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT,
    ),
    _v(
        "the keys are normalized before the product",
        "cosine scores",
        "use the plain dot product",
        scores=lambda q, k: q @ F.normalize(k, dim=-1).mT,
    ),
    _v(
        "the queries are normalized before the product",
        "cosine scores",
        "use the plain dot product",
        scores=lambda q, k: F.normalize(q, dim=-1) @ k.mT,
    ),
    _v(
        "the scores are absolute values |q·k|",
        "sign of the scores",
        "use q·k",
        scores=lambda q, k: (q @ k.mT).abs(),
    ),
    _v(
        "the scores are squares (q·k)²",
        "squared scores",
        "use q·k",
        scores=lambda q, k: (q @ k.mT).square(),
    ),
    _v(
        "negative scores are cut to 0 before softmax",
        "clipped scores",
        "use q·k as it is",
        scores=lambda q, k: (q @ k.mT).relu(),
    ),
    _v(
        "only the first half of the width enters the scores",
        "part of the width",
        "sum over all of d_k",
        scores=_half_width,
    ),
    _v(
        "the last column of the width is left out of the scores",
        "part of the width",
        "sum over all of d_k",
        scores=lambda q, k: q[..., :-1] @ k[..., :-1].mT if q.shape[-1] > 1 else q @ k.mT,
    ),
    _v(
        "the first column of the width is left out of the scores",
        "part of the width",
        "sum over all of d_k",
        scores=lambda q, k: q[..., 1:] @ k[..., 1:].mT if q.shape[-1] > 1 else q @ k.mT,
    ),
    _v(
        "the scores are negative squared distances",
        "distance scores",
        "use q·k",
        scores=_distance(1.0),
    ),
    _v(
        "the scores are negative distances",
        "distance scores",
        "use q·k",
        scores=_distance(0.5),
    ),
    _v(
        "the scores are tanh(q·k)",
        "squashed scores",
        "use q·k",
        scores=lambda q, k: (q @ k.mT).tanh(),
    ),
    _v(
        "keys attend to keys: k kᵀ instead of q kᵀ",
        "wrong operand",
        "use q in the scores",
        scores=lambda q, k: k @ k.mT if q.shape == k.shape else q @ k.mT,
    ),
    _v(
        "queries attend to queries: q qᵀ instead of q kᵀ",
        "wrong operand",
        "use k in the scores",
        scores=lambda q, k: q @ q.mT if q.shape == k.shape else q @ k.mT,
    ),
)

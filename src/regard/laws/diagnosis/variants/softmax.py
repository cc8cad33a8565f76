"""Faults of softmax and of merging tiles."""

from math import inf
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .make import variant as _v


def _softmax_over(dim: int) -> Any:
    return lambda s, ok: s.softmax(dim).nan_to_num(0.0)


def _rows(weigh: Any) -> Any:
    """Weights from exp(s − max s) of the allowed keys."""

    def normalize(s: Tensor, ok: Tensor | None) -> Tensor:
        return weigh((s - s.amax(-1, keepdim=True)).exp().nan_to_num(0.0), s)

    return normalize


def _tiled(size: int, merge: str) -> Any:
    """Softmax over tiles of keys that are merged wrongly; the maximum is the running one, as in online softmax."""

    def normalize(s: Tensor, ok: Tensor | None) -> Tensor:
        m = s.shape[-1]
        tiles = F.pad(s, (0, -m % size), value=-inf).unflatten(-1, (-1, size))
        if merge in ("separate", "average"):
            a = tiles.softmax(-1).nan_to_num(0.0).flatten(-2)[..., :m]
            return a / tiles.shape[-2] if merge == "average" else a
        top = tiles.amax(-1).cummax(-1).values.repeat_interleave(size, -1)[..., :m]
        top = top.masked_fill(top == -inf, 0.0)
        e, scaled = (s - top).exp(), (s - top[..., -1:]).exp()
        last_tile = e[..., m - (m - 1) % size - 1 :]
        total, plain, last = (x.sum(-1, keepdim=True) for x in (scaled, e, last_tile))
        a = {
            "neither": lambda: e / plain,
            "output": lambda: e / total,
            "sum": lambda: scaled / plain,
            "last": lambda: scaled / last,
        }[merge]()
        return a.nan_to_num(0.0)

    return normalize


def _over_queries(e: Tensor) -> Tensor:
    return e / e.sum(-2, keepdim=True)


def _shares(e: Tensor) -> Tensor:
    e = e.nan_to_num(0.0)
    return e / e.sum(-1, keepdim=True)


def _sigmoid(s: Tensor, ok: Tensor | None) -> Tensor:
    return s.sigmoid()


def _hard(s: Tensor, ok: Tensor | None) -> Tensor:
    return F.one_hot(s.argmax(-1), s.shape[-1]).to(s.dtype)


def _uniform(s: Tensor, ok: Tensor | None) -> Tensor:
    a = torch.ones_like(s) if ok is None else ok.to(s.dtype)
    return a / a.sum(-1, keepdim=True).clamp(min=1)


def _linear(s: Tensor, ok: Tensor | None) -> Tensor:
    a = s if ok is None else s.masked_fill(~ok, 0.0)
    return a / a.sum(-1, keepdim=True)


def _relu_weights(s: Tensor, ok: Tensor | None) -> Tensor:
    a = s.relu()
    return a / a.sum(-1, keepdim=True).clamp(min=1e-9)


SOFTMAX = (
    _v(
        "softmax runs over the queries instead of the keys",
        "softmax axis",
        "use softmax(dim=-1) on scores of shape (…, n, m)",
        normalize=_softmax_over(-2),
    ),
    _v(
        "the exponentials are divided by their sum over the queries instead of the keys",
        "softmax axis",
        "divide by the sum over dim=-1",
        normalize=lambda s, ok: _over_queries((s - s.amax(-1, keepdim=True)).exp()),
    ),
    _v(
        "softmax runs over the heads instead of the keys",
        "softmax axis",
        "use softmax(dim=-1)",
        normalize=_softmax_over(1),
    ),
    _v(
        "softmax runs over the batch instead of the keys",
        "softmax axis",
        "use softmax(dim=-1)",
        normalize=_softmax_over(0),
    ),
    _v(
        "softmax runs over all pairs of a head at once",
        "softmax axis",
        "use softmax(dim=-1)",
        normalize=lambda s, ok: s.flatten(-2).softmax(-1).view(s.shape),
    ),
    _v(
        "there is no softmax: the scores are used as weights",
        "no softmax",
        "apply softmax to the scores",
        normalize=lambda s, ok: s if ok is None else s.masked_fill(~ok, 0.0),
    ),
    _v(
        "the scores are divided by their sum, without exp",
        "no softmax",
        "apply softmax to the scores",
        normalize=_linear,
    ),
    _v(
        "the weights are exp(scores) without the denominator",
        "no normalization",
        "divide by the sum over the keys",
        normalize=lambda s, ok: s.exp(),
    ),
    _v(
        "the weights are exp(scores − max) without the denominator",
        "no normalization",
        "divide by the sum over the keys",
        normalize=_rows(lambda e, s: e),
    ),
    _v(
        "the denominator has one more term, 1 + Σ exp(s)",
        "extra term in the denominator",
        "divide by Σ exp(s) only",
        normalize=lambda s, ok: s.exp() / (1 + s.exp().sum(-1, keepdim=True)),
    ),
    _v(
        "the denominator has one more term, 1 + Σ exp(s − max)",
        "extra term in the denominator",
        "divide by Σ exp(s) only",
        normalize=_rows(lambda e, s: e / (1 + e.sum(-1, keepdim=True))),
    ),
    _v(
        "the denominator has a large epsilon",
        "extra term in the denominator",
        "divide by Σ exp(s) only",
        normalize=_rows(lambda e, s: e / (1e-3 + e.sum(-1, keepdim=True))),
    ),
    _v(
        "the weights are divided by the largest one instead of their sum",
        "no normalization",
        "divide by the sum over the keys",
        normalize=_rows(lambda e, s: e / e.amax(-1, keepdim=True).clamp(min=1e-300)),
    ),
    _v(
        "the maximum of each column is subtracted, not that of each row",
        "wrong maximum",
        "subtract amax(-1), the maximum over the keys",
        normalize=lambda s, ok: _shares((s - s.amax(-2, keepdim=True)).exp()),
    ),
    _v(
        "the weights are scores divided by the number of keys, without exp",
        "no softmax",
        "apply softmax to the scores",
        normalize=lambda s, ok: (s if ok is None else s.masked_fill(~ok, 0.0)) / s.shape[-1],
    ),
    _v(
        "exp(scores) is divided by the number of keys",
        "no normalization",
        "divide by the sum over the keys",
        normalize=lambda s, ok: s.exp() / s.shape[-1],
    ),
    _v(
        "softmax is applied twice",
        "softmax twice",
        "apply it once",
        normalize=lambda s, ok: s.softmax(-1).softmax(-1),
    ),
    _v(
        "log-softmax is used as weights",
        "log softmax",
        "use softmax",
        normalize=lambda s, ok: s.log_softmax(-1),
    ),
    _v(
        "2^s is used instead of e^s without the factor log₂ e",
        "base of the exponential",
        "multiply the scores by log₂ e before exp2",
        normalize=lambda s, ok: (s * 0.6931471805599453).softmax(-1).nan_to_num(0.0),
    ),
    _v(
        "the factor log₂ e is applied although the exponential is e^s",
        "base of the exponential",
        "use it with exp2 only",
        normalize=lambda s, ok: (s * 1.4426950408889634).softmax(-1).nan_to_num(0.0),
    ),
    _v(
        "sigmoid is used instead of softmax",
        "sigmoid",
        "use softmax over the keys",
        normalize=_sigmoid,
    ),
    _v(
        "negative scores get no weight: ReLU instead of exp",
        "relu weights",
        "use softmax over the keys",
        normalize=_relu_weights,
    ),
    _v(
        "only the largest score gets weight",
        "hard weights",
        "use softmax over the keys",
        normalize=_hard,
    ),
    _v(
        "all keys get the same weight: the scores have no effect",
        "uniform weights",
        "use softmax(q kᵀ/√d_k)",
        normalize=_uniform,
    ),
    *(
        _v(
            f"each tile of {size} keys has its own softmax, and the results are {word}",
            "tiles merged wrongly",
            "merge tiles with the running maximum and sum (online softmax)",
            normalize=_tiled(size, merge),
        )
        for size in (2, 3, 4, 8, 16, 32, 64)
        for merge, word in (("separate", "added"), ("average", "averaged"))
    ),
    *(
        _v(
            f"tiles of {size} keys are merged without rescaling {word} by the running maximum",
            "tiles merged wrongly",
            "multiply the running sum and output by exp(old maximum − new maximum)",
            normalize=_tiled(size, merge),
        )
        for size in (2, 3, 4, 8, 16, 32, 64, 128)
        for merge, word in (
            ("neither", "the sum and the output"),
            ("output", "the output"),
            ("sum", "the sum"),
        )
    ),
    *(
        _v(
            f"the denominator is that of the last tile of {size} keys",
            "tiles merged wrongly",
            "accumulate the denominator over all tiles",
            normalize=_tiled(size, "last"),
        )
        for size in (2, 3, 4, 8, 16, 32, 64, 128)
    ),
)

"""Faults of precision."""

from math import inf
from typing import Any

import torch

from .make import variant as _v


def _rounded(dtype: torch.dtype) -> Any:
    return lambda q, k, v: tuple(x.to(dtype).to(x.dtype) for x in (q, k, v))


PRECISION = (
    _v(
        "the inputs are rounded to bfloat16",
        "precision lost",
        "compute in the dtype of the inputs, or wider",
        inputs=_rounded(torch.bfloat16),
    ),
    _v(
        "the inputs are rounded to float16",
        "precision lost",
        "compute in the dtype of the inputs, or wider",
        inputs=_rounded(torch.float16),
    ),
    _v(
        "the weights are rounded to bfloat16",
        "precision lost",
        "compute in the dtype of the inputs, or wider",
        weights=lambda a, ok: a.bfloat16().to(a.dtype),
    ),
    _v(
        "the weights are rounded to float16",
        "precision lost",
        "compute in the dtype of the inputs, or wider",
        weights=lambda a, ok: a.half().to(a.dtype),
    ),
    _v(
        "the scores are rounded to float16",
        "precision lost",
        "compute in the dtype of the inputs, or wider",
        scores=lambda q, k: (q @ k.mT).half().to(q.dtype),
    ),
    _v(
        "the scores are rounded to bfloat16",
        "precision lost",
        "compute in the dtype of the inputs, or wider",
        scores=lambda q, k: (q @ k.mT).bfloat16().to(q.dtype),
    ),
    *(
        _v(
            f"the scores are clipped to ±{limit:g}",
            "clipped scores",
            "subtract the row maximum instead of clipping",
            fill=lambda s, ok, limit=limit: s.clamp(-limit, limit).masked_fill(~ok, -inf),
            normalize=lambda s, ok, limit=limit: (
                s.clamp(-limit, limit).masked_fill(s == -inf, -inf).softmax(-1).nan_to_num(0.0)
            ),
        )
        for limit in (1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 50.0)
    ),
    _v(
        "exp overflows: the row maximum is not subtracted",
        "overflow",
        "use softmax, or subtract the maximum of each row",
        normalize=lambda s, ok: s.exp() / s.exp().sum(-1, keepdim=True),
    ),
)

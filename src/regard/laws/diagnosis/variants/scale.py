"""Faults of the scale."""

from math import isqrt
from typing import Any

import torch

from ..formula import Call
from .make import variant as _v


def _scale(value: Any, keep_given: bool = True) -> Any:
    """A factor instead of 1/√d_k; an explicit scale is used unless keep_given is False."""

    def factor(call: Call) -> Any:
        given = call.options.get("scale")
        return value(call) if given is None or not keep_given else given

    return factor


def _given(value: Any) -> Any:
    """A factor that changes an explicit scale; the default stays 1/√d_k."""

    def factor(call: Call) -> Any:
        given = call.options.get("scale")
        return call.q.shape[-1] ** -0.5 if given is None else value(given, call)

    return factor


def _d(call: Call) -> int:
    return call.q.shape[-1]


SCALE = (
    _v(
        "the scores are not scaled",
        "no scale",
        "divide q·k by √d_k",
        factor=_scale(lambda c: 1.0),
    ),
    _v(
        "the scores are divided by d_k instead of √d_k",
        "scale 1/d",
        "divide by √d_k once",
        factor=_scale(lambda c: 1.0 / _d(c)),
    ),
    _v(
        "the scores are multiplied by √d_k",
        "scale inverted",
        "divide by √d_k instead",
        factor=_scale(lambda c: _d(c) ** 0.5),
    ),
    _v(
        "the scores are multiplied by d_k",
        "scale inverted",
        "divide by √d_k instead",
        factor=_scale(lambda c: float(_d(c))),
    ),
    _v(
        "the scores are scaled by d_k^(−1/4): only one of q and k, or the square root twice",
        "scale d^-1/4",
        "multiply by d_k^(−1/2)",
        factor=_scale(lambda c: _d(c) ** -0.25),
    ),
    _v(
        "the scores are scaled twice, by d_k^(−3/2)",
        "scale twice",
        "scale once",
        factor=_scale(lambda c: _d(c) ** -1.5),
    ),
    _v(
        "the scores are divided by √(heads · d_k), the model width, instead of √d_k",
        "scale of the model width",
        "divide by √d_k, the width of one head",
        factor=_scale(lambda c: (c.q.shape[1] * _d(c)) ** -0.5),
    ),
    _v(
        "the scores are divided by the model width heads · d_k",
        "scale of the model width",
        "divide by √d_k, the width of one head",
        factor=_scale(lambda c: 1.0 / (c.q.shape[1] * _d(c))),
    ),
    _v(
        "the scores are divided by √m, the number of keys, instead of √d_k",
        "scale of the length",
        "divide by √d_k",
        factor=_scale(lambda c: c.k.shape[-2] ** -0.5),
    ),
    _v(
        "the scores are divided by √n, the number of queries, instead of √d_k",
        "scale of the length",
        "divide by √d_k",
        factor=_scale(lambda c: c.q.shape[-2] ** -0.5),
    ),
    _v(
        "the scores are divided by m, the number of keys",
        "scale of the length",
        "divide by √d_k",
        factor=_scale(lambda c: 1.0 / c.k.shape[-2]),
    ),
    _v(
        "the scores are divided by √heads instead of √d_k",
        "scale of the heads",
        "divide by √d_k",
        factor=_scale(lambda c: c.q.shape[1] ** -0.5),
    ),
    _v(
        "the scores are divided by √b, the batch size, instead of √d_k",
        "scale of the batch",
        "divide by √d_k",
        factor=_scale(lambda c: c.q.shape[0] ** -0.5),
    ),
    _v(
        "the scores are divided by √d_v instead of √d_k",
        "scale of d_v",
        "divide by √d_k",
        factor=_scale(lambda c: c.v.shape[-1] ** -0.5),
    ),
    _v(
        "the scale is 1/√(d_k/2)",
        "scale of a wrong width",
        "divide by √d_k",
        factor=_scale(lambda c: (_d(c) / 2) ** -0.5),
    ),
    _v(
        "the scale is 1/√(2·d_k)",
        "scale of a wrong width",
        "divide by √d_k",
        factor=_scale(lambda c: (2 * _d(c)) ** -0.5),
    ),
    _v(
        "the scale is 1/√(d_k − 1)",
        "scale of a wrong width",
        "divide by √d_k",
        factor=_scale(lambda c: max(_d(c) - 1, 1) ** -0.5),
    ),
    _v(
        "the scale is that of d_k padded to a power of two",
        "scale of a wrong width",
        "divide by √d_k, not by the root of the padded width",
        factor=_scale(lambda c: (1 << (_d(c) - 1).bit_length()) ** -0.5),
    ),
    _v(
        "the scale is 1/√(d_k + 1)",
        "scale of a wrong width",
        "divide by √d_k",
        factor=_scale(lambda c: (_d(c) + 1) ** -0.5),
    ),
    _v(
        "the scale is a constant, 1/√64, for every d_k",
        "constant scale",
        "compute 1/√d_k from the shape of q",
        factor=_scale(lambda c: 0.125),
    ),
    _v(
        "the scores are divided by ln d_k, or the scale uses the wrong function of d_k",
        "scale of a wrong width",
        "divide by √d_k",
        factor=_scale(lambda c: 1 / torch.tensor(float(_d(c))).log2().item() if _d(c) > 1 else 1.0),
    ),
    _v(
        "the root of d_k is rounded down to an integer",
        "scale rounded",
        "divide by √d_k, a floating-point number",
        factor=_scale(lambda c: 1.0 / isqrt(_d(c))),
    ),
    _v(
        "a given scale of 0 is treated as if none were given",
        "scale ignored",
        "test the argument with `is not None`, not for truth",
        factor=_given(lambda s, c: s or _d(c) ** -0.5),
    ),
    _v(
        "a given scale is ignored",
        "scale ignored",
        "use the argument if it is not None",
        factor=_given(lambda s, c: _d(c) ** -0.5),
    ),
    _v(
        "a given scale is applied in addition to 1/√d_k",
        "scale twice",
        "let the argument replace 1/√d_k",
        factor=_given(lambda s, c: s * _d(c) ** -0.5),
    ),
    _v(
        "a given scale is applied twice",
        "scale twice",
        "multiply by it once",
        factor=_given(lambda s, c: s * s),
    ),
    _v(
        "the scores are divided by a given scale",
        "scale inverted",
        "multiply by it",
        factor=_given(lambda s, c: 1.0 / s),
    ),
)

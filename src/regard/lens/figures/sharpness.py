"""Sharpness: softmax from uniform to one-hot, and the effect of a changed key, exactly and to first order."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ...errors import ShapeError
from ..perturbation import key_length, key_noise
from . import style


def sharpness(
    scores: Float[Tensor, " m"] | Sequence[int | float],
    q: Float[Tensor, "n d_k"] | None = None,
    k: Float[Tensor, "m d_k"] | None = None,
    v: Float[Tensor, "m d_v"] | None = None,
    key: int = 0,
    *,
    dark: bool = False,
) -> Any:
    """The weights of these scores against a factor b, from equal weights to one-hot.

    With q, k and v also the change of the output against a key's length and against noise on it.
    """
    s = torch.as_tensor(scores, dtype=torch.float64)
    given = [name for name, x in (("q", q), ("k", k), ("v", v)) if x is not None]
    if given and (q is None or k is None or v is None):
        raise ShapeError(f"got only {' and '.join(given)}; the effect of a changed key needs q, k and v")
    figure = style.canvas(11.5 if given else 4.6, 3.7, dark)
    cells = style.grid(figure, 1, 3 if given else 1)
    left = style.axes(figure, cells[0], dark=dark, title="softmax(b · scores)", x="b", y="weight")
    factors = torch.logspace(-2, 2, 60)
    weights = (factors[:, None].double() * s).softmax(-1)
    for j in range(len(s)):
        style.line(left, j, factors.tolist(), weights[:, j].tolist(), f"score {float(s[j]):g}")
    left.set_xscale("log")
    style.legend(left, dark)
    if q is None or k is None or v is None:
        return figure

    alphas = [i / 10 for i in range(31)]
    longer = key_length(q, k, v, key, alphas)
    middle = style.axes(
        figure,
        cells[1],
        dark=dark,
        title=f"key {key} made longer",
        x="factor of its length",
        y="‖change of the output‖",
    )
    for number, (name, change) in enumerate((("exact", longer.exact), ("first order", longer.first_order))):
        style.line(middle, number, longer.at.tolist(), change.norm(dim=-1).mean(-1).tolist(), name)
    style.legend(middle, dark)

    sigmas = [i / 10 for i in range(11)]
    noisy = key_noise(q, k, v, key, sigmas)
    right = style.axes(
        figure, cells[2], dark=dark, title=f"noise on key {key}", x="σ", y="‖change of the output‖"
    )
    for number, (name, change) in enumerate(
        (
            ("deviation", noisy.deviation),
            ("deviation, first order", noisy.deviation_first_order),
            ("mean", noisy.mean),
            ("mean, second order", noisy.mean_first_order),
        )
    ):
        style.line(right, number, noisy.at.tolist(), change.norm(dim=-1).mean(-1).tolist(), name)
    style.legend(right, dark)
    return figure

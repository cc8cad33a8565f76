"""Faults of gradients; the outputs are right."""

from math import inf
from typing import Any

import torch
from torch import Tensor

from .make import variant as _v


def _through(a: Tensor, ok: Tensor | None) -> Tensor:
    return a.detach()


class _ScaledGradient(torch.autograd.Function):
    """The identity, with a gradient multiplied by a factor."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


def _grad(which: str, factor: Any) -> Any:
    def inputs(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        f = factor(q)
        return tuple(
            x if name not in which else x.detach() if f == 0 else _ScaledGradient.apply(x, f)
            for name, x in zip("qkv", (q, k, v))
        )

    return inputs


def _no_row_term(s: Tensor, ok: Tensor | None) -> Tensor:
    a = s.softmax(-1).nan_to_num(0.0).detach()
    finite = s.masked_fill(s == -inf, 0.0)
    return a + a * (finite - finite.detach())


GRADIENTS = (
    *(
        _v(
            f"{word} detached: no gradient reaches {word.removesuffix(' is').removesuffix(' are')}",
            "input detached",
            "remove detach(), .data or no_grad",
            inputs=_grad(which, lambda q: 0),
        )
        for which, word in (
            ("q", "q is"),
            ("k", "k is"),
            ("v", "v is"),
            ("qk", "q and k are"),
            ("kv", "k and v are"),
            ("qv", "q and v are"),
        )
    ),
    _v(
        "the weights are detached: only v gets a gradient",
        "weights detached",
        "remove detach(), .data or no_grad",
        weights=_through,
    ),
    _v(
        "the output is detached: no gradient reaches q, k or v",
        "output detached",
        "remove detach(), .data or no_grad",
        output=lambda a, v, c: (a @ v).detach(),
    ),
    _v(
        "the backward pass omits the term − a Σ a·g of softmax",
        "softmax backward",
        "ds = a ∘ (g − Σ_j a_j g_j)",
        normalize=_no_row_term,
    ),
    *(
        _v(
            f"the gradient of {' and '.join(which)} lacks the scale 1/√d_k",
            "backward scale",
            "multiply dq and dk by the scale in the backward pass",
            inputs=_grad(which, lambda q: q.shape[-1] ** 0.5),
        )
        for which in ("qk", "q", "k")
    ),
    *(
        _v(
            f"the gradient of {' and '.join(which)} has the scale 1/√d_k twice",
            "backward scale",
            "multiply dq and dk by the scale once",
            inputs=_grad(which, lambda q: q.shape[-1] ** -0.5),
        )
        for which in ("qk", "q", "k")
    ),
    *(
        _v(
            f"the gradient of {' and '.join(which)} is {word}",
            "gradient scaled",
            "correct the backward pass",
            inputs=_grad(which, lambda q, f=f: f),
        )
        for which in ("q", "k", "v", "qk", "qkv")
        for f, word in ((2.0, "doubled"), (0.5, "halved"), (-1.0, "negated"))
    ),
    _v(
        "the gradients of k and v reach only the first head of each group",
        "backward of grouped heads",
        "sum the gradients over the query heads of a group",
        repeat_k=lambda x, h: _group_gradient(x, h),
        repeat_v=lambda x, h: _group_gradient(x, h),
    ),
)


def _group_gradient(x: Tensor, h: int) -> Tensor:
    r = h // x.shape[1]
    out = x[:, :, None].expand(-1, -1, r, -1, -1)
    out = torch.cat([out[:, :, :1], out[:, :, 1:].detach()], 2)
    return out.flatten(1, 2)

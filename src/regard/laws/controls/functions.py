"""The formula as a target, and wrong attentions made from it: the controls that laws must report as broken."""

from collections.abc import Callable
from math import inf
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ... import pattern, reference
from ..target import Function

Weigh = Callable[[Tensor, Tensor], Tensor]

CLAIMS = (
    "mask",
    "causal",
    "scale",
    "bias",
    "lengths",
    "documents",
    "window",
    "lse",
    "weights",
    "float64",
    "float32",
    "grad",
    "double backward",
    "deterministic",
    "grouped",
    "n≠m",
    "d_v≠d_k",
    "mask and causal",
    "empty rows",
)


def table(
    q: Float[Tensor, "b h n d_k"],
    k: Float[Tensor, "b h_kv m d_k"],
    *,
    allowed: Bool[Tensor, "..."] | None = None,
    causal: bool = False,
    lengths: Tensor | None = None,
    documents: Tensor | None = None,
    window: tuple[int, int] | None = None,
) -> Bool[Tensor, "..."]:
    """All that hides pairs, in one table; query i stands at i + m − n."""
    n, m = q.shape[-2], k.shape[-2]
    i = torch.arange(n, device=q.device)[:, None] + (m - n)
    j = torch.arange(m, device=q.device)
    out = torch.ones(n, m, dtype=torch.bool, device=q.device)
    if causal:
        out = out & pattern.causal().allows(i, j)
    if window is not None:
        out = out & pattern.window(*window).allows(i, j)
    if lengths is not None:
        out = out & pattern.lengths(lengths).allows(i, j)
    if documents is not None:
        out = out & pattern.documents(documents).allows(i, j)
    return out if allowed is None else out & allowed


def formula() -> Function:
    """reference.py, as it stands."""

    def call(q, k, v, *, scale=None, bias=None, lse=False, weights=False, **hiding):
        k, v = (reference.repeat_heads(x, q.shape[1]) for x in (k, v))
        out = reference.attend(q, k, v, table(q, k, **hiding), bias=bias, scale=scale)
        return (out.o, out.lse) if lse else (out.o, out.weights) if weights else out.o

    return Function(
        "reference.py",
        call,
        claims=frozenset(CLAIMS),
        # 0 · NaN is NaN in the formula, and products before the scale pass what float16 holds
        lacks=frozenset({"nan under mask", "nan under lengths", "float16"}),
        alignment="bottom-right",
        source="formula()",
        imports="from regard.laws.controls.functions import formula",
    )


def weighing(name: str, weigh: Weigh, *claims: str) -> Function:
    """The formula with other weights: weigh(scores, allowed) in place of softmax."""

    def call(q, k, v, *, scale=None, bias=None, lse=False, weights=False, **hiding):
        k, v = (reference.repeat_heads(x, q.shape[1]) for x in (k, v))
        scores = reference.dot_scores(q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
        scores = scores if bias is None else scores + bias
        allowed = table(q, k, **hiding).expand(scores.shape)
        w = weigh(scores, allowed)
        total = reference.log_sum_exp(scores, allowed)
        return (w @ v, total) if lse else (w @ v, w) if weights else w @ v

    return Function(name, call, claims=frozenset(claims or CLAIMS) - {"empty rows"}, alignment="bottom-right")


def wrapped(
    name: str, change: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]], *claims: str
) -> Function:
    """The formula behind a wrong door: change(q, k, v, asked) → what it is really called with."""
    right = formula().call

    def call(q, k, v, **asked):
        given, named = change(q, k, v, dict(asked))
        return right(*given, **named)

    return Function(name, call, claims=frozenset(claims or CLAIMS), alignment="bottom-right")


def hidden(scores: Float[Tensor, "*b n m"], allowed: Bool[Tensor, "*b n m"]) -> Float[Tensor, "*b n m"]:
    return scores.masked_fill(~allowed, -inf)

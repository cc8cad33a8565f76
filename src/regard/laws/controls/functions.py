"""reference.py as a target, and faulty attentions derived from it: the controls that laws must report as broken."""

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
    "softcap",
    "sink logits",
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
    """All masks of a call combined into one table; query i has the position i + m − n."""
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


def reference_function() -> Function:
    """reference.py as a target."""

    def call(q, k, v, *, bias=None, lse=False, weights=False, **options):
        k, v = (reference.repeat_heads(x, q.shape[1]) for x in (k, v))
        terms = {name: options.pop(name, None) for name in ("scale", "softcap", "sink_logits")}
        out = reference.attend(q, k, v, table(q, k, **options), bias=bias, **terms)
        return (out.o, out.lse) if lse else (out.o, out.weights) if weights else out.o

    return Function(
        "reference.py",
        call,
        claims=frozenset(CLAIMS),
        # 0 · NaN is NaN in the reference, and unscaled products overflow float16
        lacks=frozenset({"nan under mask", "nan under lengths", "float16"}),
        alignment="bottom-right",
        source="reference_function()",
        imports="from regard.laws.controls import reference_function",
    )


def with_weights(name: str, weigh: Weigh, *claims: str) -> Function:
    """The reference with other weights: weigh(scores, allowed) replaces softmax."""

    def call(q, k, v, *, scale=None, bias=None, lse=False, weights=False, **masking):
        k, v = (reference.repeat_heads(x, q.shape[1]) for x in (k, v))
        scores = reference.dot_scores(q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
        scores = scores if bias is None else scores + bias
        allowed = table(q, k, **masking).expand(scores.shape)
        w = weigh(scores, allowed)
        total = reference.log_sum_exp(scores, allowed)
        return (w @ v, total) if lse else (w @ v, w) if weights else w @ v

    lacks = {"empty rows", "softcap", "sink logits"}
    return Function(name, call, claims=frozenset(claims or CLAIMS) - lacks, alignment="bottom-right")


def with_changed_call(
    name: str, change: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]], *claims: str
) -> Function:
    """The reference called with changed arguments: change(q, k, v, options) → (q, k, v), options."""
    correct = reference_function().call

    def call(q, k, v, **options):
        inputs, options = change(q, k, v, dict(options))
        return correct(*inputs, **options)

    return Function(name, call, claims=frozenset(claims or CLAIMS), alignment="bottom-right")


def mask_scores(scores: Float[Tensor, "*b n m"], allowed: Bool[Tensor, "*b n m"]) -> Float[Tensor, "*b n m"]:
    return scores.masked_fill(~allowed, -inf)

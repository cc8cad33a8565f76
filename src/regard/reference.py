"""The definition of attention, step by step. Every backend is compared with this file.

    scores  = scale · q·k                         (n, m)
    scores  = c · tanh(scores / c)                with a softcap c
    scores  = scores + bias, −∞ where the key is not allowed
    weights = softmax over the keys               each row a distribution; an empty row is zeros
    o       = weights · v                         (n, d_v)

Rows are positions. `attend_columns` has features × positions instead, as some papers write.
"""

from math import inf
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from einops import einsum, rearrange, repeat
from jaxtyping import Bool, Float
from torch import Tensor

from .errors import ShapeError, SpecError

Ties = Literal["share", "first"]


def default_scale(d_k: int) -> float:
    """1/√d_k. Vectors without a component have products of 0, which no scale changes."""
    return d_k**-0.5 if d_k else 1.0


class AttentionOutput(NamedTuple):
    """The output o, and the intermediate results."""

    o: Float[Tensor, "*b n d_v"]
    weights: Float[Tensor, "*b n m"]
    lse: Float[Tensor, "*b n"]
    scores: Float[Tensor, "*b n m"]


def dot_scores(q: Float[Tensor, "*b n d_k"], k: Float[Tensor, "*b m d_k"]) -> Float[Tensor, "*b n m"]:
    """q·k for each pair."""
    return einsum(q, k, "... n d, ... m d -> ... n m")


def bilinear_scores(
    q: Float[Tensor, "*b n d_q"], k: Float[Tensor, "*b m d_k"], w: Float[Tensor, "d_q d_k"]
) -> Float[Tensor, "*b n m"]:
    """qᵀ W k for each pair (multiplicative attention)."""
    return dot_scores(q @ w, k)


def tanh_scores(
    q: Float[Tensor, "*b n d_a"], k: Float[Tensor, "*b m d_a"], v: Float[Tensor, "*h d_a"]
) -> Float[Tensor, "*b n m"]:
    """vᵀ tanh(q + k) for each pair; one v for all heads, or one per head."""
    pairs = rearrange(q, "... n a -> ... n 1 a") + rearrange(k, "... m a -> ... 1 m a")
    return (pairs.tanh() * rearrange(v, "... a -> ... 1 1 a")).sum(-1)


def additive_scores(
    q: Float[Tensor, "*b n d_q"],
    k: Float[Tensor, "*b m d_k"],
    w_q: Float[Tensor, "d_q d_a"],
    w_k: Float[Tensor, "d_k d_a"],
    v: Float[Tensor, " d_a"],
) -> Float[Tensor, "*b n m"]:
    """vᵀ tanh(W_q q + W_k k) for each pair (additive attention)."""
    return tanh_scores(q @ w_q, k @ w_k, v)


def softmax(
    scores: Float[Tensor, "*b n m"], allowed: Bool[Tensor, "..."] | None = None
) -> Float[Tensor, "*b n m"]:
    """exp(s_j) / Σ exp(s_j) over the allowed keys; zeros for a query with no allowed key.

    A score of −∞ excludes its key as well, as in an additive mask.
    """
    scores, allowed = _exclude(scores, allowed)
    return scores.softmax(-1).masked_fill(~allowed, 0.0)


def log_sum_exp(
    scores: Float[Tensor, "*b n m"], allowed: Bool[Tensor, "..."] | None = None
) -> Float[Tensor, "*b n"]:
    """ln Σ exp(s_j) over the allowed keys; −∞ for a query with no allowed key, with zero gradient."""
    scores, allowed = _exclude(scores, allowed)
    return scores.logsumexp(-1).masked_fill(~allowed.any(-1), -inf)


def _exclude(
    scores: Float[Tensor, "*b n m"], allowed: Bool[Tensor, "..."] | None
) -> tuple[Float[Tensor, "*b n m"], Bool[Tensor, "*b n m"]]:
    """Scores with −∞ at each excluded key, and which keys remain.

    A row of only −∞ would be 0/0, so it is set to zeros, which the caller masks: no NaN, no gradient.
    """
    remaining = scores != -inf if allowed is None else allowed & (scores != -inf)
    not_empty = remaining.any(-1, keepdim=True)
    return scores.masked_fill(~remaining, -inf).masked_fill(~not_empty, 0.0), remaining


def softcapped(scores: Float[Tensor, "*b n m"], softcap: int | float | None) -> Float[Tensor, "*b n m"]:
    """c · tanh(scores / c): within ±c, and close to the scores where they are small."""
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def with_sink(
    scores: Float[Tensor, "*b h n m"], allowed: Bool[Tensor, "..."] | None, sink_logits: Float[Tensor, " h"]
) -> tuple[Float[Tensor, "*b h n m1"], Bool[Tensor, "*b h n m1"] | None]:
    """Scores and allowed pairs with one more key, of the score sink_logits[h] for every query of head h."""
    sink = repeat(sink_logits.to(scores.dtype), "h -> h n 1", n=scores.shape[-2])
    extended = torch.cat([scores, sink.expand(*scores.shape[:-1], 1)], -1)
    if allowed is None:
        return extended, None
    return extended, F.pad(allowed.expand(scores.shape), (0, 1), value=True)


def hardmax(
    scores: Float[Tensor, "*b n m"], allowed: Bool[Tensor, "..."] | None = None, ties: Ties = "share"
) -> Float[Tensor, "*b n m"]:
    """The limit of softmax(t·s), t → ∞: c tied keys get 1/c each, or the first of them gets 1."""
    if scores.shape[-1] == 0:
        return scores.detach()
    scores, remaining = _exclude(scores.detach(), allowed)
    best = (scores == scores.amax(-1, keepdim=True)) & remaining
    if ties == "first":
        best = best & (best.cumsum(-1) == 1)
    return best.to(scores.dtype) / best.sum(-1, keepdim=True).clamp(min=1)


def attend(
    q: Float[Tensor, "*b n d_k"],
    k: Float[Tensor, "*b m d_k"],
    v: Float[Tensor, "*b m d_v"],
    allowed: Bool[Tensor, "..."] | None = None,
    *,
    bias: Float[Tensor, "..."] | None = None,
    scale: int | float | None = None,
    softcap: int | float | None = None,
    sink_logits: Float[Tensor, " h"] | None = None,
    ties: Ties = "share",
) -> AttentionOutput:
    """softmax(scale · q kᵀ + bias) v over the allowed pairs; scale is 1/√d_k unless given.

    softcap=c: the products become c · tanh(scale · q kᵀ / c) before the bias is added. sink_logits: the softmax of
    head h has one more score, sink_logits[h], which takes a share of the weights and has no value; the log-sum-exp is
    with it.

    scale=∞ is hard attention: the limit of softmax(t · (q·k/√d_k + bias)), t → ∞. Only v gets a
    gradient, and the log-sum-exp is NaN.
    """
    hard = scale == inf
    if scale == -inf:
        raise SpecError(
            f"scale={scale}: only +inf is defined, as hard attention; negate q to select the smallest score"
        )
    if hard and sink_logits is not None:
        raise SpecError("scale=inf is hard attention, which has no softmax for sink_logits to join")
    factor = default_scale(q.shape[-1]) if scale is None or hard else scale
    scores = softcapped(factor * dot_scores(q, k), softcap)
    if bias is not None:
        scores = scores + bias
    if hard:
        weights = hardmax(scores, allowed, ties)
        lse = scores.new_full(scores.shape[:-1], torch.nan)
    elif sink_logits is not None:
        extended, allowed = with_sink(scores, allowed, sink_logits)
        weights, lse = softmax(extended, allowed)[..., :-1], log_sum_exp(extended, allowed)
    else:
        weights, lse = softmax(scores, allowed), log_sum_exp(scores, allowed)
    return AttentionOutput(einsum(weights, v, "... n m, ... m d -> ... n d"), weights, lse, scores)


def attend_columns(
    q: Float[Tensor, "*b d_k n"],
    k: Float[Tensor, "*b d_k m"],
    v: Float[Tensor, "*b d_v m"],
    allowed: Bool[Tensor, "..."] | None = None,
    *,
    scale: int | float | None = None,
) -> Float[Tensor, "*b d_v n"]:
    """V softmax(scale · Kᵀ Q): columns are positions, and the softmax is over each column."""
    rows = (rearrange(x, "... d n -> ... n d") for x in (q, k, v))
    return rearrange(attend(*rows, allowed, scale=scale).o, "... n d -> ... d n")


def attend_streaming(
    q: Float[Tensor, "*b n d_k"],
    k: Float[Tensor, "*b m d_k"],
    v: Float[Tensor, "*b m d_v"],
    allowed: Bool[Tensor, "n m"] | None = None,
    *,
    scale: int | float | None = None,
    block: int = 64,
) -> tuple[Float[Tensor, "*b n d_v"], Float[Tensor, "*b n"]]:
    """The same in one pass over blocks of keys: two running numbers per query instead of a row of weights.

    With top = max so far and mass = Σ exp(s − top), a new block rescales the partial sum by exp(old − new).
    """
    factor = default_scale(q.shape[-1]) if scale is None else scale
    top = torch.full_like(q[..., 0], -inf)
    mass, partial = torch.zeros_like(top), q.new_zeros(*q.shape[:-1], v.shape[-1])
    for j in range(0, k.shape[-2], block):
        scores = factor * dot_scores(q, k[..., j : j + block, :])
        if allowed is not None:
            scores = scores.masked_fill(~allowed[:, j : j + block], -inf)
        higher = torch.maximum(top, scores.amax(-1))
        floor = higher.masked_fill(higher == -inf, 0.0)  # nothing allowed yet: exp(−∞ − 0) = 0, not NaN
        rescale, new = (top - floor).exp(), (scores - floor[..., None]).exp()
        mass = mass * rescale + new.sum(-1)
        partial = partial * rescale[..., None] + new @ v[..., j : j + block, :]
        top = higher
    mass = mass.where(mass > 0, 1.0)  # an empty row: o = 0/1, and a log-sum-exp of −∞ + ln 1
    return partial / mass[..., None], top + mass.log()


def multi_head(
    x: Float[Tensor, "*b n d_model"],
    w_q: Float[Tensor, "d_model h_dk"],
    w_k: Float[Tensor, "d_model h_dk"],
    w_v: Float[Tensor, "d_model h_dv"],
    w_o: Float[Tensor, "h_dv d_out"] | None,
    heads: int,
    allowed: Bool[Tensor, "..."] | None = None,
    *,
    in_sequence: bool = False,
) -> Float[Tensor, "*b n d_out"]:
    """concat_h softmax(Q_h K_hᵀ/√d_k) V_h, times W_O; heads are consecutive column blocks.

    `in_sequence` computes one head after the other, so that only one n × m table exists at a time. That saves memory
    only in inference: in training autograd saves every table.
    """
    split = (rearrange(x @ w, "... n (h d) -> ... h n d", h=heads) for w in (w_q, w_k, w_v))
    q, k, v = split
    if in_sequence:
        o = torch.stack(
            [attend(q[..., h, :, :], k[..., h, :, :], v[..., h, :, :], allowed).o for h in range(heads)], -3
        )
    else:
        o = attend(q, k, v, allowed).o
    o = rearrange(o, "... h n d -> ... n (h d)")
    return o if w_o is None else o @ w_o


def repeat_heads(x: Float[Tensor, "*b h_kv m d"], heads: int) -> Float[Tensor, "*b h m d"]:
    """Grouped heads: query heads g·c … g·c + c − 1 share key/value head g, c = heads / h_kv."""
    kv_heads = x.shape[-3]
    if heads % kv_heads:
        raise ShapeError(f"{kv_heads} key/value heads do not divide {heads} query heads")
    return repeat(x, "... h m d -> ... (h c) m d", c=heads // kv_heads)


def allowed_from(
    *,
    zero_one: Tensor | None = None,
    additive: Tensor | None = None,
    padding: Bool[Tensor, "b m"] | None = None,
) -> Bool[Tensor, "..."]:
    """A foreign mask, by the name of its convention, as a bool tensor with True = may attend.

    zero_one: 1 = may attend. additive: 0 = may attend, −∞ (or a float's lowest number) = may not.
    padding: (b, m), True = this key is padding, as nn.MultiheadAttention's key_padding_mask.
    """
    given = [x for x in (zero_one, additive, padding) if x is not None]
    if len(given) != 1:
        raise SpecError("allowed_from takes one mask, by name: zero_one=, additive= or padding=")
    if zero_one is not None:
        return zero_one != 0
    if additive is not None:
        return additive > torch.finfo(additive.dtype).min
    assert padding is not None
    return ~padding[:, None, None, :]

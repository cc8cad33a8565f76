"""How similar heads are: the cosine of their maps, and the angles between their query or key subspaces."""

from typing import Literal

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor

from ..errors import RegardError, ShapeError
from .calls import AttentionCall, QueryKeyScores

ROWS = 64  # queries whose weights, of all heads, are in memory at a time


def agreement(a: AttentionCall, b: AttentionCall) -> Float[Tensor, "h g"]:
    """Σ a_h · b_g / (‖a_h‖ ‖b_g‖) over all weights: 1 for equal maps, 0 for maps that share no pair."""
    if (a.b, a.n, a.m) != (b.b, b.n, b.m):
        raise ShapeError(
            f"maps of {a.n} × {a.m} ({a.name}) and of {b.n} × {b.m} ({b.name}) cannot be compared: different shapes"
        )
    products = torch.zeros(a.heads, b.heads, dtype=torch.float64)
    norms_a, norms_b = torch.zeros(a.heads, dtype=torch.float64), torch.zeros(b.heads, dtype=torch.float64)
    for batch in range(a.b):
        for start in range(0, a.n, ROWS):
            rows = list(range(start, min(start + ROWS, a.n)))
            x = rearrange(a.weights(None, rows, batch), "h r m -> h (r m)")
            y = x if b is a else rearrange(b.weights(None, rows, batch), "h r m -> h (r m)")
            products += einsum(x, y, "h p, g p -> h g").double().cpu()
            norms_a += (x * x).sum(-1).double().cpu()
            norms_b += (y * y).sum(-1).double().cpu()
    return products / (norms_a[:, None] * norms_b).sqrt().clamp(min=1e-30)


def principal_angles(a: Float[Tensor, "d p"], b: Float[Tensor, "d r"]) -> Float[Tensor, " min_pr"]:
    """The angles between the spans of the columns of a and of b, the smallest first, in [0, π/2].

    Small angles are computed from their sines: the cosine of a small angle has no precision.
    """
    u, w = (torch.linalg.qr(x.double())[0] for x in (a, b))
    if u.shape[1] < w.shape[1]:
        u, w = w, u
    cosines = torch.linalg.svdvals(u.mT @ w).clamp(max=1.0)
    sines = torch.linalg.svdvals(w - u @ (u.mT @ w)).clamp(max=1.0).flip(-1)
    return torch.where(cosines**2 > 0.5, sines.asin(), cosines.acos())


def head_angles(call: AttentionCall, of: Literal["query", "key"] = "query") -> Float[Tensor, "h h d_k"]:
    """The principal angles between the heads of a call: of what their queries, or keys, span over the tokens."""
    source = call._require_source()
    if not isinstance(source, QueryKeyScores):
        raise RegardError(
            f"layer {call.layer} ({call.name}) is eager attention: only its weights were recorded, not q and k"
        )
    if of not in ("query", "key"):
        raise RegardError(f"of={of!r}; use 'query' or 'key'")
    vectors = source.q if of == "query" else source.k
    spans = rearrange(vectors, "b h n d -> h (b n) d")
    h, n, d = spans.shape
    if n < 2 * d:
        raise ShapeError(
            f"{n} tokens for heads of width {d}: two subspaces of dimension {d} always intersect in fewer than "
            f"{2 * d} dimensions; use at least {2 * d} tokens"
        )
    angles = torch.zeros(h, h, d, dtype=torch.float64)
    for i in range(h):
        for j in range(i):
            angles[i, j] = angles[j, i] = principal_angles(spans[i], spans[j]).cpu()
    return angles

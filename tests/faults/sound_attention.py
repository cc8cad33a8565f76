"""A sound attention, written out so that every line can be broken. `seeded.py` breaks it, one line at a time."""

from math import inf

import torch

TILE = 64
KEPT = {}


def attention(q, k, v, allowed=None, *, causal=False, lengths=None, bias=None, scale=None, return_lse=False):
    """softmax(scale · q kᵀ + bias) v; a query that may look nowhere gets zeros. Causal: aligned bottom right."""
    b, h, n, d = q.shape
    m = k.shape[-2]
    k, v = share(k, h), share(v, h)
    if lengths is not None:
        k, v = hide(k, lengths), hide(v, lengths)
    factor = d**-0.5 if scale is None else scale
    seen = pairs(b, n, m, allowed, causal, lengths)
    scores = factor * (q @ k.mT)
    if bias is not None:
        scores = scores + bias
    seen = seen & (scores != -inf)
    somewhere = seen.any(-1, keepdim=True)
    scores = scores.masked_fill(~seen, -inf).masked_fill(~somewhere, 0.0)
    weights = scores.softmax(-1).masked_fill(~seen, 0.0)
    o = weights @ v
    lse = scores.logsumexp(-1).masked_fill(~somewhere[..., 0], -inf)
    return (o, lse) if return_lse else o


def share(x, heads):
    """Query heads g·c … g·c + c − 1 read key/value head g."""
    return x.repeat_interleave(heads // x.shape[1], 1)


def hide(x, lengths):
    past = torch.arange(x.shape[-2]) >= lengths[:, None]
    return x.masked_fill(past[:, None, :, None], 0.0)


def pairs(b, n, m, allowed, causal, lengths):
    """Who may look where, (b or 1, 1, n, m)."""
    i, j = torch.arange(n)[:, None], torch.arange(m)
    seen = torch.ones(1, 1, n, m, dtype=torch.bool)
    if causal:
        seen = seen & (j <= i + m - n)
    if allowed is not None:
        seen = seen & allowed
    if lengths is not None:
        seen = seen & (j < lengths[:, None, None, None])
    return seen


def tiled(q, k, v, allowed=None, *, causal=False, lengths=None, bias=None, scale=None, return_lse=False):
    """The same, a tile of keys after the other: top is the largest score so far, mass = Σ exp(s − top)."""
    b, h, n, d = q.shape
    m = k.shape[-2]
    k, v = share(k, h), share(v, h)
    if lengths is not None:
        k, v = hide(k, lengths), hide(v, lengths)
    factor = d**-0.5 if scale is None else scale
    seen = pairs(b, n, m, allowed, causal, lengths)
    top = torch.full_like(q[..., 0], -inf)
    mass, gathered = torch.zeros_like(top), q.new_zeros(b, h, n, v.shape[-1])
    for j in range(0, m, TILE):
        tile = slice(j, j + TILE)
        scores = factor * (q @ k[:, :, tile].mT)
        if bias is not None:
            scores = scores + bias[..., tile]
        scores = scores.masked_fill(~seen[..., tile], -inf)
        higher = torch.maximum(top, scores.detach().amax(-1))
        floor = higher.masked_fill(higher == -inf, 0.0)
        kept, new = (top - floor).exp(), (scores - floor[..., None]).exp()
        mass = mass * kept + new.sum(-1)
        gathered = gathered * kept[..., None] + new @ v[:, :, tile]
        top = higher
    mass = mass.where(mass > 0, 1.0)
    o, lse = gathered / mass[..., None], top + mass.log()
    return (o, lse) if return_lse else o


def merge(parts):
    """(o, lse) of all keys from those of disjoint sets of keys."""
    logs = torch.stack([lse for _, lse in parts])
    lse = logs.logsumexp(0)
    shares = (logs - lse.masked_fill(lse == -inf, 0.0)).exp()
    return sum(share[..., None] * o for share, (o, _) in zip(shares, parts)), lse

"""A sound attention, written out so that every line can be broken. `seeded.py` breaks it, a line at a time."""

from math import inf

import torch

KEPT = {}  # what a faulty one remembers


def attention(
    q,
    k,
    v,
    *,
    allowed=None,
    causal=False,
    lengths=None,
    documents=None,
    window=None,
    bias=None,
    scale=None,
    lse=False,
):
    """softmax(scale · q kᵀ + bias) v; a query that may look nowhere gets zeros. Aligned bottom right."""
    (b, h, n, d), m = q.shape, k.shape[-2]
    k, v = share(k, h), share(v, h)
    if lengths is not None:
        k, v = hide(k, lengths), hide(v, lengths)
    factor = d**-0.5 if scale is None else scale
    scores = (factor * q) @ k.mT
    if bias is not None:
        scores = scores + bias
    seen = pairs(n, m, allowed, causal, lengths, documents, window) & (scores != -inf)
    assert seen.shape == (b, h, n, m)
    somewhere = seen.any(-1, keepdim=True)
    scores = scores.masked_fill(~seen, -inf).masked_fill(~somewhere, 0.0)
    weights = scores.softmax(-1).masked_fill(~seen, 0.0)
    o = weights @ v
    if not lse:
        return o
    return o, scores.logsumexp(-1).masked_fill(~somewhere[..., 0], -inf)


def share(x, heads):
    """Query heads g·c … g·c + c − 1 read key/value head g."""
    return x.repeat_interleave(heads // x.shape[1], 1)


def hide(x, lengths):
    past = torch.arange(x.shape[-2]) >= lengths[:, None]
    return x.masked_fill(past[:, None, :, None], 0.0)


def pairs(n, m, allowed, causal, lengths, documents, window):
    """Who may look where, (b or 1, h or 1, n, m)."""
    i, j = torch.arange(n)[:, None] + m - n, torch.arange(m)
    seen = torch.ones(1, 1, n, m, dtype=torch.bool)
    if causal:
        seen = seen & (j <= i)
    if window is not None:
        before, after = window
        seen = seen & (i - j <= before) & (j - i <= after)
    if allowed is not None:
        seen = seen & allowed
    if lengths is not None:
        seen = seen & (j < lengths[:, None, None, None])
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    return seen


def tiled(q, k, v, *, allowed=None, causal=False, lengths=None, scale=None, lse=False, tile=64):
    """The same, a tile of keys after the other: top is the largest score so far, mass = Σ exp(s − top)."""
    b, h, n, d = q.shape
    m = k.shape[-2]
    k, v = share(k, h), share(v, h)
    if lengths is not None:
        k, v = hide(k, lengths), hide(v, lengths)
    factor = d**-0.5 if scale is None else scale
    seen = pairs(n, m, allowed, causal, lengths, None, None)
    top = torch.full_like(q[..., 0], -inf)
    mass, gathered = torch.zeros_like(top), q.new_zeros(b, h, n, v.shape[-1])
    for start in range(0, m, tile):
        end = min(start + tile, m)
        scores = (factor * q) @ k[:, :, start:end].mT
        scores = scores.masked_fill(~seen[..., start:end], -inf)
        higher = torch.maximum(top, scores.detach().amax(-1))
        floor = higher.masked_fill(higher == -inf, 0.0)
        kept, new = (top - floor).exp(), (scores - floor[..., None]).exp()
        mass = mass * kept + new.sum(-1)
        gathered = gathered * kept[..., None] + new @ v[:, :, start:end]
        top = higher
    mass = mass.where(mass > 0, 1.0)
    o = gathered / mass[..., None]
    return (o, top + mass.log()) if lse else o


def in_parts(q, k, v, *, allowed=None, scale=None, lse=False):
    """The first half of the keys, then the second, joined by log-sum-exp."""
    m = k.shape[-2]
    half = m // 2
    parts = []
    for start, end in ((0, half), (half, m)):
        own = None if allowed is None else allowed[..., start:end]
        if end > start:
            parts.append(
                attention(q, k[:, :, start:end], v[:, :, start:end], allowed=own, scale=scale, lse=True)
            )
    logs = torch.stack([log for _, log in parts])
    most = logs.detach().amax(0)
    most = most.masked_fill(most == -inf, 0.0)
    shares = (logs - most).exp()
    mass = shares.sum(0)
    safe = mass.where(mass > 0, 1.0)
    o = sum(share[..., None] * o for share, (o, _) in zip(shares, parts)) / safe[..., None]
    return (o, (most + safe.log()).where(mass > 0, -inf)) if lse else o

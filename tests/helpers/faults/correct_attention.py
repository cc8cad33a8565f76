"""A correct attention in explicit steps; `faults.py` breaks one line of it at a time."""

from math import inf

import torch

CACHE = {}  # used by faults that keep state between calls


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
    """softmax(scale · q kᵀ + bias) v; a query with no allowed key gets zeros. Aligned bottom-right."""
    (b, h, n, d), m = q.shape, k.shape[-2]
    k, v = repeat_heads(k, h), repeat_heads(v, h)
    if lengths is not None:
        k, v = zero_padding(k, lengths), zero_padding(v, lengths)
    factor = d**-0.5 if scale is None else scale
    scores = (factor * q) @ k.mT
    if bias is not None:
        scores = scores + bias
    visible = pairs(n, m, allowed, causal, lengths, documents, window) & (scores != -inf)
    assert visible.shape == (b, h, n, m)
    nonempty = visible.any(-1, keepdim=True)
    scores = scores.masked_fill(~visible, -inf).masked_fill(~nonempty, 0.0)
    weights = scores.softmax(-1).masked_fill(~visible, 0.0)
    o = weights @ v
    if not lse:
        return o
    return o, scores.logsumexp(-1).masked_fill(~nonempty[..., 0], -inf)


def repeat_heads(x, heads):
    """Query heads g·c … g·c + c − 1 read key/value head g."""
    return x.repeat_interleave(heads // x.shape[1], 1)


def zero_padding(x, lengths):
    past = torch.arange(x.shape[-2]) >= lengths[:, None]
    return x.masked_fill(past[:, None, :, None], 0.0)


def pairs(n, m, allowed, causal, lengths, documents, window):
    """The allowed pairs, (b or 1, h or 1, n, m)."""
    i, j = torch.arange(n)[:, None] + m - n, torch.arange(m)
    visible = torch.ones(1, 1, n, m, dtype=torch.bool)
    if causal:
        visible = visible & (j <= i)
    if window is not None:
        before, after = window
        visible = visible & (i - j <= before) & (j - i <= after)
    if allowed is not None:
        visible = visible & allowed
    if lengths is not None:
        visible = visible & (j < lengths[:, None, None, None])
    if documents is not None:
        visible = visible & (documents[:, None, :, None] == documents[:, None, None, :])
    return visible


def tiled(q, k, v, *, allowed=None, causal=False, lengths=None, scale=None, lse=False, tile=64):
    """The same over tiles of keys, with a running maximum and denominator = Σ exp(s − running_max)."""
    b, h, n, d = q.shape
    m = k.shape[-2]
    k, v = repeat_heads(k, h), repeat_heads(v, h)
    if lengths is not None:
        k, v = zero_padding(k, lengths), zero_padding(v, lengths)
    factor = d**-0.5 if scale is None else scale
    visible = pairs(n, m, allowed, causal, lengths, None, None)
    running_max = torch.full_like(q[..., 0], -inf)
    denominator, numerator = torch.zeros_like(running_max), q.new_zeros(b, h, n, v.shape[-1])
    for start in range(0, m, tile):
        end = min(start + tile, m)
        scores = (factor * q) @ k[:, :, start:end].mT
        scores = scores.masked_fill(~visible[..., start:end], -inf)
        new_max = torch.maximum(running_max, scores.detach().amax(-1))
        floor = new_max.masked_fill(new_max == -inf, 0.0)
        rescale, new = (running_max - floor).exp(), (scores - floor[..., None]).exp()
        denominator = denominator * rescale + new.sum(-1)
        numerator = numerator * rescale[..., None] + new @ v[:, :, start:end]
        running_max = new_max
    denominator = denominator.where(denominator > 0, 1.0)
    o = numerator / denominator[..., None]
    return (o, running_max + denominator.log()) if lse else o


def in_parts(q, k, v, *, allowed=None, scale=None, lse=False):
    """The first half of the keys and the second half, merged by log-sum-exp."""
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
    largest = logs.detach().amax(0)
    largest = largest.masked_fill(largest == -inf, 0.0)
    factors = (logs - largest).exp()
    denominator = factors.sum(0)
    safe = denominator.where(denominator > 0, 1.0)
    o = sum(factor[..., None] * o for factor, (o, _) in zip(factors, parts)) / safe[..., None]
    return (o, (largest + safe.log()).where(denominator > 0, -inf)) if lse else o

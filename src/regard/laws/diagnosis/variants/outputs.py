"""Faults of weights, values and outputs, and of grouped heads."""

import torch
from torch import Tensor

from ..formula import Call
from .make import variant as _v


def _swap_heads(o: Tensor, v: Tensor, call: Call) -> Tensor:
    return (o @ v).flip(1)


def _interleaved(a: Tensor, v: Tensor, call: Call) -> Tensor:
    """Heads merged by view instead of a transpose: rows of different positions and heads are mixed."""
    o = a @ v
    b, h, n, d = o.shape
    return o.transpose(1, 2).reshape(b, h, n, d)


def _reinterpreted(a: Tensor, v: Tensor, call: Call) -> Tensor:
    o = a @ v
    b, h, n, d = o.shape
    return o.reshape(b, n, h, d).transpose(1, 2)


OUTPUT = (
    _v(
        "the weights are transposed before the product with v",
        "weights transposed",
        "use weights @ v",
        output=lambda a, v, c: a.mT @ v if a.shape[-1] == a.shape[-2] else a @ v,
    ),
    _v(
        "the output is the sum of the output and the query: a residual inside",
        "residual inside",
        "return weights @ v only",
        output=lambda a, v, c: a @ v + c.q if c.q.shape[-1] == v.shape[-1] else a @ v,
    ),
    _v(
        "the output is the sum of the output and the value: a residual inside",
        "residual inside",
        "return weights @ v only",
        output=lambda a, v, c: a @ v + v if a.shape[-1] == a.shape[-2] else a @ v,
    ),
    _v(
        "the output is multiplied by √d_k",
        "output scaled",
        "scale the scores only",
        output=lambda a, v, c: (a @ v) * c.q.shape[-1] ** 0.5,
    ),
    _v(
        "the output is divided by √d_k",
        "output scaled",
        "scale the scores only",
        output=lambda a, v, c: (a @ v) * c.q.shape[-1] ** -0.5,
    ),
    _v(
        "the output is divided by m, the number of keys",
        "output scaled",
        "do not divide: the weights already sum to one",
        output=lambda a, v, c: (a @ v) / a.shape[-1],
    ),
    _v(
        "the output is doubled",
        "output scaled",
        "return weights @ v once",
        output=lambda a, v, c: 2 * (a @ v),
    ),
    _v(
        "the output is halved",
        "output scaled",
        "return weights @ v",
        output=lambda a, v, c: 0.5 * (a @ v),
    ),
    _v(
        "the keys are used as values",
        "wrong operand",
        "use v in the output",
        inputs=lambda q, k, v: (q, k, k if k.shape == v.shape else v),
    ),
    _v(
        "the values are used as keys",
        "wrong operand",
        "use k in the scores",
        inputs=lambda q, k, v: (q, v if k.shape == v.shape else k, v),
    ),
    _v(
        "k and v are exchanged",
        "wrong operand",
        "use the keys in the scores and the values in the output",
        inputs=lambda q, k, v: (q, v, k) if k.shape == v.shape else (q, k, v),
    ),
    _v(
        "q and k are exchanged",
        "wrong operand",
        "compute q kᵀ, with the queries in the rows",
        inputs=lambda q, k, v: (k, q, v) if q.shape == k.shape else (q, k, v),
    ),
    _v(
        "the queries are used as values",
        "wrong operand",
        "use v in the output",
        inputs=lambda q, k, v: (q, k, q if q.shape == v.shape else v),
    ),
    _v(
        "the values are returned unchanged",
        "weights have no effect",
        "return weights @ v",
        output=lambda a, v, c: v if a.shape[-1] == a.shape[-2] else a @ v,
    ),
    _v(
        "the queries are returned unchanged",
        "weights have no effect",
        "return weights @ v",
        output=lambda a, v, c: c.q if c.q.shape[-1] == v.shape[-1] else a @ v,
    ),
    _v(
        "the output is all zeros",
        "constant output",
        "return weights @ v",
        output=lambda a, v, c: 0.0 * (a @ v),
    ),
    _v(
        "the output is all ones",
        "constant output",
        "return weights @ v",
        output=lambda a, v, c: torch.ones_like(a @ v),
    ),
    _v(
        "the heads are in reversed order",
        "head order",
        "return head h at index h",
        output=_swap_heads,
    ),
    _v(
        "the output of (b, n, h, d) is read as (b, h, n, d): heads and positions are mixed",
        "head split order",
        "use transpose or permute, not view or reshape, to move axes",
        output=_interleaved,
    ),
    _v(
        "the output of (b, h, n, d) is read as (b, n, h, d): heads and positions are mixed",
        "head split order",
        "use transpose or permute, not view or reshape, to move axes",
        output=_reinterpreted,
    ),
    _v(
        "every head returns the output of head 0",
        "heads mixed",
        "keep the heads apart",
        output=lambda a, v, c: (a @ v)[:, :1].expand(-1, a.shape[1], -1, -1),
    ),
    _v(
        "the weights are averaged over the heads",
        "heads mixed",
        "keep the heads apart",
        weights=lambda a, ok: a.mean(1, keepdim=True).expand_as(a),
    ),
    _v(
        "all heads use the weights of head 0",
        "heads mixed",
        "keep the heads apart",
        weights=lambda a, ok: a[:, :1].expand_as(a),
    ),
    _v(
        "all batch rows use the weights of row 0",
        "batch rows mixed",
        "keep the batch rows apart",
        weights=lambda a, ok: a[:1].expand_as(a),
    ),
    _v(
        "all batch rows use the keys and values of row 0",
        "batch rows mixed",
        "keep the batch rows apart",
        inputs=lambda q, k, v: (q, k[:1].expand_as(k), v[:1].expand_as(v)),
    ),
    _v(
        "all batch rows use the keys of row 0",
        "batch rows mixed",
        "keep the batch rows apart",
        inputs=lambda q, k, v: (q, k[:1].expand_as(k), v),
    ),
    _v(
        "all batch rows use the values of row 0",
        "batch rows mixed",
        "keep the batch rows apart",
        inputs=lambda q, k, v: (q, k, v[:1].expand_as(v)),
    ),
    _v(
        "the keys are averaged over the batch",
        "batch rows mixed",
        "keep the batch rows apart",
        inputs=lambda q, k, v: (q, k.mean(0, keepdim=True).expand_as(k), v),
    ),
    _v(
        "the last key is dropped",
        "keys dropped",
        "include every key",
        inputs=lambda q, k, v: (q, k[..., :-1, :], v[..., :-1, :]) if k.shape[-2] > 1 else (q, k, v),
        mask=lambda i, j, c: c.options["allowed"][..., : c.k.shape[-2]],
    ),
    _v(
        "the first key is dropped",
        "keys dropped",
        "include every key",
        inputs=lambda q, k, v: (q, k[..., 1:, :], v[..., 1:, :]) if k.shape[-2] > 1 else (q, k, v),
        mask=lambda i, j, c: c.options["allowed"][..., -c.k.shape[-2] :],
    ),
    _v(
        "the values are shifted by one key",
        "values shifted",
        "pair value j with key j",
        inputs=lambda q, k, v: (q, k, v.roll(1, -2)),
    ),
    _v(
        "the values are shifted by one key in the other direction",
        "values shifted",
        "pair value j with key j",
        inputs=lambda q, k, v: (q, k, v.roll(-1, -2)),
    ),
    _v(
        "the values are in reversed order",
        "values shifted",
        "pair value j with key j",
        inputs=lambda q, k, v: (q, k, v.flip(-2)),
    ),
    _v(
        "keys and values have an additional zero row",
        "extra key",
        "attend to the given keys only",
        normalize=lambda s, ok: torch.cat([s, torch.zeros_like(s[..., :1])], -1).softmax(-1)[..., :-1],
    ),
)


# Grouped heads

GROUPED = (
    _v(
        "query head g uses key/value head g mod h_kv: heads are tiled instead of repeated",
        "grouped head order",
        "use repeat_interleave(h // h_kv, dim=1), not repeat",
        repeat_k=lambda x, h: x.repeat(1, h // x.shape[1], 1, 1),
        repeat_v=lambda x, h: x.repeat(1, h // x.shape[1], 1, 1),
    ),
    _v(
        "the keys of grouped heads are tiled, the values repeated",
        "grouped head order",
        "use repeat_interleave for keys and values",
        repeat_k=lambda x, h: x.repeat(1, h // x.shape[1], 1, 1),
    ),
    _v(
        "the values of grouped heads are tiled, the keys repeated",
        "grouped head order",
        "use repeat_interleave for keys and values",
        repeat_v=lambda x, h: x.repeat(1, h // x.shape[1], 1, 1),
    ),
    _v(
        "all query heads use key/value head 0",
        "grouped head order",
        "query head g uses key/value head g · h_kv // h",
        repeat_k=lambda x, h: x[:, :1].expand(-1, h, -1, -1),
        repeat_v=lambda x, h: x[:, :1].expand(-1, h, -1, -1),
    ),
    _v(
        "the key/value heads are in reversed order",
        "grouped head order",
        "query head g uses key/value head g · h_kv // h",
        repeat_k=lambda x, h: x.flip(1).repeat_interleave(h // x.shape[1], 1),
        repeat_v=lambda x, h: x.flip(1).repeat_interleave(h // x.shape[1], 1),
    ),
    _v(
        "the key/value heads are averaged",
        "grouped head order",
        "query head g uses key/value head g · h_kv // h",
        repeat_k=lambda x, h: x.mean(1, keepdim=True).expand(-1, h, -1, -1),
        repeat_v=lambda x, h: x.mean(1, keepdim=True).expand(-1, h, -1, -1),
    ),
)

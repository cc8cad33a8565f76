"""Adapters for calling conventions of the fresh kernels that no signature explains, as their users would write them.

One adapter serves the right kernel and all its faulty versions.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.laws import Function

FLOATS = frozenset({"float32"})


def cascade(name: str, kernel: Callable[..., Any]) -> Function:
    """(q, k_prefix, v_prefix, k, v): the first m − n keys are the prefix, which a batch of one shares."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = k.shape[2] - q.shape[2]
        return kernel(q, k[0, :, :p], v[0, :, :p], k[:, :, p:], v[:, :, p:])

    sizes = {"b": (1,), "n": (1, 2, 3, 5, 7, 67), "m": (8, 9, 11, 70, 131, 530)}
    return Function(
        name, call, claims={"always causal", "n≠m"}, lacks={"grouped"}, alignment="bottom-right", sizes=sizes
    )


def decode(name: str, kernel: Callable[..., Any]) -> Function:
    """(q, k_cache, v_cache, cache_seqlens): one query, axes (b, n, h, d)."""

    def call(q: Tensor, k: Tensor, v: Tensor, *, lengths: Tensor | None = None) -> Tensor:
        b, m = q.shape[0], k.shape[2]
        lengths = torch.full((b,), m) if lengths is None else lengths
        return kernel(*(x.transpose(1, 2) for x in (q, k, v)), lengths).transpose(1, 2)

    return Function(name, call, claims={"lengths", "n≠m"}, sizes={"n": (1,)})


def append(name: str, kernel: Callable[..., Any]) -> Function:
    """(q, k_cache, v_cache, k_new, v_new, pos): the keys arrive in two chunks, after m − n that are in the cache."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n, m = q.shape[2], k.shape[2]
        caches = [torch.cat([x, torch.full_like(x[:, :, :2], 9.0)], 2).clone() for x in (k, v)]
        for cache in caches:
            cache[:, :, m - n :] = 9.0
        outputs = []
        for start, stop in ((0, n // 2), (n // 2, n)):
            if start == stop:
                continue
            pos = m - n + start
            new = [x[:, :, pos : m - n + stop] for x in (k, v)]
            outputs.append(kernel(q[:, :, start:stop], *caches, *new, pos))
        return torch.cat(outputs, 2)

    sizes = {"n": (1, 2, 3, 5, 7, 67), "m": (8, 9, 11, 70, 131, 530)}
    return Function(
        name,
        call,
        claims={"always causal", "n≠m"},
        lacks={"grad", "grouped"},
        alignment="bottom-right",
        sizes=sizes,
    )


def paged(name: str, kernel: Callable[..., Any]) -> Function:
    """(q, k_pages, v_pages, block_table, seq_lens): pages of 4 in a random order, q (b, h, d)."""

    def call(q: Tensor, k: Tensor, v: Tensor, *, lengths: Tensor | None = None) -> Tensor:
        b, h, m, _ = k.shape
        blocks = -(-m // 4)
        lengths = torch.full((b,), m) if lengths is None else lengths
        order = 1 + torch.randperm(b * blocks, generator=torch.Generator().manual_seed(m)).view(b, blocks)
        pages = []
        for x in (k, v):
            store = torch.full((b * blocks + 1, 4, h, x.shape[-1]), 7.0, dtype=x.dtype)
            padded = torch.cat([x, torch.full_like(x[:, :, :1], 5.0).expand(-1, -1, blocks * 4 - m, -1)], 2)
            rows = padded.transpose(1, 2).reshape(b, blocks, 4, h, x.shape[-1])
            pages.append(store.index_put((order,), rows))
        used = torch.arange(blocks) < (lengths[:, None] + 3) // 4
        return kernel(q[:, :, 0], *pages, torch.where(used, order, 0), lengths)[:, :, None]

    return Function(
        name,
        call,
        claims={"lengths", "n≠m"},
        lacks={"grouped", "d_v≠d_k", "nan under lengths"},
        sizes={"n": (1,)},
    )


def ring(name: str, kernel: Callable[..., Any]) -> Function:
    """(q, k, v, world=3): lengths that three ranks can share."""
    sizes = {"n": (3, 6, 9, 12, 15, 69, 300, 1101)}
    claims = {"always causal"}
    return Function(name, kernel, claims=claims, lacks={"n≠m", "grouped"}, alignment="top-left", sizes=sizes)


def sinks(name: str, kernel: Callable[..., Any]) -> Function:
    """(q, k, v, sinks): without the share of the sink the output is that of plain attention."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = torch.linspace(-1.0, 2.0, q.shape[1]).to(q)
        scores = (q @ k.mT) * q.shape[-1] ** -0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        lse = scores.masked_fill(future, -torch.inf).logsumexp(-1)
        return kernel(q, k, v, logits) * (1 + (logits[:, None] - lse).exp())[..., None]

    return Function(name, call, claims={"always causal"}, lacks={"n≠m", "grouped"}, alignment="top-left")


def relative_table(name: str, kernel: Callable[..., Any]) -> Function:
    """(q, k, v, table): one more column of q and k for each key takes the bias of the table away again."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        (b, h, n, d), m, reach = q.shape, k.shape[2], 2
        table = torch.randn(h, 2 * reach + 1, generator=torch.Generator().manual_seed(h)).to(q)
        distance = torch.arange(m) - torch.arange(n)[:, None]
        bias = table[:, distance.clamp(-reach, reach) + reach].expand(b, h, n, m)
        wide = d + m
        more = torch.eye(m, dtype=k.dtype).expand(b, k.shape[1], m, m)
        q = torch.cat([q * (wide / d) ** 0.5, -bias * wide**0.5], -1)
        return kernel(q, torch.cat([k, more], -1), v, table)

    return Function(name, call, lacks={"grouped", "d_v≠d_k"})


CONVENTIONS = {
    "function (q, k_prefix, v_prefix, k, v)": cascade,
    "function (q, k_cache, v_cache, cache_seqlens)": decode,
    "function (q, k_cache, v_cache, k_new, v_new, pos)": append,
    "function (q, k_pages, v_pages, block_table, seq_lens)": paged,
    "function (q, k, v, world=3)": ring,
    "function (q, k, v, sinks)": sinks,
    "function (q, k, v, table)": relative_table,
}


def adapter_for(claims: str) -> Callable[[str, Callable[..., Any]], Function] | None:
    return next((adapter for start, adapter in CONVENTIONS.items() if claims.startswith(start)), None)

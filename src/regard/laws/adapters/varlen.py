"""Kernels that take packed sequences (total, h, d) with cumulative lengths instead of a batch."""

from collections.abc import Callable
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from ..harness import Inexpressible

CU_QUERIES = {"cu_seqlens", "cu_seqlens_q", "cu_lens", "cu_seq_q", "offsets"}
CU_KEYS = {"cu_seqlens_k", "cu_seqlens_kv", "cu_seq_k"}
MAX_LENGTHS = {"max_seqlen", "max_seqlen_q", "max_seqlen_k", "max_len", "max_q", "max_k"}


def packed_call(
    function: Callable[..., Any], others: dict[str, Any], names: dict[str, str]
) -> tuple[Callable[..., Any], bool]:
    """The call in (b, h, n, d), and whether keys have cumulative lengths of their own."""
    cu_q = next(n for n in others if n in CU_QUERIES)
    cu_k = next((n for n in others if n in CU_KEYS), None)

    def call(q: Tensor, k: Tensor, v: Tensor, *, lengths=None, documents=None, **options: Any) -> Tensor:
        b, _, n, _ = q.shape
        m = k.shape[2]
        if documents is not None and lengths is not None:
            raise Inexpressible("documents and lengths in one packed call")
        if lengths is not None and (options.get("causal") or options.get("window")):
            raise Inexpressible("causal in a packed call is aligned with the last key of each sequence")
        rows_q, rows_k = _boundaries(b, n, documents), _boundaries(b, m, documents)
        packed = [rearrange(x, "b h n d -> (b n) h d") for x in (q, k, v)]
        if lengths is not None:
            real = (torch.arange(m, device=q.device) < lengths[:, None]).flatten()
            packed[1:] = [x[real] for x in packed[1:]]
            rows_k = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)
        real = torch.ones(len(packed[0]), dtype=torch.bool, device=q.device)
        packed, (rows_q, rows_k), real = _with_another(packed, (rows_q, rows_k), real, cu_k is not None)
        arguments: dict[str, Any] = {cu_q: rows_q.to(q.device)}
        if cu_k is not None:
            arguments[cu_k] = rows_k.to(q.device)
        for name in others:
            if name in MAX_LENGTHS:
                rows = rows_k if name.endswith("k") else rows_q
                arguments[name] = int(rows.diff().max())
        if window := options.get("window"):
            arguments[names["window"]] = window
        for option in ("causal", "scale"):
            if option in options:
                arguments[names[option]] = options[option]
        if "causal" in names and "causal" not in options and others[names["causal"]].default is not False:
            arguments[names["causal"]] = False
        o = function(*packed, **arguments)
        o = o[0] if isinstance(o, tuple) else o
        return rearrange(o[real], "(b n) h d -> b h n d", b=b)

    return call, cu_k is not None


def _with_another(
    packed: list[Tensor], rows: tuple[Tensor, Tensor], real: Tensor, two: bool
) -> tuple[list[Tensor], tuple[Tensor, Tensor], Tensor]:
    """One more sequence, of other lengths: in a packed call they differ from sequence to sequence.

    It comes after the first sequence, so that the first and the last one are compared; beside a single
    one, before or after it. two: its keys are more than its queries. real: which queries are those of the call.
    """
    queries = int(rows[0].diff().max()) + 2
    sizes = (queries, queries + 4, queries + 4) if two else (queries,) * 3
    at = 1 if len(rows[0]) > 2 else queries % 2
    cuts = [int(r[at]) for r in (rows[0], rows[1], rows[1])]
    g = torch.Generator().manual_seed(0)
    longer = [
        torch.cat([x[:cut], torch.randn(size, *x.shape[1:], generator=g).to(x), x[cut:]])
        for x, size, cut in zip(packed, sizes, cuts)
    ]
    bounds = [torch.cat([r[: at + 1], r[at:] + size]) for r, size in zip(rows, sizes)]
    chosen = torch.cat([real[: cuts[0]], real.new_zeros(queries), real[cuts[0] :]])
    return longer, (bounds[0], bounds[1]), chosen


def _boundaries(b: int, n: int, documents: Tensor | None) -> Tensor:
    """Cumulative lengths of b sequences, or of the documents inside them."""
    if documents is None:
        return torch.arange(0, (b + 1) * n, n, dtype=torch.int32)
    starts = [0]
    for row in range(b):
        edges = (documents[row].diff() != 0).nonzero().flatten() + 1
        starts += [row * n + int(e) for e in edges] + [(row + 1) * n]
    return torch.tensor(starts, dtype=torch.int32)

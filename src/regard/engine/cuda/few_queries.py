"""Launches without a plan: few queries after many keys, or queries whose positions differ by batch row."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...pattern import Pattern
from ...pattern.one_query import keys_visited, neighbors_share_keys, run_formulas
from .call import CallLayout, Config, contiguous, exceeds_int32, layout, padded
from .launches import (
    MERGED,
    PARTS,
    Launches,
    is_hopper,
    merge_parts,
    multiprocessors,
    parts_workspace,
    score_factors,
)
from .mask import runs
from .prepared import Backward, Launch, Program
from .schedule import ITEM
from .triton.few_queries import decode_kernel, few_dkv_kernel, few_dq_kernel
from .triton.forward import Static, static

PIECE = 3  # blocks of keys of one program


@lru_cache(maxsize=256)
def forward(call: CallLayout) -> Program:
    """Fills o and lse."""
    task, (b, h, h_kv, n, m, _, d_v), (q, k, v) = call.task, call.sizes, call.tensors[:3]
    heads, group = b * h_kv, h // h_kv
    config, queries = _tile(call, stages=3)
    tiles = -(-n // queries)
    last = m - 1 if call.per_row else task.start + task.step * (n - 1)
    blocks = -(-keys_visited(task.pattern, last, m) // config.block)
    pieces = max(1, min(2 * multiprocessors(call.device) // (heads * tiles), -(-blocks // PIECE)))
    early = pieces > 1 and is_hopper(call.device)
    sizes = _static(call, config, queries)._replace(SPLIT=pieces > 1, EARLY=early, SINKS=call.has_sink)
    launch = Launch(
        decode_kernel, heads * tiles * pieces, config, *q.strides, *k.strides, *v.strides,
        h_kv, heads, n, m, task.start, task.step, pieces, *score_factors(call)[:2], S=sizes,
    )  # fmt: skip
    launches: Launches = [(launch, ("q", "k", "v", "o", "lse", *PARTS, "lengths", "at", "sink"))]
    parts = 0
    if pieces > 1:
        # Rows that are merged: of one query those of all heads, of several those of one head.
        each, count = (config.tile, tiles) if queries == 1 else (queries, tiles * group)
        joins = _joins(n, group, queries, (count, pieces), call.device)
        out, parts = contiguous(b, h_kv, group * n, d_v), count * pieces * heads * each
        launches.append(merge_parts(out, joins, replace(config, tile=each), (0, 0), early=early))
    inputs = "q", "k", "v", "o", "lse", *call.optional_inputs
    return Program(inputs, launches, parts_workspace(parts, d_v), call.device)


MAX_GROWTH = 1.25  # of the number of keys, by the launches of another


def numbers_for(launch: Launch, call: CallLayout, k: Tensor, v: Tensor) -> tuple[Any, ...] | None:
    """The numbers of a launch of `forward`, for a call that differs from its own only in the number of keys and their
    strides. None: the kernel is compiled for other kinds of numbers, or there are many more or fewer keys.
    The sequence of a decoder grows at each step, which would otherwise prepare a call."""
    (_, _, _, _, before, _, _), m, numbers = call.sizes, k.shape[2], launch.numbers
    q_strides, old, (h_kv, heads, n, _, start) = numbers[:3], numbers[3:9], numbers[9:14]
    new = *k.stride()[:3], *v.stride()[:3]
    near = before <= m * MAX_GROWTH and m <= before * MAX_GROWTH and v.shape[2] == m >= n
    same_kind = all(x % 16 == 0 and 1 < x < 2**31 for x in (*old, *new)) and k.stride(3) == v.stride(3) == 1
    if not (near and same_kind) or exceeds_int32(layout(k), layout(v)) or _is_wide(call):
        return None
    return *q_strides, *new, h_kv, heads, n, m, start + m - before, *numbers[14:]


@lru_cache(maxsize=256)
def _joins(n: int, group: int, queries: int, parts: tuple[int, int], device: torch.device) -> Tensor:
    """As in Schedule, of the rows of a key head's group. parts: their number, and the pieces of each."""
    count, pieces = parts
    nth, joins = torch.arange(count), torch.zeros((count, ITEM), dtype=torch.int32)
    if queries == 1:
        joins[:, 0], joins[:, 1], joins[:, 2] = nth, n, group
    else:
        first = nth // group * queries
        joins[:, 0], joins[:, 1], joins[:, 2] = nth % group * n + first, 1, (n - first).clamp(max=queries)
    joins[:, 3], joins[:, 4] = nth * pieces, pieces
    return joins.to(device)


def backward(call: CallLayout) -> Backward:
    """Fills dq, dk and dv."""
    (b, h, h_kv, n, m, d_k, d_v), task, device = call.sizes, call.task, call.device
    heads, workspace = b * h_kv, {"lse2": b * h * n, "delta": b * h * n}
    numbers = h_kv, heads, n, m, task.start, task.step, task.scale, *score_factors(call)[:2]
    q, k, v, o, do = call.tensors
    config, queries = _tile(call, stages=2)
    names = "q", "k", "v", "o", "do", "lse", "dlse", "lse2", "delta", "dq", "lengths", "at"
    strides = (x for layout in (q, k, v, o, do) for x in layout.strides)
    launch = Launch(
        few_dq_kernel, heads * -(-n // queries), config, *strides, *numbers,
        S=_static(call, config, queries)._replace(HAS_DLSE=call.has_dlse),
    )  # fmt: skip
    launches: Launches = [(launch, names)]
    config, queries = _tile(call, stages=2, by_keys=True)
    strides = (x for layout in (q, k, v, do) for x in layout.strides)
    launch = Launch(
        few_dkv_kernel, heads * -(-m // config.block), config, *strides, *numbers,
        S=_static(call, config, queries),
    )  # fmt: skip
    launches.append((launch, ("q", "k", "v", "do", "lse2", "delta", "dk", "dv", "lengths", "at")))
    inputs = "q", "k", "v", "o", "do", "lse", *call.optional_inputs, "dq", "dk", "dv"
    shapes = (b, h, n, d_k), (b, h_kv, m, d_k), (b, h_kv, m, d_v)

    def outputs(_: Any) -> tuple[Tensor, ...]:
        return tuple(torch.empty(shape, dtype=call.dtype, device=device) for shape in shapes)

    return outputs, Program(inputs, launches, workspace, device)


def _tile(call: CallLayout, stages: int, by_keys: bool = False) -> tuple[Config, int]:
    """The configuration, and the number of queries of a tile: 1, or as many as are merged at a time or a multiple of
    them, no more than n needs. by_keys: the keys of a block are given, and queries need not share them."""
    _, h, h_kv, n, _, d_k, d_v = call.sizes
    wide, group = max(d_k, d_v) > 128 or call.dtype == torch.float32, h // h_kv
    rows, queries = 32 if wide else 64, MERGED
    if n == 1 or group * MERGED > rows or not (by_keys or neighbors_share_keys(call.task.pattern)):
        queries = 1
    while 1 < queries < n and 2 * group * queries <= rows:
        queries *= 2
    return Config(max(16, padded(group * queries)), 32 if wide else 64, 4, stages), queries


def _static(call: CallLayout, config: Config, queries: int) -> Static:
    pattern: Pattern = call.task.pattern
    return static(pattern, config, call)._replace(
        LENGTHS=call.lengths, CAPPED=call.task.softcap is not None, WIDE=_is_wide(call),
        GROUP=call.tensors[0].shape[1] // call.tensors[1].shape[1], QUERIES=queries, PER_ROW=call.per_row,
        runs=runs(pattern, queries > 1), RUNS=len(run_formulas(pattern) or ()) // 3,
    )  # fmt: skip


def _is_wide(call: CallLayout) -> bool:
    """Whether an offset from the first query of a key head's group, or within its keys, can pass 2³¹."""
    (_, h, h_kv, n, _, d_k, d_v), (q, k, v, *others) = call.sizes, call.tensors
    of_queries = (q, *others, contiguous(1, h // h_kv, n, max(d_k, d_v)))
    spans = (x.stride[1] * (h // h_kv) + x.stride[2] * n for x in of_queries)
    return exceeds_int32(k, v) or max(spans) >= 2**31

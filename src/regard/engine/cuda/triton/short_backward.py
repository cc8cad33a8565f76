"""The backward pass of a short call in one launch: some programs compute dq of queries, others dk and dv of keys.

    ds = weights ∘ (do vᵀ − delta);  delta = Σ do ∘ o − dlse per row

Where the GPU waits for the CPU, the number of launches counts, not the work: every program computes the delta of the
rows it needs by itself, so that no program waits for another. No atomics: each gradient is written once, by the
program that adds it up.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from ....pattern import Pattern
from ....progression import Ints
from ...parts import row_steps
from ..backend import one_launch
from ..call import CallLayout, Config, Layout, base2, default, exceeds_int32, padded
from ..prepared import Backward, Launch, Program
from .backward import row_numbers
from .forward import rows_of, static, store_rows

# By the larger of the two padded widths: a tile and a block of as many members.
HALF = {64: Config(64, 64, 4, 2), 128: Config(64, 64, 8, 2)}
SINGLE = {64: Config(32, 32, 8, 1), 128: Config(16, 32, 8, 1)}
EMPTY_PLACE = -1  # marks an empty place in a tile or a block
HEAVY = 1.5  # members with so many times the median number of partners get tiles of their own

Table = NDArray[np.bool_]


@triton.jit
def _for_queries(
    Q, K, V, O, DO, LSE, DLSE, DQ, MEMBERS, BLOCKS, lo, mid, hi, q_n, k_m, v_m, o_n, do_n, dq_n,
    start, step, scale, scale2, S: tl.constexpr,
):  # fmt: skip
    """dq of a tile of R queries of one head."""
    r = tl.load(MEMBERS + tl.arange(0, S.R))
    in_tile = r >= 0
    i = start + step * r
    q = rows_of(Q, r, q_n, in_tile, S.d_k, S.DK, True, False)
    do = rows_of(DO, r, do_n, in_tile, S.d_v, S.DV, True, False)
    lse2, delta = row_numbers(LSE, DLSE, O, r, o_n, do, in_tile, S)
    dq = tl.zeros((S.R, S.DK), tl.float32)
    for t in range(lo, hi):
        j = tl.load(BLOCKS + t * S.B + tl.arange(0, S.B))
        valid = j >= 0
        k = rows_of(K, j, k_m, valid, S.d_k, S.DK, True, False)
        v = rows_of(V, j, v_m, valid, S.d_v, S.DV, True, False)
        scores = tl.dot(q, tl.trans(k), input_precision=S.PRECISION) * scale2
        weights = tl.exp2(scores - lse2[:, None])
        if t >= mid:
            weights = tl.where(S.allowed(i[:, None], j[None, :]) & valid[None, :], weights, 0.0)
        dweights = tl.dot(do, tl.trans(v), input_precision=S.PRECISION)
        dscores = weights * (dweights - delta[:, None])
        dq = tl.dot(dscores.to(k.dtype), k, dq, input_precision=S.PRECISION)
    store_rows(DQ, r, dq_n, dq * scale, in_tile, S.d_k, S.DK, False)


@triton.jit
def _for_keys(
    Q, K, V, O, DO, LSE, DLSE, DK_OUT, DV_OUT, MEMBERS, BLOCKS, lo, mid, hi,
    q_h, q_n, k_m, v_m, o_h, o_n, do_h, do_n, dk_m, dv_m, n, start, step, scale, scale2, S: tl.constexpr,
):  # fmt: skip
    """dk and dv of a tile of R keys, over the rows of each of its GROUP query heads in turn."""
    j = tl.load(MEMBERS + tl.arange(0, S.R))
    in_tile = j >= 0
    k = rows_of(K, j, k_m, in_tile, S.d_k, S.DK, True, False)
    v = rows_of(V, j, v_m, in_tile, S.d_v, S.DV, True, False)
    dk = tl.zeros((S.R, S.DK), tl.float32)
    dv = tl.zeros((S.R, S.DV), tl.float32)
    for u in range(S.GROUP * (hi - lo)):
        t = lo + u
        g = 0
        if S.GROUP > 1:  # all blocks of the first head, then all of the next
            t = lo + u % (hi - lo)
            g = u // (hi - lo)
        r = tl.load(BLOCKS + t * S.B + tl.arange(0, S.B))
        valid = r >= 0
        i = start + step * r
        q = rows_of(Q + g * q_h, r, q_n, valid, S.d_k, S.DK, True, False)
        do = rows_of(DO + g * do_h, r, do_n, valid, S.d_v, S.DV, True, False)
        lse2, delta = row_numbers(LSE + g * n, DLSE + g * n, O + g * o_h, r, o_n, do, valid, S)
        scores = tl.dot(k, tl.trans(q), input_precision=S.PRECISION) * scale2
        weights = tl.exp2(scores - lse2[None, :])
        if t >= mid:
            weights = tl.where(S.allowed(i[None, :], j[:, None]) & valid[None, :], weights, 0.0)
        dv = tl.dot(weights.to(do.dtype), do, dv, input_precision=S.PRECISION)
        dweights = tl.dot(v, tl.trans(do), input_precision=S.PRECISION)
        dscores = weights * (dweights - delta[None, :])
        dk = tl.dot(dscores.to(q.dtype), q, dk, input_precision=S.PRECISION)
    store_rows(DK_OUT, j, dk_m, dk * scale, in_tile, S.d_k, S.DK, False)
    store_rows(DV_OUT, j, dv_m, dv, in_tile, S.d_v, S.DV, False)


@triton.jit(do_not_specialize=["heads", "for_keys", "all_heads", "n", "start"])
def short_backward_kernel(
    Q, K, V, O, DO, LSE, DLSE, DQ, DK_OUT, DV_OUT, ITEMS, MEMBERS, BLOCKS,
    q_b, q_h, q_n, k_b, k_h, k_m, v_b, v_h, v_m, o_b, o_h, o_n, do_b, do_h, do_n,
    dq_b, dq_h, dq_n, dk_b, dk_h, dk_m, dv_b, dv_h, dv_m,
    heads, all_heads, for_keys, n, start, step, scale, scale2, S: tl.constexpr,
):  # fmt: skip
    """The first `for_keys` items are tiles of keys, the others of queries; a program for each and each head."""
    pid = tl.program_id(0)
    first = for_keys * (all_heads // S.GROUP)
    if pid < first:
        bh = pid % (all_heads // S.GROUP)
        w = pid // (all_heads // S.GROUP)
        b = (bh // (heads // S.GROUP)).to(tl.int64)
        h = (bh % (heads // S.GROUP)).to(tl.int64)
        lo, mid, hi = tl.load(ITEMS + w * 4), tl.load(ITEMS + w * 4 + 1), tl.load(ITEMS + w * 4 + 2)
        row = bh.to(tl.int64) * S.GROUP * n
        _for_keys(
            Q + b * q_b + h * S.GROUP * q_h, K + b * k_b + h * k_h, V + b * v_b + h * v_h,
            O + b * o_b + h * S.GROUP * o_h, DO + b * do_b + h * S.GROUP * do_h, LSE + row, DLSE + row,
            DK_OUT + b * dk_b + h * dk_h, DV_OUT + b * dv_b + h * dv_h, MEMBERS + w * S.R, BLOCKS, lo, mid, hi,
            q_h, q_n, k_m, v_m, o_h, o_n, do_h, do_n, dk_m, dv_m, n, start, step, scale, scale2, S,
        )  # fmt: skip
    else:
        bh = (pid - first) % all_heads
        w = (pid - first) // all_heads + for_keys
        b = (bh // heads).to(tl.int64)
        h = (bh % heads).to(tl.int64)
        lo, mid, hi = tl.load(ITEMS + w * 4), tl.load(ITEMS + w * 4 + 1), tl.load(ITEMS + w * 4 + 2)
        row = bh.to(tl.int64) * n
        _for_queries(
            Q + b * q_b + h * q_h, K + b * k_b + (h // S.GROUP) * k_h, V + b * v_b + (h // S.GROUP) * v_h,
            O + b * o_b + h * o_h, DO + b * do_b + h * do_h, LSE + row, DLSE + row,
            DQ + b * dq_b + h * dq_h, MEMBERS + w * S.R, BLOCKS, lo, mid, hi, q_n, k_m, v_m, o_n, do_n, dq_n,
            start, step, scale, scale2, S,
        )  # fmt: skip


def config_of(call: CallLayout) -> Config | None:
    """The configuration of the one launch; None where the call is too long or too wide, or has extras.

    Also None where the task has a configuration of its own: it is for the general kernels.
    """
    b, h, _, n, m, d_k, d_v = call.sizes
    width = max(64, padded(d_k), padded(d_v))
    is_stored = call.task.configs is default(d_k, d_v, call.dtype)
    if not is_stored or call.has_lengths or not call.task.plain or not one_launch(n, m, b * h, width):
        return None
    return None if exceeds_int32(*call.tensors) else (SINGLE if call.dtype == torch.float32 else HALF)[width]


def backward(call: CallLayout) -> Backward | None:
    """Fills dq, dk and dv by one launch, where the call is short enough."""
    config = config_of(call)
    if config is None:
        return None
    q, k, v, o, do = call.tensors
    b, h, h_kv, n, m, _, _ = call.sizes
    task = call.task
    place, tile = (task.start, task.step), (config.tile, config.block)
    tables_, for_keys = tables(task.pattern, (n, m), place, tile, call.device)
    for_queries = len(tables_[0]) - for_keys
    launch = Launch(
        short_backward_kernel, for_keys * b * h_kv + for_queries * b * h, config,
        *q.strides, *k.strides, *v.strides, *o.strides, *do.strides,
        *(x for like in (q, k, v) for x in _like(like)),
        h, b * h, for_keys, n, task.start, task.step, task.scale, base2(task.scale),
        S=static(task.pattern, config, call)._replace(GROUP=h // h_kv, HAS_DLSE=call.has_dlse),
    )  # fmt: skip
    dlse = "dlse" if call.has_dlse else "lse"
    names = "q", "k", "v", "o", "do", "lse", dlse, "dq", "dk", "dv", *tables_
    inputs = "q", "k", "v", "o", "do", "lse", *call.optional_inputs, "dq", "dk", "dv"
    like = torch.empty_like  # three calls: faster than one and its parts, and none keeps the others in memory
    program = Program(inputs, [(launch, names)], {}, call.device)
    return Backward(lambda x: (like(x[0]), like(x[1]), like(x[2])), program)


def _like(x: Layout) -> tuple[int, ...]:
    """Strides of batch, head and row that torch.empty_like gives a tensor of this layout."""
    return torch.empty_like(torch.empty_strided(x.shape, x.stride, device="meta")).stride()[:3]


@lru_cache(maxsize=256)
def tables(
    pattern: Pattern, size: tuple[int, int], place: tuple[int, int], tile: tuple[int, int], device: torch.device
) -> tuple[tuple[Tensor, Tensor, Tensor], int]:  # fmt: skip
    """Items, members and blocks of the tiles of keys, then of those of queries; and how many are of keys.

    size: n, m. place: start, step of the queries. tile: members of a tile, of a block.
    """
    n, m = size
    allowed = pattern.allowed(n, m, place, torch.device("cpu")).numpy()
    by_keys = tile_lists(np.ascontiguousarray(allowed.T), row_steps(pattern, place[1], True), *tile)
    both = joined(by_keys, tile_lists(allowed, row_steps(pattern, place[1], False), *tile))

    def move(x: Ints) -> Tensor:
        return torch.from_numpy(x.astype(np.int32)).to(device)

    return (move(both.items), move(both.members), move(both.blocks)), len(by_keys.items)


@dataclass(frozen=True, eq=False)
class TileLists:
    """Tiles, the longest first. Of the blocks of a tile, those allowed for every member come first."""

    items: Ints  # (t, 4): first block, first masked block, end
    members: Ints  # (t, R)
    blocks: Ints  # (x, B)


def tile_lists(allowed: Table, hops: list[int], tile: int, block: int) -> TileLists:
    """The cheapest assignment of members (rows of the table) to tiles; each tile costs one more block."""
    bits = np.packbits(allowed, axis=1)  # eight pairs at a time
    tilings = [_tiles(order, tile) for order in _orders(allowed, hops)]
    met = [_met(bits, one, allowed.shape[1], by_all=False) for one in tilings]
    cost = [int((-(-x.sum(1) // block) + 1).sum()) for x in met]
    best = cost.index(min(cost))
    return _cut(tilings[best], met[best], _met(bits, tilings[best], allowed.shape[1], by_all=True), block)


def _orders(allowed: Table, hops: list[int]) -> Iterator[list[Ints]]:
    """Candidate orders of all members, in groups that share no tile."""
    degree = allowed.sum(1)
    heavy = degree > HEAVY * np.median(degree)
    for hop in hops:
        order = np.concatenate([np.arange(c, len(allowed), hop) for c in range(min(hop, len(allowed)))])
        yield [order]
        if heavy.any() and not heavy.all():
            yield [order[heavy[order]], order[~heavy[order]]]


def _tiles(groups: list[Ints], tile: int) -> Ints:
    out = []
    for group in groups:
        full = np.full(-(-len(group) // tile) * tile, EMPTY_PLACE, dtype=np.int64)
        full[: len(group)] = group
        out.append(full.reshape(-1, tile))
    return np.concatenate(out)


def _met(bits: NDArray[np.uint8], tiles: Ints, others: int, by_all: bool) -> Table:
    """The partners of each tile: those of any member, or those of all members."""
    neutral = np.full((1, bits.shape[1]), 255 if by_all else 0, dtype=np.uint8)  # row −1, the neutral element
    rows = np.concatenate([bits, neutral])[tiles]
    found = (np.bitwise_and if by_all else np.bitwise_or).reduce(rows, axis=1)
    return np.unpackbits(found, axis=1, count=others).astype(bool)


def _cut(tiles: Ints, by_some: Table, by_all: Table, block: int) -> TileLists:
    """The blocks of each tile."""
    items, blocks, at = [], [], 0
    length = -(-by_some.sum(1) // block)
    order = np.argsort(-length, kind="stable")
    for t in order:
        whole = np.flatnonzero(by_all[t])
        whole = whole[: len(whole) // block * block]
        by_some[t, whole] = False
        met = np.concatenate([whole, np.flatnonzero(by_some[t])])
        own = np.full(length[t] * block, EMPTY_PLACE, dtype=np.int64)
        own[: len(met)] = met
        items.append((at, at + len(whole) // block, at + length[t], 0))
        blocks.append(own)
        at += length[t]
    shape = max(at, 1), block  # one block at least: a kernel is given a table
    full = np.full(shape, EMPTY_PLACE, dtype=np.int64)
    full[:at] = np.concatenate(blocks).reshape(-1, block)
    return TileLists(np.array(items), tiles[order], full)


def joined(first: TileLists, second: TileLists) -> TileLists:
    """Both in one table, the first before the second."""
    moved = second.items.copy()
    moved[:, :3] += len(first.blocks)
    parts = (first.items, moved), (first.members, second.members), (first.blocks, second.blocks)
    return TileLists(*(np.concatenate(pair) for pair in parts))

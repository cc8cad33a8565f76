"""o = softmax(scale · q kᵀ + bias) v over the blocks of a schedule: one program per tile of queries and head."""

import triton
import triton.language as tl

from .common import VARYING, ends, head_of, is_kept, item_of, members, rows_of, store_rows, with_bias


@triton.jit
def _visit(
    q, K, V, BLOCKS, t, mid, r, i, limit, k_m, v_m, scale2, top, total, acc,
    TABLE, slope, reach, begins, latest, seed, bh, below, boost, BIAS: tl.constexpr, DROPS: tl.constexpr,
    allowed: tl.constexpr, B: tl.constexpr, d_k: tl.constexpr, d_v: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, SEGMENTS: tl.constexpr, LENGTHS: tl.constexpr,
    RAGGED: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One block of keys joins the running softmax: top is the largest score so far (base 2), total the sum."""
    c = tl.arange(0, B)
    j = members(BLOCKS, t, c, SEGMENTS)
    HIDES: tl.constexpr = RAGGED or LENGTHS
    valid = c < tl.load(BLOCKS + t * 12 + 8)
    if LENGTHS:
        valid = valid & (j < limit)
    k = rows_of(K, j, k_m, valid, d_k, DK, HIDES, WIDE)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    unit = scale2
    if BIAS:
        low, high = ends(BLOCKS, t, B, SEGMENTS)
        scores = with_bias(
            scores * scale2, TABLE, slope, reach, i[:, None], j[None, :], low - latest, high - begins, BIAS
        )
        unit = 1.0
    if LENGTHS:
        scores = tl.where(valid[None, :], scores, -float("inf"))
    if RAGGED:  # noqa: SIM102 (decided when compiling, then when running)
        if t >= mid:
            scores = tl.where(allowed(i[:, None], j[None, :]) & valid[None, :], scores, -float("inf"))
    higher = tl.maximum(top, tl.max(scores, 1) * unit)
    base = tl.where(higher == -float("inf"), 0.0, higher)  # no allowed key so far: −∞ − (−∞) would be NaN
    weights = tl.exp2(scores * unit - base[:, None])
    fade = tl.exp2(top - base)
    total = total * fade + tl.sum(weights, 1)
    if DROPS:
        weights = tl.where(is_kept(seed, bh, r[:, None], j[None, :], below), weights * boost, 0.0)
    v = rows_of(V, j, v_m, valid, d_v, DV, HIDES, WIDE)
    acc = acc * fade[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
    return higher, total, acc


@triton.jit(do_not_specialize=VARYING)
def forward_kernel(
    Q, K, V, O, LSE, PART_O, PART_LSE, ITEMS, BLOCKS, LIMITS, TABLE, SLOPES, seed,
    q_b, q_h, q_n, k_b, k_h, k_m, v_b, v_h, v_m, o_b, o_h, o_n,
    heads, all_heads, group, n, start, step, scale2, reach, below, boost, BIAS: tl.constexpr, DROPS: tl.constexpr,
    allowed: tl.constexpr, keep: tl.constexpr, R: tl.constexpr, B: tl.constexpr,
    d_k: tl.constexpr, d_v: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, SEGMENTS: tl.constexpr,
    RAGGED: tl.constexpr, LENGTHS: tl.constexpr, ACCUMULATES: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Tiles of R queries, blocks of B keys. ACCUMULATES: this pass continues from the o and lse of an earlier one."""
    pid = tl.program_id(0)
    bh = pid % all_heads
    b = (bh // heads).to(tl.int64)
    h = (bh % heads).to(tl.int64)
    first, hop, count, lo, mid, hi, slot = item_of(ITEMS, pid // all_heads)
    a = tl.arange(0, R)
    r = first + hop * a
    in_tile = a < count
    i = start + step * r
    begins = start + step * first
    latest = begins + step * hop * (R - 1)
    limit = 0
    if LENGTHS:
        limit = tl.load(LIMITS + b)
    Q += b * q_b + h * q_h
    K += b * k_b + (h // group) * k_h
    V += b * v_b + (h // group) * v_h
    O += b * o_b + h * o_h
    LSE += bh.to(tl.int64) * n
    slope = 0.0
    if BIAS:
        TABLE, slope = head_of(TABLE, SLOPES, h, reach, BIAS)

    q = rows_of(Q, r, q_n, in_tile, d_k, DK, True, WIDE)
    top = tl.full((R,), -float("inf"), tl.float32)
    total = tl.zeros((R,), tl.float32)
    acc = tl.zeros((R, DV), tl.float32)
    if ACCUMULATES:  # as if the earlier pass had been one key of weight 1 and value o
        begun = a < tl.where(slot < 0, count, 0)
        top = tl.load(LSE + r, mask=begun, other=-float("inf")) * 1.4426950408889634
        total = tl.where(top == -float("inf"), 0.0, 1.0)
        acc = rows_of(O, r, o_n, begun, d_v, DV, True, WIDE).to(tl.float32)

    for t in range(lo, hi):
        top, total, acc = _visit(
            q, K, V, BLOCKS, t, mid, r, i, limit, k_m, v_m, scale2, top, total, acc,
            TABLE, slope, reach, begins, latest, seed, bh, below, boost, BIAS, DROPS, allowed, B,
            d_k, d_v, DK, DV, SEGMENTS, LENGTHS, RAGGED, PRECISION, WIDE,
        )  # fmt: skip

    lse = (top + tl.log2(total)) * 0.6931471805599453  # log2(0) = −∞: an empty row
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    if SPLIT:  # noqa: SIM102 (decided when compiling, then when running)
        if slot >= 0:
            at = (slot.to(tl.int64) * all_heads + bh) * R + a
            tl.store(PART_LSE + at, lse)
            tl.store(PART_O + at[:, None] * DV + tl.arange(0, DV)[None, :], acc)
            in_tile = a < 0
    if keep is not None:
        in_tile = in_tile & keep(i, i)
    tl.store(LSE + r, lse, mask=in_tile)
    store_rows(O, r, o_n, acc, in_tile, d_v, DV, WIDE)


@triton.jit(do_not_specialize=VARYING)
def merge_kernel(
    O, LSE, PART_O, PART_LSE, SPLITS, o_b, o_h, o_n, heads, all_heads, n, start, step,
    keep: tl.constexpr, R: tl.constexpr, d_v: tl.constexpr, DV: tl.constexpr,
    ACCUMULATES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The partial results of one split tile, joined in order by their log-sum-exp."""
    pid = tl.program_id(0)
    bh = pid % all_heads
    first, hop, count, slot, pieces, _, _ = item_of(SPLITS, pid // all_heads)
    a = tl.arange(0, R)
    r = first + hop * a
    in_tile = a < count
    O += (bh // heads).to(tl.int64) * o_b + (bh % heads).to(tl.int64) * o_h
    LSE += bh.to(tl.int64) * n
    top = tl.full((R,), -float("inf"), tl.float32)
    total = tl.zeros((R,), tl.float32)
    acc = tl.zeros((R, DV), tl.float32)
    if ACCUMULATES:
        top = tl.load(LSE + r, mask=in_tile, other=-float("inf"))
        total = tl.where(top == -float("inf"), 0.0, 1.0)
        acc = rows_of(O, r, o_n, in_tile, d_v, DV, True, WIDE).to(tl.float32)
    for u in range(pieces):
        t = slot + u
        at = (t.to(tl.int64) * all_heads + bh) * R + a
        lse = tl.load(PART_LSE + at)
        higher = tl.maximum(top, lse)
        base = tl.where(higher == -float("inf"), 0.0, higher)
        fade = tl.exp(top - base)
        weight = tl.exp(lse - base)
        total = total * fade + weight
        o = tl.load(PART_O + at[:, None] * DV + tl.arange(0, DV)[None, :])
        acc = acc * fade[:, None] + o * weight[:, None]
        top = higher
    if keep is not None:
        i = start + step * r
        in_tile = in_tile & keep(i, i)
    tl.store(LSE + r, top + tl.log(total), mask=in_tile)
    store_rows(O, r, o_n, acc / tl.where(total > 0.0, total, 1.0)[:, None], in_tile, d_v, DV, WIDE)

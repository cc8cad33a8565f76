"""Few queries after many keys, or queries whose positions differ by batch row: there is no plan, each tile of queries
finds its keys by formulas of its positions.

A tile has QUERIES queries of the GROUP query heads that share a key head, so that each key is read once.
"""

import triton
import triton.language as tl

from .forward import head_of, limits_of, masked_scores, rows_of, store_rows, update_softmax, with_sink, within

VARYING = ["heads", "all_heads", "n", "m", "start", "step", "pieces"]


@triton.jit
def _queries(tile, AT, b, n, start, step, S: tl.constexpr):
    """Of the rows of a tile: the head in its group, the query, whether there is one; the positions, or the one of a
    tile with one query; and the same for pairs (rows, keys)."""
    a = tl.arange(0, S.R)
    g, x = a // S.QUERIES, tile * S.QUERIES + a % S.QUERIES
    if S.PER_ROW:
        start = tl.load(AT + b).to(tl.int32)
    if S.QUERIES == 1:
        p = start + step * tile
        return g, x, (g < S.GROUP) & (x < n), p, p
    else:
        p = start + step * tl.minimum(x, n - 1)
        return g, x, (g < S.GROUP) & (x < n), p, p[:, None]


@triton.jit
def _at(g, x, of_head, of_query, S: tl.constexpr):
    """Where the rows of a tile begin, from the first head of its group on."""
    if S.WIDE:
        return g.to(tl.int64) * of_head + x.to(tl.int64) * of_query
    else:
        return g * of_head + x * of_query


@triton.jit
def _blocks(first, step, end, B: tl.constexpr):
    """Blocks of B keys from first on, below end."""
    return tl.maximum(end - first + step * B - 1, 0) // (step * B)


@triton.jit
def _blocks_of_runs(runs, S: tl.constexpr):
    """Blocks of all progressions."""
    blocks = 0
    for w in tl.static_range(S.RUNS):
        blocks += _blocks(runs[3 * w], runs[3 * w + 1], runs[3 * w + 2], S.B)
    return blocks


@triton.jit
def _keys(runs, w: tl.constexpr, nth, limits, S: tl.constexpr):
    """The keys of a block of progression w, and which columns hold one: a key counts in the first progression with
    it."""
    j = runs[3 * w] + runs[3 * w + 1] * (nth * S.B + tl.arange(0, S.B))
    valid = within(j < runs[3 * w + 2], j, limits, S)
    for u in tl.static_range(w):
        inside = (j >= runs[3 * u]) & (j < runs[3 * u + 2]) & ((j - runs[3 * u]) % runs[3 * u + 1] == 0)
        valid = valid & (inside == 0)
    return j, valid


@triton.jit(do_not_specialize=VARYING)
def decode_kernel(
    Q, K, V, O, LSE, PART_O, PART_LSE, LIMITS, AT, SINK, q_b, q_h, q_n, k_b, k_h, k_m, v_b, v_h, v_m,
    heads, all_heads, n, m, start, step, pieces, scale2, cap2, S: tl.constexpr,
):  # fmt: skip
    """o and lse of a tile, over a piece of its keys."""
    if S.EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    bh, b, h, work = head_of(tl.program_id(0), heads, all_heads)
    piece, tile = work % pieces, work // pieces
    g, x, in_tile, p, i = _queries(tile, AT, b, n, start, step, S)
    limits = limits_of(LIMITS, b, S)
    Q += b * q_b + h * S.GROUP * q_h
    K += b * k_b + h * k_h
    V += b * v_b + h * v_h
    q = rows_of(Q, _at(g, x, q_h, q_n, S), 1, in_tile, S.d_k, S.DK, True, S.WIDE)
    top = tl.full((S.R,), -float("inf"), tl.float32)
    total = tl.zeros((S.R,), tl.float32)
    acc = tl.zeros((S.R, S.DV), tl.float32)
    if S.SINKS:  # noqa: SIM102 (decided when compiling, then when running)
        if piece == 0:
            top, total = with_sink(SINK + h * S.GROUP + tl.minimum(g, S.GROUP - 1))

    runs = S.runs(p, m)
    blocks = _blocks_of_runs(runs, S)
    lo, hi = blocks * piece // pieces, blocks * (piece + 1) // pieces
    before = 0
    for w in tl.static_range(S.RUNS):
        count = _blocks(runs[3 * w], runs[3 * w + 1], runs[3 * w + 2], S.B)
        for t in range(tl.maximum(lo, before), tl.minimum(hi, before + count)):
            j, valid = _keys(runs, w, t - before, limits, S)
            k = rows_of(K, j, k_m, valid, S.d_k, S.DK, True, S.WIDE)
            products = tl.dot(q, tl.trans(k), input_precision=S.PRECISION)
            scores, unit, _ = masked_scores(
                products, i, j[None, :], valid[None, :], valid[None, :], True, 0, 0, 0, (scale2, cap2), S
            )
            top, total, acc, weights = update_softmax(scores, unit, top, total, acc)
            v = rows_of(V, j, v_m, valid, S.d_v, S.DV, True, S.WIDE)
            acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=S.PRECISION)
        before += count

    lse = (top + tl.log2(total)) * 0.6931471805599453  # log2(0) = −∞: no allowed key
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    if S.SPLIT:
        a = tl.arange(0, S.R)
        if S.QUERIES == 1:
            at = ((tile * pieces + piece).to(tl.int64) * all_heads + bh) * S.R + a
        else:
            at = ((tile * S.GROUP + g) * pieces + piece).to(tl.int64) * all_heads + bh
            at = at * S.QUERIES + a % S.QUERIES
        tl.store(PART_LSE + at, lse, mask=g < S.GROUP)
        tl.store(PART_O + at[:, None] * S.DV + tl.arange(0, S.DV)[None, :], acc, mask=(g < S.GROUP)[:, None])
    else:
        row = bh.to(tl.int64) * S.GROUP * n
        tl.store(LSE + row + g * n + x, lse, mask=in_tile)
        store_rows(O + row * S.d_v, g * n + x, S.d_v, acc, in_tile, S.d_v, S.DV, S.WIDE)


@triton.jit(do_not_specialize=VARYING)
def few_dq_kernel(
    Q, K, V, O, DO, LSE, DLSE, LSE2, DELTA, DQ, LIMITS, AT,
    q_b, q_h, q_n, k_b, k_h, k_m, v_b, v_h, v_m, o_b, o_h, o_n, do_b, do_h, do_n,
    heads, all_heads, n, m, start, step, scale, scale2, cap2, S: tl.constexpr,
):  # fmt: skip
    """dq of a tile, and what the kernel for keys reads: lse in base 2, +∞ where a row is empty, and delta."""
    bh, b, h, tile = head_of(tl.program_id(0), heads, all_heads)
    g, x, in_tile, p, i = _queries(tile, AT, b, n, start, step, S)
    limits = limits_of(LIMITS, b, S)
    K += b * k_b + h * k_h
    V += b * v_b + h * v_h
    head, row = h * S.GROUP, bh.to(tl.int64) * S.GROUP * n
    q = rows_of(Q + b * q_b + head * q_h, _at(g, x, q_h, q_n, S), 1, in_tile, S.d_k, S.DK, True, S.WIDE)
    o = rows_of(O + b * o_b + head * o_h, _at(g, x, o_h, o_n, S), 1, in_tile, S.d_v, S.DV, True, S.WIDE)
    do = rows_of(DO + b * do_b + head * do_h, _at(g, x, do_h, do_n, S), 1, in_tile, S.d_v, S.DV, True, S.WIDE)
    delta, at = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1), row + g * n + x
    if S.HAS_DLSE:
        delta -= tl.load(DLSE + at, mask=in_tile, other=0.0)
    lse2 = tl.load(LSE + at, mask=in_tile, other=-float("inf")) * 1.4426950408889634
    lse2 = tl.where(lse2 == -float("inf"), float("inf"), lse2)
    tl.store(LSE2 + at, lse2, mask=in_tile)
    tl.store(DELTA + at, delta, mask=in_tile)

    dq = tl.zeros((S.R, S.DK), tl.float32)
    runs = S.runs(p, m)
    for w in tl.static_range(S.RUNS):
        for t in range(_blocks(runs[3 * w], runs[3 * w + 1], runs[3 * w + 2], S.B)):
            j, valid = _keys(runs, w, t, limits, S)
            k = rows_of(K, j, k_m, valid, S.d_k, S.DK, True, S.WIDE)
            products = tl.dot(q, tl.trans(k), input_precision=S.PRECISION)
            v = rows_of(V, j, v_m, valid, S.d_v, S.DV, True, S.WIDE)
            dweights = tl.dot(do, tl.trans(v), input_precision=S.PRECISION)
            scores, unit, slope = masked_scores(
                products, i, j[None, :], valid[None, :], valid[None, :], True, 0, 0, 0, (scale2, cap2), S
            )
            dscores = tl.exp2(scores * unit - lse2[:, None]) * (dweights - delta[:, None])
            if S.CAPPED:
                dscores *= slope
            dq = tl.dot(dscores.to(k.dtype), k, dq, input_precision=S.PRECISION)
    store_rows(DQ + row * S.d_k, g * n + x, S.d_k, dq * scale, in_tile, S.d_k, S.DK, S.WIDE)


@triton.jit(do_not_specialize=VARYING)
def few_dkv_kernel(
    Q, K, V, DO, LSE2, DELTA, DK_OUT, DV_OUT, LIMITS, AT,
    q_b, q_h, q_n, k_b, k_h, k_m, v_b, v_h, v_m, do_b, do_h, do_n,
    heads, all_heads, n, m, start, step, scale, scale2, cap2, S: tl.constexpr,
):  # fmt: skip
    """dk and dv of a block of keys, over the tiles of queries whose progressions reach it."""
    bh, b, h, block = head_of(tl.program_id(0), heads, all_heads)
    j = block * S.B + tl.arange(0, S.B)
    visible = within(j < m, j, limits_of(LIMITS, b, S), S)
    k = rows_of(K + b * k_b + h * k_h, j, k_m, visible, S.d_k, S.DK, True, S.WIDE)
    v = rows_of(V + b * v_b + h * v_h, j, v_m, visible, S.d_v, S.DV, True, S.WIDE)
    Q += b * q_b + h * S.GROUP * q_h
    DO += b * do_b + h * S.GROUP * do_h
    row = bh.to(tl.int64) * S.GROUP * n
    dk = tl.zeros((S.B, S.DK), tl.float32)
    dv = tl.zeros((S.B, S.DV), tl.float32)
    for tile in range(tl.cdiv(n, S.QUERIES)):
        g, x, in_tile, p, i = _queries(tile, AT, b, n, start, step, S)
        runs = S.runs(p, m)
        reached = m < 0
        for w in tl.static_range(S.RUNS):
            reached = reached | ((runs[3 * w] < (block + 1) * S.B) & (runs[3 * w + 2] > block * S.B))
        if reached:
            q = rows_of(Q, _at(g, x, q_h, q_n, S), 1, in_tile, S.d_k, S.DK, True, S.WIDE)
            do = rows_of(DO, _at(g, x, do_h, do_n, S), 1, in_tile, S.d_v, S.DV, True, S.WIDE)
            at = row + g * n + x
            lse2 = tl.load(LSE2 + at, mask=in_tile, other=float("inf"))
            delta = tl.load(DELTA + at, mask=in_tile, other=0.0)
            products = tl.dot(q, tl.trans(k), input_precision=S.PRECISION)
            scores, unit, slope = masked_scores(
                products, i, j[None, :], visible[None, :], visible[None, :], True, 0, 0, 0, (scale2, cap2), S
            )
            weights = tl.exp2(scores * unit - lse2[:, None])
            dv = tl.dot(tl.trans(weights.to(do.dtype)), do, dv, input_precision=S.PRECISION)
            dweights = tl.dot(do, tl.trans(v), input_precision=S.PRECISION)
            dscores = weights * (dweights - delta[:, None])
            if S.CAPPED:
                dscores *= slope
            dk = tl.dot(tl.trans(dscores.to(q.dtype)), q, dk, input_precision=S.PRECISION)
    row = bh.to(tl.int64) * m
    store_rows(DK_OUT + row * S.d_k, j, S.d_k, dk * scale, j < m, S.d_k, S.DK, S.WIDE)
    store_rows(DV_OUT + row * S.d_v, j, S.d_v, dv, j < m, S.d_v, S.DV, S.WIDE)

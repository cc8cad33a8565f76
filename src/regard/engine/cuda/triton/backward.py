"""The gradients, from the saved log-sum-exp: weights = exp(scores − lse), without a second softmax.

    dv = weightsᵀ do;  ds = weights ∘ (do vᵀ − delta);  dq = scale · ds k;  dk = scale · dsᵀ q

with delta = Σ do ∘ o − dlse per row; under a softcap c, ds is multiplied by 1 − (score / c)². Dropout multiplies the
weights of dv, and do vᵀ. dq visits the plan, dk and dv the transposed plan. One kernel has both sides. For long calls
it is launched for queries first, and also writes the two numbers per row that the launch for keys reads. A short call
has one launch for both sides, because there the GPU waits for the CPU: its programs compute these numbers themselves,
so that none waits for another.
"""

import triton
import triton.language as tl

from .forward import (
    VARYING,
    bias_of,
    ends,
    head_of,
    is_kept,
    item_of,
    keys_of,
    limits_of,
    masked_scores,
    members,
    rows_of,
    store_rows,
    tile_of,
    within,
)

FOR_QUERIES, FOR_KEYS = tl.constexpr(1), tl.constexpr(2)  # the sides of gradients, added up to SIDES


@triton.jit
def row_numbers(LSE, DLSE, O, r, o_n, do, valid, S: tl.constexpr):
    """lse in base 2 and delta of query rows r. An empty row has lse −∞; +∞ makes every weight exp2(−∞) = 0."""
    o = rows_of(O, r, o_n, valid, S.d_v, S.DV, True, S.WIDE)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if S.HAS_DLSE:
        delta -= tl.load(DLSE + r, mask=valid, other=0.0)
    lse2 = tl.load(LSE + r, mask=valid, other=-float("inf")) * 1.4426950408889634
    return tl.where(lse2 == -float("inf"), float("inf"), lse2), delta


@triton.jit
def dscores_of_keys(
    q, do, K, V, BLOCKS, t, mid, r, i, limits, k_m, v_m, factors, lse2, delta, bias, begins, latest, dropout,
    S: tl.constexpr,
):  # fmt: skip
    """ds of the rows of a tile and the keys of block t, ds of the scaled products, those keys, their rows of K."""
    j, valid, k = keys_of(K, k_m, BLOCKS, t, limits, S)
    products = tl.dot(q, tl.trans(k), input_precision=S.PRECISION)
    v = rows_of(V, j, v_m, valid, S.d_v, S.DV, S.RAGGED or S.LENGTHS > 0, S.WIDE)
    dweights = tl.dot(do, tl.trans(v), input_precision=S.PRECISION)
    low, high = ends(BLOCKS, t, S)
    scores, unit, slope = masked_scores(
        products, i[:, None], j[None, :], valid[None, :], valid[None, :], t >= mid, low - latest, high - begins,
        bias, factors, S,
    )  # fmt: skip
    weights = tl.exp2(scores * unit - lse2[:, None])
    if S.DROPS:
        dweights = tl.where(is_kept(dropout, r[:, None], j[None, :]), dweights * dropout[3], 0.0)
    dscores = weights * (dweights - delta[:, None])
    return dscores, dscores * slope if S.CAPPED else dscores, j, k


@triton.jit
def _for_queries(pid, tensors, strides, tables, extras, sizes, S: tl.constexpr):
    """dq of a tile of queries, and what other launches read: lse (base 2) and delta of its rows, to STATS.

    If the bias has a gradient, what does not depend on single distances goes to FAR, 4 numbers per program: Σ ds at
    −reach and below, at reach and above, and Σ ds |j − i|.
    """
    Q, K, V, O, DO, LSE, DLSE, STATS, DQ, _, _, PART, FAR = tensors
    q_b, q_h, q_n, k_b, k_h, k_m, v_b, v_h, v_m, o_b, o_h, o_n, do_b, do_h, do_n = strides[:15]
    dq_b, dq_h, dq_n = strides[15:18]
    ITEMS, MEMBERS, BLOCKS, skipped = tables
    LIMITS, TABLE, SLOPES, seed, reach, cutoff, upscale = extras
    heads, all_heads, n, start, step, scale, factors = sizes
    bh, b, h, w = head_of(pid, heads, all_heads)
    r, in_tile, i, begins, latest, lo, mid, hi, slot = tile_of(ITEMS, MEMBERS, w + skipped, start, step, S)
    limits = limits_of(LIMITS, b, S)
    Q += b * q_b + h * q_h
    K += b * k_b + (h // S.GROUP) * k_h
    V += b * v_b + (h // S.GROUP) * v_h
    O += b * o_b + h * o_h
    DO += b * do_b + h * do_h
    DQ += b * dq_b + h * dq_h
    row = bh.to(tl.int64) * n
    bias, dropout = bias_of(TABLE, SLOPES, h, reach, S.BIAS), (seed, bh, cutoff, upscale)

    q = rows_of(Q, r, q_n, in_tile, S.d_k, S.DK, True, S.WIDE)
    do = rows_of(DO, r, do_n, in_tile, S.d_v, S.DV, True, S.WIDE)
    lse2, delta = row_numbers(LSE + row, DLSE + row, O, r, o_n, do, in_tile, S)
    stored = in_tile
    if S.keep is not None:
        stored = in_tile & S.keep(i, i)
    if S.SIDES == FOR_QUERIES:
        STATS += 4 * row
        tl.store(STATS + 4 * r, lse2, mask=stored)
        tl.store(STATS + 4 * r + 1, delta, mask=stored)

    dq = tl.zeros((S.R, S.DK), tl.float32)
    under = tl.zeros((S.R,), tl.float32)
    over = tl.zeros((S.R,), tl.float32)
    sloped = tl.zeros((S.R,), tl.float32)
    for t in range(lo, hi):
        dscores, of_products, j, k = dscores_of_keys(
            q, do, K, V, BLOCKS, t, mid, r, i, limits, k_m, v_m, factors, lse2, delta, bias, begins, latest,
            dropout, S,
        )  # fmt: skip
        if S.LEARNS:
            x = j[None, :] - i[:, None]
            if S.BIAS >= 2:
                sloped += tl.sum(dscores * tl.abs(x).to(tl.float32), 1)
            if S.BIAS != 2:
                under += tl.sum(tl.where(x <= -reach, dscores, 0.0), 1)
                over += tl.sum(tl.where((x >= reach) & (x > -reach), dscores, 0.0), 1)
        dq = tl.dot(of_products.to(k.dtype), k, dq, input_precision=S.PRECISION)
    dq = dq * scale
    if S.LEARNS:
        FAR += pid.to(tl.int64) * 4
        tl.store(FAR, tl.sum(tl.where(stored, under, 0.0), 0))
        tl.store(FAR + 1, tl.sum(tl.where(stored, over, 0.0), 0))
        tl.store(FAR + 2, tl.sum(tl.where(stored, sloped, 0.0), 0))
    if S.SPLIT:  # noqa: SIM102 (decided when compiling, then when running)
        if slot >= 0:
            a = tl.arange(0, S.R)
            at = (slot.to(tl.int64) * all_heads + bh) * S.R + a
            tl.store(PART + at[:, None] * S.DK + tl.arange(0, S.DK)[None, :], dq)
            stored = a < 0
    if S.ACCUMULATES:
        dq += rows_of(DQ, r, dq_n, stored, S.d_k, S.DK, True, S.WIDE).to(tl.float32)
    store_rows(DQ, r, dq_n, dq, stored, S.d_k, S.DK, S.WIDE)


@triton.jit
def _for_keys(pid, tensors, strides, tables, extras, sizes, S: tl.constexpr):
    """dk and dv of a tile of keys of one key head, over the rows of each of its GROUP query heads in turn.

    Scores are stored as (keys, rows), so that weights and ds are left factors without a transpose.
    """
    Q, K, V, O, DO, LSE, DLSE, STATS, _, DK_OUT, DV_OUT, PART, _ = tensors
    q_b, q_h, q_n, k_b, k_h, k_m, v_b, v_h, v_m, o_b, o_h, o_n, do_b, do_h, do_n = strides[:15]
    dk_b, dk_h, dk_m, dv_b, dv_h, dv_m = strides[18:]
    ITEMS, MEMBERS, BLOCKS, _ = tables
    LIMITS, TABLE, SLOPES, seed, reach, cutoff, upscale = extras
    heads, all_heads, n, start, step, scale, factors = sizes
    all_heads = all_heads // S.GROUP
    bh, b, h, w = head_of(pid, heads // S.GROUP, all_heads)
    j, in_tile, _, begins, latest, lo, mid, hi, slot = tile_of(ITEMS, MEMBERS, w, 0, 1, S)
    visible = within(in_tile, j, limits_of(LIMITS, b, S), S)
    Q += b * q_b + h * S.GROUP * q_h
    K += b * k_b + h * k_h
    V += b * v_b + h * v_h
    O += b * o_b + h * S.GROUP * o_h
    DO += b * do_b + h * S.GROUP * do_h
    DK_OUT += b * dk_b + h * dk_h
    DV_OUT += b * dv_b + h * dv_h
    row = bh.to(tl.int64) * S.GROUP * n
    LSE, DLSE, STATS = LSE + row, DLSE + row, STATS + 4 * row
    first_head, first_of_all = h * S.GROUP, bh * S.GROUP

    k = rows_of(K, j, k_m, visible, S.d_k, S.DK, True, S.WIDE)
    v = rows_of(V, j, v_m, visible, S.d_v, S.DV, True, S.WIDE)
    dk = tl.zeros((S.R, S.DK), tl.float32)
    dv = tl.zeros((S.R, S.DV), tl.float32)
    for u in range(S.GROUP * (hi - lo)):
        t, head, of_all = lo + u, first_head, first_of_all
        Q_HEAD, DO_HEAD, O_HEAD, LSE_HEAD, DLSE_HEAD, STATS_HEAD = Q, DO, O, LSE, DLSE, STATS
        if S.GROUP > 1:  # all blocks of the first head, then all of the next
            t = lo + u % (hi - lo)
            g = (u // (hi - lo)).to(tl.int64)
            Q_HEAD, DO_HEAD = Q + g * q_h, DO + g * do_h
            head, of_all = head + g, of_all + g.to(tl.int32)
        r, valid = members(BLOCKS, t, S)
        q = rows_of(Q_HEAD, r, q_n, valid, S.d_k, S.DK, S.RAGGED, S.WIDE)
        do = rows_of(DO_HEAD, r, do_n, valid, S.d_v, S.DV, S.RAGGED, S.WIDE)
        if S.SIDES == FOR_KEYS:
            if S.GROUP > 1:
                STATS_HEAD = STATS + g * 4 * n
            word = tl.arange(0, 4)
            if S.RAGGED:
                stats = tl.load(STATS_HEAD + r[:, None] * 4 + word[None, :], mask=valid[:, None], other=0.0)
            else:
                stats = tl.load(STATS_HEAD + r[:, None] * 4 + word[None, :])
            lse2 = tl.sum(tl.where(word[None, :] == 0, stats, 0.0), 1)
            delta = tl.sum(tl.where(word[None, :] == 1, stats, 0.0), 1)
        else:
            if S.GROUP > 1:
                O_HEAD, LSE_HEAD, DLSE_HEAD = O + g * o_h, LSE + g * n, DLSE + g * n
            lse2, delta = row_numbers(LSE_HEAD, DLSE_HEAD, O_HEAD, r, o_n, do, valid, S)
        products = tl.dot(k, tl.trans(q), input_precision=S.PRECISION)
        bias = bias_of(TABLE, SLOPES, head, reach, S.BIAS)
        low, high = ends(BLOCKS, t, S)
        scores, unit, slope = masked_scores(
            products, (start + step * r)[None, :], j[:, None], visible[:, None], valid[None, :], t >= mid,
            begins - start - step * high, latest - start - step * low, bias, factors, S,
        )  # fmt: skip
        weights = tl.exp2(scores * unit - lse2[None, :])
        weights_of_v = weights
        if S.DROPS:
            is_kept_pair = is_kept((seed, of_all, cutoff, upscale), r[None, :], j[:, None])
            weights_of_v = tl.where(is_kept_pair, weights * upscale, 0.0)
        dv = tl.dot(weights_of_v.to(do.dtype), do, dv, input_precision=S.PRECISION)
        dweights = tl.dot(v, tl.trans(do), input_precision=S.PRECISION)
        if S.DROPS:
            dweights = tl.where(is_kept_pair, dweights * upscale, 0.0)
        dscores = weights * (dweights - delta[None, :])
        if S.CAPPED:
            dscores *= slope
        dk = tl.dot(dscores.to(q.dtype), q, dk, input_precision=S.PRECISION)
    dk = dk * scale
    stored = in_tile
    if S.keep is not None:
        stored = in_tile & S.keep(j, j)
    if S.SPLIT:  # noqa: SIM102 (decided when compiling, then when running)
        if slot >= 0:
            a = tl.arange(0, S.R)
            at = ((slot.to(tl.int64) * all_heads + bh) * S.R + a) * (S.DK + S.DV)
            tl.store(PART + at[:, None] + tl.arange(0, S.DK)[None, :], dk)
            tl.store(PART + at[:, None] + S.DK + tl.arange(0, S.DV)[None, :], dv)
            stored = a < 0
    if S.ACCUMULATES:
        dk += rows_of(DK_OUT, j, dk_m, stored, S.d_k, S.DK, True, S.WIDE).to(tl.float32)
        dv += rows_of(DV_OUT, j, dv_m, stored, S.d_v, S.DV, True, S.WIDE).to(tl.float32)
    store_rows(DK_OUT, j, dk_m, dk, stored, S.d_k, S.DK, S.WIDE)
    store_rows(DV_OUT, j, dv_m, dv, stored, S.d_v, S.DV, S.WIDE)


@triton.jit(do_not_specialize=[*VARYING, "for_keys"])
def gradients_kernel(
    Q, K, V, O, DO, LSE, DLSE, STATS, DQ, DK_OUT, DV_OUT, PART, FAR,
    LIMITS, TABLE, SLOPES, seed, ITEMS, MEMBERS, BLOCKS,
    q_b, q_h, q_n, k_b, k_h, k_m, v_b, v_h, v_m, o_b, o_h, o_n, do_b, do_h, do_n,
    dq_b, dq_h, dq_n, dk_b, dk_h, dk_m, dv_b, dv_h, dv_m,
    heads, all_heads, for_keys, n, start, step, scale, scale2, cap2, reach, cutoff, upscale, S: tl.constexpr,
):  # fmt: skip
    """dq of tiles of queries, dk and dv of tiles of keys; if of both, the first `for_keys` items are of keys."""
    pid = tl.program_id(0)
    first = for_keys * (all_heads // S.GROUP)
    tensors = Q, K, V, O, DO, LSE, DLSE, STATS, DQ, DK_OUT, DV_OUT, PART, FAR
    strides = (
        q_b, q_h, q_n, k_b, k_h, k_m, v_b, v_h, v_m, o_b, o_h, o_n, do_b, do_h, do_n,
        dq_b, dq_h, dq_n, dk_b, dk_h, dk_m, dv_b, dv_h, dv_m,
    )  # fmt: skip
    tables = ITEMS, MEMBERS, BLOCKS, for_keys
    extras = LIMITS, TABLE, SLOPES, seed, reach, cutoff, upscale
    sizes = heads, all_heads, n, start, step, scale, (scale2, cap2)
    if S.SIDES == FOR_QUERIES:
        _for_queries(pid, tensors, strides, tables, extras, sizes, S)
    elif S.SIDES == FOR_KEYS:
        _for_keys(pid, tensors, strides, tables, extras, sizes, S)
    else:
        if pid < first:
            _for_keys(pid, tensors, strides, tables, extras, sizes, S)
        else:
            _for_queries(pid - first, tensors, strides, tables, extras, sizes, S)


@triton.jit(do_not_specialize=VARYING)
def sum_kernel(
    OUT, PART, SPLITS, out_b, out_h, out_n, heads, all_heads, start, step, part_at,
    keep: tl.constexpr, R: tl.constexpr, SLICE: tl.constexpr, d: tl.constexpr, D: tl.constexpr,
    PART_WIDTH: tl.constexpr, ACCUMULATES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """SLICE members of a split tile: their partial gradients, added in order; AHEAD of them are loaded at once."""
    AHEAD: tl.constexpr = 8
    bh, b, h, work = head_of(tl.program_id(0), heads, all_heads)
    first, hop, count, slot, pieces, _, _ = item_of(SPLITS, work // (R // SLICE))
    a = work % (R // SLICE) * SLICE + tl.arange(0, SLICE)
    x = first + hop * a
    stored = a < count
    if keep is not None:
        stored = stored & keep(start + step * x, start + step * x)
    OUT += b * out_b + h * out_h
    total = tl.zeros((SLICE, D), tl.float32)
    if ACCUMULATES:
        total = rows_of(OUT, x, out_n, stored, d, D, True, WIDE).to(tl.float32)
    for u in range(0, pieces, AHEAD):
        for ahead in tl.static_range(AHEAD):
            at = (((slot + u + ahead).to(tl.int64) * all_heads + bh) * R + a) * PART_WIDTH + part_at
            there = a < tl.where(u + ahead < pieces, R, 0)
            total += tl.load(PART + at[:, None] + tl.arange(0, D)[None, :], mask=there[:, None], other=0.0)
    store_rows(OUT, x, out_n, total, stored, d, D, WIDE)


# The gradient of a bias by distance: dtable[x] = Σ ds over the pairs with j − i = x, without float atomics.
#
# Each program processes many tiles and adds to its own row of sums; the rows are summed in order afterwards.
# Distances at and beyond ±reach belong to the two ends of the table: they are sums over whole blocks, which the dq
# kernel has already computed, so blocks without a nearer pair are skipped here.
#
# Within a block the distance is x₀ + b·c − a·r for column c and row r. If a = b it is constant along diagonals: row r
# is rotated by r columns, and a diagonal becomes a column. Otherwise b/gcd(a, b) rows, or a/gcd(a, b) columns,
# contain no distance twice, so they can be added at once.


@triton.jit
def _gcd(a, b):
    while b != 0:
        a, b = b, a % b
    return a


@triton.jit
def _add(SUMS, x, value, valid, reach):
    """SUMS[x] += value, for distances within ±reach, none of which may occur twice."""
    in_tile = valid & (x > -reach) & (x < reach)
    tl.debug_barrier()  # another thread may have written what this one reads
    tl.store(SUMS + x, tl.load(SUMS + x, mask=in_tile, other=0.0) + value, mask=in_tile)


@triton.jit
def _diagonals(SUMS, ds, first, b, reach, R: tl.constexpr, B: tl.constexpr):
    """Adds the sums along diagonals, which are b apart; `first` is the distance of row 0 and column 0."""
    a = tl.arange(0, R)[:, None]
    c = tl.arange(0, B)[None, :]
    rotated = tl.gather(ds, (a + c) % B + a * 0, 1)
    for w in tl.static_range((R + B - 2) // B + 1):  # how often a row has wrapped around
        column = tl.sum(tl.where((a + c) // B == w, rotated, 0.0), 0)
        x = first + b * (tl.arange(0, B) - B * w)
        _add(SUMS, x, column, x == x, reach)


@triton.jit
def _scatter(SUMS, ds, first, row_step, b, in_segment, reach, R: tl.constexpr, B: tl.constexpr):
    """Adds each ds at its distance, as many at once as have distinct distances."""
    a = tl.arange(0, R)[:, None]
    c = tl.arange(0, B)[None, :]
    x = first + b * c - row_step * a
    g = tl.maximum(_gcd(b, row_step), 1)
    rows = tl.minimum(tl.maximum(b // g, 1), R)
    places = tl.minimum(tl.maximum(row_step // g, 1), B)
    if rows * B >= places * R:
        for low in range(0, R, rows):
            _add(SUMS, x, ds, in_segment & (a >= low) & (a < low + rows), reach)
    else:
        for low in range(0, B, places):
            _add(SUMS, x, ds, in_segment & (c >= low) & (c < low + places), reach)


@triton.jit
def _near(SUMS, ds, BLOCKS, t, at, row_step, reach, R: tl.constexpr, B: tl.constexpr, SEGMENTS: tl.constexpr):
    """Adds the ds of block t to the sums, segment by segment; `at` is the position of the tile's first row."""
    block = BLOCKS + t * 12
    end = tl.load(block + 8)
    for s in tl.static_range(SEGMENTS):
        begin = end * 0
        until = end
        if s > 0:
            begin = tl.minimum(tl.load(block + 3 * s - 1), end)
        if s + 1 < SEGMENTS:
            until = tl.minimum(tl.load(block + 3 * s + 2), end)
        first = tl.load(block + 3 * s) - at
        b = tl.load(block + 3 * s + 1)
        farthest = first + b * (until - 1)
        nearest = first + b * begin - row_step * (R - 1)
        if (until > begin) & (farthest > -reach) & (nearest < reach):
            c = tl.arange(0, B)[None, :]
            in_segment = (c >= begin) & (c < until)
            if b == row_step:
                _diagonals(SUMS, tl.where(in_segment, ds, 0.0), first, b, reach, R, B)
            else:
                _scatter(SUMS, ds, first, row_step, b, in_segment, reach, R, B)


@triton.jit(do_not_specialize=[*VARYING, "items", "programs"])
def bias_kernel(
    Q, K, V, DO, STATS, NEAR, LIMITS, TABLE, SLOPES, seed, ITEMS, BLOCKS,
    q_b, q_h, q_n, k_b, k_h, k_m, v_b, v_h, v_m, do_b, do_h, do_n,
    items, programs, heads, all_heads, group, n, start, step, scale2, cap2, reach, cutoff, upscale, S: tl.constexpr,
):  # fmt: skip
    """Program p of a head adds items p, p + programs, … to its row of NEAR."""
    pid = tl.program_id(0)
    bh, b, h, nth = head_of(pid, heads, all_heads)
    limits = limits_of(LIMITS, b, S)
    Q += b * q_b + h * q_h
    K += b * k_b + (h // group) * k_h
    V += b * v_b + (h // group) * v_h
    DO += b * do_b + h * do_h
    STATS += 4 * bh.to(tl.int64) * n
    bias, dropout = bias_of(TABLE, SLOPES, h, reach, S.BIAS), (seed, bh, cutoff, upscale)
    NEAR += pid.to(tl.int64) * (2 * reach + 1) + reach
    for w in range(nth, items, programs):
        r, in_tile, i, at, latest, lo, mid, hi, _slot = tile_of(ITEMS, ITEMS, w, start, step, S)
        hop = tl.load(ITEMS + w * 8 + 1)
        if S.keep is not None:
            in_tile = in_tile & S.keep(i, i)
        q = rows_of(Q, r, q_n, in_tile, S.d_k, S.DK, True, S.WIDE)
        do = rows_of(DO, r, do_n, in_tile, S.d_v, S.DV, True, S.WIDE)
        lse2 = tl.load(STATS + 4 * r, mask=in_tile, other=float("inf"))  # no weight in rows that do not count
        delta = tl.load(STATS + 4 * r + 1, mask=in_tile, other=0.0)
        for t in range(lo, hi):
            low, high = ends(BLOCKS, t, S)
            if (high - at > -reach) & (low - latest < reach):
                ds, _of_products, _j, _k = dscores_of_keys(
                    q, do, K, V, BLOCKS, t, mid, r, i, limits, k_m, v_m, (scale2, cap2), lse2, delta, bias, at,
                    latest, dropout, S,
                )  # fmt: skip
                _near(NEAR, ds, BLOCKS, t, at, step * hop, reach, S.R, S.B, S.SEGMENTS)

"""The gradients as streams of blocks, for Hopper's tensor cores, in Gluon; as in forward.py.

    dv = weightsᵀ do;  ds = weights ∘ (do vᵀ − delta);  dq = scale · ds k;  dk = scale · dsᵀ q

A program runs through the blocks of many tiles. While a block is multiplied and weighed, the next one is copied to
the other half of a ring; the rows of the next tile are copied as soon as the last scores of this one are made.
"""

from .forward import (
    BEGINS,
    FAR,
    _copy,
    _copy_block,
    _keys,
    _mine,
    _row,
    _spot,
    async_copy,
    barrier,
    fetch,
    gl,
    gluon,
    warpgroup_mma,
    warpgroup_mma_wait,
)  # fmt: skip
from .merge_parts import add_parts, put_part


@gluon.jit
def _awaited(x):
    """x, after waiting for all earlier launches: a program that starts early may begin before they end."""
    return gl.inline_asm_elementwise(
        "{ griddepcontrol.wait; mov.b32 $0, $1; }", "=r,r", [x], gl.int32, False, 1
    )


@gluon.jit
def _let_next(x):
    """x; from here on, programs of the next kernel may start where there is room."""
    return gl.inline_asm_elementwise(
        "{ griddepcontrol.launch_dependents; mov.b32 $0, $1; }", "=r,r", [x], gl.int32, False, 1
    )


@gluon.jit
def _tile(BLOCKS, t):
    """First row, step and number of rows of the tile of block t. As loop variables they would take registers."""
    at = BLOCKS + t * 12
    return gl.load(at + 10), gl.load(at + 11), (gl.load(at + 9) >> 8) & 255


@gluon.jit
def _of_tile(BLOCKS, t, R: gl.constexpr, LAYOUT: gl.constexpr):
    """The rows of the tile of block t; past its end, the last row again."""
    first, hop, count = _tile(BLOCKS, t)
    return first + hop * gl.minimum(gl.arange(0, R, layout=LAYOUT), count - 1)


@gluon.jit
def _put(X, place, value, x, mine, stride, LOAD: gl.constexpr):
    """Rows x of X ← value, through shared memory that nothing else uses just now."""
    place.store(value.to(place.dtype))
    d = gl.arange(0, value.shape[1], layout=gl.SliceLayout(0, LOAD))
    gl.store(X + (x * stride)[:, None] + d[None, :], place.load(LOAD), mask=mine[:, None])


# dq: tiles of queries, blocks of keys


@gluon.jit
def _fetch_queries(
    qs, dos, os, lses, Q, DO, O, LSE, BLOCKS, t, q_n, do_n, o_n,
    R: gl.constexpr, LOAD: gl.constexpr, FLAT: gl.constexpr,
):  # fmt: skip
    """Start to copy q, do, o and lse of the tile of block t."""
    x = _of_tile(BLOCKS, t, R, gl.SliceLayout(1, LOAD))
    _copy(qs, Q, x, q_n)
    _copy(dos, DO, x, do_n)
    _copy(os, O, x, o_n)
    fetch(lses, LSE + _of_tile(BLOCKS, t, R, FLAT))


@gluon.jit
def _open(
    dos, os, lses, DLSE, LSE2, DELTA, BLOCKS, t, start, step,
    keep: gl.constexpr, HAS_DLSE: gl.constexpr, R: gl.constexpr, LOAD: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """lse (base 2) and delta = Σ do ∘ o − dlse of the tile of block t; both are written too, for dk and dv."""
    first, hop, count = _tile(BLOCKS, t)
    delta = gl.sum(os.load(LOAD).to(gl.float32) * dos.load(LOAD).to(gl.float32), 1)
    delta = gl.convert_layout(delta, ROWS)
    lse2 = lses.load(ROWS) * 1.4426950408889634
    lse2 = gl.where(lse2 == -float("inf"), float("inf"), lse2)  # an empty row: every weight exp2(−∞) = 0
    x, mine = _mine(first, hop, count, start, step, keep, R, ROWS)
    if HAS_DLSE:
        delta -= gl.load(DLSE + x, mask=mine, other=0.0)
    gl.store(LSE2 + x, lse2, mask=mine)
    gl.store(DELTA + x, delta, mask=mine)
    return first, hop, lse2, delta


@gluon.jit
def _hide(
    scores, j, marks, first, hop, start, step, lowest: gl.constexpr, highest: gl.constexpr, low_of: gl.constexpr,
    high_of: gl.constexpr, allowed: gl.constexpr, R: gl.constexpr,
):  # fmt: skip
    """−∞ for pairs that are not allowed. What depends on the key alone is computed once per key, not per pair."""
    MMA: gl.constexpr = scores.type.layout
    if marks & 7:
        i = start + step * (first + hop * gl.arange(0, R, layout=gl.SliceLayout(1, MMA)))
        if allowed is not None:
            keys = gl.convert_layout(j, gl.SliceLayout(0, MMA))
            ok = allowed(i[:, None], keys[None, :]) & (keys >= 0)[None, :]
            scores = gl.where(ok, scores, -float("inf"))
        else:
            if marks & 1:
                high = gl.convert_layout(gl.where(j >= 0, high_of(j), -FAR), gl.SliceLayout(0, MMA))
                scores = gl.where(high[None, :] >= lowest(i)[:, None], scores, -float("inf"))
            if marks & 2:
                low = gl.convert_layout(gl.where(j >= 0, low_of(j), FAR), gl.SliceLayout(0, MMA))
                scores = gl.where(low[None, :] <= highest(i)[:, None], scores, -float("inf"))
    return scores


@gluon.jit
def _note_bound(noted, f, marks, low_of: gl.constexpr, high_of: gl.constexpr, allowed: gl.constexpr):
    """What the keys f of a block with one test are tested by; f = −1 at empty places."""
    if allowed is not None:
        noted.store(f)
    else:
        if (marks & 3) == 1:
            noted.store(gl.where(f >= 0, high_of(f), -FAR))
        if (marks & 3) == 2:
            noted.store(gl.where(f >= 0, low_of(f), FAR))


@gluon.jit
def _hide_noted(
    scores, noted, BLOCKS, t, marks, first, hop, start, step, lowest: gl.constexpr, highest: gl.constexpr,
    low_of: gl.constexpr, high_of: gl.constexpr, allowed: gl.constexpr, MARKS: gl.constexpr, R: gl.constexpr,
    SEGMENTS: gl.constexpr, FLAT: gl.constexpr,
):  # fmt: skip
    """As `_hide`; what only a key decides was noted when the block was fetched, but for blocks with two tests."""
    MMA: gl.constexpr = scores.type.layout
    if marks & 7:
        i = start + step * (first + hop * gl.arange(0, R, layout=gl.SliceLayout(1, MMA)))
        if allowed is not None:
            j = noted.load(gl.SliceLayout(0, MMA))
            scores = gl.where(allowed(i[:, None], j[None, :]) & (j >= 0)[None, :], scores, -float("inf"))
        else:
            if (marks & 3) == 1:
                high = noted.load(gl.SliceLayout(0, MMA))
                scores = gl.where(high[None, :] >= lowest(i)[:, None], scores, -float("inf"))
            if (marks & 3) == 2:
                low = noted.load(gl.SliceLayout(0, MMA))
                scores = gl.where(low[None, :] <= highest(i)[:, None], scores, -float("inf"))
            if (MARKS & 8) != 0 and (marks & 3) == 3:
                row, _ = _row(BLOCKS, t, SEGMENTS)
                f = _keys(row, gl.arange(0, scores.shape[1], layout=FLAT), -1, SEGMENTS)
                scores = _hide(
                    scores, f, marks, first, hop, start, step, lowest, highest, low_of, high_of, allowed, R
                )
    return scores


@gluon.jit
def _visit_keys(
    dq, lse2, delta, first, hop, mark, ahead, coming, t, last, qs, dos, os, lses, ks, vs, noted,
    ks_next, vs_next, noted_next,
    Q, DO, O, LSE, DLSE, LSE2, DELTA, DQ, K, V, BLOCKS, q_n, do_n, o_n, k_m, v_m, dq_n, start, step, scale, scale2,
    lowest: gl.constexpr, highest: gl.constexpr, low_of: gl.constexpr, high_of: gl.constexpr,
    allowed: gl.constexpr, keep: gl.constexpr, HAS_DLSE: gl.constexpr, MARKS: gl.constexpr, R: gl.constexpr,
    SEGMENTS: gl.constexpr, LOAD: gl.constexpr, FLAT: gl.constexpr, SCORES: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """Block t, whose keys and values lie in ks and vs, joins dq; the next is copied to the other places."""
    D: gl.constexpr = dq.shape[1]
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    c, flat = gl.arange(0, R, layout=gl.SliceLayout(1, LOAD)), gl.arange(0, R, layout=FLAT)
    zero = gl.zeros([R, R], gl.float32, layout=SCORES)
    later, after = _row(BLOCKS, gl.minimum(t + 2, last), SEGMENTS)
    async_copy.wait_group(0)
    barrier()
    if (mark & BEGINS) != 0:
        first, hop, lse2, delta = _open(
            dos, os, lses, DLSE, LSE2, DELTA, BLOCKS, t, start, step, keep, HAS_DLSE, R, LOAD, ROWS
        )
    product_k = warpgroup_mma(qs, ks.permute((1, 0)), zero, use_acc=False, is_async=True)
    product_v = warpgroup_mma(dos, vs.permute((1, 0)), zero, use_acc=False, is_async=True)
    if t < last:
        spot = _spot(ahead, c, SEGMENTS)
        _copy_block(ks_next, K, spot, k_m, c, SEGMENTS)
        _copy_block(vs_next, V, spot, v_m, c, SEGMENTS)
        if (coming & 7) != 0:
            _note_bound(noted_next, _keys(ahead, flat, -1, SEGMENTS), coming, low_of, high_of, allowed)
    async_copy.commit_group()
    ends = (t == last) | ((coming & BEGINS) != 0)
    scores = warpgroup_mma_wait(1, deps=[product_k])
    scores = _hide_noted(
        scores, noted, BLOCKS, t, mark, first, hop, start, step, lowest, highest, low_of, high_of, allowed,
        MARKS, R, SEGMENTS, FLAT,
    )  # fmt: skip
    weights = gl.exp2(scores * scale2 - lse2[:, None])
    dweights = warpgroup_mma_wait(0, deps=[product_v])
    if ends & (t < last):
        barrier()
        _fetch_queries(qs, dos, os, lses, Q, DO, O, LSE, BLOCKS, t + 1, q_n, do_n, o_n, R, LOAD, FLAT)
    async_copy.commit_group()
    dscores = weights * (dweights - delta[:, None])
    left = gl.convert_layout(dscores.to(ks.dtype), gl.DotOperandLayout(0, OUT, 2))
    product = warpgroup_mma(left, ks, dq, is_async=True)
    dq = warpgroup_mma_wait(0, deps=[product])
    if ends:
        barrier()
        _, _, count = _tile(BLOCKS, t)
        x, mine = _mine(first, hop, count, start, step, keep, R, gl.SliceLayout(1, LOAD))
        _put(DQ, ks, dq * scale, x, mine, dq_n, LOAD)
        dq = gl.zeros([R, D], gl.float32, layout=OUT)
    return dq, lse2, delta, first, hop, coming, later, after


@gluon.jit(do_not_specialize=["heads", "all_heads", "n", "start"])
def hopper_dq(
    Q, K, V, O, DO, LSE, DLSE, LSE2, DELTA, DQ, CHUNKS, BLOCKS,
    q_b, q_h, q_n, k_b, k_h, k_m, v_b, v_h, v_m, o_b, o_h, o_n, do_b, do_h, do_n, dq_b, dq_h, dq_n,
    heads, all_heads, group, n, start, step, scale, scale2, lowest: gl.constexpr, highest: gl.constexpr,
    low_of: gl.constexpr, high_of: gl.constexpr, allowed: gl.constexpr, keep: gl.constexpr,
    HAS_DLSE: gl.constexpr, MARKS: gl.constexpr, R: gl.constexpr, D: gl.constexpr, SEGMENTS: gl.constexpr,
    LOAD: gl.constexpr, FLAT: gl.constexpr, SCORES: gl.constexpr, OUT: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """Tiles of R queries, blocks of R keys, heads of width D; program p has chunk p // all_heads of one head."""
    bh = gl.program_id(0) % all_heads
    b, h = (bh // heads).to(gl.int64), (bh % heads).to(gl.int64)
    Q, DO = Q + b * q_b + h * q_h, DO + b * do_b + h * do_h
    O, DQ = O + b * o_b + h * o_h, DQ + b * dq_b + h * dq_h
    K, V = K + b * k_b + (h // group) * k_h, V + b * v_b + (h // group) * v_h
    begin = bh.to(gl.int64) * n
    LSE, DLSE, LSE2, DELTA = LSE + begin, DLSE + begin, LSE2 + begin, DELTA + begin
    CHUNKS += 16 * (gl.program_id(0) // all_heads)
    lo, last = gl.load(CHUNKS), gl.load(CHUNKS + 1) - 1
    c = _let_next(_awaited(gl.arange(0, R, layout=gl.SliceLayout(1, LOAD))))
    KIND: gl.constexpr = Q.dtype.element_ty
    qs, dos = gl.allocate_shared_memory(KIND, [R, D], SHARED), gl.allocate_shared_memory(KIND, [R, D], SHARED)
    os = gl.allocate_shared_memory(KIND, [R, D], SHARED)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lses = gl.allocate_shared_memory(gl.float32, [R], LINE)
    b0, b1 = gl.allocate_shared_memory(gl.int32, [R], LINE), gl.allocate_shared_memory(gl.int32, [R], LINE)
    kr, vr = (
        gl.allocate_shared_memory(KIND, [2, R, D], SHARED),
        gl.allocate_shared_memory(KIND, [2, R, D], SHARED),
    )
    dq = gl.zeros([R, D], gl.float32, layout=OUT)
    row, mark = _row(CHUNKS + 4, 0, SEGMENTS)
    j = _keys(row, c, -1, SEGMENTS)
    _fetch_queries(qs, dos, os, lses, Q, DO, O, LSE, CHUNKS + 4, 0, q_n, do_n, o_n, R, LOAD, FLAT)
    _copy(kr.index(lo % 2), K, j, k_m)
    _copy(vr.index(lo % 2), V, j, v_m)
    if (mark & 7) != 0:
        _note_bound(
            b0, _keys(row, gl.arange(0, R, layout=FLAT), -1, SEGMENTS), mark, low_of, high_of, allowed
        )
    async_copy.commit_group()
    ahead, coming = _row(BLOCKS, gl.minimum(lo + 1, last), SEGMENTS)
    lse2 = gl.zeros([R], gl.float32, layout=gl.SliceLayout(1, SCORES))
    first, hop, delta = lo, lo, lse2
    for t in range(lo, last, 2):  # a chunk has an even number of blocks
        at = t % 2  # known only at run time: addresses known at compile time would be kept in registers
        dq, lse2, delta, first, hop, mark, ahead, coming = _visit_keys(
            dq, lse2, delta, first, hop, mark, ahead, coming, t, last, qs, dos, os, lses,
            kr.index(at), vr.index(at), b0, kr.index(1 - at), vr.index(1 - at), b1,
            Q, DO, O, LSE, DLSE, LSE2, DELTA, DQ, K, V, BLOCKS, q_n, do_n, o_n, k_m, v_m, dq_n, start, step, scale,
            scale2, lowest, highest, low_of, high_of, allowed, keep, HAS_DLSE, MARKS, R, SEGMENTS, LOAD, FLAT, SCORES,
            OUT,
        )  # fmt: skip
        dq, lse2, delta, first, hop, mark, ahead, coming = _visit_keys(
            dq, lse2, delta, first, hop, mark, ahead, coming, t + 1, last, qs, dos, os, lses,
            kr.index(1 - at), vr.index(1 - at), b1, kr.index(at), vr.index(at), b0,
            Q, DO, O, LSE, DLSE, LSE2, DELTA, DQ, K, V, BLOCKS, q_n, do_n, o_n, k_m, v_m, dq_n, start, step, scale,
            scale2, lowest, highest, low_of, high_of, allowed, keep, HAS_DLSE, MARKS, R, SEGMENTS, LOAD, FLAT, SCORES,
            OUT,
        )  # fmt: skip


# dk and dv: tiles of keys, blocks of queries


@gluon.jit
def _hide_rows(
    scores, noted, marks, first, hop, lowest: gl.constexpr, highest: gl.constexpr, low_of: gl.constexpr,
    high_of: gl.constexpr, allowed: gl.constexpr, MARKS: gl.constexpr, R: gl.constexpr,
):  # fmt: skip
    """−∞ for pairs that are not allowed; scores are (keys, rows). Empty places hold zeros and add nothing."""
    MMA: gl.constexpr = scores.type.layout
    if marks & 7:
        j = first + hop * gl.arange(0, R, layout=gl.SliceLayout(1, MMA))
        i = noted.load(gl.SliceLayout(0, MMA))
        if allowed is not None:
            scores = gl.where(allowed(i[None, :], j[:, None]), scores, -float("inf"))
        else:
            if (MARKS & 1) != 0 and (marks & 1) != 0:
                scores = gl.where(high_of(j)[:, None] >= lowest(i)[None, :], scores, -float("inf"))
            if (MARKS & 2) != 0 and (marks & 2) != 0:
                scores = gl.where(low_of(j)[:, None] <= highest(i)[None, :], scores, -float("inf"))
    return scores


@gluon.jit
def _fetch_rows(
    qs, dos, lses, deltas, noted, Q, DO, LSE2, DELTA, row, word, q_h, q_n, do_h, do_n, n, start, step, c, flat,
    GROUP: gl.constexpr, SEGMENTS: gl.constexpr, WAITS: gl.constexpr = False,
):  # fmt: skip
    """Start to copy q, do, lse and delta of a block of queries, zeros at its empty places; store their positions.

    WAITS: for the kernel before, which makes lse and delta.
    """
    if GROUP > 1:
        g = (word >> 16).to(gl.int64)
        Q, DO, LSE2, DELTA = Q + g * q_h, DO + g * do_h, LSE2 + g * n, DELTA + g * n
    spot = _spot(row, c, SEGMENTS)
    _copy_block(qs, Q, spot, q_n, c, SEGMENTS)
    _copy_block(dos, DO, spot, do_n, c, SEGMENTS)
    if WAITS:
        flat = _awaited(flat)
    f = _keys(row, flat, -1, SEGMENTS)
    fetch(lses, LSE2 + f, mask=f >= 0)
    fetch(deltas, DELTA + f, mask=f >= 0)
    if (word & 7) != 0:
        noted.store(start + step * f)


@gluon.jit
def _close_keys(
    DK, DV, PART, SLOTS, BLOCKS, t, place_k, place_v, dk, dv, bh, all_heads, stride,
    keep: gl.constexpr, SPLIT: gl.constexpr, R: gl.constexpr, LOAD: gl.constexpr,
):  # fmt: skip
    """Write dk and dv of the tile of block t, or its share of them."""
    first, hop, count = _tile(BLOCKS, t)
    x, mine = _mine(first, hop, count, 0, 1, keep, R, gl.SliceLayout(1, LOAD))
    if SPLIT:
        slot = gl.load(SLOTS + t)
        if slot >= 0:
            at = 2 * slot.to(gl.int64) * all_heads + bh
            put_part(PART, at * R, dk, R)
            put_part(PART, (at + all_heads) * R, dv, R)
        else:
            _put(DK, place_k, dk, x, mine, stride, LOAD)
            _put(DV, place_v, dv, x, mine, stride, LOAD)
    else:
        _put(DK, place_k, dk, x, mine, stride, LOAD)
        _put(DV, place_v, dv, x, mine, stride, LOAD)


@gluon.jit
def _visit_rows(
    dk, dv, first, hop, mark, ahead, coming, t, last, ks, vs, qs, dos, lses, deltas, noted,
    qs_next, dos_next, lses_next, deltas_next, noted_next, Q, DO, LSE2, DELTA, K, V, DK, DV, PART, SLOTS, BLOCKS,
    q_h, q_n, do_h, do_n, k_m, v_m, dk_m, n, bh, all_heads, start, step, scale, scale2,
    lowest: gl.constexpr, highest: gl.constexpr, low_of: gl.constexpr, high_of: gl.constexpr,
    allowed: gl.constexpr, keep: gl.constexpr, GROUP: gl.constexpr, SPLIT: gl.constexpr, MARKS: gl.constexpr,
    R: gl.constexpr, SEGMENTS: gl.constexpr, LOAD: gl.constexpr, FLAT: gl.constexpr, SCORES: gl.constexpr,
    OUT: gl.constexpr,
):  # fmt: skip
    """Block t, whose rows lie in qs and dos, joins dk and dv; the next is copied to the other places."""
    D: gl.constexpr = dk.shape[1]
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SCORES)
    c, flat = gl.arange(0, R, layout=gl.SliceLayout(1, LOAD)), gl.arange(0, R, layout=FLAT)
    zero = gl.zeros([R, R], gl.float32, layout=SCORES)
    later, after = _row(BLOCKS, gl.minimum(t + 2, last), SEGMENTS)
    async_copy.wait_group(0)
    barrier()
    product_q = warpgroup_mma(ks, qs.permute((1, 0)), zero, use_acc=False, is_async=True)
    if t < last:
        _fetch_rows(
            qs_next, dos_next, lses_next, deltas_next, noted_next, Q, DO, LSE2, DELTA, ahead, coming,
            q_h, q_n, do_h, do_n, n, start, step, c, flat, GROUP, SEGMENTS,
        )  # fmt: skip
    async_copy.commit_group()
    ends = (t == last) | ((coming & BEGINS) != 0)
    scores = warpgroup_mma_wait(0, deps=[product_q])
    scores = _hide_rows(scores, noted, mark, first, hop, lowest, highest, low_of, high_of, allowed, MARKS, R)
    weights = gl.exp2(scores * scale2 - lses.load(COLUMNS)[None, :])
    left = gl.convert_layout(weights.to(qs.dtype), gl.DotOperandLayout(0, OUT, 2))
    product_do = warpgroup_mma(vs, dos.permute((1, 0)), zero, use_acc=False, is_async=True)
    product_v = warpgroup_mma(left, dos, dv, is_async=True)
    dweights = warpgroup_mma_wait(1, deps=[product_do])
    dscores = weights * (dweights - deltas.load(COLUMNS)[None, :])
    right = gl.convert_layout(dscores.to(qs.dtype), gl.DotOperandLayout(0, OUT, 2))
    product_k = warpgroup_mma(right, qs, dk, is_async=True)
    if ends & (t < last):
        barrier()
        x = _of_tile(BLOCKS, t + 1, R, gl.SliceLayout(1, LOAD))
        _copy(ks, K, x, k_m)
        _copy(vs, V, x, v_m)
    async_copy.commit_group()
    dv, dk = warpgroup_mma_wait(0, deps=[product_v, product_k])
    if ends:
        barrier()
        _close_keys(
            DK, DV, PART, SLOTS, BLOCKS, t, qs, dos, dk * scale, dv, bh, all_heads, dk_m, keep, SPLIT, R, LOAD
        )
        dk, dv = gl.zeros([R, D], gl.float32, layout=OUT), gl.zeros([R, D], gl.float32, layout=OUT)
        first, hop, _ = _tile(BLOCKS, gl.minimum(t + 1, last))
    return dk, dv, first, hop, coming, later, after


@gluon.jit(do_not_specialize=["heads", "all_heads", "n", "joins", "of_heads", "m", "start"])
def hopper_dkv(
    Q, K, V, DO, LSE2, DELTA, DK, DV, PART, CHUNKS, BLOCKS, SLOTS,
    q_b, q_h, q_n, k_b, k_h, k_m, v_b, v_h, v_m, do_b, do_h, do_n, dk_b, dk_h, dk_m,
    heads, all_heads, n, joins, of_heads, m, start, step, scale, scale2, lowest: gl.constexpr, highest: gl.constexpr,
    low_of: gl.constexpr, high_of: gl.constexpr, allowed: gl.constexpr, keep: gl.constexpr, adds: gl.constexpr,
    GROUP: gl.constexpr, SPLIT: gl.constexpr, ADDS: gl.constexpr, MARKS: gl.constexpr, R: gl.constexpr,
    D: gl.constexpr, SEGMENTS: gl.constexpr, LOAD: gl.constexpr, FLAT: gl.constexpr, SCORES: gl.constexpr,
    OUT: gl.constexpr, SHARED: gl.constexpr, WAITS: gl.constexpr,
):  # fmt: skip
    """Tiles of R keys of one key head, blocks of R rows of one of its GROUP query heads.

    WAITS: for the previous kernel, which computes lse and delta. If that was a pass of dk and dv too, it has waited
    for dq: this one starts at once, but may not end before it. ADDS: at its end, this pass adds up the parts that the
    previous one left in PART, for the tiles in SLOTS, `joins` of each head; `adds` selects the keys that are written.
    """
    ALL_K, ALL_V = DK, DV
    bh = gl.program_id(0) % all_heads
    b, h = (bh // heads).to(gl.int64), (bh % heads).to(gl.int64)
    Q, DO = Q + b * q_b + h * GROUP * q_h, DO + b * do_b + h * GROUP * do_h
    K, V = K + b * k_b + h * k_h, V + b * v_b + h * v_h
    DK, DV = DK + b * dk_b + h * dk_h, DV + b * dk_b + h * dk_h
    LSE2, DELTA = LSE2 + bh.to(gl.int64) * GROUP * n, DELTA + bh.to(gl.int64) * GROUP * n
    CHUNKS += 16 * (gl.program_id(0) // all_heads)
    lo, last = gl.load(CHUNKS), gl.load(CHUNKS + 1) - 1
    c, flat = gl.arange(0, R, layout=gl.SliceLayout(1, LOAD)), gl.arange(0, R, layout=FLAT)
    KIND: gl.constexpr = Q.dtype.element_ty
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ks, vs = gl.allocate_shared_memory(KIND, [R, D], SHARED), gl.allocate_shared_memory(KIND, [R, D], SHARED)
    qr, dor = (
        gl.allocate_shared_memory(KIND, [2, R, D], SHARED),
        gl.allocate_shared_memory(KIND, [2, R, D], SHARED),
    )
    l0, l1 = (
        gl.allocate_shared_memory(gl.float32, [R], LINE),
        gl.allocate_shared_memory(gl.float32, [R], LINE),
    )
    s0, s1 = (
        gl.allocate_shared_memory(gl.float32, [R], LINE),
        gl.allocate_shared_memory(gl.float32, [R], LINE),
    )
    i0, i1 = gl.allocate_shared_memory(gl.int32, [R], LINE), gl.allocate_shared_memory(gl.int32, [R], LINE)
    dk, dv = gl.zeros([R, D], gl.float32, layout=OUT), gl.zeros([R, D], gl.float32, layout=OUT)
    row, mark = _row(CHUNKS + 4, 0, SEGMENTS)
    x = _of_tile(CHUNKS + 4, 0, R, gl.SliceLayout(1, LOAD))
    _copy(ks, K, x, k_m)
    _copy(vs, V, x, v_m)
    _fetch_rows(
        qr.index(lo % 2), dor.index(lo % 2), l0, s0, i0, Q, DO, LSE2, DELTA, row, mark,
        q_h, q_n, do_h, do_n, n, start, step, c, flat, GROUP, SEGMENTS, WAITS,
    )  # fmt: skip
    async_copy.commit_group()
    flat = _let_next(flat)
    ahead, coming = _row(BLOCKS, gl.minimum(lo + 1, last), SEGMENTS)
    first, hop, _ = _tile(CHUNKS + 4, 0)
    for t in range(lo, last, 2):  # a chunk has an even number of blocks
        at = t % 2  # known only at run time: addresses known at compile time would be kept in registers
        dk, dv, first, hop, mark, ahead, coming = _visit_rows(
            dk, dv, first, hop, mark, ahead, coming, t, last, ks, vs,
            qr.index(at), dor.index(at), l0, s0, i0, qr.index(1 - at), dor.index(1 - at), l1, s1, i1,
            Q, DO, LSE2, DELTA, K, V, DK, DV, PART, SLOTS, BLOCKS, q_h, q_n, do_h, do_n, k_m, v_m, dk_m, n,
            bh, all_heads, start, step, scale, scale2, lowest, highest, low_of, high_of, allowed, keep, GROUP, SPLIT,
            MARKS, R, SEGMENTS, LOAD, FLAT, SCORES, OUT,
        )  # fmt: skip
        dk, dv, first, hop, mark, ahead, coming = _visit_rows(
            dk, dv, first, hop, mark, ahead, coming, t + 1, last, ks, vs,
            qr.index(1 - at), dor.index(1 - at), l1, s1, i1, qr.index(at), dor.index(at), l0, s0, i0,
            Q, DO, LSE2, DELTA, K, V, DK, DV, PART, SLOTS, BLOCKS, q_h, q_n, do_h, do_n, k_m, v_m, dk_m, n,
            bh, all_heads, start, step, scale, scale2, lowest, highest, low_of, high_of, allowed, keep, GROUP, SPLIT,
            MARKS, R, SEGMENTS, LOAD, FLAT, SCORES, OUT,
        )  # fmt: skip
    if not WAITS:
        joins = _awaited(joins)
    if ADDS:
        add_parts(ALL_K, ALL_V, PART, SLOTS, joins, of_heads, m, adds, R, D)

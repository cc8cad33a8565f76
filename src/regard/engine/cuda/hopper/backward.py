"""The gradients as streams of blocks, for Hopper's tensor cores, in Gluon; as in forward.py.

    dv = weightsᵀ do;  ds = weights ∘ (do vᵀ − delta);  dq = scale · ds k;  dk = scale · dsᵀ q

A program processes the blocks of many tiles. While one block is computed, the next is copied to the other half of a
ring buffer; the rows of the next tile are copied as soon as the last scores of this tile are computed.
"""

from .forward import (
    async_copy,
    block_keys,
    block_row,
    block_rows,
    copy_block,
    copy_rows,
    hide_keys,
    store_part,
    store_rows,
    tile_rows,
    wait_copies,
    warpgroup_mma,
    warpgroup_mma_wait,
    written_rows,
)
from .static import (
    BEGINS,
    barrier,
    bits_of,
    capped,
    chain_of,
    chunk_index,
    count_last_tile,
    count_tile,
    fetch,
    fetch_words,
    gl,
    gluon,
    head_and_chunk,
    hide,
    let_next_start,
    limits_of,
    load_words,
    read_words,
    scores_of,
    visible,
    wait_for,
    wait_previous,
    word,
    word_ring,
)

ROWS_AT_A_TIME = gl.constexpr(16)  # rows whose parts a program adds up at a time
AHEAD = gl.constexpr(4)  # parts whose loads do not wait for one another


@gluon.jit
def _tile_of(words):
    """First row, step and number of rows of a block's tile."""
    return word(words, 10), word(words, 11), (word(words, 9) >> 8) & 255


@gluon.jit
def _store_result(X, buffer, value, x, written, stride, joins, S: gl.constexpr):
    """Rows x of X ← value, through shared memory that nothing else uses just now."""
    buffer.store(value.to(buffer.dtype))
    store_rows(X, buffer, x, written, stride, None, joins, S)


@gluon.jit
def _sloped(weights, curved, S: gl.constexpr):
    """The weights times the derivative of scores with respect to scaled products: under a softcap 1 − tanh²."""
    if S.CAPPED:
        return weights * (1.0 - curved * curved)
    else:
        return weights


# dq: tiles of queries, blocks of keys


@gluon.jit
def _allocate_two(KIND: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    return gl.allocate_shared_memory(KIND, SHAPE, LAYOUT), gl.allocate_shared_memory(KIND, SHAPE, LAYOUT)


@gluon.jit
def _fetch_queries(tile, Q, DO, O, LSE, LSE2, DELTA, words, q_n, do_n, o_n, S: gl.constexpr):
    """Start to copy q, do, o and lse of a block's tile; instead of o and lse, what an earlier pass derived."""
    qs, dos, os, lses, deltas = tile
    x = tile_rows(_tile_of(words), gl.SliceLayout(1, S.LOAD), S)
    flat = tile_rows(_tile_of(words), S.FLAT, S)
    copy_rows(qs, Q, x, q_n, S)
    copy_rows(dos, DO, x, do_n, S)
    if S.COVERED:
        fetch(lses, LSE2 + flat)
        fetch(deltas, DELTA + flat)
    else:
        copy_rows(os, O, x, o_n, S)
        fetch(lses, LSE + flat)


@gluon.jit
def _begin(tile, DLSE, LSE2, DELTA, words, start, step, S: gl.constexpr):
    """lse (base 2) and delta = Σ do ∘ o − dlse of a block's tile; both are written too, for dk and dv."""
    _, dos, os, lses, deltas = tile
    ROWS: gl.constexpr = gl.SliceLayout(1, S.SCORES)
    first, hop, count = _tile_of(words)
    if S.COVERED:
        return lses.load(ROWS), deltas.load(ROWS)
    delta = gl.sum(os.load(S.LOAD).to(gl.float32) * dos.load(S.LOAD).to(gl.float32), 1)
    lse2 = lses.load(ROWS) * 1.4426950408889634
    lses.store(delta)  # its place is free now: a buffer more, and one program less would fit
    delta = lses.load(ROWS)
    lse2 = gl.where(lse2 == -float("inf"), float("inf"), lse2)  # an empty row: every weight exp2(−∞) = 0
    x, written = written_rows(first, hop, count, start, step, ROWS, S)
    if S.HAS_DLSE:
        delta -= gl.load(DLSE + x, mask=written, other=0.0)
    gl.store(LSE2 + x, lse2, mask=written)
    gl.store(DELTA + x, delta, mask=written)
    return lse2, delta


@gluon.jit
def _visit_keys(state, t, last, tile, here, other, inputs, S: gl.constexpr):
    """Add block t, whose keys and values are in `here`, to dq; the next is copied to the other half of the ring."""
    dq, lse2, delta, marks, mask, pending = state
    qs, dos = tile[0], tile[1]
    ks, vs = here
    ks_next, vs_next = other
    Q, DO, O, LSE, DLSE, LSE2, DELTA, DQ, K, V, blocks, strides, start, step, factors, parts, limits = inputs
    scale, scale2, curve = factors
    BLOCKS, ring = blocks
    q_n, do_n, o_n, k_m, v_m, dq_n = strides
    c = gl.arange(0, S.R, layout=gl.SliceLayout(1, S.LOAD))
    zero = gl.zeros([S.R, S.R], gl.float32, layout=S.SCORES)
    PART, SLOTS, MASKS, bh, all_heads = parts
    wait_copies(0)
    words, next_words = read_words(ring, t), read_words(ring, gl.minimum(t + 1, last))
    counter, joins, counts = chain_of(words, S)
    next_row, marks_1 = block_row(next_words, S)
    pending = count_tile(PART, pending, S)
    if (marks & BEGINS) != 0:
        lse2, delta = _begin(tile, DLSE, LSE2, DELTA, words, start, step, S)
    product_k = scores_of(qs, ks, zero, S)
    product_v = scores_of(dos, vs, zero, S)
    bits = bits_of(mask, MASKS, marks, zero, S)
    block = block_rows(next_row, c, MASKS, limits, S)
    if t < last:
        copy_block(ks_next, K, block, k_m, c, limits, S)
        if gl.num_warps() == 4:
            copy_block(vs_next, V, block, v_m, c, limits, S)
    fetch_words(ring, BLOCKS, gl.minimum(t + 2, last))
    async_copy.commit_group()
    ends = (t == last) | ((marks_1 & BEGINS) != 0)
    products = warpgroup_mma_wait(1 if 4 * S.d > 3 * S.D else 2, deps=[product_k])
    curved = capped(products, curve, S)
    scores = hide(curved, bits, marks)
    if S.LENGTHS:
        scores = hide_keys(scores, block_rows(block_row(words, S)[0], c, MASKS, limits, S), limits, S)
    weights = _sloped(gl.exp2(scores * scale2 - lse2[:, None]), curved, S)
    dweights = warpgroup_mma_wait(0, deps=[product_v])
    if gl.num_warps() == 8:
        barrier()
        if t < last:
            copy_block(vs_next, V, block, v_m, c, limits, S)
    if ends & (t < last):
        barrier()
        _fetch_queries(tile, Q, DO, O, LSE, LSE2, DELTA, read_words(ring, t + 1), q_n, do_n, o_n, S)
    async_copy.commit_group()
    dscores = weights * (dweights - delta[:, None])
    left = gl.convert_layout(dscores.to(ks.dtype), gl.DotOperandLayout(0, S.OUT, 2))
    product = warpgroup_mma(left, ks, dq, is_async=True)
    if ends:
        t = wait_for(t, PART, counter, joins, S)
    dq = warpgroup_mma_wait(0, deps=[product])
    if ends:
        barrier()
        first, hop, count = _tile_of(read_words(ring, t))
        x, written = written_rows(first, hop, count, start, step, gl.SliceLayout(1, S.LOAD), S)
        slot = -1
        if S.SPLIT:
            slot = gl.load(SLOTS + t)
            if slot >= 0:
                store_part(PART, (slot.to(gl.int64) * all_heads + bh) * S.R, dq * scale, S.R)
        if slot < 0:
            _store_result(DQ, ks, dq * scale, x, written, dq_n, joins, S)
        pending = gl.where(counts > 0, counter, -1) if S.CHAINED else 0
        dq = gl.zeros([S.R, S.D], gl.float32, layout=S.OUT)
    return dq, lse2, delta, marks_1, next_row[8] >> 8, pending


@gluon.jit(do_not_specialize=["heads", "all_heads", "in_flight", "n", "start"])
def hopper_dq(
    Q, K, V, O, DO, LSE, DLSE, LSE2, DELTA, DQ, PART, LIMITS, CHUNKS, BLOCKS, SLOTS, MASKS,
    q_b, q_h, q_n, k_b, k_h, k_m, v_b, v_h, v_m, o_b, o_h, o_n, do_b, do_h, do_n, dq_b, dq_h, dq_n,
    heads, all_heads, in_flight, group, n, start, step, scale, scale2, curve, S: gl.constexpr,
):  # fmt: skip
    """A program has one chunk of one head (`head_and_chunk`)."""
    bh, chunk = head_and_chunk(all_heads, in_flight)
    b, h = (bh // heads).to(gl.int64), (bh % heads).to(gl.int64)
    Q, DO = Q + b * q_b + h * q_h, DO + b * do_b + h * do_h
    O, DQ = O + b * o_b + h * o_h, DQ + b * dq_b + h * dq_h
    K, V = K + b * k_b + (h // group) * k_h, V + b * v_b + (h // group) * v_h
    begin = bh.to(gl.int64) * n
    LSE, DLSE, LSE2, DELTA = LSE + begin, DLSE + begin, LSE2 + begin, DELTA + begin
    CHUNKS += 16 * chunk_index(chunk, b, all_heads, S)
    lo, last = gl.load(CHUNKS), gl.load(CHUNKS + 1) - 1
    c = gl.arange(0, S.R, layout=gl.SliceLayout(1, S.LOAD))
    if not S.WAITS_AT_END:
        c = wait_previous(c)
    c = let_next_start(c)
    KIND: gl.constexpr = Q.dtype.element_ty
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    qs, dos = _allocate_two(KIND, [S.R, S.D], S.SHARED)
    os = qs if S.COVERED else gl.allocate_shared_memory(KIND, [S.R, S.D], S.SHARED)
    lses, deltas = _allocate_two(gl.float32, [S.R], LINE)
    VALUES: gl.constexpr = 1 if gl.num_warps() == 8 else 2  # blocks: for heads of 256, two would not fit
    k_ring = gl.allocate_shared_memory(KIND, [2, S.R, S.D], S.SHARED)
    v_ring = gl.allocate_shared_memory(KIND, [VALUES, S.R, S.D], S.SHARED)
    tile = qs, dos, os, lses, deltas
    dq = gl.zeros([S.R, S.D], gl.float32, layout=S.OUT)
    ring, words = word_ring(), load_words(CHUNKS + 4, 0, S)
    row, marks = block_row(words, S)
    limits = limits_of(LIMITS, b, S)
    j = visible(block_keys(row, c, MASKS, S), limits, S)
    _fetch_queries(tile, Q, DO, O, LSE, LSE2, DELTA, words, q_n, do_n, o_n, S)
    copy_rows(k_ring.index(lo % 2), K, j, k_m, S)
    copy_rows(v_ring.index(lo % 2 * (VALUES - 1)), V, j, v_m, S)
    fetch_words(ring, BLOCKS, lo)
    fetch_words(ring, BLOCKS, gl.minimum(lo + 1, last))
    async_copy.commit_group()
    lse2 = gl.zeros([S.R], gl.float32, layout=gl.SliceLayout(1, S.SCORES))
    state = dq, lse2, lse2, marks, row[8] >> 8, lo * 0 - 1 if S.CHAINED else 0
    strides = q_n, do_n, o_n, k_m, v_m, dq_n
    parts = PART, SLOTS, MASKS, bh, all_heads
    blocks = BLOCKS, ring
    factors = scale, scale2, curve
    inputs = Q, DO, O, LSE, DLSE, LSE2, DELTA, DQ, K, V, blocks, strides, start, step, factors, parts, limits
    for t in range(lo, last, 2):  # a chunk has an even number of blocks
        at = t % 2  # known only at run time: addresses known at compile time would be kept in registers
        here = k_ring.index(at), v_ring.index(at * (VALUES - 1))
        other = k_ring.index(1 - at), v_ring.index((1 - at) * (VALUES - 1))
        state = _visit_keys(state, t, last, tile, here, other, inputs, S)
        state = _visit_keys(state, t + 1, last, tile, other, here, inputs, S)
    count_last_tile(PART, state[5], S)
    if S.WAITS_AT_END:
        wait_previous(lo)


# dk and dv: tiles of keys, blocks of queries. If programs share a tile, each stores its part, and the parts are added
# in order: no atomics, the same bits every time. The next launch adds them, if there is one; otherwise sum_kernel.


@gluon.jit(noinline=True)
def _add_parts(
    DK, DV, PART, JOINS, joins, heads, m, keep: gl.constexpr, R: gl.constexpr, D: gl.constexpr, WIDTH: gl.constexpr
):  # fmt: skip
    """dk and dv of tiles of R of the m keys of each head: the sums of their parts, whose number per tile is in JOINS.

    Not inlined: values that depend on the thread index would occupy registers during the whole kernel.
    """
    ROWS: gl.constexpr = max(128 // D, 1)  # of a warp
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [ROWS, 32 // ROWS], [gl.num_warps(), 1], [1, 0])
    a = gl.arange(0, ROWS_AT_A_TIME, layout=gl.SliceLayout(1, LAYOUT))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    for t in range(gl.program_id(0), joins * (R // ROWS_AT_A_TIME) * 2 * heads, gl.num_programs(0)):
        h, of_v, rows = t % heads, t // heads % 2, t // (2 * heads)
        at = JOINS + rows // (R // ROWS_AT_A_TIME) * 8
        first, hop, count = gl.load(at), gl.load(at + 1), gl.load(at + 2)
        slot, parts = gl.load(at + 3), gl.load(at + 4)
        x = rows % (R // ROWS_AT_A_TIME) * ROWS_AT_A_TIME + a
        P = PART + ((2 * slot.to(gl.int64) + of_v) * heads + h) * (R * D) + (x * D)[:, None] + d
        total = gl.zeros([ROWS_AT_A_TIME, D], gl.float32, layout=LAYOUT)
        for u in range(0, parts, AHEAD):
            for w in gl.static_range(AHEAD):
                total += gl.load(
                    P + (u + w).to(gl.int64) * (2 * R * D) * heads, mask=u + w < parts, other=0.0
                )
        written = x < count
        x = first + hop * x
        if keep is not None:
            written = written & keep(x, x)
        to = h.to(gl.int64) * m * WIDTH + (x * WIDTH)[:, None] + d
        written = written[:, None]
        if WIDTH < D:
            written = written & (d < WIDTH)
        if of_v == 0:
            gl.store(DK + to, total.to(DK.dtype.element_ty), mask=written)
        else:
            gl.store(DV + to, total.to(DV.dtype.element_ty), mask=written)


@gluon.jit
def _fetch_rows(buffer, row, word, c, flat, inputs, S: gl.constexpr, WAITS: gl.constexpr = False):
    """Start to copy q, do, lse and delta of a block of queries, zeros for its empty columns.

    WAITS: wait for the previous kernel, which computes lse and delta.
    """
    qs, dos, lses, deltas = buffer
    Q, DO, LSE2, DELTA, MASKS, q_h, q_n, do_h, do_n, n = inputs
    if S.GROUP > 1:
        g = (word >> 16).to(gl.int64)
        Q, DO, LSE2, DELTA = Q + g * q_h, DO + g * do_h, LSE2 + g * n, DELTA + g * n
    block = block_rows(row, c, MASKS, None, S)
    copy_block(qs, Q, block, q_n, c, None, S)
    copy_block(dos, DO, block, do_n, c, None, S)
    if WAITS:
        flat = wait_previous(flat)
    f = block_keys(row, flat, MASKS, S)
    fetch(lses, LSE2 + f, mask=f >= 0)
    fetch(deltas, DELTA + f, mask=f >= 0)


@gluon.jit
def _visit_rows(state, t, last, ks, vs, here, other, rows, inputs, S: gl.constexpr):
    """Add block t, whose rows are in `here`, to dk and dv; the next is copied to the other half of the ring."""
    dk, dv, marks, mask, pending = state
    qs, dos, lses, deltas = here
    K, V, DK, DV, PART, SLOTS, BLOCKS, ring, MASKS, k_m, v_m, dk_m, bh, all_heads, factors, limits = inputs
    scale, scale2, curve = factors
    COLUMNS: gl.constexpr = gl.SliceLayout(0, S.SCORES)
    c, flat = gl.arange(0, S.R, layout=gl.SliceLayout(1, S.LOAD)), gl.arange(0, S.R, layout=S.FLAT)
    zero = gl.zeros([S.R, S.R], gl.float32, layout=S.SCORES)
    wait_copies(0)
    words, next_words = read_words(ring, t), read_words(ring, gl.minimum(t + 1, last))
    counter, joins, counts = chain_of(words, S)
    next_row, marks_1 = block_row(next_words, S)
    pending = count_tile(PART, pending, S)
    product_q = scores_of(ks, qs, zero, S)
    bits = bits_of(mask, MASKS, marks, zero, S)
    if t < last:
        _fetch_rows(other, next_row, marks_1, c, flat, rows, S)
    fetch_words(ring, BLOCKS, gl.minimum(t + 2, last))
    async_copy.commit_group()
    ends = (t == last) | ((marks_1 & BEGINS) != 0)
    curved = capped(warpgroup_mma_wait(0, deps=[product_q]), curve, S)
    scores = hide(curved, bits, marks)
    if S.LENGTHS:
        j = visible(tile_rows(_tile_of(words), gl.SliceLayout(1, S.SCORES), S), limits, S)
        scores = gl.where((j >= 0)[:, None], scores, -float("inf"))
    weights = gl.exp2(scores * scale2 - lses.load(COLUMNS)[None, :])
    left = gl.convert_layout(weights.to(qs.dtype), gl.DotOperandLayout(0, S.OUT, 2))
    weights = _sloped(weights, curved, S)
    product_do = scores_of(vs, dos, zero, S)
    product_v = warpgroup_mma(left, dos, dv, is_async=True)
    dweights = warpgroup_mma_wait(1, deps=[product_do])
    dscores = weights * (dweights - deltas.load(COLUMNS)[None, :])
    right = gl.convert_layout(dscores.to(qs.dtype), gl.DotOperandLayout(0, S.OUT, 2))
    product_k = warpgroup_mma(right, qs, dk, is_async=True)
    if ends & (t < last):
        barrier()
        x = visible(tile_rows(_tile_of(read_words(ring, t + 1)), gl.SliceLayout(1, S.LOAD), S), limits, S)
        copy_rows(ks, K, x, k_m, S)
        copy_rows(vs, V, x, v_m, S)
    async_copy.commit_group()
    if ends:
        t = wait_for(t, PART, counter, joins, S)
    dv, dk = warpgroup_mma_wait(0, deps=[product_v, product_k])
    if ends:
        barrier()
        first, hop, count = _tile_of(read_words(ring, t))
        dk = dk * scale
        x, written = written_rows(first, hop, count, 0, 1, gl.SliceLayout(1, S.LOAD), S)
        slot = -1
        if S.SPLIT:
            slot = gl.load(SLOTS + t)
            if slot >= 0:
                at = 2 * slot.to(gl.int64) * all_heads + bh
                store_part(PART, at * S.R, dk, S.R)
                store_part(PART, (at + all_heads) * S.R, dv, S.R)
        if slot < 0:
            _store_result(DK, qs, dk, x, written, dk_m, joins, S)
            _store_result(DV, dos, dv, x, written, dk_m, joins, S)
        pending = gl.where(counts > 0, counter, -1) if S.CHAINED else 0
        dk = gl.zeros([S.R, S.D], gl.float32, layout=S.OUT)
        dv = gl.zeros([S.R, S.D], gl.float32, layout=S.OUT)
    return dk, dv, marks_1, next_row[8] >> 8, pending


@gluon.jit(do_not_specialize=["heads", "all_heads", "in_flight", "n", "joins", "of_heads", "m"])
def hopper_dkv(
    Q, K, V, DO, LSE2, DELTA, DK, DV, PART, LIMITS, CHUNKS, BLOCKS, SLOTS, MASKS,
    q_b, q_h, q_n, k_b, k_h, k_m, v_b, v_h, v_m, do_b, do_h, do_n, dk_b, dk_h, dk_m,
    heads, all_heads, in_flight, n, joins, of_heads, m, scale, scale2, curve, S: gl.constexpr,
):  # fmt: skip
    """Tiles of R keys of one key head, blocks of R rows of one of its GROUP query heads.

    If the previous kernel was a pass of dk and dv too, it has waited for dq: this one starts at once, but may not end
    before it. The parts that it left in PART are those of the tiles in SLOTS, `joins` of each head.
    """
    ALL_K, ALL_V = DK, DV
    bh, chunk = head_and_chunk(all_heads, in_flight)
    b, h = (bh // heads).to(gl.int64), (bh % heads).to(gl.int64)
    Q, DO = Q + b * q_b + h * S.GROUP * q_h, DO + b * do_b + h * S.GROUP * do_h
    K, V = K + b * k_b + h * k_h, V + b * v_b + h * v_h
    DK, DV = DK + b * dk_b + h * dk_h, DV + b * dk_b + h * dk_h
    LSE2, DELTA = LSE2 + bh.to(gl.int64) * S.GROUP * n, DELTA + bh.to(gl.int64) * S.GROUP * n
    CHUNKS += 16 * chunk_index(chunk, b, all_heads, S)
    lo, last = gl.load(CHUNKS), gl.load(CHUNKS + 1) - 1
    c, flat = gl.arange(0, S.R, layout=gl.SliceLayout(1, S.LOAD)), gl.arange(0, S.R, layout=S.FLAT)
    KIND: gl.constexpr = Q.dtype.element_ty
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ks, vs = _allocate_two(KIND, [S.R, S.D], S.SHARED)
    q_ring, do_ring = _allocate_two(KIND, [2, S.R, S.D], S.SHARED)
    lses_0, lses_1 = _allocate_two(gl.float32, [S.R], LINE)
    deltas_0, deltas_1 = _allocate_two(gl.float32, [S.R], LINE)
    dk, dv = gl.zeros([S.R, S.D], gl.float32, layout=S.OUT), gl.zeros([S.R, S.D], gl.float32, layout=S.OUT)
    ring, words = word_ring(), load_words(CHUNKS + 4, 0, S)
    row, marks = block_row(words, S)
    limits, factors = limits_of(LIMITS, b, S), (scale, scale2, curve)
    x = visible(tile_rows(_tile_of(words), gl.SliceLayout(1, S.LOAD), S), limits, S)
    copy_rows(ks, K, x, k_m, S)
    copy_rows(vs, V, x, v_m, S)
    rows = Q, DO, LSE2, DELTA, MASKS, q_h, q_n, do_h, do_n, n
    buffer = q_ring.index(lo % 2), do_ring.index(lo % 2), lses_0, deltas_0
    _fetch_rows(buffer, row, marks, c, flat, rows, S, S.WAITS)
    fetch_words(ring, BLOCKS, lo)
    fetch_words(ring, BLOCKS, gl.minimum(lo + 1, last))
    async_copy.commit_group()
    flat = let_next_start(flat)
    state = dk, dv, marks, row[8] >> 8, lo * 0 - 1 if S.CHAINED else 0
    inputs = K, V, DK, DV, PART, SLOTS, BLOCKS, ring, MASKS, k_m, v_m, dk_m, bh, all_heads, factors, limits
    for t in range(lo, last, 2):  # a chunk has an even number of blocks
        at = t % 2  # known only at run time: addresses known at compile time would be kept in registers
        here = q_ring.index(at), do_ring.index(at), lses_0, deltas_0
        other = q_ring.index(1 - at), do_ring.index(1 - at), lses_1, deltas_1
        state = _visit_rows(state, t, last, ks, vs, here, other, rows, inputs, S)
        state = _visit_rows(state, t + 1, last, ks, vs, other, here, rows, inputs, S)
    count_last_tile(PART, state[4], S)
    if not S.WAITS:
        joins = wait_previous(joins)
    if S.ADDS:
        _add_parts(ALL_K, ALL_V, PART, SLOTS, joins, of_heads, m, S.adds, S.R, S.D, S.d)

"""The forward pass for Hopper's tensor cores, in Gluon: each program streams the blocks of many tiles.

There is no pause between tiles: copies of the next blocks are always in flight. Three or four programs share a
multiprocessor, so that one multiplies while another computes weights. (Within one program, the product of block t
with its values ends before the weights of block t + 1 are computed; overlapping them would run out of registers.)
Shared memory holds one block of keys and two of values; for heads of 256 one of each, so that two programs fit.

    keys: t + 1, then t + 2 arriving    values: t, and t + 1 arriving
"""

from .static import (
    BEGINS,
    WORDS,
    barrier,
    bits_of,
    capped,
    chain_of,
    chunk_index,
    count_last_tile,
    count_tile,
    fetch,
    gl,
    gluon,
    head_and_chunk,
    hide,
    hopper,
    in_thread,
    let_next_start,
    limits_of,
    load_words,
    log2,
    member,
    pairs,
    reciprocal,
    rescale_ptx,
    scores_of,
    unpaired,
    visible,
    wait_for,
    wait_previous,
    weights_ptx,
    word,
)

async_copy, warpgroup_mma = hopper.async_copy, hopper.warpgroup_mma
warpgroup_mma_wait = hopper.warpgroup_mma_wait


@gluon.jit
def wait_copies(in_flight: gl.constexpr):
    """Waits until the copies of all threads have ended, but for the last `in_flight` groups."""
    async_copy.wait_group(in_flight)
    barrier()
    hopper.fence_async_shared()  # products read by another proxy; Triton 3.9 inserts this, 3.6 does not


@gluon.jit
def block_row(words, S: gl.constexpr):
    """The words of a block: up to three segments, their end with the number of its mask, first row and step of its
    tile; and its marks. Loaded two blocks ahead, because a load waits behind the copies in flight."""
    a, b = word(words, 0), word(words, 1)
    c1, a1, b1, c2, a2, b2 = a, a, a, a, a, a
    if S.SEGMENTS > 1:
        c1, a1, b1 = word(words, 2), word(words, 3), word(words, 4)
    if S.SEGMENTS > 2:
        c2, a2, b2 = word(words, 5), word(words, 6), word(words, 7)
    return (a, b, c1, a1, b1, c2, a2, b2, word(words, 8), word(words, 10), word(words, 11)), word(words, 9)


@gluon.jit
def _tile(row, marks):
    """First row, step and number of rows of a block's tile."""
    _, _, _, _, _, _, _, _, _, first, hop = row
    return first, hop, (marks >> 8) & 255


@gluon.jit
def tile_rows(tile, LAYOUT: gl.constexpr, S: gl.constexpr):
    """The rows of a tile; past its end, the last row again."""
    first, hop, count = tile
    return member(first, hop, gl.minimum(gl.arange(0, S.R, layout=LAYOUT), count - 1), S)


@gluon.jit
def block_keys(row, c, MASKS, S: gl.constexpr):
    """The keys in columns c of a block, and −1 in its empty columns."""
    a, b, c1, a1, b1, c2, a2, b2, end, _, _ = row
    j = a + b * c
    if S.spread is not None:
        j = a + gl.load(MASKS + b + c)
    elif S.SEGMENTS > 1:
        j = gl.where(c < c1, j, a1 + b1 * c)
        if S.SEGMENTS > 2:
            j = gl.where(c < c2, j, a2 + b2 * c)
    return gl.where(c < (end & 255), j, -1)


FADE_64, OF_64 = (gl.constexpr(x) for x in rescale_ptx(32))
FADE_128, OF_128 = (gl.constexpr(x) for x in rescale_ptx(64))
FADE_256, OF_256 = (gl.constexpr(x) for x in rescale_ptx(128))
WEIGH_BF16, FROM_BF16 = (gl.constexpr(x) for x in weights_ptx("bf16"))
WEIGH_F16, FROM_F16 = (gl.constexpr(x) for x in weights_ptx("f16"))


@gluon.jit
def _row_value(x):
    """The first of the sixteen numbers that a thread holds of a row: (rows, 64) → (rows, 4)."""
    R: gl.constexpr = x.shape[0]
    x, _ = gl.split(x.reshape([R, 8, 4, 2]))
    x, _ = gl.split(x.permute((0, 2, 1)).reshape([R, 4, 4, 2]))
    x, _ = gl.split(x.reshape([R, 4, 2, 2]))
    x, _ = gl.split(x)
    return x


@gluon.jit
def _rescaled(acc, fade):
    """acc · fade, by row; a warp whose rows keep their base does nothing."""
    D: gl.constexpr = acc.shape[1]
    by = in_thread(fade, acc)
    if D == 64:
        return gl.inline_asm_elementwise(FADE_64, OF_64, [acc, by], gl.float32, True, 32)
    elif D == 128:
        return gl.inline_asm_elementwise(FADE_128, OF_128, [acc, by], gl.float32, True, 64)
    else:
        return gl.inline_asm_elementwise(FADE_256, OF_256, [acc, by], gl.float32, True, 128)


@gluon.jit
def _weigh(scores, top, total, begins, scale2, KIND: gl.constexpr):
    """The weights of a block, the factor for earlier ones, and the running base (of exponents of 2) and sums."""
    gl.static_assert(scores.shape[0] == 64 and scores.shape[1] == 64)  # 32 scores a thread
    flag = gl.full(scores.shape, 0, gl.int32, layout=scores.type.layout) + begins.to(gl.int32)
    scale = gl.full(scores.shape, 0.0, gl.float32, layout=scores.type.layout) + scale2
    inputs = [scores, in_thread(top, scores), in_thread(total, scores), flag, scale]
    if gl.bfloat16 == KIND:
        weights, top, fade, total = gl.inline_asm_elementwise(
            WEIGH_BF16, FROM_BF16, inputs, (gl.bfloat16, gl.float32, gl.float32, gl.float32), True, 32
        )
    else:
        weights, top, fade, total = gl.inline_asm_elementwise(
            WEIGH_F16, FROM_F16, inputs, (gl.float16, gl.float32, gl.float32, gl.float32), True, 32
        )
    return weights, _row_value(fade), _row_value(top), _row_value(total)


@gluon.jit
def written_rows(first, hop, count, start, step, LAYOUT: gl.constexpr, S: gl.constexpr):
    """The rows of a tile, and which of them are to be written."""
    a = gl.arange(0, S.R, layout=LAYOUT)
    x = member(first, hop, a, S)
    written = a < count
    if S.owned is not None:
        written = written & S.owned(a, hop)
    if S.keep is not None:
        written = written & S.keep(start + step * x, start + step * x)
    return x, written


@gluon.jit
def store_part(PART, at, value, R: gl.constexpr):
    """Rows at, at + 1, … of PART ← value."""
    LAYOUT: gl.constexpr = value.type.layout
    D: gl.constexpr = value.shape[1]
    a = gl.arange(0, R, layout=gl.SliceLayout(1, LAYOUT))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))
    gl.store(PART + at * D + (a * D)[:, None] + d[None, :], value)


@gluon.jit
def _finish(
    O, LSE, parts, t, links, buffer, first, hop, marks, acc, top, total, start, step, o_n, S: gl.constexpr
):
    """Write o and lse of the tile of block t, or a part of them, through shared memory that is not in use now.

    Returns the counter of the tile, to be counted when it is written; −1 if no other tile waits for it.
    """
    PART_O, PART_LSE, SLOTS, bh, all_heads, sinks = parts
    counter, joins, counts = links
    count = (marks >> 8) & 255
    first = wait_for(first, PART_O, counter, joins, S)
    if S.ACCUMULATES and not S.CHAINED:
        first = wait_previous(first)
    ROWS: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    total = gl.convert_layout(gl.sum(total, 1), ROWS, assert_trivial=True)
    top = gl.convert_layout(gl.max(top, 1), ROWS, assert_trivial=True)
    x, written = written_rows(first, hop, count, start, step, ROWS, S)
    share = 1.0
    if S.SINKS:  # one more score, without a value. Heads may be flattened: then n is that of one of them
        SINK, n, heads = sinks
        sink = gl.load(SINK + (bh + first // n) % heads).to(gl.float32) * 1.4426950408889634
        base = gl.maximum(top, sink)
        base = gl.where(base == -float("inf"), 0.0, base)
        share = gl.exp2(top - base)
        top, total = base, total * share + gl.exp2(sink - base)
    scale = gl.convert_layout(reciprocal(gl.where(total > 0.0, total, 1.0)) * share, ROWS)
    lse2 = top + log2(total)  # log2(0) = −∞: an empty row
    slot, fade = -1, None
    if S.SPLIT:
        slot = gl.load(SLOTS + t)
    if S.ACCUMULATES:  # the earlier passes are one more key, of weight exp2(before) and value o; not in parts
        continued = written & (slot < 0) & (joins > 0)
        before = gl.load(LSE + x, mask=continued, other=-float("inf")) * 1.4426950408889634
        base = gl.maximum(before, lse2)
        base = gl.where(base == -float("inf"), 0.0, base)
        fade, share = gl.exp2(before - base), gl.exp2(lse2 - base)
        lse2 = base + log2(fade + share)
        both = reciprocal(gl.where(fade + share > 0.0, fade + share, 1.0))
        scale, fade = scale * share * both, gl.convert_layout(fade * both, gl.SliceLayout(1, S.LOAD))
    if S.SPLIT:  # noqa: SIM102 (decided when compiling, then when running)
        if slot >= 0:
            at = (slot * all_heads.to(gl.int64) + bh) * S.R
            gl.store(PART_LSE + at + gl.arange(0, S.R, layout=ROWS), lse2 * 0.6931471805599453)
            store_part(PART_O, at, acc * scale[:, None], S.R)
    if slot < 0:
        gl.store(LSE + x, lse2 * 0.6931471805599453, mask=written)
        buffer.store((acc * scale[:, None]).to(buffer.dtype))
        to, stored = written_rows(first, hop, count, start, step, gl.SliceLayout(1, S.LOAD), S)
        store_rows(O, buffer, to, stored, o_n, fade, joins, S)
    return gl.where(counts > 0, counter, -1) if S.CHAINED else 0


@gluon.jit
def store_rows(X, buffer, x, written, stride, fade, joins, S: gl.constexpr):
    """Rows x of X ← the rows in shared memory; if this pass continues from earlier ones, + fade · their results.

    fade: None is 1. joins: 0 if this tile continues from none. The results of earlier passes have the dtype of X.
    """
    at = X + (x * stride)[:, None] + gl.arange(0, S.D, layout=gl.SliceLayout(0, S.LOAD))[None, :]
    value = buffer.load(S.LOAD)
    if S.ACCUMULATES:
        earlier = gl.load(at, mask=_in_width(written & (joins > 0), S), other=0.0).to(gl.float32)
        if fade is not None:
            earlier = earlier * fade[:, None]
        value = (value.to(gl.float32) + earlier).to(value.dtype)
    gl.store(at, value, mask=_in_width(written, S))


@gluon.jit
def _addresses(X, x, D: gl.constexpr):
    """Addresses of rows of D numbers that begin x numbers after X.

    Of a row of 128 a thread reads two pieces, 64 apart (of a row of 64, one). That offset can be part of the copy
    instruction if the address of the first piece is one value; the compiler would split it, hence PTX.
    """
    LOAD: gl.constexpr = x.type.layout.parent
    if D == 64:
        at = X + x[:, None] + gl.arange(0, 64, layout=gl.SliceLayout(0, LOAD))[None, :]
    else:
        PIECES: gl.constexpr = gl.BlockedLayout(
            [1, D // 64, 8], [LOAD.threads_per_warp[0], 1, 8], [LOAD.warps_per_cta[0], 1, 1], [2, 1, 0]
        )
        EACH: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, PIECES))
        rows = gl.convert_layout(x, EACH, assert_trivial=True)[:, None, None]
        piece = X + gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(1, PIECES)))
        piece = piece.to(gl.int64, bitcast=True)[None, None, :]
        at = gl.inline_asm_elementwise(
            "mad.wide.s32 $0, $1, 2, $2;", "=l,r,l", [rows, piece], gl.int64, True, 1
        )
        at = at.to(gl.pointer_type(X.dtype.element_ty), bitcast=True)
        at += 64 * gl.arange(0, D // 64, layout=gl.SliceLayout(0, gl.SliceLayout(2, PIECES)))[None, :, None]
        at = gl.convert_layout(at.reshape([x.shape[0], D]), LOAD, assert_trivial=True)
    return gl.max_contiguous(gl.multiple_of(at, [1, 16]), [1, 8])  # strides are multiples of 8 numbers


@gluon.jit
def _in_width(rows, S: gl.constexpr):
    """Which numbers to copy: of the rows that are True, as many as heads are wide."""
    if S.d == S.D:
        return rows[:, None]
    else:
        return rows[:, None] & (gl.arange(0, S.D, layout=gl.SliceLayout(0, S.LOAD)) < S.d)[None, :]


@gluon.jit
def copy_rows(buffer, X, x, stride, S: gl.constexpr):
    """Start to copy rows x of X; zeros, without reading, where x < 0 and beyond the width of a head."""
    fetch(buffer, _addresses(X, x * stride, S.D), mask=_in_width(x >= 0, S))


@gluon.jit
def block_rows(row, c, MASKS, limits, S: gl.constexpr):
    """A block's rows: first, step and number if it is one segment, else the row of each column; its mask's number.

    limits: of a block of keys, where those of single columns are −1 if the lengths hide them; None: of queries.
    """
    rows = row[1]
    if S.SEGMENTS > 1:
        rows = block_keys(row, c, MASKS, S)
        if limits is not None:
            rows = visible(rows, limits, S)
    return row[0], rows, row[8] & 255, row[8] >> 8


@gluon.jit
def hide_keys(scores, block, limits, S: gl.constexpr):
    """−∞ for the keys that the lengths hide; a block of one segment is tested only if it has such keys."""
    if S.LENGTHS:
        COLUMNS: gl.constexpr = gl.SliceLayout(0, scores.type.layout)
        if S.SEGMENTS == 1:
            if (block[0] < limits[0]) | (block[0] + block[1] * (block[2] - 1) >= limits[1]):
                j = visible(block[0] + block[1] * gl.arange(0, S.R, layout=COLUMNS), limits, S)
                scores = gl.where((j >= 0)[None, :], scores, -float("inf"))
        else:
            j = gl.convert_layout(block[1], COLUMNS)
            scores = gl.where((j >= 0)[None, :], scores, -float("inf"))
    return scores


@gluon.jit
def copy_block(buffer, X, block, stride, c, limits, S: gl.constexpr):
    """Start to copy the rows of a block, zeros for its empty columns and, unless limits is None, for keys that the
    lengths hide. For one segment, an address is one product."""
    if S.SEGMENTS == 1:
        rows, there = _addresses(X, block[0] * stride + block[1] * stride * c, S.D), c < block[2]
        if S.LENGTHS and limits is not None:
            there = there & (visible(block[0] + block[1] * c, limits, S) >= 0)
        fetch(buffer, rows, mask=_in_width(there, S))
    else:
        copy_rows(buffer, X, block[1], stride, S)


@gluon.jit
def _fetch_queries(qs, Q, row, marks, q_n, S: gl.constexpr):
    """If this block begins a tile, start to copy its queries."""
    if (marks & BEGINS) != 0:
        x = tile_rows(_tile(row, marks), gl.SliceLayout(1, S.LOAD), S)
        if S.d == S.D:
            fetch(qs, _addresses(Q, x * q_n, S.D))
        else:
            copy_rows(qs, Q, x, q_n, S)


@gluon.jit(do_not_specialize=["heads", "all_heads", "in_flight", "n", "start", "sink_rows", "sink_heads"])
def hopper_forward(
    Q, K, V, O, LSE, PART_O, PART_LSE, LIMITS, SINK, CHUNKS, BLOCKS, SLOTS, MASKS,
    q_b, q_h, q_n, k_b, k_h, k_m, v_b, v_h, v_m, o_b, o_h, o_n,
    heads, all_heads, in_flight, group, n, start, step, scale2, curve, sink_rows, sink_heads, S: gl.constexpr,
):  # fmt: skip
    """A program has one chunk of one head (`head_and_chunk`). A pass that continues from an earlier one starts before
    that has ended, and waits for it before reading its results. If passes are chained, PART_O has their counters."""
    bh, chunk = head_and_chunk(all_heads, in_flight)
    b, h = (bh // heads).to(gl.int64), (bh % heads).to(gl.int64)
    Q, O, LSE = Q + b * q_b + h * q_h, O + b * o_b + h * o_h, LSE + bh.to(gl.int64) * n
    K, V = K + b * k_b + (h // group) * k_h, V + b * v_b + (h // group) * v_h
    CHUNKS += 16 * chunk_index(chunk, b, all_heads, S)
    lo, last = gl.load(CHUNKS), gl.load(CHUNKS + 1) - 1
    if S.NEXT_STARTS_EARLY:
        lo = let_next_start(lo)
    parts = PART_O, PART_LSE, SLOTS, bh, all_heads, (SINK, sink_rows, sink_heads)
    limits = limits_of(LIMITS, b, S)
    c = gl.arange(0, S.R, layout=gl.SliceLayout(1, S.LOAD))
    KIND: gl.constexpr = Q.dtype.element_ty
    qs = gl.allocate_shared_memory(KIND, [S.R, S.D], S.SHARED)
    ks = gl.allocate_shared_memory(KIND, [S.R, S.D], S.SHARED)
    # Blocks; if there is one, the next is copied when the product has ended.
    VALUES: gl.constexpr = 1 if S.D == 256 else 2
    vs = gl.allocate_shared_memory(KIND, [VALUES, S.R, S.D], S.SHARED)
    zero = gl.zeros([S.R, S.R], gl.float32, layout=S.SCORES)
    acc = gl.zeros([S.R, S.D], gl.float32, layout=S.OUT)
    row, marks = block_row(load_words(CHUNKS + 4, 0, S), S)
    row_1, marks_1 = block_row(load_words(BLOCKS, gl.minimum(lo + 1, last), S), S)
    _fetch_queries(qs, Q, row, marks, q_n, S)
    first_block = block_rows(row, c, MASKS, limits, S)
    copy_block(ks, K, first_block, k_m, c, limits, S)
    async_copy.commit_group()
    first, hop, _ = _tile(row, marks)
    next_first, next_hop, _ = _tile(row_1, marks_1)
    row, marks_2 = block_row(load_words(BLOCKS, gl.minimum(lo + 2, last), S), S)
    block_1, bits = block_rows(row_1, c, MASKS, limits, S), bits_of(first_block[3], MASKS, marks, zero, S)
    wait_copies(0)
    # Not before: all programs start at once and wait for memory, and the first product needs no values.
    copy_block(vs.index(0), V, first_block, v_m, c, limits, S)
    async_copy.commit_group()
    scores = warpgroup_mma(qs, ks.permute((1, 0)), zero, use_acc=False)
    barrier()
    copy_block(ks, K, block_1, k_m, c, limits, S)
    if lo < last:  # a first tile of one block
        _fetch_queries(qs, Q, row_1, marks_1, q_n, S)
    async_copy.commit_group()
    if VALUES == 1:  # as after the values of a later block, which are copied last
        async_copy.commit_group()
    scores = hide_keys(hide(capped(scores, curve, S), bits, marks), first_block, limits, S)
    is_first = lo == lo  # the first block begins a tile
    weights, fade, top, total = _weigh(scores, _row_value(zero), _row_value(zero), is_first, scale2, KIND)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, S.OUT, 2)
    left = pairs(weights)
    at = 0
    pending = lo * 0 - 1 if S.CHAINED else 0
    for t in range(lo, last):
        wait_copies(1 if VALUES == 1 else 0)
        pending, links = count_tile(PART_O, pending, S), chain_of(BLOCKS + t * WORDS, S)
        product_k = scores_of(qs, ks, zero, S)
        if VALUES == 1:
            wait_copies(0)
        product_v = warpgroup_mma(unpaired(left, KIND, LEFT), vs.index(at), acc, is_async=True)
        block_2, bits = block_rows(row, c, MASKS, limits, S), bits_of(block_1[3], MASKS, marks_1, zero, S)
        row_3, marks_3 = block_row(load_words(BLOCKS, gl.minimum(t + 3, last), S), S)
        scores = warpgroup_mma_wait(1, deps=[product_k])
        barrier()
        copy_block(ks, K, block_2, k_m, c, limits, S)
        if VALUES == 2:
            copy_block(vs.index(1 - at), V, block_1, v_m, c, limits, S)
        if t + 2 <= last:
            _fetch_queries(qs, Q, row, marks_2, q_n, S)
        async_copy.commit_group()
        begins = (marks_1 & BEGINS) != 0
        scores = hide_keys(hide(capped(scores, curve, S), bits, marks_1), block_1, limits, S)
        acc = warpgroup_mma_wait(0, deps=[product_v])
        if VALUES == 1 and not begins:
            barrier()
            copy_block(vs.index(0), V, block_1, v_m, c, limits, S)
        weights, fade, top_1, total_1 = _weigh(scores, top, total, begins, scale2, KIND)
        if begins:
            pending = _finish(
                O, LSE, parts, t, links, vs.index(at), first, hop, marks, acc, top, total, start, step, o_n, S
            )
            acc = gl.zeros([S.R, S.D], gl.float32, layout=S.OUT)
            if VALUES == 1:
                barrier()
                copy_block(vs.index(0), V, block_1, v_m, c, limits, S)
        else:
            acc = _rescaled(acc, fade)
        if VALUES == 1:
            async_copy.commit_group()
        left = pairs(weights)
        first, hop, marks = next_first, next_hop, marks_1
        next_first, next_hop, _ = _tile(row, marks_2)
        top, total, marks_1, marks_2, row, block_1 = top_1, total_1, marks_2, marks_3, row_3, block_2
        at = VALUES - 1 - at
    wait_copies(0)
    count_tile(PART_O, pending, S)
    links = chain_of(BLOCKS + last * WORDS, S)
    acc = warpgroup_mma(unpaired(left, KIND, LEFT), vs.index(at), acc)
    pending = _finish(
        O, LSE, parts, last, links, vs.index(at), first, hop, marks, acc, top, total, start, step, o_n, S
    )
    count_last_tile(PART_O, pending, S)
    if S.WAITS_AT_END:
        wait_previous(lo)

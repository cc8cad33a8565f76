"""o = softmax(scale · q kᵀ + bias) v over the blocks of a schedule: one program per tile of queries and head.

The first half is shared by the Triton kernels: items and blocks of a schedule, rows of tensors, bias, dropout.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ....pattern import Pattern
from .. import prepared
from ..call import CallLayout, Config, padded, splits_float32
from ..mask import compiled

INTERPRETED = tl.constexpr(prepared.INTERPRETED)
ROUNDS = tl.constexpr(7)  # of Philox4x32: as many pass every known statistical test
TABLE, SLOPES = 1, 2  # the parts of a bias, added up to BIAS
# Numbers that must not make Triton compile again.
VARYING = ["heads", "all_heads", "n", "start", "reach", "seed", "cutoff"]


class Static(NamedTuple):
    """Compile-time constants, S in the kernels: tiles of R members, blocks of B, padded widths DK and DV."""

    allowed: Any  # (i, j) → whether the pair is allowed
    R: int
    B: int
    d_k: int
    d_v: int
    DK: int
    DV: int
    PRECISION: str  # of products of float32
    keep: Any = None  # (x, x) → whether the results of member x count; None: all do
    SEGMENTS: int = 1  # the largest number in any block
    RAGGED: bool = True  # some block needs a mask
    SPLIT: bool = False  # some tile is split into items, which write parts
    ACCUMULATES: bool = False  # this pass continues from the results of an earlier one
    LENGTHS: int = 0  # 1: where the keys of a batch row end is given; 2: where they begin and end
    CAPPED: bool = False  # the scores have a softcap
    BIAS: int = 0
    DROPS: bool = False
    WIDE: bool = False  # offsets take 64 bits
    SIDES: int = 0  # of gradients: FOR_QUERIES, FOR_KEYS or both
    LISTED: bool = False  # tiles and blocks are lists of members; else they are progressions
    GROUP: int = 1  # query heads per key head
    # Of the kernel for few queries:
    QUERIES: int = 1  # of a tile
    runs: Any = None  # (p, m) → first key, step and end of each of RUNS progressions
    RUNS: int = 0
    PER_ROW: bool = False  # positions differ by batch row
    EARLY: bool = False  # the kernel that merges may start before this one ends (Hopper)
    SINKS: bool = False  # forward: the softmax of each row has one more score, that of its head
    HAS_DLSE: bool = False  # the log-sum-exp has a gradient
    LEARNS: bool = False  # the bias has a gradient


def static(pattern: Pattern, config: Config, call: CallLayout) -> Static:
    """The constants for a call of this layout. float32 products are as exact as IEEE's, unless PyTorch's setting
    allows TF32."""
    *_, d_k, d_v = call.sizes
    exact = call.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision != "tf32"
    precision = "tf32" if not exact else "bf16x6" if splits_float32(call.device) else "ieee"
    sizes = config.tile, config.block, d_k, d_v, padded(d_k), padded(d_v)
    return Static(compiled(pattern), *sizes, precision)


@triton.jit
def head_of(pid, heads, all_heads):
    """Program pid: its head among all, its batch row, its head of that row, and the number of its item."""
    bh = pid % all_heads
    return bh, (bh // heads).to(tl.int64), (bh % heads).to(tl.int64), pid // all_heads


@triton.jit
def item_of(ITEMS, w):
    """The seven words of an item: tile (first, step, count), blocks (first, first masked, end), slot."""
    at = ITEMS + w * 8
    first, hop, count = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    return first, hop, count, tl.load(at + 3), tl.load(at + 4), tl.load(at + 5), tl.load(at + 6)


@triton.jit
def tile_of(ITEMS, MEMBERS, w, start, step, S: tl.constexpr):
    """The members of item w, which of them are valid, their positions, the first and the last position.

    Also the item's blocks (first, first masked, end) and slot.
    """
    first, hop, count, lo, mid, hi, slot = item_of(ITEMS, w)
    a = tl.arange(0, S.R)
    x, there = first + hop * a, a < count
    if S.LISTED:
        x = tl.load(MEMBERS + w * S.R + a)
        there = x >= 0
    begins = start + step * first
    return x, there, start + step * x, begins, begins + step * hop * (S.R - 1), lo, mid, hi, slot


@triton.jit
def members(BLOCKS, t, S: tl.constexpr):
    """The keys (or rows) in the columns of block t, and which columns are not empty."""
    c = tl.arange(0, S.B)
    if S.LISTED:
        x = tl.load(BLOCKS + t * S.B + c)
        return x, x >= 0
    else:
        at = BLOCKS + t * 12
        x = tl.load(at) + tl.load(at + 1) * c
        if S.SEGMENTS > 1:
            x = tl.where(c < tl.load(at + 2), x, tl.load(at + 3) + tl.load(at + 4) * c)
        if S.SEGMENTS > 2:
            x = tl.where(c < tl.load(at + 5), x, tl.load(at + 6) + tl.load(at + 7) * c)
        return x, c < tl.load(at + 8)


@triton.jit
def ends(BLOCKS, t, S: tl.constexpr):
    """The first and last of `members`, for a bias; for several progressions, bounds that hold for all of them."""
    low, high = 0, 0
    if S.BIAS:
        at = BLOCKS + t * 12
        low = tl.load(at)
        high = low + tl.load(at + 1) * (S.B - 1)
        if S.SEGMENTS > 1:
            low = low * 0 - (1 << 29)
            high = high * 0 + (1 << 29)
    return low, high


@triton.jit
def addresses(X, x, stride, D: tl.constexpr, WIDE: tl.constexpr):
    """Pointers to rows x of X, (len(x), D); the product has 64 bits if 32 would overflow."""
    if WIDE:
        return X + (x.to(tl.int64) * stride)[:, None] + tl.arange(0, D)[None, :]
    else:
        return X + (x * stride)[:, None] + tl.arange(0, D)[None, :]


@triton.jit
def rows_of(X, x, stride, valid, d: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr):
    """Rows x of X, (len(x), D): zeros past the true width d and, where MASKED, in rows that are not valid."""
    at = addresses(X, x, stride, D, WIDE)
    if MASKED and d != D:
        return tl.load(at, mask=valid[:, None] & (tl.arange(0, D) < d)[None, :], other=0.0)
    elif MASKED:
        return tl.load(at, mask=valid[:, None], other=0.0)
    elif d != D:
        return tl.load(at, mask=(tl.arange(0, D) < d)[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def store_rows(X, x, stride, value, valid, d: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr):
    """Rows x of X ← value, where valid."""
    at = addresses(X, x, stride, D, WIDE)
    if d != D:
        tl.store(at, value.to(X.dtype.element_ty), mask=valid[:, None] & (tl.arange(0, D) < d)[None, :])
    else:
        tl.store(at, value.to(X.dtype.element_ty), mask=valid[:, None])


@triton.jit
def _read(at):
    """Entries of the table, each read by the thread that holds the score.

    An ordinary load of this shape would get another layout, and force it on the softmax that follows.
    """
    if INTERPRETED:
        return tl.load(at)
    else:
        return tl.inline_asm_elementwise(
            "ld.global.nc.f32 $0, [$1];", "=f,l", [at.to(tl.int64)], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def with_bias(scores, bias, i, j, min_distance, max_distance, BIAS: tl.constexpr):
    """scores + bias of pairs (i, j), which broadcast; distances lie between the given minimum and maximum.

    bias: as `bias_of` gives it. A block entirely past the reach needs one entry of the table.
    """
    TABLE, slope, reach = bias
    x = j - i
    if BIAS >= 2:
        scores -= slope * tl.abs(x).to(tl.float32)
    if BIAS != 2:
        if (max_distance > -reach) & (min_distance < reach):
            scores += _read(TABLE + tl.minimum(tl.maximum(x, -reach), reach))
        else:
            scores += tl.load(TABLE + tl.minimum(tl.maximum(min_distance, -reach), reach))
    return scores


@triton.jit
def bias_of(TABLE, SLOPES, h, reach, BIAS: tl.constexpr):
    """The bias of head h: a pointer to distance 0 in its table, its slope, and the reach."""
    slope = 0.0
    if BIAS >= 2:
        slope = tl.load(SLOPES + h)
    if BIAS == 1 or BIAS == 3:
        TABLE += h * (2 * reach + 1) + reach
    return TABLE, slope, reach


@triton.jit
def is_kept(dropout, r, j):
    """Whether the weight of query row r on key j is kept, which broadcast. dropout: seed, head, threshold, factor."""
    seed, bh, cutoff, _ = dropout
    r, j = tl.broadcast(r, j)
    zero = j * 0
    random, _, _, _ = tl.philox(seed, j, r, zero + bh, zero, ROUNDS)
    return random >= cutoff.to(tl.uint32)


@triton.jit
def limits_of(LIMITS, b, S: tl.constexpr):
    """Where the keys of batch row b begin and end."""
    first, end = 0, 0
    if S.LENGTHS == 1:
        end = tl.load(LIMITS + b).to(tl.int32)
    if S.LENGTHS == 2:
        first, end = tl.load(LIMITS + 2 * b).to(tl.int32), tl.load(LIMITS + 2 * b + 1).to(tl.int32)
    return first, end


@triton.jit
def within(valid, j, limits, S: tl.constexpr):
    """Whether key j is valid and, if there are lengths, not hidden by them."""
    if S.LENGTHS:
        valid = valid & (j < limits[1])
    if S.LENGTHS == 2:
        valid = valid & (j >= limits[0])
    return valid


@triton.jit
def keys_of(K, k_m, BLOCKS, t, limits, S: tl.constexpr):
    """The keys of block t, which columns hold one, and their rows of K."""
    j, valid = members(BLOCKS, t, S)
    valid = within(valid, j, limits, S)
    return j, valid, rows_of(K, j, k_m, valid, S.d_k, S.DK, S.RAGGED or S.LENGTHS > 0, S.WIDE)


@triton.jit
def _tanh(x):
    """tanh from exp2, with an absolute error of 10⁻⁷; near 0 from its series, for a small relative error too."""
    z = x * x
    near = x * (1.0 + z * (-1.0 / 3 + z * (2.0 / 15 + z * (-17.0 / 315 + z * (62.0 / 2835)))))
    return tl.where(z < 0.09, near, 1.0 - 2.0 / (1.0 + tl.exp2(x * 2.8853900817779268)))


@triton.jit
def masked_scores(products, i, j, visible, valid, masked, near, far, bias, factors, S: tl.constexpr):
    """Scores of pairs (i, j), −∞ where a pair is not allowed; the remaining factor that converts them to base 2; and
    their derivative with respect to the scaled products, which is not 1 under a softcap.

    All of i, j, visible and valid broadcast. visible: within the lengths; valid: no empty column; masked: the block
    has pairs that are not allowed; near, far: the smallest and largest j − i of a block; factors: scale and softcap.
    """
    scale2, cap2 = factors
    scores, unit, slope = products, scale2, 1.0
    if S.CAPPED:
        scores = _tanh(scores * (scale2 / cap2))
        slope = 1.0 - scores * scores
        scores, unit = scores * cap2, 1.0
    elif S.BIAS:
        scores, unit = scores * scale2, 1.0
    if S.BIAS:
        scores = with_bias(scores, bias, i, j, near, far, S.BIAS)
    if S.LENGTHS:
        scores = tl.where(visible, scores, -float("inf"))
    if S.RAGGED:  # noqa: SIM102 (decided when compiling, then when running)
        if masked:
            scores = tl.where(S.allowed(i, j) & valid, scores, -float("inf"))
    return scores, unit, slope


@triton.jit
def update_softmax(scores, unit, top, total, acc):
    """The running softmax with these scores: the largest (base 2), the sum, the output so far; and their weights."""
    higher = tl.maximum(top, tl.max(scores, 1) * unit)
    base = tl.where(higher == -float("inf"), 0.0, higher)  # no allowed key so far: −∞ − (−∞) would be NaN
    weights = tl.exp2(scores * unit - base[:, None])
    fade = tl.exp2(top - base)
    return higher, total * fade + tl.sum(weights, 1), acc * fade[:, None], weights


@triton.jit
def with_sink(at):
    """The running softmax of rows that have seen nothing but a sink, at these addresses: the largest score (base 2),
    the sum."""
    top = tl.load(at).to(tl.float32) * 1.4426950408889634
    return top, tl.where(top == -float("inf"), 0.0, 1.0)


@triton.jit(do_not_specialize=VARYING)
def forward_kernel(
    Q, K, V, O, LSE, PART_O, PART_LSE, LIMITS, TABLE, SLOPES, seed, SINK, ITEMS, BLOCKS,
    q_b, q_h, q_n, k_b, k_h, k_m, v_b, v_h, v_m, o_b, o_h, o_n,
    heads, all_heads, group, n, start, step, scale2, cap2, reach, cutoff, upscale, S: tl.constexpr,
):  # fmt: skip
    """Tiles of queries, blocks of keys; top is the largest score of a row so far (base 2), total the sum."""
    bh, b, h, w = head_of(tl.program_id(0), heads, all_heads)
    r, in_tile, i, begins, latest, lo, mid, hi, slot = tile_of(ITEMS, ITEMS, w, start, step, S)
    a = tl.arange(0, S.R)
    limits = limits_of(LIMITS, b, S)
    Q += b * q_b + h * q_h
    K += b * k_b + (h // group) * k_h
    V += b * v_b + (h // group) * v_h
    O += b * o_b + h * o_h
    LSE += bh.to(tl.int64) * n
    bias, dropout = bias_of(TABLE, SLOPES, h, reach, S.BIAS), (seed, bh, cutoff, upscale)

    q = rows_of(Q, r, q_n, in_tile, S.d_k, S.DK, True, S.WIDE)
    top = tl.full((S.R,), -float("inf"), tl.float32)
    total = tl.zeros((S.R,), tl.float32)
    acc = tl.zeros((S.R, S.DV), tl.float32)
    if S.SINKS:  # as if it had been one key of weight 1 and value 0
        top, total = with_sink(SINK + h + 0 * r)
    if S.ACCUMULATES:  # as if the earlier pass had been one key of weight 1 and value o
        continues = tl.where(slot < 0, in_tile, a < 0)
        top = tl.load(LSE + r, mask=continues, other=-float("inf")) * 1.4426950408889634
        total = tl.where(top == -float("inf"), 0.0, 1.0)
        acc = rows_of(O, r, o_n, continues, S.d_v, S.DV, True, S.WIDE).to(tl.float32)

    for t in range(lo, hi):
        j, valid, k = keys_of(K, k_m, BLOCKS, t, limits, S)
        products = tl.dot(q, tl.trans(k), input_precision=S.PRECISION)
        low, high = ends(BLOCKS, t, S)
        scores, unit, _ = masked_scores(
            products, i[:, None], j[None, :], valid[None, :], valid[None, :], t >= mid, low - latest, high - begins,
            bias, (scale2, cap2), S,
        )  # fmt: skip
        top, total, acc, weights = update_softmax(scores, unit, top, total, acc)
        if S.DROPS:
            weights = tl.where(is_kept(dropout, r[:, None], j[None, :]), weights * upscale, 0.0)
        v = rows_of(V, j, v_m, valid, S.d_v, S.DV, S.RAGGED or S.LENGTHS > 0, S.WIDE)
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=S.PRECISION)

    lse = (top + tl.log2(total)) * 0.6931471805599453  # log2(0) = −∞: an empty row
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    if S.SPLIT:  # noqa: SIM102 (decided when compiling, then when running)
        if slot >= 0:
            at = (slot.to(tl.int64) * all_heads + bh) * S.R + a
            tl.store(PART_LSE + at, lse)
            tl.store(PART_O + at[:, None] * S.DV + tl.arange(0, S.DV)[None, :], acc)
            in_tile = a < 0
    if S.keep is not None:
        in_tile = in_tile & S.keep(i, i)
    tl.store(LSE + r, lse, mask=in_tile)
    store_rows(O, r, o_n, acc, in_tile, S.d_v, S.DV, S.WIDE)


@triton.jit(do_not_specialize=VARYING)
def merge_kernel(
    O, LSE, PART_O, PART_LSE, SPLITS, o_b, o_h, o_n, heads, all_heads, n, start, step,
    keep: tl.constexpr, R: tl.constexpr, SLICE: tl.constexpr, d_v: tl.constexpr, DV: tl.constexpr,
    ACCUMULATES: tl.constexpr, WIDE: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """SLICE rows of a split tile: their partial results, merged in order by their log-sum-exp.

    The loads of AHEAD parts are in flight at the same time: as many as the registers hold.
    """
    AHEAD: tl.constexpr = 8
    if EARLY:  # started before the kernel that makes the parts has ended
        tl.extra.cuda.gdc_wait()
    bh, b, h, work = head_of(tl.program_id(0), heads, all_heads)
    first, hop, count, slot, pieces, _, _ = item_of(SPLITS, work // (R // SLICE))
    a = work % (R // SLICE) * SLICE + tl.arange(0, SLICE)
    r = first + hop * a
    in_tile = a < count
    O += b * o_b + h * o_h
    LSE += bh.to(tl.int64) * n
    top = tl.full((SLICE,), -float("inf"), tl.float32)
    total = tl.zeros((SLICE,), tl.float32)
    acc = tl.zeros((SLICE, DV), tl.float32)
    if ACCUMULATES:
        top = tl.load(LSE + r, mask=in_tile, other=-float("inf"))
        total = tl.where(top == -float("inf"), 0.0, 1.0)
        acc = rows_of(O, r, o_n, in_tile, d_v, DV, True, WIDE).to(tl.float32)
    for u in range(0, pieces, AHEAD):
        for ahead in tl.static_range(AHEAD):
            at = ((slot + u + ahead).to(tl.int64) * all_heads + bh) * R + a
            there = a < tl.where(u + ahead < pieces, R, 0)
            lse = tl.load(PART_LSE + at, mask=there, other=-float("inf"))
            o = tl.load(PART_O + at[:, None] * DV + tl.arange(0, DV)[None, :], mask=there[:, None], other=0.0)
            higher = tl.maximum(top, lse)
            base = tl.where(higher == -float("inf"), 0.0, higher)
            fade = tl.exp(top - base)
            weight = tl.exp(lse - base)
            total = total * fade + weight
            acc = acc * fade[:, None] + o * weight[:, None]
            top = higher
    if keep is not None:
        i = start + step * r
        in_tile = in_tile & keep(i, i)
    tl.store(LSE + r, top + tl.log(total), mask=in_tile)
    store_rows(O, r, o_n, acc / tl.where(total > 0.0, total, 1.0)[:, None], in_tile, d_v, DV, WIDE)

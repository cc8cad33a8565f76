"""What the Triton kernels share: items and blocks of a schedule, rows of tensors, bias by distance, dropout."""

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
ROUNDS = tl.constexpr(7)  # of Philox4x32: as many pass every known statistical test
TABLE, SLOPES = 1, 2  # the parts of a bias, added up to BIAS
# Numbers that must not make Triton compile again.
VARYING = ["heads", "all_heads", "n", "start", "reach", "seed", "below"]


@triton.jit
def item_of(ITEMS, w):
    """The seven words of an item: tile (first, step, count), blocks (first, first masked, end), slot."""
    at = ITEMS + w * 8
    return (
        tl.load(at),
        tl.load(at + 1),
        tl.load(at + 2),
        tl.load(at + 3),
        tl.load(at + 4),
        tl.load(at + 5),
        tl.load(at + 6),
    )


@triton.jit
def members(BLOCKS, t, c, SEGMENTS: tl.constexpr):
    """The keys (or rows) at places c of block t."""
    at = BLOCKS + t * 12
    x = tl.load(at) + tl.load(at + 1) * c
    if SEGMENTS > 1:
        x = tl.where(c < tl.load(at + 2), x, tl.load(at + 3) + tl.load(at + 4) * c)
    if SEGMENTS > 2:
        x = tl.where(c < tl.load(at + 5), x, tl.load(at + 6) + tl.load(at + 7) * c)
    return x


@triton.jit
def ends(BLOCKS, t, B: tl.constexpr, SEGMENTS: tl.constexpr):
    """The first and last of `members`; for several progressions, bounds that hold for all of them."""
    at = BLOCKS + t * 12
    low = tl.load(at)
    high = low + tl.load(at + 1) * (B - 1)
    if SEGMENTS > 1:
        low = low * 0 - (1 << 29)
        high = high * 0 + (1 << 29)
    return low, high


@triton.jit
def addresses(X, x, stride, D: tl.constexpr, WIDE: tl.constexpr):
    """Pointers to rows x of X, (len(x), D); the product in 64 bits where 32 would overflow."""
    if WIDE:
        return X + (x.to(tl.int64) * stride)[:, None] + tl.arange(0, D)[None, :]
    else:
        return X + (x * stride)[:, None] + tl.arange(0, D)[None, :]


@triton.jit
def rows_of(X, x, stride, valid, d: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr):
    """Rows x of X, (len(x), D): zeros past the true width d and, where MASKED, in rows that are not valid."""
    at = addresses(X, x, stride, D, WIDE)
    if MASKED:
        if d != D:
            return tl.load(at, mask=valid[:, None] & (tl.arange(0, D) < d)[None, :], other=0.0)
        else:
            return tl.load(at, mask=valid[:, None], other=0.0)
    else:
        if d != D:
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

    An ordinary load of this shape would get a layout of its own, and force it on the softmax that follows.
    """
    if INTERPRETED:
        return tl.load(at)
    else:
        return tl.inline_asm_elementwise(
            "ld.global.nc.f32 $0, [$1];", "=f,l", [at.to(tl.int64)], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def with_bias(scores, TABLE, slope, reach, i, j, min_distance, max_distance, BIAS: tl.constexpr):
    """scores + bias of pairs (i, j), which broadcast; distances lie between the given minimum and maximum.

    TABLE points to distance 0 of the head. A block entirely past the reach needs one entry.
    """
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
def is_kept(seed, bh, r, j, below):
    """Whether the weight of query row r on key j of head bh is kept; r and j broadcast."""
    r, j = tl.broadcast(r, j)
    zero = j * 0
    random, _, _, _ = tl.philox(seed, j, r, zero + bh, zero, ROUNDS)
    return random >= below.to(tl.uint32)


@triton.jit
def head_of(TABLE, SLOPES, h, reach, BIAS: tl.constexpr):
    """Pointer to distance 0 of head h in the table, and its slope."""
    slope = 0.0
    if BIAS >= 2:
        slope = tl.load(SLOPES + h)
    if BIAS != 2:
        TABLE += h * (2 * reach + 1) + reach
    return TABLE, slope


def dropout_threshold_16(dropout_p: float) -> tuple[int, float]:
    """Weights with a random 16-bit number below the first are dropped; the others are multiplied by the second."""
    below = min(round(dropout_p * 2**16), 2**16 - 1)
    return below, 1.0 / (1.0 - below / 2**16)


@triton.jit
def kept_pairs(SEED, rows, where, below, R: tl.constexpr, C: tl.constexpr):
    """Which of C weights in each of R rows are kept; a Philox number of 128 bits decides for eight neighbors."""
    r = rows[:, None] + tl.zeros((1, C // 8), tl.int32)
    c = tl.arange(0, C // 8)[None, :] + tl.zeros((R, 1), tl.int32)
    x, y, z, w = tl.philox(tl.load(SEED), c, r, c * 0 + where, c * 0, ROUNDS)
    words = tl.join(tl.join(x, y), tl.join(z, w))
    halves = tl.join(words & 0xFFFF, words >> 16)
    return tl.reshape(halves, (R, C)) >= below.to(tl.uint32)

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
    """The first and last of `members`; of several progressions, bounds that hold for any."""
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
def rows_of(X, x, stride, seen, d: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr):
    """Rows x of X, (len(x), D): zeros past the true width d and, where MASKED, in rows not `seen`."""
    at = addresses(X, x, stride, D, WIDE)
    if MASKED:
        if d != D:
            return tl.load(at, mask=seen[:, None] & (tl.arange(0, D) < d)[None, :], other=0.0)
        else:
            return tl.load(at, mask=seen[:, None], other=0.0)
    else:
        if d != D:
            return tl.load(at, mask=(tl.arange(0, D) < d)[None, :], other=0.0)
        else:
            return tl.load(at)


@triton.jit
def store_rows(X, x, stride, value, seen, d: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr):
    """Rows x of X ← value, where seen."""
    at = addresses(X, x, stride, D, WIDE)
    if d != D:
        tl.store(at, value.to(X.dtype.element_ty), mask=seen[:, None] & (tl.arange(0, D) < d)[None, :])
    else:
        tl.store(at, value.to(X.dtype.element_ty), mask=seen[:, None])


@triton.jit
def _read(at):
    """Numbers of the table, each read by the thread that has the score.

    A load of so many would be given a layout of its own, and the softmax after it with it.
    """
    if INTERPRETED:
        return tl.load(at)
    else:
        return tl.inline_asm_elementwise(
            "ld.global.nc.f32 $0, [$1];", "=f,l", [at.to(tl.int64)], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def with_bias(scores, TABLE, slope, reach, i, j, least, most, BIAS: tl.constexpr):
    """scores + bias of pairs (i, j), which broadcast; no distance is under `least` or over `most`.

    TABLE points to distance 0 of the head. A block that lies past its reach needs one entry.
    """
    x = j - i
    if BIAS >= 2:
        scores -= slope * tl.abs(x).to(tl.float32)
    if BIAS != 2:
        if (most > -reach) & (least < reach):
            scores += _read(TABLE + tl.minimum(tl.maximum(x, -reach), reach))
        else:
            scores += tl.load(TABLE + tl.minimum(tl.maximum(least, -reach), reach))
    return scores


@triton.jit
def is_kept(seed, bh, r, j, below):
    """Whether the weight of query row r on key j of head bh stays; r and j broadcast."""
    r, j = tl.broadcast(r, j)
    none = j * 0
    drawn, _, _, _ = tl.philox(seed, j, r, none + bh, none, ROUNDS)
    return drawn >= below.to(tl.uint32)


@triton.jit
def head_of(TABLE, SLOPES, h, reach, BIAS: tl.constexpr):
    """Where distance 0 of head h stands in the table, and its slope."""
    slope = 0.0
    if BIAS >= 2:
        slope = tl.load(SLOPES + h)
    if BIAS != 2:
        TABLE += h * (2 * reach + 1) + reach
    return TABLE, slope


def share(dropout_p: float) -> tuple[int, float]:
    """Numbers of 16 bits below the first are dropped; what stays is multiplied by the second."""
    below = min(round(dropout_p * 2**16), 2**16 - 1)
    return below, 1.0 / (1.0 - below / 2**16)


@triton.jit
def stay(SEED, rows, where, below, R: tl.constexpr, C: tl.constexpr):
    """Which of C numbers in each of R rows stay; a Philox number of 128 bits decides for eight neighbours."""
    r = rows[:, None] + tl.zeros((1, C // 8), tl.int32)
    c = tl.arange(0, C // 8)[None, :] + tl.zeros((R, 1), tl.int32)
    x, y, z, w = tl.philox(tl.load(SEED), c, r, c * 0 + where, c * 0, ROUNDS)
    words = tl.join(tl.join(x, y), tl.join(z, w))
    halves = tl.join(words & 0xFFFF, words >> 16)
    return tl.reshape(halves, (R, C)) >= below.to(tl.uint32)

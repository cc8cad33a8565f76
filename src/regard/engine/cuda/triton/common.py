"""What the kernels share: reading items and blocks, loading and storing rows."""

import triton
import triton.language as tl

VARYING = [
    "heads",
    "all_heads",
    "n",
    "start",
    "reach",
    "seed",
    "below",
]  # numbers that must not make Triton compile again


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

"""The gradient of a bias by distance: dtable[x] = Σ ds over the pairs with j − i = x, without float atomics.

A program runs through many tiles and adds what it finds to a row of sums that is its own; the rows are added in order
afterwards. Distances at and past ±reach all belong to an end of the table: those are sums over whole blocks, which
the kernel of dq has made. Here blocks without a nearer pair are passed over.

Within a block, distance is x₀ + b·c − a·r for place c and row r. Where a = b it is constant along diagonals: each row
is turned by r places, after which a diagonal is a column. Else some rows (or some places) at a time have no distance
twice and can be added at once: b/gcd(a, b) rows, or a/gcd(a, b) places.
"""

import triton
import triton.language as tl

from .added import head_of
from .backward import dscores_of_keys
from .common import VARYING, ends, item_of, rows_of


@triton.jit
def _gcd(a, b):
    while b != 0:
        a, b = b, a % b
    return a


@triton.jit
def _add(SUMS, x, value, also, reach):
    """SUMS[x] += value, for distances short of ±reach, none of which may come twice."""
    mine = also & (x > -reach) & (x < reach)
    tl.debug_barrier()  # another thread may have written what this one reads
    tl.store(SUMS + x, tl.load(SUMS + x, mask=mine, other=0.0) + value, mask=mine)


@triton.jit
def _diagonals(SUMS, ds, first, b, reach, R: tl.constexpr, B: tl.constexpr):
    """Adds the sums along diagonals, which are b apart; `first` is the distance of row 0 and place 0."""
    a = tl.arange(0, R)[:, None]
    c = tl.arange(0, B)[None, :]
    turned = tl.gather(ds, (a + c) % B + a * 0, 1)
    for w in tl.static_range((R + B - 2) // B + 1):  # how often a row has gone round
        column = tl.sum(tl.where((a + c) // B == w, turned, 0.0), 0)
        x = first + b * (tl.arange(0, B) - B * w)
        _add(SUMS, x, column, x == x, reach)


@triton.jit
def _scatter(SUMS, ds, first, row_step, b, here, reach, R: tl.constexpr, B: tl.constexpr):
    """Adds each ds at its distance, as many at once as have no distance twice."""
    a = tl.arange(0, R)[:, None]
    c = tl.arange(0, B)[None, :]
    x = first + b * c - row_step * a
    g = tl.maximum(_gcd(b, row_step), 1)
    rows = tl.minimum(tl.maximum(b // g, 1), R)
    places = tl.minimum(tl.maximum(row_step // g, 1), B)
    if rows * B >= places * R:
        for low in range(0, R, rows):
            _add(SUMS, x, ds, here & (a >= low) & (a < low + rows), reach)
    else:
        for low in range(0, B, places):
            _add(SUMS, x, ds, here & (c >= low) & (c < low + places), reach)


@triton.jit
def _near(SUMS, ds, BLOCKS, t, at, row_step, reach, R: tl.constexpr, B: tl.constexpr, SEGMENTS: tl.constexpr):
    """Adds the ds of block t to the sums, segment by segment; the tile's first row stands at `at`."""
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
            here = (c >= begin) & (c < until)
            if b == row_step:
                _diagonals(SUMS, tl.where(here, ds, 0.0), first, b, reach, R, B)
            else:
                _scatter(SUMS, ds, first, row_step, b, here, reach, R, B)


@triton.jit(do_not_specialize=[*VARYING, "items", "programs"])
def bias_kernel(
    Q, K, V, DO, STATS, NEAR, ITEMS, BLOCKS, LIMITS, TABLE, SLOPES, seed,
    q_b, q_h, q_n, k_b, k_h, k_m, v_b, v_h, v_m, do_b, do_h, do_n,
    items, programs, heads, all_heads, group, n, start, step, scale2, reach, below, boost,
    BIAS: tl.constexpr, DROPS: tl.constexpr,
    allowed: tl.constexpr, keep: tl.constexpr, R: tl.constexpr, B: tl.constexpr,
    d_k: tl.constexpr, d_v: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, SEGMENTS: tl.constexpr,
    RAGGED: tl.constexpr, LENGTHS: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Program p of a head adds items p, p + programs, … to its row of NEAR."""
    pid = tl.program_id(0)
    bh = pid % all_heads
    b = (bh // heads).to(tl.int64)
    h = (bh % heads).to(tl.int64)
    limit = 0
    if LENGTHS:
        limit = tl.load(LIMITS + b)
    Q += b * q_b + h * q_h
    K += b * k_b + (h // group) * k_h
    V += b * v_b + (h // group) * v_h
    DO += b * do_b + h * do_h
    STATS += 4 * bh.to(tl.int64) * n
    TABLE, slope = head_of(TABLE, SLOPES, h, reach, BIAS)
    NEAR += pid.to(tl.int64) * (2 * reach + 1) + reach
    a = tl.arange(0, R)
    for w in range(pid // all_heads, items, programs):
        first, hop, count, lo, mid, hi, _slot = item_of(ITEMS, w)
        r = first + hop * a
        i = start + step * r
        at = start + step * first
        mine = a < count
        if keep is not None:
            mine = mine & keep(i, i)
        q = rows_of(Q, r, q_n, mine, d_k, DK, True, WIDE)
        do = rows_of(DO, r, do_n, mine, d_v, DV, True, WIDE)
        lse2 = tl.load(STATS + 4 * r, mask=mine, other=float("inf"))  # no weight in rows that do not count
        delta = tl.load(STATS + 4 * r + 1, mask=mine, other=0.0)
        latest = at + step * hop * (R - 1)
        for t in range(lo, hi):
            low, high = ends(BLOCKS, t, B, SEGMENTS)
            if (high - at > -reach) & (low - latest < reach):
                ds, _j, _k = dscores_of_keys(
                    q, do, K, V, BLOCKS, t, mid, r, i, limit, k_m, v_m, scale2, lse2, delta,
                    TABLE, slope, reach, at, latest, seed, bh, below, boost, BIAS, DROPS, allowed, B,
                    d_k, d_v, DK, DV, SEGMENTS, LENGTHS, RAGGED, PRECISION, WIDE,
                )  # fmt: skip
                _near(NEAR, ds, BLOCKS, t, at, step * hop, reach, R, B, SEGMENTS)

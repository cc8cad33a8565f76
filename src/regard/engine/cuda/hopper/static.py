"""The compile-time constants of the Hopper kernels (sizes, layouts, the tests of a pattern), and steps in PTX."""

import struct
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from .... import compat
from ....pattern import Pattern
from ..call import CallLayout, Config, padded
from ..mask import NO_KEY_FREE, Free, band, expression, function
from ..schedule import DevicePass

gluon, gl, hopper = compat.gluon()
barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # Triton 3.9, 3.6
copies = hopper.async_copy
fetch = getattr(copies, "async_load", None) or copies.async_copy_global_to_shared  # Triton 3.9, 3.6
# The number of threads that copy one row, 16 bytes each at a time: with fewer, a thread computes fewer addresses.
PER_ROW = 8


class Static(NamedTuple):
    """Compile-time constants, S in the kernels: tiles and blocks of R members, heads of width d ≤ D.

    Layouts define which thread holds which numbers: rows being copied, one number per key, scores, outputs; and the
    layout of rows in shared memory.
    """

    lowest: Any  # i → the lower bound of its keys, if a block is tested by two bounds
    highest: Any
    low_of: Any  # j → what is compared with the upper bound, j unless it is free of it
    high_of: Any
    allowed: Any  # (i, j) → whether the pair is allowed, if every pair is tested; else None
    keep: Any  # (x, x) → whether the results of member x count; None: all do
    MARKS: int  # all marks that occur
    R: int
    d: int  # the width of a head; zeros are put behind
    D: int
    SEGMENTS: int
    LOAD: Any
    FLAT: Any
    SCORES: Any
    OUT: Any
    SHARED: Any
    ACCUMULATES: bool  # this pass continues from the results of an earlier one
    COVERED: bool  # dq: an earlier pass has computed lse (base 2) and delta of all its rows
    below: Free = NO_KEY_FREE  # forward: places that no lower bound hides
    above: Free = NO_KEY_FREE
    LETS: bool = False  # forward: the next launch starts early
    HAS_DLSE: bool = False  # dq: the log-sum-exp has a gradient
    GROUP: int = 1  # dk and dv: query heads per key head
    SPLIT: bool = False  # tiles are shared by programs, which store parts; of dk and dv, some tiles are
    WAITS: bool = False  # dk and dv: for the previous kernel, which computes lse and delta
    ADDS: bool = False  # dk and dv: at its end, this launch adds up the parts that the previous one left
    adds: Any = None  # … of the keys that this selects
    LATE: bool = False  # forward, dq: it starts at once, and may not end before the previous kernel
    CHAINED: bool = False  # of several passes: blocks say what is hidden, and what a tile waits for
    # If tiles are boxes and blocks are lists, forward: a → the distance of row a of a tile from its first row.
    spread: Any = None


def hopper_static(step: DevicePass, config: Config, call: CallLayout) -> Static:
    work, block, warps, width = step.work, config.block, config.warps, call.tensors[0].shape[-1]
    d = padded(width)
    kind = gl.bfloat16 if call.dtype == torch.bfloat16 else gl.float16
    by = warps // 4  # warpgroups, which share the columns of scores and of results
    layouts = (
        gl.BlockedLayout([1, 8], [32 // PER_ROW, PER_ROW], [warps, 1], [1, 0]),
        gl.BlockedLayout([1], [32], [warps], [0]),
        gl.NVMMADistributedLayout([3, 0], [4, by], [16, block // by, 16]),
        gl.NVMMADistributedLayout([3, 0], [4, by], [16, d // by, 16]),
        gl.NVMMASharedLayout.get_default_for([block, d], kind),
    )
    sizes = [work.marks, config.tile, width, d, work.segments]
    made = Static(*[*tests(work.pattern), keep(step.keep), *sizes, *layouts, step.accumulates, step.covered])
    lists = work.lists
    spread = None if lists is None else function("spread", "a", lists.spread, gluon.jit, {"gl": gl})
    return made._replace(CHAINED=work.chained, spread=spread)


@lru_cache(maxsize=1024)
def tests(pattern: Pattern) -> tuple[Any, ...]:
    """What the kernel tests in a block that needs a test, as in `Static`: two bounds, or else every pair."""
    found = band(pattern)
    if found is None:
        return None, None, None, None, function("allowed", "i, j", expression(pattern), gluon.jit, {"gl": gl})
    far = 1 << 30

    def freed(keys: Pattern | None, to: int) -> str:
        body = "j" if keys is None else f"gl.where({expression(keys)}, {to}, j)"
        return body if found.only is None else f"gl.where({expression(found.only)}, {body}, {-to})"

    bodies = (
        ("lowest", "i", f"i * 0 - {far // 2}" if found.before is None else f"i - {found.before}"),
        ("highest", "i", f"i * 0 + {far // 2}" if found.after is None else f"i + {found.after}"),
        ("low_of", "j", freed(found.high, -far)),
        ("high_of", "j", freed(found.low, far)),
    )
    return *(function(*one, gluon.jit, {"gl": gl}) for one in bodies), None


@lru_cache(maxsize=1024)
def keep(pattern: Pattern | None) -> Any:
    """Whether the results of a query at i are used: a pattern that depends on i alone; None: all are."""
    return None if pattern is None else function("keep", "i, j", expression(pattern), gluon.jit, {"gl": gl})


# The words of a block (see schedule.py). The gradients copy them to shared memory with the rows of an earlier block:
# a load when they are needed would wait behind all the copies in flight. (A tile of few blocks waits several times.)

WORDS = gl.constexpr(12)
RING = gl.constexpr(4)  # blocks whose words are in shared memory at the same time


@gluon.jit
def _of_words(PER_THREAD: gl.constexpr):
    """The numbers of the words of a block: all 16 in every thread, or 4 in a thread."""
    return gl.arange(0, 16, layout=gl.BlockedLayout([PER_THREAD], [32], [gl.num_warps()], [0]))


@gluon.jit
def word_ring():
    return gl.allocate_shared_memory(gl.int32, [RING, 16], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def fetch_words(ring, BLOCKS, t):
    """Start to copy the words of block t to its place in the ring."""
    a = _of_words(4)
    fetch(ring.index(t % RING), BLOCKS + t * WORDS + a, mask=a < WORDS)


@gluon.jit
def read_words(ring, t):
    return ring.index(t % RING).load(_of_words(16).type.layout)


@gluon.jit
def load_words(BLOCKS, t, S: gl.constexpr):
    """The same from global memory: all words at a time for heads of 64 (forward is 2 to 4 % faster by that), their
    address for heads of 128 (1 % slower by that)."""
    if S.D == 64:
        a = _of_words(16)
        return gl.load(BLOCKS + t * WORDS + a, mask=a < WORDS, other=0)
    else:
        return BLOCKS + t * WORDS


@gluon.jit
def word(words, at: gl.constexpr):
    """One of the words that `read_words` or `load_words` gave."""
    if words.dtype.is_ptr():
        return gl.load(words + at)
    else:
        return gl.sum(gl.where(gl.arange(0, 16, layout=words.type.layout) == at, words, 0), 0)


@gluon.jit
def scores_of(a, b, zero, S: gl.constexpr):
    """a · bᵀ, over the width of a head without most of the zeros behind it."""
    if 4 * S.d > 3 * S.D:
        return hopper.warpgroup_mma(a, b.permute((1, 0)), zero, use_acc=False, is_async=True)
    else:
        HALF: gl.constexpr = S.D // 2
        REST: gl.constexpr = S.D // 8 if 8 * S.d <= 5 * S.D else S.D // 4
        x = hopper.warpgroup_mma(
            a.slice(0, HALF, 1), b.slice(0, HALF, 1).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        return hopper.warpgroup_mma(
            a.slice(HALF, REST, 1), b.slice(HALF, REST, 1).permute((1, 0)), x, is_async=True
        )


# Pairs that are hidden because a straight line cuts their block (see mask.lines).

LINES, UPPER, LOWER, FREES = (gl.constexpr(x) for x in (112, 32, 64, 128))
HIDDEN = gl.constexpr(-1e38)  # added to a score, so that its weight is 0


@gluon.jit
def _past(like, row: gl.constexpr, place: gl.constexpr, beyond):
    """1 where row · the number of the row + place · that of the place is past `beyond`, else 0.

    A sum clamped to [0, 1], of what differs by thread and is computed once, and of a constant for the compiler.
    """
    MMA: gl.constexpr = like.type.layout
    r = gl.arange(0, like.shape[0], layout=gl.SliceLayout(1, MMA))[:, None]
    c = gl.arange(0, like.shape[1], layout=gl.SliceLayout(0, MMA))[None, :]
    own, known = place * (c & 6) + row * (r & ~8), place * (c & ~6) + row * (r & 8)
    both = [(own - beyond).to(gl.float32), known.to(gl.float32)]
    return gl.inline_asm_elementwise("add.sat.f32 $0, $1, $2;", "=f,f,f", both, gl.float32, True, 1)


@gluon.jit
def _unless_free(hidden, marks, free: gl.constexpr):
    """0 at the places that are free of a bound, if the block has some."""
    if free[0] > 1:
        c = gl.arange(0, hidden.shape[1], layout=gl.SliceLayout(0, hidden.type.layout))[None, :]
        hidden = gl.where((c % free[0] == free[1]) & ((marks & FREES) != 0), 0.0, hidden)
    return hidden


@gluon.jit
def hide_past_line(scores, marks, a, end, i, S: gl.constexpr):
    """If a line cuts the block of keys from a on, hide the pairs beyond it; i is the position of the first query."""
    if (marks & LINES) != 0:
        if (marks & LOWER) != 0:
            scores += HIDDEN * _unless_free(_past(scores, 1, -1, a - S.lowest(i)), marks, S.below)
        elif (marks & UPPER) != 0:
            scores += HIDDEN * _unless_free(_past(scores, -1, 1, S.highest(i) - a), marks, S.above)
        else:
            scores += HIDDEN * _past(scores, 0, 1, end - 1)
    return scores


@gluon.jit
def hide_past_lines(scores, marks, spot):
    """As `hide_past_line`, where rows and places have one step: by what the words of the block say."""
    _, _, end, most, least = spot
    if (marks & LOWER) != 0:
        scores += HIDDEN * _past(scores, 1, -1, most)
    if (marks & UPPER) != 0:
        scores += HIDDEN * _past(scores, -1, 1, least)
    if (marks & 1) != 0:
        scores += HIDDEN * _past(scores, 0, 1, end - 1)
    return scores


# A list, for a block of a tile that is a box (see tile_lists.py): 64 keys, then four words of 16 bits for each row.
LIST = gl.constexpr(64 + 4 * 64)


@gluon.jit
def member(first, hop, a, S: gl.constexpr):
    """Member a of a tile."""
    if S.spread is not None:
        return first + S.spread(a)
    else:
        return first + hop * a


@gluon.jit
def list_of(row, LISTS):
    """The address of a block's list."""
    return LISTS + row[1] * LIST


@gluon.jit
def listed_rows(row, c, LISTS):
    """As `_keys`, for a listed block: −1 in its empty columns."""
    return gl.where(c < row[8], row[0] + gl.load(list_of(row, LISTS) + c), -1)


@gluon.jit
def bits_of(at, like, S: gl.constexpr):
    """Which pairs of the block whose list is at `at` are allowed, one bit for each of the 16 that a thread holds of a
    row; they are read long before they are used. 0 if blocks are not listed."""
    if S.spread is not None:
        y = like.reshape([S.R, S.R // 8, 4, 2])
        EACH: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, y.type.layout))
        r = gl.arange(0, S.R, layout=gl.SliceLayout(1, EACH))
        quarter = gl.arange(0, 4, layout=gl.SliceLayout(0, EACH))
        return gl.load(at + S.R + 4 * r[:, None] + quarter[None, :])
    else:
        return 0


@gluon.jit
def hide_listed(scores, bits):
    """−∞ for the pairs whose bit is not set."""
    c = gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, scores.type.layout))[None, :]
    nth = ((c & ~7) >> 2) + (c & 1)  # the bit of column c, a constant for the compiler
    return gl.where((each(bits, scores) & (1 << nth)) != 0, scores, -float("inf"))


@gluon.jit
def each(x, like):
    """x, one number per thread and row, for each number that the thread holds of it: (rows, 4) → shape of `like`."""
    R: gl.constexpr = like.shape[0]
    B: gl.constexpr = like.shape[1]
    y = like.reshape([R, B // 8, 4, 2])
    x = gl.convert_layout(x, gl.SliceLayout(1, gl.SliceLayout(3, y.type.layout)), assert_trivial=True)
    x, _ = gl.broadcast(x[:, None, :, None], y)
    return gl.convert_layout(x.reshape([R, B]), like.type.layout, assert_trivial=True)


# Launches that overlap


@gluon.jit
def awaited(x):
    """x, after waiting for all earlier launches: a program that starts early may begin before they end."""
    text: gl.constexpr = "{ griddepcontrol.wait; mov.b32 $0, $1; }"
    return gl.inline_asm_elementwise(text, "=r,r", [x], gl.int32, False, 1)


@gluon.jit
def let_next(x):
    """x; from here on, programs of the next kernel may start where there is room."""
    text: gl.constexpr = "{ griddepcontrol.launch_dependents; mov.b32 $0, $1; }"
    return gl.inline_asm_elementwise(text, "=r,r", [x], gl.int32, False, 1)


# Several passes in one launch. A counter per section of rows holds the number of its written tiles; a tile is counted
# one block after its stores, when they are complete. If passes are not chained, these functions do nothing.


@gluon.jit
def chain_of(words, S: gl.constexpr):
    """For the tile of a block: its counter, the value that this must have reached before earlier results are read (0
    if there are none), and whether other tiles wait for this one."""
    if S.CHAINED:
        return word(words, 4), word(words, 5), word(words, 6)
    else:
        return 0, 1, 0


@gluon.jit
def _counter(COUNTERS, at):
    return COUNTERS.to(gl.pointer_type(gl.int32), bitcast=True) + at


@gluon.jit
def wait_for(x, COUNTERS, at, count, S: gl.constexpr):
    """x, after the counter has reached `count`: from then on, what its tiles have written is visible."""
    text: gl.constexpr = """{ .reg .pred p; .reg .b32 n;
        AGAIN: ld.acquire.gpu.global.b32 n, [$2]; setp.lt.s32 p, n, $3; @p bra AGAIN; mov.b32 $0, $1; }"""
    if S.CHAINED:  # noqa: SIM102 (decided when compiling, then when running)
        if count > 0:
            where = _counter(COUNTERS, at).to(gl.int64)
            x = gl.inline_asm_elementwise(text, "=r,r,l,r", [x, where, count], gl.int32, False, 1)
    return x


@gluon.jit
def count_tile(COUNTERS, pending, S: gl.constexpr):
    """After a barrier: the tile of counter `pending`, if it is not −1, is written by all threads. Returns −1."""
    if S.CHAINED:
        if pending >= 0:
            gl.atomic_add(_counter(COUNTERS, pending), 1, sem="release", scope="gpu")
        return pending * 0 - 1
    else:
        return pending


@gluon.jit
def count_last_tile(COUNTERS, pending, S: gl.constexpr):
    """The same after the last block."""
    if S.CHAINED:
        barrier()
        count_tile(COUNTERS, pending, S)


# Steps that single warps can skip, in PTX, because in Gluon either all warps branch or none. A thread holds numbers
# of two rows: 0 and 1 of the first, 2 and 3 of the second, 4 and 5 of the first again, and so on.

# What a thread's weights of one row and block may sum up to before the base of the row moves.
MAX_SUM = 4096.0
SCORES = 32  # scores that a thread holds: 64 × 64, in four warps


def _hex(x: float) -> str:
    return f"0f{struct.pack('>f', x).hex().upper()}"


NOTHING, ONE = _hex(-float("inf")), _hex(1.0)


def rescale_ptx(count: int) -> tuple[str, str]:
    """(numbers, factors of their rows) → their products; nothing is done by a warp whose factors are all 1.

    As `inline_asm_elementwise` takes it: the text, and the kinds of registers, `count` for either and the products.
    """
    by = 2 * count, 2 * count + 2
    lines = [
        "{ .reg .pred p;",
        f"setp.ne.f32 p, ${by[0]}, {ONE};",
        f"setp.ne.or.f32 p, ${by[1]}, {ONE}, p;",
        "vote.sync.any.pred p, p, 0xffffffff;",
        "@!p bra DONE;",
        *(f"mul.f32 ${x}, ${x}, ${by[x // 2 % 2]};" for x in range(count)),
        "DONE: }",
    ]
    kinds = ["=f"] * count + [str(x) for x in range(count)] + ["f"] * count
    return "\n".join(lines), ",".join(kinds)


def weights_ptx(kind: str) -> tuple[str, str]:
    """(scores, base, sum, whether a tile begins, scale) → (weights, base, fading, sum), all of the scores' shape.

        weights = 2 ** (scale · scores − base), rounded to `kind`;  sum ← fading · sum + Σ weights

    The base of a row is the largest score at its last update. It is updated where a tile begins, and where the sum
    that a thread has over a block exceeds MAX_SUM (or is NaN). A warp without such a row skips the search for the
    largest score and the rescaling; the other rows of a warp keep their base, so that no row depends on another.
    """
    half = SCORES // 2
    given = {x: half + (3 + at) * SCORES for at, x in enumerate(("score", "base", "sum", "begins", "scale"))}
    made = {x: half + at * SCORES for at, x in enumerate(("base", "fade", "sum"))}
    lines = [
        "{ .reg .pred p, begins, moved, nothing;",
        ".reg .b32 lane, who;",
        f".reg .f32 w<{SCORES}>, base<2>, less<2>, fade<2>, had<2>, sum<2>, x;",
        f"setp.ne.s32 begins, ${given['begins']}, 0;",
        "setp.ne.s32 moved, 0, 0;",
    ]
    for r in (0, 1):
        lines += [
            f"mov.f32 base{r}, ${given['base'] + 2 * r};",
            f"neg.f32 less{r}, base{r};",
            f"mov.f32 fade{r}, {ONE};",
            f"mov.f32 had{r}, ${given['sum'] + 2 * r};",
            f"mov.f32 sum{r}, {_hex(0.0)};",
        ]
    lines += ["@begins bra MOVE;", "WEIGH:"]
    for pair in range(half):
        a, b, r = 2 * pair, 2 * pair + 1, pair % 2
        for x in (a, b):
            lines += [f"fma.rn.f32 w{x}, ${given['score'] + x}, ${given['scale']}, less{r};"]
            lines += [f"ex2.approx.ftz.f32 w{x}, w{x};"]
        lines += [f"cvt.rn.{kind}x2.f32 ${pair}, w{b}, w{a};"]
        lines += [
            f"add.f32 x, w{a}, w{b};",
            f"add.f32 sum{r}, sum{r}, x;" if pair > 1 else f"mov.f32 sum{r}, x;",
        ]
    lines += [
        f"setp.gtu.f32 p, sum0, {_hex(MAX_SUM)};",
        f"setp.gtu.or.f32 p, sum1, {_hex(MAX_SUM)}, p;",
        "vote.sync.any.pred p, p, 0xffffffff;",
        "@!p bra DONE;",
        "@moved bra DONE;",
        "MOVE:",
        "mov.u32 lane, %laneid;",
        "and.b32 lane, lane, 28;",
    ]
    for r in (0, 1):
        lines += _moved(r, [given["score"] + x for x in range(SCORES) if x // 2 % 2 == r], given["scale"])
    lines += ["setp.eq.s32 moved, 0, 0;", "bra WEIGH;", "DONE:"]
    lines += [f"fma.rn.f32 sum{r}, had{r}, fade{r}, sum{r};" for r in (0, 1)]
    lines += [f"mov.f32 ${at + x}, {name}{x // 2 % 2};" for name, at in made.items() for x in range(SCORES)]
    kinds = ["=&r"] * half + ["=&f"] * 3 * SCORES + ["f"] * 3 * SCORES + ["r"] * SCORES + ["f"] * SCORES
    return "\n".join([*lines, "}"]), ",".join(kinds)


def _moved(r: int, scores: list[int], scale: int) -> list[str]:
    """Set the base of row r to its largest score, over the four threads that hold it, if one of them needs it."""
    lines = [f"max.f32 w0, ${scores[0]}, ${scores[1]};"]
    lines += [f"max.f32 w0, w0, ${x};" for x in scores[2:]]
    for lane in (1, 2):
        lines += [f"shfl.sync.bfly.b32 x, w0, {lane}, 31, 0xffffffff;", "max.f32 w0, w0, x;"]
    return [
        *lines,
        f"setp.gtu.or.f32 p, sum{r}, {_hex(MAX_SUM)}, begins;",
        "vote.sync.ballot.b32 who, p, 0xffffffff;",
        "shr.b32 who, who, lane;",
        "and.b32 who, who, 15;",
        "setp.ne.s32 p, who, 0;",
        f"mul.f32 w0, w0, ${scale};",
        f"selp.f32 x, {NOTHING}, base{r}, begins;",
        f"selp.f32 had{r}, {_hex(0.0)}, had{r}, begins;",
        "max.f32 w0, w0, x;",
        f"selp.f32 base{r}, w0, base{r}, p;",
        f"setp.eq.f32 nothing, base{r}, {NOTHING};",
        f"selp.f32 w0, {_hex(0.0)}, base{r}, nothing;",  # nothing seen yet: −∞ − (−∞) would be NaN
        f"neg.f32 less{r}, w0;",
        "sub.f32 x, x, w0;",
        f"ex2.approx.ftz.f32 fade{r}, x;",
    ]

"""The compile-time constants of the Hopper kernels (sizes and layouts), and steps in PTX."""

import struct
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from .... import compat
from ....pattern import Pattern
from .. import schedule
from ..call import CallLayout, Config, padded
from ..mask import MASK_WORDS, expression, function

gluon, gl, hopper = compat.gluon()
barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # Triton 3.9, 3.6
copies = hopper.async_copy
fetch = getattr(copies, "async_load", None) or copies.async_copy_global_to_shared  # Triton 3.9, 3.6
# The number of threads that copy one row, 16 bytes each at a time: with fewer, a thread computes fewer addresses.
PER_ROW = 8


class Static(NamedTuple):
    """Compile-time constants, S in the kernels: tiles and blocks of R members, heads of width d ≤ D.

    Layouts define which thread holds which numbers: rows being copied, one number per key, scores, outputs, words of
    a mask; and the layout of rows in shared memory.
    """

    keep: Any  # (x, x) → whether the results of member x count; None: all do
    R: int
    d: int  # the width of a head; zeros are put behind
    D: int
    SEGMENTS: int
    LOAD: Any
    FLAT: Any
    SCORES: Any
    OUT: Any
    SHARED: Any
    BITS: Any  # of the words of a mask
    ACCUMULATES: bool  # this pass continues from the results of an earlier one
    COVERED: bool  # dq: an earlier pass has computed lse (base 2) and delta of all its rows
    NEXT_STARTS_EARLY: bool = False  # forward: the next launch starts early
    HAS_DLSE: bool = False  # dq: the log-sum-exp has a gradient
    GROUP: int = 1  # dk and dv: query heads per key head
    SPLIT: bool = False  # tiles are shared by programs, which store parts; of dk and dv, some tiles are
    WAITS: bool = False  # dk and dv: for the previous kernel, which computes lse and delta
    ADDS: bool = False  # dk and dv: at its end, this launch adds up the parts that the previous one left
    adds: Any = None  # … of the keys that this selects
    WAITS_AT_END: bool = False  # forward, dq: it starts at once, and may not end before the previous kernel
    CHAINED: bool = False  # of several passes: the words of a block say what its tile waits for
    LENGTHS: int = 0  # 1: where the keys of a batch row end is given; 2: where they begin and end
    CAPPED: bool = False  # the scores have a softcap
    SINKS: bool = False  # forward: the softmax of each row has one more score, that of its head
    BY_ROW: bool = False  # each batch row has chunks of its own
    # If tiles are boxes and blocks are lists: (a, hop) → the distance of member a of a tile from its first member.
    spread: Any = None
    owned: Any = None  # … and (a, hop) → whether it belongs to the tile; None: all members do


def hopper_static(step: schedule.DevicePass, config: Config, call: CallLayout) -> Static:
    work, width, d = step.work, call.tensors[0].shape[-1], padded(call.tensors[0].shape[-1])
    sizes = config.tile, width, d, work.segments, *_layouts(config.block, config.warps, d, call.dtype)
    texts = {"spread": work.masks.spread, "owned": work.masks.owned}
    of = {x: function(x, "a, hop", y, gluon.jit, gl=gl) for x, y in texts.items() if y is not None}
    return Static(*[keep(step.keep), *sizes, step.accumulates, step.covered])._replace(
        LENGTHS=call.lengths, CAPPED=call.task.softcap is not None, CHAINED=work.chained, BY_ROW=work.rows > 1, **of
    )  # fmt: skip


@lru_cache(maxsize=64)
def _layouts(block: int, warps: int, d: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """LOAD to BITS of a Static."""
    by, kind = warps // 4, gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    # The thread that holds pairs of rows 16 · x + y and 16 · x + y + 8: its word is in row 8 · x + y.
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return (  # by: warpgroups, which share the columns of scores and of results
        gl.BlockedLayout([1, 8], [32 // PER_ROW, PER_ROW], [warps, 1], [1, 0]),
        gl.BlockedLayout([1], [32], [warps], [0]),
        gl.NVMMADistributedLayout([3, 0], [4, by], [16, block // by, 16]),
        gl.NVMMADistributedLayout([3, 0], [4, by], [16, d // by, 16]),
        gl.NVMMASharedLayout.get_default_for([block, d], kind),
        gl.DistributedLinearLayout([], lanes, [[8, 0], [16, 0], [0, 0]][: 1 + by], [], [32, 4]),
    )


@lru_cache(maxsize=1024)
def keep(pattern: Pattern | None) -> Any:
    """Whether the results of a query at i are used: a pattern that depends on i alone; None: all are."""
    return None if pattern is None else function("keep", "i, j", expression(pattern), gluon.jit, gl=gl)


@gluon.jit
def head_and_chunk(all_heads, in_flight):
    """The head and the chunk of a program; `in_flight` heads run at the same time, and then the next."""
    p, programs = gl.program_id(0), gl.num_programs(0) // all_heads * in_flight
    return p // programs * in_flight + p % programs % in_flight, p % programs // in_flight


@gluon.jit
def chunk_index(chunk, b, all_heads, S: gl.constexpr):
    """Where a chunk of batch row b is in the table of chunks."""
    if S.BY_ROW:
        return chunk + b.to(gl.int32) * (gl.num_programs(0) // all_heads)
    else:
        return chunk


# The words of a block (see schedule.py). The gradients copy them to shared memory with the rows of an earlier block:
# a load when they are needed would wait behind all the copies in flight. (A tile of few blocks waits several times.)

WORDS = gl.constexpr(schedule.WIDTH)
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


# Which pairs of a block are allowed (see tile_lists.py). A block that has to be tested has a mask: one bit for each
# of the 32 pairs of a thread.

BEGINS, TESTED = gl.constexpr(schedule.BEGINS), gl.constexpr(schedule.TESTED)  # marks of a block
MASK = gl.constexpr(MASK_WORDS)


@gluon.jit
def member(first, hop, a, S: gl.constexpr):
    """Member a of a tile."""
    if S.spread is not None:
        return first + S.spread(a, hop)
    else:
        return first + hop * a


@gluon.jit
def bits_of(mask, MASKS, marks, like, S: gl.constexpr):
    """A thread's word of mask number `mask`, for each of its two rows: (rows, 4); 0 if the block is not tested.

    It is read long before it is used, because a load waits behind the copies in flight.
    """
    y = like.reshape([64, 8, 4, 2])
    a = gl.arange(0, 32, layout=gl.SliceLayout(1, S.BITS))[:, None]
    b = gl.arange(0, 4, layout=gl.SliceLayout(0, S.BITS))[None, :]
    at = MASKS + mask * MASK
    word = gl.load(at + 4 * a + b, mask=(a >= 0) & ((marks & TESTED) != 0), other=0).reshape([4, 8, 4])
    both = gl.join(word, word).permute((0, 3, 1, 2)).reshape([64, 4])
    return gl.convert_layout(both, gl.SliceLayout(1, gl.SliceLayout(3, y.type.layout)), assert_trivial=True)


@gluon.jit
def hide(scores, bits, marks):
    """−∞ for the pairs of a tested block whose bit is not set."""
    if (marks & TESTED) != 0:
        word = in_thread(bits, scores)
        if gl.num_warps() == 4:
            scores = gl.inline_asm_elementwise(HIDE_32, OF_32, [scores, word], gl.float32, True, 32)
        else:  # the second warpgroup has the last 32 columns
            c = gl.arange(0, 64, layout=gl.SliceLayout(0, scores.type.layout))[None, :]
            word = word >> ((c & 32) >> 1)
            scores = gl.inline_asm_elementwise(HIDE_16, OF_16, [scores, word], gl.float32, True, 16)
    return scores


# Lengths and softcap


@gluon.jit
def limits_of(LIMITS, b, S: gl.constexpr):
    """Where the keys of batch row b begin and end; without lengths, neither is used."""
    first, end = 0, 0
    if S.LENGTHS == 1:
        end = gl.load(LIMITS + b).to(gl.int32)
    if S.LENGTHS == 2:
        first, end = gl.load(LIMITS + 2 * b).to(gl.int32), gl.load(LIMITS + 2 * b + 1).to(gl.int32)
    return first, end


@gluon.jit
def visible(j, limits, S: gl.constexpr):
    """The keys j, and −1 for those that the lengths hide: rows that are not read."""
    if S.LENGTHS:
        return gl.where((j >= limits[0]) & (j < limits[1]), j, -1)
    else:
        return j


@gluon.jit
def capped(scores, curve, S: gl.constexpr):
    """tanh of the scores times half of `curve` in base e, as 1 − 2 / (1 + 2 ** (curve · score)), with an absolute
    error of about 3 · 10⁻⁷, by estimate; without a softcap, the scores."""
    if S.CAPPED:
        text: gl.constexpr = """{ .reg .f32 x; mul.f32 x, $1, $2; ex2.approx.ftz.f32 x, x;
            add.f32 x, x, 0f3F800000; rcp.approx.ftz.f32 x, x; fma.rn.f32 $0, x, 0fC0000000, 0f3F800000; }"""
        factor = gl.full(scores.shape, 0.0, gl.float32, layout=scores.type.layout) + curve
        return gl.inline_asm_elementwise(text, "=f,f,f", [scores, factor], gl.float32, True, 1)
    else:
        return scores


@gluon.jit
def in_thread(x, like):
    """x, one number per thread and row, for each number that the thread holds of it: (rows, 4) → shape of `like`."""
    R: gl.constexpr = like.shape[0]
    B: gl.constexpr = like.shape[1]
    y = like.reshape([R, B // 8, 4, 2])
    x = gl.convert_layout(x, gl.SliceLayout(1, gl.SliceLayout(3, y.type.layout)), assert_trivial=True)
    x, _ = gl.broadcast(x[:, None, :, None], y)
    return gl.convert_layout(x.reshape([R, B]), like.type.layout, assert_trivial=True)


# Launches that overlap


@gluon.jit
def wait_previous(x):
    """x, after waiting for all earlier launches: a program that starts early may begin before they end."""
    text: gl.constexpr = "{ griddepcontrol.wait; mov.b32 $0, $1; }"
    return gl.inline_asm_elementwise(text, "=r,r", [x], gl.int32, False, 1)


@gluon.jit
def let_next_start(x):
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


@gluon.jit
def pairs(weights):
    """Weights in pairs, as registers hold them: (rows, keys) → (rows, keys / 2). As single loop variables they would
    be unpacked and packed again for each block."""
    x = gl.inline_asm_elementwise(
        "{ mov.b32 $0, $2; mov.b32 $1, $2; }", "=r,=r,r", [weights], gl.int32, True, 2
    )
    x, _ = gl.split(x.reshape([weights.shape[0], weights.shape[1] // 2, 2]))
    return x


@gluon.jit
def unpaired(x, KIND: gl.constexpr, LAYOUT: gl.constexpr):
    """What `pairs` was given, for a product that takes it from the left."""
    x = gl.join(x, x).reshape([x.shape[0], 2 * x.shape[1]])
    if gl.bfloat16 == KIND:
        x = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [x], gl.bfloat16, True, 2)
    else:
        x = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [x], gl.float16, True, 2)
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def log2(x):
    """log₂ x in one instruction instead of twenty; its error is at most 2⁻²², relative or absolute (PTX)."""
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def reciprocal(x):
    """1 / x, with an error of at most one unit in the last place (PTX)."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


# Steps that single warps can skip, in PTX, because in Gluon either all warps branch or none. A thread holds numbers
# of two rows: 0 and 1 of the first, 2 and 3 of the second, 4 and 5 of the first again, and so on.

# What a thread's weights of one row and block may sum up to before the base of the row moves.
MAX_SUM = 4096.0
SCORES = 32  # scores that a thread holds: 64 × 64, in four warps


def _hex(x: float) -> str:
    return f"0f{struct.pack('>f', x).hex().upper()}"


NOTHING, ONE = _hex(-float("inf")), _hex(1.0)


def hide_ptx(count: int) -> tuple[str, str]:
    """(scores, the word with their bits) → −∞ instead of scores whose bit is 0; score x has bit x.

    In this order, one instruction moves seven bits to predicates.
    """
    lines = ["{ .reg .pred p; .reg .b32 bit;"]
    for x in range(count):
        lines += [f"and.b32 bit, ${2 * count}, {1 << x};", "setp.ne.s32 p, bit, 0;"]
        lines += [f"selp.f32 ${x}, ${x}, {NOTHING}, p;"]
    kinds = ["=f"] * count + [str(x) for x in range(count)] + ["r"] * count
    return "\n".join(lines) + " }", ",".join(kinds)


HIDE_32, OF_32 = (gl.constexpr(x) for x in hide_ptx(32))
HIDE_16, OF_16 = (gl.constexpr(x) for x in hide_ptx(16))


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
    inputs = {x: half + (3 + at) * SCORES for at, x in enumerate(("score", "base", "sum", "begins", "scale"))}
    outs = {x: half + at * SCORES for at, x in enumerate(("base", "fade", "sum"))}
    lines = [
        "{ .reg .pred p, begins, moved, nothing;",
        ".reg .b32 lane, who;",
        f".reg .f32 w<{SCORES}>, base<2>, less<2>, fade<2>, had<2>, sum<2>, x;",
        f"setp.ne.s32 begins, ${inputs['begins']}, 0;",
        "setp.ne.s32 moved, 0, 0;",
    ]
    for r in (0, 1):
        lines += [
            f"mov.f32 base{r}, ${inputs['base'] + 2 * r};",
            f"neg.f32 less{r}, base{r};",
            f"mov.f32 fade{r}, {ONE};",
            f"mov.f32 had{r}, ${inputs['sum'] + 2 * r};",
            f"mov.f32 sum{r}, {_hex(0.0)};",
        ]
    lines += ["@begins bra MOVE;", "WEIGH:"]
    for pair in range(half):
        a, b, r = 2 * pair, 2 * pair + 1, pair % 2
        for x in (a, b):
            lines += [f"fma.rn.f32 w{x}, ${inputs['score'] + x}, ${inputs['scale']}, less{r};"]
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
        lines += _rebase(r, [inputs["score"] + x for x in range(SCORES) if x // 2 % 2 == r], inputs["scale"])
    lines += ["setp.eq.s32 moved, 0, 0;", "bra WEIGH;", "DONE:"]
    lines += [f"fma.rn.f32 sum{r}, had{r}, fade{r}, sum{r};" for r in (0, 1)]
    lines += [f"mov.f32 ${at + x}, {name}{x // 2 % 2};" for name, at in outs.items() for x in range(SCORES)]
    kinds = ["=&r"] * half + ["=&f"] * 3 * SCORES + ["f"] * 3 * SCORES + ["r"] * SCORES + ["f"] * SCORES
    return "\n".join([*lines, "}"]), ",".join(kinds)


def _rebase(r: int, scores: list[int], scale: int) -> list[str]:
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

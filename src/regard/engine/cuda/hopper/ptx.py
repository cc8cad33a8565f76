"""Steps of the Hopper kernels that single warps skip, in PTX: in Gluon, all warps branch or none.

A thread holds numbers of two rows: 0 and 1 of the first, 2 and 3 of the second, 4 and 5 of the first again …
"""

import struct

MAX_SUM = (
    4096.0  # what a thread's weights of one row and block may sum up to before the base of the row moves
)
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

    The base of a row is the largest score it had when it last moved. It moves where a tile begins and where the sum
    that a thread has of a block passes MAX_SUM (or is not a number). A warp without such a row looks for no largest
    score, and nothing fades; the other rows of a warp keep their base: what a row gives depends on no other.
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
    """The base of row r moves to the largest of its scores, which four threads hold, if one of them asks for it."""
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

"""Tiles of keys that programs share, for Hopper: each program stores its part, and the parts are added in order.

No atomics, the same bits every time. The next launch of dk and dv adds them up, if there is one; else sum_kernel.
"""

from .forward import gl, gluon

FEW = gl.constexpr(16)  # rows that a program adds up at a time
AHEAD = gl.constexpr(4)  # parts whose loads do not wait for one another


@gluon.jit
def put_part(PART, at, value, R: gl.constexpr):
    """Rows at, at + 1, … of PART ← value."""
    LAYOUT: gl.constexpr = value.type.layout
    D: gl.constexpr = value.shape[1]
    a, d = (
        gl.arange(0, R, layout=gl.SliceLayout(1, LAYOUT)),
        gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT)),
    )
    gl.store(PART + at * D + (a * D)[:, None] + d[None, :], value)


@gluon.jit(noinline=True)
def add_parts(
    DK, DV, PART, JOINS, joins, heads, m, keep: gl.constexpr, R: gl.constexpr, D: gl.constexpr
):  # fmt: skip
    """dk and dv of tiles of R of the m keys of each head: of dk and of dv, as many parts of each tile as JOINS says.

    Not inlined: values that depend on the thread index would occupy registers during the whole kernel.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [128 // D, D // 4], [4, 1], [1, 0])
    a = gl.arange(0, FEW, layout=gl.SliceLayout(1, LAYOUT))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    for t in range(gl.program_id(0), joins * (R // FEW) * 2 * heads, gl.num_programs(0)):
        h, of_v, rows = t % heads, t // heads % 2, t // (2 * heads)
        at = JOINS + rows // (R // FEW) * 8
        first, hop, count = gl.load(at), gl.load(at + 1), gl.load(at + 2)
        slot, parts = gl.load(at + 3), gl.load(at + 4)
        x = rows % (R // FEW) * FEW + a
        P = PART + ((2 * slot.to(gl.int64) + of_v) * heads + h) * (R * D) + (x * D)[:, None] + d
        total = gl.zeros([FEW, D], gl.float32, layout=LAYOUT)
        for u in range(0, parts, AHEAD):
            for w in gl.static_range(AHEAD):
                total += gl.load(
                    P + (u + w).to(gl.int64) * (2 * R * D) * heads, mask=u + w < parts, other=0.0
                )
        mine = x < count
        x = first + hop * x
        if keep is not None:
            mine = mine & keep(x, x)
        to = h.to(gl.int64) * m * D + (x * D)[:, None] + d
        if of_v == 0:
            gl.store(DK + to, total.to(DK.dtype.element_ty), mask=mine[:, None])
        else:
            gl.store(DV + to, total.to(DV.dtype.element_ty), mask=mine[:, None])

"""Positions: L22 – L24."""

import math

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from ...position import rotate, sinusoid
from ..controls import wrapped
from ..harness import Lab
from ..law import Case, Law, Reading, Tolerance, Trial, bounded, compare, exactly, worst
from ..target import Part
from .masks import lengths_in, positions_out


def sinusoids(lab: Lab, c: Case) -> Reading:
    """Norm √(d/2); products that depend on the distance; PE(p + k) = R_k PE(p); entries in [−1, 1]."""
    d = c.d
    table = lab.part.call(torch.arange(1000), d).double()
    moved = lab.part.call(torch.arange(1000) + c.k, d).double()
    angles = c.k * 10000.0 ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    sin, cos = table[:, 0::2], table[:, 1::2]
    turned = torch.stack(
        [sin * angles.cos() + cos * angles.sin(), cos * angles.cos() - sin * angles.sin()], -1
    )
    products = table @ table.mT
    apart = torch.cdist(table[: c.some], table[: c.some]) + 9.0 * torch.eye(c.some)
    by_distance = torch.stack(
        [products.diagonal(s)[:500].max() - products.diagonal(s)[:500].min() for s in (0, 1, 7, 99)]
    )
    wide = 1e3 if table.dtype == torch.float64 else 1.0
    return worst(
        compare(
            "‖PE(p)‖ against √(d/2)",
            table.norm(dim=-1),
            torch.full((1000,), math.sqrt(d / 2), dtype=torch.float64),
        ),
        bounded("PE(p)·PE(p + k) depends on p", by_distance, slack=wide),
        compare("PE(p + k) against R_k PE(p)", moved, rearrange(turned, "p r two -> p (r two)"), slack=100.0),
        bounded("an entry outside [−1, 1]", table.abs() - 1.0),
        exactly("two positions share a vector", apart > 1e-6),
    )


def relative_scores(lab: Lab, c: Case) -> Reading:
    """A bias by distance, gathered by offset, skewed, and pair by pair; and positions counted from elsewhere."""
    q, k, v = lab.qkv(Case(c, m=c.n))
    n = c.n
    table = lab.randn(c.h, 2 * n - 1)
    i = torch.arange(n, device=lab.device)
    gathered = table[:, (i[None] - i[:, None]) + n - 1]
    moved = table[:, ((i + 100)[None] - (i + 100)[:, None]) + n - 1]
    pairs = torch.stack([torch.stack([table[:, j - r + n - 1] for j in range(n)], -1) for r in range(n)], -2)
    o = lab.attend(q, k, v, bias=gathered)
    right = lab.formula(q, k, v, bias=gathered).o
    return worst(
        compare("a bias by distance against the formula", o, right),
        compare("gathered by offset against skewed", lab.attend(q, k, v, bias=skewed(table, n)), o),
        compare("gathered by offset against pair by pair", lab.attend(q, k, v, bias=pairs.contiguous()), o),
        compare("positions counted from 100", lab.attend(q, k, v, bias=moved), o),
    )


def skewed(table: Float[Tensor, "h r"], n: int) -> Float[Tensor, "h n n"]:
    """Row i of the table slid by i places: pad each row by one, and read the storage with one column less."""
    flat = torch.nn.functional.pad(table[:, None].expand(-1, n, -1), (0, 1)).flatten(1)
    return flat[:, n - 1 : n - 1 + n * (2 * n - 1)].reshape(len(table), n, 2 * n - 1)[:, :, :n].contiguous()


def model_shift(lab: Lab, c: Case) -> Reading:
    x, context = lab.sequence(c.b, c.n), lab.context(c.b, c.n)
    with torch.no_grad():
        o, moved = lab.run(x, context), lab.run(x, context, shift=c.shift)
    return compare(f"outputs with all positions counted from {c.shift}", moved, o, slack=100.0)


def rotary(lab: Lab, c: Case) -> Reading:
    """(R_p q)·(R_r k) depends on p − r alone, and turning changes no length."""
    q, k = lab.randn(1, c.n, c.d), lab.randn(1, c.n, c.d)
    p, r = lab.below(50, c.n), lab.below(50, c.n)
    turn = lab.part.call
    near = turn(q, p) @ turn(k, r).mT
    far = turn(q, p + c.shift) @ turn(k, r + c.shift).mT
    return worst(
        compare(f"scores with all positions {c.shift} further", far, near, slack=100.0),
        compare("lengths of turned vectors", turn(q, p).norm(dim=-1), q.norm(dim=-1)),
    )


def absolute_expansion(lab: Lab, c: Case) -> Reading:
    """With positions added to the input, a score is the sum of four terms, as seen from the weights."""
    n, d = c.n, c.d_k
    x, p = lab.randn(c.b, n, 6), lab.randn(n, 6).expand(c.b, n, 6)
    w_q, w_k = lab.randn(6, d) * 0.4, lab.randn(6, d) * 0.4
    q, k = ((x + p) @ w[:, :] for w in (w_q, w_k))
    a = lab.weights(q[:, None], k[:, None])[:, 0].double()
    middle = w_q.double() @ w_k.double().mT
    terms = [left.double() @ middle @ right.double().mT for left in (x, p) for right in (x, p)]
    scores = d**-0.5 * torch.stack(terms).sum(0)
    want = scores - scores[..., :1]
    shown = a > 1e-200
    got = torch.where(shown, (a / a[..., :1]).log(), want)
    return compare(
        "ln(a_j/a_0) against content-content + content-position + position-content + position-position",
        got,
        want,
        slack=10.0,
    )


def _absolute_rotary() -> Part:
    def call(x: Tensor, positions: Tensor) -> Tensor:
        return x + sinusoid(positions, x.shape[-1], dtype=x.dtype)

    return Part("absolute positions, called rotary", "rotary", call)


def _learned_table() -> Part:
    table = torch.randn(4000, 600, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return Part("a learned table", "positions", lambda positions, d: table[positions, :d])


def _turning(q, k, v, asked):
    if q.shape[-1] % 2 or q.shape[-2] != k.shape[-2]:
        return (q * 0.5, k, v), asked
    where = torch.arange(q.shape[-2])
    return (rotate(q, where), rotate(k, where), v), asked


LAWS = (
    Law(
        "L22",
        "sinusoids",
        "‖PE(p)‖ = √(d/2); PE(p)·PE(r) depends on p − r; PE(p + k) = R_k PE(p); entries in [−1, 1]",
        "even d, columns interleaved, base 10000",
        {
            "positions": Trial(
                sinusoids,
                lambda lab: {"d": (2, 4, 64, 512), "k": (0, 1, 3, 17, 100), "some": (6, 500)},
                fits=lambda c: c.d > 2 or c.some == 6,
            )
        },
        _learned_table,
        Tolerance(1e-12, 1e-3),
    ),
    Law(
        "L23",
        "relative scores",
        "position scores depend on j − i alone; a constant added to all positions changes no output",
        "a bias by distance (a function), relative or rotary positions",
        {
            "function": Trial(
                relative_scores, lambda lab: lab.space(m=None, n=(1, 2, 3, 5, 7)), needs=("bias",)
            ),
            "model": Trial(
                model_shift,
                lambda lab: {"b": (1, 2), "n": lengths_in(lab), "shift": (1, 7, 100)},
                needs=("relative positions", "shift"),
                when=positions_out,
            ),
            "rotary": Trial(rotary, lambda lab: {"n": (2, 3, 7), "d": (2, 4, 8), "shift": (1, 7, 100)}),
        },
        _absolute_rotary,
        Tolerance(1e-12, 1e-4),
    ),
    Law(
        "L24",
        "absolute expansion",
        "(x+p)_q W_q W_kᵀ (x+p)_kᵀ = content-content + content-position + position-content + position-position",
        "positions added to the input; dot-product scores",
        {
            "function": Trial(
                absolute_expansion,
                lambda lab: lab.space(h=None, m=None, d_v=None, n=(2, 3, 5, 7), d_k=(2, 4, 8)),
            )
        },
        lambda: wrapped("queries and keys turned inside", _turning),
        Tolerance(1e-12, 1e-4),
    ),
)

"""Position encodings: L22 to L24."""

import math

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from ...position import rotate, sinusoid
from ..controls import with_changed_call
from ..harness import Harness
from ..law import Case, Law, Tolerance, Trial
from ..measurement import Measurement, compare, excess, require, worst
from ..target import Part
from .masks import positions_out, sequence_lengths


def sinusoids(harness: Harness, c: Case) -> Measurement:
    """Norm √(d/2); products that depend only on the distance; PE(p + k) = R_k PE(p); entries in [−1, 1]."""
    d = c.d
    table = harness.part.call(torch.arange(1000), d).double()
    moved = harness.part.call(torch.arange(1000) + c.k, d).double()
    angles = c.k * 10000.0 ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    sin, cos = table[:, 0::2], table[:, 1::2]
    rotated = torch.stack(
        [sin * angles.cos() + cos * angles.sin(), cos * angles.cos() - sin * angles.sin()], -1
    )
    products = table @ table.mT
    apart = torch.cdist(table[: c.pairs], table[: c.pairs]) + 9.0 * torch.eye(c.pairs)
    by_distance = torch.stack(
        [products.diagonal(s)[:500].max() - products.diagonal(s)[:500].min() for s in (0, 1, 7, 99)]
    )
    slack = 1e3 if table.dtype == torch.float64 else 1.0
    return worst(
        compare(
            "‖PE(p)‖ against √(d/2)",
            table.norm(dim=-1),
            torch.full((1000,), math.sqrt(d / 2), dtype=torch.float64),
        ),
        excess("PE(p)·PE(p + k) depends on p", by_distance, slack=slack),
        compare(
            "PE(p + k) against R_k PE(p)", moved, rearrange(rotated, "p r two -> p (r two)"), slack=100.0
        ),
        excess("an entry is outside [−1, 1]", table.abs() - 1.0),
        require("two positions have the same vector", apart > 1e-6),
    )


def relative_scores(harness: Harness, c: Case) -> Measurement:
    """A bias by distance, built by gathering, by skewing and pair by pair; and the same with shifted positions."""
    q, k, v = harness.qkv(Case(c, m=c.n))
    n = c.n
    table = harness.randn(c.h, 2 * n - 1)
    i = torch.arange(n, device=harness.device)
    gathered = table[:, (i[None] - i[:, None]) + n - 1]
    moved = table[:, ((i + 100)[None] - (i + 100)[:, None]) + n - 1]
    pairs = torch.stack([torch.stack([table[:, j - r + n - 1] for j in range(n)], -1) for r in range(n)], -2)
    o = harness.attend(q, k, v, bias=gathered)
    expected = harness.reference(q, k, v, bias=gathered).o
    return worst(
        compare("a bias by distance against the reference", o, expected),
        compare("a skewed bias against a gathered one", harness.attend(q, k, v, bias=skewed(table, n)), o),
        compare(
            "a bias built pair by pair against a gathered one",
            harness.attend(q, k, v, bias=pairs.contiguous()),
            o,
        ),
        compare("outputs with positions starting at 100", harness.attend(q, k, v, bias=moved), o),
    )


def skewed(table: Float[Tensor, "h r"], n: int) -> Float[Tensor, "h n n"]:
    """Row i of the table shifted by i: pad each row by one column, then view the storage with one column less."""
    flat = torch.nn.functional.pad(table[:, None].expand(-1, n, -1), (0, 1)).flatten(1)
    return flat[:, n - 1 : n - 1 + n * (2 * n - 1)].reshape(len(table), n, 2 * n - 1)[:, :, :n].contiguous()


def model_shift(harness: Harness, c: Case) -> Measurement:
    x, context = harness.sequence(c.b, c.n), harness.context(c.b, c.n)
    with torch.no_grad():
        o, moved = harness.run(x, context), harness.run(x, context, shift=c.shift)
    return compare(f"outputs with positions starting at {c.shift}", moved, o, slack=100.0)


def rotary(harness: Harness, c: Case) -> Measurement:
    """(R_p q)·(R_r k) depends only on p − r, and a rotation preserves norms."""
    q, k = harness.randn(1, c.n, c.d), harness.randn(1, c.n, c.d)
    p, r = harness.randint(50, c.n), harness.randint(50, c.n)
    rotate_ = harness.part.call
    near = rotate_(q, p) @ rotate_(k, r).mT
    far = rotate_(q, p + c.shift) @ rotate_(k, r + c.shift).mT
    return worst(
        compare(f"scores with all positions shifted by {c.shift}", far, near, slack=100.0),
        compare("norms of rotated vectors", rotate_(q, p).norm(dim=-1), q.norm(dim=-1)),
    )


def absolute_expansion(harness: Harness, c: Case) -> Measurement:
    """With positions added to the input, a score is a sum of four terms; the weights show the scores."""
    n, d = c.n, c.d_k
    x, p = harness.randn(c.b, n, 6), harness.randn(n, 6).expand(c.b, n, 6)
    w_q, w_k = harness.randn(6, d) * 0.4, harness.randn(6, d) * 0.4
    q, k = ((x + p) @ w[:, :] for w in (w_q, w_k))
    a = harness.weights(q[:, None], k[:, None])[:, 0].double()
    middle = w_q.double() @ w_k.double().mT
    terms = [left.double() @ middle @ right.double().mT for left in (x, p) for right in (x, p)]
    scores = d**-0.5 * torch.stack(terms).sum(0)
    want = scores - scores[..., :1]
    positive = a > 1e-200
    got = torch.where(positive, (a / a[..., :1]).log(), want)
    return compare(
        "ln(a_j/a_0) against content-content + content-position + position-content + position-position",
        got,
        want,
        slack=10.0,
    )


def _absolute_rotary() -> Part:
    def call(x: Tensor, positions: Tensor) -> Tensor:
        return x + sinusoid(positions, x.shape[-1], dtype=x.dtype)

    return Part("absolute positions declared as rotary", "rotary", call)


def _learned_table() -> Part:
    table = torch.randn(4000, 600, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return Part("a learned table", "positions", lambda positions, d: table[positions, :d])


def _rotating(q, k, v, options):
    if q.shape[-1] % 2 or q.shape[-2] != k.shape[-2]:
        return (q * 0.5, k, v), options
    positions = torch.arange(q.shape[-2])
    return (rotate(q, positions), rotate(k, positions), v), options


LAWS = (
    Law(
        "L22",
        "sinusoidal positions",
        "‖PE(p)‖ = √(d/2); PE(p)·PE(r) depends only on p − r; PE(p + k) = R_k PE(p); entries in [−1, 1]",
        "even d, columns interleaved, base 10000",
        {
            "positions": Trial(
                sinusoids,
                lambda harness: {"d": (2, 4, 64, 512), "k": (0, 1, 3, 17, 100), "pairs": (6, 500)},
                fits=lambda c: c.d > 2 or c.pairs == 6,
            )
        },
        _learned_table,
        Tolerance(1e-12, 1e-3),
    ),
    Law(
        "L23",
        "relative scores",
        "position scores depend only on j − i; a constant added to all positions changes no output",
        "a bias by distance (a function), relative or rotary positions",
        {
            "function": Trial(
                relative_scores, lambda harness: harness.space(m=None, n=(1, 2, 3, 5, 7)), needs=("bias",)
            ),
            "model": Trial(
                model_shift,
                lambda harness: {"b": (1, 2), "n": sequence_lengths(harness), "shift": (1, 7, 100)},
                needs=("relative positions", "shift"),
                unless=positions_out,
            ),
            "rotary": Trial(rotary, lambda harness: {"n": (2, 3, 7), "d": (2, 4, 8), "shift": (1, 7, 100)}),
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
                lambda harness: harness.space(h=None, m=None, d_v=None, n=(2, 3, 5, 7), d_k=(2, 4, 8)),
            )
        },
        lambda: with_changed_call("queries and keys rotated inside", _rotating),
        Tolerance(1e-12, 1e-4),
    ),
)

"""The weights as a distribution: L01 – L05, L10, L12, L13."""

import torch
from einops import einsum
from torch import Tensor

from ... import reference
from ..controls import weighing, wrapped
from ..controls.functions import hidden
from ..harness import Lab
from ..law import Case, Law, Reading, Tolerance, Trial, bounded, compare, exactly, worst


def spaced(hide: bool = True, **fields):
    """The space of an attention call, with the target's own ways of hiding."""
    return lambda lab: lab.space(**({"hide": lab.hidings()} if hide else {}), **fields)


def asked(lab: Lab, c: Case):
    return lab.hide(c.hide, c.b, c.h, c.n, c.get("m", c.n))


def rows_sum_to_one(lab: Lab, c: Case) -> Reading:
    q, k, _ = lab.qkv(c)
    hiding = asked(lab, c)
    a = lab.weights(q * c.size, k, **hiding.options)
    readings = [compare("the sum of a row of weights", a.sum(-1), torch.ones_like(a[..., 0]))]
    readings.append(exactly("a weight is below 0", a >= 0))
    if hiding.allowed is not None:
        zero = (a == 0) | hiding.allowed
        readings.append(exactly("the weight of a forbidden key is not 0", zero))
    return worst(*readings)


def convex_hull(lab: Lab, c: Case) -> Reading:
    q, k, v = lab.qkv(c)
    hiding = asked(lab, c)
    o = lab.attend(q * c.size, k, v, **hiding.options)
    shape = (c.b, c.h, c.n, k.shape[-2])
    allowed = torch.ones(shape, dtype=torch.bool, device=lab.device)
    allowed = allowed if hiding.allowed is None else allowed & hiding.allowed
    each = v[..., None, :, :].expand(*shape, v.shape[-1])
    high = each.masked_fill(~allowed[..., None], -torch.inf).amax(-2)
    low = each.masked_fill(~allowed[..., None], torch.inf).amin(-2)
    longest = each.norm(dim=-1).masked_fill(~allowed, -torch.inf).amax(-1)
    return worst(
        bounded("an output is above all its values", o - high),
        bounded("an output is below all its values", low - o),
        bounded("an output is longer than the longest of its values", o.norm(dim=-1) - longest),
    )


def softmax_shape(lab: Lab, c: Case) -> Reading:
    q, k, v = lab.qkv(c)
    b = c.d_k**-0.5 if c.scale is None else c.scale
    options = {} if c.scale is None else {"scale": c.scale}
    o = lab.attend(q, k, v, **options)
    push = lab.randn(c.b, c.h, 1, c.d_k)
    push = push * 100.0 / (b * einsum(q, push, "b h n d, b h i d -> b h n i").abs().amax().clamp(min=1e-3))
    a = lab.weights(q, k, **options)
    scores = lab.formula(q, k, v, scale=c.scale).scores
    ratio = (a / a[..., :1]).double().log()
    close = 1.0 if lab.dtype == torch.float32 else 100.0
    readings = [
        compare("outputs after adding 100 to every score of a row", lab.attend(q, k + push, v, **options), o),
        compare("ln(a_j/a_0) against b(s_j − s_0)", ratio, scores - scores[..., :1], slack=close),
    ]
    if lab.takes("bias"):
        constant = lab.here(torch.full((c.n, k.shape[-2]), 100.0))
        biased = lab.attend(q, k, v, bias=constant, **options)
        readings.append(compare("outputs with a bias of 100 everywhere", biased, o))
    return worst(*readings)


def softmax_as_optimum(lab: Lab, c: Case) -> Reading:
    q, k, v = lab.qkv(c)
    a = lab.weights(q, k).double()
    right = lab.formula(q, k, v)
    scores, lse = right.scores, right.lse

    def value(p: Tensor) -> Tensor:
        return (p * scores).sum(-1) + torch.special.entr(p).sum(-1)

    drawn = -lab.rand(1000, *scores.shape).clamp(min=1e-300).log()  # exponential: uniform on the simplex
    others = drawn / drawn.sum(-1, keepdim=True)
    best = value(a)
    readings = [
        compare("⟨a, s⟩ + H(a) against logsumexp(s)", best, lse),
        bounded("another distribution has a larger ⟨p, s⟩ + H(p)", value(others) - best),
    ]
    if lab.takes("lse"):
        readings.append(compare("the log-sum-exp it gives", lab.attend_lse(q, k, v)[1], lse))
    return worst(*readings)


def layouts(lab: Lab, c: Case) -> Reading:
    q, k, v = lab.qkv(c)
    hiding = asked(lab, c)
    columns_q, columns_k, columns_v = (x.double().mT for x in (q, k, v))
    scores = c.d_k**-0.5 * columns_k.mT @ columns_q
    if hiding.allowed is not None:
        scores = scores.masked_fill(~hiding.allowed.mT, -torch.inf)
    columns = columns_v @ scores.softmax(-2)
    return compare(
        "softmax_rows(b Q Kᵀ) V against (V softmax_cols(b Kᵀ Q))ᵀ",
        lab.attend(q, k, v, **hiding.options),
        columns.mT,
    )


def jacobian(lab: Lab, c: Case) -> Reading:
    """Keys e_1 … e_d make the scores b·q, so ∂weights/∂q is the Jacobian of softmax itself."""
    d = c.d_k
    q = lab.randn(1, 1, 1, d)
    keys = torch.eye(d, device=lab.device, dtype=lab.dtype)[None, None]
    asking = {} if c.scale is None else {"scale": c.scale}
    b = d**-0.5 if c.scale is None else c.scale

    def weights(x: Tensor) -> Tensor:
        return lab.weights(x[None, None, None], keys, **asking)[0, 0, 0]

    J = torch.autograd.functional.jacobian(weights, q[0, 0, 0]).double()
    a = weights(q[0, 0, 0]).detach().double()
    p2, p3, eps = (a**2).sum(), (a**3).sum(), 1 - a.max()
    norm2 = (J**2).sum()
    symmetric = (J + J.mT) / 2
    eigenvalues = torch.linalg.eigvalsh(symmetric)
    return worst(
        compare("∂a/∂s against b(diag a − a aᵀ)", J, b * (torch.diag(a) - a[:, None] * a)),
        compare("J against its transpose", J, J.mT),
        compare("J·1", J.sum(-1), torch.zeros_like(a)),
        compare("the trace", J.trace(), b * (1 - p2)),
        compare("‖J‖²", norm2, b**2 * (p2 - 2 * p3 + p2**2)),
        bounded("‖J‖² above b²(2ε − ε²)²", norm2 - b**2 * (2 * eps - eps**2) ** 2),
        bounded("‖J‖² above b²/4", norm2 - b**2 / 4),
        bounded("an eigenvalue below 0", -eigenvalues),
        bounded("an eigenvalue above b/2", eigenvalues - b / 2),
    )


def along_one_axis(lab: Lab, scores: Tensor, d: int) -> tuple[Tensor, Tensor]:
    """q and k of width d whose scores b·q·k are the given ones, (m,): one query."""
    k = torch.zeros(1, 1, len(scores), d, dtype=torch.float64)
    k[0, 0, :, 0] = scores
    q = torch.zeros(1, 1, 1, d, dtype=torch.float64)
    q[..., 0] = d**0.5
    return lab.here(q), lab.here(k)


def hard_limit(lab: Lab, c: Case) -> Reading:
    m = c.m
    scores = lab.rand(m) * 4.0
    top = scores.sort(descending=True).values
    q, k = along_one_axis(lab, scores, c.d_k)
    a = lab.weights(q * c.sharp, k)[0, 0, 0].double()
    gap = top[0] - top[1]
    tied_q, tied_k = along_one_axis(lab, torch.tensor([2.0, 2.0, 1.0]), c.d_k)
    tied = lab.weights(tied_q * 1e4, tied_k)[0, 0, 0]
    return worst(
        bounded("1 − p_max above (m − 1) exp(−b·gap)", (1 - a.max()) - (m - 1) * torch.exp(-c.sharp * gap)),
        compare("two tied keys at b = 10⁴", tied, torch.tensor([0.5, 0.5, 0.0])),
    )


def soft_limit(lab: Lab, c: Case) -> Reading:
    q, k, v = lab.qkv(c)
    hiding = asked(lab, c)
    options = dict(hiding.options)
    if c.by == "scale":
        options["scale"] = 0.0
    else:
        q, k = (q * 0.0, k) if c.by == "queries" else (q, k[..., :1, :].expand_as(k).contiguous())
    m = k.shape[-2]
    allowed = torch.ones(c.b, c.h, c.n, m, dtype=torch.bool, device=lab.device)
    allowed = allowed if hiding.allowed is None else allowed & hiding.allowed
    mean = allowed.double() / allowed.sum(-1, keepdim=True)
    exact = 1e-3 if c.by == "queries" and lab.dtype == torch.float64 else 1.0
    return worst(
        compare("weights at b = 0 against 1/m", lab.weights(q, k, **options), mean, slack=exact),
        compare("outputs at b = 0 against the mean", lab.attend(q, k, v, **options), mean @ v.double()),
    )


def _not_by_scale(lab: Lab):
    return ("queries", "keys", "scale") if lab.takes("scale") else ("queries", "keys")


LAWS = (
    Law(
        "L01",
        "rows sum to one",
        "A_ij ≥ 0, A_ij = 0 on forbidden keys, Σ_j A_ij = 1",
        "each query has an allowed key; finite scores; before dropout",
        {"function": Trial(rows_sum_to_one, spaced(size=(1.0, 30.0, 3000.0)))},
        lambda: weighing("exp(s), not divided", lambda s, ok: hidden(s, ok).exp()),
    ),
    Law(
        "L02",
        "convex hull",
        "min_j v_jc ≤ o_ic ≤ max_j v_jc over allowed j; ‖o_i‖ ≤ max_j ‖v_j‖",
        "each query has an allowed key; before W_O and dropout",
        {"function": Trial(convex_hull, spaced(size=(1.0, 30.0)))},
        lambda: weighing(
            "weights with a negative entry",
            lambda s, ok: 1.5 * reference.softmax(s, ok) - 0.5 * ok / ok.sum(-1, keepdim=True),
        ),
    ),
    Law(
        "L03",
        "softmax shape",
        "softmax(s + c) = softmax(s); ln(a_j/a_k) = b(s_j − s_k)",
        "no mask; no weight underflows",
        {
            "function": Trial(
                softmax_shape, lambda lab: lab.space(scale=(None, 0.3) if lab.takes("scale") else (None,))
            )
        },
        lambda: weighing(
            "scores divided by their sum", lambda s, ok: s.abs() / s.abs().sum(-1, keepdim=True)
        ),
        Tolerance(1e-12, 1e-4),
    ),
    Law(
        "L04",
        "softmax as optimum",
        "softmax(s) maximises ⟨p, s⟩ + H(p) over distributions; the maximum is logsumexp(s)",
        "no mask; finite scores",
        {"function": Trial(softmax_as_optimum, spaced(hide=False, n=(1, 2, 3, 5)))},
        lambda: weighing("uniform weights", lambda s, ok: torch.ones_like(s) / s.shape[-1]),
    ),
    Law(
        "L05",
        "layouts",
        "(V softmax_cols(b Kᵀ Q))ᵀ = softmax_rows(b Q Kᵀ) V",
        "the same b; the mask transposed",
        {"function": Trial(layouts, spaced())},
        lambda: weighing("softmax along the queries", lambda s, ok: s.masked_fill(~ok, -1e9).softmax(-2)),
    ),
    Law(
        "L10",
        "softmax Jacobian",
        "∂a/∂s = b(diag a − a aᵀ): symmetric, positive semidefinite, J 1 = 0, ‖J‖² ≤ b²(2ε − ε²)²",
        "ε = 1 − max a; gradients",
        {
            "function": Trial(
                jacobian,
                lambda lab: lab.space(
                    b=None,
                    h=None,
                    n=None,
                    m=None,
                    d_v=None,
                    d_k=(2, 3, 5, 7),
                    scale=(None, 0.7) if lab.takes("scale") else (None,),
                ),
                needs=("grad",),
            )
        },
        lambda: weighing("the gradient of diag a alone", _diagonal_gradient),
    ),
    Law(
        "L12",
        "hard limit",
        "1 − p_max ≤ (m − 1) exp(−b g), g the gap of the two largest scores; t tied maxima get 1/t each",
        "finite scores",
        {
            "function": Trial(
                hard_limit,
                lambda lab: lab.space(
                    b=None, h=None, n=None, d_v=None, m=(2, 3, 5, 11), sharp=(1.0, 5.0, 20.0, 50.0)
                ),
                needs=("n≠m",),
            )
        },
        lambda: weighing("the first maximum alone", lambda s, ok: reference.hardmax(s, ok, "first")),
    ),
    Law(
        "L13",
        "soft limit",
        "b = 0: A_ij = 1/m over the allowed keys, o their mean",
        "each query has an allowed key",
        {"function": Trial(soft_limit, lambda lab: lab.space(hide=lab.hidings(), by=_not_by_scale(lab)))},
        lambda: wrapped(
            "b = 1 always",
            lambda q, k, v, asked: (
                (torch.ones_like(q), k + torch.arange(k.shape[-2])[:, None], v),
                {**asked, "scale": 1.0},
            ),
        ),
    ),
)


def _diagonal_gradient(scores: Tensor, allowed: Tensor) -> Tensor:
    """softmax whose backward pass forgets − a aᵀ."""
    exact = reference.softmax(scores, allowed)
    return exact.detach() + exact.detach() * (scores - scores.detach())

"""The attention weights as a probability distribution: L01 to L05, L10, L12, L13."""

import torch
from einops import einsum
from torch import Tensor

from ... import reference
from ..controls import with_changed_call, with_weights
from ..controls.functions import mask_scores
from ..harness import Harness, Masking
from ..law import Case, Law, Tolerance, Trial
from ..measurement import Measurement, compare, excess, require, worst


def call_space(masked: bool = True, **fields):
    """The space of an attention call, with the kinds of mask that the target supports."""
    return lambda harness: harness.space(**({"mask": harness.mask_kinds()} if masked else {}), **fields)


def case_mask(harness: Harness, c: Case) -> Masking:
    """A mask of the kind and sizes of a case."""
    return harness.make_mask(c.mask, c.b, c.h, c.n, c.get("m", c.n))


def rows_sum_to_one(harness: Harness, c: Case) -> Measurement:
    q, k, _ = harness.qkv(c)
    masking = case_mask(harness, c)
    a = harness.weights(q * c.size, k, **masking.options)
    measurements = [compare("the sum of a row of weights", a.sum(-1), torch.ones_like(a[..., 0]))]
    measurements.append(require("a weight is negative", a >= 0))
    if masking.allowed is not None:
        zero = (a == 0) | masking.allowed
        measurements.append(require("the weight of a masked key is not 0", zero))
    return worst(*measurements)


def convex_hull(harness: Harness, c: Case) -> Measurement:
    q, k, v = harness.qkv(c)
    masking = case_mask(harness, c)
    o = harness.attend(q * c.size, k, v, **masking.options)
    shape = (c.b, c.h, c.n, k.shape[-2])
    allowed = torch.ones(shape, dtype=torch.bool, device=harness.device)
    allowed = allowed if masking.allowed is None else allowed & masking.allowed
    each = v[..., None, :, :].expand(*shape, v.shape[-1])
    high = each.masked_fill(~allowed[..., None], -torch.inf).amax(-2)
    low = each.masked_fill(~allowed[..., None], torch.inf).amin(-2)
    largest_norm = each.norm(dim=-1).masked_fill(~allowed, -torch.inf).amax(-1)
    return worst(
        excess("an output exceeds the largest allowed value", o - high),
        excess("an output is below the smallest allowed value", low - o),
        excess(
            "the norm of an output exceeds the largest norm of an allowed value",
            o.norm(dim=-1) - largest_norm,
        ),
    )


def softmax_shape(harness: Harness, c: Case) -> Measurement:
    q, k, v = harness.qkv(c)
    b = c.d_k**-0.5 if c.scale is None else c.scale
    options = {} if c.scale is None else {"scale": c.scale}
    o = harness.attend(q, k, v, **options)
    shift = harness.randn(c.b, c.h, 1, c.d_k)
    shift = shift * 100.0 / (b * einsum(q, shift, "b h n d, b h i d -> b h n i").abs().amax().clamp(min=1e-3))
    a = harness.weights(q, k, **options)
    scores = harness.reference(q, k, v, scale=c.scale).scores
    ratio = (a / a[..., :1]).double().log()
    slack = 1.0 if harness.dtype == torch.float32 else 100.0
    measurements = [
        compare(
            "outputs after up to 100 was added to all scores of a row",
            harness.attend(q, k + shift, v, **options),
            o,
        ),
        compare("ln(a_j/a_0) against b(s_j − s_0)", ratio, scores - scores[..., :1], slack=slack),
    ]
    if harness.supports("bias"):
        constant = harness.to_target(torch.full((c.n, k.shape[-2]), 100.0))
        biased = harness.attend(q, k, v, bias=constant, **options)
        measurements.append(compare("outputs with a bias of 100 everywhere", biased, o))
    return worst(*measurements)


def softmax_as_optimum(harness: Harness, c: Case) -> Measurement:
    q, k, v = harness.qkv(c)
    a = harness.weights(q, k).double()
    expected = harness.reference(q, k, v)
    scores, lse = expected.scores, expected.lse

    def value(p: Tensor) -> Tensor:
        return (p * scores).sum(-1) + torch.special.entr(p).sum(-1)

    samples = (
        -harness.rand(1000, *scores.shape).clamp(min=1e-300).log()
    )  # normalized exponentials are uniform on the simplex
    others = samples / samples.sum(-1, keepdim=True)
    best = value(a)
    measurements = [
        compare("⟨a, s⟩ + H(a) against logsumexp(s)", best, lse),
        excess("another distribution has a larger ⟨p, s⟩ + H(p)", value(others) - best),
    ]
    if harness.supports("lse"):
        measurements.append(compare("the log-sum-exp returned", harness.attend_lse(q, k, v)[1], lse))
    return worst(*measurements)


def layouts(harness: Harness, c: Case) -> Measurement:
    q, k, v = harness.qkv(c)
    masking = case_mask(harness, c)
    columns_q, columns_k, columns_v = (x.double().mT for x in (q, k, v))
    scores = c.d_k**-0.5 * columns_k.mT @ columns_q
    if masking.allowed is not None:
        scores = scores.masked_fill(~masking.allowed.mT, -torch.inf)
    columns = columns_v @ scores.softmax(-2)
    return compare(
        "softmax_rows(b Q Kᵀ) V against (V softmax_cols(b Kᵀ Q))ᵀ",
        harness.attend(q, k, v, **masking.options),
        columns.mT,
    )


def jacobian(harness: Harness, c: Case) -> Measurement:
    """With keys e_1 … e_d the scores are b·q, so ∂weights/∂q is b times the Jacobian of softmax."""
    d = c.d_k
    q = harness.randn(1, 1, 1, d)
    keys = torch.eye(d, device=harness.device, dtype=harness.dtype)[None, None]
    options = {} if c.scale is None else {"scale": c.scale}
    b = d**-0.5 if c.scale is None else c.scale

    # As many queries as keys where their number may not differ; the first is the one that counts.
    others = torch.zeros_like(keys[:, :, 1:]) if not harness.supports("n≠m") else keys[:, :, :0]

    def weights(x: Tensor) -> Tensor:
        return harness.weights(torch.cat([x[None, None, None], others], 2), keys, **options)[0, 0, 0]

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
        compare("the trace of J", J.trace(), b * (1 - p2)),
        compare("‖J‖²", norm2, b**2 * (p2 - 2 * p3 + p2**2)),
        excess("‖J‖² exceeds b²(2ε − ε²)²", norm2 - b**2 * (2 * eps - eps**2) ** 2),
        excess("‖J‖² exceeds b²/4", norm2 - b**2 / 4),
        excess("J has a negative eigenvalue", -eigenvalues),
        excess("an eigenvalue of J exceeds b/2", eigenvalues - b / 2),
    )


def inputs_with_scores(harness: Harness, scores: Tensor, d: int) -> tuple[Tensor, Tensor]:
    """One query and m keys of width d whose scaled scores are the given ones, (m,)."""
    k = torch.zeros(1, 1, len(scores), d, dtype=torch.float64)
    k[0, 0, :, 0] = scores
    q = torch.zeros(1, 1, 1, d, dtype=torch.float64)
    q[..., 0] = d**0.5
    return harness.to_target(q), harness.to_target(k)


def hard_limit(harness: Harness, c: Case) -> Measurement:
    m = c.m
    scores = harness.rand(m) * 4.0
    top = scores.sort(descending=True).values
    q, k = inputs_with_scores(harness, scores, c.d_k)
    a = harness.weights(q * c.sharp, k)[0, 0, 0].double()
    gap = top[0] - top[1]
    tied_q, tied_k = inputs_with_scores(harness, torch.tensor([2.0, 2.0, 1.0]), c.d_k)
    tied = harness.weights(tied_q * 1e4, tied_k)[0, 0, 0]
    return worst(
        excess("1 − p_max exceeds (m − 1) exp(−b·gap)", (1 - a.max()) - (m - 1) * torch.exp(-c.sharp * gap)),
        compare("weights of two tied keys at b = 10⁴", tied, torch.tensor([0.5, 0.5, 0.0])),
    )


def soft_limit(harness: Harness, c: Case) -> Measurement:
    q, k, v = harness.qkv(c)
    masking = case_mask(harness, c)
    options = dict(masking.options)
    if c.by == "scale":
        options["scale"] = 0.0
    else:
        q, k = (q * 0.0, k) if c.by == "queries" else (q, k[..., :1, :].expand_as(k).contiguous())
    m = k.shape[-2]
    allowed = torch.ones(c.b, c.h, c.n, m, dtype=torch.bool, device=harness.device)
    allowed = allowed if masking.allowed is None else allowed & masking.allowed
    mean = allowed.double() / allowed.sum(-1, keepdim=True)
    slack = 1e-3 if c.by == "queries" and harness.dtype == torch.float64 else 1.0
    return worst(
        compare(
            "weights at b = 0 against 1/(allowed keys)", harness.weights(q, k, **options), mean, slack=slack
        ),
        compare(
            "outputs at b = 0 against the mean of the allowed values",
            harness.attend(q, k, v, **options),
            mean @ v.double(),
        ),
    )


def _uniform_by(harness: Harness):
    return ("queries", "keys", "scale") if harness.supports("scale") else ("queries", "keys")


LAWS = (
    Law(
        "L01",
        "rows sum to one",
        "A_ij ≥ 0, A_ij = 0 on masked keys, Σ_j A_ij = 1",
        "each query has an allowed key; finite scores; before dropout",
        {"function": Trial(rows_sum_to_one, call_space(size=(1.0, 30.0, 3000.0)))},
        lambda: with_weights("exp(s) without normalization", lambda s, ok: mask_scores(s, ok).exp()),
    ),
    Law(
        "L02",
        "convex hull",
        "min_j v_jc ≤ o_ic ≤ max_j v_jc over allowed j; ‖o_i‖ ≤ max_j ‖v_j‖",
        "each query has an allowed key; before W_O and dropout",
        {"function": Trial(convex_hull, call_space(size=(1.0, 30.0)))},
        lambda: with_weights(
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
                softmax_shape,
                lambda harness: harness.space(scale=(None, 0.3) if harness.supports("scale") else (None,)),
            )
        },
        lambda: with_weights(
            "scores divided by their sum", lambda s, ok: s.abs() / s.abs().sum(-1, keepdim=True)
        ),
        Tolerance(1e-12, 1e-4),
    ),
    Law(
        "L04",
        "softmax as optimum",
        "softmax(s) maximizes ⟨p, s⟩ + H(p) over distributions; the maximum is logsumexp(s)",
        "no mask; finite scores",
        {"function": Trial(softmax_as_optimum, call_space(masked=False, n=(1, 2, 3, 5)))},
        lambda: with_weights("uniform weights", lambda s, ok: torch.ones_like(s) / s.shape[-1]),
    ),
    Law(
        "L05",
        "row and column form",
        "(V softmax_cols(b Kᵀ Q))ᵀ = softmax_rows(b Q Kᵀ) V",
        "the same b; the mask transposed",
        {"function": Trial(layouts, call_space())},
        lambda: with_weights("softmax over the queries", lambda s, ok: s.masked_fill(~ok, -1e9).softmax(-2)),
    ),
    Law(
        "L10",
        "softmax Jacobian",
        "∂a/∂s = b(diag a − a aᵀ): symmetric, positive semidefinite, J 1 = 0, ‖J‖² ≤ b²(2ε − ε²)²",
        "ε = 1 − max a; gradients",
        {
            "function": Trial(
                jacobian,
                lambda harness: harness.space(
                    b=None,
                    h=None,
                    n=None,
                    m=None,
                    d_v=None,
                    d_k=(2, 3, 5, 7),
                    scale=(None, 0.7) if harness.supports("scale") else (None,),
                ),
                needs=("grad",),
            )
        },
        lambda: with_weights("a gradient of diag a only", _diagonal_gradient),
    ),
    Law(
        "L12",
        "hard limit",
        "1 − p_max ≤ (m − 1) exp(−b g), g the gap of the two largest scores; t tied maxima get 1/t each",
        "finite scores",
        {
            "function": Trial(
                hard_limit,
                lambda harness: harness.space(
                    b=None, h=None, n=None, d_v=None, m=(2, 3, 5, 11), sharp=(1.0, 5.0, 20.0, 50.0)
                ),
                needs=("n≠m",),
            )
        },
        lambda: with_weights(
            "only the first maximum gets weight", lambda s, ok: reference.hardmax(s, ok, "first")
        ),
    ),
    Law(
        "L13",
        "soft limit",
        "b = 0: A_ij = 1/m over the allowed keys, o their mean",
        "each query has an allowed key",
        {
            "function": Trial(
                soft_limit, lambda harness: harness.space(mask=harness.mask_kinds(), by=_uniform_by(harness))
            )
        },
        lambda: with_changed_call(
            "b = 1 whatever is requested",
            lambda q, k, v, options: (
                (torch.ones_like(q), k + torch.arange(k.shape[-2])[:, None], v),
                {**options, "scale": 1.0},
            ),
        ),
    ),
)


def _diagonal_gradient(scores: Tensor, allowed: Tensor) -> Tensor:
    """softmax whose backward pass omits the term − a aᵀ."""
    exact = reference.softmax(scores, allowed)
    return exact.detach() + exact.detach() * (scores - scores.detach())

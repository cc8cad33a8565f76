"""Scores, and what follows when they are drawn, sharpened or disturbed: L08, L09, L11, L14, L15, L16."""

import math

import numpy as np
import torch
from torch import Tensor

from ... import reference
from ..controls import weighing, wrapped
from ..harness import Lab
from ..law import Case, Law, Reading, Space, Tolerance, Trial, bounded, compare, gradients, worst
from ..target import Function

# Table 15.10: keys, d → unscaled (mean top weight, mean and median of the squared Jacobian norm), scaled likewise.
SATURATION = {
    (16, 16): ((0.685, 0.0980, 0.109), (0.243, 0.0922, 0.0908)),
    (16, 64): ((0.844, 0.0614, 0.0126), (0.246, 0.0932, 0.0921)),
    (64, 16): ((0.578, 0.0992, 0.108), (0.107, 0.0341, 0.0314)),
    (64, 64): ((0.791, 0.0735, 0.0398), (0.107, 0.0340, 0.0321)),
    (64, 512): ((0.928, 0.0313, 1.3e-05), (0.107, 0.0341, 0.0323)),
}


def score_rank(lab: Lab, c: Case) -> Reading:
    """ln A_ij − ln A_i0 = s_ij − s_i0: from outside the scores are known up to one number a row."""
    q, k, _ = lab.qkv(c)
    logs = lab.weights(0.7 * q, k).double().log()
    sizes = torch.linalg.svdvals(logs - logs[..., :1])
    beyond = sizes[..., c.d_k] / sizes[..., 0]
    return bounded(f"singular value {c.d_k + 1} of the scores, over the first", beyond)


GROUPS = {1: 40_000, 16: 4000, 64: 1000, 512: 800}  # of 20 queries and 20 keys: the variance to 0.3 %


def score_variance(lab: Lab, c: Case) -> Reading:
    """ln a_ij = s_ij − lse_i: within a row the logarithms of the weights vary as the scores do."""
    q, k = lab.randn(GROUPS[c.d_k], 1, 20, c.d_k), lab.randn(GROUPS[c.d_k], 1, 20, c.d_k)
    logs = lab.weights(q, k).double().log()
    variance = float(logs.var(-1).mean())
    readings = [bounded(f"the variance of scaled scores is {variance:.4f}, not 1", abs(variance - 1) - 0.015)]
    if lab.takes("lse"):
        mean = float((logs + lab.attend_lse(q, k, k)[1].double()[..., None]).mean())
        readings.append(bounded(f"the mean of scaled scores is {mean:.4f}, not 0", abs(mean) - 0.015))
    return worst(*readings)


def saturation(lab: Lab, c: Case) -> Reading:
    d, m = c.d_k, c.m
    q, k = lab.randn(500, 1, 100, d), lab.randn(500, 1, m, d)
    q = q if c.scaled else q * d**0.5
    a = lab.weights(q, k).double()
    top, p2, p3 = a.amax(-1), (a**2).sum(-1), (a**3).sum(-1)
    norm2 = p2 - 2 * p3 + p2**2
    want_top, want_mean, want_median = SATURATION[m, d][1 if c.scaled else 0]
    top_mean, norm_mean, norm_median = float(top.mean()), float(norm2.mean()), float(norm2.median())
    return worst(
        bounded(f"the mean top weight is {top_mean:.4f}, not {want_top}", abs(top_mean - want_top) - 0.008),
        bounded(f"the mean of ‖J‖² is {norm_mean:.4f}, not {want_mean}", abs(norm_mean - want_mean) - 0.0025),
        bounded(
            f"the median of ‖J‖² is {norm_median:.3g}, not {want_median}",
            abs(math.log(max(norm_median, 1e-300) / want_median)) - math.log(1.5),
        ),
    )


def changing_one_key(lab: Lab, c: Case) -> Reading:
    q, k, v = lab.qkv(c)
    b, m = c.d_k**-0.5, k.shape[-2]
    i = int(lab.below(m))
    other = k.clone()
    other[..., i, :] = other[..., i, :] + c.step * lab.randn(c.b, c.h, c.d_k)
    a = lab.weights(q, k)[..., i : i + 1].double()
    h, v_i = lab.attend(q, k, v).double(), v[..., i : i + 1, :].double()
    d = b * (q.double() * (other - k)[..., i : i + 1, :].double()).sum(-1, keepdim=True)
    # a'/(1 − a) and the like, without cancellation as a nears 1
    share = a * torch.expm1(d) / (1 + a * torch.expm1(d))
    readings = [compare("h after a key is changed", lab.attend(q, other, v).double() - h, share * (v_i - h))]
    if lab.takes("grad"):
        k_learns, w = k.clone().requires_grad_(), lab.randn(*h.shape)
        (slope,) = gradients(lab.attend(q, k_learns, v), (k_learns,), w)
        along = (slope[..., i, :].double() * (other - k)[..., i, :].double()).sum(-1)
        first = (a * d * (v_i - h) * w.double()).sum((-1, -2))
        readings.append(compare("the derivative towards a key, a_i d (v_i − h)", along, first, lab.slack))
    return worst(*readings)


def noise_on_one_key(lab: Lab, c: Case) -> Reading:
    """The score of the noisy key moves by N(0, (b s ‖q‖)²): mean and deviation of h by quadrature."""
    q, k, v = lab.randn(1, 1, 1, c.d_k), lab.randn(1, 1, c.m, c.d_k), lab.randn(1, 1, c.m, c.d_k)
    draws, b = 100_000, c.d_k**-0.5
    noisy = k.expand(draws, -1, -1, -1).clone()
    noisy[:, 0, 0] += 0.125 * lab.randn(draws, c.d_k)
    h = lab.attend(q, k, v)[0, 0, 0].double()
    moved = lab.attend(q.expand(draws, -1, -1, -1), noisy, v.expand(draws, -1, -1, -1))[:, 0, 0].double() - h
    a = float(lab.weights(q, k)[0, 0, 0, 0])
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    grown = np.expm1(0.125 * b * float(q.double().norm()) * nodes)
    share = a * grown / (1 + a * grown)
    mean = float(weights @ share / weights.sum())
    deviation = math.sqrt(float(weights @ share**2 / weights.sum()) - mean**2)
    towards = (v[0, 0, 0].double() - h).cpu()
    error = (moved.mean(0).cpu() - mean * towards).abs() / (deviation * towards.abs() / draws**0.5)
    spread = moved.std(0).cpu() / (deviation * towards.abs()).clamp(min=1e-300)
    return worst(
        bounded(f"the mean change is {float(error.max()):.1f} standard errors off", error - 5),
        bounded(f"its deviation is {float(spread[0]):.4f} of what it must be", (spread - 1).abs() - 0.02),
    )


def orthonormal_keys(lab: Lab, c: Case) -> Reading:
    n, d = c.n, max(c.n, c.d_k)
    rows = torch.linalg.qr(torch.randn(d, d, dtype=torch.float64, generator=lab.random)).Q[:n]
    keys = lab.here(rows)[None, None]
    b = c.sharp * d**0.5
    a = lab.weights(keys * b, keys)[0, 0].double()
    off = 1.0 / (math.exp(c.sharp) + n - 1)
    want = torch.full((n, n), off, dtype=torch.float64, device=a.device)
    want.fill_diagonal_(math.exp(c.sharp) * off)
    order = lab.shuffled(n)
    large = 60.0 * d**0.5
    moved = lab.weights(keys * large, keys[:, :, order])[0, 0].double()
    permutation = torch.eye(n, dtype=torch.float64, device=a.device)[:, order]
    return worst(
        compare("A against softmax_b(I)", a, want),
        compare(
            "A at b = 60 against I", lab.weights(keys * large, keys)[0, 0].double(), torch.eye(n).to(want)
        ),
        compare("A of permuted keys at b = 60 against the permutation", moved, permutation),
    )


def wide(lab: Lab, *rest: str, **fields) -> Space:
    return lab.space(**dict.fromkeys(("b", "h", "n", "d_v", "m")), **fields)


def _tanh_call(q: Tensor, k: Tensor, v: Tensor, **asked):
    scores = reference.tanh_scores(q, k, torch.ones(q.shape[-1], dtype=q.dtype))
    return reference.softmax(scores) @ v


def _additive():
    return Function("additive scores", _tanh_call, claims={"float64", "n≠m", "d_v≠d_k", "grad"})


def _picky_free(lab: Lab) -> str | None:
    return "the target takes fixed sizes only" if lab.function.sizes else None


def _orthonormal_space(lab: Lab) -> Space:
    return lab.space(b=None, h=None, m=None, d_v=None, n=(2, 3, 5, 7), d_k=(1, 8), sharp=(1.0, 0.0, 3.0))


LAWS = (
    Law(
        "L08",
        "score rank",
        "rank(Q Kᵀ) ≤ min(n, m, d_k)",
        "dot-product scores, before softmax; no mask, no bias",
        {
            "function": Trial(
                score_rank,
                lambda lab: lab.space(n=(11, 17), m=None, d_v=None, d_k=(1, 2, 3)),
                when=_picky_free,
            )
        },
        _additive,
        Tolerance(1e-10, 1e-4),
    ),
    Law(
        "L09",
        "score variance",
        "q, k independent, mean 0, variance 1: E q·k = 0, Var q·k = d, after scaling 1",
        "dot-product scores with the usual scale; sampled",
        {
            "function": Trial(
                score_variance,
                lambda lab: wide(lab, d_k=(64, 16, 512, 1)),
                needs=("n≠m",),
                few=True,
                when=_picky_free,
            )
        },
        lambda: wrapped("no scale", lambda q, k, v, asked: ((q, k, v), {**asked, "scale": 1.0})),
        Tolerance(0.0, 0.0, 0.0),
    ),
    Law(
        "L11",
        "saturation",
        "unscaled scores: the median of ‖J‖² collapses as d grows; scaled ones do not depend on d",
        "standard normal q and keys; sampled, table 15.10",
        {
            "function": Trial(
                saturation,
                lambda lab: lab.space(
                    b=None, h=None, n=None, d_v=None, m=(64,), d_k=(64, 16, 512), scaled=(True, False)
                ),
                needs=("n≠m",),
                few=True,
                when=_picky_free,
            )
        },
        lambda: wrapped(
            "scores over d, not √d", lambda q, k, v, asked: ((q, k, v), {**asked, "scale": 1.0 / q.shape[-1]})
        ),
        Tolerance(0.0, 0.0, 0.0),
    ),
    Law(
        "L14",
        "changing one key",
        "k_i → k_i', d = b q·(k_i' − k_i): Δh = a_i(e^d − 1)/(1 + a_i(e^d − 1)) (v_i − h)",
        "no mask",
        {"function": Trial(changing_one_key, lambda lab: lab.space(step=(0.1, 1.0, 3.0)))},
        lambda: weighing(
            "weights that no key changes", lambda s, ok: ok / ok.sum(-1, keepdim=True).to(s.dtype)
        ),
    ),
    Law(
        "L15",
        "noise on one key",
        "k_i + N(0, s²I): mean change ≈ a_i(1 − 2a_i) b²s²‖q‖²/2 (v_i − h), deviation ≈ a_i b s ‖q‖ ‖v_i − h‖",
        "sampled; both compared with their exact integrals",
        {
            "function": Trial(
                noise_on_one_key,
                lambda lab: lab.space(b=None, h=None, n=None, d_v=None, m=(3, 5), d_k=(4,)),
                needs=("n≠m",),
                few=True,
                when=_picky_free,
            )
        },
        lambda: weighing(
            "weights that no key changes", lambda s, ok: ok / ok.sum(-1, keepdim=True).to(s.dtype)
        ),
        Tolerance(0.0, 0.0, 0.0),
    ),
    Law(
        "L16",
        "orthonormal keys",
        "Q = K with orthonormal rows: A_ii = e^b/(e^b + n − 1); A → I as b grows; permuted keys → that permutation",
        "d ≥ n; no mask",
        {"function": Trial(orthonormal_keys, _orthonormal_space, when=_picky_free)},
        lambda: weighing("A = I at b = 1", lambda s, ok: reference.hardmax(s, ok)),
        Tolerance(1e-12, 1e-6),
    ),
)

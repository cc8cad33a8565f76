"""Scores of random inputs, sharpened scores and perturbed keys: L08, L09, L11, L14, L15, L16."""

import math

import numpy as np
import torch
from torch import Tensor

from ... import reference
from ..controls import with_changed_call, with_weights
from ..harness import Harness
from ..law import Case, Law, Space, Tolerance, Trial
from ..measurement import Measurement, compare, excess, gradients, require, worst
from ..target import Function

# (keys, d) → (mean largest weight, mean and median of the squared Jacobian norm), for unscaled and for scaled scores.
SATURATION = {
    (16, 16): ((0.685, 0.0980, 0.109), (0.243, 0.0922, 0.0908)),
    (16, 64): ((0.844, 0.0614, 0.0126), (0.246, 0.0932, 0.0921)),
    (64, 16): ((0.578, 0.0992, 0.108), (0.107, 0.0341, 0.0314)),
    (64, 64): ((0.791, 0.0735, 0.0398), (0.107, 0.0340, 0.0321)),
    (64, 512): ((0.928, 0.0313, 1.3e-05), (0.107, 0.0341, 0.0323)),
}


def score_rank(harness: Harness, c: Case) -> Measurement:
    """ln A_ij − ln A_i0 = s_ij − s_i0: the weights determine the scores up to one constant per row."""
    q, k, _ = harness.qkv(c)
    a = harness.weights(0.7 * q, k).double()
    if not bool((a > 0).all()):
        return require("the weight of an unmasked key is not above 0", a > 0)
    logs = a.log()
    sizes = torch.linalg.svdvals(logs - logs[..., :1])
    beyond = sizes[..., c.d_k] / sizes[..., 0]
    return excess(f"singular value {c.d_k + 1} of the scores, relative to the first, is not 0", beyond)


GROUPS = {
    1: 40_000,
    16: 4000,
    64: 1000,
    512: 800,
}  # d_k → groups of 20 queries and 20 keys that give the variance to 0.3 %


def score_variance(harness: Harness, c: Case) -> Measurement:
    """ln a_ij = s_ij − lse_i: within a row the log-weights have the variance of the scores."""
    q, k = harness.randn(GROUPS[c.d_k], 1, 20, c.d_k), harness.randn(GROUPS[c.d_k], 1, 20, c.d_k)
    logs = harness.weights(q, k).double().log()
    variance = float(logs.var(-1).mean())
    measurements = [
        excess(f"the variance of scaled scores: got {variance:.4f}, expected 1", abs(variance - 1) - 0.015)
    ]
    if harness.supports("lse"):
        mean = float((logs + harness.attend_lse(q, k, k)[1].double()[..., None]).mean())
        measurements.append(
            excess(f"the mean of scaled scores: got {mean:.4f}, expected 0", abs(mean) - 0.015)
        )
    return worst(*measurements)


def saturation(harness: Harness, c: Case) -> Measurement:
    d, m = c.d_k, c.m
    q, k = harness.randn(500, 1, 100, d), harness.randn(500, 1, m, d)
    q = q if c.scaled else q * d**0.5
    a = harness.weights(q, k).double()
    top, p2, p3 = a.amax(-1), (a**2).sum(-1), (a**3).sum(-1)
    norm2 = p2 - 2 * p3 + p2**2
    want_top, want_mean, want_median = SATURATION[m, d][1 if c.scaled else 0]
    top_mean, norm_mean, norm_median = float(top.mean()), float(norm2.mean()), float(norm2.median())
    return worst(
        excess(
            f"the mean of the largest weight: got {top_mean:.4f}, expected {want_top}",
            abs(top_mean - want_top) - 0.008,
        ),
        excess(
            f"the mean of ‖J‖²: got {norm_mean:.4f}, expected {want_mean}",
            abs(norm_mean - want_mean) - 0.0025,
        ),
        excess(
            f"the median of ‖J‖²: got {norm_median:.3g}, expected {want_median}",
            abs(math.log(max(norm_median, 1e-300) / want_median)) - math.log(1.5),
        ),
    )


def changing_one_key(harness: Harness, c: Case) -> Measurement:
    q, k, v = harness.qkv(c)
    b, m = c.d_k**-0.5, k.shape[-2]
    i = int(harness.randint(m))
    other = k.clone()
    other[..., i, :] = other[..., i, :] + c.step * harness.randn(c.b, c.h, c.d_k)
    a = harness.weights(q, k)[..., i : i + 1].double()
    h, v_i = harness.attend(q, k, v).double(), v[..., i : i + 1, :].double()
    d = b * (q.double() * (other - k)[..., i : i + 1, :].double()).sum(-1, keepdim=True)
    # expm1 avoids cancellation as a nears 1
    share = a * torch.expm1(d) / (1 + a * torch.expm1(d))
    measurements = [
        compare(
            "the change of the output after one key was changed",
            harness.attend(q, other, v).double() - h,
            share * (v_i - h),
        )
    ]
    if harness.supports("grad"):
        k_leaf, w = k.clone().requires_grad_(), harness.randn(*h.shape)
        (slope,) = gradients(harness.attend(q, k_leaf, v), (k_leaf,), w)
        along = (slope[..., i, :].double() * (other - k)[..., i, :].double()).sum(-1)
        first = (a * d * (v_i - h) * w.double()).sum((-1, -2))
        measurements.append(
            compare(
                "the derivative with respect to a key against a_i d (v_i − h)", along, first, harness.slack
            )
        )
    return worst(*measurements)


def noise_on_one_key(harness: Harness, c: Case) -> Measurement:
    """Noise moves the score of the key by N(0, (b s ‖q‖)²); mean and deviation of the output come from quadrature."""
    q, k, v = harness.randn(1, 1, 1, c.d_k), harness.randn(1, 1, c.m, c.d_k), harness.randn(1, 1, c.m, c.d_k)
    samples, b = 100_000, c.d_k**-0.5
    noisy = k.expand(samples, -1, -1, -1).clone()
    noisy[:, 0, 0] += 0.125 * harness.randn(samples, c.d_k)
    h = harness.attend(q, k, v)[0, 0, 0].double()
    moved = (
        harness.attend(q.expand(samples, -1, -1, -1), noisy, v.expand(samples, -1, -1, -1))[:, 0, 0].double()
        - h
    )
    a = float(harness.weights(q, k)[0, 0, 0, 0])
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    grown = np.expm1(0.125 * b * float(q.double().norm()) * nodes)
    share = a * grown / (1 + a * grown)
    mean = float(weights @ share / weights.sum())
    deviation = math.sqrt(float(weights @ share**2 / weights.sum()) - mean**2)
    grad_output = (v[0, 0, 0].double() - h).cpu()
    error = (moved.mean(0).cpu() - mean * grad_output).abs() / (deviation * grad_output.abs() / samples**0.5)
    spread = moved.std(0).cpu() / (deviation * grad_output.abs()).clamp(min=1e-300)
    return worst(
        excess(
            f"the mean change is {float(error.max()):.1f} standard errors from its expectation", error - 5
        ),
        excess(
            f"the standard deviation is {float(spread[0]):.4f} times the expected one",
            (spread - 1).abs() - 0.02,
        ),
    )


def orthonormal_keys(harness: Harness, c: Case) -> Measurement:
    n, d = c.n, max(c.n, c.d_k)
    rows = torch.linalg.qr(torch.randn(d, d, dtype=torch.float64, generator=harness.random)).Q[:n]
    keys = harness.to_target(rows)[None, None]
    b = c.sharp * d**0.5
    a = harness.weights(keys * b, keys)[0, 0].double()
    off = 1.0 / (math.exp(c.sharp) + n - 1)
    want = torch.full((n, n), off, dtype=torch.float64, device=a.device)
    want.fill_diagonal_(math.exp(c.sharp) * off)
    order = harness.randperm(n)
    large = 60.0 * d**0.5
    moved = harness.weights(keys * large, keys[:, :, order])[0, 0].double()
    permutation = torch.eye(n, dtype=torch.float64, device=a.device)[:, order]
    return worst(
        compare("A against softmax_b(I)", a, want),
        compare(
            "A at b = 60 against I", harness.weights(keys * large, keys)[0, 0].double(), torch.eye(n).to(want)
        ),
        compare("A of permuted keys at b = 60 against the permutation", moved, permutation),
    )


def _only(harness: Harness, **fields) -> Space:
    return harness.space(**dict.fromkeys(("b", "h", "n", "d_v", "m")), **fields)


def _tanh_call(q: Tensor, k: Tensor, v: Tensor, **options):
    scores = reference.tanh_scores(q, k, torch.ones(q.shape[-1], dtype=q.dtype))
    return reference.softmax(scores) @ v


def _additive():
    return Function("additive scores", _tanh_call, claims={"float64", "n≠m", "d_v≠d_k", "grad"})


def any_size(harness: Harness) -> str | None:
    return "the target accepts only fixed sizes" if harness.function.sizes else None


def _orthonormal_space(harness: Harness) -> Space:
    return harness.space(b=None, h=None, m=None, d_v=None, n=(2, 3, 5, 7), d_k=(1, 8), sharp=(1.0, 0.0, 3.0))


LAWS = (
    Law(
        "L08",
        "score rank",
        "rank(Q Kᵀ) ≤ min(n, m, d_k)",
        "dot-product scores, before softmax; no mask, no bias",
        {
            "function": Trial(
                score_rank,
                lambda harness: harness.space(n=(11, 17), m=None, d_v=None, d_k=(1, 2, 3)),
                unless=any_size,
            )
        },
        _additive,
        Tolerance(1e-10, 1e-4),
    ),
    Law(
        "L09",
        "score variance",
        "q, k independent, mean 0, variance 1: E q·k = 0, Var q·k = d, after scaling 1",
        "dot-product scores with the default scale; sampled",
        {
            "function": Trial(
                score_variance,
                lambda harness: _only(harness, d_k=(64, 16, 512, 1)),
                needs=("n≠m",),
                per_seed=True,
                heavy=True,
                unless=any_size,
            )
        },
        lambda: with_changed_call(
            "no scale", lambda q, k, v, options: ((q, k, v), {**options, "scale": 1.0})
        ),
        Tolerance(0.0, 0.0, 0.0),
    ),
    Law(
        "L11",
        "saturation",
        "unscaled scores: the median of ‖J‖² collapses as d grows; scaled ones do not depend on d",
        "standard normal queries and keys; sampled",
        {
            "function": Trial(
                saturation,
                lambda harness: harness.space(
                    b=None, h=None, n=None, d_v=None, m=(64,), d_k=(64, 16, 512), scaled=(True, False)
                ),
                needs=("n≠m",),
                per_seed=True,
                heavy=True,
                unless=any_size,
            )
        },
        lambda: with_changed_call(
            "scores divided by d instead of √d",
            lambda q, k, v, options: ((q, k, v), {**options, "scale": 1.0 / q.shape[-1]}),
        ),
        Tolerance(0.0, 0.0, 0.0),
    ),
    Law(
        "L14",
        "changing one key",
        "k_i → k_i', d = b q·(k_i' − k_i): Δh = a_i(e^d − 1)/(1 + a_i(e^d − 1)) (v_i − h)",
        "no mask",
        {"function": Trial(changing_one_key, lambda harness: harness.space(step=(0.1, 1.0, 3.0)))},
        lambda: with_weights(
            "weights that do not depend on the keys", lambda s, ok: ok / ok.sum(-1, keepdim=True).to(s.dtype)
        ),
    ),
    Law(
        "L15",
        "noise on one key",
        "k_i + N(0, s²I): mean change ≈ a_i(1 − 2a_i) b²s²‖q‖²/2 (v_i − h), deviation ≈ a_i b s ‖q‖ ‖v_i − h‖",
        "sampled; both are compared with their exact integrals",
        {
            "function": Trial(
                noise_on_one_key,
                lambda harness: harness.space(b=None, h=None, n=None, d_v=None, m=(3, 5), d_k=(4,)),
                needs=("n≠m",),
                per_seed=True,
                heavy=True,
                unless=any_size,
            )
        },
        lambda: with_weights(
            "weights that do not depend on the keys", lambda s, ok: ok / ok.sum(-1, keepdim=True).to(s.dtype)
        ),
        Tolerance(0.0, 0.0, 0.0),
    ),
    Law(
        "L16",
        "orthonormal keys",
        "Q = K with orthonormal rows: A_ii = e^b/(e^b + n − 1); A → I as b grows; permuted keys → that permutation",
        "d ≥ n; no mask",
        {"function": Trial(orthonormal_keys, _orthonormal_space, unless=any_size)},
        lambda: with_weights("A = I at b = 1", lambda s, ok: reference.hardmax(s, ok)),
        Tolerance(1e-12, 1e-6),
    ),
)

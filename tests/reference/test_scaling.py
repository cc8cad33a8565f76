"""Why scores are divided by √d_k: their moments, the softmax's derivative, saturation (ledger section 3)."""

import math
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ledger_cases import agrees, case, cases
from regard.formulas import (
    score_moments,
    softmax_jacobian,
    softmax_jacobian_bounds,
    softmax_jacobian_norm,
    tied_score_moments,
)
from regard.reference import attend, dot_scores, softmax

DRAWS = 200_000


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def jacobian_norm2(a):
    return softmax_jacobian_norm(a).square()


def moments(scores, fourth):
    """Mean, variance, and five standard errors of each; `fourth` is the kurtosis of the scores."""
    n, variance = scores.numel(), scores.var()
    return scores.mean(), variance, 5 * (variance / n).sqrt(), 5 * variance * math.sqrt((fourth - 1) / n)


def drawn(d, mu_q=0.0, var_q=1.0, mu_k=0.0, var_k=1.0, draws=DRAWS, seed=0, scores_of=dot_scores):
    """`draws` independent scores of normal entries: q·k, or those that an attention computes."""
    g, scores = seeded(seed), []
    for _ in range(8):
        q, k = torch.randn(2, draws // 8, 1, d, generator=g)
        scores.append(scores_of(mu_q + var_q**0.5 * q, mu_k + var_k**0.5 * k).flatten())
    return torch.cat(scores).double()


def scores_of_attention(q, k):
    """What attend puts into its softmax, by its own scale."""
    return attend(q, k, k[..., :1]).scores


@pytest.mark.ledger("S0.Q1a.7", "S0.Q1a.9", "S3.Q1a.1", "S3.Q1a.2", "S3.Q1a.3")
@pytest.mark.parametrize("d", [1, 16, 64, 512])
def test_a_score_of_unit_entries_has_variance_d_and_one_after_scaling(d):
    draws = DRAWS if d < 512 else DRAWS // 4
    scores = drawn(d, draws=draws)
    mean, variance, mean_error, variance_error = moments(
        scores, fourth=3 + 6 / d
    )  # 9 for one product, then → 3
    assert abs(mean) < mean_error
    assert abs(variance - d) < variance_error < 0.04 * d
    assert score_moments(d) == (0, d) and score_moments(d, scale=None) == (0, 1)
    inside = drawn(d, draws=draws // 4, scores_of=scores_of_attention)
    assert abs(inside.var() - 1) < 2 * variance_error / d


@pytest.mark.ledger("S0.Q1a.7", "S3.Q1a.3")
@pytest.mark.parametrize("c", cases("dot.moments"), ids=lambda c: c["id"])
def test_the_moments_of_a_score_are_the_ledgers_exactly(c):
    """Entries of two equally likely values have exact moments: all pairs at d = 1 and 3, then a sum over d."""
    d, *given = (float(Fraction(c["inputs"][name])) for name in ("d", "mu_q", "var_q", "mu_k", "var_k"))
    mu_q, var_q, mu_k, var_k = given

    def exact(width):
        signs = torch.tensor(list(product([-1.0, 1.0], repeat=width)), dtype=torch.float64)
        scores = dot_scores(mu_q + var_q**0.5 * signs, mu_k + var_k**0.5 * signs)
        return scores.mean().item(), scores.var(correction=0).item()

    (mean, variance), three = exact(1), exact(3)
    assert three == pytest.approx((3 * mean, 3 * variance), rel=1e-12)  # independent entries: both add up
    got = {
        "mean": d * mean,
        "variance": d * variance,
        "std": (d * variance) ** 0.5,
        "variance_scaled": variance,
    }
    assert agrees(got, c["expected"], c["compare"])
    numbers = {"mean_q": mu_q, "var_q": var_q, "mean_k": mu_k, "var_k": var_k}
    formula, scaled = score_moments(d, **numbers), score_moments(d, **numbers, scale=None)
    computed = {"mean": formula.mean, "variance": formula.variance, "std": formula.deviation}
    assert agrees(computed | {"variance_scaled": scaled.variance}, c["expected"], c["compare"])
    assert scaled.mean == pytest.approx(formula.mean / d**0.5)
    assert score_moments(d, **numbers, scale=0.5) == pytest.approx((formula.mean / 2, formula.variance / 4))


@pytest.mark.ledger("S3.Q1a.3")
def test_shifted_entries_have_the_general_variance():
    c = case("dot.64.shifted")
    scores = drawn(64, mu_q=0.5, var_q=1.0, mu_k=0.25, var_k=4.0, draws=DRAWS // 2)
    mean, variance, mean_error, variance_error = moments(scores, fourth=3 + 6 / 64)
    assert abs(mean - c["expected"]["mean"]) < mean_error
    assert abs(variance - c["expected"]["variance"]) < variance_error < 0.03 * c["expected"]["variance"]


@pytest.mark.ledger("S0.Q1a.7")
def test_a_query_that_is_its_key_breaks_the_rule():
    for c in cases("dot.moments_tied"):
        d = c["inputs"]["d"]
        x = torch.randn(DRAWS // 4, 1, d, generator=seeded(0))
        scores = dot_scores(x, x).flatten().double()
        mean, variance, mean_error, variance_error = moments(scores, fourth=3 + 12 / d)  # chi-squared's
        assert abs(mean - c["expected"]["mean"]) < mean_error
        assert abs(variance - c["expected"]["variance"]) < variance_error
        assert tied_score_moments(d) == (c["expected"]["mean"], c["expected"]["variance"])
        moved = dot_scores(x + 0.5, x + 0.5).flatten().double()  # entries of mean 1/2: σ² + μ², 2σ⁴ + 4μ²σ²
        assert moved.mean() == pytest.approx(tied_score_moments(d, mean=0.5).mean, rel=0.02)
        assert moved.var() == pytest.approx(tied_score_moments(d, mean=0.5).variance, rel=0.05)
        assert abs(variance - d) > variance_error  # control: not the variance of independent entries


def distribution(given):
    if "a" in given:
        return torch.tensor([float(x) for x in given["a"]], dtype=torch.float64)
    n = given["n"]
    if given["form"] == "uniform":
        return torch.full((n,), 1 / n, dtype=torch.float64)
    rest = torch.full((n - 1,), given["eps"] / (n - 1), dtype=torch.float64)
    return torch.cat([torch.tensor([1 - given["eps"]], dtype=torch.float64), rest])


def autodiff_jacobian(scores):
    def weights(s):
        return softmax(s[None])[0]

    return torch.autograd.functional.jacobian(weights, scores)


@pytest.mark.ledger("S3.Q1a.5", "S3.Q1a.6")
@pytest.mark.parametrize("c", cases("softmax.jacobian"), ids=lambda c: c["id"])
def test_the_jacobian_of_softmax_has_the_norm_and_bounds_of_the_ledger(c):
    a = distribution(c["inputs"])
    n, j = len(a), autodiff_jacobian(a.log())
    assert (j - softmax_jacobian(a)).abs().max() < 1e-12
    bounds = softmax_jacobian_bounds(a)
    got = {
        "n": n,
        "eps": bounds.eps.item(),
        "fro2": jacobian_norm2(a).item(),
        "fro": softmax_jacobian_norm(a).item(),
        "trace": bounds.trace.item(),
        "document_bound_fro2": bounds.by_length.item() ** 2,
        "sharp_bound_fro2": bounds.by_eps.item() ** 2,
    }
    assert agrees(got, c["expected"], c["compare"])
    assert math.isclose(j.square().sum().item(), got["fro2"], rel_tol=1e-10)
    assert got["fro2"] <= got["sharp_bound_fro2"] * (1 + 1e-12)
    assert got["fro2"] <= got["document_bound_fro2"] * (1 + 1e-12) and got["fro2"] <= 0.25 + 1e-12


@pytest.mark.ledger("S3.Q1a.6")
def test_the_norm_keeps_its_digits_where_the_power_sums_lose_all_of_them():
    small = Fraction(1, 2**40)
    exact = (2 * small * (1 - small)) ** 2  # two weights: the Jacobian is a(1 − a) ((1, −1), (−1, 1))
    a = torch.tensor([1 - float(small), float(small)], dtype=torch.float64)
    p2, p3 = a.square().sum(), a.pow(3).sum()
    assert math.isclose(jacobian_norm2(a).item(), float(exact), rel_tol=1e-12)
    assert not math.isclose((p2 - 2 * p3 + p2**2).item(), float(exact), rel_tol=0.5)
    # The top weight is 1 after rounding, but the others are known: (16 + 10 + 2 · 9 + 2) · 1e-36, where 1 − a is 0.
    rounded = torch.tensor([1.0, 3e-18, 1e-18], dtype=torch.float64)
    assert math.isclose(jacobian_norm2(rounded).item(), 46e-36, rel_tol=1e-12)


@pytest.mark.ledger("S3.Q1a.5", "S4.1.1b.1")
@given(st.integers(2, 11), st.sampled_from([0.125, 1.0, 7.0]), st.integers(0, 10**6))
def test_the_jacobian_is_symmetric_semidefinite_and_blind_to_a_shift(n, beta, seed):
    s = torch.randn(n, dtype=torch.float64, generator=seeded(seed))
    j = torch.autograd.functional.jacobian(lambda s: softmax(beta * s[None])[0], s)
    a = softmax(beta * s[None])[0]
    assert (j - softmax_jacobian(a, beta)).abs().max() < 1e-12 * beta
    assert (j - j.T).abs().max() < 1e-15 and j.sum(-1).abs().max() < 1e-14 * beta
    eigenvalues = torch.linalg.eigvalsh(j)
    assert eigenvalues[0] > -1e-14 * beta and eigenvalues[-1] <= beta / 2 + 1e-12
    assert abs(j.trace() - beta * (1 - a.square().sum())) < 1e-12 * beta
    assert abs(j.norm() - softmax_jacobian_norm(a, beta)) < 1e-12 * beta
    assert softmax_jacobian_norm(a, -beta) == softmax_jacobian_norm(a, beta)
    assert (beta * a.diag() - j).abs().max() > 1e-3 * beta / n**2  # control: diag a alone


@pytest.mark.ledger("S3.Q1a.5", "S3.Q1a.6")
def test_the_bounds_hold_for_twenty_thousand_random_distributions():
    spread = torch.logspace(-1, 1.5, 20_000, dtype=torch.float64)[
        :, None
    ]  # from near uniform to near one-hot
    a = softmax(spread * torch.randn(20_000, 13, dtype=torch.float64, generator=seeded(0)))
    norm, top = softmax_jacobian_norm(a), a.amax(-1)
    eps, by_length, trace, by_eps, any_weights = softmax_jacobian_bounds(a)
    assert torch.allclose(eps, 1 - top, atol=1e-12)
    for smaller, larger in ((norm, by_length), (norm, trace), (trace, by_eps), (norm, any_weights)):
        assert (smaller <= larger + 1e-12).all()
    for one, doubled in zip(softmax_jacobian_bounds(a)[1:], softmax_jacobian_bounds(a, -2.0)[1:]):
        assert torch.equal(2 * one, doubled)
    half = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
    assert jacobian_norm2(half) == 0.25  # the largest there is
    assert eps.min() < 1e-6 and top.min() < 0.15  # both ends were visited


def weights_of_draws(n, d, scaled, draws, seed, by_length):
    """`draws` rows of weights, of one standard normal query over n standard normal keys.

    A normal key has no direction of its own, so q·k = ‖q‖ z with z normal and ‖q‖² chi-squared: `by_length`
    draws the same law for 1/d of the work.
    """
    g = seeded(seed)
    if by_length:
        length = np.random.default_rng(seed).chisquare(d, (draws, 1)) ** 0.5
        scores = torch.from_numpy(length).float() * torch.randn(draws, n, generator=g)
    else:  # the weights that attend computes, by its own scale or without one
        q, k = torch.randn(draws, 1, d, generator=g), torch.randn(draws, n, d, generator=g)
        return attend(q, k, k[..., :1], scale=None if scaled else 1.0).weights[:, 0]
    return softmax(scores / d**0.5 if scaled else scores)


def check_saturation(c, a):
    """Both sides are draws: each mean within 5 standard errors of the difference, and the rounding printed."""
    expected, samples = c["expected"], c["compare"]["samples"]
    for name, got in (("mean_max_weight", a.amax(-1)), ("mean_fro2", jacobian_norm2(a))):
        error = got.std() * (1 / len(got) + 1 / samples) ** 0.5
        assert 5 * error < 0.005  # well under the values
        assert abs(got.mean() - expected[name]) < 5 * error + 5e-5
    if "median_fro2" in expected:
        ratio = jacobian_norm2(a).median() / expected["median_fro2"]
        assert 1 / c["compare"]["median_factor"] < ratio < c["compare"]["median_factor"]


@pytest.mark.ledger("S0.Q1a.8", "S0.Q1a.10", "S3.Q1a.4", "S3.Q1a.7")
@pytest.mark.parametrize("c", cases("stats.saturation"), ids=lambda c: c["id"])
def test_saturation_is_the_ledgers(c):
    given = c["inputs"]
    check_saturation(c, weights_of_draws(given["n"], given["d"], given["scaled"], 100_000, 0, by_length=True))


@pytest.mark.ledger("S3.Q1a.4", "S0.Q1a.8", "S0.Q1a.10")
@pytest.mark.parametrize("scaled", [True, False])
def test_saturation_is_the_same_with_fully_sampled_keys(scaled):
    c = case(f"saturation.n16.d16.{'scaled' if scaled else 'unscaled'}")
    check_saturation(c, weights_of_draws(16, 16, scaled, 100_000, 1, by_length=False))


@pytest.mark.ledger("S0.Q1a.8", "S3.Q1a.4", "S3.Q1a.7", "S0.Q1a.10")
def test_without_scaling_the_typical_derivative_dies_and_the_mean_lingers():
    """The chance of a top weight above 0.9 grows with d, never to 1; scaled, nothing moves with d."""
    rows = {
        (d, s): weights_of_draws(64, d, s, 20_000, 2, by_length=True)
        for d in (16, 64, 512)
        for s in (True, False)
    }
    sharp = [(rows[d, False].amax(-1) > 0.9).float().mean() for d in (16, 64, 512)]
    assert sharp[0] < 0.15 < sharp[1] < 0.6 < sharp[2] < 1
    norms = {key: jacobian_norm2(a) for key, a in rows.items()}
    median = [norms[d, False].median() for d in (16, 64, 512)]
    assert median[0] > 2 * median[1] > 1000 * median[2]
    mean = [norms[d, False].mean() for d in (16, 64, 512)]
    assert mean[0] > mean[1] > mean[2] > mean[0] / 5
    still = [norms[d, True].mean() for d in (16, 64, 512)]
    assert max(still) - min(still) < 0.001


@pytest.mark.ledger("S4.1.1b.2", "S0.Q1a.3")
@pytest.mark.parametrize("d, scale", [(512, 0.0441942), (64, 0.125)])
def test_the_usual_scale_is_one_over_the_root_of_the_width(d, scale):
    q, k, v = torch.randn(3, 7, d, dtype=torch.float64, generator=seeded(d))
    assert abs(d**-0.5 - scale) < 5e-8
    assert torch.equal(attend(q, k, v).o, attend(q, k, v, scale=d**-0.5).o)
    assert (attend(q, k, v).scores - scale * dot_scores(q, k)).abs().max() < 1e-4

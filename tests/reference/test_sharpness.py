"""From the mean to one key, and what changing a key does (ledger section 4)."""

from math import exp, inf, log

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from ledger_cases import agrees, case, cases
from regard.reference import attend, attend_columns, dot_scores, hardmax, softmax

seeds = st.integers(0, 10**6)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed):
    return torch.randn(*shape, dtype=torch.float64, generator=seeded(seed))


def tensors(given):
    """Q, K, V and the scale of a case."""
    q, k, v = (torch.tensor(given[name], dtype=torch.float64) for name in "QKV")
    return q, k, v, given["beta"]


@pytest.mark.ledger("S0.Q1a.4")
def test_softmax_has_the_values_of_the_ledger():
    for c in cases("softmax.values"):
        scores = c["inputs"]["beta"] * torch.tensor([c["inputs"]["scores"]], dtype=torch.float64)
        assert agrees(softmax(scores)[0].tolist(), c["expected"], c["compare"])


@pytest.mark.ledger("S4.1.1c.1", "S4.1.1d.1")
@pytest.mark.parametrize("id", ["attention.beta0", "attention.beta50"])
def test_the_two_ends_of_the_scale_are_the_ledgers(id):
    c = case(id)
    q, k, v, beta = tensors(c["inputs"])
    got = attend(q, k, v, scale=beta)
    assert agrees({"weights": got.weights.tolist(), "output": got.o.tolist()}, c["expected"], c["compare"])


@pytest.mark.ledger("S4.1.1c.1", "S2.4.1.1")
@given(seeds, st.sampled_from([1.0, 5.0, 20.0, 50.0]), st.integers(2, 11))
def test_what_escapes_the_largest_weight_falls_exponentially_with_the_gap(seed, beta, m):
    scores = normal(1, m, seed=seed)
    first, second = scores[0].topk(2).values
    rest = softmax(beta * scores)[0].sort().values[:-1].sum()  # 1 − p_max, without its rounding
    assert rest <= (m - 1) * torch.exp(-beta * (first - second)) + 1e-12


@pytest.mark.ledger("S4.1.1c.1", "S2.4.1.3")
@given(seeds, st.integers(2, 11))
def test_the_hard_limit_is_what_the_softmax_tends_to(seed, m):
    scores = normal(7, m, seed=seed)
    top = scores.topk(2).values
    gap = (top[:, 0] - top[:, 1]).min().item()
    assume(gap > 1e-6)
    sharp = softmax(40 / gap * scores)
    assert (sharp - hardmax(scores)).abs().max() < 1e-12
    assert (hardmax(scores).sum(-1) == 1).all() and (hardmax(scores).max(-1).values == 1).all()


@pytest.mark.ledger("S4.1.1c.1", "S2.4.1.3")
def test_tied_keys_share_equally_and_the_first_of_them_is_a_choice():
    scores = torch.tensor([[2.0, 2.0, 1.0]], dtype=torch.float64)
    half = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64)
    assert (softmax(1e4 * scores) - half).abs().max() < 1e-12
    assert torch.equal(hardmax(scores), half)
    assert torch.equal(hardmax(scores, ties="first"), torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64))


@pytest.mark.ledger("S4.1.1c.1", "S2.4.1.3")
@given(seeds)
def test_hard_attention_copies_one_value(seed):
    q, k, v = normal(7, 5, seed=seed), normal(11, 5, seed=seed + 1), normal(11, 3, seed=seed + 2)
    assert torch.equal(attend(q, k, v, scale=inf).o, v[dot_scores(q, k).argmax(-1)])


@pytest.mark.ledger("S2.4.1.1")
@pytest.mark.parametrize("c", cases("attention.quadratic_head"), ids=lambda c: c["id"])
def test_a_quadratic_score_sharpens_onto_its_target(c):
    given, expected = c["inputs"], c["expected"]
    axes = torch.meshgrid(*(torch.arange(side) for side in given["grid"]), indexing="ij")
    cells = torch.stack([axis.flatten() for axis in axes], -1).double()
    center = torch.tensor(given["query"]) - torch.tensor(given["shift"])
    weights = softmax(-given["alpha"] * (cells - center).square().sum(-1)[None])[0]
    top = weights.argmax()
    got = {"p_max": weights[top].item(), "one_minus_p_max": (weights.sum() - weights[top]).item()}
    assert agrees(got, {name: expected[name] for name in got}, c["compare"])
    if expected["target_inside"]:
        assert cells[top].tolist() == expected["target"] == center.tolist()


@pytest.mark.ledger("S4.1.1d.1")
@given(seeds, st.integers(1, 11))
def test_at_scale_zero_every_allowed_key_counts_the_same(seed, m):
    q, k, v = 100 * normal(7, 5, seed=seed), normal(m, 5, seed=seed + 1), normal(m, 3, seed=seed + 2)
    allowed = torch.rand(7, m, generator=seeded(seed)) < 0.7
    count = allowed.sum(-1, keepdim=True)
    got = attend(q, k, v, allowed, scale=0.0)
    uniform = allowed.double() / count.clamp(min=1)
    assert (got.weights - uniform).abs().max() <= 1e-15
    assert (got.o - uniform @ v).abs().max() < 1e-12
    if m > 1:
        assert not torch.allclose(attend(q, k, v, scale=1.0).o, v.mean(0).expand(7, 3))  # control


def changed(a, d):
    """The new weight of a key whose score grew by d: a e^d/(1 − a + a e^d)."""
    return a * d.exp() / (1 - a + a * d.exp())


def change_of_output(before, v, index, d):
    """(a' − a)/(1 − a) · (v_i − h), exact; and a d (v_i − h), its first order."""
    a, towards = before.weights[:, index], v[index] - before.o
    exact = ((changed(a, d) - a) / (1 - a))[:, None] * towards
    return exact, (a * d)[:, None] * towards


@pytest.mark.ledger("S4.1.1e.1", "S4.1.1e.2", "S4.1.1f.1")
@pytest.mark.parametrize("c", cases("attention.key_change"), ids=lambda c: c["id"])
def test_a_changed_key_moves_the_output_as_the_ledger_says(c):
    q, k, v, beta = tensors(c["inputs"])
    index, new = c["inputs"]["index"], k.clone()
    new[index] = torch.tensor(c["inputs"]["new_key"], dtype=torch.float64)
    before, after = attend(q, k, v, scale=beta), attend(q, new, v, scale=beta)
    exact, first = change_of_output(before, v, index, beta * q @ (new[index] - k[index]))
    assert (exact - (after.o - before.o)).abs().max() < 1e-12
    got = [
        {
            "weights": before.weights[i].tolist(),
            "new_weights": after.weights[i].tolist(),
            "output": before.o[i].tolist(),
            "new_output": after.o[i].tolist(),
            "exact_change": exact[i].tolist(),
            "first_order_change": first[i].tolist(),
        }
        for i in range(len(q))
    ]
    assert agrees(got, c["expected"], c["compare"])


@pytest.mark.ledger("S4.1.1e.1", "S4.1.1e.2")
@given(seeds, st.floats(0.1, 3.0))
def test_the_exact_change_holds_for_any_key_and_the_first_order_is_the_derivative(seed, beta):
    q, k, v = normal(7, 5, seed=seed), normal(11, 5, seed=seed + 1), normal(11, 3, seed=seed + 2)
    step, index = normal(5, seed=seed + 3), seed % 11
    move = torch.zeros_like(k)
    move[index] = step
    before, d = attend(q, k, v, scale=beta), beta * q @ step
    exact, first = change_of_output(before, v, index, d)
    after = attend(q, k + move, v, scale=beta)
    # 1 − a loses digits as a → 1: the error of the formula is that of (a' − a)/(1 − a)
    slack = 1e-12 / (1 - before.weights[:, index]).clamp(min=1e-15)
    assert ((exact - (after.o - before.o)).abs() <= slack[:, None]).all()
    _, slope = torch.autograd.functional.jvp(lambda t: attend(q, k + t, v, scale=beta).o, k * 0, move)
    assert (slope - first).abs().max() < 1e-10
    columns = attend_columns(q.T, (k + move).T, v.T, scale=beta)  # V softmax(…): the order that multiplies
    assert (columns.T - after.o).abs().max() < 1e-12


@pytest.mark.ledger("S4.1.1f.1")
def test_the_first_order_is_no_guide_to_a_key_ten_times_as_long():
    c = case("key.scale_10")
    for row in c["expected"]:
        exact, first = np.array(row["exact_change"]), np.array(row["first_order_change"])
        assert (exact == 0).all() or np.abs(first).max() > 4 * np.abs(exact).max()
    q, k, v, beta = tensors(c["inputs"])
    grown = k.clone()
    grown[0] *= 1e4  # in the limit the key takes all, nothing, or what it had
    weights = attend(q, grown, v, scale=beta).weights[:, 0]
    assert weights[0] == 1.0 and weights[2] == 0.0
    assert weights[1] == attend(q, k, v, scale=beta).weights[1, 0]


@pytest.mark.ledger("S4.1.1e.1")
@pytest.mark.parametrize("c", cases("attention.key_noise"), ids=lambda c: c["id"])
def test_noise_of_mean_zero_moves_the_output_and_its_mean(c):
    """Only q·ε enters, one normal number of deviation ‖q‖ σ: 80 Gauss–Hermite nodes give its moments exactly."""
    q, k, v, beta = tensors(c["inputs"])
    index, sigma = c["inputs"]["index"], c["inputs"]["sigma"]
    nodes, mass = (torch.from_numpy(x) for x in np.polynomial.hermite_e.hermegauss(80))
    mass = mass / mass.sum()
    before = attend(q, k, v, scale=beta)
    got = []
    for i, row in enumerate(q):
        keys = k.repeat(len(nodes), 1, 1)
        keys[:, index] += sigma * nodes[:, None] * row / row.norm()
        change = (
            attend(row.expand(len(nodes), 1, -1), keys, v.expand(len(nodes), -1, -1), scale=beta).o[:, 0]
            - before.o[i]
        )
        mean = mass @ change
        deviation = (mass @ (change - mean).square()).sqrt()
        a, towards, s = before.weights[i, index], v[index] - before.o[i], beta * sigma * row.norm()
        second, first = a * (1 - 2 * a) * s**2 / 2 * towards, a * s * towards.abs()
        assert (deviation / first - 1).abs().max() < 0.01 and (mean / second - 1).abs().max() < 0.01
        values = zip(
            ("mean_change", "std_change", "mean_second_order", "std_first_order"),
            (mean, deviation, second, first),
        )
        got.append({name: value.tolist() for name, value in values})
    assert agrees(got, c["expected"], c["compare"])


@pytest.mark.ledger("S4.1.1e.1")
def test_a_hundred_thousand_noisy_keys_agree():
    c, draws = case("key.noise_0.125"), 100_000
    q, k, v, beta = tensors(c["inputs"])
    keys = k.repeat(draws, 1, 1)
    keys[:, 0] += c["inputs"]["sigma"] * normal(draws, 2, seed=0)
    change = (
        attend(q.expand(draws, -1, -1), keys, v.expand(draws, -1, -1), scale=beta).o
        - attend(q, k, v, scale=beta).o
    )
    for i, row in enumerate(c["expected"]):
        mean, deviation = (
            torch.tensor(row[name], dtype=torch.float64) for name in ("mean_change", "std_change")
        )
        error = deviation / draws**0.5
        assert ((change[:, i].mean(0) - mean).abs() < 5 * error).all()
        assert (mean.abs() > 5 * error).all()  # the mean's own shift is no accident of the draws
        # the deviation's own standard error is 1/√(2·draws) = 0.22 %
        assert (change[:, i].std(0) / deviation - 1).abs().max() < 0.0112
    assert (change.abs().amax((1, 2)) > 0).all()  # every draw moves the output


@pytest.mark.ledger("S4.1.3c.1")
def test_orthonormal_keys_give_the_softmax_of_the_identity_not_the_identity():
    for c in cases("softmax.of_identity"):
        n, beta = c["inputs"]["n"], c["inputs"]["beta"]
        k = torch.linalg.qr(normal(n + 3, n, seed=n)).Q.T  # n orthonormal rows in n + 3 dimensions
        a = attend(k, k, torch.eye(n, dtype=torch.float64), scale=beta).weights
        off = a[~torch.eye(n, dtype=torch.bool)]
        assert (off - off[0]).abs().max() < 1e-12 and (a.diag() - a[0, 0]).abs().max() < 1e-12
        assert agrees({"diag": a[0, 0].item(), "off": off[0].item()}, c["expected"], c["compare"])
        assert (a - torch.eye(n)).abs().max() > 0.005  # control: "A = I"


@pytest.mark.ledger("S4.1.3c.1")
@pytest.mark.parametrize("c", cases("softmax.identity_beta"), ids=lambda c: c["id"])
def test_the_identity_is_as_near_as_the_scale_is_large(c):
    n, eta = c["inputs"]["n"], float(c["inputs"]["eta"])
    eye = torch.eye(n, dtype=torch.float64)

    def short_of_one(beta):  # what the diagonal lacks, as the sum of the rest
        return attend(eye, eye, eye, scale=beta).weights[0, 1:].sum().item()

    low, high = 0.0, 64.0
    for _ in range(80):  # bisection on the weights themselves
        middle = (low + high) / 2
        low, high = (low, middle) if short_of_one(middle) <= eta else (middle, high)
    assert agrees(high, c["expected"], c["compare"])
    assert abs(log((n - 1) * (1 - eta) / eta) - high) < 1e-11
    assert abs(short_of_one(high) - (n - 1) / (exp(high) + n - 1)) < 1e-15


@pytest.mark.ledger("S4.1.3c.1")
def test_permuted_orthonormal_keys_tend_to_a_permutation_layer():
    n = 7
    q = torch.linalg.qr(normal(n, n, seed=0)).Q.T
    order = torch.randperm(n, generator=seeded(1))
    v = normal(n, 3, seed=2)
    moved = attend(q, q[order], v[order], scale=60.0)
    assert torch.equal(moved.weights.argmax(-1), order.argsort())
    assert (moved.o - v).abs().max() < 1e-12
    assert (attend(q, q[order], v, scale=60.0).o - v[order.argsort()]).abs().max() < 1e-12
    assert (attend(q, q[order], v, scale=1.0).o - v[order.argsort()]).abs().max() > 0.1


@pytest.mark.ledger("S4.1.3d.1")
def test_diagonal_weights_are_the_identity_and_the_layer_a_pointwise_map():
    n, x, w_v, w_o = 7, normal(7, 5, seed=0), normal(5, 3, seed=1), normal(3, 5, seed=2)
    itself = torch.eye(n, dtype=torch.bool)
    got = attend(x, x, x @ w_v, itself)
    assert torch.equal(got.weights, torch.eye(n, dtype=torch.float64))  # rows that sum to 1 leave no other
    kernel = (w_v @ w_o).T[:, :, None]  # one tap
    convolved = torch.nn.functional.conv1d(x.T[None], kernel)[0].T
    assert (got.o @ w_o - convolved).abs().max() < 1e-12
    halved = 0.5 * torch.eye(n, dtype=torch.float64)  # control: diagonal, but no distribution
    assert (halved @ x @ w_v @ w_o - convolved).abs().max() > 0.1

"""The closed forms against the ledger's numbers and against what they describe, computed."""

import math

import pytest
import torch

import regard as rg
from ledger_cases import agrees, case, cases
from regard import formulas
from regard.reference import softmax

f64 = torch.float64


@pytest.mark.ledger("S0.Q2a.6", "S0.Q2a.7", "S1.Q2b.2")
@pytest.mark.parametrize("c", cases("memory.attention"), ids=lambda c: c["id"])
def test_memory_is_the_ledgers_number_and_its_formula(c):
    n, heads, batch = (c["inputs"][k] for k in ("n", "heads", "batch"))
    got = formulas.attention_memory(n, heads=heads, d_k=c["inputs"]["d_model"] // heads, batch=batch)
    expected = c["expected"]
    assert (got.qkv, got.weights, got.outputs) == (
        expected["qkv"],
        expected["attention"],
        expected["head_outputs"],
    )
    assert got.total == expected["total_values"]
    assert {name: got.bytes(name) for name in expected["total_bytes"]} == expected["total_bytes"]
    assert got.bytes("int8") == got.bytes(torch.float8_e4m3fn) == got.total


@pytest.mark.ledger("S0.Q2a.7")
def test_the_memory_formula_is_a_symbol():
    sympy = pytest.importorskip("sympy")
    n = sympy.Symbol("n", integer=True, positive=True)
    assert formulas.attention_memory("n").total == 8 * n**2 + 2048 * n
    assert formulas.attention_memory("n").bytes("bfloat16") == 16 * n**2 + 4096 * n
    free = formulas.attention_memory("n", m="m", heads="h", d_k="k", d_v="v")
    m, h, k, v = (sympy.Symbol(x, integer=True, positive=True) for x in "mhkv")
    assert sympy.expand(free.total - h * (n * m + (n + m) * (k + v))) == 0
    with pytest.raises(
        rg.SpecError, match="dtype='float7' is not a dtype of torch; use float32, bfloat16, int8"
    ):
        formulas.attention_memory(3).bytes("float7")


@pytest.mark.ledger("S1.Q5b.2")
def test_the_floor_of_the_loss_counts_the_targets_that_are_not_inputs():
    c = case("leak.16.16")
    got = {"causal": formulas.loss_floor(16, 16), "unmasked": formulas.loss_floor(16, 16, rg.full())}
    assert agrees(got, c["expected"], c["compare"])
    one_ahead = rg.window(0, 1)  # a query attends to itself and to the next token
    assert formulas.loss_floor(5, 10, one_ahead) == pytest.approx(math.log(5) / 10)
    only_back = rg.window(2, 0)
    assert formulas.loss_floor(5, 10, only_back, layers=9) == pytest.approx(math.log(5))
    skips = rg.where(lambda i, j: j - i == 2) | rg.window(1, 0)
    assert formulas.loss_floor(5, 10, skips) == pytest.approx(math.log(5))
    assert formulas.loss_floor(5, 10, skips, layers=2) == pytest.approx(
        math.log(5) / 10
    )  # two ahead, one back
    with pytest.raises(rg.SpecError, match="vocab=0; it needs to be at least 1"):
        formulas.loss_floor(0, 4)


@pytest.mark.ledger("S3.Q3b.1", "S3.Q3b.2")
@pytest.mark.parametrize("eps", [0.0, 1e-5, 0.3])
def test_layer_norm_and_its_jacobian(eps):
    g = torch.Generator().manual_seed(0)
    x, gain, shift = (
        torch.randn(3, 7, dtype=f64, generator=g) * 2 + 1,
        *torch.randn(2, 7, dtype=f64, generator=g),
    )
    want = torch.nn.functional.layer_norm(x, (7,), gain, shift, eps)
    assert torch.allclose(formulas.layer_norm(x, gain, shift, eps), want, atol=1e-12)
    assert torch.allclose(formulas.layer_norm(x, 2.0, 3.0, eps), 2 * formulas.layer_norm(x, eps=eps) + 3)
    for row, j in zip(x, formulas.layer_norm_jacobian(x, gain, eps)):
        truth = torch.autograd.functional.jacobian(lambda y: formulas.layer_norm(y, gain, shift, eps), row)
        assert torch.allclose(j, truth, atol=1e-12)
    plain = formulas.layer_norm_jacobian(x[0], eps=eps)
    assert torch.allclose(2 * plain, formulas.layer_norm_jacobian(x[0], 2.0, eps))
    assert int(torch.linalg.matrix_rank(plain, rtol=1e-10)) == (5 if eps == 0 else 6)


@pytest.mark.ledger("S4.1.1c.1", "S2.4.1.1")
def test_the_weight_that_escapes_the_largest_is_bounded_by_the_gap():
    g = torch.Generator().manual_seed(0)
    scores = torch.randn(500, 9, dtype=f64, generator=g)
    for scale in (1.0, 5.0, 20.0):
        escaped = 1 - softmax(scale * scores).amax(-1)
        bound = formulas.sharpness_bound(scores, scale)
        assert (escaped <= bound + 1e-12).all()
        two = formulas.sharpness_bound(scores[:, :2], scale)  # of two keys: p/(1 + p) with p the bound
        assert torch.allclose(1 - softmax(scale * scores[:, :2]).amax(-1), two / (1 + two))
    assert formulas.sharpness_bound(torch.tensor([2.0, 2.0, 1.0]), 1e4) == 2  # tied: nothing escapes by scale
    with pytest.raises(rg.ShapeError, match=r"1 score\(s\) per row: a gap needs at least two"):
        formulas.sharpness_bound(torch.ones(3, 1))


@pytest.mark.ledger("S4.1.3c.1")
def test_softmax_of_the_identity_and_the_scale_it_needs():
    for n, scale in ((4, 1.0), (16, 1.0), (7, 3.0)):
        table = softmax(scale * torch.eye(n, dtype=f64))
        assert formulas.identity_weight(n, scale) == pytest.approx(float(table[2, 2]), rel=1e-12)
    for c in cases("softmax.identity_beta"):
        n, eps = c["inputs"]["n"], float(c["inputs"]["eta"])
        assert agrees(formulas.identity_scale(n, eps), c["expected"], c["compare"])
        assert formulas.identity_weight(n, c["expected"]) == pytest.approx(1 - eps, rel=1e-12)
    with pytest.raises(rg.SpecError, match="eps=0: a softmax over 4 keys gives weights between 0 and 1"):
        formulas.identity_scale(4, 0)


@pytest.mark.ledger("S1.Q5c.1")
@pytest.mark.parametrize("c", cases("residual.chain"), ids=lambda c: c["id"])
def test_the_slope_of_a_chain_with_and_without_the_identity_path(c):
    x = torch.tensor(1.0, dtype=f64, requires_grad=True)
    slope, layers = c["inputs"]["c"], c["inputs"]["layers"]
    with_, without = formulas.residual_slope(slope, layers)
    assert agrees({"with_identity": with_, "without": without}, c["expected"], c["compare"])
    y = x
    for _ in range(layers):
        y = y + slope * y
    assert with_ == pytest.approx(float(torch.autograd.grad(y, x)[0]), rel=1e-12)

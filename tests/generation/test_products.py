"""Products with constant matrices: those of float32, whichever layout of the weights is read."""

import pytest
import torch
from torch import nn

import regard as rg
from regard import compat
from regard.generation import cpu_inference, products
from regard.generation.products import FEW_ROWS, ConstantLinear, integer_rows

torch_random = torch.Generator().manual_seed


def quantized(rows, columns, seed=0):
    """Integers times a scale per row, scales of many magnitudes; row 1 is zero."""
    random = torch_random(seed)
    integers = torch.randint(-127, 128, (rows, columns), generator=random).float()
    integers[:, 3], integers[1] = 127 * (1 - 2 * (torch.arange(rows) % 2)), 0
    scale = torch.rand(rows, generator=random) * 2.0 ** torch.randint(-20, 6, (rows,), generator=random)
    return integers, scale, integers * scale[:, None]


def test_integers_and_scales_are_found_bit_for_bit():
    integers, _, weight = quantized(4000, 7)
    found = integer_rows(weight)
    assert found is not None and torch.equal(found[0], integers)
    assert torch.equal(found[0] * found[1][:, None], weight)


@pytest.mark.parametrize("row", [0, 5])
def test_one_value_that_is_no_integer_is_seen(row):
    weight = quantized(6, 7)[2]
    weight[row, 2] += weight[row].abs().max() / 500
    assert integer_rows(weight) is None


def linear(kind, bias):
    layers = [nn.Linear(19, n, bias=bias) for n in (23, 14)]
    if kind == "integers":
        for layer, part in zip(layers, quantized(37, 19)[2].split((23, 14)), strict=True):
            layer.weight.data = part
    return ConstantLinear.of(*layers)


@pytest.mark.parametrize("rows", [1, 7, FEW_ROWS, FEW_ROWS + 1])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("kind", ["integers", "other weights", "no half", "no half, not packed", "Intel"])
@torch.no_grad()
def test_a_constant_product_is_as_exact_as_matmul(kind, bias, rows, monkeypatch):
    torch.manual_seed(1)
    monkeypatch.setattr(products, "_mkl_is_fast", lambda: kind == "Intel")
    if kind.startswith("no half"):
        monkeypatch.setattr(products, "_reads_half", lambda: False)
    if kind.endswith("not packed"):
        monkeypatch.setattr(compat, "_can_pack", lambda: False)
    made = linear("other weights" if kind == "other weights" else "integers", bias)
    assert (made.integers is None) == (kind not in ("integers", "Intel"))
    x, start, weight = torch.randn(rows, 19), torch.randn(rows, 37), torch.cat(list(made.weights))
    added = start.clone()
    made.add_to(added, x)
    shift = 0 if made.bias is None else made.bias
    exact = x.double() @ weight.double().t() + shift
    bound = 2 * float((x @ weight.t() + shift - exact).abs().max()) + 4e-7 * float(exact.abs().max())
    assert float((made(x) - exact).abs().max()) <= bound
    few = {"integers": "integers", "Intel": "transposed"}.get(kind, "packed")
    assert made._layout(rows) == (few if rows <= FEW_ROWS else "packed")
    assert float((added - (start + exact)).abs().max()) <= bound + 4e-7 * float(added.abs().max())


def test_on_intel_large_matrices_are_read_as_integers_for_few_rows(monkeypatch):
    """As measured: MKL is faster for small matrices, the packed product from 32 rows on."""
    made = linear("integers", False)
    layouts = {}
    for intel in (True, False):
        monkeypatch.setattr(products, "_mkl_is_fast", lambda intel=intel: intel)
        for size in (made.size, made.size - 1):
            monkeypatch.setattr(products, "MAX_MKL_WEIGHTS", size)
            layouts[intel, size == made.size] = [made._layout(rows) for rows in (1, 32, 33, 64, 65)]
    assert layouts[True, True] == ["transposed"] * 4 + ["packed"]
    assert layouts[True, False] == ["integers"] * 2 + ["packed"] * 3
    assert layouts[False, True] == layouts[False, False] == ["integers"] * 4 + ["packed"]


def test_operators_that_round_their_input_are_not_used(monkeypatch):
    monkeypatch.setattr(products, "_half_product", lambda weight: lambda x: x.half().float() @ weight.t())
    assert not products._reads_half.__wrapped__()
    monkeypatch.setattr(products, "_half_product", lambda weight: torch.ops.quantized.no_such_operator)
    assert not products._reads_half.__wrapped__()


def test_a_model_that_was_stored_as_integers_is_read_as_integers(tmp_path):
    """Every matrix of a decoder, the concatenated ones too; a model in floating point has none."""
    own, mlp = rg.Attention(12, heads=3, pattern=rg.causal()), rg.FeedForward(20, activation="swiglu")
    spec = rg.Encoder(rg.Block(own, mlp), 1, embedding=rg.Embedding(29, 12), head=rg.LanguageHead())
    torch.manual_seed(0)
    model = spec.build().eval()
    rg.save(model, tmp_path, weights="int8")
    for stack, stored in ((rg.load(tmp_path), True), (model, False)):
        decoder = cpu_inference.TokenDecoder(stack)
        layer = decoder.layers[0]
        matrices = [layer.own.into, layer.own.out, layer.into, layer.out, decoder.logits]
        assert all((m.integers is not None) == stored for m in matrices)

"""Layer types compared: path lengths against real dependencies, crossovers against FLOPs, growth against time."""

import json

import pytest
import torch

import regard as rg
from regard.costs import compare, cost, layers_to_connect
from regard.costs.layer_types import growth, layer_kinds
from regard.errors import SpecError
from regard.machine import slope

BY_NAME = {k.name: k for k in layer_kinds(16, 3, 2)}


@pytest.mark.parametrize("n", [2, 7, 16, 31])
@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("attention", rg.full()),
        ("restricted attention", rg.window(2)),
        ("causal convolution", rg.causal() & rg.window(2)),
    ],
)
@pytest.mark.ledger("S1.Q2a.2", "S1.Q6b.1")
def test_the_path_length_is_the_smallest_depth_that_connects_all_positions(name, pattern, n):
    assert BY_NAME[name].path_length(n) == layers_to_connect(pattern, n)


@pytest.mark.parametrize("n", [2, 7, 16, 31])
@pytest.mark.parametrize("k", [3, 5])
@pytest.mark.ledger("S1.Q2a.2")
def test_the_path_length_of_a_convolution_is_the_depth_that_connects_all_positions(n, k):
    """The ledger's 2(n − 1)/(k − 1) is the number of steps of k // 2 from one end to the other."""
    path = {kind.name: kind.path_length(n) for kind in layer_kinds(16, k, 2)}
    assert path["convolution"] == layers_to_connect(rg.window(k // 2), n)
    dilated = rg.Convolutional(
        4, layers=path["dilated causal convolution"], kernel=k, dilation=k, causal=True
    )
    below = torch.ones(n, n, dtype=torch.bool).tril()
    assert torch.equal(dilated.build().dependence(n), below)
    less = rg.Convolutional(4, layers=max(1, dilated.layers - 1), kernel=k, dilation=k, causal=True)
    assert dilated.layers == 1 or not torch.equal(less.build().dependence(n), below)


@pytest.mark.ledger("S1.Q2a.1", "S0.Q1c.5", "S0.Q1c.6", "S4.1.4a.1")
def test_only_recurrent_layers_have_sequential_steps():
    result = compare(100, 16)
    steps = {l.name: (l.sequential_steps, l.sequential_order) for l in result.layers}
    assert {name for name, s in steps.items() if s == (100, "O(n)")} == {"RNN", "GRU", "LSTM"}
    assert all(s == (1, "O(1)") for name, s in steps.items() if name not in ("RNN", "GRU", "LSTM"))


@pytest.mark.ledger("S0.Q1c.5")
def test_a_cell_has_4_12_or_16_times_its_squared_width_in_flops_per_step():
    result = compare(1, 16)
    assert [result[cell].flops // 16**2 for cell in ("RNN", "GRU", "LSTM")] == [4, 12, 16]


@pytest.mark.ledger("S0.Q1c.7", "S0.Q1c.4")
def test_a_recurrent_layer_saves_n_states_to_train_and_needs_one_to_decode():
    result = compare(100, 16, w=3)
    assert [(result[c].training_values, result[c].decoding_values) for c in ("RNN", "GRU", "LSTM")] == [
        (100 * 16, 16),
        (100 * 16, 16),
        (100 * 32, 32),
    ]
    gru = rg.Recurrent(5, 16, cell="gru").build().encoder(torch.zeros(1, 100, 16))
    assert (gru[0].numel(), gru[1].numel()) == (result["GRU"].training_values, result["GRU"].decoding_values)
    assert (
        result["attention"].training_values == 4 * 100 * 16 + 100**2
        and result["attention"].decoding_values == 2 * 100 * 16
    )
    assert result["restricted attention"].training_values == 4 * 100 * 16 + rg.window(3).count(100)
    assert result["restricted attention"].decoding_values == 2 * 7 * 16
    assert (
        result["causal convolution"].decoding_values == 2 * 16
        and result["convolution"].training_values == 100 * 16
    )


@pytest.mark.parametrize("d", [16, 60])
@pytest.mark.ledger("S0.Q1c.8", "S0.Q1c.9")
def test_flops_are_equal_at_a_crossover_and_change_order_there(d):
    by = {k.name: k for k in layer_kinds(d, 5)}
    for c in compare(10, d, 5).crossovers:
        first = by["attention"].core_flops if c.first == "attention core" else by["attention"].flops
        if c.second == "its projections":

            def second(n):
                return by["attention"].flops(n) - by["attention"].core_flops(n)
        else:
            second = by[c.second].flops
        if c.n is None:
            assert all(first(n) > second(n) for n in (1, d, 10 * d))
        else:
            n = int(c.n)
            assert c.n == n and first(n) == second(n)
            assert first(n - 1) < second(n - 1) and first(n + 1) > second(n + 1)


def test_a_comparison_prints_and_becomes_json():
    result = compare(1000, 512)
    assert "attention                   4,145,152,000  n²·d + n·d²" in str(result)
    assert "attention       LSTM                        1,024  2 d" in str(result)
    heading, first = str(result).splitlines()[2:4]
    assert heading.endswith("path length  order       values saved to train  values to decode")
    assert first.endswith("3,048,000         1,024,000")  # 4·n·d + n², and keys and values
    with pytest.raises(SpecError, match="unknown layer type 'gru'; known: GRU, LSTM, RNN, attention"):
        result["gru"]
    data = json.loads(result.json())
    assert data["layers"][0]["name"] == "attention" and len(data["layers"]) == 10
    assert ">layer</th>" in result._repr_html_() and "growth" not in str(result)


@pytest.mark.ledger("S0.Q1c.10", "S0.Q1c.1")
def test_growth_is_measured_beside_its_prediction():
    result = compare(16, 8, measure=(16, 32, 64))
    assert [g.name for g in result.growth] == [l.name for l in result.layers]
    for g in result.growth:
        assert len(g.seconds) == 3 and min(g.seconds) > 0
        assert g.measured == pytest.approx(slope(g.lengths, g.seconds))
    by = {g.name: g.predicted for g in result.growth}
    assert by["GRU"] == pytest.approx(1.0) and by["convolution"] == pytest.approx(1.0)
    assert 1.5 < by["attention"] < 2.0  # n²·d and n·d²: it tends to 2
    assert "growth measured on this machine" in str(result) and "n = 64" in str(result)


def test_the_exponent_of_a_power_is_found():
    assert slope([10, 20, 40, 80], [7 * n**1.5 for n in (10, 20, 40, 80)]) == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"n": 0}, "n=0 is not a positive integer"),
        ({"d": -4}, "d=-4 is not a positive integer"),
        ({"kernel": 1}, "kernel=1: a kernel of size 1 does not connect positions; use 2 or more"),
        ({"w": 0}, "w=0: the window needs at least one neighbor on each side"),
        ({"measure": (64,)}, "measure=(64,): fitting an exponent needs at least two lengths"),
    ],
)
def test_a_wrong_comparison_is_an_error_that_says_why(given, message):
    with pytest.raises(SpecError) as e:
        compare(**{"n": 8, "d": 8} | given)
    assert str(e.value) == message


def test_an_even_kernel_has_no_center_and_is_compared_as_causal():
    result = compare(16, 8, kernel=4)
    assert (
        result["convolution"].path_length
        == result["causal convolution"].path_length
        == result["separable convolution"].path_length
        == 5
    )


def test_the_timed_layer_is_the_priced_layer():
    kind = BY_NAME["dilated convolution"]
    result = growth(kind, (8, 16), repeats=1)
    assert result.predicted == pytest.approx(1.0)
    assert kind.flops(8) == cost(rg.Convolutional(16, layers=1), n=8).flops == 2 * 3 * 8 * 16**2

"""Layer types compared: paths against what is really seen, crossings against the costs, growth against time."""

import json

import pytest
import torch

import regard as rg
from regard.costs import compare, cost, layers_to_connect, receptive_field, receptive_set, sees
from regard.costs.layer_types import growth, kinds, slope
from regard.errors import SpecError

BY_NAME = {k.name: k for k in kinds(16, 3, 2)}


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
def test_the_path_is_the_least_depth_that_connects_everything(name, pattern, n):
    assert BY_NAME[name].path(n) == layers_to_connect(pattern, n)


@pytest.mark.parametrize("n", [2, 7, 16, 31])
@pytest.mark.parametrize("k", [3, 5])
@pytest.mark.ledger("S1.Q2a.2")
def test_the_path_of_a_convolution_bounds_what_its_taps_connect(n, k):
    """The ledger's 2(n − 1)/(k − 1) takes an end to the other with k // 2 taps a side."""
    path = {kind.name: kind.path(n) for kind in kinds(16, k, 2)}
    assert path["convolution"] == layers_to_connect(rg.window(k // 2), n)
    dilated = rg.Convolutional(
        4, layers=path["dilated causal convolution"], kernel=k, dilation=k, causal=True
    )
    below = torch.ones(n, n, dtype=torch.bool).tril()
    assert torch.equal(dilated.build().sees(n), below)
    less = rg.Convolutional(4, layers=max(1, dilated.layers - 1), kernel=k, dilation=k, causal=True)
    assert dilated.layers == 1 or not torch.equal(less.build().sees(n), below)


@pytest.mark.ledger("S1.Q2a.1", "S0.Q1c.5", "S0.Q1c.6", "S4.1.4a.1")
def test_only_recurrent_layers_wait_for_each_step():
    told = compare(100, 16)
    waits = {l.name: (l.sequential, l.sequential_order) for l in told.layers}
    assert {name for name, w in waits.items() if w == (100, "O(n)")} == {"RNN", "GRU", "LSTM"}
    assert all(w == (1, "O(1)") for name, w in waits.items() if name not in ("RNN", "GRU", "LSTM"))


@pytest.mark.ledger("S0.Q1c.5")
def test_a_cell_costs_4_12_or_16_times_the_square_of_its_width_a_step():
    told = compare(1, 16)
    assert [told[cell].operations // 16**2 for cell in ("RNN", "GRU", "LSTM")] == [4, 12, 16]


@pytest.mark.ledger("S0.Q1c.7", "S0.Q1c.4")
def test_a_recurrent_layer_keeps_n_states_to_train_and_goes_on_from_one():
    told = compare(100, 16, w=3)
    assert [(told[c].kept, told[c].state) for c in ("RNN", "GRU", "LSTM")] == [
        (100 * 16, 16),
        (100 * 16, 16),
        (100 * 32, 32),
    ]
    gru = rg.Recurrent(5, 16, cell="gru").build().encoder(torch.zeros(1, 100, 16))
    assert (gru[0].numel(), gru[1].numel()) == (told["GRU"].kept, told["GRU"].state)
    assert told["attention"].kept == 4 * 100 * 16 + 100**2 and told["attention"].state == 2 * 100 * 16
    assert told["restricted attention"].kept == 4 * 100 * 16 + rg.window(3).count(100)
    assert told["restricted attention"].state == 2 * 7 * 16
    assert told["causal convolution"].state == 2 * 16 and told["convolution"].kept == 100 * 16


@pytest.mark.parametrize("d", [16, 60])
@pytest.mark.ledger("S0.Q1c.8", "S0.Q1c.9")
def test_costs_are_equal_at_a_crossing_and_change_sides_there(d):
    by = {k.name: k for k in kinds(d, 5)}
    for c in compare(10, d, 5).crossings:
        first = by["attention"].core if c.first == "attention's core" else by["attention"].operations
        if c.second == "its projections":

            def second(n):
                return by["attention"].operations(n) - by["attention"].core(n)
        else:
            second = by[c.second].operations
        if c.n is None:
            assert all(first(n) > second(n) for n in (1, d, 10 * d))
        else:
            n = int(c.n)
            assert c.n == n and first(n) == second(n)
            assert first(n - 1) < second(n - 1) and first(n + 1) > second(n + 1)


def test_a_comparison_prints_and_reads_back():
    told = compare(1000, 512)
    assert "attention                   4,145,152,000  n²·d + n·d²" in str(told)
    assert "attention         LSTM                   1,024     2 d" in str(told)
    heading, first = str(told).splitlines()[1:3]
    assert heading.endswith("path  order       kept to train  to go on")
    assert first.endswith("3,048,000      1,024,000")  # 4·n·d + n², and keys and values
    with pytest.raises(SpecError, match="no layer type 'gru' was compared; known: GRU, LSTM, RNN, attention"):
        told["gru"]
    data = json.loads(told.json())
    assert data["layers"][0]["name"] == "attention" and len(data["layers"]) == 10
    assert "<th>layer</th>" in told._repr_html_() and "growth" not in str(told)


@pytest.mark.ledger("S0.Q1c.10", "S0.Q1c.1")
def test_growth_is_measured_beside_its_prediction():
    told = compare(16, 8, measure=(16, 32, 64))
    assert [g.name for g in told.growth] == [l.name for l in told.layers]
    for g in told.growth:
        assert len(g.seconds) == 3 and min(g.seconds) > 0
        assert g.measured == pytest.approx(slope(g.lengths, g.seconds))
    by = {g.name: g.predicted for g in told.growth}
    assert by["GRU"] == pytest.approx(1.0) and by["convolution"] == pytest.approx(1.0)
    assert 1.5 < by["attention"] < 2.0  # n²·d beside n·d²: on its way to 2
    assert "growth on this machine" in str(told) and "n = 64" in str(told)


def test_the_exponent_of_a_power_is_found():
    assert slope([10, 20, 40, 80], [7 * n**1.5 for n in (10, 20, 40, 80)]) == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"n": 0}, "n=0: a whole number of at least 1 is needed"),
        ({"d": -4}, "d=-4: a whole number of at least 1 is needed"),
        ({"kernel": 1}, "kernel=1: a kernel of one tap connects nothing; use 2 or more"),
        ({"w": 0}, "w=0: a window needs at least one neighbour each side, or nothing is ever connected"),
        ({"measure": (64,)}, "lengths=(64,): an exponent needs at least two"),
    ],
)
def test_a_comparison_that_cannot_be_says_why(given, message):
    with pytest.raises(SpecError) as e:
        compare(**{"n": 8, "d": 8} | given)
    assert str(e.value) == message


def test_an_even_kernel_has_no_middle_and_is_compared_as_causal():
    told = compare(16, 8, kernel=4)
    assert (
        told["convolution"].path == told["causal convolution"].path == told["separable convolution"].path == 5
    )


@pytest.mark.ledger("S3.Q2a.1", "S3.Q2a.3")
def test_the_exact_set_is_within_the_bound_and_inside_the_sequence():
    shifts = [[1, 4], [2, 7], [3, 5]]
    bound = receptive_field(2, 3).bound
    for at in range(20):
        seen = receptive_set(at, shifts, length=20)
        assert at in seen and len(seen) <= min(bound, at + 1) and seen <= set(range(at + 1))
    assert receptive_set(0, shifts) == {0}


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_what_a_pattern_sees_is_its_boolean_power(layers):
    pattern = rg.causal() & (rg.window(1) | rg.every(4))
    once = pattern.allowed(13).long()
    expected = torch.linalg.matrix_power(once, layers) > 0
    assert torch.equal(sees(pattern, 13, layers), expected)


def test_a_pattern_in_pieces_never_connects():
    with pytest.raises(SpecError, match=r"blocks\(4\) never connects all 16 positions, however many"):
        layers_to_connect(rg.blocks(4), 16)
    with pytest.raises(SpecError, match="heads=0: a whole number of at least 1 is needed"):
        receptive_field(0, 3)


def test_what_is_timed_is_what_was_priced():
    kind = BY_NAME["dilated convolution"]
    told = growth(kind, (8, 16), repeats=1)
    assert told.predicted == pytest.approx(1.0)
    assert kind.operations(8) == cost(rg.Convolutional(16, layers=1), n=8).operations == 2 * 3 * 8 * 16**2

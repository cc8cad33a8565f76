"""Learning rates against the ledger's numbers and laws."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger_cases import agrees, cases
from regard import schedule
from regard.errors import SpecError
from regard.schedule import constant, inverse_sqrt, warmup_cosine

THE_LEDGERS = warmup_cosine(0.001, warmup=4000, total=100_000)


@st.composite
def cosines(draw):
    warmup = draw(st.integers(1, 300))
    return warmup_cosine(draw(st.floats(1e-6, 10.0)), warmup, warmup + draw(st.integers(1, 700)))


@pytest.mark.ledger("S1.Q7a.1", "S1.Q7a.4")
def test_warm_up_and_cosine_give_the_rates_of_the_ledger():
    for c in cases("lr.warmup_cosine"):
        given = c["inputs"]
        rate = warmup_cosine(given["lr_max"], given["warmup"], given["total"])
        got = {str(step): rate(step) for step in given["steps"]}
        assert agrees(got, c["expected"], c["compare"])


@pytest.mark.ledger("S1.Q7a.1")
def test_the_last_rates_keep_all_their_digits():
    # the expansion of (1 + cos)/2 at its end: (π/2 · 1/96000)² up to a relative 1e-10; 1 + cos would be off by 4e-7
    assert math.isclose(THE_LEDGERS(99_999), 0.001 * (math.pi / 2 / 96_000) ** 2, rel_tol=1e-9)


@pytest.mark.ledger("S1.Q7a.2")
def test_the_area_is_half_of_peak_times_total():
    for c in cases("lr.sum"):
        rate = warmup_cosine(**c["inputs"])
        total = math.fsum(rate(step) for step in range(rate.total + 1))
        assert agrees(total, c["expected"], c["compare"])


@pytest.mark.ledger("S1.Q7a.2", "S1.Q7a.4")
@given(cosines())
def test_it_rises_then_falls_from_zero_to_zero(rate):
    rates = [rate(step) for step in range(rate.total + 5)]
    peak = rates.index(max(rates))
    assert peak == rate.warmup and math.isclose(rates[peak], rate.lr_max, rel_tol=1e-12)
    assert all(a < b for a, b in pairwise(rates[: peak + 1]))
    assert all(a > b for a, b in pairwise(rates[peak : rate.total + 1]))
    assert rates[0] == 0.0 and rates[rate.total :] == [0.0] * 5
    assert math.isclose(math.fsum(rates), rate.lr_max * rate.total / 2, rel_tol=1e-12)


@pytest.mark.ledger("S1.Q7a.1", "S1.Q7a.4")
@given(cosines())
def test_the_fall_is_the_cosine_and_half_way_down_it_is_half(rate):
    fall = rate.total - rate.warmup
    for step in range(rate.warmup, rate.total + 1):
        raw = rate.lr_max * (1 + math.cos(math.pi * (step - rate.warmup) / fall)) / 2
        assert math.isclose(rate(step), raw, rel_tol=1e-12, abs_tol=1e-15 * rate.lr_max)
    if fall % 2 == 0:
        assert math.isclose(rate(rate.warmup + fall // 2), rate.lr_max / 2, rel_tol=1e-12)


@pytest.mark.ledger("S1.Q7a.4")
def test_past_the_total_the_raw_formula_would_rise_and_the_schedule_does_not():
    raw = 0.001 * (1 + math.cos(math.pi * (148_000 - 4000) / 96_000)) / 2
    assert math.isclose(raw, 0.0005, rel_tol=1e-12)
    assert THE_LEDGERS(148_000) == 0.0


def test_without_warm_up_the_cosine_starts_at_its_peak():
    rate = warmup_cosine(0.3, warmup=0, total=10)
    assert rate(0) == 0.3 and math.isclose(rate(5), 0.15) and rate(10) == 0.0


@pytest.mark.ledger("S1.Q7a.3")
def test_the_inverse_square_root_gives_the_rates_of_the_ledger():
    for c in cases("lr.noam"):
        given = c["inputs"]
        rate = inverse_sqrt(given["d_model"], given["warmup"])
        assert agrees({str(s): rate(s) for s in given["steps"]}, c["expected"], c["compare"])
        assert rate(0) == 0.0
        assert math.isclose(rate(rate.warmup), (rate.d_model * rate.warmup) ** -0.5, rel_tol=1e-12)


@pytest.mark.ledger("S1.Q7a.3")
@given(st.integers(1, 2000), st.integers(1, 500), st.integers(1, 2000))
def test_the_inverse_square_root_is_the_lesser_of_two_curves(d_model, warmup, step):
    formula = d_model**-0.5 * min(step**-0.5, step * warmup**-1.5)
    assert math.isclose(inverse_sqrt(d_model, warmup)(step), formula, rel_tol=1e-12)


def test_a_constant_rate_warms_up_and_stays():
    assert [constant(0.5, warmup=4)(s) for s in (0, 1, 3, 4, 5, 10**6)] == [0.0, 0.125, 0.375, 0.5, 0.5, 0.5]
    assert constant(0.5)(0) == 0.5


@pytest.mark.parametrize(
    "value", [THE_LEDGERS, inverse_sqrt(512, 4000), constant(1), constant(0.1, warmup=3)]
)
def test_the_repr_of_a_schedule_is_its_source(value):
    assert eval(repr(value), vars(schedule)) == value
    assert type(value) in schedule.KINDS


@pytest.mark.parametrize(
    "declare, message",
    [
        (
            lambda: warmup_cosine(0.001, 10, 10),
            "warmup=10 leaves no step of total=10 for the decay; use a warmup below 10, or a total above 10",
        ),
        (lambda: warmup_cosine(0.0, 1, 10), "lr_max=0.0 is not a positive finite learning rate"),
        (lambda: warmup_cosine(math.inf, 1, 10), "lr_max=inf is not a positive finite learning rate"),
        (lambda: warmup_cosine(0.1, True, 10), "warmup=True is not a non-negative integer"),
        (lambda: warmup_cosine(0.1, 0, 0), "total=0 is not a positive integer"),
        (lambda: inverse_sqrt(512, 0), "warmup=0 is not a positive integer"),
        (lambda: inverse_sqrt(0, 4000), "d_model=0 is not a positive integer"),
        (lambda: constant(math.nan), "lr=nan is not a positive finite learning rate"),
        (lambda: constant(0.1, warmup=-1), "warmup=-1 is not a non-negative integer"),
        (
            lambda: constant(0.1)(-1),
            "step=-1 is negative; steps count from 0, and the first update is step 1",
        ),
    ],
)
def test_a_wrong_schedule_says_what_would_work(declare, message):
    with pytest.raises(SpecError) as e:
        declare()
    assert str(e.value) == message

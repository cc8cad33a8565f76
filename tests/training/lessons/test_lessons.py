"""The teaching systems: each claim is decided by its number. The quick ones here, all by `make long`."""

import json

import pytest
from typer.testing import CliRunner

from regard.cli.main import app
from regard.training.lessons import LESSONS, Lesson

CASES = [
    pytest.param("T1", marks=pytest.mark.ledger("S3.Q2b.1")),
    pytest.param("T2", marks=[pytest.mark.ledger("S3.Q2b.2"), pytest.mark.long]),
    pytest.param("T3", marks=[pytest.mark.ledger("S1.Q5a.8", "S3.Q2b.3"), pytest.mark.long]),
    pytest.param("T4", marks=[pytest.mark.ledger("S2.4.2.2", "S2.4.2.3", "S1.Q6b.1"), pytest.mark.long]),
    pytest.param("T5", marks=pytest.mark.ledger("S0.Q1d.5", "S4.1.3b.1")),
    pytest.param(
        "T6",
        marks=[
            pytest.mark.ledger("S2.4.2.4", "S4.1.5a.1", "S4.1.5b.3", "S4.1.5c.1", "S4.1.5d.2"),
            pytest.mark.long,
        ],
    ),
    pytest.param("T7", marks=[pytest.mark.ledger("S1.Q5c.2", "S1.Q7b.2"), pytest.mark.long]),
    pytest.param("T8", marks=[pytest.mark.ledger("S1.Q1a.2", "S4.1.4b.3", "S1.Q6b.3"), pytest.mark.long]),
    pytest.param("T9", marks=[pytest.mark.ledger("S1.Q5b.1", "S1.Q5b.2"), pytest.mark.long]),
    pytest.param("T10", marks=[pytest.mark.ledger("S1.Q4b.1", "S1.Q4b.3"), pytest.mark.long]),
    pytest.param("T11", marks=[pytest.mark.ledger("S4.1.3b.1"), pytest.mark.long]),
    pytest.param("T12", marks=[pytest.mark.ledger("S0.Q1a.10", "S1.Q6b.2"), pytest.mark.long]),
    pytest.param("T13", marks=[pytest.mark.ledger("S0.Q2c.4", "S2.1.1.1"), pytest.mark.long]),
]


@pytest.mark.parametrize("number", CASES)
def test_the_claim_is_supported(number):
    told = LESSONS[number]()
    assert told.number == number and told.measured
    assert told.passed, str(told)


def test_every_lesson_is_tested():
    assert set(LESSONS) == {case.values[0] for case in CASES}


def test_lessons_on_images_keep_what_they_ask_for_and_fall_untrained():
    told = LESSONS["T4"](steps=4)
    assert not told.passed and set(told.measured["accuracy"]) == {"everywhere", "local window"}
    kept = told.measured["center and spread, head 0"]["everywhere"]
    assert list(kept) == [1, 2, 3, 4] and all(
        0 <= v <= 1 for v in told.measured["heads near an integer offset"].values()
    )
    told = LESSONS["T6"](steps=8)
    assert not told.passed and told.measured["fine-tuned head"] == (64, 2)
    assert abs(told.measured["near minus far, position vectors"]["initialized"]) < 0.1  # no locality built in


def test_a_lesson_that_trains_too_little_fails():
    assert not LESSONS["T3"](steps=3).passed
    assert not LESSONS["T9"](steps=3).passed


def test_a_lesson_says_what_was_measured():
    told = Lesson("T0", "all is well", {"loss": {"a": 0.123456, 16: "refused"}, "word": "x"}, False)
    assert str(told) == "T0 failed: all is well\n  loss: a 0.1235, 16 refused\n  word: x"


def test_a_lesson_runs_from_the_command_line():
    done = CliRunner().invoke(app, ["train", "T5", "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["passed"] and told["measured"]["with positions"]["accuracy"] == 1.0
    listed = CliRunner().invoke(app, ["train", "--list"]).stdout
    assert "T9: on random tokens a causal model learns nothing, an unmasked one reads the answer." in listed

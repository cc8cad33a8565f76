"""Every seeded fault is caught by the law that it names; the correct sources break no law."""

import pytest

from faults.fault import FUNCTIONS, MODELS, MODULES, correct, load
from faults.faults import FAULTS
from regard.laws import LAWS, Budget, law, search, try_law

CORRECT = (*FUNCTIONS, *MODULES, *MODELS)


@pytest.fixture
def no_shrinking(monkeypatch):
    """Skip the search for a smaller case, which takes most of the time; test_checker.py and `make long` test it."""
    monkeypatch.setattr(search, "MAX_SHRINK_RUNS", 0)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name)
def test_the_fault_is_caught_by_its_law(fault, no_shrinking):
    outcome = try_law(law(fault.law), fault.target())
    assert outcome.failed, f"{outcome.law.number} {outcome.law.name} {outcome.status}: {outcome.message}"
    assert outcome.message and outcome.snippet
    assert outcome.counterexample is not None


@pytest.mark.parametrize("source", CORRECT)
def test_the_laws_that_catch_faults_hold_for_correct_sources(source):
    target = correct(source)
    used = {fault.law for fault in FAULTS if fault.source == source}
    outcomes = [try_law(law(number), target, Budget(cases=5)) for number in sorted(used)]
    assert [o for o in outcomes if o.status != "holds"] == []


@pytest.mark.long
@pytest.mark.parametrize("source", CORRECT)
def test_correct_variants_break_no_law(source):
    target = correct(source)
    outcomes = [try_law(one, target, Budget(cases=100)) for one in LAWS]
    assert [(o.law.number, o.message) for o in outcomes if o.failed] == []


def test_there_are_many_faults_and_no_two_are_the_same():
    assert len(FAULTS) >= 45
    assert len({f.name for f in FAULTS}) == len(FAULTS)
    assert len({(f.source, f.law, f.old, f.new, f.also) for f in FAULTS}) == len(FAULTS)


def test_every_fault_changes_the_source():
    with pytest.raises(AssertionError, match=r"'no such text' occurs 0 times in correct_attention\.py"):
        load("correct_attention", (("no such text", "others"),))
    for fault in FAULTS:
        assert fault.old != fault.new

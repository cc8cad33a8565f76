"""Every seeded fault is caught by the law that names it; the sound sources they were made from break none."""

import pytest

from faults.fault import ASKED, MODELS, MODULES, load, sound
from faults.seeded import FAULTS
from regard.laws.catalogue import LAWS, law
from regard.laws.checker import Budget, try_law

SOUND = (*ASKED, *MODULES, *MODELS)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.said)
def test_the_fault_is_caught_by_its_law(fault):
    outcome = try_law(law(fault.law), fault.target())
    assert outcome.failed, f"{outcome.law.number} {outcome.law.name} {outcome.status}: {outcome.said}"
    assert outcome.said and outcome.snippet
    assert outcome.counterexample is not None


@pytest.mark.parametrize("of", SOUND)
def test_the_laws_that_catch_faults_hold_where_there_is_none(of):
    target = sound(of)
    used = {fault.law for fault in FAULTS if fault.of == of}
    outcomes = [try_law(law(number), target, Budget(cases=10)) for number in sorted(used)]
    assert [o for o in outcomes if o.status != "holds"] == []


@pytest.mark.long
@pytest.mark.parametrize("of", SOUND)
def test_no_law_is_broken_by_what_is_sound(of):
    target = sound(of)
    outcomes = [try_law(one, target, Budget(cases=100)) for one in LAWS]
    assert [(o.law.number, o.said) for o in outcomes if o.failed] == []


def test_there_are_many_faults_and_no_two_are_the_same():
    assert len(FAULTS) >= 45
    assert len({f.said for f in FAULTS}) == len(FAULTS)
    assert len({(f.of, f.law, f.old, f.new, f.also) for f in FAULTS}) == len(FAULTS)


def test_a_fault_that_changes_nothing_is_no_fault():
    with pytest.raises(AssertionError, match=r"'no such words' stands 0 times in sound_attention\.py"):
        load("sound_attention", (("no such words", "others"),))
    for fault in FAULTS:
        assert fault.old != fault.new

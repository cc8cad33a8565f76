"""The control of every law is reported as broken, and the reference is not."""

import pytest

from regard.laws import LAWS, Budget, check, try_law
from regard.laws.controls import reference_function, small_attention, small_decoder
from regard.laws.parts import own_parts

COMPILED = {"L55"}  # runs torch.compile: see test_compiled.py
FEW = Budget(cases=8, seconds=30.0)
ENOUGH = Budget(cases=40, seconds=60.0)


@pytest.mark.parametrize("law", [x for x in LAWS if x.number not in COMPILED], ids=lambda x: x.number)
def test_the_control_of_every_law_is_broken(law):
    target = law.control()
    outcome = try_law(law, target, ENOUGH)
    assert outcome.status == "broken", f"{target.name}: {outcome.status} {outcome.message}"
    assert outcome.counterexample is not None and outcome.failed
    assert law.number in outcome.snippet


def test_every_law_of_the_ledger_is_there():
    numbers = [law.number for law in LAWS]
    assert numbers == sorted(numbers) and len(numbers) == len(set(numbers))
    assert {f"L{i:02}" for i in range(1, 64)} | {f"P{i:02}" for i in range(1, 11)} <= set(numbers)
    assert all(law.formula and law.domain and law.trials for law in LAWS)


def test_the_reference_obeys_every_law():
    verdict = check(reference_function(), budget=FEW)
    assert verdict.ok, str(verdict)
    assert verdict.counts()["holds"] >= 55


@pytest.mark.parametrize("part", own_parts(), ids=lambda part: part.kind)
def test_the_parts_of_regard_obey_their_laws(part):
    verdict = check(part, budget=FEW)
    assert verdict.ok, str(verdict)


@pytest.mark.parametrize(
    "model",
    [small_attention("a small attention"), small_decoder("a small language model")],
    ids=lambda m: m.architecture,
)
def test_the_small_modules_obey_every_law(model):
    verdict = check(model, budget=FEW)
    assert verdict.ok, str(verdict)

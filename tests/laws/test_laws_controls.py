"""Every law is trusted because its control is reported as broken, and the formula is not."""

import pytest

from regard.laws import LAWS, Budget, check, try_law
from regard.laws.controls.functions import formula
from regard.laws.controls.modules import small_attention, small_decoder
from regard.laws.parts import ours

TRACED = {"L55"}  # runs the compiler: see test_laws_compiled.py
FEW = Budget(cases=8, seconds=30.0)
ENOUGH = Budget(cases=40, seconds=60.0)


@pytest.mark.parametrize("one", [x for x in LAWS if x.number not in TRACED], ids=lambda x: x.number)
def test_the_control_of_every_law_is_broken(one):
    target = one.control()
    outcome = try_law(one, target, ENOUGH)
    assert outcome.status == "broken", f"{target.name}: {outcome.status} {outcome.said}"
    assert outcome.counterexample is not None and outcome.failed
    assert one.number in outcome.snippet


def test_every_law_of_the_ledger_is_there():
    numbers = [one.number for one in LAWS]
    assert numbers == sorted(numbers) and len(numbers) == len(set(numbers))
    assert {f"L{i:02}" for i in range(1, 64)} | {f"P{i:02}" for i in range(1, 11)} <= set(numbers)
    assert all(one.formula and one.domain and one.on for one in LAWS)


def test_the_formula_keeps_every_law():
    verdict = check(formula(), budget=FEW)
    assert verdict.ok, str(verdict)
    assert verdict.counts()["holds"] >= 55


@pytest.mark.parametrize("part", ours(), ids=lambda part: part.kind)
def test_our_parts_keep_their_laws(part):
    verdict = check(part, budget=FEW)
    assert verdict.ok, str(verdict)


@pytest.mark.parametrize(
    "model",
    [small_attention("a small attention"), small_decoder("a small language model")],
    ids=lambda m: m.of,
)
def test_small_modules_written_by_hand_keep_every_law(model):
    verdict = check(model, budget=FEW)
    assert verdict.ok, str(verdict)

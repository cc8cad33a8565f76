"""The control of every law is reported as broken, and the reference is not."""

import pytest
import torch

from regard.laws import LAWS, Budget, check, replay, search, try_law
from regard.laws.controls import reference_function, small_attention, small_decoder
from regard.laws.parts import own_parts

COMPILED = {"L55"}  # runs torch.compile: see test_compiled.py
FEW = Budget(cases=5, seconds=30.0)
ENOUGH = Budget(cases=40, seconds=60.0)
EAGER = [law for law in LAWS if law.number not in COMPILED]


@pytest.mark.parametrize("law", EAGER, ids=lambda law: law.number)
def test_the_control_of_every_law_is_broken(law, monkeypatch):
    monkeypatch.setattr(search, "MAX_SHRINK_RUNS", 0)
    target = law.control()
    outcome = try_law(law, target, ENOUGH)
    assert outcome.status == "broken", f"{target.name}: {outcome.status} {outcome.message}"
    assert outcome.counterexample is not None and outcome.failed
    assert law.number in outcome.snippet


@pytest.mark.long
@pytest.mark.parametrize("law", EAGER, ids=lambda law: law.number)
def test_the_smallest_counterexample_of_every_control_breaks_the_law(law):
    target = law.control()
    outcome = try_law(law, target, ENOUGH)
    assert outcome.status == "broken"
    assert "is broken" in replay(law.number, target, **outcome.counterexample)


def test_every_law_of_the_ledger_exists():
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
def test_the_small_modules_obey_every_law_and_are_not_modified(model):
    before = [p.clone() for p in model.module.parameters()]
    verdict = check(model, budget=FEW)
    assert verdict.ok, str(verdict)
    assert all(torch.equal(p, b) for p, b in zip(model.module.parameters(), before))
    assert model.module.training and next(model.module.parameters()).dtype == torch.float32

"""No false alarm: the formula, our own attention and our own models keep every law over 500 cases a law.

`make long`; REGARD_CASES for another number. Sampled laws take 20 fixed seeds. `make laws` takes 10,000 cases, and
stores what was seen in bench/results/.
"""

import os

import pytest

from regard.laws import LAWS, Budget, adapters, try_law
from regard.laws.controls.functions import formula
from regard.laws.harness import probe
from regard.laws.parts import ours

pytestmark = pytest.mark.long
CASES = int(os.environ.get("REGARD_CASES", "500"))
BUDGET = Budget(cases=CASES, seconds=3600.0, seeds=20)
COMPILED = {"L55"}
TARGETS = {
    "formula": formula,
    "attention": adapters.regard_function,
    **{part.name: (lambda part=part: part) for part in ours()},
}


@pytest.mark.parametrize(
    "one", [one for one in LAWS if one.number not in COMPILED], ids=lambda one: one.number
)
@pytest.mark.parametrize("name", TARGETS)
def test_no_law_is_broken_over_many_cases(name, one):
    target = TARGETS[name]()
    found, why = probe(target)
    outcome = try_law(one, target, BUDGET, found=found, why=why)
    if outcome.status in ("not applicable", "not promised"):
        pytest.skip(outcome.said)
    assert outcome.status == "holds", f"{outcome.said}\n{outcome.counterexample}"
    assert outcome.cases == 20 or outcome.cases == CASES

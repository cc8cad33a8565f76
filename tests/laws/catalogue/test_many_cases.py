"""No false alarms: the reference, rg.attention and the parts of regard obey every law over 500 cases per law.

Run by `make long`; REGARD_CASES sets another number. Sampled laws take 20 fixed seeds. `make laws` runs 10,000 cases
and stores the results in bench/results/.
"""

import os

import pytest

from regard.laws import LAWS, Budget, adapters, try_law
from regard.laws.controls import reference_function
from regard.laws.parts import own_parts

pytestmark = pytest.mark.long
CASES = int(os.environ.get("REGARD_CASES", "500"))
BUDGET = Budget(cases=CASES, seconds=3600.0, seeds=20, total=4 * 3600.0)
COMPILED = {"L55"}
TARGETS = {
    "reference": reference_function,
    "attention": adapters.regard_function,
    **{part.name: (lambda part=part: part) for part in own_parts()},
}


@pytest.mark.parametrize(
    "law", [law for law in LAWS if law.number not in COMPILED], ids=lambda law: law.number
)
@pytest.mark.parametrize("name", TARGETS)
def test_no_law_is_broken_over_many_cases(name, law):
    target = TARGETS[name]()
    outcome = try_law(law, target, BUDGET)
    if outcome.status in ("not applicable", "not promised"):
        pytest.skip(outcome.message)
    assert outcome.status == "holds", f"{outcome.message}\n{outcome.counterexample}"
    assert outcome.cases == 20 or outcome.cases == CASES

"""L55, compiled equals eager; it runs without the shape checker."""

import pytest

from regard import compat
from regard.laws import Budget, law, try_law
from regard.laws.adapters import regard_function
from regard.laws.controls import with_weights
from regard.reference import softmax

pytestmark = pytest.mark.compiled


def test_another_scale_when_compiled_is_reported():
    one = law("L55")
    outcome = try_law(one, one.control(), Budget(seconds=100.0))
    assert outcome.status == "broken" and "compiled outputs against eager ones" in outcome.message


def test_the_reference_compiles_to_itself():
    target = with_weights("reference", softmax).with_claims("compile")
    outcome = try_law(law("L55"), target, Budget(seconds=100.0))
    assert outcome.status == "holds", outcome.message


def test_regard_compiles_to_itself_and_the_law_restores_the_denormal_mode():
    assert not compat.denormals_flushed()
    outcome = try_law(law("L55"), regard_function().with_claims("compile"), Budget(cases=2, seconds=100.0))
    assert outcome.status == "holds", outcome.message
    assert not compat.denormals_flushed()

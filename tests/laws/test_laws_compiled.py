"""The law of compilers, in the call without the shape checker."""

import pytest

from regard.engine.cpu import denormals
from regard.laws import Budget, law, try_law
from regard.laws.adapters import regard_function
from regard.laws.controls.functions import weighing
from regard.reference import softmax

pytestmark = pytest.mark.compiled


def test_another_scale_under_the_compiler_is_found():
    one = law("L55")
    outcome = try_law(one, one.control(), Budget(seconds=100.0))
    assert outcome.status == "broken" and "compiled against eager" in outcome.said


def test_the_formula_compiles_to_itself():
    target = weighing("formula", softmax).having("compile")
    outcome = try_law(law("L55"), target, Budget(seconds=100.0))
    assert outcome.status == "holds", outcome.said


def test_the_law_leaves_denormal_numbers_alone_and_ours_compiles_to_itself():
    assert not denormals.flushed()
    outcome = try_law(law("L55"), regard_function().having("compile"), Budget(cases=2, seconds=100.0))
    assert outcome.status == "holds", outcome.said
    assert not denormals.flushed()

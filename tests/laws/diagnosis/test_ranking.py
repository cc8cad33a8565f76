"""Which cause is named first: by what faulty variants explain, and by the laws that are broken."""

from types import SimpleNamespace

import pytest
import torch

from regard.laws.catalogue import law
from regard.laws.diagnosis import functions
from regard.laws.diagnosis.by_laws import from_laws
from regard.laws.diagnosis.formula import Call, Variant
from regard.laws.diagnosis.samples import Sample
from regard.laws.law import Outcome
from regard.laws.target import Function


def sample(name):
    x = torch.zeros(1, 1, 2, 2)
    facets = dict.fromkeys(("b", "h", "h_kv", "n", "m", "d_k", "d_v"), 2)
    facets |= {"options": (name,), "grad": False, "dtype": "float64", "size": 1.0}
    return Sample(name, Call(x, x, x, {}), facets)


def test_what_explains_most_comes_first_then_what_contradicts_least_then_one_mask_then_the_usual_order(
    monkeypatch,
):
    matches = {  # the wrong calls a, b, c and the right calls y, z that each variant reproduces
        "one": "ayz", "all but contradicting": "abc", "all of two masks": "abcyz", "all": "abcyz",
        "all, later": "abcyz",
    }  # fmt: skip
    variants = [Variant(name, name, "", {"combine" if "two" in name else "factor": None}) for name in matches]
    monkeypatch.setattr(functions, "_candidates", lambda seen: variants)
    monkeypatch.setattr(functions, "_matches", lambda v, s, got: s.name in matches[v.name])
    monkeypatch.setattr(functions, "relevant", lambda v, s: True)
    seen = SimpleNamespace(wrong=[(sample(x), [], []) for x in "abc"], right=[(sample(x), []) for x in "yz"])
    found = [variant.name for variant, *_ in functions._ranked(seen)]
    assert found == ["all", "all, later", "all of two masks", "all but contradicting", "one"]


def named(kind, **broken):
    target = Function("f", lambda q, k, v: v) if kind == "function" else object()
    outcomes = [Outcome(law(number), "broken", message) for number, message in broken.items()]
    return from_laws(SimpleNamespace(target=target), outcomes)


@pytest.mark.parametrize(
    "kind, broken, family",
    [
        ("function", {"L50": "∂/∂k: got 0, expected 1"}, "input detached"),
        # wrong outputs have wrong gradients, and break what holds of every output
        ("function", {"L50": "∂/∂k: got 0, expected 1", "L05": "got 1, expected 2"}, "outputs are wrong"),
        ("function", {"L57": "got 1, expected 2", "L05": "got 1, expected 2"}, "outputs are wrong"),
        ("function", {"L57": "got 1, expected 2"}, "strides ignored"),
        # unless the gradient does not arrive at all
        ("function", {"L50": "no gradient reached k", "L05": "got 1, expected 2"}, "input detached"),
        # a call that raised says nothing about the rest
        ("module", {"L48": "raised KeyError", "L31": "got 1, expected 2"}, "padding ignored"),
        ("module", {"L31": "raised KeyError"}, "padding ignored"),
        ("module", {"L31": "got 1, expected 2", "L19": "got 1, expected 2"}, "head split order"),
    ],
)
def test_the_most_informative_law_is_the_cause(kind, broken, family):
    found = named(kind, **broken)
    assert found is not None and found.family == family, found


def test_without_a_broken_law_there_is_no_cause():
    assert named("function") is None

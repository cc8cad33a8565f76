"""`regard.testing.laws`: one test per law, in the user's own tests."""

import pytest
import torch.nn.functional as F
from torch import nn

import regard as rg
from regard.errors import SpecError
from regard.laws import LAWS, Budget, law, try_law
from regard.testing import laws, report

pytest_plugins = ["pytester"]
FEW = Budget(cases=3)

test_sdpa_obeys_these_laws = laws(
    F.scaled_dot_product_attention, only=["causality", "rows sum to one", "L48"], budget=4
)


@laws
def test_a_decorated_function_makes_the_target():
    return nn.MultiheadAttention(8, 2, batch_first=True)


test_a_decorated_function_makes_the_target.pytestmark[0] = pytest.mark.parametrize(
    "law", [law("L19"), law("L29")], ids=["L19", "L29"]
)  # two of them are enough here


def leaky(q, k, v, is_causal=False):
    return F.scaled_dot_product_attention(q, k, v)


def test_there_is_one_test_per_law_named_after_it():
    test = laws(leaky)
    (mark,) = test.pytestmark
    assert mark.args[0] == "law" and mark.args[1] == LAWS
    assert mark.kwargs["ids"][0] == "L01 rows sum to one"
    fewer = laws(leaky, without="L09").pytestmark[0].args[1]
    assert len(fewer) == len(LAWS) - 1


def test_a_broken_law_fails_with_its_counterexample():
    test = laws(leaky, budget=FEW)
    with pytest.raises(pytest.fail.Exception) as e:
        test(law("causality"))
    message = str(e.value)
    assert (
        message.startswith("L29 causality: ")
        and "smallest case found: " in message
        and "replay('L29'" in message
    )
    assert "where: " in message and message == report(try_law(law("L29"), rg.laws.adapters.adapt(leaky), FEW))


def test_what_does_not_apply_is_skipped_with_its_reason():
    with pytest.raises(pytest.skip.Exception, match="not applicable: "):
        laws(leaky)(law("L41"))
    with pytest.raises(pytest.skip.Exception, match="not promised: observed"):
        laws(leaky, budget=FEW)(law("P05"))


def test_an_unknown_law_is_refused_when_the_test_is_made():
    with pytest.raises(SpecError, match=r"no law is called 'causalty'; did you mean causality\?"):
        laws(leaky, only="causalty")


def test_laws_run_as_tests_in_a_separate_folder(pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # other plugins may not work in this process
    pytester.makepyfile(
        mine="""
        import torch.nn.functional as F

        def attention(q, k, v, is_causal=False):
            return F.scaled_dot_product_attention(q, k, v)
        """,
        test_mine="""
        from mine import attention
        from regard.testing import laws

        test_mine = laws(attention, only=["L02", "L29", "L41"], budget=3)
        """,
    )
    done = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-q")
    done.assert_outcomes(passed=1, failed=1, skipped=1)
    done.stdout.fnmatch_lines(["*L29 causality: *", "*smallest case found: *"])

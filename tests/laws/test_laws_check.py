"""`check` itself: what a strange target gets told, how small a counterexample is, what the exit code says."""

import json
import time
from dataclasses import replace

import pytest
import torch

from regard.errors import SpecError
from regard.laws import LAWS, Budget, Case, Function, Model, check, law, replay, try_law
from regard.laws import search as looking
from regard.laws.controls.functions import CLAIMS, formula, wrapped
from regard.laws.controls.modules import small_attention
from regard.laws.law import Trial
from regard.reference import attend

FEW = Budget(cases=6, seconds=20.0)
SOME = ["L01", "L06", "L29", "L48", "P05"]


def plain(q, k, v):
    return attend(q, k, v).o


def raising(q, k, v):
    raise ValueError("no such kernel")


def test_a_target_that_raises_is_told_so_and_the_run_goes_on():
    verdict = check(Function("raising", raising), SOME, FEW)
    assert verdict.exit_code == 2 and not verdict.ok
    assert [o.status for o in verdict.outcomes] == ["raised"] * len(SOME)
    assert all("ValueError: no such kernel" in o.said for o in verdict.outcomes)


def test_a_target_that_raises_only_under_a_mask_breaks_the_laws_of_masks_alone():
    def call(q, k, v, *, allowed=None):
        if allowed is not None:
            raise NotImplementedError("masks come next week")
        return plain(q, k, v)

    verdict = check(Function("no masks yet", call, claims={"mask"}), ["L17", "L34", "L51", "L05"], FEW)
    assert verdict["L17"].status == verdict["L34"].status == "raised"
    assert "raised NotImplementedError: masks come next week; case b=" in verdict["L17"].said
    assert verdict["L51"].status == "not applicable"
    assert verdict.exit_code == 1


def test_a_wrong_shape_is_named_with_both_shapes():
    verdict = check(Function("turned", lambda q, k, v: plain(q, k, v).mT), ["L01", "P05"], FEW)
    assert verdict.exit_code == 2
    assert (
        "gave shape (2, 2, 5, 7); q (2, 2, 7, 5) over v (2, 2, 7, 5) owe (2, 2, 7, 5)" in verdict["L01"].said
    )


def test_something_that_is_no_tensor_is_named():
    verdict = check(Function("a list", lambda q, k, v: [1.0]), ["L01"], FEW)
    assert "gave list; q" in verdict["L01"].said


def test_nan_everywhere_breaks_what_it_touches():
    target = Function("nan", lambda q, k, v: plain(q, k, v) * torch.nan, claims={"float64", "float32"})
    verdict = check(target, ["L01", "L02", "L06"], FEW)
    assert verdict.exit_code == 1
    assert {o.status for o in verdict.outcomes} == {"broken"}
    assert "NaN of" in verdict["L06"].said


def test_a_target_that_takes_minutes_is_stopped():
    calls = []

    def slow(q, k, v):
        calls.append(1)
        if len(calls) > 12:
            time.sleep(600)
        return plain(q, k, v)

    began = time.monotonic()
    verdict = check(Function("slow", slow), ["L48", "L05"], Budget(cases=6, seconds=0.2))
    assert time.monotonic() - began < 30
    assert "too slow" in {o.status for o in verdict.outcomes}
    assert "no answer within 1 s" in str(verdict)


def test_a_target_that_never_answers_at_all_is_told_so():
    from regard.laws import checker

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checker, "PROBING", 0.3)
        verdict = check(Function("stuck", lambda q, k, v: time.sleep(600)), ["L05"], FEW)
    assert verdict.exit_code == 2
    assert "no answer within" in verdict["L05"].said


def test_a_target_of_another_device_is_not_applicable_here():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    verdict = check(Function("on a GPU", plain, device="cuda"), SOME, FEW)
    assert verdict.exit_code == 2
    assert {o.said for o in verdict.outcomes} == {"needs a CUDA device, and this machine has none"}


def test_a_target_that_draws_lots_is_found_out():
    def noisy(q, k, v):
        return plain(q, k, v) + 1e-6 * torch.rand(1, dtype=q.dtype)

    observed = check(Function("noisy", noisy), ["P05"], FEW)["P05"]
    assert observed.status == "not promised" and "outputs of equal calls differ by" in observed.said
    claimed = check(Function("noisy", noisy, claims={"deterministic"}), ["P05"], FEW)
    assert claimed["P05"].status == "broken" and claimed.exit_code == 1


def test_what_nobody_promised_does_not_change_the_exit_code():
    verdict = check(Function("bare", plain), ["L05", "P03", "P06"], FEW)
    assert verdict["P03"].status == "not applicable"
    assert verdict["P03"].said == "needs 'mask' or 'lengths', which is not claimed"
    assert verdict["P06"].status == "not promised" and verdict["P06"].said.startswith("observed: raised")
    assert verdict.exit_code == 0 and verdict.ok


def test_the_counterexample_is_the_smallest():
    leak = wrapped("causal ignored", lambda q, k, v, asked: ((q, k, v), {}))
    outcome = try_law(law("causality"), leak)
    assert outcome.status == "broken"
    case = outcome.counterexample
    assert (case.b, case.h, case.n, case.m, case.d_k, case.d_v) == (1, 1, 2, 2, 1, 1)
    assert "∂ output 0/∂" in outcome.said or "output 0 after" in outcome.said


def test_the_search_ends_at_the_first_values_that_still_break():
    space = {"n": (1, 2, 3, 5, 7), "m": (1, 2, 3), "kind": ("a", "b")}
    case = Case(n=7, m=3, kind="b", seed=9)
    small = looking.smallest(case, space, None, lambda c: c.n >= 3 and c.kind == "b", time.monotonic() + 5)
    assert dict(small) == {"n": 3, "m": 1, "kind": "b", "seed": 0}


def test_cases_show_every_value_of_every_field():
    drawn = looking.cases({"n": (1, 2, 3), "kind": ("a", "b", "c", "d")}, None, seed=0)
    some = [next(drawn) for _ in range(12)]
    assert {c.n for c in some[:3]} == {1, 2, 3} and {c.kind for c in some[:4]} == set("abcd")
    assert [c.seed for c in some] == list(range(12))
    assert not list(looking.cases({"n": (1,)}, lambda c: False, seed=0))


def test_the_snippet_runs_and_prints_the_violation(capsys):
    outcome = try_law(law("L58"), formula().having(), Budget(cases=3))
    assert outcome.status == "holds"
    broken = formula()
    object.__setattr__(broken, "alignment", "top-left")
    outcome = try_law(law("L58"), broken, Budget(cases=3))
    assert "from regard.laws.controls.functions import formula" in outcome.snippet
    exec(outcome.snippet.replace("target = formula()", "target = broken"), {"broken": broken})
    said = capsys.readouterr().out
    assert said.startswith(
        "L58 alignment as declared is broken on reference.py: declared top-left, and it is bottom-right"
    )


def test_replay_says_when_a_case_holds():
    assert replay(
        "L01", formula(), b=1, h=1, n=2, m=2, d_k=1, d_v=1, hide="nothing", size=1.0, seed=0
    ).startswith("L01 rows sum to one holds on reference.py")
    with pytest.raises(
        SpecError, match=r"L22 is about sinusoids, and reference\.py is an attention function"
    ):
        replay("L22", formula(), d=2)


def test_the_verdict_as_json_and_as_a_table():
    verdict = check(formula(), ["L01", "L22", "P01"], FEW)
    data = json.loads(verdict.json())
    assert data["target"] == "reference.py" and data["exit_code"] == 0
    assert [row["status"] for row in data["laws"]] == ["holds", "not applicable", "not promised"]
    assert data["laws"][0]["formula"].startswith("A_ij ≥ 0") and data["laws"][0]["cases"] == 6
    lines = str(verdict).splitlines()
    assert lines[0] == "reference.py: 1 holds, 1 not applicable, 1 not promised"
    assert lines[1].startswith("✓ L01 rows sum to one   holds, 6 cases, worst ")
    assert (
        lines[2]
        == "– L22 sinusoids         not applicable: it is about sinusoids, and this is an attention function"
    )
    assert lines[3] == "○ P01 NaN under a mask  not promised: said to be lacking; not tried"
    assert verdict["rows sum to one"] is verdict["L01"]
    with pytest.raises(KeyError):
        verdict["L29"]


def test_infinite_errors_survive_json():
    row = try_law(law("L50"), law("L50").control(), FEW).plain()
    assert row["worst"] == "inf" and json.dumps(row)


def test_laws_are_found_by_number_and_by_name():
    assert law("l29") is law("Causality") is LAWS[28]
    with pytest.raises(SpecError, match="no law is called 'causalty'; did you mean causality"):
        law("causalty")


def test_claims_are_words_that_are_known():
    with pytest.raises(SpecError, match="claims has 'masks'; did you mean mask"):
        Function("x", plain, claims={"masks"})
    with pytest.raises(SpecError, match="mask: claimed and denied at once"):
        Function("x", plain, claims={"mask"}, lacks={"mask"})
    with pytest.raises(SpecError, match="alignment='left'; did you mean top-left"):
        Function("x", plain, alignment="left")
    with pytest.raises(SpecError, match="of='encodr'; did you mean encoder"):
        Model("x", torch.nn.Identity(), lambda m, x: x, of="encodr", d_model=3)
    with pytest.raises(SpecError, match="say what it takes: vocab=, image= or d_model="):
        Model("x", torch.nn.Identity(), lambda m, x: x)
    with pytest.raises(SpecError, match="a cache needs both start= and step="):
        Model("x", torch.nn.Identity(), lambda m, x: x, d_model=3, start=lambda m, b: None)
    with pytest.raises(SpecError, match="cases and seeds need to be at least 1"):
        Budget(cases=0)


def test_a_word_moves_from_one_side_to_the_other():
    target = Function("x", plain, claims={"mask"}, lacks={"lse"}).having("lse", lacking=("mask",))
    assert target.claims == {"lse"} and target.lacks == {"mask"}
    assert target.says("lse") is True and target.says("mask") is False and target.says("bias") is None


def test_what_is_not_said_is_found_out():
    verdict = check(Function("bare", plain), ["L05"], FEW)
    assert verdict.found["float64"] and verdict.found["n≠m"] and verdict.found["grad"]
    assert not verdict.found["grouped"] and "grouped" in verdict.why


def test_a_picky_kernel_is_only_asked_for_its_sizes():
    seen = set()

    def picky(q, k, v):
        seen.add((q.shape[-2], q.shape[-1]))
        assert q.shape[-1] == 16 and q.shape[-2] % 8 == 0, "only 16 wide, in eights"
        return plain(q, k, v)

    target = Function(
        "picky", picky, sizes={"d_k": (16,), "d_v": (16,), "n": (8, 16), "m": (8, 16)}, lacks={"d_v≠d_k"}
    )
    verdict = check(target, ["L01", "L05", "L06", "L48", "L57", "P07"], FEW)
    assert verdict.ok, str(verdict)
    assert {d for _, d in seen} == {16}


def test_a_mistake_of_a_law_is_not_held_against_the_target():
    one = law("L01")
    clumsy = replace(one, on={"function": Trial(one.on["function"].run, lambda lab: {"n": (1,)})})
    with pytest.warns(UserWarning, match="L01 rows sum to one made a mistake of its own on n=1, seed=0"):
        outcome = try_law(clumsy, formula(), FEW)
    assert outcome.status == "not applicable" and "the law itself failed, please report it" in outcome.said


def test_a_module_is_checked_in_copies():
    target = small_attention("small")
    before = [p.clone() for p in target.module.parameters()]
    check(target, budget=Budget(cases=2, seconds=10.0))
    assert all(torch.equal(p, b) for p, b in zip(target.module.parameters(), before))
    assert target.module.training and next(target.module.parameters()).dtype == torch.float32


def test_claims_of_the_formula_are_words():
    assert set(CLAIMS) == formula().claims

"""`check` on unusual targets: its messages, the smallest counterexample, the exit code."""

import json
import time
from dataclasses import replace

import pytest
import torch

from regard.errors import SpecError
from regard.laws import LAWS, Budget, Case, Function, Model, call_times, check, law, replay, search, try_law
from regard.laws.checker import as_target
from regard.laws.controls import CLAIMS, reference_function, with_changed_call
from regard.laws.law import Trial
from regard.laws.measurement import compare
from regard.reference import attend

FEW = Budget(cases=6, seconds=20.0)
SOME = ["L01", "L06", "L29", "L48", "P05"]


def plain(q, k, v):
    return attend(q, k, v).o


def raising(q, k, v):
    raise ValueError("no such kernel")


def test_the_exception_of_a_target_is_reported_for_every_law():
    verdict = check(Function("raising", raising), SOME, FEW)
    assert verdict.exit_code == 2 and not verdict.ok
    assert [o.status for o in verdict.outcomes] == ["raised"] * len(SOME)
    assert all("ValueError: no such kernel" in o.message for o in verdict.outcomes)


def test_an_exception_with_a_mask_only_affects_the_laws_that_use_masks():
    def call(q, k, v, *, allowed=None):
        if allowed is not None:
            raise NotImplementedError("masks come next week")
        return plain(q, k, v)

    verdict = check(Function("no masks yet", call, claims={"mask"}), ["L17", "L34", "L51", "L05"], FEW)
    assert verdict["L17"].status == verdict["L34"].status == "raised"
    assert "raised NotImplementedError: masks come next week; case b=" in verdict["L17"].message
    assert verdict["L51"].status == "not applicable"
    assert verdict.exit_code == 1


def test_a_wrong_shape_is_reported_with_both_shapes():
    verdict = check(Function("turned", lambda q, k, v: plain(q, k, v).mT), ["L01", "P05"], FEW)
    assert verdict.exit_code == 2
    assert (
        "returned shape (2, 2, 5, 7), expected shape (2, 2, 7, 5) for q (2, 2, 7, 5) and v (2, 2, 7, 5)"
        in verdict["L01"].message
    )


def test_an_output_that_is_not_a_tensor_is_reported():
    verdict = check(Function("a list", lambda q, k, v: [1.0]), ["L01"], FEW)
    assert "returned list, expected shape (2, 2, 7, 5)" in verdict["L01"].message


def test_nan_outputs_break_the_laws():
    target = Function("nan", lambda q, k, v: plain(q, k, v) * torch.nan, claims={"float64", "float32"})
    verdict = check(target, ["L01", "L02", "L06"], FEW)
    assert verdict.exit_code == 1
    assert {o.status for o in verdict.outcomes} == {"broken"}
    assert "NaN of" in verdict["L06"].message


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


def test_a_target_that_never_returns_is_reported():
    from regard.laws import probe

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe, "PROBE_SECONDS", 0.3)
        verdict = check(Function("stuck", lambda q, k, v: time.sleep(600)), ["L05"], FEW)
    assert verdict.exit_code == 2
    assert "no answer within" in verdict["L05"].message


class Clock:
    """Processor time that only the target uses."""

    def __init__(self, patch):
        self.now = 0.0
        patch.setattr(call_times.time, "process_time", lambda: self.now)

    def target(self, seconds_per_pair):
        def call(q, k, v):
            self.now += seconds_per_pair * q.shape[:-1].numel() * k.shape[-2]
            return plain(q, k, v)

        return call


def test_large_calls_of_a_slow_target_are_skipped_with_a_note(monkeypatch):
    clock = Clock(monkeypatch)
    slow = clock.target(1e-5)  # 0.9 s for 300 positions, 12 s for 1,100
    outcome = check(Function("slow", slow, claims={"float64"}), ["L65"])["L65"]
    assert outcome.status == "holds" and clock.now < 8
    assert "calls equal the formula; 1 call was skipped, first n = 1100, m = 1100, d_k = 2" in outcome.message
    quick = check(Function("quick", clock.target(1e-6), claims={"float64"}), ["L65"])["L65"]
    assert quick.status == "holds" and "skipped" not in quick.message


def test_a_window_is_not_searched_for_in_calls_that_take_long(monkeypatch):
    clock = Clock(monkeypatch)
    call = clock.target(1e-5)  # 0.9 s for 300 positions, 12 s for 1,100

    def local_attention(q, k, v):
        return call(q, k, v)

    notes = as_target(local_attention).notes
    assert "no call with 1,100 positions was made to find a fixed window: it would take about 12 s" in notes
    assert clock.now < 2


def test_time_in_which_other_processes_run_does_not_count(monkeypatch):
    began = time.monotonic()
    # as if half of the time another process had run
    monkeypatch.setattr(search._waiting, "now", lambda: (time.monotonic() - began) / 2)
    monkeypatch.setattr(search._waiting, "recent", search._waiting.now)
    with search.call_limit(0.3):
        time.sleep(0.45)
    with pytest.raises(search.CallTooSlow, match=r"no answer within 0\.3 s"), search.call_limit(0.3):
        time.sleep(5)


def test_a_process_that_is_suspended_again_and_again_is_not_too_slow(monkeypatch):
    monkeypatch.setattr(search._waiting, "now", lambda: 0.0)
    deadline = search._Deadline(8.0, search.TooSlow)
    now = deadline.at
    for _ in range(5):  # stopped for a minute each time, and running for an instant in between
        now += 60.0
        assert not deadline.passed(now)
    assert [deadline.passed(now + i) for i in (1.0, 2.0, 3.0)] == [False, False, True]


def test_a_target_of_a_missing_device_is_not_applicable():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    verdict = check(Function("on a GPU", plain, device="cuda"), SOME, FEW)
    assert verdict.exit_code == 2
    assert {o.message for o in verdict.outcomes} == {"needs a CUDA device, and this machine has none"}


def test_a_target_with_random_outputs_is_reported():
    def noisy(q, k, v):
        return plain(q, k, v) + 1e-6 * torch.rand(1, dtype=q.dtype)

    observed = check(Function("noisy", noisy), ["P05"], FEW)["P05"]
    assert observed.status == "not promised" and "outputs of equal calls differ by" in observed.message
    claimed = check(Function("noisy", noisy, claims={"deterministic"}), ["P05"], FEW)
    assert claimed["P05"].status == "broken" and claimed.exit_code == 1


def test_a_promise_that_is_not_made_does_not_change_the_exit_code():
    verdict = check(Function("bare", plain), ["L05", "P03", "P06"], FEW)
    assert verdict["P03"].status == "not applicable"
    assert verdict["P03"].message == "needs 'mask' or 'lengths', which the target does not claim"
    assert verdict["P06"].status == "not promised" and verdict["P06"].message.startswith("observed: raised")
    assert verdict.exit_code == 0 and verdict.ok


def test_the_counterexample_is_the_smallest():
    leak = with_changed_call("causal ignored", lambda q, k, v, options: ((q, k, v), {}))
    outcome = try_law(law("causality"), leak)
    assert outcome.status == "broken"
    case = outcome.counterexample
    assert (case.b, case.h, case.n, case.m, case.d_k, case.d_v) == (1, 1, 2, 2, 1, 1)
    assert outcome.message.startswith("outputs up to 0 ")


def test_numbers_that_differ_are_shown_with_enough_digits():
    got, expected = torch.tensor([1.0, 2.0 + 1e-9]).double(), torch.tensor([1.0, 2.0]).double()
    close = compare("x", got.double() + torch.tensor([0.0, 1e-9]).double(), expected)
    assert close.message == "x: got 2.000000001, expected 2 at index [1]"
    assert compare("x", torch.tensor(-2.9), torch.tensor(-0.87)).message == "x: got -2.9, expected -0.87"
    assert compare("x", expected, expected).message == "x: got 1, expected 1 at index [0]"


def test_a_target_that_returns_its_values_is_reported_and_no_law_raises():
    target = Function("returns v", lambda q, k, v: v, claims={"float64", "float32"}, lacks={"n≠m"})
    verdict = check(target, budget=FEW)
    assert verdict["L08"].status == "broken" and "unmasked key is not above 0" in verdict["L08"].message
    assert not [o for o in verdict.outcomes if "the law itself failed" in o.message]


def test_the_search_ends_at_the_first_values_that_still_break():
    space = {"n": (1, 2, 3, 5, 7), "m": (1, 2, 3), "kind": ("a", "b")}
    case = Case(n=7, m=3, kind="b", seed=9)
    small = search.smallest(case, space, None, lambda c: c.n >= 3 and c.kind == "b", time.monotonic() + 5)
    assert dict(small) == {"n": 3, "m": 1, "kind": "b", "seed": 0}


def test_cases_show_every_value_of_every_field():
    sampled = search.cases({"n": (1, 2, 3), "kind": ("a", "b", "c", "d")}, None, seed=0)
    some = [next(sampled) for _ in range(12)]
    assert {c.n for c in some[:3]} == {1, 2, 3} and {c.kind for c in some[:4]} == set("abcd")
    assert [c.seed for c in some] == list(range(12))
    assert not list(search.cases({"n": (1,)}, lambda c: False, seed=0))


def test_the_snippet_runs_and_prints_the_violation(capsys):
    outcome = try_law(law("L58"), reference_function().with_claims(), Budget(cases=3))
    assert outcome.status == "holds"
    broken = reference_function()
    object.__setattr__(broken, "alignment", "top-left")
    outcome = try_law(law("L58"), broken, Budget(cases=3))
    assert "from regard.laws.controls import reference_function" in outcome.snippet
    exec(outcome.snippet.replace("target = reference_function()", "target = broken"), {"broken": broken})
    said = capsys.readouterr().out
    assert said.startswith(
        "L58 alignment as declared is broken on reference.py: alignment declared top-left, observed bottom-right"
    )


def test_replay_reports_a_case_that_holds():
    assert replay(
        "L01", reference_function(), b=1, h=1, n=2, m=2, d_k=1, d_v=1, mask="none", size=1.0, seed=0
    ).startswith("L01 rows sum to one holds on reference.py")
    with pytest.raises(
        SpecError, match=r"L22 is about sinusoidal positions; reference\.py is an attention function"
    ):
        replay("L22", reference_function(), d=2)


def test_the_verdict_as_json_and_as_a_table():
    verdict = check(reference_function(), ["L01", "L22", "P01"], FEW)
    data = json.loads(verdict.json())
    assert data["target"] == "reference.py" and data["exit_code"] == 0
    assert [row["status"] for row in data["laws"]] == ["holds", "not applicable", "not promised"]
    assert data["laws"][0]["formula"].startswith("A_ij ≥ 0") and data["laws"][0]["cases"] == 6
    lines = str(verdict).splitlines()
    assert lines[0] == "reference.py: 1 holds, 1 not applicable, 1 not promised"
    assert lines[1].startswith("✓ L01 rows sum to one       holds in 6 cases, largest error ")
    assert (
        lines[2] == "– L22 sinusoidal positions  not applicable: the law is about sinusoidal positions; "
        "this is an attention function"
    )
    assert lines[3] == "○ P01 NaN under a mask      not promised: declared as lacking; not tested"
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


def test_unknown_claims_are_refused():
    with pytest.raises(SpecError, match="claims has 'masks'; did you mean mask"):
        Function("x", plain, claims={"masks"})
    with pytest.raises(SpecError, match="mask: in claims and in lacks at once"):
        Function("x", plain, claims={"mask"}, lacks={"mask"})
    with pytest.raises(SpecError, match="alignment='left'; did you mean top-left"):
        Function("x", plain, alignment="left")
    with pytest.raises(SpecError, match="architecture='encodr'; did you mean encoder"):
        Model("x", torch.nn.Identity(), lambda m, x: x, architecture="encodr", d_model=3)
    with pytest.raises(SpecError, match="declare its input: vocab=, image= or d_model="):
        Model("x", torch.nn.Identity(), lambda m, x: x)
    with pytest.raises(SpecError, match="a cache needs both make_cache= and decode="):
        Model("x", torch.nn.Identity(), lambda m, x: x, d_model=3, make_cache=lambda m, b: None)
    with pytest.raises(SpecError, match="cases and seeds need to be at least 1"):
        Budget(cases=0)


def test_a_capability_moves_between_claims_and_lacks():
    target = Function("x", plain, claims={"mask"}, lacks={"lse"}).with_claims("lse", lacking=("mask",))
    assert target.claims == {"lse"} and target.lacks == {"mask"}
    assert (
        target.declares("lse") is True
        and target.declares("mask") is False
        and target.declares("bias") is None
    )


def test_what_is_not_declared_is_probed():
    verdict = check(Function("bare", plain), ["L05"], FEW)
    supported = verdict.probed.supported
    assert supported["float64"] and supported["n≠m"] and supported["grad"]
    assert not supported["grouped"] and "grouped" in verdict.probed.errors


def test_a_missing_gradient_is_broken_and_other_laws_name_the_failed_probe():
    verdict = check(
        Function("k detached", lambda q, k, v: plain(q, k.detach(), v)), ["L50", "L10", "L51"], FEW
    )
    assert verdict["L50"].status == "broken" and verdict["L50"].message == "no gradient reached k"
    assert verdict["L10"].message == "needs 'grad': no gradient reached k"
    assert verdict["L51"].message.startswith("needs 'grouped': ")
    frozen = check(Function("detached", lambda q, k, v: plain(q, k, v).detach()), ["L50"], FEW)
    assert frozen["L50"].message == "the output does not require grad: no gradient reached any input"
    lacking = check(Function("forward only", plain, lacks={"grad"}), ["L50"], FEW)
    assert lacking["L50"].message == "needs 'grad', which the target declares as lacking"


def test_a_kernel_with_fixed_sizes_is_only_called_with_them():
    called = set()

    def picky(q, k, v):
        called.add((q.shape[-2], q.shape[-1]))
        assert q.shape[-1] == 16 and q.shape[-2] % 8 == 0, "only 16 wide, in eights"
        return plain(q, k, v)

    target = Function(
        "picky", picky, sizes={"d_k": (16,), "d_v": (16,), "n": (8, 16), "m": (8, 16)}, lacks={"d_v≠d_k"}
    )
    verdict = check(target, ["L01", "L05", "L06", "L48", "L57", "P07"], FEW)
    assert verdict.ok, str(verdict)
    assert {d for _, d in called} == {16}


def test_a_bug_in_a_law_is_not_blamed_on_the_target():
    correct = law("L01")
    faulty = replace(
        correct, trials={"function": Trial(correct.trials["function"].run, lambda harness: {"n": (1,)})}
    )
    with pytest.warns(UserWarning, match="L01 rows sum to one has a bug, on case n=1, seed=0"):
        outcome = try_law(faulty, reference_function(), FEW)
    assert outcome.status == "not applicable" and "the law itself failed, please report it" in outcome.message


def test_the_reference_claims_all_of_its_capabilities():
    assert set(CLAIMS) == reference_function().claims


@pytest.mark.compiled  # without the checked types, which refuse it in other words
def test_a_budget_is_a_number_of_cases_or_a_budget():
    for given in ("many", 2.5, True):
        with pytest.raises(SpecError, match="is neither a number of cases per law nor a"):
            check(attend, ["L01"], given)


def test_a_module_without_numbers_is_refused():
    with pytest.raises(SpecError, match="is on the meta device, without numbers; build it on the CPU"):
        check(torch.nn.MultiheadAttention(8, 2, device="meta"))


def test_an_output_of_a_wrong_shape_is_no_error_without_words():
    verdict = check(lambda q, k, v: v[..., :1], ["L01"], 2)
    assert "no call succeeded in any layout\n" in str(verdict)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_check_is_the_same_where_gradients_are_turned_off(mode):
    """L44, equal heads stay equal, is about gradients."""
    module = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    with mode():
        verdict = check(module, ["L44", "L01"], FEW)
        said = replay("L44", module, seed=0, optimizer="SGD", steps=20)
    assert verdict.ok and "holds" in said

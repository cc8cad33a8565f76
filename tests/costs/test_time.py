"""Rooflines are measured and stored; times of traced work are estimated from them."""

import dataclasses
from pathlib import Path

import pytest
import torch

import regard as rg
from regard.costs.entry import cost
from regard.costs.sizes import Request
from regard.costs.time import HOST, LAUNCH, MOVE, PRODUCT, estimate, measure_time, time_of
from regard.costs.trace.tracer import Work
from regard.machine import Roofline, load_roofline, measure, roofline_path, save_roofline, time_call

ONE = Roofline("a machine", {"float32": 1e9, "bfloat16": 4e9}, 1e8, 1e-6)


def test_a_kernel_takes_the_longer_of_compute_and_memory_time():
    compute = Work("forward", "a", "operation", 1e9, 1e3, "bfloat16")
    memory = Work("forward", "b", "operation", 1e3, 1e9, "float32")
    parts = {p.path: p for p in time_of([compute, memory], ONE).parts}
    assert parts["a"].seconds == pytest.approx(PRODUCT * 1e9 / 4e9 + LAUNCH * 1e-6)
    assert parts["b"].seconds == pytest.approx(MOVE * 1e9 / 1e8 + LAUNCH * 1e-6)
    assert (parts["a"].limit, parts["b"].limit) == ("compute", "memory")
    assert parts["a"].flops == 1e9 and parts["b"].bytes == 1e9


def test_a_view_and_a_call_of_a_module_take_the_host_and_no_kernel():
    machine = dataclasses.replace(ONE, host_s=1e-3)
    result = time_of([Work("forward", "a", "view"), Work("forward", "a", "module")], machine)
    assert result.seconds == pytest.approx(1e-3 * (HOST["view"] + HOST["module"]))
    assert result.parts == () and result.bound == "host" and result.device == {}


def test_what_a_checkpoint_repeats_takes_the_host_longer_than_the_forward_pass():
    machine = dataclasses.replace(ONE, host_s=1e-3)
    forward, repeated, backward = (
        time_of([Work(phase, "a", "operation", 1, 1, "float32", again=again)], machine).host[phase]
        for phase, again in (("forward", False), ("backward", True), ("backward", False))
    )
    assert forward == pytest.approx(1e-3 * HOST["operation"]) and repeated > forward > backward


def test_a_repeated_forward_pass_is_distinguished_from_the_backward_pass():
    inner = rg.Block(rg.Attention(8, heads=2), rg.FeedForward(16))
    once, twice = (
        cost(rg.Encoder(inner, 3), n=8, train=rg.TrainingStep(checkpointing=c)).memory.main.trace.work
        for c in (None, True)
    )
    assert not any(w.again for w in once)
    forward = [w for w in twice if w.phase == "forward" and w.path.startswith("layers")]
    again = [w for w in twice if w.again]
    assert len(again) >= 0.8 * len(forward) and {w.phase for w in again} == {"backward"}


def test_time_is_proportional_to_layers_and_a_training_step_takes_about_three_times_as_long():
    def block(layers, train=False):
        inner = rg.Block(rg.Attention(64, heads=4), rg.FeedForward(128))
        return estimate(cost(rg.Encoder(inner, layers), n=64, train=train), ONE)

    assert block(6).seconds == pytest.approx(6 * block(1).seconds, rel=0.02)
    step = block(2, train=True)
    assert list(step.phases) == ["forward", "backward", "optimizer"]
    assert step.phases["forward"] == pytest.approx(block(2).seconds, rel=0.2)
    assert 1.5 < step.phases["backward"] / step.phases["forward"] < 4


def test_a_prompt_and_a_token_are_timed_and_a_model_without_a_cache_is_an_error():
    phases = estimate(cost("tiny-gpt", n=64), ONE, generation=True).phases
    assert phases["prefill"] > 3 * phases["decode"] > 0
    with pytest.raises(rg.SpecError, match="does not decode with a cache"):
        estimate(cost("tiny-bert", n=16), ONE, generation=True)
    with pytest.raises(rg.SpecError, match="it is not a module by itself"):
        estimate(cost(rg.Mixing("average"), n=16), ONE)


def test_a_roofline_is_measured_saved_and_loaded(tmp_path):
    roofline = measure("cpu", size=64)
    assert set(roofline.flops_per_s) == {"float32", "bfloat16"}
    where = save_roofline(roofline, tmp_path / "deep" / "machine.json")
    assert load_roofline(where) == roofline
    assert load_roofline(tmp_path / "none.json") is None
    assert "GFLOP/s  float32" in str(roofline) and "GB/s" in str(roofline)


def test_the_roofline_is_stored_in_the_users_cache_unless_a_path_is_set(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("REGARD_MACHINE", raising=False)
    assert roofline_path() == tmp_path / "regard" / "machine.json"
    monkeypatch.setenv("REGARD_MACHINE", str(tmp_path / "x.json"))
    assert roofline_path() == tmp_path / "x.json" and roofline_path("y.json") == Path("y.json")


@pytest.mark.parametrize("name, n", [("tiny-gpt", 16), ("tiny", 8), ("tiny-vit", 17)])
def test_a_declaration_is_built_and_timed(name, n):
    spent = measure_time(Request(rg.preset(name), n, n))
    assert 0 < spent < 60
    assert measure_time(Request(rg.Attention(8, heads=2), 4, 4, train=True)) > 0


def test_a_call_is_warmed_up_before_it_is_timed():
    calls = []
    time_call(lambda: calls.append(1), "cpu", repeats=4)
    assert len(calls) == 3 + 4


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda p: measure("tpu"), "device='tpu' cannot be measured; use 'cpu' or 'cuda'"),
        (lambda p: Roofline("m", {"float32": 0.0}, 1.0, 0.0), "float32=0.0 is not a positive rate"),
        (lambda p: load_roofline(p), "is not a stored roofline; run `regard bench machine` again"),
    ],
)
def test_a_bad_request_says_what_would_work(wrong, message, tmp_path):
    broken = tmp_path / "broken.json"
    broken.write_text('{"machine": 1}')
    with pytest.raises(rg.RegardError) as error:
        wrong(broken)
    assert message in str(error.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_missing_gpu_is_an_error():
    with pytest.raises(rg.SpecError) as error:
        measure("cuda")
    assert "PyTorch finds no GPU on this machine; use device='cpu'" in str(error.value)

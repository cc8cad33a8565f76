"""Rooflines are measured and stored; times are estimated from them and compared with stored H200 measurements."""

import json
import statistics
import sys
from pathlib import Path

import pytest
import torch

import regard as rg
from regard.costs.entry import cost
from regard.costs.sizes import Request
from regard.costs.time import (
    Roofline,
    estimate,
    load_roofline,
    measure,
    measure_time,
    roofline_path,
    save_roofline,
    time_call,
)

ROOT = Path(__file__).parents[2]
STORED = json.loads((ROOT / "bench/results/2026-11-15-h200-cost.json").read_text())["time"]
ONE = Roofline("a machine", {"float32": 1e9, "bfloat16": 4e9}, 1e8, 1e-6)


def test_a_part_takes_the_longer_of_compute_and_memory_time():
    result = cost(rg.Block(rg.Attention(8, heads=2), rg.FeedForward(32)), n=16, batch=2)
    parts = {p.path: p for p in estimate(result, ONE).parts}
    w_in = result["feed_forward/w_in"].total
    by_hand = max(w_in.executed_flops / 1e9, w_in.bytes / 1e8) + 1e-6
    assert parts["feed_forward/w_in"].seconds == pytest.approx(by_hand)
    assert parts["feed_forward/w_in"].limit == "memory"
    wide = cost(rg.Block(rg.Attention(8, heads=2), rg.FeedForward(32)), n=16, batch=2, dtype="bfloat16")
    assert estimate(wide, ONE).seconds < estimate(result, ONE).seconds


def test_a_fused_core_is_one_kernel_whose_softmax_runs_at_the_rate_of_float32():
    result = cost(rg.Attention(256, heads=2), n=512, dtype="bfloat16")
    fast = Roofline("fast memory", {"float32": 1e9, "bfloat16": 4e9}, 1e15, 1e-9)
    core = next(p for p in estimate(result, fast).parts if p.path == "core")
    products = result["scores"].total.executed_flops + result["mixing"].total.executed_flops
    others = result["scale"].total.elementwise_flops + result["softmax"].total.elementwise_flops
    assert core.seconds == pytest.approx(products / 4e9 + others / 1e9 + 1e-9)
    assert [p.path for p in estimate(result, fast).parts].count("core") == 1


def test_time_is_proportional_to_layers_and_a_backward_pass_takes_about_twice_as_long():
    def block(layers):
        inner = rg.Block(rg.Attention(64, heads=4), rg.FeedForward(128))
        return estimate(cost(rg.Encoder(inner, layers), n=64), ONE)

    assert block(6).seconds == pytest.approx(6 * block(1).seconds)
    result = cost(rg.Attention(64, heads=4), n=64, train=True)
    assert 2 < estimate(result, ONE, backward=True).seconds / estimate(result, ONE).seconds < 4


@pytest.mark.compiled  # without the shape checker, which takes longer than the pricing
def test_the_times_measured_on_the_h200_are_estimated_within_25_percent_in_the_median():
    sys.path.insert(0, str(ROOT / "bench"))
    import cost_time

    roofline = Roofline(**STORED["roofline"])
    rows = [r for r in STORED["rows"] if r["n"] >= 1024]
    assert len(rows) > 100 and {r["kind"].split()[0] for r in rows} == {"attention", "feed-forward"}
    sampled = rows[::5]
    errors = [abs(cost_time.estimated(r, roofline).seconds / r["seconds"] - 1) for r in sampled]
    for kind in ("attention", "feed-forward"):
        of_kind = [e for e, r in zip(errors, sampled) if r["kind"].startswith(kind)]
        assert statistics.median(of_kind) < 0.25


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
        (
            lambda p: ONE.rate("float16"),
            "a machine was measured in float32, bfloat16 but not in float16; run",
        ),
        (lambda p: load_roofline(p), "is not a stored roofline; run `regard bench machine` again"),
        (
            lambda p: estimate(cost("tiny-gpt", n=8, dtype="float64"), ONE),
            "dtype='float64': rooflines are measured",
        ),
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

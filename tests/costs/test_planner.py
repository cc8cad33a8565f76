"""Plans: the largest batch that fits, its memory and time, and code that runs it."""

import dataclasses
import json

import pytest
import torch

import regard as rg
from regard.costs import example, plan, stepping
from regard.costs.gpus import CARDS, card
from regard.costs.memory.run import Setting, run
from regard.costs.memory.step import TrainingStep
from regard.costs.planner import SHARE, Option
from regard.costs.time import HOST, time_of
from regard.costs.trace.tracer import Work

tiny = dataclasses.replace(rg.preset("tiny-gpt"), layers=1)


def test_a_plan_fits_and_one_more_row_does_not(monkeypatch):
    monkeypatch.setattr("regard.costs.planner._options", lambda *_: iter([Option("float32", TrainingStep())]))
    memory = 300_000_000
    result = plan(tiny, memory=memory, n=64)
    best = result.best
    assert best.peak <= SHARE * memory
    more = rg.cost(tiny, n=64, batch=best.batch + 1, train=TrainingStep(), device="cuda").memory
    assert more.training_peak > SHARE * memory or more.reserved > memory
    data = json.loads(result.json())
    assert data["choices"][0]["batch"] == best.batch and data["choices"][0]["tokens_per_second"] > 0
    assert f"{best.batch:,}" in str(result) and "step = rg.costs.stepping(" in str(result)


def test_the_printed_code_names_the_same_step():
    inputs, targets = example(tiny, n=8, batch=2, device="cpu")
    step = stepping(tiny.build(), inputs, targets, TrainingStep(lora=2))
    first = step()
    assert first > 0 and step() < first  # adapters learn


def test_adapters_are_trained_and_nothing_else():
    full, adapted = (rg.cost(tiny, n=16, train=TrainingStep(lora=r)).memory for r in (0, 4))
    assert adapted.gradients < full.gradients / 4 and adapted.weights > full.weights


def test_ranks_divide_weights_gradients_and_states():
    module = tiny.build()
    ids = torch.zeros(2, 16, dtype=torch.long)
    step = run(Setting(module, ((ids,), {}), training=TrainingStep(), device="cuda"))
    one, eight = (step.usage(ranks=k).peak for k in (1, 8))
    ddp = step.usage(ranks=8, strategy="ddp").peak
    assert eight < one == step.usage().peak < ddp


def test_a_step_is_bound_by_the_host_where_kernels_are_short():
    roofline = dataclasses.replace(card("h100").roofline("h100"), host_s=1e-3)
    short = Work("forward", "a", "operation", 1e6, 1e3, "bfloat16")
    work = [short] * 5 + [Work("backward", "a", "operation", 1e15, 1e3, "bfloat16")]
    estimate = time_of(work, roofline)
    assert estimate.host["forward"] == pytest.approx(5e-3 * HOST["operation"])
    assert estimate.phases["forward"] == pytest.approx(5e-3 * HOST["operation"], rel=0.01)
    assert estimate.phases["backward"] > estimate.device["backward"] > 0.5
    assert estimate.parts[0].limit == "compute" and estimate.bound == "device"


def test_every_card_has_a_source_and_an_unknown_one_is_named():
    assert all(c.source and c.memory > 10**10 and c.half > c.single for c in CARDS.values())
    with pytest.raises(rg.SpecError, match=r"unknown GPU 'h1000'; did you mean h100\?"):
        card("h1000")
    with pytest.raises(rg.SpecError, match="cannot run Linear at other sizes: pass a declaration"):
        plan(torch.nn.Linear(2, 2), memory=10**9)

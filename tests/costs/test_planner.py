"""Plans: the largest batch that fits, its memory and time, and code that runs it."""

import dataclasses
import json

import pytest
import torch

import regard as rg
from regard.costs import example, plan, stepping
from regard.costs.gpus import CARDS, card
from regard.costs.memory.runs import Setting, run
from regard.costs.memory.step import TrainingStep
from regard.costs.planner import PROGRESS, SHARE, Option
from regard.costs.sizes import Size
from regard.costs.subject import Runs, Subject
from regard.costs.time import HOST, time_of
from regard.costs.trace.attention import Call, Gpu, kernel_of
from regard.costs.trace.tracer import Work
from regard.errors import SpecError

unchecked = pytest.mark.compiled  # without the shape checker, which takes longer than the tested code
tiny = dataclasses.replace(rg.preset("tiny-gpt"), layers=1)
block = rg.Block(rg.Attention(64, heads=2, pattern=rg.causal()), rg.FeedForward(1024))
unrotated = rg.Decoder(block, 1, embedding=rg.Embedding(100, 64), head=rg.LanguageHead())


@unchecked
def test_a_plan_fits_and_one_more_row_does_not(monkeypatch):
    monkeypatch.setattr("regard.costs.planner._options", lambda *_: iter([Option("float32", TrainingStep())]))
    memory = 300_000_000
    result = plan(tiny, memory=memory, n=64)
    best = result.best
    assert best.peak <= SHARE * memory
    more = rg.cost(tiny, n=64, batch=best.batch + 1, train=TrainingStep(), device="cuda").memory
    assert more.training_peak > SHARE * memory
    data = json.loads(result.json())
    assert data["choices"][0]["batch"] == best.batch and data["choices"][0]["tokens_per_second"] > 0
    assert f"{best.batch:,}" in str(result) and "step = rg.costs.stepping(" in str(result)


@unchecked
def test_between_traced_runs_every_storage_has_the_size_of_a_traced_run_on_that_card():
    h100, l4 = (CARDS[name].gpu for name in ("h100", "l4"))

    def traced(x, gpu=h100):
        size, training = Size(160, 160, 16 * x), TrainingStep(autocast="bfloat16")
        return run(Subject(unrotated).setting(size, training, device="cuda", gpu=gpu))

    runs = Runs(traced, 1)
    for x in (1, 4, 8):
        runs.at(x)
    assert runs.reaches(6) and not runs.reaches(9)
    exact = traced(6, l4)
    assert runs.sizes(6, l4) == [r.bytes for r in exact.trace.meter.records]
    assert [w.flops for w in runs.work(6)] == [w.flops for w in exact.trace.work]
    differs = {n.formula.__name__ for n in exact.trace.meter.needs.values() if n.bytes(l4) != n.bytes(h100)}
    assert differs == {"sum_needs", "_cudnn_or_flash"}


@unchecked
def test_cards_share_runs_and_progress_is_reported(monkeypatch):
    low = TrainingStep(autocast="bfloat16")
    monkeypatch.setattr("regard.costs.planner._options", lambda *_: iter([Option("bfloat16", low)]))
    monkeypatch.setattr("regard.costs.planner._Search.longest", lambda *_: None)
    traced, reported = [], []
    monkeypatch.setattr("regard.costs.planner.run", lambda setting: traced.append(1) or run(setting))
    alone = plan(unrotated, gpu="h100", n=160)
    alone_traced = len(traced)
    before = PROGRESS.set(lambda *given: reported.append(given))
    several = plan(unrotated, gpu="l4,h100,4090", n=160)
    PROGRESS.reset(before)
    assert reported == [(f"{g}: bfloat16", i, 3) for i, g in enumerate(("h100", "l4", "4090"))]
    assert len(traced) == 2 * alone_traced  # the smaller cards need no run of their own
    assert alone.choices[0] in several.choices
    rotated = run(Subject.of(tiny).setting(Size(160, 160), low, device="cuda"))
    assert rotated.trace.by_card  # cuDNN's output is laid out as its queries, flash attention's is not


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_trained_mask_with_dropout_runs_the_memory_efficient_kernel(dtype):  # as T5 measured on an H200
    q = torch.empty(2, 3, 8, 16, device="meta", dtype=dtype)
    mask = torch.empty(2, 3, 8, 8, device="meta", dtype=dtype)
    kernels = [
        kernel_of(Call(q, q, q, m, 0.1, False, 1, 1, ""), "cuda", Gpu(capability=(9, 0)))
        for m in (mask.clone().requires_grad_(), mask)
    ]
    assert kernels == ["efficient", "cudnn" if dtype == torch.bfloat16 else "efficient"]


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


@unchecked
def test_a_foreign_model_is_planned_and_its_code_runs_the_planned_step(monkeypatch):
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 31, "n_positions": 64}
    config = transformers.GPT2Config(
        **sizes, bos_token_id=0, eos_token_id=0, architectures=["GPT2LMHeadModel"]
    )
    options = [
        Option("float32", TrainingStep()),
        Option("adapters", TrainingStep(lora=2, autocast="bfloat16")),
    ]
    monkeypatch.setattr("regard.costs.planner._options", lambda *_: iter(options))
    result = plan(config, gpu="l4,4090", memory=80_000_000, n=32)
    assert {c.gpu for c in result.choices} == {"l4", "4090"} and len(result.choices) == 4
    assert result.best.longest_n == 64  # its table of positions
    assert "4090: 24 GB, 1.01 TB/s" in str(result) and "NVIDIA" in str(result)
    assert "the configuration is built as GPT2LMHeadModel" in str(result)
    for choice in result.choices[:2]:
        code = choice.code.replace(".cuda()", "").replace(f"batch={choice.batch})", "batch=2, device='cpu')")
        assert code != choice.code
        names = {}
        exec(code, names)
        assert names["step"]() > 0
    assert "import torch, transformers" in result._repr_html_() and len(repr(result)) < 200


@unchecked
def test_generation_is_planned_with_its_cache():
    forward, generation = sorted(
        plan(tiny, memory=10**9, n=64, train=False).choices, key=lambda c: c.option.cached
    )
    assert generation.option.cached and generation.batch > 0 and forward.batch > 0
    names = {}
    code = generation.code.replace(".cuda()", "").replace(
        f"batch={generation.batch})", "batch=2, device='cpu')"
    )
    exec(code, names)
    assert "generate_one" in generation.code


@unchecked
def test_code_for_several_ranks_shards_the_model():
    code = plan(tiny, memory=10**9, n=64, train=False, ranks=2).choices[0].code
    assert code.startswith("# torchrun --nproc-per-node 2") and "rg.costs.shard(model)" in code


def test_8_bit_states_need_bitsandbytes(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes.optim", None)
    inputs, targets = example(tiny, n=8, batch=2, device="cpu")
    with pytest.raises(rg.SpecError, match="pip install bitsandbytes"):
        stepping(tiny.build(), inputs, targets, TrainingStep(optimizer="adamw8bit"))


def test_every_card_has_a_source_and_an_unknown_one_is_named():
    assert all(c.source and c.memory > 10**10 and c.half > c.single for c in CARDS.values())
    with pytest.raises(rg.SpecError, match=r"unknown GPU 'h1000'; did you mean h100\?"):
        card("h1000")
    with pytest.raises(rg.SpecError, match="cannot run Linear at other sizes: pass a declaration"):
        plan(torch.nn.Linear(2, 2), memory=10**9)


@unchecked
def test_a_function_that_builds_a_model_is_planned():
    (choice, *_) = plan(lambda: tiny, gpu="l4", n=32, train=False).choices
    assert choice.code == plan(tiny, gpu="l4", n=32, train=False).choices[0].code
    with pytest.raises(SpecError, match="cannot run tuple at other sizes: pass a declaration"):
        plan(lambda: (tiny, 3), gpu="l4")


def test_example_inputs_are_on_the_gpu_only_where_there_is_one():
    inputs, targets = example(tiny, n=8, batch=2)
    where = "cuda" if torch.cuda.is_available() else "cpu"
    assert inputs[0].device.type == targets.device.type == where


def test_memory_is_given_in_bytes_or_as_it_is_written():
    spec = tiny
    given = ("1GB", 1e9)
    written, *others = (rg.plan(spec, memory=x, n=64, train=False) for x in given)
    assert all(other.plain() == written.plain() for other in others)
    none = rg.plan(spec, memory=1000, n=64, train=False)
    assert (
        none._repr_html_().endswith("</small></p><pre></pre>") and "a batch is per rank" in none._repr_html_()
    )
    with pytest.raises(rg.SpecError, match="'much' is not an amount of memory; use 80GB, 24GiB"):
        rg.plan(spec, memory="much")
    with pytest.raises(rg.SpecError, match="memory=0"):
        rg.plan(spec, memory="0")


def test_a_plan_takes_a_pattern_for_each_head():
    heads = [rg.causal(), rg.causal() & rg.window(2)]
    block = rg.Block(rg.Attention(16, heads=2, pattern=rg.causal()), rg.FeedForward(16))
    declared = rg.Encoder(block, 1, embedding=rg.Embedding(11, 16), head=rg.LanguageHead())
    plan = rg.plan(declared, n=16, memory="1GB", train=False, pattern=rg.per_head(heads))
    assert {choice.option.label for choice in plan.choices} == {"forward, bfloat16", "generation, bfloat16"}
    assert repr(rg.per_head(heads)) in str(plan) and all(choice.batch for choice in plan.choices)
    with pytest.raises(rg.SpecError, match="pattern has 3 patterns for heads=2"):
        rg.plan(declared, n=16, memory="1GB", train=False, pattern=rg.per_head([*heads, rg.causal()]))

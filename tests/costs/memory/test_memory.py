"""Predicted memory against that of the CPU allocator, and of the H200 in rows stored by bench/cost_memory.py."""

import dataclasses
import json
import statistics
import time
from functools import cache
from math import inf
from pathlib import Path

import pytest
import torch

import regard as rg
from ledger_cases import cases
from memory_witness import Trained, checkpointed, counted, length, saved, small
from regard.costs.entry import cost
from regard.costs.memory.report import fits, formulas, memory_of, one_attention, peak_memory
from regard.costs.memory.rules import sort_needs, sum_needs
from regard.costs.memory.step import TrainingStep
from regard.costs.memory.tape import Tape, peak
from regard.costs.sizes import Request

MODELS = ("transformer-base", "gpt2", "vit-b16", "bert-base")
ROWS = json.loads((Path(__file__).parents[3] / "bench/results/2026-11-15-h200-cost.json").read_text())
unchecked = pytest.mark.compiled  # without the shape checker, which takes longer than the tested code
native = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()
emulated = pytest.mark.skipif(
    native, reason="oneDNN's scratch memory was measured on a CPU without 16-bit units"
)


def given(declared, b, train=False, **more):
    n = length(declared)
    return Request(declared, n, n, b, train=train, **more)


def off(predicted, real):
    return abs(predicted / real - 1)


def compare(name, b, low, checkpoint, **how):
    declared = checkpointed(small(name)) if checkpoint else small(name)
    real = Trained(declared, b, low, foreach=how.get("implementation") == "foreach")
    training = TrainingStep(autocast=low and "bfloat16", **how)
    predicted = memory_of(given(declared, b, training))
    assert off(predicted.training_peak, real.allocated + counted(real.step)[0]) < 0.01
    saved_bytes = counted(real.loss)[1]
    assert off(predicted.saved_total, saved_bytes) < 0.01


@pytest.mark.parametrize("name", MODELS)
def test_the_peak_of_a_training_step_on_the_cpu_is_that_of_the_allocator(name):
    compare(name, 5, None, checkpoint=False)


@emulated
@pytest.mark.parametrize("name", MODELS)
def test_the_peak_of_a_checkpointed_step_under_autocast_is_that_of_the_allocator(name):
    compare(name, 16, torch.bfloat16, checkpoint=True)


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("b", [5, 16])
@pytest.mark.parametrize("low", [None, pytest.param(torch.bfloat16, marks=emulated)])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_the_peak_of_every_kind_of_step_on_the_cpu_is_that_of_the_allocator(name, b, low, checkpoint):
    compare(name, b, low, checkpoint)


def test_the_foreach_optimizer_needs_one_more_copy_of_its_state():
    compare("bert-base", 1, None, checkpoint=True, implementation="foreach")
    declared = small("bert-base")
    plain, foreach = (
        peak_memory(given(declared, 1, TrainingStep(implementation=name))) for name in ("for_loop", "foreach")
    )
    assert foreach > plain


@pytest.mark.parametrize("name", MODELS)
def test_the_peak_of_a_forward_pass_without_gradients_is_that_of_the_allocator(name):
    declared = small(name)
    real = Trained(declared, 5)
    real.model.eval()
    allocated = sum(p.numel() * 4 for p in real.model.parameters())
    allocated += sum(x.numel() * x.element_size() for x in real.given)

    def forward():
        with torch.no_grad():
            return real.model(*real.given)

    assert off(memory_of(given(declared, 5)).inference_peak, allocated + counted(forward)[0]) < 0.001


@unchecked
@pytest.mark.parametrize("name", rg.presets())
def test_weights_take_the_bytes_of_the_tensors_built(name):
    declared = rg.preset(name)
    with torch.device("meta"):
        built = sum(p.numel() * 4 for p in declared.build().parameters())
    n = declared.tokens if isinstance(declared, rg.Vision) else 64
    assert memory_of(Request(declared, n, n)).weights == built


@pytest.mark.parametrize("name", MODELS)
def test_saved_bytes_are_those_that_autograd_saves(name):
    declared = small(name)
    real = Trained(declared, 5)
    storages = saved(real.loss)
    there = [*real.model.parameters(), *real.given, *([] if real.targets is None else [real.targets])]
    outside = {x.untyped_storage().data_ptr() for x in there}
    real_bytes = sum(s.nbytes() for at, s in storages.items() if at not in outside)
    predicted = memory_of(given(declared, 5, True)).saved_total
    assert abs(predicted - real_bytes) <= 4096  # the loss itself, numbers of a few bytes


def test_stored_attention_weights_are_saved_like_in_an_unfused_implementation():
    declared = rg.Attention(20, heads=4, biases="none", output=False)
    b, n = 3, 7
    weights = [torch.randn(20, 20, requires_grad=True) for _ in range(3)]
    x = torch.randn(b, n, 20)

    def by_hand():
        q, k, v = ((x @ w).view(b, n, 4, 5).transpose(1, 2).contiguous() for w in weights)
        scores = q @ k.mT
        return scores.softmax(-1) @ v

    # contiguous copies stand for the projections, whose own storage the copies free; x is given from outside
    real = sum(s.nbytes() for s in saved(by_hand).values()) - x.numel() * 4
    loss = b * n * 20 * 4 + 4  # the stand-in loss keeps the output
    result = memory_of(Request(declared, n, n, b, train=True, backend="reference"))
    assert result.saved_total - loss == result.saved_by_method["attention weights stored"] - loss == real
    assert (
        result.saved_by_method["attention weights streamed"] - loss
        == real - 4 * b * 4 * n * n + 4 * b * 4 * n
    )


@pytest.mark.parametrize(
    "optimizer, build",
    [
        ("sgd", lambda p: torch.optim.SGD(p, lr=0.1)),
        ("momentum", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        ("adam", torch.optim.Adam),
        ("adamw", torch.optim.AdamW),
    ],
)
def test_the_optimizer_state_has_the_bytes_of_torch(optimizer, build):
    declared = small("gpt2")
    model = declared.build()
    real = build(model.parameters())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    real.step()
    states = [x for s in real.state.values() for x in s.values() if isinstance(x, torch.Tensor) and x.dim()]
    result = memory_of(given(declared, 1, TrainingStep(optimizer=optimizer)))
    assert result.optimizer_state == sum(x.numel() * x.element_size() for x in states)
    assert result.gradients == sum(p.grad.numel() * 4 for p in model.parameters())


def test_master_weights_and_their_optimizer_state_are_float32():
    declared = small("gpt2")
    entries = sum(p.numel() for p in declared.build().parameters())
    result = memory_of(given(declared, 1, TrainingStep(master_weights=True), dtype=torch.bfloat16))
    assert (result.weights, result.gradients) == (2 * entries, 2 * entries)
    assert (result.master_weights, result.optimizer_state) == (4 * entries, 8 * entries)


@pytest.mark.ledger("S0.Q2a.6", "S0.Q2a.7")
def test_the_memory_of_one_attention_is_that_of_the_ledger():
    for c in cases("memory.attention"):
        i = c["inputs"]
        asked = Request(rg.Attention(i["d_model"], heads=i["heads"]), i["n"], i["n"])
        assert i["batch"] * one_attention(asked) == c["expected"]["total_values"]
        if i["n"] <= 4096:
            assert memory_of(asked).one_attention * i["batch"] == c["expected"]["total_bytes"]["float32"]


@pytest.mark.parametrize("name, context", [("tiny-gpt", None), ("tiny", 9)])
def test_the_kv_cache_has_the_size_of_a_filled_cache(name, context):
    declared = rg.preset(name)
    stack = declared if context is None else declared.decoder
    model = stack.build().eval()
    cache = model.cache()
    states = () if context is None else (torch.randn(3, context, stack.d_model),)
    with torch.no_grad():
        model(torch.zeros(3, 11, dtype=torch.long), *states, cache=cache)
    parts = [p for layer in cache.layers for p in (layer.own, layer.cross) if p.k is not None]
    real = sum(x.numel() * x.element_size() for p in parts for x in (p.k, p.v))
    assert memory_of(Request(declared, 11, context or 11, 3)).kv_cache == real


# -- the H200 -----------------------------------------------------------------------------------------------------


@cache
def peaks():
    """(predicted, counted, requested) of every row."""
    found = []
    for row in ROWS["memory"]:
        training = TrainingStep(
            implementation=row["implementation"], autocast=row["autocast"], checkpointing=row["checkpointing"]
        )
        asked = Request(
            rg.preset(row["model"]), row["n"], row["n"], row["batch"], train=training, device="cuda"
        )
        found.append((peak_memory(asked), row["peak"], row["requested"]))
    return found


@unchecked
def test_peaks_measured_on_the_h200_are_predicted_within_5_percent_and_the_median_within_2():
    asked = {(r["model"], r["batch"], r["autocast"], r["checkpointing"]) for r in ROWS["memory"]}
    for name in MODELS:
        assert len({a for a in asked if a[0] == name}) >= 8  # two batches, two dtypes, with and without
    errors = [off(predicted, peak) for predicted, peak, _ in peaks()]
    assert max(errors) < 0.05 and statistics.median(errors) < 0.02


@unchecked
def test_bytes_requested_on_the_h200_are_predicted_within_a_thousandth():
    assert max(off(predicted, requested) for predicted, _, requested in peaks()) < 0.001


@pytest.mark.parametrize(
    "rows, columns, measured", [(8192, 3072, 138412032), (32768, 3072, 138412032), (100, 3072, 0)]
)
def test_the_scratch_memory_of_a_sum_over_rows_is_that_measured_on_the_h200(rows, columns, measured):
    assert sum_needs(rows, columns, 132) == measured


@pytest.mark.parametrize("rows, measured", [(8192, 28882432), (32768, 113127424)])
def test_the_scratch_memory_of_an_embedding_gradient_is_that_measured(rows, measured):
    assert off(sort_needs(rows, 50257, 768), measured) < 0.005


# -- formulas, fitting, speed, errors -----------------------------------------------------------------------------


@unchecked
@pytest.mark.parametrize("name", ["gpt2", "transformer-base", "vit-b16", "bert-base", "t5-small", "tiny-gpt"])
def test_a_memory_formula_evaluates_to_its_number(name):
    declared = rg.preset(name)
    n = declared.tokens if isinstance(declared, rg.Vision) else 96
    asked = Request(declared, n, n, 3, train=True, device="cuda")
    stack = (
        declared.decoder
        if isinstance(declared, rg.EncoderDecoder)
        else getattr(declared, "encoder", declared)
    )
    s, block = stack.block.attention.sizes, stack.block
    sizes = {
        "b": 3,
        "n": n,
        "d_model": s.d_model,
        "h": s.heads,
        "layers": stack.layers,
        "d_ff": block.feed_forward.d_ff,
    }
    sizes |= {"vocab": getattr(stack.embedding, "vocab", 0), "positions": 1024, "classes": 1000}
    for method, formula in formulas(asked).items():
        value = formula.subs({x: sizes[x.name] for x in formula.free_symbols})
        assert int(value) == memory_of(asked).saved_by_method[method]


@unchecked
def test_stored_weights_grow_quadratically_in_n_and_streamed_weights_linearly():
    result = formulas(Request(rg.Attention(64, heads=8), 128, 128, train=True))
    n = next(x for x in result["attention weights stored"].free_symbols if x.name == "n")
    assert result["attention weights stored"].as_poly(n).degree() == 2
    assert result["attention weights streamed"].as_poly(n).degree() == 1


@unchecked
@pytest.mark.parametrize("vary", ["batch", "n"])
def test_the_largest_that_fits_does_and_one_more_does_not(vary):
    declared = dataclasses.replace(rg.preset("tiny-gpt"), layers=1)
    asked, budget = Request(declared, 64, 64, 2, train=True), 6_000_000
    most = fits(asked, budget, vary)

    def at(size):
        if vary == "n":
            return peak_memory(dataclasses.replace(asked, n=size, m=size))
        return peak_memory(dataclasses.replace(asked, batch=size))

    assert at(most) <= budget < at(most + 1)


@unchecked
def test_nothing_fits_if_the_weights_do_not_and_a_learned_table_limits_n():
    asked = Request(small("gpt2", layers=1), 64, 64)
    assert fits(asked, 1000) == 0
    assert fits(asked, 10**12, "n") == 128


@unchecked
@pytest.mark.parametrize("name", rg.presets())
def test_any_preset_is_priced_in_under_half_a_second_of_this_process(name):
    declared = rg.preset(name)
    n = None if isinstance(declared, rg.Vision) else 128
    start = time.process_time()
    cost(declared, n=n, batch=8, train=TrainingStep(autocast="bfloat16"), device="cuda")
    assert time.process_time() - start < 0.5


def test_the_tape_frees_a_storage_with_its_last_reference():
    tape = Tape()
    x = tape.value(10, 4)
    y = tape.step((x,), 10, 4)
    del x
    assert sum(size for size, _ in tape.log.allocated.values()) == 40
    del y
    assert not tape.log.allocated
    assert peak(tape.log.events).bytes == 80 and peak(tape.log.events, 512).bytes == 1024


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda: TrainingStep(optimizer="adamm"), "optimizer='adamm' is unknown; did you mean adam?"),
        (
            lambda: TrainingStep(implementation="fussed"),
            "implementation='fussed' is unknown; did you mean fused?",
        ),
        (lambda: TrainingStep(autocast="float8"), "autocast='float8' is unknown; did you mean float16?"),
        (
            lambda: memory_of(Request(rg.preset("tiny"), 8, 8, train="adam")),
            "train='adam': use True, False or",
        ),
        (lambda: fits(Request(rg.preset("tiny"), 8, 8), 0), "budget=0 is not a positive number of bytes"),
        (lambda: fits(Request(rg.preset("tiny"), 8, 8), 9, "m"), "vary='m' is unknown; use 'batch' or 'n'"),
        (
            lambda: fits(Request(rg.preset("tiny-vit"), 17, 17), 9, "n"),
            "vary='n': the image size determines the number of patches; use vary='batch'",
        ),
        (
            lambda: peak_memory(Request(rg.Mixing("average"), 8, 8)),
            "memory is not modeled for Mixing; use a model, a block or an attention",
        ),
    ],
)
def test_a_bad_request_says_what_is_wrong(wrong, message):
    with pytest.raises(rg.SpecError) as error:
        wrong()
    assert message in str(error.value)


def test_hard_attention_and_additive_scores_store_their_weights():
    for declared in (rg.Attention(64, scale=inf), rg.Attention(64, score="additive")):
        result = memory_of(Request(declared, 64, 64, train=True))
        assert (
            result.saved_total
            == result.saved_by_method["attention weights stored"]
            > result.saved_by_method["attention weights streamed"]
        )


@pytest.mark.ledger("S1.Q2b.2")
@pytest.mark.parametrize("dtype, size", [(torch.float64, 8), (torch.float32, 4), (torch.bfloat16, 2)])
def test_eight_heads_at_a_thousand_tokens_store_eight_million_weights(dtype, size):
    asked = Request(rg.Attention(512, heads=8), 1000, 1000, dtype=dtype, train=TrainingStep())
    saved_bytes = memory_of(asked).saved_by_method
    difference = saved_bytes["attention weights stored"] - saved_bytes["attention weights streamed"]
    log_sum_exp = 8 * 1000 * max(size, 4)  # saved by the streaming kernel instead, one number per row
    assert difference + log_sum_exp == 8 * 1000**2 * size

"""Predicted memory against that of the CPU allocator, and of the H200 in rows stored by bench/cost_memory.py."""

import dataclasses
import json
import statistics
from pathlib import Path

import pytest
import torch
from torch import nn

import new_process
import regard as rg
from ledger_cases import cases
from long_cases import in_long
from memory_witness import Trained, checkpointed, counted, later_peak, length, saved, small
from regard.costs import entry
from regard.costs.entry import cost, memory_of
from regard.costs.memory.allocator import Caching, Events, replay, rounded, summed
from regard.costs.memory.report import one_attention, saved_by_cores
from regard.costs.memory.runs import TABLES, run
from regard.costs.memory.step import TrainingStep
from regard.costs.sizes import Request, Size, Symbols
from regard.costs.subject import Subject, largest
from regard.costs.trace.attention import H200
from regard.costs.trace.device import INDEX
from regard.costs.trace.kernels import sort_needs, sum_needs

MODELS = ("transformer-base", "gpt2", "vit-b16", "bert-base")
ROWS = json.loads((Path(__file__).parents[3] / "bench/results/2026-11-15-h200-cost.json").read_text())
unchecked = pytest.mark.compiled  # without the shape checker, which takes longer than the tested code
native = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()
emulated = pytest.mark.skipif(
    native, reason="oneDNN's scratch memory was measured on a CPU without 16-bit units"
)


def fits(request, budget, vary="batch"):
    return Subject(request.spec).fits(request, budget, vary)


def peak_memory(request):
    return memory_of(request).usage.peak


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
    assert off(predicted.training_peak, real.allocated + later_peak(real.step)) < 0.01
    saved_bytes = counted(real.loss)[1]
    assert off(predicted.saved_total, saved_bytes) < 0.01


@pytest.mark.parametrize("name", MODELS)
def test_the_peak_of_a_training_step_on_the_cpu_is_that_of_the_allocator(name):
    compare(name, 5, None, checkpoint=False)


@emulated
@pytest.mark.parametrize("name", MODELS)
def test_the_peak_of_a_checkpointed_step_under_autocast_is_that_of_the_allocator(name):
    compare(name, 16, torch.bfloat16, checkpoint=True)


def test_buffers_that_the_engine_keeps_from_an_earlier_step_are_part_of_the_peak():
    declared = small("bert-base", layers=1)
    real = Trained(declared, 16)  # after one step, whose buffers are kept
    predicted = memory_of(given(declared, 16, TrainingStep()))
    kept = predicted.main.bytes(TABLES)
    assert kept > 0.05 * predicted.training_peak  # tiles of gathered keys run, not PyTorch's attention
    assert off(predicted.training_peak, real.allocated + later_peak(real.step)) < 1e-4
    # Without these, the peak of a later step is lower by as much: no other memory is hidden.
    assert predicted.training_peak - kept == pytest.approx(real.allocated + counted(real.step)[0], rel=1e-4)


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

    assert off(memory_of(given(declared, 5)).inference_peak, allocated + later_peak(forward)) < 0.001


@unchecked
@pytest.mark.parametrize(
    "name",
    [
        *("t5-small", "tiny", "tiny-vit"),
        *in_long(
            "gpt2",
            "vit-b16",
            "tiny-classifier",
            "transformer-base",
            "transformer-big",
            "bert-base",
            "tiny-gpt",
            "tiny-bert",
        ),
    ],
)
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


def h200_row(model, batch, autocast, checkpointing):
    """(predicted, counted) peak of one stored row."""
    row = next(
        r for r in ROWS["memory"]
        if (r["model"], r["batch"], r["autocast"], r["checkpointing"]) == (model, batch, autocast, checkpointing)
    )  # fmt: skip
    training = TrainingStep(
        implementation=row["implementation"], autocast=row["autocast"], checkpointing=row["checkpointing"]
    )
    asked = Request(rg.preset(model), row["n"], row["n"], row["batch"], train=training, device="cuda")
    return memory_of(asked), row


@unchecked
@pytest.mark.parametrize(
    "model, batch, autocast, checkpointing",
    [("bert-base", 12, "bfloat16", False), ("vit-b16", 48, None, True)],
)
def test_peaks_measured_on_the_h200_are_predicted_within_half_a_percent(
    model, batch, autocast, checkpointing
):
    predicted, row = h200_row(model, batch, autocast, checkpointing)
    assert off(predicted.training_peak, row["peak"]) < 0.005
    assert off(predicted.reserved, row["reserved"]) < 0.05


@pytest.mark.long
@unchecked
def test_every_peak_measured_on_the_h200_is_predicted_within_half_a_percent():
    kept = [r for r in ROWS["memory"] if r["model"] != "transformer-big" and r["implementation"] == "auto"]
    errors = []
    for (
        r
    ) in kept:  # transformer-big has had fused projections since; in 16 bits both have fused ends of branches
        if r["model"] == "transformer-base" and r["autocast"]:
            continue
        predicted, row = h200_row(r["model"], r["batch"], r["autocast"], r["checkpointing"])
        errors.append(off(predicted.training_peak, row["peak"]))
    assert max(errors) < 0.005 and statistics.median(errors) < 0.001


@pytest.mark.parametrize(
    "rows, columns, measured", [(8192, 3072, 138412032), (32768, 3072, 138412032), (100, 3072, 0)]
)
def test_the_scratch_memory_of_a_sum_over_rows_is_that_measured_on_the_h200(rows, columns, measured):
    assert sum_needs(rows, columns, H200) == measured


@pytest.mark.parametrize("rows, measured", [(8192, 28882432), (32768, 113127424)])
def test_the_scratch_memory_of_an_embedding_gradient_is_that_measured(rows, measured):
    assert off(sort_needs(rows, 50257, 768, H200), measured) < 0.005


# -- formulas, fitting, speed, errors -----------------------------------------------------------------------------


@unchecked
def test_stored_weights_grow_quadratically_in_n_and_streamed_weights_linearly():
    asked = Request(rg.Attention(64, heads=8), 128, 128, train=True)
    result, sizes = saved_by_cores(asked, Symbols()), {"b": 1, "n": 128, "d_model": 64, "h": 8}
    n = next(x for x in result["weights stored"].free_symbols if x.name == "n")
    assert result["weights stored"].as_poly(n).degree() == 2
    assert result["weights streamed"].as_poly(n).degree() == 1
    for method, formula in result.items():
        value = formula.subs({x: sizes[x.name] for x in formula.free_symbols})
        assert value == memory_of(asked).saved_by_method[method]


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
        (lambda: fits(Request(rg.preset("tiny"), 8, 8), 0), "budget=0 is not a positive integer"),
        (lambda: fits(Request(rg.preset("tiny"), 8, 8), 9, "m"), "vary='m' is unknown"),
        (
            lambda: fits(Request(rg.preset("tiny-vit"), 17, 17), 9, "n"),
            "vary='n': the image size determines the number of patches; use vary='batch'",
        ),
    ],
)
def test_a_bad_request_says_what_is_wrong(wrong, message):
    with pytest.raises(rg.SpecError) as error:
        wrong()
    assert message in str(error.value)


@pytest.mark.ledger("S1.Q2b.2")
@pytest.mark.parametrize("dtype, size", [(torch.float64, 8), (torch.float32, 4), (torch.bfloat16, 2)])
def test_eight_heads_at_a_thousand_tokens_store_eight_million_weights(dtype, size):
    asked = Request(rg.Attention(512, heads=8), 1000, 1000, dtype=dtype, train=TrainingStep())
    saved_bytes = memory_of(asked).saved_by_method
    difference = saved_bytes["weights stored"] - saved_bytes["weights streamed"]
    instead = (
        8 * 1000 * max(size, 4) + 1000 * 512 * size
    )  # a streaming kernel saves a number per row, and its output
    assert difference + instead == 8 * 1000**2 * size


def test_a_convolutional_model_with_a_vocabulary_reads_token_ids():
    declared = rg.Convolutional(8, layers=2, vocab=30)
    assert (
        memory_of(Request(declared, 9, 9)).inference_peak
        > memory_of(Request(declared, 9, 9)).weights
        > 4 * 30 * 8
    )


# -- the allocator ------------------------------------------------------------------------------------------------


def test_the_caching_allocator_rounds_splits_and_merges():
    memory = Caching()
    small = memory.malloc(1)
    assert (memory.allocated, memory.reserved) == (512, 2 << 20)
    large = memory.malloc((3 << 20) + 1)  # a block of a segment of 20 MiB
    assert (memory.allocated, memory.reserved) == (512 + (3 << 20) + 512, 22 << 20)
    memory.free(large)
    whole = memory.malloc((20 << 20) - 100)  # all of it again: the parts were merged
    assert memory.reserved == 22 << 20
    memory.free(whole)
    nearly = memory.malloc((20 << 20) - (1 << 20))  # a remainder of 1 MiB is not split off
    assert memory.allocated == 512 + (20 << 20)
    memory.free(nearly)
    memory.free(small)
    assert memory.allocated == 0


@pytest.mark.parametrize("allocator", ["sums of sizes", "caching"])
def test_steps_count_state_once_and_find_the_peak(allocator):
    sizes = [1024, 512, 2048, 1536, 512]
    step = [
        (4, -1),
        (1, 1),
        (2, 1),
        (1, -1),
        (3, 1),
        (2, -1),
    ]  # 3 is state: later steps find it; 4 goes for good
    phases = ["setup", "forward", "forward", "optimizer", "setup"]
    events = Events([(0, 1), (4, 1)], step, {3}, phases)
    if allocator == "sums of sizes":
        result = summed(torch.tensor(sizes), events, repeats=2)
    else:
        result = replay(Caching(), sizes, events, repeats=2)._replace(reserved=5120)
    assert result == (5120, 5120, 2, {"forward": 5120})


def test_sizes_are_rounded_as_the_caching_allocator_rounds_them():
    assert rounded(torch.tensor([0, 1, 512, 513])).tolist() == [0, 512, 512, 1024]


@pytest.mark.parametrize("budget", [0, 10, 99, 100, 5000])
def test_the_largest_size_within_a_budget(budget):
    assert largest(lambda n: 7 * n + n * n // 50, budget + 1, 400) == max(
        n for n in range(401) if 7 * n + n * n // 50 <= budget + 1
    )


# -- foreign models -----------------------------------------------------------------------------------------------


class Tied(torch.nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(197, 24)
        self.inner = torch.nn.TransformerEncoderLayer(24, 4, 40, batch_first=True)
        self.head = torch.nn.Linear(24, 197, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids, labels):
        logits = self.head(self.inner(self.embedding(ids)))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def measured_step(model, given, optimizer, low=None):
    def step():
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low is not None):
            loss = model(**given)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    states = [
        x for s in optimizer.state.values() for x in s.values() if isinstance(x, torch.Tensor) and x.dim()
    ]
    there = [*model.parameters(), *model.buffers(), *states, *given.values()]
    return sum(x.numel() * x.element_size() for x in there) + counted(step)[0]


@pytest.mark.parametrize(
    "how, build",
    [
        ({}, lambda p: torch.optim.AdamW(p, foreach=False)),
        ({"optimizer": "sgd"}, lambda p: torch.optim.SGD(p, foreach=False)),
        ({"optimizer": "momentum"}, lambda p: torch.optim.SGD(p, momentum=0.9, foreach=False)),
        ({"optimizer": "adam", "implementation": "foreach"}, lambda p: torch.optim.Adam(p, foreach=True)),
        ({"implementation": "fused"}, lambda p: torch.optim.AdamW(p, fused=True)),
        ({"frozen": ("embedding*", "head*")}, lambda p: torch.optim.AdamW(p, foreach=False)),
    ],
    ids=["adamw", "sgd", "momentum", "foreach", "fused", "frozen"],
)
def test_a_module_with_labels_and_tied_weights_has_the_peak_of_the_allocator(how, build):
    torch.manual_seed(0)
    model = Tied()
    given = {"ids": torch.randint(97, (7, 31)), "labels": torch.randint(97, (7, 31))}
    predicted = cost(model, given, train=TrainingStep(**how)).memory
    assert all(p.requires_grad and p.device.type == "cpu" for p in model.parameters())  # nothing was changed
    if "frozen" in how:
        model.embedding.weight.requires_grad_(False)
    optimizer = build([p for p in model.parameters() if p.requires_grad])
    assert off(predicted.training_peak, measured_step(model, given, optimizer)) < 0.002


def test_accumulated_gradients_stay_while_the_next_batch_runs():
    model, given = Tied(), {"ids": torch.zeros(5, 9).long(), "labels": torch.zeros(5, 9).long()}
    one, two = (cost(model, given, train=TrainingStep(accumulate=k)).memory for k in (1, 2))
    assert two.training_peak > one.training_peak and two.gradients == one.gradients


def test_8_bit_states_take_a_byte_each_and_a_scale_per_256():
    model, given = Tied(), {"ids": torch.zeros(2, 9).long(), "labels": torch.zeros(2, 9).long()}
    entries = [p.numel() for p in model.parameters()]
    result = cost(model, given, train=TrainingStep(optimizer="adamw8bit")).memory
    assert result.optimizer_state == sum(8 * e if e < 4096 else 2 * e + 2 * 4 * -(-e // 256) for e in entries)
    assert any(e >= 4096 for e in entries)


def test_a_gpu_is_simulated_without_one():
    torch.manual_seed(0)
    model, given = Tied(), {"ids": torch.zeros(64, 31).long(), "labels": torch.zeros(64, 31).long()}
    plain, low = (
        cost(model, given, train=TrainingStep(autocast=a), device="cuda").memory for a in (None, "bfloat16")
    )
    assert plain.workspace == 65 << 20 and plain.training_peak % 512 == 0
    assert low.saved_total < plain.saved_total  # autocast acts
    kinds = plain.peak.by_kind()
    assert kinds["weights"] == plain.weights and kinds["optimizer state"] == plain.optimizer_state


def test_the_peak_is_explained_by_module_and_kind():
    model = dataclasses.replace(rg.preset("tiny-gpt"), layers=2)
    result = cost(model, n=64, batch=8, train=True)
    peak = result.memory.peak
    assert sum(a.bytes for a in peak.alive) == result.memory.training_peak
    text = result.explain_peak()
    assert text.startswith(f"The peak of {result.memory.training_peak / 2**20:,.2f} MiB is in the ")
    assert "saved for backward" in text and any("blocks.*" in a.path for a in peak.alive)
    step = TrainingStep(checkpointing=True)
    less = cost(model, n=64, batch=8, train=step).memory.training_peak
    assert f"Checkpointing each block would lower the peak to {less / 2**20:,.2f} MiB" in text
    forward = cost(model, n=64)
    assert (
        f"The peak of {forward.memory.inference_peak / 2**20:,.2f} MiB is in the forward"
        in forward.explain_peak()
    )


def test_a_trace_leaves_nothing_in_the_caches_of_a_real_device(monkeypatch):
    """The engine keeps launch tables by device: those of a trace are meta tensors, which no kernel may read."""
    pytest.importorskip("triton.experimental.gluon")
    from regard.engine.cuda.hopper import launches

    kept, real = [], launches.with_masks
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(launches, "with_masks", lambda *given: kept.append(given[-1]) or real(*given))
    pattern = rg.causal() & (rg.rows(64) | rg.strided(64))  # for Hopper: one long tile, a pass of its own
    block = rg.Block(rg.Attention(128, heads=2, pattern=pattern), rg.FeedForward(64))
    # Adam asks CUDA about graphs, which is an error without a GPU.
    step = TrainingStep(optimizer="sgd", autocast="bfloat16")
    run(Subject(rg.Decoder(block, 1)).setting(Size(2048, 2048, 1), step, device="cuda"))
    assert kept and {device.index for device in kept} == {INDEX} and INDEX > 64


@pytest.mark.parametrize(
    ("bias", "checkpointing", "buffers"), [(False, None, 64), (True, None, 65), (True, True, 66)]
)
def test_cublas_has_a_second_buffer_where_products_add_a_bias(bias, checkpointing, buffers):
    feed_forward = rg.FeedForward(16, bias=bias)
    block = rg.Block(rg.Attention(8, heads=2, biases="all" if bias else "none"), feed_forward)
    step = TrainingStep(checkpointing=checkpointing)
    assert cost(rg.Encoder(block, 2), n=8, train=step, device="cuda").memory.workspace == buffers << 20


@pytest.mark.parametrize("how", [True, "reentrant"])
def test_a_checkpointed_model_is_priced_where_cuda_is_in_use(monkeypatch, how):
    step = TrainingStep(checkpointing=how)
    block = rg.Block(rg.Attention(8, heads=2), rg.FeedForward(16), dropout=0.1)
    expected = cost(rg.Encoder(block, 2), n=8, train=step, device="cuda").memory.training_peak
    monkeypatch.setattr(torch.cuda, "_initialized", True)
    entry.memory_of.cache_clear()
    assert cost(rg.Encoder(block, 2), n=8, train=step, device="cuda").memory.training_peak == expected


class Clamps(torch.nn.Module):
    """As encoders of the DETR family: values past the range are clamped in training."""

    def __init__(self, unusual):
        super().__init__()
        self.linear, self.unusual = torch.nn.Linear(8, 8), unusual

    def forward(self, x):
        y = self.linear(x)
        return torch.exp(y) @ y.mT if self.unusual(y) else y


@pytest.mark.parametrize(
    "unusual",
    [
        lambda y: torch.isinf(y).any(),
        lambda y: torch.isnan(y).any(),
        lambda y: not torch.isfinite(y).all(),
        lambda y: not y.isfinite().all(),
    ],
)
def test_unknown_values_are_taken_to_be_finite(unusual):
    with_branch = rg.cost(Clamps(unusual), torch.randn(2, 8))
    without = rg.cost(Clamps(lambda y: False), torch.randn(2, 8))
    assert with_branch.flops == without.flops
    assert "values are taken to be finite" in " ".join(map(str, with_branch.notes))


def test_the_first_trace_of_a_process_has_the_peak_of_all_others():
    """The first dispatch imports torch._dynamo; the tensors of that operation were alive for too long."""
    program = (
        "import torch, regard as rg; from torch import nn\n"
        "m = nn.Sequential(nn.Linear(64, 640), nn.ReLU(), nn.Linear(640, 64))\n"
        "print([rg.cost(m, torch.zeros(50, 64)).memory.inference_peak for _ in range(3)])"
    )
    found = new_process.run(program)
    assert found.stdout == "[599296, 599296, 599296]\n", found.stderr


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["T5", "Mamba"])
def test_models_that_read_attributes_of_a_linear_layer_take_adapters(family):
    transformers = pytest.importorskip("transformers")
    sizes = {
        "T5": {"num_layers": 1, "d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 48, "vocab_size": 50},
        "Mamba": {"hidden_size": 32, "num_hidden_layers": 1, "state_size": 4, "vocab_size": 50},
    }[family]
    config = getattr(transformers, f"{family}Config")(**sizes)
    full, lora = (cost(config, n=8, train=TrainingStep(lora=k)).memory for k in (0, 2))
    assert 0 < lora.gradients < full.gradients / 2


def test_advice_for_inference_names_no_part_of_a_training_step():
    model, given = torch.nn.Linear(64, 64), torch.zeros(2, 64)
    text = cost(model, given).explain_peak()
    assert text.endswith("Weights in fewer bits, or more ranks, lower it; a smaller batch hardly does.")
    assert not any(word in text for word in ("adamw", "lora", "gradients"))
    assert "adamw8bit" in cost(model, given, train=True).explain_peak()


class Between(torch.nn.Module):
    """A linear layer, an operation, and the mean square of its result as the loss."""

    def __init__(self, operation):
        super().__init__()
        self.linear, self.operation = torch.nn.Linear(64, 512), operation

    def forward(self, x):
        out = self.operation(self.linear(x))
        return {"loss": out if not out.dim() else out.square().mean()}


OPERATIONS = {
    "mish": torch.nn.functional.mish,
    "mse_loss": lambda x: torch.nn.functional.mse_loss(x, torch.zeros_like(x)),
    "smooth_l1_loss": lambda x: torch.nn.functional.smooth_l1_loss(x, torch.zeros_like(x)),
    "huber_loss": lambda x: torch.nn.functional.huber_loss(x, torch.zeros_like(x)),
    "bce": lambda x: torch.nn.functional.binary_cross_entropy_with_logits(x, torch.zeros_like(x)),
    "index": lambda x: x[:, torch.arange(256)],
    "max": lambda x: x.max(-1).values,
    "gather": lambda x: x.gather(-1, torch.zeros(x.shape[0], 256, dtype=torch.long)),
    "sort": lambda x: x.sort(-1).values,
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_that_differ_on_meta_tensors_have_the_peak_of_the_cpu(name):
    torch.manual_seed(0)
    model, given = Between(OPERATIONS[name]), {"x": torch.randn(2000, 64)}
    predicted = cost(model, given, train=TrainingStep()).memory.training_peak
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    assert off(predicted, measured_step(model, given, optimizer)) < 0.01


class Narrow(torch.nn.Module):
    """A linear layer, an operation, a narrow linear layer: the gradient of the operation is at the peak."""

    def __init__(self, operation):
        super().__init__()
        self.first, self.last = torch.nn.Linear(64, 256), torch.nn.Linear(256, 8)
        self.operation = operation

    def forward(self, x):
        out = self.operation(self.first(x))
        return {"loss": self.last(out).relu().mean() if out.shape[-1:] == (256,) else out.sum()}


HIDDEN = {  # what PyTorch allocates inside these, or inside their gradients, on the CPU
    "prod": lambda x: x.prod(-1),
    "prod, keepdim": lambda x: x * x.prod(dim=-1, keepdim=True),
    "prod of a middle axis": lambda x: x.unflatten(0, (-1, 10)).prod(1),
    "prod of all": lambda x: torch.prod(x),
    "amax": lambda x: x - x.amax(-1, keepdim=True),
    "amax and exp": lambda x: (x - x.amax(-1, keepdim=True)).exp(),
    "amin": lambda x: x - x.amin(0, keepdim=True),
    "a mask of bools": lambda x: x * (x > 0),
    "float32 added in place to bfloat16": lambda x: x.bfloat16().add_(torch.ones_like(x)).float(),
    "GroupNorm": nn.GroupNorm(8, 256),
    "GroupNorm of sequences": lambda x: nn.GroupNorm(8, 256)(x.unflatten(0, (-1, 10)).mT),
    "BatchNorm1d": nn.BatchNorm1d(256),
    "BatchNorm1d of sequences": lambda x: nn.BatchNorm1d(256)(x.unflatten(0, (-1, 10)).mT.contiguous()),
    "BatchNorm2d, channels last": lambda x: nn.BatchNorm2d(256)(x.view(-1, 4, 5, 256).movedim(-1, 1)).movedim(
        1, -1
    ),
    "InstanceNorm1d": nn.InstanceNorm1d(2000),
    "InstanceNorm1d of sequences": lambda x: nn.InstanceNorm1d(256)(x.unflatten(0, (-1, 10)).mT),
    "LayerNorm of a transposed table": lambda x: nn.LayerNorm(2000)(x.mT).mT,
    "LayerNorm and sum": lambda x: nn.LayerNorm(256)(x).sum(),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_what_an_operation_allocates_inside_is_part_of_the_peak_of_the_cpu(name):
    torch.manual_seed(0)
    model, given = Narrow(HIDDEN[name]), {"x": torch.randn(2000, 64)}
    predicted = cost(model, given, train=TrainingStep(optimizer="sgd")).memory.training_peak
    optimizer = torch.optim.SGD(model.parameters(), foreach=False)
    assert off(predicted, measured_step(model, given, optimizer)) < 0.01


class Checkpointed(torch.nn.Module):
    """One attention of PyTorch, computed again in the backward pass."""

    def __init__(self):
        super().__init__()
        self.project, self.out = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)

    def attend(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, 2, 8)).movedim(-2, 1).unbind(3)
        return self.out(torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def forward(self, x):
        return {"loss": torch.utils.checkpoint.checkpoint(self.attend, x, use_reentrant=False).sum()}


@pytest.mark.parametrize("n", (90, 500, 900))
def test_a_fused_attention_that_is_computed_again_has_the_peak_of_the_cpu(n):
    torch.manual_seed(0)
    model, given = Checkpointed(), {"x": torch.randn(3, n, 16)}
    predicted = cost(model, given, train=TrainingStep(optimizer="sgd")).memory
    optimizer = torch.optim.SGD(model.parameters(), foreach=False)
    assert predicted.peak.operation == "scaled_dot_product_attention (cpu)"
    assert off(predicted.training_peak, measured_step(model, given, optimizer)) < 0.01


@pytest.mark.parametrize("n", (90, 500, 900))
def test_the_tiles_of_a_fused_attention_are_part_of_the_peak_of_the_cpu(n):
    q, k, v = torch.randn(3, 2, 3, n, 16).unbind()
    call = torch.nn.functional.scaled_dot_product_attention
    with torch.no_grad():
        real = counted(lambda: call(q, k, v))[0] + 3 * q.nbytes
    assert off(cost(lambda q, k, v: call(q, k, v), q, k, v).memory.inference_peak, real) < 0.01


def test_the_output_of_fused_attention_is_laid_out_as_its_queries():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(
        32, 4, 64, dropout=0.0, batch_first=True
    )  # positions before rows

    class Squared(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = layer, torch.nn.Linear(32, 128)

        def forward(self, x):
            return {"loss": self.head(self.layer(x)).square().mean()}

    model, given = Squared(), {"x": torch.randn(4, 50, 32)}
    predicted = cost(model, given, train=TrainingStep(optimizer="sgd")).memory.training_peak
    optimizer = torch.optim.SGD(model.parameters(), foreach=False)
    assert off(predicted, measured_step(model, given, optimizer)) < 0.001


def test_a_trace_does_not_write_to_the_buffers_and_inputs_of_the_model():
    class Counter(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.kept = torch.nn.BatchNorm1d(3), torch.zeros(())
            self.register_buffer("calls", torch.zeros(3))

        def forward(self, x, ids):
            self.calls += 1
            self.kept += 1
            ids.clamp_(max=1)
            return self.norm(x) * self.calls * ids[:, None]

    model, ids = Counter(), torch.arange(4)
    assert cost(model, torch.randn(4, 3), ids, train=True).memory.training_peak
    assert not model.calls.any() and not model.kept and not model.norm.num_batches_tracked
    assert ids.tolist() == [0, 1, 2, 3]


def test_products_are_noted_whose_gradient_needs_more_if_a_factor_is_0():
    model, given = Narrow(HIDDEN["prod"]), {"x": torch.randn(3, 64)}
    assert "factors of products (prod, cumprod) are taken not to be 0" in str(
        cost(model, given, train=True).notes
    )
    assert "prod" not in str(cost(lambda x: x.prod(-1), given["x"]).notes)


def test_the_fast_path_of_an_encoder_layer_stores_the_weights_of_all_heads():
    encoder, x = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval(), torch.randn(3, 400, 16)
    with torch.no_grad():
        fast = counted(lambda: encoder(x))[0]
    assert fast > 3 * 2 * 400**2 * 4 > 3 * cost(encoder, x).memory.inference_peak


def test_layers_whose_memory_is_not_known_are_noted():
    x = torch.zeros(2, 5, 16)
    encoder = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    assert "recurrent layer" in str(cost(torch.nn.GRU(16, 16, batch_first=True), x).notes)
    assert cost(encoder.eval(), x).notes == (
        "PyTorch's attention modules are traced without their fast path, which stores all n × n weights",
    )
    assert not cost(encoder.train(), x).notes and not cost(encoder.eval(), x, train=True).notes


@pytest.mark.parametrize(
    ("layers", "train", "buffers"),
    [
        ((nn.LayerNorm(8), nn.GELU()), False, 0),
        ((nn.LayerNorm(8), nn.GELU()), True, 0),
        ((nn.Conv1d(4, 4, 3), nn.LayerNorm(6)), True, 0),
        ((nn.Linear(8, 8, bias=False),), False, 32),
        ((nn.Linear(8, 8, bias=False),), True, 64),
        # The input needs no gradient and the weight is frozen: nothing is multiplied in the backward pass.
        ((nn.Linear(8, 8).requires_grad_(False), nn.LayerNorm(8)), True, 33),
    ],
    ids=["forward", "training", "convolution", "product", "trained product", "frozen product"],
)
def test_a_thread_that_multiplies_no_matrices_has_no_buffer_of_cublas(layers, train, buffers):
    x = torch.zeros(2, 4, 8)
    assert cost(nn.Sequential(*layers), x, train=train, device="cuda").memory.workspace == buffers << 20

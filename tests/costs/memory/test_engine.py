"""The engine's own attention under a trace on the CPU: the variant of the real call, and its memory."""

import pytest
import torch
import torch.nn.functional as F

import regard as rg
from memory_witness import emptied, later_peak
from regard import compat
from regard.costs import entry
from regard.costs.entry import cost
from regard.costs.memory.runs import TABLES
from regard.costs.memory.step import TrainingStep
from regard.costs.trace import engine as trace_engine
from regard.engine import query_chunks
from regard.engine.backends import choose
from regard.engine.cpu import backend, kernels, layout, tiles
from regard.position import alibi, relative_table, rope

unchecked = pytest.mark.compiled  # without the shape checker, which takes longer than the tested code
near, far = rg.causal() & rg.window(8), rg.causal() & (rg.window(64) | rg.every(32))
CASES = {
    backend.GATHERED: (near, 141, {}),
    backend.CONCATENATED: (near, 1100, {}),
    backend.MERGED: (far, 1100, {}),
    backend.BY_DISTANCE: (near, 139, {"position": relative_table(16)}),
    backend.WITH_DROPOUT: (near, 700, {"dropout": 0.1}),
    "masked": (near, 139, {"dropout": 0.1}),
}


def measured(module, n, step):
    """Peak of the second of two steps, with the weights and the input."""
    x = torch.randn(3, n, 32)
    there = sum(p.numel() * 4 for p in module.parameters()) + x.numel() * 4
    return there + later_peak(lambda: step(module, x))


@unchecked
@pytest.mark.parametrize(
    "variant", [pytest.param(v, marks=pytest.mark.long) if n > 500 else v for v, (_, n, _) in CASES.items()]
)
def test_a_training_step_takes_the_memory_of_the_variant_that_runs(variant, monkeypatch):
    pattern, n, more = CASES[variant]
    spec = rg.Attention(32, heads=4, kv_heads=2, pattern=pattern, **more)
    chosen = []
    monkeypatch.setattr(
        "regard.costs.trace.engine.choose", lambda *given: chosen.append(choose(*given)) or chosen[-1]
    )
    predicted = cost(spec, n=n, batch=3, train=TrainingStep(optimizer="sgd")).memory
    optimizer = []

    def step(module, x):
        optimizer[:] = optimizer or [torch.optim.SGD(module.parameters(), lr=0.1, foreach=False)]
        module(x).square().mean().backward()
        optimizer[0].step()
        optimizer[0].zero_grad()

    assert predicted.training_peak == pytest.approx(measured(spec.build(), n, step), rel=0.01)
    assert {c.variant for c in chosen} == {variant}


@unchecked
@pytest.mark.parametrize(
    "position, pattern",
    [(None, near), (alibi(), near), (None, [near, rg.causal(), near, rg.window(3)])],
    ids=["pattern", "bias", "pattern per head"],
)
def test_a_forward_pass_takes_the_memory_of_the_variant_that_runs(position, pattern):
    spec = rg.Attention(32, heads=4, kv_heads=2, pattern=pattern, position=position)
    predicted = cost(spec, n=131, batch=3).memory

    def step(module, x):
        with torch.no_grad():
            module.eval()(x)

    assert predicted.inference_peak == pytest.approx(measured(spec.build(), 131, step), rel=1e-3)


@unchecked
@pytest.mark.parametrize(
    "pattern, dropout, n, m, lengths",
    [
        # Finite keys beyond the lengths are hidden by the mask, not by a copy with zeros.
        (rg.full(), 0.1, 10, 244, [244, 1, 70]),
        # PyTorch's fused operation needs tiles of scores beside a mask, too.
        (rg.full(), 0.0, 286, 286, [211]),
        # Lengths of all keys are left out, and another backend runs.
        (near, 0.0, 141, 141, [141] * 3),
    ],
    ids=["finite keys", "fused with a mask", "all keys"],
)
def test_a_training_step_with_lengths_takes_the_memory_of_the_real_one(pattern, dropout, n, m, lengths):
    module = rg.Attention(24, heads=2, pattern=pattern, dropout=dropout).build()
    x, context = torch.randn(len(lengths), n, 24), torch.randn(len(lengths), m, 24)
    given = {"x": x, "context": context, "lengths": torch.tensor(lengths)}
    predicted = cost(module, given, train=TrainingStep(optimizer="sgd")).memory.training_peak
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, foreach=False)

    def step():
        module(**given).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    there = sum(p.nbytes for p in [*module.parameters(), *given.values()])
    assert predicted == pytest.approx(there + later_peak(step), rel=1e-3)


def test_buffers_of_the_backward_pass_are_there_when_a_later_step_begins():
    main = cost(rg.Attention(32, heads=4, pattern=near), n=141, batch=3, train=True).memory.main
    records, tables = main.trace.meter.records, main.keys(TABLES)
    late = [k for k in tables if records[k].phase == "backward"]
    events = main.trace.meter.events[main.begin :]
    begin = next(i for i, (k, _) in enumerate(events) if records[k].phase == "backward")
    brief = next(k for k, change in events[:begin] if change < 0 and k not in tables)
    sizes = [r.bytes for r in records]
    sizes[brief] = 1 << 30  # so that the peak is in the forward pass
    peak = main.usage(sizes=sizes).peak
    without = main.usage(sizes=[0 if k in late else size for k, size in enumerate(sizes)]).peak
    assert peak - without == sum(sizes[k] for k in late) > 0


@pytest.mark.parametrize("pattern", [near, [near, rg.causal(), near, rg.window(3)]], ids=["all", "by head"])
def test_pairs_of_a_traced_module_are_those_of_its_pattern(pattern):
    spec = rg.Attention(32, heads=4, pattern=pattern)
    module = spec.build()
    traced = cost(module, torch.zeros(3, 141, 32, device="meta"))
    declared = cost(spec, n=141, batch=3)
    assert traced.flops == declared.flops and not traced.uncounted
    assert [(p.needed, p.computed) for p in traced.pairs] == [(p.needed, p.computed) for p in declared.pairs]


def test_the_first_cost_of_a_process_is_that_of_later_ones():
    """A probe of PyTorch runs once in a process, and is no memory of the model."""

    def peak():
        for x in vars(entry).values():
            getattr(x, "cache_clear", lambda: None)()
        return cost(rg.Attention(32, heads=2, pattern=rg.causal()), n=8, train=True).memory.training_peak

    compat.can_read_flash_node.cache_clear()
    assert peak() == peak()


def test_a_trace_leaves_real_calls_as_they_were():
    emptied()
    spec = rg.Attention(32, heads=4, pattern=near)
    cost(spec, n=141, batch=3, train=True).memory.training_peak  # noqa: B018
    assert not kernels._pool
    q, k, v = torch.randn(3, 2, 4, 141, 8)
    want = F.scaled_dot_product_attention(q, k, v, near.allowed(141))
    for grad in (False, True):
        assert torch.allclose(rg.attention(q.requires_grad_(grad), k, v, near), want, atol=1e-5)
    entry.memory_of.cache_clear()


@unchecked
@pytest.mark.parametrize(
    "device, low, pattern",
    [
        ("cuda", "bfloat16", near),
        ("cuda", None, near),
        ("cuda", "bfloat16", rg.causal()),
        ("cpu", "bfloat16", rg.causal()),
    ],
    ids=["own", "own, float32", "cuDNN", "CPU"],
)
def test_an_output_is_laid_out_as_its_queries_and_copied_only_where_they_were(device, low, pattern):
    def copies(position):
        spec = rg.Attention(64, heads=2, pattern=pattern, position=position)
        main = cost(spec, n=300, batch=2, train=TrainingStep(autocast=low), device=device).memory.main
        return [r.phase for r in main.trace.meter.records if r.operation == "clone"]

    assert not copies(None)  # heads stay within positions, from the projection to the output and back
    assert (
        copies(rope()).count("forward") == 1
    )  # rotated queries have positions within heads, and so has the output


def test_the_softmax_of_a_gpu_multiplies_beside_its_gradient():
    module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Softmax(-1))
    for device, size in (("cuda", 5 * 16 * 4), ("cpu", 0)):
        main = cost(module, torch.zeros(5, 8), train=True, device=device).memory.main
        backward = [r.bytes for r in main.trace.meter.records if r.operation == "_softmax_backward_data"]
        assert backward == [5 * 16 * 4, size][: 1 + bool(size)]


@unchecked
@pytest.mark.parametrize("pattern", [near, far, rg.every(32), rg.strided(16), near & rg.blocks(50)], ids=repr)
@pytest.mark.parametrize(
    "more", [{}, {"position": alibi()}, {"dropout": 0.1}], ids=["plain", "by distance", "dropout"]
)
def test_the_peak_of_one_piece_of_each_size_is_that_of_all_pieces(pattern, more, monkeypatch):
    spec = rg.Attention(32, heads=4, kv_heads=2, pattern=pattern, **more)

    def peaks():
        entry.memory_of.cache_clear()
        return [cost(spec, n=1499, train=train).memory.usage.peak for train in (False, True)]

    few = peaks()
    monkeypatch.setattr(trace_engine, "_largest", lambda parts, shape: list(parts))
    monkeypatch.setattr(trace_engine, "_ends", layout.cuts)
    monkeypatch.setattr(trace_engine._Executor, "_is_known", lambda *_: False)
    assert few == peaks()


@unchecked
@pytest.mark.parametrize("name, device", [("sdpa", "cpu"), ("reference", "cuda")])
def test_the_peak_of_few_chunks_of_queries_is_that_of_all_chunks(name, device, monkeypatch):
    for limit in ("PAIRS", "SCORES"):
        monkeypatch.setattr(query_chunks, limit, 1 << 12)

    def peaks():
        entry.memory_of.cache_clear()
        with rg.backend(name):
            spec = rg.Attention(16, heads=2, pattern=far)
            runs = [cost(spec, n=1101, train=train, device=device).memory for train in (False, True)]
            return [m.usage.peak for m in runs]

    few = peaks()
    monkeypatch.setattr(trace_engine, "CACHED_CHUNKS", 1 << 40)
    # A GPU rounds the outputs of each chunk up to 512 bytes.
    assert few == (peaks() if device == "cpu" else pytest.approx(peaks(), rel=1e-3))


@unchecked
@pytest.mark.parametrize("pattern", [near, far, rg.every(64), rg.window(9) | rg.every(64)], ids=repr)
def test_a_trace_of_a_million_positions_takes_few_pieces(pattern, monkeypatch):
    run, forward = [], tiles.Executor.forward
    monkeypatch.setattr(tiles.Executor, "forward", lambda *a: run.append(a[1].score_shape) or forward(*a))
    monkeypatch.setattr(tiles.Executor, "fused", lambda *a: run.append(a[1].rows))
    memory = cost(rg.Attention(64, heads=2, pattern=pattern), n=10**6, train=True).memory
    assert 10**6 * 64 * 4 * 7 < memory.training_peak < 10**6 * 64 * 4 * 40
    assert 0 < len(run) < 500


@unchecked
def test_a_hundred_million_positions_are_traced_though_there_are_too_many_tiles():
    memory = cost(rg.Attention(16, heads=2, pattern=far), n=10**8).memory
    assert 10**8 * 16 * 4 * 5 <= memory.inference_peak < 10**8 * 16 * 4 * 8

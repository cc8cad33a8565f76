"""The Triton kernels on a GPU, with their stored configurations, and `rg.attention` over them.

    PYTHONPATH=src:tests/helpers python3 -m pytest tests/engine/gpu/test_gpu.py -q: bfloat16, some in others
    PYTHONPATH=src:tests/helpers python3 -m pytest tests/engine/gpu/test_gpu.py -q -m long: every dtype

Most of the time goes into compiling, so the cases are split among several processes. Without pytest-xdist: each of
its workers would compile and run every case.
"""

import importlib.util
import os
from dataclasses import replace

import pytest
import torch

import regard as rg
from kernel_cases import EVERY_DTYPE, ON_GPU, complaints, outcomes
from regard.engine import query_chunks
from regard.engine.attention import _cache_key
from regard.engine.backends import PREPARED
from regard.errors import ShapeError
from regard.pattern import causal, every, neighborhood, rows, window
from regard.position import ByDistance

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]


@pytest.fixture(scope="module")
def results(request):
    """Of the cases that were selected: `-k "few and queries"` compiles no others."""
    tests = (x for x in request.session.items if "results" in getattr(x, "fixturenames", ()))
    selected = {x.callspec.params["name"] for x in tests}
    cases = [case for case in ON_GPU if case.name in selected]
    return outcomes(cases, "cuda", processes=min(12, os.cpu_count() or 1))


@pytest.mark.parametrize("name", [case.name for case in ON_GPU])
def test_o_lse_and_gradients_are_as_exact_as_plain_pytorch(results, name):
    assert not complaints(results[name])


@pytest.mark.parametrize("name", [case.name for case in ON_GPU])
def test_a_second_run_gives_the_same_bits(results, name):
    assert results[name].get("same"), results[name].get("failure", "the bits differ")


@pytest.mark.parametrize("name", [case.name for case in ON_GPU])
def test_a_prepared_call_gives_the_same_bits(results, name):
    assert results[name].get("prepared"), results[name].get("failure", "the bits differ")


@pytest.fixture(scope="module")
def every_dtype():
    return outcomes(EVERY_DTYPE, "cuda", processes=min(12, os.cpu_count() or 1))


@pytest.mark.long
@pytest.mark.parametrize("name", [case.name for case in EVERY_DTYPE])
def test_every_case_in_every_dtype(every_dtype, name):
    assert not complaints(every_dtype[name])
    assert every_dtype[name]["same"]


SPARSE = causal() & (window(40) | every(32))
# Triton and inductor compile in this process, and warn for themselves
THEIRS = pytest.mark.filterwarnings("default")


def heads(n, d=64):
    g = torch.Generator().manual_seed(n)
    return [
        torch.randn(2, 4, n, d, generator=g).to("cuda", torch.bfloat16).requires_grad_() for _ in range(3)
    ]


def gradients(o, inputs):
    return torch.autograd.grad(o.float().square().sum(), inputs)


def close(fast, masked):
    """Within 5 % of the largest number: both round to bfloat16, in different places."""
    pairs = [(x.detach().float(), y.detach().float()) for x, y in zip(fast, masked, strict=True)]
    return all(float((x - y).abs().max()) <= 0.05 * float(y.abs().max()) for x, y in pairs)


@THEIRS
@pytest.mark.parametrize("parts", [("table",), ("slopes",), ("table", "slopes")])
def test_a_bias_by_distance_runs_in_the_kernels_and_equals_sdpa_with_a_mask(parts):
    q, k, v = heads(700)
    table = (torch.randn(4, 201) / 4).cuda().requires_grad_()
    slopes = torch.rand(4).cuda().requires_grad_()
    given = {name: {"table": table, "slopes": slopes}[name] for name in parts}
    bias = ByDistance(**given)
    explained = rg.explain(SPARSE, 700, heads=4, dtype=torch.bfloat16, device="cuda", bias="distance")
    assert explained.backend == "triton"
    inputs = [q, k, v, *given.values()]
    o, masked = (rg.attention(q, k, v, SPARSE, bias=bias, backend=name) for name in ("auto", "sdpa"))
    assert close([o], [masked]) and close(gradients(o, inputs), gradients(masked, inputs))


@THEIRS
@pytest.mark.parametrize("n", [700, 2100])
def test_softcap_and_sink_logits_have_the_gradients_of_the_formula(n):
    q, k, v = heads(n)
    sinks = torch.randn(4, device="cuda", requires_grad=True)
    terms = {"softcap": 3.0, "sink_logits": sinks}
    assert rg.explain(q, k, v, SPARSE, **terms).backend == "triton"
    o, formula = (rg.attention(q, k, v, SPARSE, **terms, backend=name) for name in ("auto", "reference"))
    inputs = [q, k, v, sinks]
    assert close([o], [formula]) and close(gradients(o, inputs), gradients(formula, inputs))


@THEIRS
@pytest.mark.parametrize("n", [700, 2100])
def test_a_scale_below_0_has_the_gradients_of_the_formula_every_time(n):
    q, k, v = heads(n)
    first, again, formula = (
        rg.attention(q, k, v, SPARSE, scale=-0.3, backend=name) for name in ("triton", "triton", "reference")
    )
    exact = gradients(formula, [q, k, v])
    for o in first, again:
        assert close([o], [formula]) and close(gradients(o, [q, k, v]), exact)


@THEIRS
@pytest.mark.parametrize("lengths", [False, True])
def test_one_query_at_a_position_of_its_own_in_each_batch_row(lengths):
    g = torch.Generator().manual_seed(0)
    shapes = (3, 8, 1, 64), (3, 2, 5000, 64), (3, 2, 5000, 64)
    q, k, v = (torch.randn(s, generator=g).to("cuda", torch.bfloat16) for s in shapes)
    at = torch.tensor([4999, 1700, 3], device="cuda")
    pattern = causal() & (window(1024) | every(64) | rg.sinks(4))
    options = {"at": at, "return_lse": True} | ({"lengths": at + 1} if lengths else {})
    explained = rg.explain(q, k, v, pattern, **options)
    assert (explained.backend, explained.variant) == ("triton", "one query")
    found, formula = (
        rg.attention(q, k, v, pattern, **options, backend=name) for name in ("auto", "reference")
    )
    assert close(found, formula)
    at.add_(-1)  # what a graph would replay: positions are read when the kernel runs
    moved = rg.attention(q, k, v, pattern, **options)
    assert not close(moved, found) and close(
        moved, rg.attention(q, k, v, pattern, **options, backend="reference")
    )


@THEIRS
@pytest.mark.parametrize("n", [3, 100])
def test_queries_at_positions_of_their_own_in_each_batch_row(n):
    """In the kernels, with gradients; prepared calls read new positions, and so does a graph that is replayed."""
    g = torch.Generator().manual_seed(n)
    shapes = (3, 8, n, 64), (3, 2, 3000, 64), (3, 2, 3000, 64)
    q, k, v = (torch.randn(s, generator=g).to("cuda", torch.bfloat16).requires_grad_() for s in shapes)
    at = torch.tensor([3000 - n, 1700, 200], device="cuda")
    sink = torch.randn(8, device="cuda", requires_grad=True)
    pattern = causal() & (window(500) | every(64))
    options = {"at": at, "lengths": at + n, "sink_logits": sink, "softcap": 20.0}
    explained = rg.explain(q, k, v, pattern, **options)
    assert (explained.backend, explained.variant) == ("triton", "few queries")
    for _ in range(2):
        found, formula = (
            rg.attention(q, k, v, pattern, **options, backend=name) for name in ("auto", "reference")
        )
        assert close([found], [formula])
        assert close(gradients(found, [q, k, v, sink]), gradients(formula, [q, k, v, sink]))
        at.add_(-1)
    fixed = [x.detach() for x in (q, k, v)]
    rg.attention(*fixed, pattern, at=at)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = rg.attention(*fixed, pattern, at=at)
    at.add_(-17)
    graph.replay()
    assert torch.equal(replayed, rg.attention(*fixed, pattern, at=at))


@THEIRS
def test_a_few_queries_after_many_keys_need_no_plan():
    q, k, v = (x.detach() for x in heads(4096))
    pattern = causal() & (window(500) | every(64))
    for n, m in ((5, 4000), (5, 4001), (16, 3777)):
        given = q[:, :, :n], k[:, :, :m], v[:, :, :m]
        assert rg.explain(*given, pattern).variant == "few queries"
        assert close([rg.attention(*given, pattern)], [rg.attention(*given, pattern, backend="reference")])


@THEIRS
@pytest.mark.parametrize("n", [1, 6])
@pytest.mark.parametrize("contiguous", [False, True])
def test_a_decoder_with_more_keys_at_each_step_prepares_few_calls(n, contiguous, monkeypatch):
    """Keys are a part of a buffer, or concatenated at each step; with many more of them, a call is prepared anew."""
    from regard.engine.cuda import host

    g = torch.Generator().manual_seed(n)
    shapes = (2, 8, n, 64), (2, 2, 4000, 64), (2, 2, 4000, 64)
    q, k, v = (torch.randn(s, generator=g).to("cuda", torch.bfloat16) for s in shapes)
    pattern = causal() & (window(700) | every(64))
    prepared, original = [], host.prepared_forward
    monkeypatch.setattr(host, "prepared_forward", lambda call: prepared.append(call) or original(call))
    for m in range(2000, 2600, 40):
        keys, values = (x[:, :, :m].contiguous() if contiguous else x[:, :, :m] for x in (k, v))
        o = rg.attention(q, keys, values, pattern)
        assert close([o], [rg.attention(q, keys, values, pattern, backend="reference")]), m
    assert len({call.sizes[4] for call in prepared}) == 2, [call.sizes for call in prepared]


@THEIRS
def test_layers_whose_keys_have_other_strides_alternate():
    """The layers of a decoder share what one of them computed for a number of keys, if their strides are equal."""
    g = torch.Generator().manual_seed(2)
    shapes = (2, 8, 1, 64), (2, 2, 4000, 64), (2, 2, 4000, 64)
    q, k, v = (torch.randn(s, generator=g).to("cuda", torch.bfloat16) for s in shapes)
    for m in (2000, 2001, 2002):
        for contiguous in (True, True, False, False, True):
            keys, values = (x[:, :, :m].contiguous() if contiguous else x[:, :, :m] for x in (k, v))
            o = rg.attention(q, keys, values, causal())
            assert close([o], [rg.attention(q, keys, values, causal(), backend="reference")]), (m, contiguous)


@THEIRS
def test_a_launch_that_is_reused_for_more_keys_can_be_captured():
    g = torch.Generator().manual_seed(0)
    shapes = (2, 8, 3, 64), (2, 2, 4000, 64), (2, 2, 4000, 64)
    q, k, v = (torch.randn(s, generator=g).to("cuda", torch.bfloat16) for s in shapes)
    pattern = causal() & (window(700) | every(64))
    attend = lambda m: rg.attention(q, k[:, :, :m], v[:, :, :m], pattern)  # noqa: E731
    for _ in range(2):
        attend(2000)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = attend(2001)
    v.mul_(0.5)
    graph.replay()
    assert o.any() and torch.equal(o, attend(2001))


@THEIRS
def test_a_pattern_for_each_head_can_be_captured():
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, 700, 64, generator=g).to("cuda", torch.bfloat16) for h in (4, 2, 2))
    pattern = rg.per_head([causal(), SPARSE, SPARSE, causal()])
    attend = lambda: rg.attention(q, k, v, pattern)  # noqa: E731
    for _ in range(2):
        attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = attend()
    v.mul_(0.5)
    graph.replay()
    assert o.any() and torch.equal(o, attend())


@THEIRS
@pytest.mark.parametrize("kind", ["few queries", "one query in pieces", "Hopper", "table"])
def test_the_default_dtype_changes_no_bit(kind):
    """Workspaces and sums have 32 bits where a model is made under torch.set_default_dtype(torch.bfloat16)."""
    from regard.engine.cuda import prepared

    n = {"few queries": 5, "one query in pieces": 1}.get(kind, 700)
    g = torch.Generator().manual_seed(n)
    shapes = (2, 8, n, 64), (2, 8, max(n, 4000 // n), 64), (2, 8, max(n, 4000 // n), 64)
    q, k, v = (torch.randn(s, generator=g).to("cuda", torch.bfloat16).requires_grad_() for s in shapes)
    bias = ByDistance(table=torch.randn(8, 41, generator=g).cuda()) if kind == "table" else None
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        PREPARED.clear()
        prepared.PREPARED.clear()
        torch.set_default_dtype(dtype)
        try:
            for _ in range(2):  # through Triton, then by addresses
                o = rg.attention(q, k, v, SPARSE, bias=bias, backend="triton")
                found.append([o.detach(), *torch.autograd.grad(o, [q, k, v], torch.ones_like(o))])
        finally:
            torch.set_default_dtype(torch.float32)
    assert all(torch.equal(x, y) for other in found[1:] for x, y in zip(found[0], other))


NO_PLAN = every(7) | every(11) | every(13) | every(17)
CONTRADICTION = every(2) & every(4, 3) | window(2)


@THEIRS
@pytest.mark.parametrize(
    ("pattern", "n", "m"),
    [(NO_PLAN, 48, 32768), (CONTRADICTION, 1, 3000), (CONTRADICTION, 3, 3000)],
    ids=["no plan", "contradiction, one query", "contradiction"],
)
def test_few_queries_of_unusual_patterns_have_the_gradients_of_the_formula(pattern, n, m):
    g = torch.Generator().manual_seed(n)
    shapes = (1, 2, n, 64), (1, 2, m, 64), (1, 2, m, 64)
    inputs = [torch.randn(s, generator=g).to("cuda", torch.bfloat16).requires_grad_() for s in shapes]
    o, formula = (rg.attention(*inputs, pattern, backend=name) for name in ("triton", "reference"))
    assert close([o], [formula]) and close(gradients(o, inputs), gradients(formula, inputs))


@THEIRS
@pytest.mark.parametrize(("b", "n"), [(0, 1), (2, 0)])
def test_a_call_without_batch_rows_or_queries_is_empty_each_time(b, n):
    q, k, v = (torch.randn(b, 2, x, 64, device="cuda", dtype=torch.bfloat16) for x in (n, 99, 99))
    for _ in range(2):
        assert rg.attention(q, k, v, SPARSE, backend="triton").shape == (b, 2, n, 64)


@THEIRS
@pytest.mark.long
def test_offsets_of_queries_beyond_2_to_the_31_are_those_of_their_rows():
    """8 GiB for q and o: 2^18 queries of 64 heads that share one key head."""
    n, pattern = 1 << 18, causal() & window(64)
    q, k = (torch.randn(1, h, n, 128, device="cuda", dtype=torch.bfloat16) for h in (64, 1))
    at = torch.zeros(1, dtype=torch.int64, device="cuda")
    o = rg.attention(q, k, k, pattern, at=at, backend="triton")
    last = rg.attention(q[:, :, -64:].contiguous(), k, k, pattern, at=at + n - 64, backend="triton")
    assert close([o[:, :, -64:]], [last])


@THEIRS
def test_what_no_kernel_runs_holds_the_pairs_of_a_chunk(monkeypatch):
    """Of 8192 × 8192 pairs of two heads, less than a quarter; the results are those of one chunk."""
    n, table = 8192, 8192**2 * 2
    options = {
        "float64": ({"dtype": torch.float64}, {}),
        "wide": ({"d": 320, "dtype": torch.bfloat16}, {}),
        "hard": ({}, {"scale": float("inf")}),
    }
    for name, (of_tensors, of_call) in options.items():
        kind = {"d": 32, "dtype": torch.float32} | of_tensors
        g = torch.Generator("cuda").manual_seed(1)
        shape = 1, 2, n, kind["d"]
        q, k, v = (torch.randn(shape, device="cuda", generator=g).to(kind["dtype"]) for _ in range(3))
        inputs = [x.requires_grad_() for x in (q, k, v)]
        found = []
        for chunk in (1 << 21, 1 << 40):
            monkeypatch.setattr(query_chunks, "PAIRS", chunk)
            monkeypatch.setattr(query_chunks, "SCORES", chunk)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            o = rg.attention(*inputs, SPARSE, **of_call)
            found.append([o.detach(), *torch.autograd.grad(o.sin().sum(), inputs, materialize_grads=True)])
            # Beside results, sums in float32 and the workspace of PyTorch's kernels.
            held = torch.cuda.max_memory_allocated() - before - 12 * q.nbytes
            assert (held < table // 4 * kind["dtype"].itemsize) == (chunk == 1 << 21), (name, chunk)
        off = {torch.float64: 1e-12, torch.float32: 1e-4}.get(kind["dtype"], 0.05)
        for x, y in zip(*found):
            assert float((x - y).abs().max()) <= off * float(y.abs().max()), name


@THEIRS
def test_dropout_drops_its_share_keeps_the_mean_and_samples_anew():
    q, k, _ = heads(1500)
    v = torch.ones_like(q)
    torch.manual_seed(0)
    first, second = (rg.attention(q, k, v, SPARSE, dropout_p=0.25, backend="triton") for _ in range(2))
    torch.manual_seed(0)
    again = rg.attention(q, k, v, SPARSE, dropout_p=0.25, backend="triton")
    assert torch.equal(first, again) and not torch.equal(first, second)
    assert abs(float(first.detach().double().mean()) - 1.0) < 0.01


@THEIRS
@pytest.mark.parametrize("pattern", [causal(), window(64) | rows(64), neighborhood((37, 57), 9)], ids=repr)
def test_heads_that_run_one_after_the_other_give_the_same_bits(monkeypatch, pattern):
    """As heads do whose rows exceed the cache, which takes more memory than a test should."""
    from regard.engine.call import Options
    from regard.engine.cuda import host, work_split
    from regard.engine.cuda.call import task

    n, d = 37 * 57, 64
    q, k, v, do = (torch.randn(2, h, n, d, device="cuda", dtype=torch.bfloat16) for h in (6, 3, 3, 6))

    def results():
        own = replace(task(q, v, Options(pattern, 0, 1, d**-0.5)))  # prepared anew
        o, lse = host.forward(q, k, v, own)
        return o, lse, *host.backward((q, k, v, o, lse), (do, None), own)[:3]

    expected = results()
    monkeypatch.setattr(work_split, "CACHE", 0)
    for min_run in (1, 5):
        monkeypatch.setattr(work_split, "MIN_RUN", min_run)
        assert all(torch.equal(x, y) for x, y in zip(results(), expected))


@THEIRS
@pytest.mark.parametrize("d", [64, 128])
def test_a_query_that_is_not_a_number_reaches_no_other_row(d):
    """Nor the next tile of the same program."""
    with torch.no_grad():
        q, k, v = heads(2100, d)
        whole, at = rg.attention(q, k, v, SPARSE, backend="triton"), [5, 700, 701, 2099]
        q[:, :, at] = float("nan")
        o = rg.attention(q, k, v, SPARSE, backend="triton")
    others = [x for x in range(2100) if x not in at]
    assert o[:, :, at].isnan().all() and torch.equal(o[:, :, others], whole[:, :, others])


@THEIRS
def test_compiled_with_bias_and_dropout_it_is_one_graph_and_samples_anew():
    q, k, v = heads(700)
    table = (torch.randn(4, 201) / 4).cuda().requires_grad_()

    @torch.compile(fullgraph=True)
    def attend(q, k, v, table):
        return rg.attention(q, k, v, SPARSE, bias=ByDistance(table), dropout_p=0.25)

    first, second = attend(q, k, v, table), attend(q, k, v, table)
    assert not torch.equal(first, second)
    assert all(torch.isfinite(g).all() for g in gradients(first, [q, k, v, table]))


@THEIRS
@pytest.mark.parametrize("n", [700, 2100])  # backward by one launch, and by several
def test_a_captured_graph_replays_what_a_call_gives(n):
    q, k, v = heads(n)

    def both():
        o = rg.attention(q, k, v, SPARSE, backend="triton")
        return [o.detach(), *gradients(o, (q, k, v))]

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            both()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = both()
    with torch.no_grad():
        for x in (q, k, v):
            x.copy_(torch.randn_like(x))
    graph.replay()
    rest = torch.full((1 << 24,), 7.0, device="cuda")  # takes memory that was freed since
    graph.replay()
    assert all(map(torch.equal, replayed, both())) and bool((rest == 7.0).all())


@THEIRS
@pytest.mark.parametrize("n", [700, 2100])
def test_a_call_that_names_the_backend_is_looked_up_the_second_time(n):
    PREPARED.clear()
    q, k, v = heads(n)
    first, second = (rg.attention(q, k, v, SPARSE, backend="triton") for _ in range(2))
    assert _cache_key(q, k, v, SPARSE, (None, None), "triton") in PREPARED
    assert torch.equal(first, second)
    assert all(map(torch.equal, gradients(first, (q, k, v)), gradients(second, (q, k, v))))


@THEIRS
def test_grouped_heads_in_float32_take_memory_in_proportion_to_the_length():
    def peak(n):
        shapes = (1, 8, n, 64), (1, 2, n, 64), (1, 2, n, 64)
        q, k, v = (torch.randn(s, device="cuda").requires_grad_() for s in shapes)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(rg.attention(q, k, v, causal()).sum(), (q, k, v))
        return torch.cuda.max_memory_allocated() - before

    peak(4096)  # compiles
    short, long = peak(4096), peak(16384)
    assert long < 5 * short and long < 16384**2 * 4  # less than the scores of one head


def test_a_model_that_has_the_heads_of_a_position_together_keeps_o_once():
    torch.manual_seed(0)
    rows = [torch.randn(2, 2112, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    pattern, found = causal() & (window(64) | every(64)), []
    for layout in (torch.clone, lambda x: x.contiguous()):  # heads within positions, and behind them
        q, k, v = (layout(x.transpose(1, 2)).requires_grad_() for x in rows[:3])
        o = rg.attention(q, k, v, pattern, backend="triton")
        joined = o.transpose(1, 2).contiguous()
        assert (joined.data_ptr() == o.data_ptr()) == (layout is torch.clone)
        found.append([o, *torch.autograd.grad(joined, (q, k, v), rows[3])])
    assert all(torch.allclose(a, b, atol=2e-2) for a, b in zip(*found))


def test_tensors_on_two_devices_are_refused():
    q, k, v = (torch.zeros(1, 1, 5, 4, device=device) for device in ("cuda", "cpu", "cuda"))
    with pytest.raises(
        ShapeError, match=f"q is on {q.device}, k on cpu, v on {q.device}; put all three on one device"
    ):
        rg.attention(q, k, v, causal(), backend="triton")


@THEIRS
def test_lengths_and_offsets_on_the_gpu_are_read_anew_by_a_call_that_was_prepared_once():
    generator = torch.Generator().manual_seed(7)
    shapes = (3, 4, 1, 64), (3, 2, 300, 64), (3, 2, 300, 64)
    q, k, v = (torch.randn(s, generator=generator).to("cuda", torch.bfloat16) for s in shapes)
    pattern = causal() & (window(40) | every(32))
    PREPARED.clear()
    for dtype in (torch.int64, torch.int32):
        for numbers in ([299, 40, 7], [100, 299, 3], [0, 1, 250]):
            at = torch.tensor(numbers, device="cuda", dtype=dtype)
            for lengths in (None, at + 1, torch.stack([at // 2, at + 1], 1)):
                given = {"lengths": lengths, "at": at}
                exact = rg.attention(q, k, v, pattern, **given, backend="reference")
                assert close([rg.attention(q, k, v, pattern, **given)], [exact]), (dtype, numbers, lengths)
    # One direct call for each dtype and shape; those keys begin with the pattern's text, the others with call facts.
    assert sum(isinstance(key[0], str) for key in PREPARED) == 2 * 3


# PyTorch's own kernels: flash, cuDNN and the memory-efficient one, with and without a mask.

SDPA_CASES = {
    "bf16": (torch.bfloat16, 4, 64, causal(), {}),
    "bf16 in groups": (torch.bfloat16, 2, 128, None, {}),
    "bf16 with a mask": (torch.bfloat16, 4, 64, causal() & window(9), {}),
    "bf16 padded": (torch.bfloat16, 4, 64, None, {"lengths": [50, 33]}),
    "float16, odd width": (torch.float16, 4, 72, causal(), {}),
    "float32": (torch.float32, 4, 64, causal(), {}),
    "float32 in groups": (torch.float32, 2, 64, causal(), {}),
    "float32 in groups, padded": (torch.float32, 2, 64, causal(), {"lengths": [50, 33]}),
}


@pytest.mark.parametrize("name", SDPA_CASES)
def test_what_sdpa_computes_can_be_differentiated_twice(name):
    dtype, kv_heads, d, pattern, more = SDPA_CASES[name]
    more = {key: torch.tensor(x, device="cuda") for key, x in more.items()}
    g = torch.Generator("cuda").manual_seed(3)
    inputs = [
        torch.randn(2, h, 50, d, device="cuda", generator=g).to(dtype).requires_grad_()
        for h in (4, kv_heads, kv_heads)
    ]
    found = []
    for backend in ("sdpa", "sdpa", "reference"):  # the second call is prepared
        o = rg.attention(*inputs, pattern, **more, backend=backend)
        first = torch.autograd.grad(o.float().square().sum(), inputs, create_graph=True)
        found.append(torch.autograd.grad(sum(x.float().square().sum() for x in first), inputs))
    limit = 1e-4 if dtype == torch.float32 else 0.05
    for mine, again, exact in zip(*found):
        assert exact.abs().max() > 0
        assert (mine - exact).abs().max() <= limit * exact.abs().max()
        assert (again - exact).abs().max() <= limit * exact.abs().max()


def test_after_the_backward_pass_a_graph_that_is_kept_holds_no_inputs():
    q = torch.randn(1, 16, 4096, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def held(**more):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        inputs = [q * x for x in (1.0, 2.0, 3.0)]
        o = rg.attention(*inputs, causal(), **more)
        loss = o.sum()
        del o, inputs
        torch.autograd.grad(loss, q)
        return torch.cuda.memory_allocated() - before

    held(backend="sdpa")
    assert held(backend="sdpa") < q.nbytes and held(backend="triton") < q.nbytes


@pytest.mark.parametrize("d", [32, 64, 128, 256])
def test_products_of_float32_are_as_exact_as_those_of_ieee(d):
    """Of numbers that differ widely in size, too: the parts of a split number have its exponents."""
    g = torch.Generator("cuda").manual_seed(d)
    q, k, v, do = (torch.randn(1, 2, 700, d, device="cuda", generator=g) for _ in range(4))
    v = v * torch.logspace(-6, 6, d, device="cuda")
    pattern = causal() & (window(100) | every(16))

    def gradients_by(attend, dtype):
        inputs = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        o = attend(*inputs)
        return [o.detach(), *torch.autograd.grad(o, inputs, do.to(dtype))]

    formula = lambda *x: rg.attention(*x, pattern, backend="reference")  # noqa: E731
    exact, plain = gradients_by(formula, torch.float64), gradients_by(formula, torch.float32)
    fast = gradients_by(lambda *x: rg.attention(*x, pattern, backend="triton"), torch.float32)
    for name, r, p, f in zip(("o", "dq", "dk", "dv"), exact, plain, fast):
        size = r.abs().amax((0, 1, 2)) if name in ("o", "dv") else r.abs().max()  # by column
        error, allowed = ((x.double() - r).abs() for x in (f, p))
        limit = 2 * (allowed / size).max() + 4 * torch.finfo(torch.float32).eps
        assert (error / size).max() <= limit, f"{name}, {d}: {(error / size).max():.1e}, not {limit:.1e}"

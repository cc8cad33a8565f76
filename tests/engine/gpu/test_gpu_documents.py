"""Packed documents on a Hopper GPU, through `attention`: forward, backward and log-sum-exp by the Hopper kernels.

PYTHONPATH=src:tests/helpers python3 -m pytest tests/engine/gpu/test_gpu_documents.py -q
"""

import importlib.util
from math import inf

import pytest
import torch

from regard.engine.attention import attention
from regard.engine.explain import explain
from regard.pattern import causal, documents, full, window

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [
    pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]

LENGTHS = [300, 1, 254, 3, 5, 2, 60, 64, 65, 128, 700, 7, 7, 7, 129, 11, 20, 237]
N = sum(LENGTHS)  # 2000


def ids(lengths=LENGTHS):
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).cuda()


def by_row():
    """Another packing for each of two batch rows."""
    return torch.stack([ids(), torch.arange(N).cuda() // 37])


def qkv(n=N, m=N, d=64, b=2, h=4, h_kv=4, dtype=torch.bfloat16, heads_inside=False):
    g = torch.Generator().manual_seed(n + d)
    made = []
    for heads, size in ((h, n), (h_kv, m), (h_kv, m)):
        x = torch.randn(b, heads, size, d, generator=g).to("cuda", dtype)
        made.append(x.transpose(1, 2).contiguous().transpose(1, 2) if heads_inside else x)
    return [x.requires_grad_() for x in made]


def results(attend, inputs, learned=()):
    """o, lse, and the gradients of all inputs under random gradients of both."""
    o, lse = attend(*inputs)
    g = torch.Generator().manual_seed(7)
    do, dlse = (torch.randn(x.shape, generator=g).cuda() for x in (o, lse))
    total = (o * do.to(o.dtype)).sum(dtype=torch.float64) + (lse.masked_fill(lse == -inf, 0.0) * dlse).sum()
    return [o, lse, *torch.autograd.grad(total, [*inputs, *learned])]


def plain(pattern, sinks=None, at=None):
    """Scores, softmax and products, every step rounded to the dtype of the inputs."""

    def attend(q, k, v):
        allowed = pattern.allowed(q.shape[2], k.shape[2], at, q.device)
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~allowed, -inf)
        if sinks is not None:
            extra = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
            scores, v = torch.cat([scores, extra], -1), torch.cat([v, torch.zeros_like(v[:, :, :1])], 2)
        empty = (scores == -inf).all(-1, keepdim=True)
        o = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0) @ v
        return o, scores.double().logsumexp(-1)

    return attend


def assert_as_exact_as_plain(pattern, inputs, sinks=None, at=None):
    """The rule of the house: against float64, at most twice the error of PyTorch in this dtype, + 4 ulp."""
    learned = [] if sinks is None else [sinks]

    def fast(q, k, v):
        return attention(q, k, v, pattern, return_lse=True, sink_logits=sinks, at=at)

    def exact(q, k, v):
        wide = None if sinks is None else sinks.double()
        return attention(q, k, v, pattern, return_lse=True, sink_logits=wide, at=at, backend="reference")

    found = explain(*inputs, pattern, return_lse=True, sink_logits=sinks, at=at)
    assert (found.backend, found.variant) == ("triton", "Hopper")
    mine, theirs = results(fast, inputs, learned), results(plain(pattern, sinks, at), inputs, learned)
    want = results(exact, [x.detach().double().requires_grad_() for x in inputs], learned)
    assert torch.equal(mine[1] == -inf, want[1] == -inf)
    names = "o", "lse", "dq", "dk", "dv", "dsinks"
    for name, a, b, ref in zip(names, mine, theirs, want):
        a, b, ref = (x.double().masked_fill(x == -inf, 0.0) for x in (a, b, ref))
        ulp = torch.finfo(torch.float32 if name == "lse" else inputs[0].dtype).eps * ref.abs().max()
        error, other = ((x - ref).abs().max() for x in (a, b))
        assert error <= 2 * other + 4 * ulp, f"{name}: {error} against {other}"


BANDS = [full(), causal(), window(100), causal() & window(100)]


@pytest.mark.parametrize("band", BANDS, ids=repr)
@pytest.mark.parametrize("make", [ids, by_row], ids=["one packing", "a packing for each row"])
def test_documents_are_as_exact_as_plain_pytorch(make, band):
    assert_as_exact_as_plain(documents(make()) & band, qkv())


SHAPES = {
    "heads of 128": {"d": 128},
    "heads of 96": {"d": 96},
    "heads of 256": {"d": 256},
    "half": {"dtype": torch.float16},
    "grouped heads": {"h_kv": 2},
    "one key head": {"h_kv": 1, "d": 128},
    "heads behind positions": {"heads_inside": True},
    "grouped heads behind positions": {"h_kv": 1, "heads_inside": True},
    "many heads": {"h": 80, "h_kv": 80},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("make", [ids, by_row], ids=["one packing", "a packing for each row"])
def test_shapes(make, shape):
    assert_as_exact_as_plain(documents(make()) & causal(), qkv(**shape))


@pytest.mark.parametrize(("n", "at"), [(500, None), (500, 250), (500, -70), (500, 1900)])
def test_queries_at_an_offset(n, at):
    """Queries before the first and past the last document have no key."""
    assert_as_exact_as_plain(documents(ids()) & causal(), qkv(n), at=at)


def test_documents_of_one_position_and_one_document_of_all():
    for which in (torch.arange(N).cuda(), torch.zeros(N, dtype=torch.long).cuda()):
        assert_as_exact_as_plain(documents(which) & causal(), qkv())


@pytest.mark.parametrize("make", [ids, by_row], ids=["one packing", "a packing for each row"])
def test_sink_logits(make):
    sinks = torch.tensor([-1.0, 0.0, 0.5, 2.0]).cuda().requires_grad_()
    assert_as_exact_as_plain(documents(make()) & causal(), qkv(h_kv=2), sinks)


@pytest.mark.parametrize("make", [ids, by_row], ids=["one packing", "a packing for each row"])
def test_a_second_run_gives_the_same_bits(make):
    pattern, inputs = documents(make()) & causal(), qkv(h_kv=2, d=128)

    def attend(q, k, v):
        return attention(q, k, v, pattern, return_lse=True)

    for a, b in zip(results(attend, inputs), results(attend, inputs)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("h_kv", [1, 2])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_programs_share_the_tiles_of_one_long_document(h_kv, has_sinks):
    sinks = torch.tensor([-1.0, 2.0]).cuda().requires_grad_() if has_sinks else None
    pattern, inputs = documents(ids([70, 3900, 30])) & causal(), qkv(4000, 4000, 128, b=1, h=2, h_kv=h_kv)
    assert_as_exact_as_plain(pattern, inputs, sinks)

    def attend(q, k, v):
        return attention(q, k, v, pattern, return_lse=True, sink_logits=sinks)

    for a, b in zip(results(attend, inputs), results(attend, inputs)):
        assert torch.equal(a, b)


def test_repeated_calls_and_calls_with_new_ids_give_the_bits_of_others():
    """Other launches of a kernel that is compiled already have other tables and another number of programs."""
    inputs, do = qkv(b=1), torch.randn(1, 4, N, 64, device="cuda", dtype=torch.bfloat16)
    for lengths in (LENGTHS, LENGTHS[::-1], [N], [500] * 4):
        pattern = documents(ids(lengths)) & causal()
        o, _ = attention(*inputs, pattern, return_lse=True)
        want = [o, *torch.autograd.grad(o, inputs, do)]
        for _ in range(3):
            o = attention(*inputs, documents(pattern.left.ids) & causal())
            assert all(map(torch.equal, [o, *torch.autograd.grad(o, inputs, do)], want)), lengths


def test_a_captured_graph_outlives_its_ids():
    q, k, v = (x.detach() for x in qkv())
    pattern = documents(ids()) & causal()
    want = attention(q, k, v, pattern)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attention(q, k, v, pattern)
    del pattern
    for length in range(
        20, 40
    ):  # so many that the tables of the first ids are dropped, and their memory is used
        attention(q, k, v, documents(torch.arange(N).cuda() // length) & causal())
    found.zero_()
    graph.replay()
    assert torch.equal(found, want)


def test_another_document_changes_no_bit():
    q, k, v = (x.detach() for x in qkv())
    pattern = documents(ids()) & causal()
    before = attention(q, k, v, pattern)
    k[:, :, 300:301], v[:, :, 300:301] = 7.0, -7.0  # the second one
    after = attention(q, k, v, pattern)
    others = torch.arange(N).cuda() != 300
    assert torch.equal(before[:, :, others], after[:, :, others]) and not torch.equal(before, after)


def test_ids_changed_in_place_are_read_again():
    which, inputs = ids(), qkv()
    pattern = documents(which) & causal()
    before = attention(*inputs, pattern)
    which[:555] = 99  # the first three documents are one
    assert_as_exact_as_plain(pattern, inputs)
    assert not torch.equal(before, attention(*inputs, pattern))


def test_gradients_are_those_of_the_ids_that_the_forward_pass_read():
    which, inputs = ids(), qkv()
    do = torch.randn(2, 4, N, 64, device="cuda", dtype=torch.bfloat16)
    want = torch.autograd.grad(attention(*inputs, documents(which) & causal()), inputs, do)
    o = attention(*inputs, documents(which) & causal())
    which[:555] = 99
    for a, b in zip(torch.autograd.grad(o, inputs, do), want):
        assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_only_the_first_call_waits_for_the_gpu():
    pattern, inputs = documents(ids()) & causal(), qkv()

    def step():
        o = attention(*inputs, pattern)
        return torch.autograd.grad(o, inputs, o.detach())

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_captured_graph_gives_the_same_bits():
    q, k, v = (x.detach() for x in qkv())
    pattern = documents(ids()) & causal()
    want = attention(q, k, v, pattern)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attention(q, k, v, pattern)
    found.zero_()
    graph.replay()
    assert torch.equal(found, want)


def test_without_gradients_and_in_inference_mode():
    inputs = qkv()
    want = attention(*inputs, documents(ids()) & causal()).detach()
    with torch.no_grad():
        assert torch.equal(attention(*inputs, documents(ids()) & causal()), want)
    with torch.inference_mode():
        assert torch.equal(attention(*inputs, documents(ids()) & causal()), want)


def test_double_backward_goes_by_the_formula():
    inputs, pattern = qkv(n=200, m=200), documents(torch.arange(200).cuda() // 30) & causal()
    found = []
    for backend in ("triton", "reference"):
        o = attention(*inputs, pattern, backend=backend)
        first = torch.autograd.grad(o.float().square().sum(), inputs, create_graph=True)
        found.append(torch.autograd.grad(sum(x.float().square().sum() for x in first), inputs))
    for a, b in zip(*found):
        assert (a - b).abs().max() <= 0.05 * b.abs().max()


def test_new_ids_at_each_step_leave_nothing_behind():
    from regard.engine.cuda.prepared import PREPARED

    inputs, kept, memory = qkv(), len(PREPARED), []
    for seed in range(24):
        which = (torch.rand(2, N, generator=torch.Generator().manual_seed(seed)) < 0.02).cumsum(1).cuda()
        o = attention(*inputs, documents(which) & causal())
        torch.autograd.grad(o, inputs, o.detach())
        del o, which
        memory.append(torch.cuda.memory_allocated())
    assert len(PREPARED) == kept
    assert memory[-1] < 1.1 * memory[11]

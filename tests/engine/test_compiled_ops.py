"""`attention` under torch.compile: one graph, the same numbers, no new graph for each length."""

import shutil

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code
from torch.testing import assert_close

from long_cases import in_long, rows_in_long
from regard.engine.attention import attention
from regard.errors import BackendError
from regard.pattern import causal, documents, every, full, lengths, per_head, sinks, strided, where, window
from regard.position import ByDistance, alibi_slopes

pytestmark = pytest.mark.compiled

B, H, H_KV, N, M, D_K, D_V = 2, 4, 2, 7, 11, 5, 3
f64 = torch.float64


@pytest.fixture(autouse=True)
def forget_what_was_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=f64)


def qkv(n=N, m=M, d_v=D_V):
    return randn(B, H, n, D_K), randn(B, H_KV, m, D_K, seed=1), randn(B, H_KV, m, d_v, seed=2)


def with_gradients(f, *inputs):
    """The outputs of f, and the gradients of a fixed random mix of them towards the inputs it depends on."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = f(*leaves)
    outs = (out,) if isinstance(out, torch.Tensor) else out
    total = sum((x * randn(*x.shape, seed=97)).sum() for x in outs)
    return [*outs, *torch.autograd.grad(total, leaves, materialize_grads=True)]


SPARSE = causal() & (window(2) | every(4))
IDS = torch.tensor([0] * 4 + [1] * 7)
CALLS = {  # the arguments after q, k, v
    "full": ((), {}),
    "causal": ((causal(),), {}),
    "window or every": ((SPARSE,), {}),
    "strided": ((strided(3),), {"at": (1, 2)}),
    "a bool tensor": ((randn(N, M) > 0,), {}),
    "documents": ((causal() & documents(IDS),), {}),
    "documents, packed": ((causal() & documents(IDS),), {"backend": "tiles"}),
    "documents, packed, with lengths": (
        (documents(IDS) & window(2),),
        {"backend": "tiles", "lengths": torch.tensor([4, 11]), "return_lse": True},
    ),
    "a pattern of lengths": ((causal() & lengths(torch.tensor([4, 11])),), {}),
    "a function": ((where(lambda i, j: (i + j) % 3 == 0),), {}),
    "lengths": ((window(3),), {"lengths": torch.tensor([4, 11])}),
    "lengths of 0": ((), {"lengths": torch.tensor([0, 11])}),
    "a bias": ((causal(),), {"bias": randn(H, 1, M, seed=8)}),
    "ALiBi": ((causal(),), {"bias": ByDistance(slopes=alibi_slopes(H).to(f64))}),
    "a table by distance": ((SPARSE,), {"bias": ByDistance(table=randn(H, 7, seed=9))}),
    "one offset a row": ((SPARSE,), {"at": torch.tensor([0, 3])}),
    "one offset a row by distance": (
        (causal(),),
        {"at": torch.tensor([0, 3]), "bias": ByDistance(slopes=alibi_slopes(H).to(f64))},
    ),
    "the log-sum-exp": ((SPARSE,), {"return_lse": True}),
    "hard": ((SPARSE,), {"scale": float("inf")}),
    "a scale of 0": ((causal(),), {"scale": 0.0}),
}
IN_LONG = {  # others have packed documents, lengths, bands, a bias by distance, an offset for each row and a scale
    "full",
    "causal",
    "strided",
    "documents, packed",
    "lengths",
    "ALiBi",
    "one offset a row",
    "a scale of 0",
}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [pytest.param(*call, id=x, marks=[pytest.mark.long] * (x in IN_LONG)) for x, call in CALLS.items()],
)
def test_one_graph_gives_what_eager_gives(arguments, named):
    def f(q, k, v):
        return attention(q, k, v, *arguments, **named)

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    for mine, other in zip(with_gradients(compiled, *qkv()), with_gradients(f, *qkv()), strict=True):
        assert_close(mine, other, rtol=0, atol=1e-12)


def test_a_bias_by_distance_trains_inside_the_graph():
    def f(q, k, v, table, slopes):
        return attention(q, k, v, causal(), bias=ByDistance(table, slopes))

    inputs = *qkv(), randn(H, 7, seed=9), alibi_slopes(H).to(f64)
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    for mine, other in zip(with_gradients(compiled, *inputs), with_gradients(f, *inputs), strict=True):
        assert_close(mine, other, rtol=0, atol=1e-12)


def extras(*given):
    """Table, slopes, lengths, seed and ids as the operation takes them: an empty tensor is none."""
    return [torch.empty(0, dtype=f64) if x is None else x for x in (*given, *(None,) * (5 - len(given)))]


def test_a_bias_by_distance_is_one_opaque_operation_without_a_table_of_pairs():
    """It holds nothing n × m, drops the same weights forward and backward, and passes PyTorch's own checks."""
    q, k, v = (x.requires_grad_() for x in qkv())
    table, slopes = randn(H, 7, seed=9).requires_grad_(), alibi_slopes(H).to(f64).requires_grad_()
    kept, seed = torch.tensor([4, 11]), torch.tensor(1 << 40)
    for added, p, cap in (((table, slopes), 0.0, 2.0), ((table, None), 0.25, 0.0), ((None, None), 0.25, 0.0)):
        call = (q, k, v, extras(*added, kept, seed), SPARSE.text, [4, 1], [0.3, p, cap])
        torch.library.opcheck(torch.ops.regard.sparse_attention.default, call)


@pytest.mark.parametrize(
    "pattern",
    [lambda ids: causal() & documents(ids), lambda ids: documents(ids, causal() & (window(1) | sinks(2)))],
    ids=["beside", "within"],
)
def test_packed_documents_are_read_when_the_graph_runs(pattern):
    """Other ids need no new graph; ids that do not follow one another are refused by name."""
    counter = CompileCounterWithBackend("aot_eager")

    def f(q, k, v, ids):
        return attention(q, k, v, pattern(ids), backend="tiles")

    compiled = torch.compile(f, fullgraph=True, backend=counter)
    for first in (4, 9, 1):
        ids = torch.tensor([0] * first + [1] * (M - first))
        assert_close(compiled(*qkv(), ids), f(*qkv(), ids), rtol=0, atol=1e-12)
    assert counter.frame_count == 1
    with pytest.raises(BackendError) as refused:
        compiled(*qkv(), torch.arange(M) % 2)
    assert str(refused.value) == (
        "backend='tiles' cannot run this: the ids of a document do not follow one another; use backend='sdpa'"
    )


def test_packed_documents_are_one_opaque_operation():
    q, k, v = (x.requires_grad_() for x in qkv())
    kept = torch.tensor([4, 11])
    for seen, rest in ((None, full()), (kept, causal()), (None, causal() & window(2))):
        call = (q, k, v, extras(None, None, seen, None, IDS), rest.text, [4, 1], [0.3, 0.0, 0.0])
        torch.library.opcheck(torch.ops.regard.sparse_attention.default, call)


def test_a_compiled_bias_by_distance_makes_no_table_of_pairs():
    graphs = []

    def look(graph, _):
        graphs.append(graph)
        return graph.forward

    inputs = *qkv(), randn(H, 7, seed=9)
    torch.compile(
        lambda q, k, v, t: attention(q, k, v, SPARSE, bias=ByDistance(t)), fullgraph=True, backend=look
    )(*inputs)
    called = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert any("sparse_attention" in name or name == "sparse" for name in called)
    assert not any("scaled_dot_product" in name or "softmax" in name for name in called)


@pytest.mark.parametrize(
    ("reach", "n", "m", "at"),
    [
        *((0, N, M, 20), (30, N, M, 20), (30, 3, M, -9), (0, 1, 1, 0)),
        *rows_in_long(*((reach, N, M, None) for reach in (0, 2, 30))),
        *rows_in_long((2, N, M, 20), (0, 3, M, -9), (2, 3, M, -9), (2, 1, 1, 0), (30, 1, 1, 0)),
    ],
)
def test_the_compiled_gradient_of_a_table_is_that_of_indexing(reach, n, m, at):
    def f(q, k, v, table, slopes, backend="auto"):
        return attention(q, k, v, full(), bias=ByDistance(table, slopes), at=at, backend=backend)

    inputs = *qkv(n, m), randn(H, 2 * reach + 1, seed=9), alibi_slopes(H).to(f64)
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    by_mask = with_gradients(lambda *x: f(*x, backend="sdpa"), *inputs)
    for mine, other in zip(with_gradients(compiled, *inputs), by_mask, strict=True):
        assert_close(mine, other, rtol=0, atol=1e-11)


@pytest.mark.parametrize("backend", ["tiles", "sdpa", "reference"])
def test_a_backend_requested_by_name_is_one_graph_too(backend):
    compiled = torch.compile(
        lambda q, k, v: attention(q, k, v, SPARSE, backend=backend), fullgraph=True, backend="aot_eager"
    )
    by_mask = with_gradients(lambda *x: attention(*x, SPARSE, backend="sdpa"), *qkv())
    for mine, other in zip(with_gradients(compiled, *qkv()), by_mask, strict=True):
        assert_close(mine, other, rtol=0, atol=1e-11)


def twice_dropped(q, k, v, slopes):
    options = {
        "bias": ByDistance(slopes=slopes),
        "dropout_p": 0.5,
        "backend": "tiles",
    }  # each backend draws its own
    return tuple(attention(q, k, v, causal() & window(3), **options) for _ in range(2))


def test_dropout_in_a_graph_draws_what_eager_draws_apart_in_each_call_and_anew_in_each_run():
    compiled = torch.compile(twice_dropped, fullgraph=True, backend="aot_eager")
    inputs = *qkv(m=N), alibi_slopes(H).to(f64)
    torch.manual_seed(0)
    first, again = (with_gradients(compiled, *inputs) for _ in range(2))
    torch.manual_seed(0)
    for mine, eager in zip(first, with_gradients(twice_dropped, *inputs), strict=True):
        assert_close(mine, eager, rtol=0, atol=1e-12)
    assert not torch.equal(first[0], first[1]) and not torch.equal(first[0], again[0])


def test_a_graph_with_dropout_needs_no_compiled_code_for_its_seed():
    """On CUDA a seed drawn by a kernel of the graph would ask for a C++ compiler, and a minute."""
    compiled = torch.compile(twice_dropped, fullgraph=True)
    _, (code,) = run_and_get_code(compiled, *qkv(m=N), alibi_slopes(H).to(f64))
    assert code.count("regard.sample_seed") >= 2 and "cpp_fused" not in code and "randint" not in code


@pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "c++"))), reason="inductor needs a C compiler on the CPU"
)
def test_inductor_gives_what_eager_gives():
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, SPARSE), fullgraph=True)
    assert_close(compiled(*qkv()), attention(*qkv(), SPARSE), rtol=0, atol=1e-12)


# Twenty lengths; the first graph is for one length, the second for any.
LENGTHS = range(17, 57, 2)


@pytest.mark.parametrize("pattern", [full(), *in_long(causal()), SPARSE], ids=repr)
def test_twenty_lengths_cost_at_most_two_compilations(pattern):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, pattern), fullgraph=True, backend=counter)
    for n in LENGTHS:
        inputs = qkv(n, n)
        assert_close(compiled(*inputs), attention(*inputs, pattern), rtol=0, atol=1e-12)
    assert 1 <= counter.frame_count <= 2


def test_twenty_lengths_of_a_batch_and_of_a_bias_cost_at_most_two_compilations():
    counter = CompileCounterWithBackend("aot_eager")

    def f(q, k, v, kept, slopes):
        return attention(q, k, v, SPARSE, lengths=kept, bias=ByDistance(slopes=slopes))

    compiled = torch.compile(f, fullgraph=True, backend=counter)
    for n in LENGTHS:
        inputs = *qkv(n, n), torch.tensor([n, n // 2]), alibi_slopes(H).to(f64)
        assert_close(compiled(*inputs), f(*inputs), rtol=0, atol=1e-12)
    assert 1 <= counter.frame_count <= 2


def test_decoding_after_a_growing_cache_costs_at_most_two_compilations():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, SPARSE), fullgraph=True, backend=counter)
    for m in LENGTHS:
        inputs = qkv(1, m)
        assert_close(compiled(*inputs), attention(*inputs, SPARSE), rtol=0, atol=1e-12)
    assert 1 <= counter.frame_count <= 2


@pytest.mark.parametrize("options", [{"return_lse": True}, *in_long({}, {"softcap": 3.0})], ids=str)
def test_a_pattern_per_head_is_one_graph(options):
    q, k, v = randn(2, 4, 13, 5), randn(2, 2, 13, 5, seed=1), randn(2, 2, 13, 3, seed=2)
    patterns = per_head([causal(), window(3), causal(), causal() & every(4)])

    def f(q, k, v):
        made = attention(q, k, v, patterns, **options)
        return torch.cat([x.flatten() for x in (made if isinstance(made, tuple) else (made,))])

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    assert_close(compiled(q, k, v), f(q, k, v))
    assert_close(compiled(*(x[..., :9, :] for x in (q, k, v))), f(*(x[..., :9, :] for x in (q, k, v))))

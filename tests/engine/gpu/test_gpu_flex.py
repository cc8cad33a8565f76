"""Documents and functions on CUDA, through `attention`: FlexAttention compiled, forward, backward and log-sum-exp.

PYTHONPATH=src:tests/helpers python3 -m pytest tests/engine/gpu/test_gpu_flex.py
"""

from math import inf

import pytest
import torch

from regard.engine.attention import attention
from regard.engine.backends import choose
from regard.engine.call import CallFacts
from regard.engine.explain import explain
from regard.errors import BackendError
from regard.pattern import causal, documents, sinks, where, window

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # Dynamo 2.11 asks every input for its .grad and hides the warning of PyTorch, which "error" turns into one.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

N, B, H, H_KV, D = 2304, 2, 4, 2, 64  # 2304 is 18 blocks of 128; 2300 ends inside one


def ids(n: int = N) -> torch.Tensor:
    bounds = torch.tensor([0, 300, 301, 555, 1200, 1900])
    return torch.bucketize(torch.arange(n), bounds, right=True).cuda()


def qkv(n=N, m=None, d_k=D, d_v=D, dtype=torch.bfloat16):
    g = torch.Generator().manual_seed(0)
    m = n if m is None else m
    shapes = (B, H, n, d_k), (B, H_KV, m, d_k), (B, H_KV, m, d_v)
    return [torch.randn(s, generator=g).to("cuda", dtype).requires_grad_() for s in shapes]


def run(backend, inputs, pattern, lse=True, **more):
    out = attention(*inputs, pattern, backend=backend, return_lse=lse, **more)
    return results(inputs, *(out if lse else (out, None)))


def results(inputs, o, logs):
    """o, logs unless it is None, and the gradients of the inputs."""
    g = torch.Generator().manual_seed(7)
    total = (o.float() * torch.randn(o.shape, generator=g).cuda()).sum()
    if logs is not None:
        total = (
            total + (logs.masked_fill(logs == -inf, 0.0) * torch.randn(logs.shape, generator=g).cuda()).sum()
        )
    return [o, *([] if logs is None else [logs]), *torch.autograd.grad(total, inputs)]


def plain_in_this_dtype(inputs, pattern, with_lse, lengths=None, at=None):
    """o and the gradients by scores, softmax and products, every step rounded to the dtype of the inputs."""
    q, k, v = inputs
    table = pattern.allowed(q.shape[2], k.shape[2], at, q.device)
    if lengths is not None:
        table = table & (torch.arange(k.shape[2], device=q.device) < lengths[:, None])[:, None, None]
    k, v = (x.repeat_interleave(H // H_KV, 1) for x in (k, v))
    empty = ~table.any(-1, keepdim=True)
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~(table | empty), -inf)
    o = scores.softmax(-1).masked_fill(empty, 0.0) @ v
    g = torch.Generator().manual_seed(7)
    total = (o.float() * torch.randn(o.shape, generator=g).cuda()).sum()
    if with_lse:
        logs = scores.float().logsumexp(-1).masked_fill(empty.expand((*scores.shape[:3], 1)).squeeze(-1), 0.0)
        total = total + (logs * torch.randn(logs.shape, generator=g).cuda()).sum()
    return [o, *torch.autograd.grad(total, inputs)]


def assert_within_twice_the_error_of_plain(mine, inputs, pattern, **more):
    """The rule of the house: against float64, at most twice the error of PyTorch in this dtype, + 4 ulp."""
    o, lse, *grads = run("reference", [x.detach().double().requires_grad_() for x in inputs], pattern, **more)
    with_lse = len(mine) == 5
    if with_lse:
        logs = mine.pop(1)
        assert torch.equal(logs == -inf, lse == -inf)
        assert (logs.double() - lse).nan_to_num(0.0, 0.0, 0.0).abs().max() < 1e-3
    else:  # a loss without the log-sum-exp
        o, *grads = run(
            "reference", [x.detach().double().requires_grad_() for x in inputs], pattern, False, **more
        )
    theirs = plain_in_this_dtype(inputs, pattern, with_lse, **more)
    for name, a, b, ref in zip(("o", "dq", "dk", "dv"), mine, theirs, (o, *grads)):
        ulp = torch.finfo(a.dtype).eps * ref.abs().max()
        error, other = ((x.double() - ref).abs().max() for x in (a, b))
        assert error <= 2 * other + 4 * ulp, f"{name}: {error} against {other}"


PATTERNS = {
    "documents": lambda: documents(ids()),
    "documents and causal": lambda: documents(ids()) & causal(),
    "documents per batch row": lambda: documents(torch.stack([ids(), ids().flip(0)])) & causal(),
    "positions within each text": lambda: documents(ids(), causal() & (window(50) | sinks(4))),
    "a function": lambda: where(lambda i, j: (i + j) % 3 == 0),
    "a function or a window": lambda: where(lambda i, j: j < 100) | window(50),
    "a function with an empty row": lambda: where(lambda i, j: (i != 140) & (i // 200 == j // 200)),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_auto_takes_flex_and_it_is_right(name):
    """On Hopper, documents are faster by kernels of our own (test_gpu_documents.py), so there flex is named."""
    pattern, inputs = PATTERNS[name](), qkv()
    call_facts = CallFacts(pattern, N, N, D, D, B, H, H, torch.bfloat16, "cuda", grad=True, return_lse=True)
    is_hopper = torch.cuda.get_device_capability()[0] == 9
    assert choose(call_facts).backend == ("triton" if is_hopper and "documents" in name else "flex")
    assert_within_twice_the_error_of_plain(run("flex", inputs, pattern), inputs, pattern)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes(dtype):
    inputs, pattern = qkv(dtype=dtype), documents(ids()) & causal()
    assert_within_twice_the_error_of_plain(run("flex", inputs, pattern), inputs, pattern)


def test_few_queries_are_refused_by_name_and_masked_by_auto():
    inputs, pattern = qkv(77, 2300), documents(ids(2300)) & causal()
    with pytest.raises(BackendError, match="FlexAttention has no kernel for every n below 128, here 77"):
        run("flex", inputs, pattern)
    assert_within_twice_the_error_of_plain(run("auto", inputs, pattern), inputs, pattern)


@pytest.mark.parametrize(("n", "m"), [(2300, 2300), (129, 2300), (200, 211)])
def test_lengths_that_are_no_multiple_of_a_block(n, m):
    inputs, pattern = qkv(n, m), documents(ids(m)) & causal()
    assert_within_twice_the_error_of_plain(run("flex", inputs, pattern), inputs, pattern)


@pytest.mark.parametrize(("d_k", "d_v"), [(16, 16), (24, 5), (128, 64)])
def test_widths(d_k, d_v):
    inputs, pattern = qkv(d_k=d_k, d_v=d_v), documents(ids()) & causal()
    assert_within_twice_the_error_of_plain(run("flex", inputs, pattern), inputs, pattern)


def test_what_lengths_hide_reaches_nothing():
    q, k, v = qkv()
    kept = torch.tensor([N, 400]).cuda()
    clean = run("flex", (q, k, v), documents(ids()), lengths=kept)
    dirty_k, dirty_v = k.detach().clone(), v.detach().clone()
    dirty_k[1, :, 400:], dirty_v[1, :, 400:] = torch.nan, torch.nan
    dirty = run(
        "flex", (q, dirty_k.requires_grad_(), dirty_v.requires_grad_()), documents(ids()), lengths=kept
    )
    for a, b in zip(clean, dirty):
        assert torch.equal(a.nan_to_num(neginf=0.0), b.nan_to_num(neginf=0.0)) and not b.isnan().any()


def test_offsets_of_each_row():
    inputs, pattern = qkv(300, N), documents(ids()) & causal()
    at = torch.tensor([5, 900]).cuda()
    assert_within_twice_the_error_of_plain(run("flex", inputs, pattern, at=at), inputs, pattern, at=at)


def test_ids_changed_in_place_are_read_again():
    inputs, which = qkv(), ids()
    pattern = documents(which)
    before = run("flex", inputs, pattern)
    which[:1000] = 77
    after = run("flex", inputs, pattern)
    assert not torch.equal(before[0], after[0])
    assert_within_twice_the_error_of_plain(after, inputs, pattern)


def test_inside_a_compiled_graph():
    inputs, which = qkv(), ids()
    f = torch.compile(lambda q, k, v, x: attention(q, k, v, documents(x) & causal()), fullgraph=True)
    mine = results(inputs, f(*inputs, which), None)
    assert_within_twice_the_error_of_plain(mine, inputs, documents(which) & causal())


def test_twenty_lengths_do_not_reach_a_limit():
    for n in range(2048, 2048 + 20 * 64, 64):
        inputs = qkv(n)
        got = attention(*inputs, documents(ids(n)) & causal())
        assert torch.allclose(
            got, attention(*inputs, documents(ids(n)) & causal(), backend="sdpa"), atol=2e-2
        )


def test_no_documents_in_small_calls_are_masked_and_right():
    inputs, pattern = qkv(200), documents(ids(200))
    assert_within_twice_the_error_of_plain(run("auto", inputs, pattern, lse=False), inputs, pattern)


def test_documents_that_flex_runs_are_explained():
    ids = (torch.arange(3000) // 700).cuda()
    q, k = (torch.randn(1, h, 3000, 192, device="cuda", dtype=torch.bfloat16) for h in (8, 2))
    found = explain(q, k, k[..., :128], documents(ids))
    assert found.backend == "flex" and 4 * 700**2 < found.computed < 3000**2

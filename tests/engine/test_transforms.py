"""Attention under torch.func, where sparse backends run: n = 1024, which no mask is chosen for."""

from functools import partial

import pytest
import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.testing import assert_close

import regard as rg
from long_cases import in_long
from regard.engine import backends, call
from regard.engine.cpu import documents
from regard.errors import BackendError

N = 1024


def randn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


IDS = torch.arange(N) // 300
PATTERNS = {
    "window": rg.causal() & rg.window(16),
    "documents": rg.causal() & rg.documents(IDS),
    "documents of each row": rg.documents(torch.stack([IDS, IDS.flip(0)])),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_gradients_and_mapped_calls_are_those_of_the_call(name):
    pattern = PATTERNS[name]
    q, k, v = (randn(2, 2, N, 8, seed=seed) for seed in range(3))
    assert rg.explain(q, k, v, pattern).backend == "tiles"

    def loss(q, k, v):
        return rg.attention(q, k, v, pattern).square().sum()

    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    right = torch.autograd.grad(loss(*inputs), inputs)
    assert_close(torch.func.grad(loss, argnums=(0, 1, 2))(q, k, v), right)

    several = torch.stack([q, 2 * q, -q])
    mapped = torch.vmap(lambda q: rg.attention(q, k, v, pattern))(several)
    assert_close(mapped, torch.stack([rg.attention(x, k, v, pattern) for x in several]))
    per_sample = torch.vmap(torch.func.grad(loss), in_dims=(0, None, None))(several, k, v)
    assert_close(per_sample, torch.stack([torch.func.grad(loss)(x, k, v) for x in several]))


def test_a_bias_by_distance_is_differentiated_too():
    q, k, v = (randn(1, 2, N, 8, seed=seed) for seed in range(3))
    slopes = torch.tensor([0.1, 0.2], dtype=torch.float64)

    def loss(slopes, v):
        bias = rg.ByDistance(slopes=slopes)
        return rg.attention(q, k, v, rg.causal(), bias=bias).square().sum()

    inputs = slopes.clone().requires_grad_(), v.clone().requires_grad_()
    right = torch.autograd.grad(loss(*inputs), inputs)
    assert_close(torch.func.grad(loss, argnums=(0, 1))(slopes, v), right)


def by_formula(q, k, v, allowed):
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~allowed, float("-inf"))
    return scores.softmax(-1).masked_fill(~allowed, 0.0) @ v


HIGHER = {
    "every pair": rg.full(),
    "causal": rg.causal(),
    "window": rg.causal() & rg.window(16),
    "documents": rg.documents(torch.arange(70) // 30),
    "tree": rg.tree(torch.arange(70) - 1),
    "grid": rg.neighborhood((7, 10), 3),
}


@pytest.mark.parametrize("name", HIGHER)
def test_second_and_forward_derivatives_are_those_of_the_formula(name):
    pattern, n = HIGHER[name], 70
    q, k, v = (randn(1, 2, n, 3, seed=seed) for seed in range(3))
    allowed = pattern.allowed(n)

    def derivatives(attend):
        def loss(q):
            return attend(q, k, v).square().sum()

        yield torch.func.grad(lambda q: torch.func.grad(loss)(q).square().sum())(q)
        yield torch.func.jvp(attend, (q, k, v), (k, v, q))[1]
        yield torch.func.jvp(torch.func.grad(loss), (q,), (k,))[1]
        with forward_ad.dual_level():  # without torch.func
            yield forward_ad.unpack_dual(attend(forward_ad.make_dual(q, k), k, v)).tangent
        yield torch.func.grad(loss)(q)

    ours = derivatives(lambda *x: rg.attention(*x, pattern))
    right = derivatives(lambda *x: by_formula(*x, allowed))
    for mine, theirs in zip(list(ours), list(right), strict=True):
        assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def test_a_backend_by_name_says_that_only_the_formula_has_forward_derivatives():
    q = randn(1, 2, N, 8, seed=0)
    for backend in ("tiles", "sdpa"):
        attend = partial(rg.attention, pattern=PATTERNS["window"], backend=backend)
        with pytest.raises(rg.BackendError, match=r"only the formula has forward.*use backend='reference'"):
            torch.func.jvp(attend, (q, q, q), (q, q, q))
    with forward_ad.dual_level():
        assert rg.explain(q, q, q, PATTERNS["window"]).backend == "reference"
    assert rg.explain(q, q, q, PATTERNS["window"]).backend == "tiles"


def test_a_gradient_of_a_gradient_says_what_to_use():
    q = randn(1, 2, N, 8, seed=0).requires_grad_()  # the outer one is PyTorch's own

    def loss(q):
        return rg.attention(q, q, q, PATTERNS["window"]).square().sum()

    with pytest.raises(rg.BackendError, match=r"not supported under torch.func; use backend='reference'"):
        torch.func.grad(loss)(q).square().sum().backward()


def test_a_table_that_a_transform_made_is_not_used_after_it():
    q, pattern = randn(1, 1, 61, 8, seed=0), rg.causal() & rg.dilated(3, 7)

    def loss(x):
        return rg.attention(x, x, x, pattern, backend="reference").square().sum()

    torch.func.grad(lambda x: torch.func.grad(loss)(x).sum())(q)
    right = torch.autograd.functional.jvp(
        lambda x: by_formula(x, x, x, pattern.allowed(61)).square().sum(), q, q
    )
    assert_close(torch.func.jvp(loss, (q,), (q,)), right)


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # PyTorch loops over a mapped axis
@pytest.mark.parametrize("name", ["window", *in_long("causal", "documents")])
def test_transforms_in_a_compiled_graph_are_those_of_the_formula(name):
    """The window: torch.func took the forward derivative of the custom operator for 0, without a word."""
    pattern, n = HIGHER[name], 70
    q, k, v = (randn(2, 2, n, 8, seed=seed) for seed in range(3))

    def transformed(attend):
        yield lambda q: torch.func.jvp(lambda q: attend(q, k, v), (q,), (k,))[1]
        yield lambda q: torch.func.grad(lambda q: attend(q, k, v).square().sum())(q)
        yield lambda q: torch.func.vmap(lambda q: attend(q[None], k[:1], v[:1]))(q)
        first = torch.func.grad(lambda q: attend(q, k, v).square().sum())
        yield torch.func.grad(lambda q: first(q).square().sum())

    ours = transformed(lambda *x: rg.attention(*x, pattern))
    right = transformed(lambda *x: by_formula(*x, pattern.allowed(n)))
    for mine, theirs in zip(ours, right, strict=True):
        torch.compiler.reset()
        assert_close(torch.compile(mine, backend="aot_eager")(q), theirs(q))


@pytest.mark.compiled
@pytest.mark.parametrize("backend", ["sdpa", "tiles"])
def test_a_backend_by_name_refuses_second_derivatives_in_a_compiled_graph(backend):
    q = randn(1, 2, 9, 8, seed=0)
    first = torch.func.grad(lambda q: rg.attention(q, q, q, rg.causal(), backend=backend).square().sum())
    twice = torch.compile(torch.func.grad(lambda q: first(q).square().sum()), backend="aot_eager")
    with pytest.raises(BackendError, match="only the formula has forward-mode and second derivatives here"):
        twice(q)


@pytest.mark.compiled
def test_a_compiled_gradient_of_a_gradient_works_by_the_formula(monkeypatch):
    """What docs/engine.md says of create_graph=True inside a graph."""
    monkeypatch.setattr(torch._dynamo.config, "trace_autograd_ops", True)
    q = randn(1, 2, 9, 8, seed=0)

    def penalty(q, backend="reference"):
        o = rg.attention(q, q, q, rg.causal() & rg.window(3), backend=backend)
        return torch.autograd.grad(o.square().sum(), q, create_graph=True)[0].square().sum()

    found, right = (q.clone().requires_grad_() for _ in range(2))
    torch.compile(penalty, backend="aot_eager", fullgraph=True)(found).backward()
    penalty(right).backward()
    assert_close(found.grad, right.grad)


FAKED = {
    "window": rg.causal() & rg.window(5),
    "documents": rg.documents(torch.arange(64) // 16),
    "causal documents": rg.causal() & rg.documents(torch.arange(64) // 16),
}


@pytest.mark.parametrize("backend", ["auto", "sdpa", "tiles", "reference"])
@pytest.mark.parametrize("real", [False, True], ids=["fake queries", "real queries"])
@pytest.mark.parametrize("name", FAKED)
def test_what_a_mode_of_fake_tensors_made_is_not_used_after_it(name, real, backend):
    call._dense.cache_clear()
    documents._layouts.cache_clear()
    pattern, q = FAKED[name], randn(1, 2, 64, 8, seed=0)
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = q if real else torch.empty(1, 2, 64, 8, dtype=torch.float64)
        assert isinstance(rg.attention(x, x, x, pattern, backend=backend), FakeTensor)
    inputs = q.clone().requires_grad_()
    o = rg.attention(inputs, inputs, inputs, pattern, backend=backend)
    o.sum().backward()
    assert_close(o.detach(), by_formula(q, q, q, pattern.allowed(64)))
    assert inputs.grad.isfinite().all()


@pytest.mark.filterwarnings("error")  # PyTorch warns where the memory of a fake tensor is read
@pytest.mark.parametrize("backend", ["auto", "tiles"])
def test_ids_that_are_fake_are_not_read(backend):
    with FakeTensorMode():
        q, ids = torch.empty(1, 2, 64, 8), torch.zeros(64, dtype=torch.long)
        if backend == "auto":
            assert rg.attention(q, q, q, rg.documents(ids)).shape == q.shape
            return
        with pytest.raises(BackendError, match="the data of the pattern must be read; use backend='sdpa'"):
            rg.attention(q, q, q, rg.documents(ids), backend=backend)


class Traced(torch.nn.Module):
    def __init__(self, pattern, **options):
        super().__init__()
        self.pattern, self.options = pattern, options

    def forward(self, q, k, v):
        return rg.attention(q, k, v, self.pattern, **self.options)


TRACED = {
    "full": (None, {}),
    "causal": (rg.causal(), {}),
    "window": (rg.causal() & rg.window(3), {}),
    "empty rows": (rg.window(1) & ~rg.window(1), {}),
    "documents": (rg.documents(torch.arange(11) // 4), {}),
    "lengths": (rg.causal(), {"lengths": torch.tensor([3, 11])}),
    "by name": (rg.causal(), {"backend": "reference"}),
    "softcap": (rg.causal(), {"softcap": 2.0}),
    "slopes": (rg.causal(), {"bias": rg.ByDistance(slopes=torch.ones(4))}),
}


@pytest.mark.compiled  # without the type checker: a traced size is a tensor
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("name", TRACED)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_can_be_traced(name, kv_heads):
    pattern, options = TRACED[name]
    inputs = [
        torch.randn(2, h, 11, 8, generator=torch.Generator().manual_seed(h)) for h in (4, kv_heads, kv_heads)
    ]
    held = len(backends.PREPARED)
    traced = torch.jit.trace(Traced(pattern, **options), inputs, check_trace=False)
    assert len(backends.PREPARED) == held  # which are found again by sizes that are numbers
    for x in (inputs, [-2 * x for x in inputs]):
        assert_close(traced(*x), rg.attention(*x, pattern, **options))


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.*:DeprecationWarning")
def test_a_traced_language_model_reads_other_lengths():
    model = rg.preset("tiny-gpt").build().eval()
    traced = torch.jit.trace(model, torch.arange(12)[None], check_trace=False)
    for n in (12, 7, 19):
        assert_close(traced(torch.arange(n)[None]), model(torch.arange(n)[None]))


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.*:DeprecationWarning")
def test_a_backend_that_cannot_be_traced_says_so():
    q = torch.randn(1, 2, 5, 8)
    with pytest.raises(BackendError) as e:
        torch.jit.trace(Traced(rg.causal(), backend="tiles"), (q, q, q))
    assert str(e.value) == (
        "backend='tiles' cannot run this: torch.jit.trace records PyTorch's own operations, and no others; "
        "use backend='sdpa'"
    )


@pytest.mark.compiled
def test_dual_numbers_in_a_graph_that_was_compiled_without_them_are_refused_with_what_works():
    """It was PyTorch's own error: "You must implement the jvp function for custom autograd.Function"."""
    q, k, v = (randn(1, 2, N, 8, seed=seed) for seed in range(3))

    def attend(q, k, v):
        return rg.attention(q, k, v, PATTERNS["window"])

    def tangent():
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(compiled(*map(forward_ad.make_dual, (q, k, v), (k, v, q)))).tangent

    right = torch.func.jvp(attend, (q, k, v), (k, v, q))[1]
    torch.compiler.reset()
    compiled = torch.compile(attend, backend="aot_eager")
    assert_close(compiled(q, k, v), attend(q, k, v))
    with pytest.raises(
        BackendError, match=r"compiled without forward-mode derivatives.*use torch\.func\.jvp"
    ):
        tangent()
    assert_close(torch.func.jvp(compiled, (q, k, v), (k, v, q))[1], right)
    torch.compiler.reset()
    assert_close(tangent(), right)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_query_offsets_may_be_mapped():
    q, k = torch.randn(3, 2, 4, 8, dtype=torch.float64), torch.randn(3, 2, 11, 8, dtype=torch.float64)
    at = torch.tensor([5, 0, 7])
    pattern = rg.causal() & rg.window(3)

    def one(q, k, at):
        return rg.attention(q[None], k[None], k[None], pattern, at=at[None])[0]

    torch.testing.assert_close(torch.vmap(one)(q, k, at), rg.attention(q, k, k, pattern, at=at))
    lengths = torch.vmap(lambda k, at: rg.attention(k[None], k[None], k[None], rg.lengths(at[None]))[0])(
        k, at
    )
    torch.testing.assert_close(lengths, rg.attention(k, k, k, lengths=at))


@pytest.mark.parametrize("word", [rg.documents, rg.tree, lambda x: rg.selected(x[:, None], 1)])
def test_numbers_of_a_pattern_that_are_mapped_are_refused_with_a_reason(word):
    k, numbers = torch.randn(2, 1, 2, 5, 8), torch.arange(5).expand(2, -1) - 1
    with pytest.raises(
        rg.ShapeError, match=r"torch\.vmap maps over its .*; give those of all rows to one call"
    ):
        torch.vmap(lambda k, x: rg.attention(k, k, k, word(x)))(k, numbers)


@pytest.mark.parametrize("d_v", [8, 5])
@pytest.mark.parametrize("backend", ["sdpa", "tiles", "reference"])
@pytest.mark.parametrize("pattern", [rg.causal(), rg.causal() & (rg.window(3) | rg.every(5))], ids=repr)
def test_a_batch_of_gradients_is_each_of_them(pattern, backend, d_v):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 67, 8), torch.randn(2, 2, 67, 8), torch.randn(2, 2, 67, d_v)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    grads = torch.randn(3, 2, 4, 67, d_v)

    def output():
        return rg.attention(q, k, v, pattern, backend=backend)

    found = torch.autograd.grad(output(), inputs, grads, is_grads_batched=True)
    one_by_one = zip(*(torch.autograd.grad(output(), inputs, grad) for grad in grads))
    for x, each in zip(found, one_by_one):
        torch.testing.assert_close(x, torch.stack(each))
        assert not x.requires_grad


def test_offsets_per_row_are_not_read_for_a_pattern_without_data():
    pattern = rg.causal() & rg.window(4)
    with FakeTensorMode():
        q, k = torch.randn(2, 1, 9, 8), torch.randn(2, 1, 20, 8)
        assert rg.attention(q, k, k, pattern, at=torch.zeros(2, dtype=torch.long)).shape == q.shape

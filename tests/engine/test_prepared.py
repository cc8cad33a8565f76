"""Prepared calls, looked up by shape: the same numbers, nothing skipped that could be wrong, nothing stale."""

import weakref

import pytest
import torch
from torch.autograd import gradgradcheck
from torch.func import jacrev, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from regard.engine import reference_backend, sdpa
from regard.engine.attention import _cache_key, attention
from regard.engine.backends import PREPARED
from regard.engine.call import Prepared
from regard.engine.explain import explain
from regard.errors import ShapeError, SpecError
from regard.pattern import causal, documents, every, full, sinks, where, window

PATTERNS = [None, full(), causal(), window(2), causal() & (window(1) | every(3)), sinks(0)]


@pytest.fixture(autouse=True)
def nothing_known():
    PREPARED.clear()
    yield
    PREPARED.clear()


def recalled(inputs, pattern):
    """Whether the next call of this kind is looked up."""
    return _cache_key(*inputs, pattern, (None, None), "auto") in PREPARED


def qkv(n=7, m=7, dtype=torch.float64, grad=True, h_kv=2):
    g = torch.Generator().manual_seed(0)
    shapes = (2, 4, n, 5), (2, h_kv, m, 5), (2, h_kv, m, 3)
    return [torch.randn(s, generator=g, dtype=torch.float64).to(dtype).requires_grad_(grad) for s in shapes]


@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
@pytest.mark.parametrize("scale", [None, 0.3, 2, 0.0, -1.0])
def test_the_second_call_gives_what_the_formula_gives(pattern, scale):
    for n, m in ((7, 7), (3, 7), (1, 7)):
        inputs = qkv(n, m)
        expected = attention(*inputs, pattern, scale=scale, backend="reference")
        wanted = torch.autograd.grad(expected.square().sum(), inputs)
        for _ in range(2):
            o = attention(*inputs, pattern, scale=scale)
            assert torch.allclose(o, expected, atol=1e-12)
            for a, b in zip(torch.autograd.grad(o.square().sum(), inputs), wanted):
                assert torch.allclose(a, b, atol=1e-12)


def test_it_is_recalled_and_few_are_kept(monkeypatch):
    monkeypatch.setattr(PREPARED, "limit", 4)  # two entries a call: by its facts, and by its arguments
    for n in (3, 4, 5):
        attention(*qkv(n, n), window(1))
    assert [key[4][2] for key in PREPARED if len(key) > 2] == [4, 5]
    inputs = qkv(5, 5)
    assert recalled(inputs, window(1)) and not recalled(inputs, window(2))


def test_another_dtype_or_gradient_is_another_call():
    inputs = qkv()
    attention(*inputs, window(1))
    assert recalled(inputs, window(1))
    assert not recalled(qkv(dtype=torch.float32), window(1)) and not recalled(qkv(grad=False), window(1))
    with torch.no_grad():
        assert not recalled(inputs, window(1))


def test_what_data_decide_is_never_cached():
    ids = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    for pattern in (documents(ids), where(torch.ge)):
        attention(*qkv(), pattern)
        assert not PREPARED
    for table in (torch.eye(7, dtype=torch.bool), torch.ones(7, 7, dtype=torch.bool).tril()):
        wanted = attention(*qkv(), table, backend="reference")
        assert torch.allclose(attention(*qkv(), table), wanted, atol=1e-12)


@pytest.mark.parametrize("n", [100, 150])  # a table of more than 2¹⁴ pairs is read in another manner
def test_a_table_of_ones_is_no_table_and_one_pair_less_is(n):
    q, k, v = (torch.randn(1, 2, n, 4, dtype=torch.float64) for _ in range(3))
    ones = torch.ones(n, n, dtype=torch.bool)
    assert explain(q, k, v, ones).variant == "dense"
    for pair in ((0, n - 1), (n // 2, 3), (n - 1, n - 1)):
        table = ones.clone()
        table[pair] = False
        assert explain(q, k, v, table).variant == "masked"
        assert torch.allclose(attention(q, k, v, table), attention(q, k, v, table, backend="reference"))


def test_a_wrong_call_is_refused_every_time():
    q, k, v = qkv()
    attention(q, k, v)
    for _ in range(2):
        with pytest.raises(SpecError):
            attention(q, k, v, backend="fastest")
        with pytest.raises(ShapeError):
            attention(q, k.float(), v)


def test_a_mask_made_in_inference_serves_training():
    inputs = qkv()
    with torch.inference_mode():
        attention(*(x.detach() for x in inputs), window(1))
    attention(*(x.detach() for x in inputs), window(1))
    torch.autograd.grad(attention(*inputs, window(1)).sum(), inputs)
    prepared = Prepared("sdpa", "masked", lambda: 49, build=lambda: torch.zeros(7, 7).add)
    with torch.inference_mode():
        mask = prepared.direct.__self__
    assert not mask.is_inference()  # autograd could not save it


def test_rows_of_a_prepared_mask_begin_at_multiples_of_32_bytes(monkeypatch):
    masks, plain = [], sdpa._sdpa
    monkeypatch.setattr(sdpa, "_sdpa", lambda *x, **named: (masks.append(x[3]), plain(*x, **named))[1])
    for m in (8, 13, 15):
        attention(*qkv(5, m, dtype=torch.float32, grad=False), window(1), backend="sdpa")
    assert [x.shape[-1] for x in masks] == [8, 13, 15]
    assert [x.stride(-2) for x in masks] == [16, 16, 16]  # also where a number has two bytes


def test_autocast_is_not_passed_by():
    inputs = qkv(dtype=torch.float32)
    attention(*inputs, window(1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention(*inputs, window(1)).dtype == torch.bfloat16


@pytest.mark.parametrize("pattern", [None, causal(), window(1)], ids=repr)
def test_transforms_leave_nothing_behind(pattern):
    inputs = qkv(h_kv=4, grad=False)
    several = [torch.stack([x, 2 * x]) for x in inputs]
    for _ in range(2):
        got = vmap(lambda *x: attention(*x, pattern))(*several)
        assert torch.allclose(got[0], attention(*inputs, pattern), atol=1e-12)
        jacobian = jacrev(lambda q: attention(q, *inputs[1:], pattern).sum())(inputs[0])
        q = inputs[0].clone().requires_grad_()
        assert torch.allclose(
            jacobian, torch.autograd.grad(attention(q, *inputs[1:], pattern).sum(), q)[0], atol=1e-12
        )


@pytest.mark.parametrize("pattern", [None, causal(), window(1)], ids=repr)
@pytest.mark.parametrize("h_kv, wide", [(4, 3), (2, 5), (4, 5)])
def test_gradients_of_a_call_made_before_have_gradients(pattern, h_kv, wide):
    q, k, v = qkv(h_kv=h_kv)
    v = torch.cat([v, v], -1)[..., :wide].detach().requires_grad_()
    inputs = [x[:1, :, :3].detach().requires_grad_() for x in (q, k, v)]
    attention(*inputs, pattern)
    assert recalled(inputs, pattern)
    assert gradgradcheck(lambda *x: attention(*x, pattern), inputs, fast_mode=True)


def test_what_pytorch_takes_by_the_formula_is_differentiated_twice_by_pytorch():
    """Its fused op reads no tensor whose rows are not of adjacent numbers."""
    q, k, _ = qkv(h_kv=4)
    inputs = q, k, k
    attention(*inputs, window(1))
    q = inputs[0].detach().mT.contiguous().mT.requires_grad_()
    assert recalled([q, *inputs[1:]], window(1))
    wanted = attention(q, *inputs[1:], window(1), backend="reference")
    found = []
    for o in (attention(q, *inputs[1:], window(1)), wanted):
        (once,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
        found.append(torch.autograd.grad(once.square().sum(), q)[0])
    assert torch.allclose(*found, atol=1e-10)


def test_the_gradient_of_one_input_alone_has_gradients():
    q, k, v = qkv()
    for _ in range(2):
        (once,) = torch.autograd.grad(attention(q, k, v, window(1)).square().sum(), k, create_graph=True)
        (plain,) = torch.autograd.grad(
            attention(q, k, v, window(1), backend="reference").square().sum(), k, create_graph=True
        )
        for a, b in zip(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (once, plain))):
            assert torch.allclose(a, b, atol=1e-10)


def test_the_formula_differentiates_again_only_what_is_requested(monkeypatch):
    ran, real = [], reference_backend.gradients
    monkeypatch.setattr(reference_backend, "gradients", lambda *x, **more: ran.append(1) or real(*x, **more))
    inputs = qkv()
    for _ in range(2):
        torch.autograd.grad(attention(*inputs, window(1)).sum(), inputs)
    assert not ran
    torch.autograd.grad(attention(*inputs, window(1)).sum(), inputs, create_graph=True)
    assert ran


def test_nothing_is_kept_past_its_backward():
    inputs = qkv(h_kv=4, dtype=torch.float32)
    inputs[2] = inputs[1]
    for _ in range(2):
        q = inputs[0] * 2
        gone = weakref.ref(q)
        o = attention(q, *inputs[1:], window(1))
        del q
        assert gone() is not None
        o.sum().backward()
        assert gone() is None and o.grad_fn is not None


def test_a_dispatch_mode_sees_every_operation():
    class Seen(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    inputs = qkv(n=131, m=131, grad=False, dtype=torch.float32)
    attention(*inputs, window(1))
    assert recalled(inputs, window(1))
    with Seen() as seen:
        assert _cache_key(*inputs, window(1), (None, None), "auto") is None
        attention(*inputs, window(1))
    assert any("flash" in name or "attention" in name or "softmax" in name for name in seen.names)

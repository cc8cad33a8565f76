"""Calls of shapes seen before: the same numbers, nothing skipped that could be wrong, nothing stale."""

import pytest
import torch
from torch.func import jacrev, vmap

from regard.engine import quick
from regard.engine.attention import attention
from regard.errors import ShapeError, SpecError
from regard.pattern import causal, documents, every, full, sinks, where, window

PATTERNS = [None, full(), causal(), window(2), causal() & (window(1) | every(3)), sinks(0)]


@pytest.fixture(autouse=True)
def nothing_known():
    quick._known.clear()
    yield
    quick._known.clear()


def qkv(n=7, m=7, dtype=torch.float64, grad=True, h_kv=2):
    g = torch.Generator().manual_seed(0)
    shapes = (2, 4, n, 5), (2, h_kv, m, 5), (2, h_kv, m, 3)
    return [torch.randn(s, generator=g, dtype=torch.float64).to(dtype).requires_grad_(grad) for s in shapes]


@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
@pytest.mark.parametrize("scale", [None, 0.3, 2, 0.0, -1.0])
def test_the_second_call_gives_what_the_formula_gives(pattern, scale):
    for n, m in ((7, 7), (3, 7), (1, 7)):
        inputs = qkv(n, m)
        expected = attention(*inputs, pattern, scale=scale, backend="plain")
        wanted = torch.autograd.grad(expected.square().sum(), inputs)
        for _ in range(2):
            o = attention(*inputs, pattern, scale=scale)
            assert torch.allclose(o, expected, atol=1e-12)
            for a, b in zip(torch.autograd.grad(o.square().sum(), inputs), wanted):
                assert torch.allclose(a, b, atol=1e-12)


def test_it_is_recalled_and_few_are_kept(monkeypatch):
    monkeypatch.setattr(quick, "MOST", 2)
    for n in (3, 4, 5):
        attention(*qkv(n, n), window(1))
    assert [key[1][2] for key in quick._known] == [4, 5]
    inputs = qkv(5, 5)
    assert quick.recall(*inputs, window(1), None) is not None
    assert quick.recall(*inputs, window(2), None) is None


def test_another_dtype_or_gradient_is_another_call():
    attention(*qkv(), window(1))
    assert quick.recall(*qkv(dtype=torch.float32), window(1), None) is None
    assert quick.recall(*qkv(grad=False), window(1), None) is None


def test_what_data_decide_is_never_recalled():
    ids = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    for pattern in (documents(ids), where(torch.ge), torch.ones(7, 7, dtype=torch.bool)):
        attention(*qkv(), pattern)
        assert not quick._known


def test_what_is_wrong_is_refused_however_often_it_is_asked():
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

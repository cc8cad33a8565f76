"""Attention under torch.func, where sparse backends run: n = 1024, which no mask is chosen for."""

import pytest
import torch
from torch.testing import assert_close

import regard as rg

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


def test_a_second_derivative_says_what_to_use():
    q = randn(1, 2, N, 8, seed=0)

    def loss(q):
        return rg.attention(q, q, q, PATTERNS["window"]).square().sum()

    with pytest.raises(rg.BackendError, match=r"not supported under torch.func; use backend='reference'"):
        torch.func.grad(lambda q: torch.func.grad(loss)(q).square().sum())(q)


def test_forward_mode_names_the_backend_that_has_it():
    q = randn(1, 2, N, 8, seed=0)

    def f(x, backend="auto"):
        return rg.attention(x, x, x, PATTERNS["window"], softcap=3.0, backend=backend)

    with pytest.raises(rg.BackendError, match=r"torch\.func\.jvp\).*use backend='reference'"):
        torch.func.jvp(f, (q,), (q,))
    few = q[:, :, :50]
    _, moved = torch.func.jvp(lambda x: f(x, "reference"), (few,), (torch.ones_like(few),))
    step = 1e-6
    assert_close(moved, (f(few + step) - f(few - step)) / (2 * step), rtol=1e-6, atol=1e-8)

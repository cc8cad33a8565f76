"""Queries or values without a component, and no keys at all."""

from itertools import product

import pytest
import torch
from torch.testing import assert_close

import regard as rg
from regard.position import ByDistance

PATTERNS = [rg.full(), rg.causal(), rg.blocks(16) | rg.window(3), rg.per_head([rg.causal(), rg.every(2)])]
TERMS = [
    {},
    {"at": 2},
    {"at": torch.tensor([2, 5])},
    {"softcap": 2.0, "sink_logits": torch.tensor([0.5, -1.0])},
    {"lengths": torch.tensor([[1, 7], [0, 3]]), "return_lse": True},
    {"bias": ByDistance(table=torch.randn(2, 5, generator=torch.Generator().manual_seed(1)))},
    {"scale": -0.5},
]


def by_formula(v, pattern, n, at=None, lengths=None, bias=None, sink_logits=None, **_):
    """The output where every product q·k is 0: weights that the mask, the bias and the sink alone decide."""
    m = v.shape[2]
    rows = at.tolist() if isinstance(at, torch.Tensor) else [m - n if at is None else at] * 2
    i, j = torch.tensor(rows)[:, None, None] + torch.arange(n)[:, None], torch.arange(m)
    by_head = pattern.patterns if isinstance(pattern, rg.per_head) else [pattern] * 2
    allowed = torch.stack([torch.as_tensor(p.allows(i, j)).expand(2, n, m) for p in by_head], 1)
    scores = torch.zeros(2, 2, n, m, dtype=v.dtype)
    if bias is not None:
        scores = scores + bias.table[:, (j - i).clamp(-2, 2) + 2].transpose(0, 1)
    if lengths is not None:
        allowed = allowed & ((j >= lengths[:, :1]) & (j < lengths[:, 1:]))[:, None, None]
    mass = torch.where(allowed, scores.exp(), 0.0)
    total = mass.sum(-1, keepdim=True)
    if sink_logits is not None:
        total = total + sink_logits.exp()[:, None, None]
    return mass / torch.where(total > 0, total, 1.0) @ v, total[..., 0].log()


@pytest.mark.parametrize("backend", ["auto", "reference", "sdpa", "tiles"])
@pytest.mark.parametrize(("n", "grad"), [(1, False), (1, True), (40, False), (40, True)])
def test_queries_without_a_component_weigh_keys_equally(n, grad, backend):
    ran = 0
    for pattern, terms, d_v in product(PATTERNS, TERMS, (3, 0)):
        q, k = (torch.zeros(2, 2, length, 0, requires_grad=grad) for length in (n, 40))
        v = torch.randn(2, 2, 40, d_v, generator=torch.Generator().manual_seed(0)).requires_grad_(grad)
        try:
            o = rg.attention(q, k, v, pattern, backend=backend, **terms)
        except rg.BackendError:
            continue
        expected, lse = by_formula(v, pattern, n, **terms)
        if terms.get("return_lse"):
            o, found = o
            assert_close(found, lse)
        assert_close(o, expected)
        if grad and not terms.get("return_lse"):
            inputs = (q, k, v)
            found = torch.autograd.grad(o.square().sum(), inputs, materialize_grads=True)
            assert_close(found, torch.autograd.grad(expected.square().sum(), inputs, materialize_grads=True))
        ran += 1
    assert ran >= (16 if backend == "sdpa" else 28)


def test_values_without_a_component_have_a_log_sum_exp():
    q, k, v = (torch.randn(1, 2, 100, d, generator=torch.Generator().manual_seed(d)) for d in (1, 1, 3))
    pattern = rg.blocks(16) | rg.window(16)
    o, lse = rg.attention(q, k, v[..., :0], pattern, return_lse=True)
    assert o.shape == (1, 2, 100, 0)
    assert_close(lse, rg.attention(q, k, v, pattern, return_lse=True)[1])
    for x in (q, q.requires_grad_()):
        o = rg.attention(x, k, v[..., :0], pattern, backend="tiles")
        assert o.shape == (1, 2, 100, 0)
    assert torch.equal(torch.autograd.grad(o.sum(), q)[0], torch.zeros_like(q))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_no_keys_have_no_bias(dtype):
    q, k = torch.randn(1, 3, 0, 4, dtype=dtype), torch.randn(1, 3, 0, 4, dtype=dtype)
    bias = ByDistance(slopes=torch.ones(3))
    assert rg.attention(q, k, k, rg.window(3), bias=bias).shape == (1, 3, 0, 4)
    o = rg.attention(torch.randn(1, 3, 2, 4, dtype=dtype), k, k, rg.window(3), bias=bias, at=0)
    assert torch.equal(o, torch.zeros(1, 3, 2, 4, dtype=dtype))

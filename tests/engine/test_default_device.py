"""Attention of CPU tensors where new tensors are made elsewhere: `torch.set_default_device`, `with torch.device(…)`.

The other device is meta, on which numbers cannot be read: what is made there by mistake raises an error.
"""

from functools import reduce
from operator import or_

import pytest
import torch
from torch.testing import assert_close

import regard as rg

N = 136
T = torch.arange(N)
MANY = tuple(
    rg.every(k, 1) for k in (7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53)
)  # counted pair by pair
PATTERNS = {
    "window": rg.causal() & rg.window(5),
    "comb": rg.causal() & (rg.window(5) | rg.every(8)),
    "documents": rg.causal() & rg.documents(T // 37),
    "tree": rg.tree(T - 1),
    "selected": rg.causal() & rg.selected(torch.arange(17)[:, None], 8),
    "grid": rg.neighborhood((17, 8), 3),
    "condition": rg.where(lambda i, j: True),
    "many words": reduce(or_, MANY),
}


def results(pattern, **options):
    q, k, v = torch.randn(
        3, 2, 2, N, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0), device="cpu"
    )
    q.requires_grad_()
    o = rg.attention(q, k, v, pattern, **options)
    (dq,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
    (ddq,) = torch.autograd.grad(dq.square().sum(), q)
    return o, dq, ddq, rg.attention(q[:, :, -1:], k, v, pattern, **options)


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("biased", [False, True])
def test_attention_on_the_cpu_does_not_depend_on_the_default_device(name, biased):
    slopes = torch.tensor([0.5, 0.25], dtype=torch.float64, requires_grad=True)
    options = {"bias": rg.ByDistance(slopes=slopes)} if biased else {}
    with torch.device("meta"):  # first: nothing is cached yet
        found = results(PATTERNS[name], **options)
    assert_close(found, results(PATTERNS[name], **options))


@pytest.mark.parametrize("name", PATTERNS)
def test_counts_and_pictures_do_not_depend_on_the_default_device(name):
    pattern = PATTERNS[name]
    right = pattern.count(N), pattern.draw(N), pattern.allows(9, 8), rg.explain(pattern, n=N).backend
    with torch.device("meta"):
        assert (
            pattern.count(N), pattern.draw(N), pattern.allows(9, 8), rg.explain(pattern, n=N).backend
        ) == right  # fmt: skip


def test_rotary_positions_do_not_depend_on_the_default_device():
    layer = rg.Attention(16, heads=2, pattern=PATTERNS["comb"], position=rg.rope()).build()
    x = torch.randn(1, 67, 16, generator=torch.Generator().manual_seed(0))
    with torch.device("meta"):
        found = layer(x)
    assert_close(found, layer(x))

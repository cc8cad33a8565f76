"""Trees, listed blocks and grids on the CPU: only the keys that a tile of queries needs are gathered."""

import pytest
import torch
from torch.testing import assert_close

import regard as rg
from long_cases import in_long

N = 960
LIST = torch.randint(-1, 15, (15, 3), generator=torch.Generator().manual_seed(1))
PARENTS = torch.tensor([-1] + [i - 1 if i % 120 else 40 for i in range(1, N)])
PATTERNS = {
    "grid": rg.neighborhood((30, 32), 5),
    "shifted grid": rg.neighborhood(
        (31, 31), 5, step=2, border="shifted"
    ),  # 961 positions: a tile is filled up
    "video": rg.neighborhood((10, 8, 12), 3, causal=(True, False, False)),
    "tree": rg.tree(PARENTS),
    "list": rg.causal() & rg.selected(LIST, 64),  # −1 and the future leave some queries without a key
    "tree and band": rg.tree(PARENTS) & rg.window(300),
}


def qkv(n, heads=2, kv_heads=1, grad=True):
    generator = torch.Generator().manual_seed(0)
    shapes = (2, heads, n, 8), (2, kv_heads, n, 8), (2, kv_heads, n, 6)
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_(grad) for s in shapes]


@pytest.mark.parametrize("name", ["shifted grid", "video", "list", "tree and band", *in_long("grid", "tree")])
def test_results_and_gradients_are_those_of_the_mask(name):
    pattern = PATTERNS[name]
    n = 961 if name == "shifted grid" else N
    q, k, v = qkv(n)
    found = rg.explain(q, k, v, pattern)
    assert (found.backend, found.variant) == ("tiles", "gathered keys")
    assert found.needed == pattern.count(n) <= found.computed < n * n / 2
    o, right = rg.attention(q, k, v, pattern), rg.attention(q, k, v, pattern.allowed(n), backend="reference")
    assert_close(o, right)
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    grads, wanted = (torch.autograd.grad((x * do).sum(), (q, k, v), create_graph=True) for x in (o, right))
    assert_close(grads, wanted)
    with torch.no_grad():
        assert_close(rg.attention(q, k, v, pattern), right)
    again = torch.autograd.grad((rg.attention(q, k, v, pattern) * do).sum(), (q, k, v))
    assert all(
        torch.equal(a, b)
        for a, b in zip(again, torch.autograd.grad((rg.attention(q, k, v, pattern) * do).sum(), (q, k, v)))
    )
    assert_close(again, wanted)


def test_tiles_have_about_the_keys_that_they_need():
    """Near the border of a grid they are fewer; one block that needs all keys does not give them to the others."""
    found = rg.explain(rg.neighborhood((16, 16, 16), 5), 4096)
    assert found.computed == 64 * (8 * 512 + 24 * 384 + 24 * 320 + 8 * 256)
    assert "64 × 64 queries, each time over the 256 to 512 keys gathered for them" in found.reason
    lists = torch.full((15, 15), -1)
    lists[0], lists[1:, 0] = torch.arange(15), torch.arange(14)
    q, k, v = qkv(N, heads=2, kv_heads=2)
    pattern = rg.selected(lists, 64)
    found = rg.explain(q, k, v, pattern)
    assert (found.variant, found.computed) == ("gathered keys", 64 * (960 + 14 * 128))
    o, right = (rg.attention(q, k, v, x) for x in (pattern, pattern.allowed(N)))
    assert_close(o, right)
    grads = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (o, right))
    assert_close(*grads)


@pytest.mark.parametrize("heads", [1, 2])
def test_tiles_with_other_numbers_of_keys_may_have_their_queries_in_order(heads):
    """Later blocks list more: for one head, the queries of all tiles by their number of keys are 0, 1, 2, …"""
    lists = torch.tensor([[max(block - 1, 0), block, 0] for block in range(15)])
    pattern = rg.causal() & rg.selected(lists, 64)
    q, k, v = qkv(N, heads=heads)
    q, k, v = (x[:1].detach().requires_grad_() for x in (q, k, v))
    assert rg.explain(q, k, v, pattern).variant == "gathered keys"
    o, right = (rg.attention(q, k, v, x) for x in (pattern, pattern.allowed(N)))
    assert_close(o, right)
    grads = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (o, right))
    assert_close(*grads)


def test_another_list_is_another_result():
    """Patterns with data are not equal because their shapes are."""
    q, k, v = qkv(N, grad=False)
    for seed in range(3):
        listed = rg.selected(torch.randint(0, 15, (15, 2), generator=torch.Generator().manual_seed(seed)), 64)
        assert_close(rg.attention(q, k, v, listed), rg.attention(q, k, v, listed.allowed(N)))


def test_a_function_is_evaluated_at_every_call():
    q, k, v = qkv(N, grad=False)
    limit = torch.tensor(30)
    near = rg.where(lambda i, j: (i - j).abs() <= limit)
    first = rg.attention(q, k, v, near)
    assert_close(first, rg.attention(q, k, v, rg.window(30)))
    limit += 40
    assert_close(rg.attention(q, k, v, near), rg.attention(q, k, v, rg.window(70)))


def test_dense_data_and_other_options_stay_masked():
    q, k, v = qkv(N)
    dense = rg.selected(torch.arange(15).repeat(15, 1), 64)
    assert rg.explain(q, k, v, dense).backend == "sdpa"
    assert rg.explain(q, k, v, PATTERNS["grid"], lengths=torch.tensor([900, 10])).backend == "sdpa"
    assert rg.explain(q, k, v, PATTERNS["list"], return_lse=True).backend == "reference"

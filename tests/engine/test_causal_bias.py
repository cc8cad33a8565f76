"""PyTorch's torch.nn.attention.bias.CausalBias as a pattern: it is a tensor whose numbers mean nothing."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.testing import assert_close

import regard as rg
from regard.errors import ShapeError, SpecError

SIZES = [(5, 7), (7, 7), (7, 11)]


def tensors(n, m):
    g = torch.Generator().manual_seed(n * m)
    shapes = (2, 4, n, 5), (2, 2, m, 5), (2, 2, m, 3)
    return [torch.randn(s, dtype=torch.float64, generator=g, requires_grad=True) for s in shapes]


@pytest.mark.parametrize("n, m", SIZES)
@pytest.mark.parametrize("kind", [causal_upper_left, causal_lower_right])
def test_it_is_the_mask_that_pytorch_makes_of_it(kind, n, m):
    q, k, v = tensors(n, m)
    table = torch.ones(n, m, dtype=torch.bool).tril(0 if kind is causal_upper_left else m - n)
    o = rg.attention(q, k, v, kind(n, m))
    expected = F.scaled_dot_product_attention(q, k, v, table, enable_gqa=True)
    assert_close(o, expected)
    grads = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (o, expected))
    assert_close(*grads)
    assert rg.explain(q, k, v, kind(n, m)).needed == table.sum()


@pytest.mark.compiled
def test_it_is_read_where_a_call_is_compiled():
    q, k, v = tensors(5, 7)
    mask = causal_lower_right(5, 7)
    compiled = torch.compile(lambda q, k, v: rg.attention(q, k, v, mask), fullgraph=True, backend="eager")
    assert_close(compiled(q, k, v), rg.attention(q, k, v, rg.causal()))


@pytest.mark.parametrize("n, m", [(7, 7), (5, 11), (7, 5)])
def test_other_sizes_are_an_error(n, m):
    with pytest.raises(ShapeError) as e:
        rg.attention(*tensors(5, 7), causal_upper_left(n, m))
    assert str(e.value) == (
        f"a CausalBias for {n} queries and {m} keys, and there are 5 and 7; make it for these, or use rg.causal()"
    )


@pytest.mark.parametrize("at", [0, 1])
def test_a_query_offset_beside_it_is_an_error(at):
    with pytest.raises(SpecError) as e:
        rg.attention(*tensors(5, 7), causal_upper_left(5, 7), at=at)
    assert str(e.value) == (
        f"at={at} beside a CausalBias, which states the query offset; use rg.causal() with at="
    )


def test_it_is_not_added_to_the_scores():
    with pytest.raises(SpecError) as e:
        rg.attention(*tensors(5, 7), bias=causal_upper_left(5, 7))
    assert str(e.value) == "a CausalBias has no values to add; give it as pattern=, or use rg.causal()"

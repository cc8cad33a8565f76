"""Dropout: what is kept, how often, and what it is multiplied with."""

import pytest
import torch

import regard as rg
from regard.nn.dropout import dropout


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_a_number_is_dropped_or_divided_by_what_is_kept(p, dtype):
    torch.manual_seed(0)
    x = torch.ones(7, 11, 13, dtype=dtype)
    y = dropout(x, p, True)
    assert y.dtype == dtype and y.shape == x.shape
    values = y.unique()
    assert len(values) == 2 and values[0] == 0
    torch.testing.assert_close(values[1].double().item(), 1 / (1 - p), rtol=1e-3, atol=0)


def test_as_many_are_dropped_as_requested():
    torch.manual_seed(1)
    n = 1 << 20
    share = (dropout(torch.ones(n), 0.1, True) == 0).double().mean().item()
    assert abs(share - 0.1) < 5 * (0.1 * 0.9 / n) ** 0.5  # five standard deviations


def test_neighbors_are_dropped_independently():
    torch.manual_seed(2)
    gone = (dropout(torch.ones(1 << 20), 0.3, True) == 0).double()
    for lag in (1, 2, 3, 4, 8):  # four draws come from one word
        together = (gone[:-lag] * gone[lag:]).mean().item()
        assert abs(together - 0.09) < 5 * (0.09 * 0.91 / (1 << 20)) ** 0.5


def test_the_seed_decides_and_the_next_draw_differs():
    x = torch.ones(5, 101)
    torch.manual_seed(3)
    first, second = dropout(x, 0.5, True), dropout(x, 0.5, True)
    torch.manual_seed(3)
    assert torch.equal(first, dropout(x, 0.5, True)) and not torch.equal(first, second)


def test_the_gradient_is_dropped_alike():
    torch.manual_seed(4)
    x = torch.ones(3, 17, requires_grad=True)
    y = dropout(x, 0.4, True)
    (slope,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(slope, y.detach())


@pytest.mark.parametrize("p, training", [(0.0, True), (0.7, False)])
def test_where_nothing_is_dropped_the_tensor_itself_comes_back(p, training):
    x = torch.ones(3)
    assert dropout(x, p, training) is x


def test_everything_and_nothing():
    assert not dropout(torch.ones(9), 1.0, True).any()
    assert dropout(torch.ones(0, 3), 0.5, True).shape == (0, 3)


def test_a_model_in_training_is_the_same_for_the_same_seed():
    block = rg.Block(rg.Attention(8, heads=2), rg.FeedForward(16), dropout=0.5)
    torch.manual_seed(5)
    model, x = rg.Encoder(block, 2).build().train(), torch.randn(2, 7, 8)
    torch.manual_seed(6)
    one = model(x)
    assert not torch.equal(one, model(x))
    torch.manual_seed(6)
    assert torch.equal(one, model(x))

"""`torch.export` of a module that calls `rg.attention`."""

import pytest
import torch

import regard as rg

pytestmark = pytest.mark.compiled


class Kept(torch.nn.Module):
    """The rows that are not all zero: how many, data decide."""

    def __init__(self, arguments):
        super().__init__()
        self.arguments, self.weight = arguments, torch.nn.Parameter(torch.eye(8))

    def forward(self, x):
        x = x[x.sum((1, 2)) != 0] @ self.weight
        return rg.attention(x[:, None], x[:, None], x[:, None], **self.arguments(x))


def mask(x):
    return {"pattern": torch.ones((x.shape[0], 1, 1, 1), dtype=torch.bool, device=x.device)}


def bias(x):
    return {"bias": torch.arange(16.0).view(4, 4).expand(x.shape[0], 1, 4, 4)}


def causal(x):
    return {"pattern": rg.causal()}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("arguments", [mask, bias, causal])
def test_a_batch_that_data_decide_and_a_mask_of_it_are_exported(arguments, training):
    x = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(0))
    x[1] = 0.0
    module = Kept(arguments).requires_grad_(training)
    exported = torch.export.export(module, (x,)).module()
    torch.testing.assert_close(exported(x), module(x))
    x[0] = 0.0  # fewer rows
    torch.testing.assert_close(exported(x), module(x))
    x[2] = 0.0  # none
    assert exported(x).shape == (0, 1, 4, 8)

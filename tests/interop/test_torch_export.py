"""`torch.export` of a module that calls `rg.attention`."""

import pytest
import torch

import regard as rg

pytestmark = pytest.mark.compiled


class Kept(torch.nn.Module):
    """The rows that are not all zero: how many, data decide."""

    def forward(self, x):
        x = x[x.sum((1, 2)) != 0]
        mask = torch.ones((x.shape[0], 1, 1, 1), dtype=torch.bool, device=x.device)
        return rg.attention(x[:, None], x[:, None], x[:, None], mask)


def test_a_batch_that_data_decide_and_a_mask_of_it_are_exported():
    x = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(0))
    x[1] = 0.0
    exported = torch.export.export(Kept(), (x,)).module()
    torch.testing.assert_close(exported(x), Kept()(x))
    x[0] = 0.0  # fewer rows
    torch.testing.assert_close(exported(x), Kept()(x))

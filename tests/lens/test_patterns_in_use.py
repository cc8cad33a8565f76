"""rg.look at a model whose attention has a pattern of rg.use: the maps are of what runs."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard as rg


class Calls(nn.Module):
    """Attention by F.scaled_dot_product_attention."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(12, 36)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def multihead() -> nn.Module:
    return nn.TransformerEncoderLayer(12, 3, 7, dropout=0.0, batch_first=True)


@pytest.mark.parametrize("build", [Calls, multihead])
def test_a_map_has_the_pairs_of_the_pattern_in_use(build):
    torch.manual_seed(0)
    model, x, outs = build().eval(), torch.randn(1, 11, 12), []
    model.register_forward_hook(lambda module, inputs, out: outs.append(out))
    pattern = rg.causal() & rg.window(2)
    before = rg.look(model, x).map(0, 0)
    with rg.use(model, pattern):
        view = rg.look(model, x)
        assert torch.equal(view.map(0, 0) > 0, pattern.allowed(11))
        assert torch.equal(outs[-1], model(x))
        assert len(view.heads) == 3
    assert torch.equal(rg.look(model, x).map(0, 0), before)


def test_a_default_device_hides_no_call():
    model, x = Calls().eval(), torch.randn(1, 11, 12)
    expected = rg.look(model, x).map(0, 2)
    with torch.device("cpu"):  # a function mode, as rg.use is
        assert torch.equal(rg.look(model, x).map(0, 2), expected)

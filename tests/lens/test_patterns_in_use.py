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


@pytest.mark.parametrize("build", [Calls, multihead])
def test_heads_with_patterns_of_their_own_are_one_layer_in_their_order(build):
    torch.manual_seed(0)
    model, x = build().eval(), torch.randn(2, 11, 12)
    patterns = [rg.causal() & rg.window(2), rg.causal(), rg.causal() & rg.window(2)]
    with rg.use(model, patterns):
        view = rg.look(model, x)
        assert len(view.calls) == 1 and not view.missed
        for head, pattern in enumerate(patterns):
            assert torch.equal(view.map(0, head, batch=1) > 0, pattern.allowed(11))
        each = torch.stack([view.map(0, head) for head in range(3)])
        assert torch.equal(view.call(0).weights(), each)
        assert torch.equal(view.call(0).weights([2, 0]), each[[2, 0]])
    for head, pattern in enumerate(patterns):
        with rg.use(model, pattern):
            torch.testing.assert_close(rg.look(model, x).map(0, head), each[head])


@pytest.mark.parametrize("kv_heads", [3, 1])
def test_heads_of_a_hugging_face_model_with_patterns_of_their_own_are_one_layer(kv_heads):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=12, intermediate_size=16, num_attention_heads=3, num_key_value_heads=kv_heads,
        num_hidden_layers=2, vocab_size=31,
    )  # fmt: skip
    model, ids = transformers.LlamaForCausalLM(config).eval(), torch.randint(0, 31, (1, 11))
    patterns = [rg.window(2), rg.full(), rg.window(2)]
    with rg.use(model, patterns):
        view = rg.look(model, ids)
    assert len(view.calls) == 2 and [call.heads for call in view.calls] == [3, 3]
    for head, pattern in enumerate(patterns):
        assert torch.equal(view.map(1, head) > 0, (rg.causal() & pattern).allowed(11))

"""Modules that are right are not accused: layers of PyTorch, decoders with a context, patterns of positions."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard as rg
from regard.laws import Budget, law, try_law
from regard.laws.adapters import adapt

FEW = Budget(cases=6)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))


class PatternInCode(Attention):
    def attend(self, q, k, v):
        return rg.attention(q, k, v, rg.causal() & rg.window(3))


class PatternHeld(Attention):
    def __init__(self):
        super().__init__()
        self.pattern = rg.window(1) | rg.every(3)

    def attend(self, q, k, v):
        return rg.attention(q, k, v, self.pattern)


class EitherOrder(Attention):
    """Self-attention.

    batch_first: True if the input is (batch, seq, feature). Default: False (seq, batch, feature).
    """

    def __init__(self, batch_first: bool):
        super().__init__()
        self.batch_first = batch_first

    def forward(self, x):
        out = super().forward(x if self.batch_first else x.transpose(0, 1))
        return out if self.batch_first else out.transpose(0, 1)

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


def encoder_layer(**options) -> nn.Module:
    return nn.TransformerEncoderLayer(12, 3, 16, dropout=0.0, **options)


def decoder_layer(**options) -> nn.Module:
    return nn.TransformerDecoderLayer(12, 3, 16, dropout=0.0, **options)


PLAIN = rg.Attention(12, heads=3)
CAUSAL = rg.Attention(12, heads=3, pattern=rg.causal())
CROSS = rg.Block(CAUSAL, rg.FeedForward(16), cross=PLAIN)
MODULES = {
    "encoder layer": (lambda: encoder_layer(batch_first=True), "L21 L29 L31 L34 L48"),
    "encoder layer, sequence first": (encoder_layer, "L21 L29 L31 L48"),
    "decoder layer": (lambda: decoder_layer(batch_first=True), "L29 L31 L34 L48"),
    "encoder-decoder": (lambda: nn.Transformer(12, 2, 1, 1, 16, 0.0, batch_first=True), "L34"),
    "a pattern in its code": (PatternInCode, "L19 L48"),
    "a pattern that it holds": (PatternHeld, "L19 L48"),
    "batch first": (lambda: EitherOrder(True), "L19 L48"),
    "sequence first": (lambda: EitherOrder(False), "L19 L48"),
    "a decoder of regard": (lambda: rg.Decoder(CROSS, 1).build(), "L34 L47"),
    "a pattern of positions": (lambda: rg.Attention(12, heads=3, pattern=rg.every(3)).build(), "L47"),
}


@pytest.mark.parametrize("name", MODULES)
def test_no_law_is_broken_by_a_right_module(name):
    build, laws = MODULES[name]
    torch.manual_seed(0)
    target = adapt(build())
    found = {number: try_law(law(number), target, FEW).status for number in laws.split()}
    assert set(found.values()) <= {"holds", "not applicable"} and "holds" in found.values(), found


def test_a_layer_with_a_forward_of_its_own_is_read_by_its_signature():
    class Mine(nn.TransformerEncoderLayer):
        def forward(self, x):
            return super().forward(x)

    assert adapt(Mine(12, 3, 16, dropout=0.0, batch_first=True)).name == "Mine"

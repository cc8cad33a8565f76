"""rg.cost of a model that torch.compile wraps, as a whole or in part: that of the model, and nothing compiles."""

import pytest
import torch
from torch import nn

import regard as rg

pytestmark = pytest.mark.compiled
IDS = torch.arange(2 * 11).view(2, 11)


def model() -> nn.Module:
    attention = rg.Attention(16, heads=2, pattern=rg.causal() & rg.window(3), position=rg.rope())
    block = rg.Block(attention, rg.FeedForward(24))
    return rg.Encoder(block, 2, embedding=rg.Embedding(31, 16), head=rg.LanguageHead()).build()


def never(graph, inputs):
    raise AssertionError("compiled while its cost was computed")


def test_a_compiled_model_costs_what_the_model_costs():
    plain, expected = model(), str(rg.cost(model(), IDS))
    assert str(rg.cost(torch.compile(plain, backend=never), IDS)) == expected
    assert str(rg.cost(torch.compile(plain, backend=never), n=11)) == str(rg.cost(plain, n=11))
    plain.compile(backend=never)
    assert str(rg.cost(plain, IDS)) == expected


def test_a_compiled_part_is_counted_as_it_is_written():
    plain = model()
    expected = rg.cost(plain, IDS, train=True)
    plain.blocks[1] = torch.compile(plain.blocks[1], backend=never)
    found = rg.cost(plain, IDS, train=True)
    assert (found.flops, found.parameters) == (expected.flops, expected.parameters)
    assert str(found.memory) == str(expected.memory)

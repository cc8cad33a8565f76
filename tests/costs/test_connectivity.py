"""Receptive fields: the exact set of inputs against the bound, and layers until all positions are connected."""

import pytest
import torch

import regard as rg
from regard.costs import dependencies, layers_to_connect, receptive_field, receptive_set
from regard.errors import SpecError


@pytest.mark.ledger("S3.Q2a.1", "S3.Q2a.3")
def test_the_exact_set_is_within_the_bound_and_inside_the_sequence():
    shifts = [[1, 4], [2, 7], [3, 5]]
    bound = receptive_field(2, 3).bound
    for at in range(20):
        seen = receptive_set(at, shifts, length=20)
        assert at in seen and len(seen) <= min(bound, at + 1) and seen <= set(range(at + 1))
    assert receptive_set(0, shifts) == {0}


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_the_dependencies_of_a_pattern_are_its_boolean_power(layers):
    pattern = rg.causal() & (rg.window(1) | rg.every(4))
    once = pattern.allowed(13).long()
    expected = torch.linalg.matrix_power(once, layers) > 0
    assert torch.equal(dependencies(pattern, 13, layers), expected)


def test_a_pattern_of_separate_blocks_never_connects():
    with pytest.raises(SpecError, match=r"blocks\(4\) never connects all 16 positions, whatever the number"):
        layers_to_connect(rg.blocks(4), 16)
    with pytest.raises(SpecError, match="heads=0 is not a positive integer"):
        receptive_field(0, 3)


def test_a_layer_connects_what_one_of_its_heads_does():
    heads = rg.per_head([rg.causal() & rg.window(1), rg.causal() & (rg.window(0) | rg.every(4))])
    union = rg.causal() & (rg.window(1) | rg.every(4))
    for layers in (1, 2, 3):
        assert torch.equal(dependencies(heads, 13, layers), dependencies(union, 13, layers))
    assert layers_to_connect(heads, 13) == layers_to_connect(union, 13) > 1

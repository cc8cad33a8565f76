"""What training on a CPU does in a quicker way is what the modules say: rotations and networks."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import regard as rg
from regard import compat, spec
from regard.engine import backends
from regard.nn.feed_forward import FeedForward
from regard.nn.position import Rotary
from regard.position import rope, rotate

PAIRINGS = ("interleaved", "halves")


def sampled(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("start, step", [(0, 1), (5, 1), (-3, 2)])
def test_a_remembered_rotation_is_the_rotation(pairing, start, step):
    x = sampled(2, 3, 7, 10)
    module = Rotary(rope(pairing=pairing, base=100.0), 10)
    there = start + step * torch.arange(7)
    for _ in range(2):  # made, then remembered
        torch.testing.assert_close(module.along(x, start, step), rotate(x, there, 100.0, pairing))
    part = Rotary(rope(pairing=pairing, fraction=0.5), 8)
    torch.testing.assert_close(part.along(x[..., :8], start, step), part(x[..., :8], there))


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_a_remembered_rotation_has_gradients_of_every_order(pairing):
    module = Rotary(rope(pairing=pairing), 6)
    x = sampled(2, 5, 6).requires_grad_()
    turn = partial(module.along, start=3, step=1)
    assert torch.autograd.gradcheck(turn, x) and torch.autograd.gradgradcheck(turn, x)
    # as gradients may come: expanded, and every other number of a wider tensor
    wide = sampled(2, 5, 12)[..., ::2].requires_grad_()
    (found,) = torch.autograd.grad(turn(wide).sum(), wide)
    want = torch.autograd.grad(rotate(wide, 3 + torch.arange(5), pairing=pairing).sum(), wide)[0]
    torch.testing.assert_close(found, want)


def test_angles_met_in_inference_mode_serve_a_training():
    module = Rotary(rope(), 14)
    with torch.inference_mode():
        module.along(sampled(1, 3, 14), 11, 1)
    x = sampled(1, 3, 14).requires_grad_()
    module.along(x, 11, 1).square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())  # a rotation keeps the length


def test_sixteen_bits_and_grids_turn_as_before():
    x = sampled(2, 5, 8).to(torch.bfloat16)
    module = Rotary(rope(), 8)
    assert torch.equal(module.along(x, 2, 1), module(x, 2 + torch.arange(5)))
    cells = Rotary(rope(grid=(2, 3)), 8)
    y = sampled(1, 6, 8)
    assert torch.equal(cells.along(y, 0, 1), cells(y, torch.arange(6)))


@pytest.mark.parametrize("name", ["w_q", "w_k", "w_v"])
def test_hooks_of_a_projection_are_called(name):
    module = rg.Attention(8, heads=2).build()
    heard = []
    getattr(module, name).register_forward_hook(lambda *given: heard.append(given[-1].shape))
    module(torch.randn(2, 5, 8))
    assert heard == [(2, 5, 8)]


def test_hooks_of_a_network_are_called():
    network = FeedForward(spec.FeedForward(9), 4)
    heard = []
    network.w_in.register_forward_hook(lambda *given: heard.append(given[-1].detach().clone()))
    x = torch.randn(3, 4)
    network(x)
    torch.testing.assert_close(heard, [F.linear(x, network.w_in.weight, network.w_in.bias)])


NETWORKS = ("relu", "swiglu", "geglu")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", NETWORKS)
def test_a_network_and_its_gradients_are_those_of_the_formula(activation, bias):
    network = FeedForward(spec.FeedForward(11, activation=activation, bias=bias), 5).double()
    x = sampled(2, 3, 5).requires_grad_()

    def formula() -> torch.Tensor:
        def linear(layer, x):
            return x @ layer.weight.T + (layer.bias if bias else 0.0)

        if activation == "relu":
            hidden = linear(network.w_in, x).clamp(min=0)
        else:
            gate = linear(network.w_gate, x)
            half = torch.sigmoid(gate) if activation == "swiglu" else (1 + torch.erf(gate / 2**0.5)) / 2
            hidden = gate * half * linear(network.w_in, x)
        return linear(network.w_out, hidden)

    def with_gradients(out: torch.Tensor) -> list[torch.Tensor]:
        return [out, *torch.autograd.grad(out.square().sum(), [x, *network.parameters()])]

    for a, b in zip(with_gradients(network(x)), with_gradients(formula()), strict=True):
        torch.testing.assert_close(a, b)


def test_a_first_call_inside_a_checkpoint_is_recomputed_as_it_was():
    """What PyTorch can do is determined at the first call; the checkpoint must not count the tensors of that."""
    compat.can_read_flash_node.cache_clear()
    backends.PREPARED.clear()
    module = rg.Attention(8, heads=2).build()
    x = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    (found,) = torch.autograd.grad(checkpoint(module, x, use_reentrant=False).sum(), x)
    (expected,) = torch.autograd.grad(module(x).sum(), x)
    assert torch.equal(found, expected)

"""What training on a CPU does in a quicker way is what the modules say: rotations and networks."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard as rg
from regard import spec
from regard.nn import manual_backward as by_hand
from regard.nn.feed_forward import FeedForward
from regard.nn.position import Rotary
from regard.position import rope, rotate

PAIRINGS = ("interleaved", "halves")


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("start, step", [(0, 1), (5, 1), (-3, 2)])
def test_a_remembered_rotation_is_the_rotation(pairing, start, step):
    x = drawn(2, 3, 7, 10)
    module = Rotary(rope(pairing=pairing, base=100.0), 10)
    there = start + step * torch.arange(7)
    for _ in range(2):  # made, then remembered
        torch.testing.assert_close(module.along(x, start, step), rotate(x, there, 100.0, pairing))
    part = Rotary(rope(pairing=pairing, fraction=0.5), 8)
    torch.testing.assert_close(part.along(x[..., :8], start, step), part(x[..., :8], there))


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_a_remembered_rotation_has_gradients_of_every_order(pairing):
    module = Rotary(rope(pairing=pairing), 6)
    x = drawn(2, 5, 6).requires_grad_()
    turn = partial(module.along, start=3, step=1)
    assert torch.autograd.gradcheck(turn, x) and torch.autograd.gradgradcheck(turn, x)
    # as gradients may come: expanded, and every other number of a wider tensor
    wide = drawn(2, 5, 12)[..., ::2].requires_grad_()
    (found,) = torch.autograd.grad(turn(wide).sum(), wide)
    want = torch.autograd.grad(rotate(wide, 3 + torch.arange(5), pairing=pairing).sum(), wide)[0]
    torch.testing.assert_close(found, want)


def test_angles_met_in_inference_mode_serve_a_training():
    module = Rotary(rope(), 14)
    with torch.inference_mode():
        module.along(drawn(1, 3, 14), 11, 1)
    x = drawn(1, 3, 14).requires_grad_()
    module.along(x, 11, 1).square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())  # a rotation keeps the length


def test_sixteen_bits_and_grids_turn_as_before():
    x = drawn(2, 5, 8).to(torch.bfloat16)
    module = Rotary(rope(), 8)
    assert torch.equal(module.along(x, 2, 1), module(x, 2 + torch.arange(5)))
    cells = Rotary(rope(grid=(2, 3)), 8)
    y = drawn(1, 6, 8)
    assert torch.equal(cells.along(y, 0, 1), cells(y, torch.arange(6)))


@pytest.mark.parametrize("name", ["w_q", "w_k", "w_v"])
def test_who_listens_to_a_projection_hears_it(name):
    module = rg.Attention(8, heads=2).build()
    heard = []
    getattr(module, name).register_forward_hook(lambda *given: heard.append(given[-1].shape))
    module(torch.randn(2, 5, 8))
    assert heard == [(2, 5, 8)]


def test_who_listens_to_a_network_hears_it():
    network = FeedForward(spec.FeedForward(9), 4)
    heard = []
    network.w_in.register_forward_hook(lambda *given: heard.append(given[-1].detach().clone()))
    x = torch.randn(3, 4)
    network(x)
    torch.testing.assert_close(heard, [F.linear(x, network.w_in.weight, network.w_in.bias)])


NETWORKS = ("relu", "swiglu", "geglu")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", NETWORKS)
def test_a_network_in_training_is_the_formula(activation, bias, monkeypatch):
    network = FeedForward(spec.FeedForward(11, activation=activation, bias=bias), 5).double()
    x = drawn(2, 3, 5).requires_grad_()
    assert by_hand.fits(network, x)

    def found() -> list[torch.Tensor]:
        out = network(x)
        return [out, *torch.autograd.grad(out.square().sum(), [x, *network.parameters()])]

    quick = found()
    monkeypatch.setattr(by_hand, "fits", lambda network, x: False)
    for a, b in zip(quick, found(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("activation", NETWORKS)
def test_a_network_in_training_has_gradients_of_every_order(activation):
    network = FeedForward(spec.FeedForward(7, activation=activation), 3).double()
    x = drawn(2, 2, 3).requires_grad_()
    names = [name for name, _ in network.named_parameters()]
    assert by_hand.fits(network, x)

    def run(x, *weights):
        return torch.func.functional_call(network, dict(zip(names, weights, strict=True)), (x,))

    given = (x, *(p.detach().clone().requires_grad_() for p in network.parameters()))
    assert torch.autograd.gradcheck(run, given) and torch.autograd.gradgradcheck(run, given)


@pytest.mark.parametrize("activation", NETWORKS)
def test_the_same_graph_can_be_walked_back_twice(activation):
    network = FeedForward(spec.FeedForward(7, activation=activation), 3)
    out = network(torch.randn(4, 3)).square().sum()
    first = torch.autograd.grad(out, list(network.parameters()), retain_graph=True)
    again = torch.autograd.grad(out, list(network.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_only_what_is_asked_for_gets_a_gradient():
    network = FeedForward(spec.FeedForward(7), 3)
    network.w_in.requires_grad_(False)
    x = torch.randn(4, 3)
    network(x).sum().backward()
    assert network.w_in.weight.grad is None and x.grad is None
    want = F.relu(F.linear(x, network.w_in.weight, network.w_in.bias)).sum(0).expand(3, -1)
    torch.testing.assert_close(network.w_out.weight.grad, want)


def test_other_networks_go_by_their_modules():
    x = torch.randn(2, 4)
    for declared in (
        spec.FeedForward(8, activation="gelu"),
        spec.FeedForward(8, dropout=0.5),
    ):
        assert not by_hand.fits(FeedForward(declared, 4), x)
    network = FeedForward(spec.FeedForward(8), 4)
    with torch.no_grad():
        assert not by_hand.fits(network, x)
    network.w_out = nn.utils.parametrizations.weight_norm(network.w_out)
    assert not by_hand.fits(network, x)

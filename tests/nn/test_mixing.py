"""Fixed mixing against attention at its limits."""

from math import inf

import pytest
import torch

from regard.errors import ShapeError, SpecError
from regard.nn.mixing import MixingLayer
from regard.reference import attend
from regard.spec import Mixing

B, M, D_V = 3, 11, 5
INDEX = (4, 4, 10, 0, 7, 2, 9)


@pytest.fixture
def v():
    return torch.randn(B, M, D_V, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def q():
    return torch.randn(B, M, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def layer(how, index=None):
    return MixingLayer(Mixing(how, index=index))


@pytest.mark.ledger("S4.1.1c.2", "S4.1.3d.1")
def test_identity_is_hard_attention_of_each_position_to_itself(v):
    own = torch.eye(M, dtype=torch.float64).expand(B, M, M)  # orthonormal keys, and queries equal to them
    hard = attend(own, own, v, scale=inf)
    assert torch.equal(hard.weights, layer("identity").matrix(M).double().expand(B, M, M))
    assert torch.equal(layer("identity")(v), hard.o) and torch.equal(hard.o, v)


@pytest.mark.ledger("S4.1.1c.2")
def test_select_is_hard_attention_to_the_chosen_keys(v):
    keys = torch.eye(M, dtype=torch.float64).expand(B, M, M)
    queries = keys[:, list(INDEX)]
    hard = attend(queries, keys, v, scale=inf)
    assert torch.equal(hard.weights, layer("select", INDEX).matrix(M).double().expand(B, 7, M))
    assert torch.equal(layer("select", INDEX)(v), hard.o)


@pytest.mark.ledger("S4.1.1c.2")
def test_select_cannot_follow_the_input_as_hard_attention_does(v, q):
    """The same keys in another order: attention finds the value again, the fixed matrix gives another one."""
    order = torch.randperm(M, generator=torch.Generator().manual_seed(2))
    keys = torch.eye(M, dtype=torch.float64).expand(B, M, M)
    queries = keys[:, list(INDEX)]
    moved = attend(queries, keys[:, order], v[:, order], scale=inf).o
    assert torch.equal(moved, attend(queries, keys, v, scale=inf).o)
    assert not torch.equal(layer("select", INDEX)(v[:, order]), moved)


@pytest.mark.ledger("S4.1.1d.2", "S4.1.1d.1")
def test_average_is_attention_at_scale_zero_whatever_the_queries_and_keys(v, q):
    soft = attend(q, q.flip(1), v, scale=0.0)
    a = layer("average").double().matrix(M).double()
    assert (soft.weights - a).abs().max() < 1e-8  # A is float32
    assert (layer("average")(v) - soft.o).abs().max() < 1e-12
    assert not torch.allclose(attend(q, q.flip(1), v, scale=1.0).o, soft.o)  # control


@pytest.mark.ledger("S4.1.1d.2")
@pytest.mark.parametrize("how, index", [("identity", None), ("average", None), ("select", INDEX)])
@pytest.mark.parametrize("lengths", [None, (11, 4, 0)])
def test_the_layer_is_its_matrix(v, how, index, lengths):
    lengths = None if lengths is None else torch.tensor(lengths)
    mix = layer(how, index)
    seen = torch.ones(B, M, 1, dtype=torch.bool)
    if lengths is not None:
        seen = (torch.arange(M) < lengths[:, None])[..., None]
    by_matrix = mix.matrix(M, lengths).double() @ v.masked_fill(~seen, 0.0)
    assert (mix(v, lengths) - by_matrix).abs().max() < 1e-6  # A is float32
    spoilt = v.masked_fill(~seen, torch.nan)
    assert torch.equal(mix(spoilt, lengths), mix(v, lengths))
    if lengths is not None:
        assert mix(v, lengths)[2].eq(0).all()


@pytest.mark.ledger("S4.1.1d.2")
def test_average_over_lengths_is_attention_at_scale_zero_over_the_allowed_keys(v, q):
    lengths = torch.tensor([11, 4, 0])
    allowed = (torch.arange(M) < lengths[:, None])[:, None, :].expand(B, M, M)
    assert (layer("average")(v, lengths) - attend(q, q, v, allowed, scale=0.0).o).abs().max() < 1e-12


def test_it_has_no_parameters_and_no_state_to_save():
    mix = layer("select", INDEX)
    assert list(mix.parameters()) == [] and mix.state_dict() == {}
    assert repr(mix) == f"MixingLayer(Mixing('select', index={INDEX!r}))"


@pytest.mark.parametrize("index, bad", [((0, 11), 11), ((-1, 2), -1)])
def test_an_index_that_is_no_position_is_named(v, index, bad):
    mix = layer("select", index)
    for ask in (lambda: mix(v), lambda: mix.matrix(M)):
        with pytest.raises(ShapeError) as e:
            ask()
        assert str(e.value) == (
            f"index {bad} of Mixing('select', index={index!r}) is not among the 11 positions 0 … 10"
        )


def test_an_index_belongs_to_select_alone():
    with pytest.raises(SpecError, match="index is required for how='select' and for nothing else"):
        Mixing("average", index=(1,))

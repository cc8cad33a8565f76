"""Modules that are built on the meta device and given their weights later compute what the original computes."""

import pytest
import torch

import regard as rg

POSITIONS = {
    "none": None,
    "rope": rg.rope(),
    "alibi": rg.alibi(),
    "t5_buckets": rg.t5_buckets(buckets=8, max_distance=11),
    "relative_table": rg.relative_table(5),
    "shaw": rg.shaw(5),
    "quadratic": rg.quadratic(),
}
IDS = torch.arange(2 * 17).view(2, 17) % 13


def declared(position: rg.Position | None) -> rg.Spec:
    attention = rg.Attention(16, heads=2, pattern=rg.causal(), position=position)
    block = rg.Block(attention, rg.FeedForward(24))
    return rg.Encoder(block, 2, embedding=rg.Embedding(13, 16), head=rg.LanguageHead())


def original(spec: rg.Spec) -> torch.nn.Module:
    torch.manual_seed(0)
    model = spec.build()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))  # tables of positions are zeros at first
    return model


def emptied(spec: rg.Spec) -> torch.nn.Module:
    """Built without memory; then all memory is given the worst numbers that it may contain."""
    with torch.device("meta"):
        model = spec.build()
    model.to_empty(device="cpu")
    for x in (*model.parameters(), *model.buffers()):
        x.data.fill_(float("nan") if x.is_floating_point() else -(2**62))
    return model


@pytest.mark.parametrize("name", POSITIONS)
@pytest.mark.parametrize("method", ["to_empty", "assign"])
def test_weights_loaded_into_a_model_without_memory_are_the_model(name, method):
    spec = declared(POSITIONS[name])
    model = original(spec)
    if method == "to_empty":
        later = emptied(spec)
        later.load_state_dict(model.state_dict())
    else:
        with torch.device("meta"):
            later = spec.build()
        later.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(later(IDS), model(IDS))
    later(IDS).sum().backward()
    assert all(p.grad is not None for p in later.parameters())


def test_a_position_that_all_layers_share_needs_no_memory_of_its_own():
    block = rg.Block(rg.Attention(16, heads=2, pattern=rg.causal()), rg.FeedForward(24))
    for position in (rg.alibi(), rg.t5_buckets(buckets=8, max_distance=11)):
        spec = rg.Encoder(block, 2, embedding=rg.Embedding(13, 16), head=rg.LanguageHead(), position=position)
        model, later = original(spec), emptied(spec)
        later.load_state_dict(model.state_dict())
        assert torch.equal(later(IDS), model(IDS))


def test_a_mixing_layer_selects_by_its_declaration():
    spec = rg.Mixing("select", index=(2, 0, 1))
    v = torch.arange(3.0)[None, :, None]
    assert emptied(spec)(v).flatten().tolist() == [2, 0, 1] == spec.build()(v).flatten().tolist()
    assert torch.equal(emptied(spec).matrix(3), spec.build().matrix(3))


def test_buckets_met_in_inference_mode_serve_a_training():
    module = rg.Attention(16, heads=2, position=rg.t5_buckets(buckets=6, max_distance=7)).build()
    x = torch.randn(1, 5, 16)
    with torch.inference_mode():
        module(x)
    module(x).sum().backward()
    assert module.position.table.grad is not None


@pytest.mark.compiled
@pytest.mark.parametrize("name", ["alibi", "t5_buckets"])
def test_what_follows_from_the_declaration_is_computed_in_a_compiled_graph(name):
    module = rg.Attention(16, heads=2, position=POSITIONS[name]).build()
    x = torch.randn(1, 5, 16)
    graph = torch.compile(module, backend="eager", fullgraph=True)
    torch.testing.assert_close(graph(x), module(x))

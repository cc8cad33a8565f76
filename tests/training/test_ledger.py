"""Rows of the ledger that training, or a reader, decides."""

import inspect
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import regard as rg
from regard import reference
from regard.training.lessons.images import local
from regard.training.loop.optimizer import AdamW

ROOT = Path(__file__).parents[2]
STEPS = 20


def two_heads(seed: int = 0):
    """Attention of two heads, 3 wide each, in float64."""
    torch.manual_seed(seed)
    return rg.Attention(6, heads=2, biases="none").build().double()


def unpack(model) -> float:
    """How far the two heads' weights are from one another."""
    rows = [w.weight for w in (model.w_q, model.w_k, model.w_v)] + [model.w_o.weight.T]
    return max(float((w[:3] - w[3:]).detach().abs().max()) for w in rows)


@pytest.mark.ledger("S0.Q2c.1")
def test_heads_that_start_equal_stay_equal_and_others_do_not():
    model, other = two_heads(), two_heads()
    with torch.no_grad():
        for w in (model.w_q, model.w_k, model.w_v):
            w.weight[3:] = w.weight[:3]
        model.w_o.weight[:, 3:] = model.w_o.weight[:, :3]
    began = model.w_q.weight.detach().clone()
    for trained in (model, other):
        adam = AdamW().build(trained)
        adam.param_groups[0]["lr"] = 0.01
        for step in range(STEPS):
            x = torch.randn(5, 7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            (trained(x) - x.flip(1)).pow(2).mean().backward()
            adam.step()
            adam.zero_grad()
    assert (model.w_q.weight - began).abs().max() > 0.01  # it did train
    assert unpack(model) <= STEPS * torch.finfo(torch.float64).eps  # some products round columns differently
    assert unpack(other) > 0.1


@pytest.mark.ledger("S0.Q2a.11")
@pytest.mark.parametrize(("heads", "rank"), [(8, 64), (1, 512)])
def test_a_head_has_scores_of_its_width_in_rank_so_many_heads_have_less_each(heads, rank):
    torch.manual_seed(0)
    n = 530
    model = rg.Attention(512, heads=heads, biases="none").build().double()
    x = torch.randn(n, 512, dtype=torch.float64)
    q, k = (w(x)[:, : model.spec.sizes.d_k] for w in (model.w_q, model.w_k))  # of the first head
    assert int(torch.linalg.matrix_rank(q @ k.T)) == rank


@pytest.mark.ledger("S4.1.5c.1")
def test_the_positions_of_a_vision_transformer_start_without_locality():
    torch.manual_seed(0)
    block = rg.Block(rg.Attention(64, heads=4), rg.FeedForward(64), norm_at="pre")
    model = rg.Vision(rg.Encoder(block, 1), image=(8, 8), patch=(2, 2), channels=1).build()
    vectors = torch.nn.functional.normalize(model.position.table[1:].detach(), dim=-1)
    alike, itself = vectors @ vectors.T, torch.eye(16, dtype=torch.bool)
    near = local(1) & ~itself
    assert abs(float(alike[near].mean() - alike[~near & ~itself].mean())) < 0.05
    assert model.position.table.shape == (17, 64)  # one vector an index, not one a row and one a column


@pytest.mark.ledger("S2.4.2.4")
def test_content_finds_an_equal_token_anywhere_and_positions_may_distinguish_the_two():
    torch.manual_seed(0)
    attention = rg.Attention(8, heads=2)
    image = torch.randn(1, 16, 8)
    image[0, 11] = image[0, 2]  # two equal patches
    for position, twin_like_itself in ((None, True), (rg.relative_table(reach=15), False)):
        model = replace(attention, position=position).build()
        if position is not None:
            torch.nn.init.normal_(model.position.table)
        with torch.no_grad():
            weights = model(image, return_weights=True)[1][0, :, 2]
        assert torch.allclose(weights[:, 11], weights[:, 2]) == twin_like_itself


@pytest.mark.ledger("S1.I.2")
def test_the_reference_is_short_and_says_what_it_computes():
    source = inspect.getsource(reference.attend)
    assert len(source.splitlines()) < 60 and "softmax" in (inspect.getdoc(reference.attend) or "")
    engine = ROOT / "src" / "regard" / "engine"
    fast = [f for f in engine.rglob("*.py") if re.search(r"^def attend\(", f.read_text(), re.MULTILINE)]
    assert len(fast) >= 4
    assert all('"""' in f.read_text().split("def attend(")[1][:1200] for f in fast)  # each says its formula

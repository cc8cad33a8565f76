"""Gradients through 24 layers at initialization: what residuals and norms each do for them."""

import pytest
import torch

import regard as rg
from regard.lens import figures
from regard.lens.gradient_flow import STACKS, compare_stacks, gradient_flow, smallest_cosine


@pytest.fixture(scope="module")
def flows():
    return compare_stacks()


@pytest.mark.ledger("S1.Q5c.2", "S1.Q7b.2")
def test_a_norm_alone_keeps_the_gradient_and_makes_all_tokens_equal(flows):
    """The ledger's trial: depth 24, width 64, bottom over top parameter gradient."""
    assert flows["no residual, no norm"].ratio < 1e-8
    assert 0.4 < flows["norm, no residual"].ratio < 8
    assert 2 < flows["residual, pre-norm"].ratio < 4
    assert 0.4 < flows["residual, post-norm"].ratio < 1.1
    assert flows["norm, no residual"].cosines[5] > 0.999
    assert max(flows["residual, pre-norm"].cosines[5], flows["residual, post-norm"].cosines[5]) < 0.9
    assert all(len(f.norms) == len(f.cosines) == 24 for f in flows.values())


@pytest.mark.ledger("S1.Q5c.2")
def test_the_picture_of_gradient_flow_is_the_measurement(flows):
    figure = figures.gradient_flow({name: flow.norms for name, flow in flows.items()})
    lines = {line.get_label(): tuple(line.get_ydata()) for line in figure.axes[0].lines}
    assert lines == {name: flow.norms for name, flow in flows.items()} and set(lines) == set(STACKS)
    assert figure.axes[0].get_yscale() == "log"


def test_the_norms_are_those_of_a_backward_pass():
    torch.manual_seed(0)
    block = rg.Block(rg.Attention(8, heads=2), rg.FeedForward(16), norm_at="pre")
    model, x = rg.Encoder(block, 3).build(), torch.randn(2, 5, 8)
    flow = gradient_flow(model, x, seed=4)
    out = model(x)
    (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(4))).sum().backward()
    truth = [sum(float(p.grad.pow(2).sum()) for p in b.parameters()) ** 0.5 for b in model.blocks]
    assert flow.norms == pytest.approx(truth, rel=1e-5) and flow.ratio == pytest.approx(truth[0] / truth[2])
    state = x
    for block, cosine in zip(model.blocks, flow.cosines):
        state = block(state).detach()
        pairs = [
            torch.cosine_similarity(row[i], row[j], 0) for row in state for i in range(5) for j in range(i)
        ]
        assert cosine == pytest.approx(float(min(pairs)), abs=1e-6)
    assert smallest_cosine(torch.ones(1, 3, 4)) == pytest.approx(1.0)
    with pytest.raises(rg.ShapeError, match=r"Linear has 0 blocks to compare; give its layers as blocks="):
        gradient_flow(torch.nn.Linear(8, 8), x)

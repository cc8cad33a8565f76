"""The consistency loss: PyTorch's cross-entropy and divergence, and gradients by autograd."""

import pytest
import torch
import torch.nn.functional as F

from regard.training.loop.consistency import consistent_cross_entropy
from regard.training.recipes.catalogue import recipe

WEIGHT, SMOOTHING = 2.5, 0.1


def expected(states, table, y, bias):
    """By PyTorch's functions, over the tokens that count."""
    counted = y != -100
    p, q = (x[counted] for x in F.linear(states, table, bias).chunk(2))
    target, options = y[counted], {"reduction": "sum"}
    loss = sum(F.cross_entropy(x, target, label_smoothing=SMOOTHING, **options) for x in (p, q)) / 2
    log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
    one, other = (F.kl_div(a, b, log_target=True, **options) for a, b in ((log_p, log_q), (log_q, log_p)))
    plain = sum(F.cross_entropy(x, target, **options) for x in (p, q)) / 2
    return loss + WEIGHT * (one + other) / 2, plain


@pytest.mark.parametrize("chunk", [None, 4])
def test_the_loss_and_its_gradients_are_those_of_pytorch(chunk):
    random = torch.Generator().manual_seed(0)
    states, table, bias = (
        torch.randn(shape, dtype=torch.float64, generator=random).requires_grad_()
        for shape in ((6, 5, 7), (11, 7), (11,))
    )
    y = torch.randint(11, (3, 5), generator=random)
    y[1, 2:] = -100
    loss, plain = consistent_cross_entropy(
        states, table, y, bias, weight=WEIGHT, smoothing=SMOOTHING, chunk=chunk
    )
    true_loss, true_plain = expected(states, table, y, bias)
    assert float(loss.detach()) == pytest.approx(float(true_loss.detach()), rel=1e-6)
    assert float(plain) == pytest.approx(float(true_plain.detach()), rel=1e-6)
    ours, theirs = (torch.autograd.grad(x, (states, table, bias)) for x in (loss, true_loss))
    for a, b in zip(ours, theirs, strict=True):
        assert float((a - b).abs().max()) <= 1e-5 * float(b.abs().max())


def test_a_translator_reads_each_sentence_twice_while_it_trains():
    """Without dropout both passes agree, and the loss is that of one pass; with dropout they diverge."""
    found = {}
    source, target = torch.randint(4, 300, (3, 6)), torch.randint(4, 300, (3, 5))
    inputs = (source, torch.tensor([6, 2, 4]), target, target)
    for dropout in (0.0, 0.3):
        for consistency in (0.0, 2.5):
            chosen = recipe(
                "translate-h200", d_model=32, layers=(1, 1), heads=2, d_ff=48, dropout=dropout,
                consistency=consistency,
            )  # fmt: skip
            torch.manual_seed(0)
            task = chosen.task(chosen.model.build())
            found[dropout, consistency] = [
                tuple(float(x.detach()) for x in task.train(mode)(*inputs)) for mode in (True, False)
            ]
    assert found[0.0, 2.5][0] == pytest.approx(found[0.0, 0.0][0], rel=1e-5)
    assert found[0.3, 2.5][0][0] > found[0.3, 2.5][0][1]
    assert found[0.3, 2.5][1] == found[0.3, 0.0][1] == pytest.approx(found[0.0, 0.0][1], rel=1e-5)

"""The chunked loss against PyTorch's, values and gradients."""

import logging

import pytest
import torch
import torch.nn.functional as F

import regard as rg
from regard.training.data.rows import IGNORED
from regard.training.loop.loss import cross_entropy


def case(dtype=torch.float64, rows=23, d=5, vocab=11):
    noise = torch.Generator().manual_seed(0)
    states = torch.randn(rows, d, generator=noise, dtype=dtype, requires_grad=True)
    table = torch.randn(vocab, d, generator=noise, dtype=dtype, requires_grad=True)
    bias = torch.randn(vocab, generator=noise, dtype=dtype, requires_grad=True)
    targets = torch.randint(vocab, (rows,), generator=noise)
    targets[::4] = IGNORED
    return states, table, targets, bias


@pytest.mark.parametrize("chunk", [1, 7, 1024])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("biased", [False, True])
def test_loss_and_gradients_are_pytorchs(chunk, smoothing, biased):
    states, table, targets, bias = case()
    bias = bias if biased else None
    given = [t for t in (states, table, bias) if t is not None]
    loss, plain = cross_entropy(states, table, targets, bias, smoothing=smoothing, chunk=chunk)
    logits = F.linear(states, table, bias)
    true = F.cross_entropy(logits, targets, ignore_index=IGNORED, label_smoothing=smoothing, reduction="sum")
    unsmoothed = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    assert abs((loss - true).item()) < 1e-12 and abs((plain - unsmoothed).item()) < 1e-12
    ours, theirs = torch.autograd.grad(loss / 7, given), torch.autograd.grad(true / 7, given)
    assert all(torch.allclose(a, b, atol=1e-13, rtol=0) for a, b in zip(ours, theirs, strict=True))


def test_only_what_needs_a_gradient_gets_one():
    states, table, targets, _ = case()
    loss, plain = cross_entropy(states.detach(), table, targets)
    assert not plain.requires_grad
    loss.backward()
    assert table.grad is not None and states.grad is None
    with torch.no_grad():
        assert torch.equal(cross_entropy(states, table, targets)[0], loss.detach())


def products(f) -> int:
    with torch.profiler.profile() as seen:
        f()
    return sum(e.name in ("aten::mm", "aten::addmm", "aten::addmm_") for e in seen.events())


def test_without_gradients_none_are_made():
    states, table, targets, _ = case()
    with torch.no_grad():
        alone = products(lambda: cross_entropy(states, table, targets, chunk=6))
    assert alone == 3  # 17 of 23 tokens count: three chunks, one product each
    assert products(lambda: cross_entropy(states, table, targets, chunk=6)) == 3 * alone


def test_the_logits_are_never_held_whole():
    rows, vocab = 4096, 2048
    noise = torch.Generator().manual_seed(0)
    states = torch.randn(rows, 8, generator=noise, requires_grad=True)
    table = torch.randn(vocab, 8, generator=noise, requires_grad=True)
    targets = torch.randint(vocab, (rows,), generator=noise)

    def largest(f):
        with torch.profiler.profile(profile_memory=True) as seen:
            f()
        return max(e.cpu_memory_usage for e in seen.events())

    chunked = largest(lambda: cross_entropy(states, table, targets, chunk=128)[0].backward())
    whole = largest(lambda: F.cross_entropy(states @ table.T, targets).backward())
    assert chunked <= 2 * 128 * vocab * 4 < rows * vocab * 4 <= whole


def test_under_autocast_the_products_are_narrow_and_the_sum_is_wide():
    states, table, targets, _ = case(torch.float32, rows=200)
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = cross_entropy(states, table, targets)
        true = F.cross_entropy(
            F.linear(states, table).float(), targets, ignore_index=IGNORED, reduction="sum"
        )
    assert loss.dtype == torch.float32
    assert abs((loss - true).item()) < 1e-3 * abs(true.item())
    loss.backward()
    assert states.grad.dtype == torch.float32 and bool(torch.isfinite(states.grad).all())


@pytest.mark.parametrize(
    "head", [rg.LanguageHead(bias=True, scaled=True), rg.LanguageHead(tied=False), rg.MaskedHead()]
)
def test_every_head_gives_what_its_logits_are_made_of(head):
    torch.manual_seed(0)
    block = rg.Block(rg.Attention(8, heads=2), rg.FeedForward(8))
    model = rg.Encoder(block, 1, embedding=rg.Embedding(11, 8), head=head).build()
    x = torch.randint(11, (2, 5))
    parts = model.head.inputs(model.states(x), model.embedding.table)
    assert torch.equal(F.linear(*parts), model(x))


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore")  # Python warnings inside Dynamo; this test is about its log
def test_a_compiled_loss_with_ignored_targets_logs_no_warning(caplog):
    """Which targets are ignored is read between two graphs; inside one, Dynamo warns of Tensor.item()."""
    states, table = torch.randn(5, 4, requires_grad=True), torch.randn(7, 4)
    targets = torch.tensor([1, IGNORED, 3, 0, 6])
    compiled = torch.compile(cross_entropy, backend="eager")
    with caplog.at_level(logging.WARNING, logger="torch._dynamo"):
        got = compiled(states, table, targets)[0]
    assert not caplog.records
    assert torch.equal(got, cross_entropy(states, table, targets)[0])

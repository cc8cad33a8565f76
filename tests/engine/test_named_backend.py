"""`with rg.backend(…)`: the backend of calls that name none, in this thread, in modules and models, and no longer."""

import asyncio
import threading

import pytest
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

import regard as rg
from regard.engine import backends, fused_qkv, reference_backend
from regard.interop import huggingface  # noqa: F401 — registers attn_implementation="regard"

PATTERN = rg.causal() & (rg.window(8) | rg.sinks(2))
N = 600


@pytest.fixture
def formula(monkeypatch):
    """Calls that the formula computed."""
    found = []
    attend = reference_backend.attend
    monkeypatch.setattr(reference_backend, "attend", lambda call: found.append(call.q.shape) or attend(call))
    backends.PREPARED.clear()
    return found


def qkv(grad: bool = False) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, N, 8, generator=g).requires_grad_(grad) for _ in range(3)]


def chosen() -> str:
    return rg.explain(*qkv(), PATTERN).backend


def test_calls_within_run_by_it_and_calls_after_do_not(formula):
    inputs = qkv()
    before = rg.attention(*inputs, PATTERN)
    assert not formula
    with rg.backend("reference"):
        within = rg.attention(*inputs, PATTERN)
        assert torch.equal(within, rg.attention(*inputs, PATTERN))  # the second finds a prepared call
        assert len(formula) == 2
    after = rg.attention(*inputs, PATTERN)
    assert len(formula) == 2 and torch.equal(before, after) and not torch.equal(before, within)
    assert torch.allclose(before, within, atol=1e-5)


def test_the_innermost_context_counts_and_a_call_of_its_own_name_comes_first(formula):
    with rg.backend("reference"):
        with rg.backend("sdpa"):
            assert chosen() == "sdpa"
            with rg.backend("auto"):
                assert chosen() == "tiles"
        assert chosen() == "reference"
        assert rg.explain(PATTERN, N, backend="sdpa").backend == "sdpa"
        rg.attention(*qkv(), PATTERN, backend="tiles")
        assert not formula
        with pytest.raises(ZeroDivisionError), rg.backend("sdpa"):
            raise ZeroDivisionError
        assert chosen() == "reference"
    assert chosen() == "tiles"

    @rg.backend("sdpa")
    def decorated():
        return chosen()

    assert (decorated(), decorated(), chosen()) == ("sdpa", "sdpa", "tiles")


def test_errors_are_those_of_the_argument():
    with pytest.raises(rg.SpecError) as unknown, rg.backend("tile"):
        pass
    with pytest.raises(rg.SpecError) as as_argument:
        rg.attention(*qkv(), backend="tile")
    assert str(unknown.value) == str(as_argument.value) == "unknown backend 'tile'; did you mean tiles?"
    with pytest.raises(rg.BackendError) as refused, rg.backend("triton"):
        rg.attention(*qkv(), PATTERN)
    assert str(refused.value) == (
        "backend='triton' cannot run this: it runs on CUDA, not on cpu; use backend='tiles'"
    )


def test_other_threads_and_tasks_have_their_own():
    found = {}
    with rg.backend("reference"):
        thread = threading.Thread(target=lambda: found.update(thread=chosen()))
        thread.start()
        thread.join()

    async def task(name: str) -> str:
        with rg.backend(name):
            await asyncio.sleep(0.01)
            return chosen()

    async def together() -> list[str]:
        return await asyncio.gather(task("reference"), task("sdpa"))

    assert (found, asyncio.run(together())) == ({"thread": "tiles"}, ["reference", "sdpa"])


def test_a_backward_pass_belongs_to_its_forward_pass():
    def gradients(*contexts):
        inputs = qkv(grad=True)
        with rg.backend(contexts[0]):
            o = rg.attention(*inputs, PATTERN)
        with rg.backend(contexts[1]):
            first = torch.autograd.grad(o.square().sum(), inputs, create_graph=True)
        with rg.backend(contexts[2]):
            return [*first, *torch.autograd.grad(first[0].square().sum(), inputs)]

    expected = gradients("tiles", "tiles", "tiles")
    assert all(map(torch.equal, gradients("tiles", "reference", "sdpa"), expected))
    by_formula = gradients("reference", "auto", "auto")
    assert all(torch.allclose(a, b, atol=1e-3, rtol=1e-3) for a, b in zip(by_formula, expected))


def stack(**options) -> nn.Module:
    torch.manual_seed(0)
    block = rg.Block(rg.Attention(16, heads=2, pattern=PATTERN), rg.FeedForward(16))
    return rg.Decoder(block, 2, embedding=rg.Embedding(50, 16), head=rg.LanguageHead(), **options).build()


@pytest.mark.parametrize("again", [False, True])
def test_a_stack_runs_by_it_and_so_does_what_a_checkpoint_computes_again(formula, again):
    """Backward runs outside of the context, and for a GPU in another thread."""
    model, ids = stack(checkpoint=again), torch.arange(N)[None] % 50
    expected = torch.autograd.grad(model(ids).square().mean(), list(model.parameters()))
    assert not formula
    with rg.backend("reference"):
        total = model(ids).square().mean()
    assert len(formula) == 2
    found = torch.autograd.grad(total, list(model.parameters()))
    assert len(formula) == (4 if again else 2)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, expected))


def test_no_fused_kernel_replaces_the_backend_that_is_named(monkeypatch):
    """On a GPU a module may run one kernel for projections' heads and attention, which is no backend."""
    module, x = rg.Attention(16, heads=2, pattern=rg.causal()).build(), torch.ones(1, 4, 16)
    monkeypatch.setattr(fused_qkv, "fits", lambda *call: True)
    assert module._can_fuse(x, None, None)
    with rg.backend("reference"):
        assert not module._can_fuse(x, None, None)


def test_a_checkpoint_of_your_own_is_computed_again_within_the_context(formula):
    inputs = qkv(grad=True)
    with rg.backend("reference"):
        o = checkpoint(lambda *x: rg.attention(*x, PATTERN), *inputs, use_reentrant=False)
        o.sum().backward()
    assert len(formula) == 2


def test_a_hugging_face_model_runs_by_it(formula):
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=0,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="regard").eval()
    ids = torch.arange(1200)[None] % 61
    documents = torch.arange(1200)[None] % 400  # padding and documents have tiles of their own otherwise
    for more in ({}, {"position_ids": documents}, {"attention_mask": (torch.arange(1200) >= 9).long()[None]}):
        expected = model(ids, **more).logits
        assert not formula
        with rg.backend("reference"):
            found = model(ids, **more).logits
        assert formula and torch.allclose(found[:, 9:], expected[:, 9:], atol=1e-4)
        formula.clear()
    with pytest.raises(rg.BackendError, match="backend='triton' cannot run this"), rg.backend("triton"):
        model(ids)


@pytest.mark.compiled
def test_a_compiled_function_breaks_its_graph_there_or_says_why_it_cannot():
    torch.compiler.reset()
    inputs = qkv()
    by_name = {name: rg.attention(*inputs, PATTERN, backend=name) for name in ("reference", "sdpa")}
    compiled = torch.compile(lambda *x: rg.attention(*x, PATTERN), backend="eager")
    outside = compiled(*inputs)
    assert not any(torch.equal(outside, o) for o in by_name.values())
    for name in ("reference", "sdpa", "reference"):
        with rg.backend(name):
            assert torch.equal(compiled(*inputs), by_name[name])
    assert torch.equal(compiled(*inputs), outside)

    def inside(*x):
        with rg.backend("reference"):
            return rg.attention(*x, PATTERN)

    assert torch.equal(torch.compile(inside, backend="eager")(*inputs), by_name["reference"])
    whole = torch.compile(lambda *x: rg.attention(*x, PATTERN), backend="eager", fullgraph=True)
    reason = r"rg.backend\(…\) breaks a graph: for fullgraph=True, use backend="
    with pytest.raises(Exception, match=reason), rg.backend("reference"):
        whole(*inputs)
    assert torch.equal(whole(*inputs), outside)  # here the graph is whole

"""torch.compile(fullgraph=True) on attention, block and encoder-decoder gives what eager gives.

Tracing whole graphs, forward and backward, is ours to get right and is tested here (aot_eager); making code
of them is inductor's, and C++ compilation takes minutes, so one small block goes all the way.
"""

import shutil

import pytest
import torch

import regard as rg
from long_cases import in_long
from regard import Attention, Block, FeedForward
from regard.spec import Embedding, catalogue

pytestmark = pytest.mark.compiled
needs_compiler = pytest.mark.skipif(
    not (shutil.which("c++") or shutil.which("g++")), reason="no C++ compiler for inductor"
)


def same(f, *given, backend="aot_eager"):
    """Outputs and gradients of the compiled function and of the function."""
    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, backend=backend)
    results = []
    for g in (f, compiled):
        for p in f.parameters():
            p.grad = None
        out = g(*given)
        out.square().sum().backward()
        results.append([out.detach(), *(p.grad.clone() for p in f.parameters() if p.grad is not None)])
    for a, b in zip(*results):
        assert torch.allclose(a, b, atol=1e-4 * max(1.0, a.abs().max().item()), rtol=0)


def built(declared):
    torch.manual_seed(0)
    return declared.build()


@pytest.mark.parametrize(
    "more",
    [
        {"pattern": rg.causal() & (rg.window(2) | rg.every(3)), "position": rg.rope(), "kv_heads": 1},
        {"position": rg.relative_table(3)},
        *in_long({"pattern": rg.causal(), "position": rg.alibi()}, {"score": "additive"}),
    ],
    ids=["window", "table", "alibi", "additive"],
)
def test_attention_compiles_whole(more):
    same(
        built(Attention(12, heads=2, **more)),
        torch.randn(2, 7, 12, generator=torch.Generator().manual_seed(0)),
    )


@pytest.mark.parametrize("norm_at", ["pre", *in_long("post")])
def test_a_block_compiles_whole(norm_at):
    block = Block(Attention(12, heads=2, pattern=rg.causal()), FeedForward(20), norm_at=norm_at)
    same(built(block), torch.randn(2, 7, 12, generator=torch.Generator().manual_seed(0)))


@needs_compiler
def test_a_block_compiles_to_code():
    block = Block(Attention(8, heads=2, pattern=rg.causal(), biases="none"), None, norm="none")
    same(built(block), torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(0)), backend="inductor")


def test_the_encoder_decoder_compiles_whole():
    model = built(catalogue.transformer(16, 2, 24, 1, vocab=20, dropout=0.0))
    ids = torch.randint(1, 20, (2, 7), generator=torch.Generator().manual_seed(0))
    same(model, ids, ids[:, :5])


@needs_compiler
def test_a_compiled_embedding_refuses_ids_and_types_that_it_does_not_have():
    torch._dynamo.reset()
    fast = torch.compile(built(Embedding(11, 8, types=2)), fullgraph=True)
    ids, types = torch.tensor([[0, 10]]), torch.tensor([[0, 1]])
    fast(ids, types=types)
    for wrong in ({"ids": ids - 1}, {"ids": ids + 1}, {"types": types - 1}, {"types": types + 1}):
        with pytest.raises(RuntimeError, match="index out of bounds"):
            fast(**{"ids": ids, "types": types} | wrong)

"""attn_implementation="regard" on a GPU: a small Llama in bfloat16 and float32: pattern, padding, generation."""

import importlib.util

import pytest
import torch

import regard as rg

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.filterwarnings("ignore:transformers .*regard was tested with:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of transformers and torch, by version
]
PATTERN = rg.causal() & (rg.window(64) | rg.sinks(4))
N = 700


def llama(dtype=torch.float32):
    from transformers import AutoModelForCausalLM, LlamaConfig

    from regard.interop import huggingface  # noqa: F401

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=99, hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype).eval()


def tokens(batch, n):
    return torch.randint(3, 99, (batch, n), generator=torch.Generator().manual_seed(0)).cuda()


def states_and_gradients(model, ids, real, **given):
    model.zero_grad()
    hidden = model.model(ids, use_cache=False, **given).last_hidden_state[real]
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1)).to(hidden)
    (hidden * weights).mean().backward()
    return [hidden.detach(), *(p.grad.clone() for p in model.model.parameters() if p.grad is not None)]


def gaps(found, exact):
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact)]


@pytest.mark.parametrize("pattern", [None, PATTERN], ids=["causal", "pattern"])
@pytest.mark.parametrize("left", [0, 37], ids=["whole", "padded"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_states_and_gradients_are_as_near_to_float64_as_those_of_eager(dtype, left, pattern):
    """The second row has padding on the left; the pattern counts from its first real token."""
    model, ids = llama(dtype), tokens(2, N)
    mask = torch.ones_like(ids)
    mask[1, :left] = 0
    real, given = mask.bool(), {"attention_mask": mask} if left else {}
    seen = (rg.causal() if pattern is None else pattern).allowed(N, device="cuda")
    shifted = torch.zeros_like(seen)
    shifted[left:, left:] = seen[: N - left, : N - left]
    table = torch.stack([seen, shifted | torch.eye(N, device="cuda").bool()])[:, None]
    added = torch.where(table, 0.0, torch.finfo(dtype).min).to(dtype)
    plain = states_and_gradients(model, ids, real, attention_mask=added)
    wide = llama().double()
    wide.load_state_dict(model.state_dict())
    exact = states_and_gradients(wide, ids, real, attention_mask=added.double())
    with rg.use(model, pattern):
        ours = states_and_gradients(model, ids, real, **given)
    floor = 1e-3 if dtype == torch.bfloat16 else 1e-6
    for mine, theirs in zip(gaps(ours, exact), gaps(plain, exact)):
        assert mine <= 2 * theirs + floor


@pytest.mark.filterwarnings("ignore::UserWarning")  # of the compiler, about TensorFloat32
@pytest.mark.parametrize("pattern", [None, PATTERN], ids=["causal", "pattern"])
def test_a_static_cache_compiled_generates_what_no_cache_generates(pattern):
    model, ids = llama(), tokens(2, 90)
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    with rg.use(model, pattern), torch.no_grad():
        expected = model.generate(ids, use_cache=False, **options)
        assert torch.equal(model.generate(ids, **options), expected)
        assert torch.equal(model.generate(ids, cache_implementation="static", **options), expected)


def test_a_bounded_cache_generates_the_same_and_holds_what_can_be_seen():
    from regard.interop import huggingface

    model, ids = llama(), tokens(2, 90)
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    with rg.use(model, PATTERN), torch.no_grad():
        cache = huggingface.BoundedCache(model)
        bounded = model.generate(ids, past_key_values=cache, **options)
        assert torch.equal(bounded, model.generate(ids, **options))
    assert cache.held == [68, 68]

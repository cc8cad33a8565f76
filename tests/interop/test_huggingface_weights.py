"""Weights of Hugging Face models as our modules and back: equal outputs and gradients, in float32 and float64."""

import pytest
import torch
import transformers

import regard as rg
from regard.interop.huggingface.families import FAMILIES

TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TEXT = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
LLAMA = {**TEXT, **TOKENS, "num_key_value_heads": 2, "max_position_embeddings": 64}
SEQ2SEQ = {
    "vocab_size": 61, "d_model": 24, "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 3, "encoder_ffn_dim": 32, "decoder_ffn_dim": 40, "max_position_embeddings": 32,
    "pad_token_id": 0, "decoder_start_token_id": 0,
}  # fmt: skip
CONFIGS = {
    "BertModel": ("BertConfig", {**TEXT, "max_position_embeddings": 32}),
    "BertForMaskedLM": ("BertConfig", {**TEXT, "max_position_embeddings": 32}),
    "RobertaModel": ("RobertaConfig", {**TEXT, "max_position_embeddings": 34, "pad_token_id": 1}),
    "RobertaForMaskedLM": ("RobertaConfig", {**TEXT, "max_position_embeddings": 34, "pad_token_id": 1}),
    "GPT2LMHeadModel": (
        "GPT2Config",
        {"vocab_size": 61, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 32},
    ),
    "LlamaForCausalLM": (
        "LlamaConfig",
        {**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
    "MistralForCausalLM": ("MistralConfig", {**LLAMA, "sliding_window": 5, "tie_word_embeddings": True}),
    "Qwen2ForCausalLM": ("Qwen2Config", LLAMA),
    "T5ForConditionalGeneration": (
        "T5Config",
        {
            "vocab_size": 61,
            "d_model": 24,
            "d_kv": 5,
            "d_ff": 32,
            "num_layers": 2,
            "num_decoder_layers": 1,
            "num_heads": 4,
        },
    ),
    "MarianMTModel": ("MarianConfig", {**SEQ2SEQ, "activation_function": "swish", "scale_embedding": True}),
    "BartForConditionalGeneration": ("BartConfig", SEQ2SEQ),
    "ViTForImageClassification": ("ViTConfig", {**TEXT, "image_size": 12, "patch_size": 4, "num_labels": 7}),
}
CONFIGS["DeiTForImageClassification"] = ("DeiTConfig", CONFIGS["ViTForImageClassification"][1])
IMAGES = ("ViTForImageClassification", "DeiTForImageClassification")
# Their norms and rotary tables, or their sinusoids, are computed in float32 whatever the dtype of the model.
FLOAT32_INSIDE = ("Llama", "Mistral", "Qwen2", "T5", "Marian")
IDS = torch.randint(3, 61, (2, 11), generator=torch.Generator().manual_seed(0))
TARGETS = torch.randint(3, 61, (2, 7), generator=torch.Generator().manual_seed(1))


def theirs(name, dtype=torch.float32):
    torch.manual_seed(0)
    config, sizes = CONFIGS[name]
    sizes = {k: v for k, v in sizes.items() if not (name in IMAGES and k == "vocab_size")}
    model = getattr(transformers, name)(getattr(transformers, config)(**sizes, attn_implementation="sdpa"))
    with torch.no_grad():  # biases and norms start at constants, which would hide a wrong link
        fixed = "embed_positions" if name.startswith("Marian") else "?"
        weights = [p for n, p in model.named_parameters() if fixed not in n]
        for p in [*weights, *(b for n, b in model.named_buffers() if "logits_bias" in n)]:
            p.add_(0.1 * torch.randn_like(p))
    return model.eval().to(dtype)


def outputs(name, model, ours):
    dtype = next(model.parameters()).dtype
    if name in IMAGES:
        image = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0)).to(dtype)
        return model(image) if ours else model(image).logits
    if name in ("T5ForConditionalGeneration", "MarianMTModel", "BartForConditionalGeneration"):
        return model(IDS, TARGETS) if ours else model(IDS, decoder_input_ids=TARGETS).logits
    if ours:
        return model(IDS)
    found = model(IDS)
    return found.logits if "logits" in found else found.pooler_output


@pytest.mark.parametrize(
    "dtype, bound", [(torch.float32, 1e-5), (torch.float64, 1e-10)], ids=["float32", "float64"]
)
@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_and_gradients_are_equal_both_ways(name, dtype, bound):
    if dtype == torch.float64 and name.startswith(FLOAT32_INSIDE):
        bound = 1e-6
    model = theirs(name, dtype)
    module = rg.from_huggingface(model)
    a, b = outputs(name, module, True), outputs(name, model, False)
    assert float(((a - b).abs().max() / b.abs().max()).detach()) < bound
    assert float(b.detach().std()) > 1e-3
    a.square().mean().backward()
    b.square().mean().backward()
    back = rg.to_huggingface(module)
    assert torch.equal(outputs(name, back, False), b)
    gradients = FAMILIES[name].links(model.config)
    their_params, our_params = dict(model.named_parameters()), dict(module.named_parameters())
    compared = 0
    for link in gradients:
        if link.theirs is None or link.theirs not in their_params or link.ours not in our_params:
            continue
        expected, found = link.read(their_params[link.theirs].grad), our_params[link.ours].grad
        largest = max(float(p.grad.abs().max()) for p in their_params.values() if p.grad is not None)
        assert float((found.reshape(expected.shape) - expected).abs().max()) < bound * largest, link
        compared += 1
    assert compared >= 20
    if name in IMAGES:
        assert rg.cost(module.spec).parameters == sum(p.numel() for p in model.parameters())


def test_a_folder_is_read_and_ours_reads_on(tmp_path):
    model = theirs("LlamaForCausalLM")
    model.save_pretrained(tmp_path)
    module = rg.from_huggingface(tmp_path)
    assert torch.allclose(module(IDS), model(IDS).logits, atol=1e-5)
    assert module.spec.block.attention.kv_heads == 2
    assert rg.cost(module.spec, n=16).parameters == sum(p.numel() for p in model.parameters())
    made = rg.generate(module, IDS, max_new_tokens=5)
    expected = model.generate(IDS, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert made.tokens[:, -5:].tolist() == expected[:, -5:].tolist()


def test_what_a_spec_cannot_express_is_refused_with_its_reason(tmp_path):
    config = transformers.LlamaConfig(**{**LLAMA, "hidden_act": "relu"})
    with pytest.raises(rg.SpecError, match="the activation 'relu', which a spec cannot express"):
        rg.from_huggingface(transformers.LlamaForCausalLM(config))
    deit = transformers.DeiTConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    with pytest.raises(rg.SpecError, match="DeiTModel: only DeiTForImageClassification is converted"):
        rg.from_huggingface(transformers.DeiTModel(deit))
    with pytest.raises(rg.SpecError, match="Linear cannot be converted to a spec"):
        rg.from_huggingface(torch.nn.Linear(2, 2))
    with pytest.raises(rg.FormatError, match=r"has no config.json"):
        rg.from_huggingface(tmp_path)
    module = rg.from_huggingface(theirs("LlamaForCausalLM"))
    with pytest.raises(rg.SpecError, match="make them the same"):
        rg.to_huggingface(module, transformers.LlamaConfig(**{**LLAMA, "num_hidden_layers": 3}))
    with pytest.raises(rg.SpecError, match="give the configuration of the model to make"):
        rg.to_huggingface(rg.preset("tiny-gpt").build())


def test_a_pattern_in_use_is_part_of_the_declaration():
    model = theirs("LlamaForCausalLM")
    pattern = rg.causal() & (rg.window(2) | rg.sinks(1))
    plain = model(IDS).logits
    with rg.use(model, pattern):
        module = rg.from_huggingface(model)
        assert module.spec.block.attention.pattern == pattern
        assert torch.allclose(module(IDS), model(IDS).logits, atol=1e-5)
        assert not torch.allclose(module(IDS), plain, atol=1e-2)
        assert torch.allclose(rg.to_huggingface(module)(IDS).logits, model(IDS).logits, atol=1e-5)
    heads = [pattern, rg.causal(), rg.window(3), pattern]
    with rg.use(model, heads):  # in addition to the model's causal mask
        module = rg.from_huggingface(model)
        assert module.spec.block.attention.pattern == rg.per_head(
            [pattern, rg.causal(), rg.causal() & rg.window(3), pattern]
        )
        assert torch.allclose(module(IDS), model(IDS).logits, atol=1e-5)
        assert torch.allclose(rg.to_huggingface(module)(IDS).logits, model(IDS).logits, atol=1e-5)
        with pytest.raises(
            rg.SpecError, match=r"the configuration declares .*causal.*, and the module is .*per_head"
        ):
            rg.to_huggingface(module, transformers.LlamaConfig(**LLAMA))
    with (
        rg.use(model, {0: pattern}),
        pytest.raises(rg.SpecError, match="layers of this model have different patterns"),
    ):
        rg.from_huggingface(model)

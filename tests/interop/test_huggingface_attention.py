"""attn_implementation="regard" equals eager; the law of packed documents holds; nothing is n × m."""

import warnings

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, BertConfig, BertModel, T5Config, T5Model

import regard as rg
from regard.interop import huggingface, patterned
from regard.interop.huggingface import attention, registration

SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 2048}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LEFT = torch.ones(3, 13, dtype=torch.long)
LEFT[0, :5] = LEFT[2, :2] = 0
IDS = torch.randint(3, 61, (3, 13), generator=torch.Generator().manual_seed(0))


def causal_model(kind="Llama", **options):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **HEADS, **TOKENS, **options)
    return AutoModelForCausalLM.from_config(config, attn_implementation="regard").eval()


def with_eager(model, run):
    """What run(model) gives by "regard" and by "eager"."""
    ours = run(model)
    model.set_attn_implementation("eager")
    theirs = run(model)
    model.set_attn_implementation("regard")
    return ours, theirs


def relative(a, b):
    return float(((a - b).abs().max() / b.abs().max()).detach())


@pytest.mark.parametrize(
    "kind, options",
    [
        ("Llama", {}),
        ("Mistral", {"sliding_window": 4}),
        ("Gemma2", {"sliding_window": 4, "attn_logit_softcapping": 0.5}),
        ("GptOss", {"sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 1}),
    ],
)
def test_logits_gradients_and_tokens_equal_eager(kind, options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # YaRN's factor of the small configuration
        model = causal_model(kind, **options)

    def run(model):
        outs = []
        for mask in (None, LEFT, LEFT.flip(-1)):
            logits = model(IDS, attention_mask=mask).logits
            outs.append(logits if mask is None else logits[mask.bool()])
        model.zero_grad()
        outs[1].square().mean().backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        tokens = model.generate(IDS, attention_mask=LEFT, max_new_tokens=6, do_sample=False, num_beams=2)
        return outs, grads, tokens

    ours, theirs = with_eager(model, run)
    assert max(relative(a, b) for a, b in zip(ours[0], theirs[0])) < 1e-5
    assert ours[1].keys() == theirs[1].keys()
    largest = max(float(g.abs().max()) for g in theirs[1].values())
    assert max(float((ours[1][k] - g).abs().max()) for k, g in theirs[1].items()) < 1e-5 * largest
    assert torch.equal(ours[2], theirs[2])


def test_encoders_and_cross_attention_equal_eager():
    torch.manual_seed(0)
    bert = BertModel(BertConfig(**SIZES, num_attention_heads=4, attn_implementation="regard")).eval()
    ours, theirs = with_eager(bert, lambda m: m(IDS, attention_mask=LEFT).last_hidden_state)
    assert relative(ours, theirs) < 1e-5
    t5 = T5Model(T5Config(vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)).eval()
    t5.set_attn_implementation("regard")
    given = {"attention_mask": LEFT, "decoder_input_ids": IDS[:, :7]}
    ours, theirs = with_eager(t5, lambda m: m(IDS, **given).last_hidden_state)
    assert relative(ours, theirs) < 1e-5


def test_weights_are_returned_where_they_are_requested():
    model = causal_model()
    ours, theirs = with_eager(model, lambda m: m(IDS, output_attentions=True).attentions)
    assert all(a.shape == (3, 4, 13, 13) for a in ours)
    assert max(relative(a, b) for a, b in zip(ours, theirs)) < 1e-5
    assert model(IDS).attentions is None


def test_dropout_reaches_the_weights():
    model = causal_model(attention_dropout=0.5)
    still = model(IDS).logits
    model.train()
    torch.manual_seed(1)
    first = model(IDS).logits
    torch.manual_seed(2)
    second = model(IDS).logits
    assert not torch.allclose(first, second)
    assert not torch.allclose(first, still)


@pytest.mark.ledger("S1.Q3a.5")
@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "GPT2"])
def test_packed_documents_are_isolated_although_a_mask_of_ones_is_given(kind):
    model = causal_model(kind)
    positions = torch.cat([torch.arange(6), torch.arange(7)])[None]
    changed = IDS.clone()
    changed[:, :6] = 7
    given = {"position_ids": positions.expand(3, -1), "attention_mask": torch.ones_like(IDS)}
    a, b = (model(ids, **given).logits[:, 6:] for ids in (IDS, changed))
    assert torch.equal(a, b)
    assert relative(a, model(IDS[:, 6:]).logits) < 1e-5
    ours, theirs = with_eager(model, lambda m: m(IDS, **given).logits[:, 6:])
    assert relative(ours, theirs) > 1e-3  # eager lets the second document see the first


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_as_near_to_float32_as_eager_is(dtype):
    model = causal_model()

    def run(model):
        model.zero_grad()
        logits = model(IDS, attention_mask=LEFT).logits[LEFT.bool()]
        logits.float().square().mean().backward()
        gradients = [p.grad.float().flatten() for p in model.parameters() if p.grad is not None]
        return logits.detach(), torch.cat(gradients)

    exact = run(model)
    ours, theirs = with_eager(model.to(dtype), run)
    assert ours[0].dtype == theirs[0].dtype == dtype
    for found, plain, wanted in zip(ours, theirs, exact):
        error = relative(plain.float(), wanted)
        assert 1e-5 < error < 0.1
        assert relative(found.float(), wanted) < 2 * error


def test_sampled_tokens_equal_those_of_eager():
    def run(model):
        torch.manual_seed(3)
        return model.generate(IDS, attention_mask=LEFT, max_new_tokens=8, do_sample=True, top_k=20)

    ours, theirs = with_eager(causal_model(), run)
    assert torch.equal(ours, theirs)


def test_gradients_of_a_checkpointed_model_equal_those_without():
    model = causal_model().train()

    def gradients():
        model.zero_grad()
        model(IDS, attention_mask=LEFT, use_cache=False).logits[LEFT.bool()].square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain = gradients()
    model.gradient_checkpointing_enable()
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients(), strict=True))


class Paged:
    """As the cache of continuous batching: `update` is called by the attention, and returns the keys of all."""

    def __init__(self, k, v):
        self.k, self.v = k, v

    def update(self, key_states, value_states, layer_idx, kwargs):
        return torch.cat([self.k, key_states], 2), torch.cat([self.v, value_states], 2)


def test_a_paged_cache_is_updated_by_the_attention_and_its_table_is_honored():
    module = causal_model().model.layers[1].self_attn
    q, k, v = (torch.randn(1, h, 5, 8, generator=torch.Generator().manual_seed(h)) for h in (4, 2, 2))
    table = torch.rand(1, 1, 3, 5, generator=torch.Generator().manual_seed(0)) < 0.6
    table[..., 0] = True
    o, _ = attention.attend(
        module, q[:, :, 2:], k[:, :, 2:], v[:, :, 2:], table, cache=Paged(k[:, :, :2], v[:, :, :2])
    )
    expected = torch.nn.functional.scaled_dot_product_attention(q[:, :, 2:], k, v, table, enable_gqa=True)
    assert torch.allclose(o.transpose(1, 2), expected, atol=1e-6)


def test_cu_seq_lens_are_documents_too():
    model = causal_model()
    given = {"cu_seq_lens_q": torch.tensor([0, 6, 13]), "cu_seq_lens_k": torch.tensor([0, 6, 13])}
    positions = torch.cat([torch.arange(6), torch.arange(7)])[None]
    packed = model(IDS[:1], position_ids=positions, use_cache=False, **given).logits[:, 6:]
    assert relative(packed, model(IDS[:1, 6:]).logits) < 1e-5


def largest_allocation(run):
    """The most bytes that one allocation takes while run() runs, as PyTorch's allocator reports it."""
    run()  # plans and prepared calls
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as seen:
        run()
    return max(e.nbytes() for e in seen.profiler.kineto_results.events() if e.name() == "[memory]")


@pytest.mark.parametrize("case", ["causal", "sliding", "left padding", "right padding", "packed", "cached"])
def test_no_table_of_queries_by_keys_is_allocated(case):
    n = 1024
    model = causal_model("Mistral", sliding_window=64) if case == "sliding" else causal_model()
    ids = torch.randint(3, 61, (1, n), generator=torch.Generator().manual_seed(0))
    given = {}
    if "padding" in case:
        mask = torch.ones_like(ids)
        mask[:, slice(100) if case == "left padding" else slice(-100, None)] = 0
        given["attention_mask"] = mask
    if case == "packed":
        given["position_ids"] = torch.cat([torch.arange(400), torch.arange(n - 400)])[None]
    given["use_cache"] = case == "cached"
    with torch.no_grad():
        assert largest_allocation(lambda: model.model(ids, **given)) < n * n  # bytes of a bool table
        model.set_attn_implementation("eager")
        assert (
            largest_allocation(lambda: model.model(ids, **given)) >= 4 * n * n
        )  # the measure sees such tables


def test_explain_says_what_ran_and_names_a_table():
    model = causal_model()
    [first, _] = huggingface.explain(model, IDS)
    assert first.pattern == "causal()"
    assert "sdpa, dense" in first.how
    table = torch.rand(3, 1, 13, 13, generator=torch.Generator().manual_seed(0)) > 0.4
    [first, _] = huggingface.explain(model, IDS, attention_mask=table | torch.eye(13).bool())
    assert first.pattern == "table"
    assert "the model gave a table" in first.how
    [first, _] = huggingface.explain(model, IDS, output_attentions=True)
    assert first.how == "dense formula, because of output_attentions"
    model.set_attn_implementation("eager")
    with pytest.raises(rg.SpecError, match='does not use "regard"'):
        huggingface.explain(model, IDS)


def test_explain_of_a_compiled_model_says_what_it_says_of_the_model():
    model = causal_model()
    expected = huggingface.explain(model, IDS)
    model.compile(backend="eager")  # the graph records nothing; traced, the calls would not be those that run
    assert huggingface.explain(model, IDS) == expected


def test_an_argument_that_changes_the_weights_is_never_lost():
    layer = causal_model().model.layers[0].self_attn
    q, k = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    with pytest.raises(rg.SpecError, match=r"gives relative_bias=…, which \"regard\" does not know"):
        attention.attend(layer, q, k, k, None, relative_bias=torch.zeros(1))
    with pytest.raises(rg.SpecError, match="is 1 'may attend', or is it added to the scores"):
        attention.attend(layer, q, k, k, torch.ones(1, 1, 5, 5, dtype=torch.long))
    with pytest.raises(rg.SpecError, match="gives temperature=…"):
        attention.attend(layer, q, k, k, None, temperature=2.0)
    with pytest.raises(rg.ShapeError, match="3 key heads do not divide 4 query heads"):
        attention.attend(layer, q, torch.randn(1, 3, 5, 8), torch.randn(1, 3, 5, 8), None)


def test_q_k_and_v_get_one_dtype_and_one_batch():
    layer = causal_model().model.layers[0].self_attn
    tensors = {
        "query": torch.randn(1, 4, 5, 8),
        "key": torch.randn(1, 2, 5, 8),
        "value": torch.randn(1, 2, 5, 8),
    }
    expected, _ = attention.attend(layer, *tensors.values(), None)
    for name, x in tensors.items():
        o, _ = attention.attend(layer, *(tensors | {name: x.double()}).values(), None)
        assert o.dtype == torch.float64 and torch.allclose(o.float(), expected, atol=1e-5)
        o, _ = attention.attend(layer, *(tensors | {name: x.expand(2, -1, -1, -1)}).values(), None)
        assert o.shape[0] == 2 and torch.allclose(o, expected.expand(2, -1, -1, -1), atol=1e-5)
        with pytest.raises(rg.ShapeError, match=rf"{name} has shape \(\d, 5, 8\); \(batch, heads"):
            attention.attend(layer, *(tensors | {name: x[0]}).values(), None)


@pytest.mark.parametrize("kind", ["GptOss", "T5"])
def test_heads_with_patterns_of_their_own_keep_their_sinks_and_biases(kind):
    patterns = [rg.window(3), rg.every(2) | rg.window(0), rg.window(1), rg.window(3)]
    if kind == "T5":
        torch.manual_seed(0)
        sizes = {"vocab_size": 61, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
        model = T5Model(T5Config(**sizes, attn_implementation="regard")).eval().encoder
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # YaRN's factor of the small configuration
            model = causal_model(kind, sliding_window=64, num_local_experts=2, num_experts_per_tok=1)
        patterns[1] = patterns[0]  # one for each key head
        patterns[3] = patterns[2]
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks)
    tables = torch.stack([p.allowed(13) for p in patterns])
    tables = tables if kind == "T5" else tables & rg.causal().allowed(13)
    added = (
        torch.zeros(tables.shape).masked_fill_(~tables, torch.finfo(torch.float32).min).expand(3, -1, -1, -1)
    )
    with torch.no_grad():
        plain = model(IDS)[0]
        with rg.use(model, patterns):
            ours = model(IDS)[0]
        theirs = with_eager(model, lambda m: m(IDS, attention_mask=added)[0])[1]
    assert relative(ours, theirs) < 1e-5 < 1e-3 < relative(ours, plain)


def test_a_float_mask_that_hides_a_whole_row_has_the_gradients_of_eager():
    """PyTorch's fused operation gives others; such rows are at the padding of TimesFM, for example."""
    model = causal_model()
    mask = torch.full((3, 1, 13, 13), torch.finfo(torch.float32).min).triu(1)
    mask[1, :, :4] = torch.finfo(torch.float32).min

    def gradients(name):
        model.set_attn_implementation(name)
        model.zero_grad()
        model(IDS, attention_mask=mask).logits.square().mean().backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = gradients("eager")
    largest = max(g.abs().max() for g in expected)
    assert max(float((a - b).abs().max() / largest) for a, b in zip(gradients("regard"), expected)) < 1e-5


def test_a_cache_that_does_not_say_how_many_keys_it_returns_is_an_error():
    class Silent(transformers.DynamicCache):
        def get_mask_sizes(self, query_length, layer_idx):
            return query_length, 0

    model, cache = causal_model(), Silent()
    model(IDS[:, :5], past_key_values=cache)
    with pytest.raises(
        rg.ShapeError, match=r"the mask is for 3 keys and there are 8. The cache does not say"
    ):
        model(IDS[:, 5:8], past_key_values=cache)


def test_another_version_of_transformers_is_warned_about(monkeypatch):
    monkeypatch.setattr(registration, "TESTED", "4.7")
    with pytest.warns(
        UserWarning, match=rf"transformers {transformers.__version__}: regard was tested with 4.7"
    ):
        huggingface.register()


def test_a_layer_without_a_mask_attends_everywhere_as_in_eager_unless_the_call_says_causal():
    layer = causal_model().model.layers[0].self_attn
    assert layer.is_causal
    q, k = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    _, weights = attention.attend(layer, q, k, k, None, output_attentions=True)
    assert bool((weights > 0).all())
    _, weights = attention.attend(layer, q, k, k, None, output_attentions=True, is_causal=True)
    assert torch.equal(weights[0, 0] > 0, rg.causal().allowed(5))


def test_a_model_with_its_own_attention_keeps_it_and_says_so():
    config = transformers.BloomConfig(vocab_size=61, hidden_size=8, n_layer=1, n_head=2)
    with pytest.warns(UserWarning, match="BloomModel: BloomAttention does not go through the registry"):
        bloom = transformers.BloomModel._from_config(config, attn_implementation="regard").eval()
    assert bloom.config._attn_implementation == "eager"
    given = {"attention_mask": LEFT.flip(-1)}
    expected = transformers.BloomModel(config).eval()
    expected.load_state_dict(bloom.state_dict())
    assert torch.equal(bloom(IDS, **given).last_hidden_state, expected(IDS, **given).last_hidden_state)
    message = "FalconModel: FalconAttention does not go .* packed documents are separated only if"
    with pytest.warns(UserWarning, match=message):
        config = transformers.FalconConfig(
            vocab_size=61, hidden_size=8, num_hidden_layers=1, num_attention_heads=2
        )
        transformers.FalconModel._from_config(config, attn_implementation="regard")


def test_attention_computed_in_another_method_than_forward_is_named_too():
    config = transformers.GPTJConfig(
        vocab_size=61, n_embd=8, n_layer=1, n_head=2, rotary_dim=4, n_positions=32
    )
    with pytest.warns(UserWarning, match="GPTJModel: GPTJAttention does not go through the registry"):
        model = transformers.GPTJModel._from_config(config, attn_implementation="regard")
    assert model.config._attn_implementation == "eager"


def test_attention_written_with_operators_is_found_by_its_softmax():
    class OwnAttention(torch.nn.Module):
        def forward(self, q, k, v):
            return (q @ k.mT).softmax(-1) @ v

    class OwnModel(transformers.PreTrainedModel):
        config_class = transformers.BloomConfig

        def __init__(self, config):
            super().__init__(config)
            self.attention = OwnAttention()
            self.post_init()

    with pytest.warns(UserWarning, match="OwnModel: OwnAttention does not go through the registry"):
        model = OwnModel._from_config(transformers.BloomConfig(), attn_implementation="regard")
    assert model.config._attn_implementation == "eager"


def test_branches_of_a_tree_with_depths_as_positions_are_what_they_are_alone():
    """As docs/patterns.md says: two answers to one prompt of three tokens, in one row."""
    model, tree = causal_model(), rg.tree(torch.tensor([-1, 0, 1, 2, 3, 2, 5]))
    depths, ids = tree.allowed(7).sum(-1) - 1, IDS[:1, -7:]
    packed = model(ids, attention_mask=tree.allowed(7)[None, None], position_ids=depths[None]).logits
    second = ids[:, [0, 1, 2, 5, 6]]
    torch.testing.assert_close(packed[:, :5], model(ids[:, :5]).logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(packed[:, 5:], model(second).logits[:, 3:], rtol=1e-4, atol=1e-5)
    by_rows = model(ids, attention_mask=tree.allowed(7)[None, None]).logits
    assert not torch.allclose(by_rows[:, 5:], packed[:, 5:], atol=1e-4)


def test_only_the_keys_that_an_indexer_selects_are_attended():
    layer = causal_model().model.layers[0].self_attn
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    table = rg.causal().allowed(5)[None, None].expand(2, 1, -1, -1)
    indices = torch.tensor([[0, 3], [1, 0], [0, 2], [3, -1], [2, 4]]).expand(2, -1, -1)
    _, weights = attention.attend(layer, q, k, k, table, output_attentions=True, indices=indices)
    expected = torch.zeros(5, 5).bool()
    for i, j in ((0, 0), (1, 0), (1, 1), (2, 0), (2, 2), (3, 3), (4, 2), (4, 4)):
        expected[i, j] = True
    assert torch.equal(weights[1, 3] > 0, expected)


SAM = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 4}
SAM |= {"mlp_dim": 16, "output_channels": 8, "window_size": 2, "global_attn_indexes": [1]}


def test_a_dictionary_of_attention_classes_gets_one_that_runs_by_regard(monkeypatch):
    torch.manual_seed(0)
    given, config, made = torch.randn(2, 3, 16, 16), transformers.SamVisionConfig, transformers.SamVisionModel
    model = made._from_config(config(**SAM), attn_implementation="regard").eval()
    twin = made._from_config(config(**SAM), attn_implementation="eager").eval()
    for p in model.parameters():
        p.data.add_(torch.randn_like(p), alpha=0.1)  # tables of relative positions begin at zero
    twin.load_state_dict(model.state_dict())
    calls, computed = [], patterned.sdpa_with_pattern
    monkeypatch.setattr(patterned, "sdpa_with_pattern", lambda *a, **k: calls.append(1) or computed(*a, **k))
    ours = model(given).last_hidden_state
    assert len(calls) == 2
    assert relative(ours, twin(given).last_hidden_state) < 1e-5
    assert len(calls) == 2


def step_after_a_full_window(cache, prepare=lambda model: model):
    """Logits of the last token: from a sliding cache that no longer has the first keys, and without a cache.

    The pattern names positions, which count from the first real token, not from the first key of the cache.
    """
    model = causal_model("Mistral", sliding_window=7)
    rg.use(model, rg.causal() & (rg.window(1) | rg.every(4)))
    past = cache(model.config)
    with torch.no_grad():
        expected = model(IDS, attention_mask=LEFT, use_cache=False).logits[:, -1:]
        model(IDS[:, :12], attention_mask=LEFT[:, :12], past_key_values=past)
        step = prepare(model)(IDS[:, 12:], attention_mask=LEFT, past_key_values=past)
    return step.logits, expected


CACHES = {
    "dynamic": lambda config: transformers.DynamicCache(config=config),
    "static": lambda config: transformers.StaticCache(config=config, max_cache_len=16),
}


@pytest.mark.parametrize("cache", CACHES)
def test_a_pattern_that_names_positions_is_right_after_a_sliding_cache_has_dropped_keys(cache):
    ours, expected = step_after_a_full_window(CACHES[cache])
    assert relative(ours, expected) < 1e-5


@pytest.mark.compiled
def test_a_compiled_step_counts_positions_as_eager_does_after_a_sliding_cache_has_dropped_keys():
    ours, expected = step_after_a_full_window(
        CACHES["static"], lambda model: torch.compile(model, backend="eager")
    )
    assert relative(ours, expected) < 1e-5


@pytest.mark.compiled
@pytest.mark.long
def test_a_compiled_model_and_a_static_cache_equal_eager():
    model = causal_model()
    with torch.no_grad():
        expected = model(IDS).logits
        compiled = torch.compile(model, fullgraph=True)
        assert relative(compiled(IDS, use_cache=False).logits, expected) < 1e-5
    tokens = model.generate(IDS, attention_mask=LEFT, max_new_tokens=5, do_sample=False)
    static = model.generate(
        IDS, attention_mask=LEFT, max_new_tokens=5, do_sample=False, cache_implementation="static"
    )
    assert torch.equal(tokens, static)

"""Each adapter translates all that it claims; `adapt` chooses it, or explains how to write one."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard as rg
from long_cases import in_long
from regard.errors import SpecError
from regard.laws import Budget, adapters, law, try_law
from regard.laws.adapters import adapt, small_specs
from regard.laws.adapters.hugging_face import padding_mask, reduced
from regard.laws.declared_counts import counts_of
from regard.laws.target import Function, Model
from regard.nn.stack import document_positions

FEW = Budget(cases=6)
LENGTHS = torch.tensor([3, 5])


def tensors(n=5, m=5, h=2, h_kv=2, d=4):
    g = torch.Generator().manual_seed(0)
    draw = lambda *s: torch.randn(*s, generator=g, dtype=torch.float64)  # noqa: E731
    return draw(2, h, n, d), draw(2, h_kv, m, d), draw(2, h_kv, m, d)


FUNCTIONS = {
    "sdpa": adapters.sdpa,
    "flex": adapters.flex,
    "finfo.min": adapters.sdpa_finfo_min,
    "regard": adapters.regard_function,
}


def masks(n=5, share=0.5, lengths=LENGTHS, ids=((0, 0, 1, 1, 1), (0, 1, 1, 1, 2))):
    """option → its keyword arguments and the same as a table."""
    i, j, ids = torch.arange(n)[:, None], torch.arange(n), torch.tensor(ids)
    table = (torch.rand(2, 2, n, n, generator=torch.Generator().manual_seed(1)) < share) | (i == j)
    return {
        "mask": ({"allowed": table}, table),
        "causal": ({"causal": True}, j <= i),
        "lengths": ({"lengths": lengths}, (j < lengths[:, None, None, None]).expand(2, 1, n, n)),
        "documents": ({"documents": ids}, ids[:, None, :, None] == ids[:, None, None, :]),
        "window": ({"window": (2, 1)}, (i - j <= 2) & (j - i <= 1)),
    }


def inputs_for(target, n=5):
    dtype = torch.float64 if target.declares("float64") else torch.float32
    return tuple(x.to(dtype) for x in tensors(n, n))


# Each call of FlexAttention without torch.compile takes most of a second.
@pytest.mark.parametrize(
    "name", ["sdpa", pytest.param("flex", marks=pytest.mark.long), "finfo.min", "regard"]
)
def test_a_function_equals_the_reference_for_every_option_it_claims(name):
    target = FUNCTIONS[name]()
    q, k, v = inputs_for(target)
    tried = 0
    for word, (options, allowed) in masks().items():
        if word in target.claims:
            want = rg.reference.attend(q, k, v, allowed).o
            torch.testing.assert_close(target.call(q, k, v, **options), want, msg=word)
            tried += 1
    assert tried >= 1
    if "lse" in target.claims:
        _, lse = target.call(q, k, v, lse=True)
        torch.testing.assert_close(lse, rg.reference.attend(q, k, v).lse)


def test_flex_combines_all_masks_with_bias_scale_and_log_sum_exp():
    target = adapters.flex()
    q, k, v = inputs_for(target, 7)
    options, allowed = {"scale": 0.3, "bias": torch.randn(7, 7)}, torch.ones(2, 2, 7, 7, dtype=torch.bool)
    documents = ((0, 0, 0, 0, 0, 1, 1), (0, 1, 1, 1, 1, 1, 1))
    for keywords, table in masks(7, 0.9, torch.tensor([6, 5]), documents).values():
        assert not (allowed <= table).all()  # each mask excludes a pair that those before it allow
        options, allowed = options | keywords, allowed & table
    o, lse = target.call(q, k, v, **options, lse=True)
    right = rg.reference.attend(q, k, v, allowed, bias=options["bias"], scale=0.3)
    rows = allowed.any(-1)
    assert rows.sum() > 10
    torch.testing.assert_close(o[rows], right.o[rows])
    torch.testing.assert_close(lse[rows], right.lse[rows])


def test_a_bias_with_a_mask_reaches_sdpa_as_one():
    q, k, v = tensors()
    bias, allowed = torch.randn(5, 5, dtype=torch.float64), torch.ones(5, 5, dtype=torch.bool).tril()
    got = adapters.sdpa().call(q, k, v, bias=bias, allowed=allowed)
    torch.testing.assert_close(got, rg.reference.attend(q, k, v, allowed, bias=bias).o)


def decoder(**more):
    block = rg.Block(
        rg.Attention(16, heads=4, pattern=rg.causal()), rg.FeedForward(32), norm_at="pre", **more
    )
    return rg.Decoder(
        block, 2, embedding=rg.Embedding(31, 16, position=rg.learned(64)), head=rg.LanguageHead()
    )


def translator():
    embedding = rg.Embedding(31, 16, position=rg.sinusoidal())
    plain, past = rg.Attention(16, heads=4), rg.Attention(16, heads=4, pattern=rg.causal())
    return rg.EncoderDecoder(
        rg.Encoder(rg.Block(plain, rg.FeedForward(32)), 2, embedding=embedding),
        rg.Decoder(
            rg.Block(past, rg.FeedForward(32), cross=plain), 2, embedding=embedding, head=rg.LanguageHead()
        ),
    )


def vision():
    block = rg.Block(rg.Attention(16, heads=4), rg.FeedForward(32), norm_at="pre")
    return rg.Vision(rg.Encoder(block, 2), image=(8, 8), patch=(4, 4))


def hf(config):
    def make():
        transformers = pytest.importorskip("transformers")
        return adapters.hugging_face(getattr(transformers, config)())

    return make


def x(kind):
    def make():
        pytest.importorskip("x_transformers")
        return adapters.x_transformers(kind=kind)

    return make


MODELS = {
    "nn.MultiheadAttention": adapters.multihead_attention,
    "nn.TransformerEncoder": adapters.transformer_encoder,
    "nn.TransformerDecoder": adapters.transformer_decoder,
    "nn.Transformer": adapters.transformer,
    "regard.Attention": lambda: adapt(rg.Attention(16, heads=4, kv_heads=2)),
    "regard.Block": lambda: adapt(rg.Block(rg.Attention(16, heads=4), rg.FeedForward(32), norm_at="pre")),
    "regard.Decoder": lambda: adapt(decoder()),
    "regard.EncoderDecoder": lambda: adapt(translator()),
    "regard.Vision": lambda: adapt(vision()),
    **{f"transformers {c}": hf(f"{c}Config") for c in ("Bert", "GPT2", "Llama", "T5", "Marian", "ViT")},
    **{f"x_transformers {k}": x(k) for k in ("attention", "encoder", "decoder", "tokens")},
}


def draw(target, n, seed):
    g = torch.Generator().manual_seed(seed)
    if target.image is not None:
        return torch.randn(2, *target.image, generator=g)
    if target.vocab is not None:
        return torch.randint(4, target.vocab, (2, n), generator=g)
    return torch.randn(2, n, target.d_model, generator=g)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_accepts_every_option_it_claims(name):
    target = MODELS[name]()
    module = target.module.eval()
    given = (draw(target, 5, 0), draw(target, 6, 1)) if "context" in target.claims else (draw(target, 5, 0),)
    if target.architecture == "attention":
        given = given[:1]
    keywords = {
        "mask": {"allowed": torch.ones(2, 5, 5, dtype=torch.bool).tril()},
        "causal": {"causal": True},
        "lengths": {"lengths": LENGTHS},
        "documents": {"documents": torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 1, 2]])},
        "left padding": {"left_padding": torch.tensor([0, 2])},
        "shift": {"shift": 3},
    }
    if target.architecture != "attention":
        keywords["context lengths"] = {"context_lengths": LENGTHS}
    with torch.no_grad():
        plain = target.call(module, *given)
        for word in sorted(target.claims & set(keywords)):
            out = target.call(module, *given, **keywords[word])
            assert out.shape == plain.shape and out.isfinite().all(), word
        if "cache" in target.claims:
            cache = target.make_cache(module, 2, *given[1:])
            steps = [target.decode(module, given[0][:, i:j], cache) for i, j in ((0, 2), (2, 3), (3, 5))]
            torch.testing.assert_close(torch.cat(steps, 1), plain, atol=1e-5, rtol=1e-5)
        if "causal" in target.claims and "mask" in target.claims:
            torch.testing.assert_close(
                target.call(module, *given, causal=True), target.call(module, *given, **keywords["mask"])
            )
        if "weights" in target.claims:
            _, weights = target.call(module, *given, weights=True)
            torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))


def test_adapters_build_the_same_module_and_keep_the_random_state():
    torch.manual_seed(3)
    first = torch.rand(1)
    torch.manual_seed(3)
    a, b = adapters.multihead_attention().module, adapters.multihead_attention().module
    assert torch.equal(torch.rand(1), first)
    assert torch.equal(a.in_proj_weight, b.in_proj_weight)


def test_the_projections_are_views_of_the_parameters():
    for target in (
        adapters.multihead_attention(),
        adapt(rg.Attention(16, heads=4, kv_heads=2, biases="none")),
    ):
        with torch.no_grad():
            views = target.projections(target.module)
            assert views.w_q.shape == (4, 16, 4) and views.w_o.shape == (4, 4, 16)
            views.w_q.zero_()
        used = getattr(target.module, "in_proj_weight", None)
        used = target.module.w_q.weight if used is None else used[:16]
        assert (used == 0).all()


def test_adapt_finds_the_adapter_of_what_it_is_given():
    from torch.nn.attention.flex_attention import flex_attention

    assert adapt(F.scaled_dot_product_attention).name == "torch.nn.functional.scaled_dot_product_attention"
    assert adapt(flex_attention).name == "torch.nn.attention.flex_attention"
    assert adapt(rg.attention).name == "regard.attention"
    assert adapt(nn.MultiheadAttention, heads=2, d_model=8).heads == 2
    assert adapt(nn.MultiheadAttention(8, 2)).d_model == 8
    assert adapt(nn.Transformer, layers=1).architecture == "encoder-decoder"
    assert adapt(decoder().build()).vocab == 31
    mine = Function("mine", F.scaled_dot_product_attention)
    assert adapt(mine) is mine
    assert "empty rows" in adapt(mine, claims={"empty rows"}).claims
    assert "grad" in adapt(mine, lacks={"grad"}).lacks


def test_a_module_with_positions_first_is_transposed():
    x = torch.randn(3, 5, 8)
    first, last = nn.MultiheadAttention(8, 2), nn.MultiheadAttention(8, 2, batch_first=True)
    last.load_state_dict(first.state_dict())
    a, b = adapt(first), adapt(last)
    options = {"lengths": torch.tensor([1, 3, 5]), "allowed": torch.ones(3, 5, 5, dtype=torch.bool).tril()}
    torch.testing.assert_close(a.call(first, x, **options), b.call(last, x, **options))
    layers = [nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=f) for f in (False, True)]
    stacks = [nn.TransformerEncoder(layer, 2, enable_nested_tensor=False) for layer in layers]
    stacks[1].load_state_dict(stacks[0].state_dict())
    a, b = (adapt(s).call(s, x, **options) for s in stacks)
    torch.testing.assert_close(a, b)


def my_attention(q, k, v, attn_mask=None, is_causal=False, scale=None):
    return F.scaled_dot_product_attention(q, k, v, attn_mask, 0.0, is_causal, scale=scale)


def test_a_function_of_usual_names_needs_no_adapter():
    target = adapt(my_attention)
    assert target.claims == {"mask", "causal", "scale"} and target.name == "my_attention"
    q, k, v = tensors()
    allowed = torch.ones(5, 5, dtype=torch.bool).tril()
    torch.testing.assert_close(target.call(q, k, v, allowed=allowed), target.call(q, k, v, causal=True))
    assert target.source == f"adapters.adapt({__name__}.my_attention)"
    assert adapt(lambda q, k, v: v).source is None
    assert try_law(law("L29"), target, FEW).status == "holds"


class Mine(nn.Module):
    def __init__(self, num_heads=2, embed_dim=8):
        super().__init__()
        self.inner = nn.MultiheadAttention(embed_dim, num_heads, batch_first=True)
        self.embed_dim = embed_dim

    def forward(self, x, key_padding_mask=None):
        return self.inner(x, x, x, key_padding_mask=key_padding_mask)


class Words(nn.Module):
    causal = True

    def __init__(self):
        super().__init__()
        self.table, self.inner = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, input_ids):
        return self.inner(self.table(input_ids))


def test_a_module_of_usual_names_needs_no_adapter():
    target = adapt(Mine, heads=4, d_model=16)
    assert (target.d_model, target.architecture, "lengths" in target.claims) == (16, "attention", True)
    assert try_law(law("L31"), target, FEW).status == "holds"
    words = adapt(Words())
    assert (words.vocab, words.architecture) == (11, "decoder") and "always causal" in words.claims
    assert try_law(law("L29"), words, FEW).status == "holds"


class Odd(nn.Module):
    def forward(self, a):
        return a


def needing(q, k, v, table):
    return v


@pytest.mark.parametrize(
    ("thing", "sizes", "message"),
    [
        (
            3,
            {},
            r"int: expected attention\(q, k, v\), an nn\.Module or a spec; or write an adapter: regard\.laws\.",
        ),
        (str, {}, r"str is a class, but neither an nn\.Module nor a spec; write an adapter"),
        (abs, {"heads": 2}, r"abs is already built; heads can only be given for a class"),
        (lambda q: q, {}, r"<lambda>\(q\): expected attention\(q, k, v\), an nn\.Module, or an adapter"),
        (needing, {}, r"needing requires table, which the laws do not pass; write an adapter"),
        (Odd(), {}, r"Odd: cannot determine the input of forward\(a\); write an adapter"),
        (
            Mine,
            {"layers": 2},
            r"Mine\(layers\): .*unexpected keyword argument 'layers'; it takes num_heads, embed_dim",
        ),
        (
            rg.FeedForward(8),
            {},
            r"FeedForward is a part of a model; it is built by the block or the model that contains it",
        ),
    ],
)
def test_what_cannot_be_adapted_gets_a_message_with_the_fix(thing, sizes, message):
    with pytest.raises(SpecError, match=message):
        adapt(thing, **sizes)


def test_a_configuration_is_reduced_in_size_without_dropout():
    transformers = pytest.importorskip("transformers")
    config, note = reduced(transformers.GPT2Config())
    assert (config.n_layer, config.n_embd, config.vocab_size, config.resid_pdrop) == (2, 32, 61, 0.0)
    assert note == ", reduced in size"
    tiny = transformers.GPT2Config(
        n_layer=1, n_embd=8, n_head=2, vocab_size=13, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    assert reduced(tiny)[1] == "" and reduced(tiny)[0].n_embd == 8
    rebuilt = eval(adapters.hugging_face(tiny).source, {"adapters": adapters, "transformers": transformers})
    assert (rebuilt.vocab, rebuilt.layers) == (13, 1)


def test_positions_start_again_in_each_document():
    ids = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 2, 2, 2]])
    assert document_positions(ids).tolist() == [[0, 1, 0, 1, 2], [0, 0, 0, 1, 2]]
    assert padding_mask(4, torch.tensor([2, 4]), torch.tensor([1, 0]), ids.device).tolist() == [
        [0, 1, 0, 0],
        [1, 1, 1, 1],
    ]


def test_a_pre_norm_stack_with_zero_branches_is_the_identity():
    for target in (MODELS["regard.Block"](), adapters.transformer_encoder(norm_first=True)):
        assert isinstance(target, Model) and target.zero_branches is not None
        target.zero_branches(target.module)
        x = draw(target, 5, 0)
        with torch.no_grad():
            torch.testing.assert_close(target.call(target.module.eval(), x), x)


def test_a_large_spec_is_reduced_and_a_small_one_only_loses_its_dropout():
    cut, note = small_specs.reduced(rg.preset("gpt2"))
    assert note == ", reduced in size" and (cut.layers, cut.d_model, cut.embedding.vocab) == (2, 32, 61)
    assert cut.block.dropout == cut.embedding.dropout == 0.0 and cut.block.attention.pattern == rg.causal()
    unchanged, note = small_specs.reduced(decoder(dropout=0.1))
    assert note == "" and unchanged == decoder()
    grouped, _ = small_specs.reduced(rg.Attention(4096, heads=32, kv_heads=8))
    assert (grouped.heads, grouped.kv_heads) == (4, 1)
    odd = rg.Attention(4096, heads=32, d_k=128, d_v=128, position=rg.rope(fraction=0.3125))
    assert small_specs.reduced(odd) == (odd, "")  # 2.5 of 8 columns cannot be rotated


@pytest.mark.parametrize("name", rg.presets())
def test_every_preset_can_be_checked(name):
    target = adapt(rg.preset(name))
    assert sum(p.numel() for p in target.module.parameters()) < 200_000
    with torch.no_grad():
        given = (
            (draw(target, 5, 0), draw(target, 6, 1)) if "context" in target.claims else (draw(target, 5, 0),)
        )
        assert target.call(target.module.eval(), *given).isfinite().all()


@pytest.mark.parametrize("position", [rg.rope(), *in_long(None, rg.alibi())], ids=repr)
def test_no_law_is_broken_by_heads_with_patterns_of_their_own(position):
    heads = [rg.causal(), rg.causal() & rg.window(2), rg.causal() & (rg.window(0) | rg.every(3)), rg.causal()]
    attention = rg.Attention(16, heads=4, kv_heads=2, pattern=heads, position=position)
    one = rg.Attention(16, heads=4, kv_heads=2, pattern=rg.causal() & rg.window(2), position=position)
    for declared in (attention, rg.Encoder(rg.Block(attention, rg.FeedForward(16)), 2)):
        outcomes = rg.check(declared).outcomes
        assert {"L29", "L33"} <= {
            o.law.number for o in outcomes if o.ran
        }  # causal, and with a cache as without
        assert not [o for o in outcomes if o.status == "broken"]
    assert all(o.ran for o in rg.check(one, ["L29", "L33"]).outcomes)


def test_a_declaration_reduced_in_size_has_each_of_its_patterns():
    windows = [rg.causal() & rg.window(w) for w in (1, 1, 1, 1, 1, 1, 2, 1, 3, 1, 1, 1)]
    small, note = small_specs.reduced(rg.Attention(96, heads=12, kv_heads=6, pattern=windows))
    assert note and small.heads == 4 and small.pattern == rg.per_head([windows[h] for h in (0, 1, 6, 8)])
    same, note = small_specs.reduced(rg.Attention(32, heads=2, pattern=windows[5:7], dropout=0.1))
    assert not note and same == rg.Attention(32, heads=2, pattern=windows[5:7])


def test_windows_of_heads_are_checked_as_the_widest_of_them():
    heads = [rg.causal() & rg.window(1), rg.causal() & rg.window(3)]
    declared = rg.Encoder(rg.Block(rg.Attention(8, heads=2, pattern=heads), None), 2)
    (window,) = rg.check(declared, ["L59"]).outcomes
    assert window.status == "holds"
    mixed = rg.Encoder(rg.Block(rg.Attention(8, heads=2, pattern=[heads[0], rg.causal()]), None), 2)
    (window,) = rg.check(mixed, ["L59"]).outcomes
    assert window.status == "not applicable"


def test_parameters_are_counted_for_heads_with_patterns_of_their_own():
    declared = rg.Attention(12, heads=4, pattern=[rg.causal(), rg.full(), rg.causal(), rg.full()])
    rows = counts_of(declared).call()
    assert [(name, told, found) for name, told, found in rows] == [("parameters", 624, 624)]


@pytest.mark.parametrize("terms", [{"softcap": 0.3}, {"sink_logits": True}, {"extra_key": True}], ids=str)
def test_no_law_is_broken_by_declared_terms_of_the_softmax(terms):
    outcomes = rg.check(rg.Attention(12, heads=3, **terms)).outcomes
    assert not [o.law.number for o in outcomes if o.status in ("broken", "raised")]
    assert {"L46", "L48"} <= {o.law.number for o in outcomes if o.ran}


def test_a_declaration_on_a_grid_is_checked_with_the_positions_of_its_grid():
    attention = rg.Attention(12, heads=2, pattern=rg.neighborhood((3, 5), 3))
    causal = rg.Attention(12, heads=2, pattern=[rg.neighborhood(7, 3, causal=True), rg.causal()])
    model = rg.Encoder(rg.Block(attention, rg.FeedForward(16)), 2)
    for declared, length, ran in ((causal, 7, {"L29", "L46"}), (model, 15, {"L46", "L48"})):
        assert adapt(declared).length == length
        outcomes = rg.check(declared).outcomes
        assert not [o.law.number for o in outcomes if o.status in ("broken", "raised")]
        assert ran <= {o.law.number for o in outcomes if o.ran}

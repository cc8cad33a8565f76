"""Every attention call of any model is recorded, exactly, while the model runs as usual."""

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier, Event

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard as rg
from lens_models import FAMILIES, TWO_SIDED, eager_weights, huggingface, inputs
from regard.lens.intercept import intercept
from regard.lens.view import look


def weights(view, layer):
    call = view.calls[layer]
    return torch.stack([call.weights(batch=b) for b in range(call.b)])


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_weights_of_seven_families_are_those_of_eager_attention(family, implementation):
    pytest.importorskip("transformers")
    given = inputs(family)
    model = huggingface(family, implementation)
    view = look(model, given)
    truth = eager_weights(huggingface(family, "eager"), given)
    assert len(view.calls) == len(truth) and not view.missed
    assert {c.implementation for c in view.calls} == {implementation}
    for layer, w in enumerate(truth):
        assert (weights(view, layer) - w).abs().max() <= 1e-6
    roles = ["self", "self", *["self", "cross"] * 2] if family in TWO_SIDED else ["self", "self"]
    assert [c.role for c in view.calls] == roles


def test_each_call_has_the_path_of_its_module():
    pytest.importorskip("transformers")
    view = look(huggingface("bart", "sdpa"), inputs("bart"))
    assert [c.name for c in view.calls] == [
        "model.encoder.layers.0.self_attn",
        "model.encoder.layers.1.self_attn",
        "model.decoder.layers.0.self_attn",
        "model.decoder.layers.0.encoder_attn",
        "model.decoder.layers.1.self_attn",
        "model.decoder.layers.1.encoder_attn",
    ]


def encoder(norm_first=False, dropout=0.1):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first)


pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # PyTorch's own path
PADDING = torch.tensor([[False] * 5 + [True] * 2, [False] * 7])


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("padding", [None, PADDING])
@pytest.mark.parametrize("causal", [False, True])
def test_pytorchs_encoder_is_recorded_on_every_path_and_not_changed(norm_first, training, padding, causal):
    model = encoder(norm_first).train(training)
    x = torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(2))
    mask = torch.ones(7, 7).triu(1).bool() if causal else None
    given = {"src": x, "src_key_padding_mask": padding, "mask": mask}
    torch.manual_seed(3)
    with torch.no_grad():
        alone = model(**given)
    torch.manual_seed(3)
    outputs = []
    hook = model.register_forward_hook(lambda _m, _a, out: outputs.append(out))
    view = look(model, given)
    hook.remove()
    assert [c.name for c in view.calls] == ["layers.0.self_attn", "layers.1.self_attn"] and not view.missed
    assert {c.implementation for c in view.calls} == {"sdpa" if training else "fast path"}
    if not training:
        assert torch.equal(outputs[0], alone)
    attention, first = model.layers[0].self_attn.train(), model.layers[0].norm1
    attention.dropout = 0.0  # the weights are those before dropout
    x = first(x) if norm_first else x
    with torch.no_grad():
        _, truth = attention(x, x, x, padding, attn_mask=mask, average_attn_weights=False)
    real = ~padding if padding is not None else torch.ones(2, 7, dtype=torch.bool)
    assert (weights(view, 0) - truth)[real[:, None].expand(-1, 2, -1)].abs().max() <= 1e-6


def test_look_does_not_disable_pytorchs_nested_tensor_path():
    """A function mode, or a hook on a module, would: padded rows would no longer come out as zeros."""
    model = encoder().eval()
    outputs = []

    def run(x, padding):
        outputs.append(model(x, src_key_padding_mask=padding))

    view = look(run, (torch.randn(2, 7, 16), PADDING))
    assert outputs[0][0, 5:].abs().max() == 0
    # A nested tensor has no padded rows: they have no weights, and are not counted as uniform ones.
    padded = weights(view, 1)[PADDING[:, None].expand(-1, 2, -1)]
    assert padded.numel() and padded.abs().max() == 0 and view.statistics[1].queries == 12


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_multihead_attention_is_recorded_with_and_without_its_weights(need_weights, training):
    torch.manual_seed(0)
    model = nn.MultiheadAttention(15, 3, batch_first=True).train(training)
    x, y = torch.randn(2, 7, 15), torch.randn(2, 11, 15)
    for key, role in ((x, "self"), (y, "cross")):
        view = look(model, {"query": x, "key": key, "value": key, "need_weights": need_weights})
        with torch.no_grad():
            _, truth = model.train()(x, key, key, average_attn_weights=False)
        assert (weights(view, 0) - truth).abs().max() <= 1e-6
        assert view.calls[0].role == role and view.calls[0].heads == 3


def test_every_attention_of_pytorchs_encoder_decoder_is_recorded():
    model = nn.Transformer(16, 2, 2, 2, 32, batch_first=True).eval()
    view = look(model, (torch.randn(2, 7, 16), torch.randn(2, 5, 16)))
    assert [(c.role, c.n, c.m) for c in view.calls] == [
        ("self", 7, 7),
        ("self", 7, 7),
        ("self", 5, 5),
        ("cross", 5, 7),
        ("self", 5, 5),
        ("cross", 5, 7),
    ]


class Sdpa(nn.Module):
    """q, k and v from one sequence, or k and v from another; `arguments` go to the function."""

    def __init__(self, heads=2, kv_heads=2, **arguments):
        super().__init__()
        self.heads, self.kv_heads, self.arguments = heads, kv_heads, arguments
        self.q, self.kv = nn.Linear(12, 6 * heads), nn.Linear(12, 12 * kv_heads)

    def forward(self, x, y=None):
        y = x if y is None else y
        q = self.q(x).unflatten(-1, (self.heads, 6)).transpose(1, 2)
        k, v = self.kv(y).unflatten(-1, (self.kv_heads, 12)).transpose(1, 2).chunk(2, -1)
        return F.scaled_dot_product_attention(q, k, v, **self.arguments)


MASKS = {
    "nothing": {},
    "causal": {"is_causal": True},
    "bool": {"attn_mask": torch.rand(7, 7, generator=torch.Generator().manual_seed(0)) > 0.4},
    "added": {"attn_mask": torch.randn(2, 1, 7, 7, generator=torch.Generator().manual_seed(0))},
    "scale": {"scale": 0.3},
    "grouped": {"enable_gqa": True},
}


@pytest.mark.parametrize("kind", MASKS)
def test_the_arguments_of_sdpa_determine_the_weights(kind):
    torch.manual_seed(0)
    model = Sdpa(4, 2 if kind == "grouped" else 4, **MASKS[kind]).double()
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    outputs = []
    model.register_forward_hook(lambda _m, _a, out: outputs.append(out))
    view = look(model, x)
    call = view.calls[0]
    assert call.kv_heads == (2 if kind == "grouped" else 4)
    for b in range(2):
        o = call.weights(batch=b) @ call.values(batch=b)
        assert torch.allclose(o, outputs[0][b], atol=1e-12)
        some = call.weights([3, 1], [5, 0], b)
        assert torch.allclose(some, call.weights(batch=b)[[3, 1]][:, [5, 0]], atol=1e-15)


def test_a_function_imported_under_another_name_is_intercepted():
    module = type(sys)("a_module_that_imported_it")
    module.mine = F.scaled_dot_product_attention
    sys.modules[module.__name__] = module
    reference = (
        F.scaled_dot_product_attention
    )  # a reference that no module has: the operator itself is intercepted
    q = torch.randn(1, 2, 7, 5)
    try:
        view = look(lambda q: (module.mine(q, q, q), reference(q, q, q)), q)
    finally:
        del sys.modules[module.__name__]
    assert [c.implementation for c in view.calls] == ["sdpa", "sdpa"]
    assert torch.equal(view.map(0, 1), view.map(1, 1))
    assert F.scaled_dot_product_attention is reference


def test_attention_in_plain_tensor_code_is_recorded():
    def attend(x):
        scores = torch.einsum("bhnd,bhmd->bhnm", x, x).masked_fill(
            torch.ones(7, 7).triu(1).bool(), -torch.inf
        )
        return torch.einsum("bhnm,bhmd->bhnd", scores.softmax(-1), x)

    x = torch.randn(2, 3, 7, 5, generator=torch.Generator().manual_seed(0))
    view = look(attend, x)
    truth = (x @ x.mT).masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf).softmax(-1)
    assert (weights(view, 0) - truth).abs().max() <= 1e-6
    assert view.calls[0].implementation == "eager" and torch.equal(view.calls[0].values(), x[0])
    single = look(lambda x: (x @ x.T).softmax(-1) @ x, x[0, 0])
    assert (single.map(0, 0) - (x[0, 0] @ x[0, 0].T).softmax(-1)).abs().max() <= 1e-6


def test_a_softmax_without_values_is_not_an_attention():
    with pytest.raises(rg.RegardError, match="no attention call was found"):
        look(nn.Sequential(nn.Linear(5, 3), nn.Softmax(-1)), torch.randn(2, 7, 5))


PATTERNS = {
    "causal": (rg.causal(), {}),
    "sparse": (rg.causal() & (rg.window(2) | rg.every(3)), {}),
    "lengths": (None, {"lengths": torch.tensor([5, 7])}),
    "documents": (rg.documents(torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 2, 2]])), {}),
    "alibi": (rg.causal(), {"bias": rg.ByDistance(slopes=torch.tensor([0.5, 0.25, 0.1, 0.0]))}),
    "bias": (None, {"bias": torch.randn(4, 7, 7, generator=torch.Generator().manual_seed(0))}),
    "hard": (rg.causal(), {"scale": torch.inf}),
    "at": (rg.window(1), {"at": torch.tensor([0, 2])}),
    "table": (torch.ones(7, 7).tril().bool(), {}),
    "softcap": (rg.causal(), {"softcap": 0.5}),
    "sink logits": (rg.causal(), {"sink_logits": torch.tensor([0.5, -1.0, 2.0, 0.0])}),
    "left padding": (rg.causal(), {"lengths": torch.tensor([[2, 7], [0, 5]])}),
}


@pytest.mark.parametrize("kind", PATTERNS)
def test_rg_attention_is_recorded_with_all_its_arguments(kind):
    pattern, more = PATTERNS[kind]
    g = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 7, 5, generator=g)
    k, v = torch.randn(2, 2, 2, 7, 5, generator=g)
    view = look(lambda q: rg.attention(q, k, v, pattern, **more), q)
    o = rg.attention(q, k, v, pattern, **more)
    call = view.calls[0]
    assert call.implementation == "regard" and call.kv_heads == 2
    for b in range(2):
        assert torch.allclose(call.weights(batch=b) @ call.values(batch=b), o[b], atol=1e-6)
    assert torch.isfinite(view.statistics[0].entropy).all()


def test_every_attention_of_regards_models_is_recorded():
    block = rg.Block(rg.Attention(24, heads=4), rg.FeedForward(48))
    own = rg.Attention(24, heads=4, kv_heads=2, pattern=rg.causal())
    decoder = replace(block, attention=own, cross=rg.Attention(24, heads=4))
    words = rg.Embedding(13, 24, position=rg.sinusoidal())
    model = rg.EncoderDecoder(
        rg.Encoder(block, layers=2, embedding=words),
        rg.Decoder(decoder, layers=2, embedding=words, head=rg.LanguageHead()),
    ).build()
    ids = torch.randint(0, 13, (2, 7), generator=torch.Generator().manual_seed(0))
    view = look(model.eval(), (ids, ids[:, :5]))
    assert {c.implementation for c in view.calls} == {"regard"} and not view.missed
    assert [(c.role, c.n, c.m) for c in view.calls[2:]] == [("self", 5, 5), ("cross", 5, 7)] * 2
    with torch.no_grad():
        maps = model(ids, ids[:, :5], return_weights=True)[1]
    truth = [w for block in (*maps["encoder"], *maps["decoder"]) for w in block.values()]
    assert len(truth) == len(view.calls)
    for layer, w in enumerate(truth):
        assert (weights(view, layer) - w).abs().max() <= 1e-6


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.compiled)])
def test_flex_attention_is_recorded_with_its_functions(compiled):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    slopes = torch.tensor([0.5, 1.0])
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 7, 7, device="cpu")
    attend = torch.compile(flex_attention) if compiled else flex_attention

    def run(q):
        return attend(q, q, q, lambda s, b, h, i, j: s - slopes[h] * (i - j), block_mask=mask)

    q = torch.randn(2, 2, 7, 5, generator=torch.Generator().manual_seed(0))
    view = look(run, q)
    i = torch.arange(7)
    bias = -slopes[:, None, None] * (i[:, None] - i)
    truth = rg.reference.attend(q, q, q, (i[:, None] >= i).expand(2, 2, 7, 7), bias=bias).weights
    assert view.calls[0].implementation == "flex"
    assert (weights(view, 0) - truth).abs().max() <= 1e-6


@pytest.mark.compiled
def test_a_compiled_model_has_the_maps_of_the_uncompiled_one():
    model = Sdpa()
    x = torch.randn(2, 7, 12)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(x)
    view = look(compiled, x)
    assert torch.equal(view.map(0, 1), look(model, x).map(0, 1))
    assert view.title == "Sdpa"


@pytest.mark.compiled
def test_a_model_can_be_compiled_after_a_look_during_which_the_compiler_was_first_used():
    from torch._dynamo import trace_rules

    trace_rules.clear_lru_cache()  # as in a process that has compiled nothing yet
    model, x = Sdpa(), torch.randn(2, 7, 12)
    look(lambda x: (trace_rules.get_torch_obj_rule_map(), model(x))[1], x)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(x), model(x))


def test_self_and_cross_are_distinguished_by_the_origin_of_q_and_k():
    """Not by their lengths: both sides have 7 tokens here."""
    model, x, y = Sdpa(), torch.randn(2, 7, 12), torch.randn(2, 7, 12)
    assert look(model, x).calls[0].role == "self"
    assert look(model, (x, y)).calls[0].role == "cross"
    assert look(nn.Sequential(nn.Linear(12, 12), nn.LayerNorm(12), model), x).calls[0].role == "self"


def test_under_autocast_the_first_layer_is_still_self_attention():
    """There each projection reads its own 16-bit copy of the input."""
    layer = nn.TransformerEncoderLayer(16, 2, 16, batch_first=True)
    models = [rg.Attention(16, heads=2).build(), nn.TransformerEncoder(layer, 2).train()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        views = [look(model, torch.randn(1, 7, 16)) for model in models]
        cross = look(models[0], (torch.randn(1, 7, 16), torch.randn(1, 7, 16)))
        views.append(look(rg.preset("tiny-gpt").build().eval(), torch.arange(7)[None]))
    assert [c.role for view in views for c in view.calls] == ["self"] * 7
    assert cross.calls[0].role == "cross"


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_unfilled_slots_of_a_static_cache_do_not_move_the_queries(implementation):
    """Their keys are masked: query 0 of the first call is at position 0, not at slots − n."""
    transformers = pytest.importorskip("transformers")
    model, ids = huggingface("gpt2", implementation), torch.arange(1, 8)[None]
    cache = transformers.StaticCache(config=model.config, max_cache_len=20)
    first = look(model, {"input_ids": ids, "past_key_values": cache}, keep="copy")
    given = {"input_ids": ids[:, :1], "past_key_values": cache, "cache_position": torch.tensor([7])}
    after = look(model, given, keep="copy")
    assert after.calls[0].shape[2:] == (1, 20)
    assert [c.query_offset for c in (first.calls[0], after.calls[0])] == [0, 7]
    plain = look(model, {"input_ids": ids})
    for name in ("distance", "on_self", "on_previous"):
        a, b = (getattr(view.statistics[0], name) for view in (first, plain))
        torch.testing.assert_close(a, b)


def test_a_layer_that_runs_two_times_is_recorded_two_times():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.MultiheadAttention(12, 2, batch_first=True)

        def forward(self, x):
            for _ in range(2):
                x, _ = self.layer(x, x, x, need_weights=False)
            return x

    assert [c.name for c in look(Twice(), torch.randn(2, 7, 12)).calls] == ["layer", "layer#2"]


def test_what_could_not_be_recorded_is_reported():
    class LinearAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Linear(12, 12)

        def forward(self, x):
            return self.w(x).cumsum(1)

    model = nn.Sequential(LinearAttention(), Sdpa())
    view = look(model, torch.randn(2, 7, 12))
    assert view.missed == ("0 (LinearAttention): it ran, but no attention call was found in it",)
    assert "not recorded: 0 (LinearAttention)" in repr(view)
    with pytest.raises(
        rg.RegardError, match=r"no attention call was found while LinearAttention ran .*: it ran, but"
    ):
        look(LinearAttention(), torch.randn(2, 7, 12))


class SampledAttention(nn.Module):
    """A softmax over sampled points and not over keys, as in deformable attention, in a part without parameters."""

    def forward(self, x, weights):
        return (weights.softmax(-1)[..., None] * x[:, :4].unsqueeze(1)).sum(-2)


class DeformableAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights, self.attend = nn.Linear(8, 4), SampledAttention()

    def forward(self, x):
        return self.attend(x, self.weights(x))


def test_an_attention_whose_part_has_no_parameters_is_named_as_missed():
    model = nn.Sequential(
        DeformableAttention(), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    ).eval()
    view = look(model, torch.randn(1, 5, 8))
    assert len(view.calls) == 1
    assert view.missed == ("0 (DeformableAttention): it ran, but no attention call was found in it",)


def test_everything_is_restored_even_after_an_error():
    from torch.nn.modules import module as hooks

    before = F.scaled_dot_product_attention, rg.attention, dict(hooks._global_forward_pre_hooks)
    with pytest.raises(rg.ShapeError, match=r"Sdpa does not run on float32 \(2, 7, 5\): RuntimeError: "):
        look(Sdpa(), torch.randn(2, 7, 5))
    look(Sdpa(), torch.randn(2, 7, 12))
    assert (F.scaled_dot_product_attention, rg.attention, dict(hooks._global_forward_pre_hooks)) == before
    with pytest.raises(KeyError), intercept(Sdpa(), print):
        raise KeyError
    assert F.scaled_dot_product_attention is before[0] and not hooks._global_forward_hooks


def test_four_threads_look_at_different_models_at_the_same_time_and_each_gets_its_own_maps():
    """Twenty times, so that threads start and finish in every order."""
    sdpa, attention = F.scaled_dot_product_attention, rg.attention
    x = torch.randn(2, 7, 12, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    own = rg.Attention(12, heads=2, pattern=rg.causal()).build().eval()
    fast = nn.TransformerEncoderLayer(12, 2, 24, batch_first=True).eval()
    models = [Sdpa(), Sdpa(is_causal=True), own, fast]
    alone = [look(model, x) for model in models]

    def twenty_times(number):
        views = []
        for _ in range(20):
            start.wait()
            views.append(look(models[number], x))
        return views

    start = Barrier(4)
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(twenty_times, range(4)))
    for one, several in zip(alone, together):
        for view in several:
            assert [(c.name, c.implementation) for c in view.calls] == [
                (c.name, c.implementation) for c in one.calls
            ]
            assert torch.equal(weights(view, 0), weights(one, 0))
    assert F.scaled_dot_product_attention is sdpa and rg.attention is attention
    assert rg.engine.attention.attention is attention


def test_the_original_function_is_restored_if_the_first_look_ends_first():
    """Enter one, enter two, leave one, leave two: each look must not restore what it found."""
    original, q = F.scaled_dot_product_attention, torch.randn(1, 2, 7, 5)
    inside, leave = {1: Event(), 2: Event()}, {1: Event(), 2: Event()}

    def run(number):
        def model(q):
            out = F.scaled_dot_product_attention(q, q, q)
            inside[number].set()
            assert leave[number].wait(60)
            return out

        return len(look(model, q).calls)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(run, 1)
        assert inside[1].wait(60)
        second = pool.submit(run, 2)
        assert inside[2].wait(60) and F.scaled_dot_product_attention is not original
        leave[1].set()
        assert first.result() == 1 and F.scaled_dot_product_attention is not original
        leave[2].set()
        assert second.result() == 1
    assert F.scaled_dot_product_attention is original


def test_what_another_thread_runs_meanwhile_is_not_recorded():
    x = torch.randn(2, 7, 12)
    inside, finished = Event(), Event()

    def waits(x):
        inside.set()
        assert finished.wait(60)
        return Sdpa()(x)

    def elsewhere():
        assert inside.wait(60)
        nn.TransformerEncoderLayer(12, 2, 24, batch_first=True).eval()(x)
        out = Sdpa()(x), rg.attention(x[None], x[None], x[None])
        finished.set()
        return out

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(elsewhere)
        view = look(waits, x)
        assert len(other.result()) == 2
    assert [c.name for c in view.calls] == ["Sdpa"]


def test_a_module_imported_while_looking_gets_the_original_function_back():
    module = type(sys)("a_module_imported_meanwhile")

    def run(q):
        sys.modules[module.__name__] = module
        module.mine = F.scaled_dot_product_attention
        return module.mine(q, q, q)

    try:
        view = look(run, torch.randn(1, 2, 7, 5))
        assert len(view.calls) == 1 and module.mine is F.scaled_dot_product_attention
    finally:
        del sys.modules[module.__name__]


def test_tensors_that_were_overwritten_are_refused():
    cache = torch.randn(1, 1, 7, 5)

    def run(q):
        out = F.scaled_dot_product_attention(q, cache, cache)
        cache.zero_()
        return out

    view = look(run, torch.randn(1, 1, 7, 5))
    with pytest.raises(rg.RegardError, match=r"layer 0 \(attention\) were overwritten .* use keep='copy'"):
        view.map(0, 0)
    cache.normal_()
    k = cache.clone()
    q = torch.randn(1, 1, 7, 5)
    copied = look(run, q, keep="copy").map(0, 0)
    assert torch.allclose(copied, (q @ k.mT / 5**0.5).softmax(-1)[0, 0], atol=1e-6)


class PartAttention(nn.Module):
    """Attention that a module computes in parts."""

    def __init__(self, parts=2, unread=False, signed=False):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.parts, self.unread, self.signed = parts, unread, signed

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        scores = q @ k.mT
        if self.signed:
            return scores.abs().softmax(-1) * scores.sign() @ v
        out = torch.cat([(part @ k.mT).softmax(-1) @ v for part in q.chunk(self.parts, 1)], 1)
        # weights that meet the values in another shape, as those of sliding chunks do
        return out + (scores.softmax(-1)[..., None] * v[:, None]).sum(2) if self.unread else out


def test_attention_that_is_computed_in_parts_is_named():
    view = look(PartAttention().eval(), torch.randn(1, 6, 8))
    assert len(view.calls) == 2
    assert view.missed == (
        "PartAttention (PartAttention): its attention is computed in 2 parts; each is shown as a separate layer",
    )
    assert look(PartAttention(1).eval(), torch.randn(1, 6, 8)).missed == ()


def test_a_softmax_that_was_not_read_is_named():
    view = look(PartAttention(1, unread=True).eval(), torch.randn(1, 6, 8))
    assert len(view.calls) == 1 and "1 of its softmaxes was not read; its maps show part" in view.missed[0]


def test_signed_weights_are_shown_with_their_sign():
    model, x = PartAttention(signed=True).eval(), torch.randn(1, 6, 8)
    view = look(model, x)
    scores = model.q(x) @ model.k(x).mT
    assert torch.allclose(view.map(0, 0), (scores.abs().softmax(-1) * scores.sign())[0], atol=1e-6)
    assert float(view.map(0, 0).min()) < 0 and view.missed == ()


def test_a_public_name_that_is_first_used_during_a_look_is_not_changed_afterwards():
    vars(rg).pop("attention", None)  # as before its first use

    class Uses(nn.Module):
        def forward(self, x):
            return rg.attention(x, x, x)

    look(Uses(), torch.randn(1, 2, 3, 4))
    assert rg.attention is sys.modules["regard.engine.attention"].attention


class Product(nn.Module):
    """softmax(q kᵀ) v by einsum, with axes in any order: b h i d for queries, j for keys."""

    def __init__(self, scores, output, factor=None):
        super().__init__()
        self.scores, self.output, self.factor, self.kept = scores, output, factor, None

    def forward(self, q, k, v):
        weights = torch.einsum(self.scores, q, k).softmax(-1)
        weights = weights if self.factor is None else weights * self.factor
        out = torch.einsum(self.output, weights, v)
        return out if self.kept is None else out * self.kept


def qkv(shared):
    """shared: all heads have the same keys and values."""
    g = torch.Generator().manual_seed(0)
    keys = (2, 7, 4) if shared else (2, 3, 7, 4)
    return tuple(torch.randn(*shape, generator=g) for shape in ((2, 3, 5, 4), keys, keys))


@pytest.mark.parametrize("scores, output", [
    ("bhid,bjd->bhij", "bhij,bjd->bihd"),  # all heads share keys and values, and the output is ready to be flattened
    ("bhid,bjd->bhij", "bhij,bjd->bhid"),
    ("bhid,bhjd->bhij", "bhij,bhjd->bihd"),
    ("bhid,bhjd->ibhj", "ibhj,bhjd->bhid"),
])  # fmt: skip
def test_weights_are_read_in_any_order_of_axes(scores, output):
    q, k, v = qkv(shared=",bjd" in scores)
    truth = torch.einsum(scores.split("->")[0] + "->bhij", q, k).softmax(-1)
    model = Product(scores, output)
    view = look(model, (q, k, v))
    assert view.calls[0].shape == (2, 3, 5, 7) and torch.allclose(weights(view, 0), truth, atol=1e-6)
    # a head is removed where the output has it
    whole = model(q, k, v)
    at = output[-4:].index("h")
    model.kept = torch.tensor([1.0, 0.0, 1.0]).view([3 if i == at else 1 for i in range(4)])
    effect = (model(q, k, v) - whole).norm() / whole.norm()
    model.kept = None
    assert view.remove_heads().effects[0, 1] == pytest.approx(float(effect), rel=1e-5)


@pytest.mark.parametrize("scores, output", [
    ("bhid,bhjd->ibhj", "ibhj,bhjd->bhid"),
    ("bhid,bjd->bhij", "bhij,bjd->bihd"),
    ("bhid,bhjd->bhij", "bhij,bhjd->bhid"),
])  # fmt: skip
def test_changed_weights_are_read_in_any_order_of_axes(scores, output):
    """Those of (n, b, h, m) were once shown as if they were (b, h, n, m), and then refused."""
    q, k, v = qkv(shared=",bjd" in scores)
    truth = torch.einsum(scores.split("->")[0] + "->bhij", q, k).softmax(-1)
    view = look(Product(scores, output, factor=0.5).eval(), (q, k, v))
    assert torch.allclose(weights(view, 0), truth / 2, atol=1e-6)


class Parts(nn.Module):
    """Attention on blocks of queries, each with all keys or with some."""

    def __init__(self, mask, size=3, slides=False, eager=False):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.mask, self.size, self.slides, self.eager = nn.Linear(8, 24), mask, size, slides, eager

    def forward(self, x):
        q, k, v = (z.unflatten(-1, (2, 4)).transpose(1, 2) for z in self.qkv(x).chunk(3, -1))
        i, outputs = torch.arange(q.shape[2]), []
        allowed = (i[:, None] - i).abs() <= 1 if self.mask == "window" else i[:, None] >= i
        allowed = torch.ones_like(allowed) if self.mask is None else allowed
        for start in range(0, len(i), self.size):
            rows = slice(start, start + self.size)
            keys = slice(max(0, start - 2), start + self.size) if self.slides else slice(None)
            part, mask = q[:, :, rows] * 0.5, allowed[rows, keys]
            if self.eager:
                scores = (part @ k[:, :, keys].mT).masked_fill(~mask, -torch.inf)
                outputs.append(scores.softmax(-1) @ v[:, :, keys])
            else:
                given = (part, k[:, :, keys], v[:, :, keys])
                outputs.append(F.scaled_dot_product_attention(*given, mask, scale=1.0))
        return torch.cat(outputs, 2)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("mask", [None, "causal", "window"])
def test_blocks_of_queries_have_the_positions_and_the_names_of_their_rows(mask, size, eager):
    """Without a mask each block was placed at the end of the keys; all were named 0, 1, 2."""
    names = [f"{who}{i}" for who in "ab" for i in range(7)]
    view = look(Parts(mask, size, eager=eager), torch.randn(2, 7, 8), tokens=[names[:7], names[7:]])
    for number, call in enumerate(view.calls):
        start, n = number * size, min(size, 7 - number * size)
        assert (call.role, call.query_offset, call.n, call.m) == ("self", start, n, 7)
        assert call.queries == (tuple(names[start : start + n]), tuple(names[7 + start : 7 + start + n]))
        assert call.keys == (tuple(names[:7]), tuple(names[7:]))
        assert call.causal == (mask == "causal" and start < 6)  # the last query has no later key


@pytest.mark.parametrize("eager", [False, True])
def test_blocks_of_queries_on_some_keys_have_the_positions_of_both(eager):
    names = [f"t{i}" for i in range(7)]
    view = look(Parts(None, 3, slides=True, eager=eager), torch.randn(1, 7, 8), tokens=[names])
    assert [(c.queries[0], c.keys[0], c.query_offset) for c in view.calls] == [
        (("t0", "t1", "t2"), ("t0", "t1", "t2"), 0),
        (("t3", "t4", "t5"), ("t1", "t2", "t3", "t4", "t5"), 2),
        (("t6",), ("t4", "t5", "t6"), 2),
    ]


def test_blocks_of_queries_have_together_the_statistics_of_one_call():
    x = torch.randn(1, 7, 8, generator=torch.Generator().manual_seed(0))
    whole, parts = (look(Parts(None, size), x).statistics for size in (7, 3))
    for name in ("distance", "on_self", "on_first"):
        joined = sum(getattr(s, name) * s.queries for s in parts) / 7
        torch.testing.assert_close(joined, getattr(whole[0], name))


class OneToken(nn.Module):
    """The query is that of one token, as in class attention."""

    def __init__(self, at):
        super().__init__()
        self.q, self.kv, self.at = nn.Linear(8, 8), nn.Linear(8, 16), at

    def forward(self, x):
        q = self.q(x[:, self.at])[:, None]
        return F.scaled_dot_product_attention(q, *self.kv(x).chunk(2, -1))


@pytest.mark.parametrize("at", [0, 4, -1])
@pytest.mark.parametrize("batch", [1, 2, 7])
def test_the_query_of_a_selected_token_is_at_its_position(at, batch):
    call = look(OneToken(at), torch.randn(batch, 7, 8)).calls[0]
    assert (call.query_offset, call.queries[0]) == (at % 7, (str(at % 7),))


@pytest.mark.parametrize("attend", [
    F.scaled_dot_product_attention, rg.attention, lambda q, k, v: (q @ k.mT).softmax(-1) @ v
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented")
def test_attention_inside_vmap_is_recorded(attend):
    """The error blamed the model, which "cannot access the storage" of a tensor."""
    q, k, v = torch.randn(3, 5, 2, 3, 7, 4, generator=torch.Generator().manual_seed(0)).unbind()
    outputs = []

    def run(q, k, v):
        outputs.append(torch.vmap(lambda *qkv: attend(*qkv))(q, k, v))

    view = look(run, (q, k, v))
    assert sum(call.b * call.heads for call in view.calls) == 30 and view.missed == ()
    rows = torch.cat([weights(view, layer).flatten(0, 1) for layer in range(len(view.calls))])
    torch.testing.assert_close(rows @ v.flatten(0, 2), outputs[0].flatten(0, 2))


def test_attention_inside_other_transforms_is_recorded():
    x = torch.randn(2, 7, 4, generator=torch.Generator().manual_seed(0))

    def gradient(x):
        return torch.func.grad(lambda x: F.scaled_dot_product_attention(x, x, x).sum())(x)

    layer = nn.MultiheadAttention(4, 2, batch_first=True).eval()
    assert torch.allclose(look(gradient, x).map(0, 0), (x[0] @ x[0].T / 2).softmax(-1), atol=1e-6)
    with pytest.warns(UserWarning, match="performance drop"):
        mapped = look(lambda x: torch.vmap(lambda x: layer(x, x, x)[0])(x), x[:, None])
    assert torch.equal(mapped.map(1, 1), look(layer, (x, x, x)).map(0, 1, batch=1))


def test_sparse_tensors_do_not_stop_a_look():
    """The error blamed the model: it cannot access the storage of a sparse tensor."""
    x = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
    view = look(lambda x: torch.sparse.mm(torch.eye(7).to_sparse(), x @ x.T).softmax(-1) @ x, x)
    assert torch.allclose(view.map(0, 0), (x @ x.T).softmax(-1))


def test_attention_in_plain_tensor_code_without_tokens_is_refused():
    with pytest.raises(
        rg.ShapeError, match=r"weights of shape \(2, 0, 0\): there is no attention to show; pass at"
    ):
        look(lambda x: (x @ x.mT).softmax(-1) @ x, torch.randn(2, 0, 4))


class Stack(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(Parts(None, 7, eager=True) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).transpose(1, 2).flatten(2)
        return x


def functions_called(model, x):
    """How many functions of regard.lens one look calls."""
    called = []

    def count(frame, event, _):
        if event == "call" and frame.f_globals.get("__name__", "").startswith("regard.lens"):
            called.append(frame.f_code.co_name)

    sys.setprofile(count)
    try:
        look(model, x)
    finally:
        sys.setprofile(None)
    return len(called)


def test_a_look_runs_little_python_code_for_each_layer():
    """Each use of a tensor read its strides again, 3728 calls per layer: twice the time on twelve small layers."""
    few, many = (functions_called(Stack(layers), torch.ones(1, 7, 8)) for layers in (2, 6))
    assert (many - few) / 4 < 2000


def test_a_compiled_part_of_a_model_has_the_name_that_the_model_gives_it():
    """It was "layers.1._orig_mod"."""
    model = Stack(3)
    model.layers[1] = torch.compile(model.layers[1], backend="eager")
    view = look(model, torch.ones(1, 7, 8))
    assert [call.name for call in view.calls] == ["layers.0", "layers.1", "layers.2"]

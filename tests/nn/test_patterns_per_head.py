"""A declaration with a pattern for each head: every term goes with its head, in the layer and in models."""

import copy
import dataclasses

import pytest
import torch

import regard as rg
from head_cases import Case, check_cost, check_run, drawn, head_patterns, one_by_one
from long_cases import in_long
from regard.errors import ShapeError

HEADS = [rg.causal(), rg.causal() & rg.window(2), rg.causal(), rg.causal() & (rg.window(0) | rg.every(3))]
f64 = torch.float64


def layer_case(seed=0, heads=HEADS, **options):
    sizes = {"heads": len(heads), "kv_heads": 2, "d_k": 6, "d_v": 3}
    n, m = options.pop("n", 11), options.pop("m", None)
    call = {name: options.pop(name) for name in ("lengths", "at", "given") if name in options}
    return Case(rg.Attention(13, pattern=heads, **sizes, **options), 2, n, m, seed=seed, **call)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(layer_case(), id="plain"),
        pytest.param(layer_case(position=rg.rope()), id="rope"),
        pytest.param(layer_case(position=rg.alibi()), id="alibi"),
        pytest.param(layer_case(position=rg.t5_buckets(8, 16)), id="t5"),
        pytest.param(layer_case(position=rg.relative_table(3)), id="relative"),
        pytest.param(layer_case(position=rg.quadratic()), id="quadratic"),
        pytest.param(layer_case(position=rg.shaw(2, values=True)), id="shaw"),
        pytest.param(layer_case(score="additive"), id="additive"),
        pytest.param(layer_case(scale=float("inf")), id="hard"),
        pytest.param(layer_case(softcap=1.5, sink_logits=True), id="softcap and sinks"),
        pytest.param(layer_case(extra_key=True), id="extra key"),
        pytest.param(layer_case(lengths=torch.tensor([3, 11])), id="lengths"),
        pytest.param(layer_case(n=5, m=11, at=3), id="offset"),
        pytest.param(layer_case(n=5, m=11, at=torch.tensor([2, 6]), position=rg.alibi()), id="row offsets"),
        pytest.param(layer_case(given=rg.per_head([rg.window(w) for w in (1, 3, 2, 5)])), id="heads of a call"),
        pytest.param(
            layer_case(n=5, m=11, at=3, given=torch.ones(5, 11, dtype=torch.bool)), id="offset and table"
        ),
    ],
)  # fmt: skip
def test_each_head_is_that_of_its_own_pattern(case):
    check_run(case)
    check_run(case, torch.float32)


@pytest.mark.parametrize("seed", [*range(2000, 2012), *in_long(*range(2012, 2060))])
def test_random_declarations_run_and_cost_as_their_heads_one_by_one(seed):
    check_run(drawn(seed))
    check_cost(drawn(seed))


def test_a_list_in_the_call_restricts_each_head():
    case = layer_case()
    layer, (x, _) = case.module(), case.inputs()
    given = [rg.window(w) for w in (1, 3, 2, 5)]
    both = dataclasses.replace(case, given=rg.per_head(given))
    assert torch.equal(layer(x, pattern=given), layer(x, pattern=rg.per_head(given)))
    assert torch.allclose(layer(x, pattern=given), one_by_one(both, layer, x, None)[0], atol=1e-12)
    with pytest.raises(rg.SpecError, match="per_head of 4 heads and of 3 heads do not combine"):
        layer(x, pattern=given[:3])


def test_dropout_leaves_a_head_its_own_keys():
    declared = rg.Attention(12, heads=4, pattern=HEADS, output=False, dropout=0.4)
    torch.manual_seed(0)
    layer = declared.build().to(f64).train()
    x = torch.randn(1, 7, 12, dtype=f64, requires_grad=True)
    with torch.no_grad():
        for w in (layer.w_q, layer.w_k):  # equal scores: only the values depend on x
            w.weight.zero_()
    for head, pattern in enumerate(HEADS):
        reached = torch.zeros(7, 7, dtype=torch.bool)
        for _ in range(25):
            o = layer(x)[0, :, 3 * head : 3 * head + 3].sum(-1)
            for i in range(7):
                reached[i] |= (torch.autograd.grad(o[i], x, retain_graph=True)[0][0] != 0).any(-1)
        assert torch.equal(reached, pattern.allowed(7))


def gpt(heads=HEADS, **options):
    position = options.pop("position", rg.rope())
    attention = rg.Attention(24, heads=4, kv_heads=2, pattern=heads, position=position, **options)
    return rg.Encoder(
        rg.Block(attention, rg.FeedForward(20), norm_at="pre"), 2,
        embedding=rg.Embedding(31, 24), head=rg.LanguageHead(),
    )  # fmt: skip


def built(declared, dtype=f64):
    torch.manual_seed(0)
    return declared.build().to(dtype).eval()


def ids(b, n, seed=0):
    return torch.randint(0, 31, (b, n), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("position", [rg.rope(), rg.alibi(), rg.t5_buckets(8, 16)], ids=repr)
@torch.no_grad()
def test_a_cache_gives_each_head_the_keys_of_its_pattern(position):
    model, tokens = built(gpt(position=position, softcap=3.0, sink_logits=True)), ids(2, 13)
    cache, parts = model.cache(), []
    for part in tokens.split([5, 1, 4, 1, 1, 1], 1):
        parts.append(model(part, cache=cache))
    assert torch.allclose(torch.cat(parts, 1), model(tokens), atol=1e-12)


@torch.no_grad()
def test_generation_is_that_of_passes_without_a_cache():
    model, prompts = built(gpt()), [[3, 1, 4, 1, 5], [9, 2, 6]]
    found = rg.generate(model, prompts, max_new_tokens=9).rows()
    for prompt, tokens in zip(prompts, found):
        row = torch.tensor([prompt])
        for token in tokens:
            assert int(model(row)[0, -1].argmax()) == token
            row = torch.cat([row, torch.tensor([[token]])], 1)
    later = built(gpt([rg.causal() | rg.window(1), *HEADS[1:]]))
    with pytest.raises(rg.SpecError, match="attends to tokens that are not generated yet"):
        rg.generate(later, prompts, max_new_tokens=2)


@pytest.mark.parametrize("given", [None, [rg.window(1), rg.full(), rg.every(2) | rg.window(0), rg.full()]])
def test_documents_count_the_positions_of_each_heads_pattern(given):
    model, texts = built(gpt()), [ids(2, 5), ids(2, 7, seed=1)]
    documents = torch.tensor([[0] * 5 + [1] * 7]).expand(2, 12)
    packed = model(torch.cat(texts, 1), documents=documents, pattern=given)
    alone = torch.cat([model(text, pattern=given) for text in texts], 1)
    assert torch.allclose(packed, alone, atol=1e-12)


def test_checkpointed_blocks_have_the_same_gradients():
    plain = built(gpt()).train()
    again = built(dataclasses.replace(gpt(), checkpoint=True)).train()
    for model in (plain, again):
        model(ids(2, 11)).square().mean().backward()
    for a, b in zip(plain.parameters(), again.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_a_saved_model_has_its_patterns(tmp_path):
    model = built(gpt(), torch.float32)
    rg.save(model, tmp_path / "model")
    loaded = rg.load(tmp_path / "model").eval()
    assert loaded.spec == gpt() and head_patterns(loaded.spec.block.attention) == HEADS
    assert torch.equal(loaded(ids(2, 11)), model(ids(2, 11)))


def test_an_encoder_decoder_and_an_image_model_run_their_heads_patterns():
    tiny = rg.preset("tiny")
    attention = dataclasses.replace(tiny.decoder.block.attention, pattern=HEADS)
    block = dataclasses.replace(tiny.decoder.block, attention=attention)
    declared = dataclasses.replace(tiny, decoder=dataclasses.replace(tiny.decoder, block=block))
    assert rg.from_json(declared.json()) == declared
    model, source, target = built(declared), ids(2, 6), ids(2, 7, seed=1)
    changed = target.clone()
    changed[:, 4] += 1
    same = (model(source, target) == model(source, changed)).all(-1)
    assert same[:, :4].all() and not same[:, 4:].any()  # head 0 sees every earlier token, none a later one
    grid = [rg.neighborhood((4, 4), 3), rg.full()]
    block = rg.Block(rg.Attention(16, heads=2, pattern=grid), rg.FeedForward(8))
    vision = rg.Vision(rg.Encoder(block, 1), image=(8, 8), patch=(2, 2), class_token=False)
    images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=f64)
    weights = built(vision)(images, return_weights=True)[1][0]["self"]
    assert torch.equal(weights[0] > 0, torch.stack([p.allowed(16) for p in grid]))


def test_a_share_of_the_heads_is_refused():
    layer = copy.deepcopy(layer_case().module())
    layer.w_q, layer.w_k, layer.w_v = (torch.nn.Linear(13, w, dtype=f64) for w in (12, 6, 3))
    with pytest.raises(ShapeError) as refused:
        layer(torch.randn(1, 5, 13, dtype=f64))
    text = (
        f"w_q gives 2 of 4 heads and w_k 1 of 2, but pattern={rg.per_head(HEADS)!r} is for all 4 heads; split"
    )
    assert str(refused.value).startswith(text)


@pytest.mark.compiled
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_a_compiled_layer_is_one_graph(kv_heads):
    declared = rg.Attention(
        24, heads=4, kv_heads=kv_heads, pattern=HEADS, position=rg.alibi(), sink_logits=True
    )
    layer, x = built(declared, torch.float32), torch.randn(2, 11, 24)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    grads = []
    for f in (layer, compiled):
        layer.zero_grad()
        o = f(x)
        o.square().sum().backward()
        grads.append([o.detach(), *(p.grad.clone() for p in layer.parameters())])
    for a, b in zip(*grads, strict=True):
        assert torch.allclose(a, b, atol=1e-5 * max(1.0, float(a.abs().max())))

"""Inference on a CPU with little overhead: the same numbers as the modules, and only where they are the same."""

from contextlib import nullcontext

import pytest
import torch

import regard as rg
from regard.generation import beam, cpu_inference, generate, greedy, sample
from regard.generation.steps import CpuSteps, StackSteps, steps
from regard.nn.cache import KeyValues

VOCAB, END = 29, 3

BLOCKS = {
    "post": {},
    "pre, gelu": {"norm_at": "pre", "activation": "gelu"},
    "rms, gated, no biases": {"norm": "rms", "norm_at": "pre", "activation": "swiglu", "biases": "none"},
    "grouped": {"kv_heads": 1, "d_k": 5, "d_v": 7},
    "scale, no output": {"scale": 0.7, "heads": 4, "output": False},
}


def translator(place=None, pattern=None, inside=None, embedding=None, head=None, residual=True, **kind):
    torch.manual_seed(4)
    around = {k: kind.pop(k) for k in ("norm", "norm_at") if k in kind} | {"residual": residual}
    mlp = rg.FeedForward(20, activation=kind.pop("activation", "relu"))
    own = rg.Attention(12, **{"heads": 3, **kind})
    past = rg.Attention(
        12, pattern=rg.causal() if pattern is None else pattern, position=inside, **{"heads": 3, **kind}
    )
    words = rg.Embedding(VOCAB, 12, position=place or rg.sinusoidal(), **(embedding or {}))
    spec = rg.EncoderDecoder(
        rg.Encoder(rg.Block(own, mlp, **around), 2, embedding=words),
        rg.Decoder(
            rg.Block(past, mlp, cross=own, **around),
            2,
            embedding=words,
            head=rg.LanguageHead(**{"tied": False, **(head or {})}),
        ),
    )
    model = spec.build().double().eval()
    for name, p in model.named_parameters():
        p.data = torch.randn_like(p) * 0.6 + (1.0 if name.endswith("norm.weight") else 0.0)
    return model


def sources(b=6, m=7):
    noise = torch.Generator().manual_seed(2)
    return torch.randint(4, VOCAB, (b, m), generator=noise), torch.tensor([7, 3, 1, 5, 7, 2])[:b]


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("padded", [True, False])
@torch.no_grad()
def test_every_step_has_the_logits_of_the_general_one(kind, padded):
    """And the encoder its states, whatever is at padded positions."""
    model, (source, lengths) = translator(**BLOCKS[kind]), sources()
    lengths = lengths if padded else None
    assert cpu_inference.supports(model.encoder, rg.full()) and cpu_inference.supports(
        model.decoder, rg.causal()
    )
    states, true = cpu_inference.encode(model.encoder, source, lengths), model.encode(source, lengths)
    real = torch.arange(7) < (lengths[:, None] if padded else 7)
    assert torch.allclose(states[real.expand(6, 7)], true[real.expand(6, 7)], atol=1e-12)
    ways = [CpuSteps(model.decoder, states, lengths), StackSteps(model.decoder, true, lengths)]
    token = torch.ones(6, 1, dtype=torch.long)
    steps = 35 if kind == next(iter(BLOCKS)) else 12  # 35: past the initial capacity of a cache, 32
    for n in range(steps):
        a, b = (way.next(token) for way in ways)
        assert torch.allclose(a, b, atol=1e-10), n
        token = b.argmax(-1)[:, None]
        if n in (3, 9):  # rows go, change places, come twice
            rows = torch.tensor([4, 1, 2, 1, 3]) if n == 3 else torch.tensor([0, 3, 1])
            for way in ways:
                way.select(rows)
            token = token[rows]


@pytest.mark.parametrize(
    "given",
    [
        {"place": rg.learned(60), "embedding": {"norm": True, "types": 2, "scaled": True}},
        {"head": {"bias": True, "scaled": True}},
        {"head": {"tied": True}},
    ],
    ids=["learned, normed, types", "bias, scaled", "tied"],
)
@torch.no_grad()
def test_embeddings_and_heads_are_read_alike(given):
    model, (source, lengths) = translator(**given), sources()
    generated = generate(model, [[1]] * 6, source=source, source_lengths=lengths, max_new_tokens=50)
    logits = model(
        source, torch.cat([torch.ones(6, 1, dtype=torch.long), generated.tokens], 1), source_lengths=lengths
    )
    assert torch.equal(logits[:, :-1].argmax(-1), generated.tokens)


@pytest.mark.parametrize("scaled", [True, False], ids=["scaled", "not scaled"])
@torch.no_grad()
def test_a_cached_embedding_is_that_of_the_module(scaled):
    module = translator(embedding={"scaled": scaled, "norm": True}).decoder.embedding
    ids = torch.randint(VOCAB, (1, 9))
    found = cpu_inference.CachedEmbedding(module)(ids[0], torch.arange(9), 9)
    assert torch.allclose(found, module(ids)[0], atol=1e-12)


@pytest.mark.parametrize("strategy", [greedy(), sample(seed=3), beam(3)], ids=repr)
def test_both_implementations_generate_the_same(strategy, monkeypatch):
    model, (source, lengths) = translator(), sources()
    given = {"source": source, "source_lengths": lengths, "max_new_tokens": 12}
    given["eos_id"] = int(generate(model, [[1]] * 6, strategy, **given).tokens[0, 3])  # one that is written
    ours = generate(model, [[1]] * 6, strategy, **given)
    prompts = [[5, 7, 4], [8], [9, 9]]
    stack = model.decoder.spec
    alone = rg.Encoder(
        rg.Block(stack.block.attention, stack.block.feed_forward),
        2,
        embedding=stack.embedding,
        head=stack.head,
    ).build()
    alone = alone.double()
    went_on = generate(alone, prompts, strategy, max_new_tokens=12, eos_id=END)
    monkeypatch.setattr(cpu_inference, "supports", lambda *given: False)
    again = generate(model, [[1]] * 6, strategy, **given)
    assert ours.rows() == again.rows() and torch.allclose(ours.log_probs, again.log_probs, atol=1e-5)
    assert went_on.rows() == generate(alone, prompts, strategy, max_new_tokens=12, eos_id=END).rows()
    assert min(len(r) for r in ours.rows()) < 12, "rows that end are the point"


def listened():
    model = translator()
    model.decoder.blocks[1].register_forward_hook(lambda *_: None)
    return model


def exchanged():
    model = translator()
    model.decoder.blocks[0].attention.w_q = torch.nn.Sequential(model.decoder.blocks[0].attention.w_q)
    return model


OTHERWISE = {
    "a window": lambda: translator(pattern=rg.causal() & rg.window(2)),
    "a position inside": lambda: translator(inside=rg.alibi()),
    "turned": lambda: translator(inside=rg.rope(), d_k=4),
    "another score": lambda: translator(score="additive"),
    "hard": lambda: translator(temperature=0),
    "a softcap": lambda: translator(softcap=2.0),
    "sink logits": lambda: translator(sink_logits=True),
    "no residual": lambda: translator(residual=False),
    "batch norm": lambda: translator(norm="batch"),
    "a listener": listened,
    "an exchanged part": exchanged,
    "half precision": lambda: translator().bfloat16(),
}


@pytest.mark.parametrize("why", OTHERWISE)
def test_unsupported_stacks_run_by_their_modules(why):
    model, (source, lengths) = OTHERWISE[why](), sources()
    assert type(steps(model, source, lengths)[0]) is StackSteps
    assert (
        len(generate(model, [[1]] * 6, source=source, source_lengths=lengths, max_new_tokens=3).rows()) == 6
    )


@pytest.mark.parametrize("autocast", [True, False])
def test_autocast_takes_the_general_path(autocast):
    model, (source, lengths) = translator().float(), sources()
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        assert (type(steps(model, source, lengths)[0]) is StackSteps) == autocast


def test_a_row_without_an_allowed_key_takes_the_general_path():
    model, (source, lengths) = translator(), sources()
    lengths[2] = 0
    assert type(steps(model, source, lengths)[0]) is StackSteps
    generated = generate(model, [[1]] * 6, source=source, source_lengths=lengths, max_new_tokens=3)
    assert bool(generated.log_probs.isfinite().all())


def test_without_log_p_the_tokens_are_the_same_and_it_is_none():
    model, (source, lengths) = translator(), sources()
    for strategy in (greedy(), beam(2)):
        given = {"source": source, "source_lengths": lengths, "max_new_tokens": 9, "eos_id": END}
        with_it, without = (
            generate(model, [[1]] * 6, strategy, return_log_probs=p, **given) for p in (True, False)
        )
        assert with_it.rows() == without.rows() and without.log_probs is None


@pytest.mark.parametrize("slots", [3, 1000], ids=["removed at each step", "never removed"])
@pytest.mark.parametrize("heads", [{"heads": 4}, {"heads": 4, "kv_heads": 2}], ids=str)
def test_beams_that_share_their_past_find_what_the_modules_find(heads, slots, monkeypatch):
    monkeypatch.setattr(cpu_inference, "SLOTS_BETWEEN", slots)
    kept = []
    real = KeyValues.keep_slots
    monkeypatch.setattr(KeyValues, "keep_slots", lambda *given: kept.append(given[1]) or real(*given))
    own = rg.Attention(16, pattern=rg.full(), **heads)
    past = rg.Attention(16, pattern=rg.causal(), **heads)
    embedding = rg.Embedding(23, 16, position=rg.sinusoidal())
    torch.manual_seed(1)
    model = rg.EncoderDecoder(
        rg.Encoder(rg.Block(own, rg.FeedForward(24)), 1, embedding=embedding),
        rg.Decoder(
            rg.Block(past, rg.FeedForward(24), cross=own), 2, embedding=embedding, head=rg.LanguageHead()
        ),
    ).build()
    source, lengths = torch.randint(23, (5, 6)), torch.tensor([6, 2, 5, 1, 4])
    given = {"source": source, "source_lengths": lengths, "max_new_tokens": 12, "eos_id": 3}
    fast = generate(model.double(), [[1]] * 5, beam(3), **given)
    # Ten times a slot per beam was added, and beams were abandoned.
    assert not kept if slots == 1000 else len(kept) == 2 * 10 and kept[-1].shape[1] < 1 + 3 * 10
    model.decoder.blocks[0].register_forward_hook(lambda *_: None)  # hooks need the modules themselves
    slow = generate(model, [[1]] * 5, beam(3), **given)
    assert fast.rows() == slow.rows()
    torch.testing.assert_close(fast.log_probs, slow.log_probs)


@pytest.mark.parametrize("strategy", [greedy(), beam(3, length_penalty=0.6)], ids=["greedy", "beam"])
def test_many_rows_of_different_lengths_give_what_each_gives_alone(strategy):
    """33 rows are sorted, encoded in groups and decoded in four parts; each has its own limit of tokens."""
    model, noise = translator(**BLOCKS["pre, gelu"]), torch.Generator().manual_seed(7)
    lengths = torch.randint(1, 30, (33,), generator=noise)
    source = torch.randint(4, VOCAB, (33, 30), generator=noise)
    limits = torch.randint(3, 9, (33,), generator=noise).tolist()
    together = generate(
        model, [[1]] * 33, strategy, source=source, source_lengths=lengths, max_new_tokens=limits, eos_id=END
    )
    for row, (n, limit) in enumerate(zip(lengths.tolist(), limits, strict=True)):
        alone = generate(
            model, [[1]], strategy, source=source[row : row + 1, :n], max_new_tokens=limit, eos_id=END
        )
        assert together.rows()[row] == alone.rows()[0]
        assert float(together.log_probs[row]) == pytest.approx(float(alone.log_probs[0]), abs=1e-6)


def test_the_parts_of_a_context_hold_every_row_once_with_little_padding():
    model = translator()
    decoder, caches = cpu_inference.token_decoder(model.decoder), model.decoder.cache().layers
    lengths = torch.arange(40, 0, -1)
    decoder.read(torch.randn(40, 40, 12).double(), lengths, caches)
    layers = decoder.context_parts(lengths, caches)
    for parts, cache in zip(layers, caches, strict=True):
        assert [(p.rows, p.of, p.k.shape[2]) for p in parts] == [(10, 40, keys) for keys in (40, 30, 20, 16)]
        real = torch.cat([p.bias.isfinite().sum(-1)[::3, 0] for p in parts])
        assert torch.equal(real, lengths)
        assert all(p.k.data_ptr() == cache.cross.k[i * 10].data_ptr() for i, p in enumerate(parts))
        assert all(p.v.data_ptr() == cache.cross.v[i * 10].data_ptr() for i, p in enumerate(parts))
    assert all(
        p.bias is None for parts in decoder.context_parts(torch.full((40,), 17), caches) for p in parts
    )
    assert all(
        (p.bias is None) == (n == 16)
        for n in (7, 16)
        for p in decoder.context_parts(torch.full((40,), n), caches)[0]
    )
    assert [len(parts) for parts in decoder.context_parts(None, caches)] == [1, 1]


@torch.no_grad()
def test_the_context_is_dropped_once_its_keys_and_values_are_in_the_cache():
    """Otherwise every row that ends copies the states of all others."""
    model, (source, lengths) = translator(), sources()
    decoder, _ = steps(model, source, lengths)
    decoder.next(torch.ones(6, 1, dtype=torch.long))
    assert decoder.context is None and decoder.cache.layers[0].cross.rows == 6


def test_rows_of_equal_length_are_encoded_without_padding(monkeypatch):
    model, (source, lengths) = translator(), sources()
    shapes, real = [], torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda q, *given, **options: shapes.append(tuple(q.shape[:3])) or real(q, *given, **options),
    )
    cpu_inference.encode(model.encoder, source, lengths)
    assert shapes == 2 * [(1, 3, 1), (1, 3, 2), (1, 3, 3), (1, 3, 5), (2, 3, 7)]

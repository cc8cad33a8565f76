"""Bounded caches hold exactly the keys that a future query may see, and generate what the uncached model does."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    StaticCache,
)

import regard as rg
from regard.interop.huggingface import BoundedCache
from regard.interop.huggingface.lifetimes import FOREVER, Lifetimes

IDS = torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(0))
OPTIONS = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False}
PATTERNS = [
    rg.causal() & (rg.window(4) | rg.sinks(2)),
    rg.window(3) | rg.every(5),
    rg.blocks(6) | rg.sinks(1),
    rg.dilated(3, 2) | rg.sinks(1),
    rg.strided(3) | rg.window(1),
    rg.rows(4, 3) | rg.window(2),
    (rg.causal() | rg.prefix(4)) & rg.window(7),
]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def decoder(config_class, **options):
    """A small decoder with weights large enough that another set of keys gives other logits."""
    torch.manual_seed(0)
    config = config_class(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, **options,
    )  # fmt: skip
    made = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for p in made.parameters():
            if p.dim() > 1:
                p.normal_(0, 0.25)
    return made


def check_steps(model, pattern, rows, steps, make_cache):
    """The logits of each step over a cache are those of the whole sequence without one, where tokens are real."""
    mask = torch.tensor(rows)
    ids = torch.randint(3, 61, mask.shape, generator=torch.Generator().manual_seed(1))
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with rg.use(model, pattern), torch.no_grad():
        whole = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        cache, at = make_cache(model), 0
        for n in steps:
            here = slice(at, at + n)
            at += n
            made = model(
                ids[:, here],
                attention_mask=mask[:, :at],
                position_ids=positions[:, here],
                past_key_values=cache,
            ).logits
            real = mask[:, here].bool()
            torch.testing.assert_close(made[real], whole[:, here][real], rtol=1e-3, atol=1e-4)


def dynamic(model):
    return DynamicCache(config=model.config)


def static(model):
    return StaticCache(config=model.config, max_cache_len=16)


def uncached(model, ids, steps):
    with torch.no_grad():
        for _ in range(steps):
            logits = model(ids, use_cache=False).logits[:, -1:]
            logits[..., 2] = -torch.inf  # min_new_tokens excludes the end of the text
            ids = torch.cat([ids, logits.argmax(-1)], 1)
    return ids


@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_lifetimes_are_those_of_the_dense_table(pattern):
    lifetimes, n, later = Lifetimes(pattern), 40, 400
    table = (rg.causal() & pattern).allowed(later)
    last = torch.where(table, torch.arange(later)[:, None], -1).amax(0)[:n]
    forever = last >= later - lifetimes.period  # seen in the last period: seen again and again
    assert torch.equal(lifetimes.last_queries(torch.arange(n)), torch.where(forever, FOREVER, last))


OTHERS = [pytest.param(p, marks=pytest.mark.long) for p in PATTERNS[2:]]


@pytest.mark.parametrize("pattern", [*PATTERNS[:2], *OTHERS], ids=repr)
def test_generation_equals_the_uncached_model(model, pattern):
    with rg.use(model, pattern):
        cache = BoundedCache(model)
        assert torch.equal(model.generate(IDS, past_key_values=cache, **OPTIONS), uncached(model, IDS, 16))
    length = IDS.shape[1] + 15  # the last token is not in the cache
    assert cache.get_seq_length() == length
    table = (rg.causal() & pattern).allowed(400)
    needed = int(table[length:, :length].any(0).sum())
    assert cache.held == [needed, needed]


def test_memory_is_constant_and_layers_and_heads_may_differ(model):
    wide, narrow = rg.window(6) | rg.sinks(1), rg.window(2)
    with rg.use(model, {0: wide, 1: [narrow, narrow, rg.window(4), narrow]}):
        cache = BoundedCache(model)
        tokens = model.generate(
            IDS, past_key_values=cache, **{**OPTIONS, "max_new_tokens": 60, "min_new_tokens": 60}
        )
        assert torch.equal(tokens[:, :25], uncached(model, IDS, 16))
    assert cache.held == [7, 4]
    room = [layer.keys.shape[2] for layer in cache.layers]  # one more for the query's own key, and a quarter
    assert room[0] <= 10 and room[1] <= 6


def test_chunked_prefill_and_beams_work(model):
    pattern = rg.window(4) | rg.sinks(2)
    with rg.use(model, pattern), torch.no_grad():
        whole = model(IDS, use_cache=False).logits
        cache = BoundedCache(model)
        parts = [model(part, past_key_values=cache).logits for part in IDS.split([3, 5, 1], 1)]
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-5)
        longer = torch.randint(3, 61, (2, 17), generator=torch.Generator().manual_seed(1))
        mixed, cache = (
            longer.split([5, 1, 1, 1, 1, 4, 1, 2, 1], 1),
            BoundedCache(model),
        )  # tokens take freed places
        parts = [model(part, past_key_values=cache).logits for part in mixed]
        torch.testing.assert_close(
            torch.cat(parts, 1), model(longer, use_cache=False).logits, rtol=1e-4, atol=1e-5
        )
        beams = {**OPTIONS, "num_beams": 3}
        expected = model.generate(IDS, **beams)
        assert torch.equal(model.generate(IDS, past_key_values=BoundedCache(model), **beams), expected)


def test_a_cache_used_outside_no_grad_has_the_gradients_of_the_uncached_model(model):
    ids = torch.randint(3, 61, (1, 12), generator=torch.Generator().manual_seed(2))

    def gradients(logits):
        model.zero_grad()
        logits.square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    with rg.use(model, rg.window(4) | rg.sinks(2)):
        expected = gradients(model(ids, use_cache=False).logits)
        cache = BoundedCache(model)
        parts = [model(part, past_key_values=cache).logits for part in ids.split([5, *[1] * 7], 1)]
        for found, wanted in zip(gradients(torch.cat(parts, 1)), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-6)


def test_left_padding_is_right_for_windows_and_refused_where_positions_are_named(model):
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), IDS], 1)
    mask = (padded != 0).long()
    with rg.use(model, rg.window(4)):
        expected = model.generate(IDS, **OPTIONS)
        made = model.generate(padded, attention_mask=mask, past_key_values=BoundedCache(model), **OPTIONS)
        assert torch.equal(made[:, 3:], expected)
    with (
        rg.use(model, rg.window(4) | rg.sinks(2)),
        pytest.raises(rg.SpecError, match="left padding moves the positions"),
    ):
        model.generate(padded, attention_mask=mask, past_key_values=BoundedCache(model), **OPTIONS)


@pytest.mark.parametrize("steps", [[4, 1, 1], [4, 2]], ids=str)
@pytest.mark.parametrize("pattern", [rg.causal() & rg.blocks(4), rg.every(2) | rg.window(0)], ids=repr)
@pytest.mark.parametrize("make_cache", [dynamic, static])
def test_a_hole_at_the_start_of_a_sliding_cache_is_no_left_padding(make_cache, pattern, steps):
    model = decoder(MistralConfig, sliding_window=3)
    check_steps(model, pattern, [[1, 1, 0, 1, 1, 1]], steps, make_cache)
    check_steps(model, pattern, [[0, 1, 1, 1, 1, 1], [1, 1, 0, 1, 1, 1]], steps, make_cache)


@pytest.mark.parametrize("steps", [[7, 1, 1], [6, 1, 4]], ids=str)
@pytest.mark.parametrize("pattern", [rg.causal() & rg.window(3), rg.causal() & rg.blocks(5)], ids=repr)
def test_chunks_of_the_model_stay_where_they_are_when_a_bounded_cache_drops_keys(pattern, steps):
    model = decoder(
        Llama4TextConfig, head_dim=8, attention_chunk_size=7, intermediate_size_mlp=48, num_local_experts=1,
        num_experts_per_tok=1, layer_types=["chunked_attention"] * 2,
    )  # fmt: skip
    check_steps(model, pattern, [[1] * sum(steps)], steps, BoundedCache)


@pytest.mark.parametrize(
    "rows", [[[0, 0, 0, 1, 1, 1, 1]], [[0, 0, 1, 1, 1, 1, 1], [1, 0, 0, 0, 1, 1, 1]]], ids=str
)
@pytest.mark.parametrize("steps", [[5, 1, 1], [4, 3]], ids=str)
def test_each_layer_of_a_bounded_cache_leaves_out_the_padding_that_it_holds(rows, steps):
    model = decoder(LlamaConfig)
    for patterns in ({0: rg.window(1), 1: rg.window(4)}, {0: rg.window(4), 1: rg.window(1)}):
        check_steps(model, patterns, rows, steps, BoundedCache)


NAMING = [rg.causal() & rg.blocks(4), rg.every(2) | rg.window(0), rg.causal() & (rg.window(1) | rg.sinks(2))]


@pytest.mark.parametrize("start", range(6))
@pytest.mark.parametrize("pattern", NAMING, ids=repr)
def test_left_padding_in_a_bounded_cache_is_right_or_refused_where_positions_are_named(pattern, start):
    model, n = decoder(LlamaConfig), 13
    period = pattern.shift_period
    for steps in ([12, 1], [6, 1, 5, 1], [7, 1, 1, 4]):
        for rows in ([start], [start, 4], [start, 0]):
            mask = [[0] * s + [1] * (n - s) for s in rows]
            try:
                check_steps(model, pattern, mask, steps, BoundedCache)
            except rg.SpecError as error:
                assert "left padding moves the positions" in str(error)
                assert any(s % period if period else s for s in rows)
    check_steps(model, pattern, [[0] * start + [1] * (n - start)], [n], BoundedCache)


@pytest.mark.parametrize("pattern", NAMING, ids=repr)
def test_right_padding_and_holes_move_no_position_in_a_bounded_cache(pattern):
    rows = [[1, 1, 0, 1, 1, 1, 1, 1, 1], [1, 0, 0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 0, 0]]
    for steps in ([6, 1, 1, 1], [5, 1, 3]):
        check_steps(decoder(LlamaConfig), pattern, rows, steps, BoundedCache)
        check_steps(decoder(LlamaConfig), pattern, rows[2:], steps, BoundedCache)


def test_what_a_bounded_cache_cannot_do_says_why(model):
    with pytest.raises(rg.SpecError, match="no layer has a pattern"):
        BoundedCache(model)
    with pytest.raises(rg.SpecError, match="repeats itself after 100,003 queries"):
        Lifetimes(rg.strided(100_003))
    with pytest.raises(rg.SpecError, match="carries data, so no cache can know"):
        Lifetimes(rg.documents(torch.zeros(3, dtype=torch.long)))
    with rg.use(model, rg.window(3)):
        cache = BoundedCache(model)
        model(IDS, past_key_values=cache)
        with pytest.raises(rg.SpecError, match="it cannot go back"):
            cache.layers[0].crop(-1)
        cache.reset()
        assert cache.get_seq_length() == 0


MIXED = [
    [0, 0, 0, 1, 1, 1, 1, 1, 1],
    [1, 1, 0, 1, 1, 0, 1, 1, 1],
    [1] * 9,
    [1, 1, 1, 1, 1, 1, 0, 0, 0],
    [0] + [1] * 8,
]


@pytest.mark.parametrize("steps", [[9], [5, 3, 1], [8, 1]], ids=str)
@pytest.mark.parametrize(
    "pattern",
    [rg.causal() & rg.blocks(4), rg.window(1) | rg.every(3), {0: rg.sinks(1) | rg.window(1)}],
    ids=str,
)
@pytest.mark.parametrize("sliding", [None, 4], ids=["Llama", "Mistral"])
def test_a_row_is_what_it_is_alone_whatever_padding_and_holes_the_others_have(sliding, pattern, steps):
    """Positions count from a row's first real token, and in a row with holes from its first key."""
    model = decoder(LlamaConfig) if sliding is None else decoder(MistralConfig, sliding_window=sliding)
    mask, generator = torch.tensor(MIXED), torch.Generator().manual_seed(1)
    ids = torch.randint(3, 61, mask.shape, generator=generator)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)

    def last_logits(rows):
        cache, at, outs = DynamicCache(config=model.config), 0, []
        for n in steps:
            here = slice(at, at + n)
            at += n
            given = {"attention_mask": mask[rows, :at], "position_ids": positions[rows, here]}
            outs.append(model(ids[rows, here], **given, past_key_values=cache).logits)
        return torch.cat(outs, 1)[mask[rows].bool()]

    with rg.use(model, pattern), torch.no_grad():
        together = last_logits(slice(None)).split(mask.sum(-1).tolist())
        for row, found in enumerate(together):
            alone = last_logits(slice(row, row + 1))
            torch.testing.assert_close(found, alone, rtol=1e-3, atol=1e-4)

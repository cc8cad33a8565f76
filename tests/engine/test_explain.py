"""What `explain` names is what runs; arguments that change nothing change neither the bits nor the backend."""

import random
from functools import cache

import pytest
import torch

import regard as rg
from long_cases import in_long
from random_calls import WORDS, observed, random_call
from regard.engine.attention import attention
from regard.engine.backends import PREPARED
from regard.engine.explain import explain, facts_from
from regard.errors import ShapeError


@pytest.fixture(autouse=True)
def nothing_prepared():
    PREPARED.clear()
    yield
    PREPARED.clear()


@cache
def explained(seed):
    """The explanation of a random call, for the tests that read it; None if it is refused."""
    given, options = random_call(seed)
    try:
        return explain(*given, **options)
    except ShapeError:  # n > m without an offset
        return None


@pytest.mark.parametrize("block", [0, 1, *in_long(2, 3, 4, 5)])
def test_what_is_explained_is_what_runs(block):
    """300 random calls, each twice: the first prepares, the second finds it prepared."""
    seen = set()
    for seed in range(50 * block, 50 * block + 50):
        given, options = random_call(seed)
        if (result := explained(seed)) is None:
            continue
        for _ in range(2):
            with observed() as ran:
                attention(*given, **options)
            assert set(ran) == {f"{result.backend}, {result.variant}"}, (seed, given[3], options)
        seen.add(ran[0])
    assert len(seen) >= 4


def test_every_variant_on_the_cpu_is_met_by_these_calls():
    wanted = {"reference", "sdpa", "tiles"}
    wanted |= {"short sequence: gathered keys", "merged tiles", "packed documents", "bias by distance"}
    met: set[str] = set()
    for result in filter(None, map(explained, range(300))):
        met |= {result.backend, result.variant}
        if wanted <= met:
            break
    assert wanted <= met


def test_sizes_explain_what_tensors_explain():
    for seed in range(100):
        (q, k, v, pattern), options = random_call(seed)
        if isinstance(pattern, torch.Tensor) or isinstance(options.get("at"), torch.Tensor):
            continue
        by_tensors = explain(q, k, v, pattern, **options)
        bias = options.pop("bias", None)
        if "lengths" in options:
            options["lengths"] = min(options["lengths"].tolist()) < k.shape[2]
        by_sizes = explain(
            rg.full() if pattern is None else pattern,
            q.shape[2],
            k.shape[2],
            d_k=q.shape[3],
            d_v=v.shape[3],
            batch=q.shape[0],
            heads=q.shape[1],
            kv_heads=k.shape[1],
            dtype=q.dtype,
            grad=q.requires_grad,
            bias="none" if bias is None else "tensor" if isinstance(bias, torch.Tensor) else "distance",
            bias_grad=getattr(bias, "table", None) is not None and q.requires_grad,
            **options,
        )
        assert by_tensors == by_sizes, seed


# Arguments that change nothing.


def same_call(rng, q, k, options):
    """Options that say what is so without them."""
    b, n, m, d = q.shape[0], q.shape[2], k.shape[2], q.shape[3]
    every = {
        "at": [m - n, (m - n, 1), torch.full((b,), m - n)],
        "lengths": [torch.full((b,), m), torch.tensor([[0, m]]).repeat(b, 1)],
        "scale": [d**-0.5, 1 / d**0.5],
        "dropout_p": [0.0, 0],
        "ties": ["first"],
    }
    names = [name for name in every if name not in options and rng.random() < 0.5]
    return {name: rng.choice(every[name]) for name in names}


def results(given, options):
    torch.manual_seed(0)
    out = attention(*given, **options)
    outs = out if isinstance(out, tuple) else (out,)
    inputs = [x for x in given[:3] if x.requires_grad]
    return *outs, *(torch.autograd.grad(sum(o.float().sum() for o in outs), inputs) if inputs else ())


def test_arguments_that_change_nothing_change_no_bit():
    rng = random.Random(0)
    for seed in range(120):
        given, options = random_call(seed)
        options.pop("lengths", None)
        q, k = given[:2]
        if options.get("scale") == float("inf") or "at" in options or given[3] is None:
            continue
        more = same_call(rng, q, k, options)
        assert explain(*given, **options) == explain(*given, **options, **more)
        plain, said = results(given, options), results(given, {**options, **more})
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(plain, said, strict=True)), (
            seed,
            more,
        )


@pytest.mark.parametrize("grad", [False, True])
def test_full_and_a_table_of_ones_are_no_pattern(grad):
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, n, 16, generator=g, requires_grad=grad) for n in (37, 61, 61))
    plain = results((q, k, v), {})
    for every in (rg.full(), torch.ones(37, 61, dtype=torch.bool), torch.ones(2, 1, 1, 61, dtype=torch.bool)):
        assert explain(q, k, v, every).variant == "dense"
        assert all(map(torch.equal, plain, results((q, k, v, every), {})))
    holed = torch.ones(37, 61, dtype=torch.bool)
    holed[20, 30] = False
    assert explain(q, k, v, holed).variant == "masked"


def test_an_offset_that_nothing_reads_is_none():
    q = torch.randn(1, 2, 9, 8)
    for pattern in (None, rg.full(), rg.every(3), rg.sinks(2)):
        assert torch.equal(attention(q, q, q, pattern, at=5), attention(q, q, q, pattern))
    assert not torch.equal(attention(q, q, q, rg.window(1), at=5), attention(q, q, q, rg.window(1)))


def test_an_offset_at_its_default_is_looked_up_as_if_it_were_not_there():
    q = torch.randn(1, 2, 40, 8)
    for word in WORDS:
        attention(q, q, q, word)
        known = len(PREPARED)
        attention(q, q, q, word, at=0)
        assert len(PREPARED) == known


def test_arguments_of_other_libraries_name_what_to_write():
    q = torch.randn(1, 1, 3, 4)
    with pytest.raises(rg.SpecError) as e:
        rg.attention(q, q, q, is_causal=True)
    assert str(e.value) == (
        "is_causal is not an argument here; declare it: rg.attention(q, k, v, pattern=rg.causal())"
    )
    with pytest.raises(
        rg.SpecError, match=r"^attn_mask is not an argument here; give a bool tensor .* as pattern= "
    ):
        rg.attention(q, q, q, attn_mask=None)
    with pytest.raises(
        rg.SpecError, match=r"^enable_gqa is not an argument here; heads are grouped wherever"
    ):
        rg.attention(q, q, q, enable_gqa=True)
    for name, instead in {"mask": "pattern=", "dropout": "dropout_p", "key_padding_mask": "lengths="}.items():
        with pytest.raises(rg.SpecError, match=f"^{name} is not an argument here; .*{instead}"):
            rg.attention(q, q, q, **{name: None})
    with pytest.raises(TypeError, match=r"^attention\(\) got an unexpected keyword argument 'patern'$"):
        rg.attention(q, q, q, patern=None)


@pytest.mark.parametrize("shape", [(), (3,), (3, 4)])
def test_pairs_are_shares_of_all_batch_rows_and_heads_that_data_tell_apart(shape):
    own = torch.arange(4)[:, None].expand(*shape, 4, 1)
    q = torch.randn(3, 4, 64, 8)
    found = [explain(q, q, q, rg.selected(own, 16), backend="sdpa")]
    if len(shape) < 2:
        chains = torch.arange(64) - 1
        found.append(explain(q, q, q, rg.tree(chains.masked_fill(chains % 16 == 15, -1).expand(*shape, 64))))
    tables = torch.zeros(shape).numel()
    for each, share in zip(found, (16 * 16, 16 * 17 // 2)):
        assert (each.rows, each.needed) == (tables, 4 * share * tables)
        assert f"of {64 * 64 * tables:,} ({4 * share / 64**2:.2%})" in str(each)
    assert found[0].computed == 64 * 64 * tables


def test_words_for_other_numbers_of_batch_rows_are_named():
    chains = torch.arange(6) - 1
    pattern = rg.tree(chains.expand(2, 6)) & rg.documents(torch.zeros(3, 6, dtype=torch.long))
    for call in (lambda: explain(pattern, 6), lambda: pattern.count(6), lambda: pattern.block_mask(6)):
        with pytest.raises(ShapeError) as error:
            call()
        assert str(error.value) == (
            "tree(<2×6 parents>) has data for 2 batch rows, and there are 3; give it for each, or for all"
        )


def test_sizes_of_a_pattern_per_head_need_no_number_of_heads():
    heads = rg.per_head([rg.causal(), rg.causal(), rg.window(3)])
    assert explain(heads, n=20) == explain(heads, n=20, heads=3)


@pytest.mark.parametrize("kind", [list, tuple])
def test_sizes_take_a_list_of_patterns_as_a_call_does(kind):
    heads = kind([rg.causal(), rg.causal() & rg.window(3), rg.causal()])
    found = explain(heads, 37)
    assert found == explain(rg.per_head(heads), 37) and found.needed == sum(p.count(37) for p in heads)
    assert explain(None, 37) == explain(rg.full(), 37)
    assert facts_from(torch.ones(37, 37, dtype=torch.bool), 37).table and not facts_from(rg.full(), 37).table
    with pytest.raises(rg.SpecError, match=r"^per_head: head 1: 'causal\(\)' is not a pattern"):
        explain([rg.causal(), "causal()"], 37)
    with pytest.raises(rg.SpecError, match=r"^'causal\(\)' is not a pattern; use rg\.causal\(\)"):
        explain("causal()", 37)


def test_pairs_of_a_pattern_per_head_are_those_of_all_heads_and_of_batch_rows_that_data_tell_apart():
    packed = rg.causal() & rg.documents(torch.stack([torch.zeros(64), torch.arange(64) // 16]).long())
    found = explain(rg.per_head([packed, packed, rg.window(3)]), n=64, batch=2, backend="sdpa")
    assert found.rows == 3 * 2
    assert found.needed == found.pattern.count(64) == 2 * (2080 + 4 * 136) + 2 * (64 * 7 - 12)
    assert found.computed == 3 * 2 * 64 * 64


def test_sizes_alone_are_of_eight_heads_with_keys_and_values_of_their_own():
    assert facts_from(rg.window(3), 20) == facts_from(rg.window(3), 20, heads=8, kv_heads=8, d_k=64, d_v=64)
    assert facts_from(rg.window(3), 20, heads=6, d_k=5).kv_heads == 6


def test_what_sizes_do_not_say_follows_from_what_they_say():
    assert facts_from(rg.window(3), 37, d_k=13).d_v == 13
    assert facts_from(rg.window(3), 37, d_k=13, d_v=17).d_v == 17
    for bias in ("none", "tensor", "distance"):
        for grad in (False, True):
            facts = facts_from(rg.window(3), 37, bias=bias, grad=grad)
            assert facts.bias_grad == (grad and bias != "none")
    assert not facts_from(rg.window(3), 37, bias="tensor", grad=True, bias_grad=False).bias_grad
    assert facts_from(rg.window(3), 37, left_padding=True).lengths
    assert not facts_from(rg.window(3), 37).lengths


def test_the_reason_against_gathered_keys_is_the_one_that_holds():
    """selected(…) runs by gathered keys where it can; each test below fails one condition of that."""
    apart = torch.arange(16)[:, None]  # each block its own: few keys
    mixed = torch.arange(16).flip(0).roll(3)[:, None] * 5 % 16
    assert explain(rg.selected(apart, 8), n=128).variant == "gathered keys"
    reasons = {
        "from 64 queries on": (rg.selected(apart[:4], 8), 32, {}),
        "in 32 or 64 bits": (rg.selected(apart, 8), 128, {"dtype": torch.bfloat16}),
        "differ by batch row or head": (rg.selected(torch.stack([apart, mixed]), 8), 128, {"batch": 2}),
        "each 64 neighboring queries need most of the keys": (
            rg.selected(mixed, 8) | rg.window(9),
            64 * 2,
            {},
        ),
        "a function decides": (rg.where(lambda i, j: i == j), 128, {}),
    }
    for reason, (pattern, n, options) in reasons.items():
        found = explain(pattern, n=n, **options)
        assert found.backend == "sdpa" and reason in found.reason
        assert sum(other in found.reason for other in reasons) <= 2  # the first two are one sentence


@pytest.mark.parametrize(
    "options, message",
    [
        ({"n": None}, r"^n is missing: rg.explain\(pattern, n=1024\), or give the call"),
        ({"dtype": "bfloat"}, r"^unknown dtype 'bfloat'; did you mean bfloat16\?$"),
        ({"device": "tpu"}, r"^unknown device 'tpu'; use 'cpu' or 'cuda'$"),
        ({"heads": 8, "kv_heads": 3}, r"^3 key/value heads do not divide 8 query heads$"),
        ({"heads": 2.0}, r"^heads=2.0: a whole number is needed$"),
        ({"d_k": -4}, r"^d_k=-4: a whole number is needed$"),
        ({"bias": True}, r"^bias=True; with sizes instead of tensors, use 'none', 'tensor', 'distance'$"),
        ({"lengths": torch.tensor([3])}, r"^lengths is a tensor of shape \(1,\); with sizes .*: lengths=True$"),
        ({"grad": "no"}, r"^grad is 'no'; with sizes instead of tensors, say True or False: grad=True$"),
        ({"at": torch.tensor([3])}, r"^at is a tensor; with sizes instead of tensors, say row_offsets=True$"),
        ({"softcap": -1}, r"^softcap=-1 is not above 0"),
        ({"dropout_p": 3.0}, r"^dropout_p=3.0 is not in \[0, 1\)$"),
        ({"scale": "x"}, r"^scale='x': the factor of q·k is a number"),
        ({"higher": True}, r"^explain\(\) has no argument 'higher'; known: at, batch"),
    ],
    ids=lambda given: str(next(iter(given))) if isinstance(given, dict) else "",
)  # fmt: skip
def test_sizes_are_refused_as_a_call_refuses_them(options, message):
    with pytest.raises(ValueError, match=message) as raised:
        explain(rg.window(1), **{"n": 16, **options})
    assert isinstance(raised.value, rg.RegardError)


def test_sizes_take_names_of_dtypes_and_devices_and_a_table_as_a_call_does():
    for device in ("cuda", torch.device("cuda")):
        named = explain(rg.window(64), 4096, dtype="bfloat16", device=device)
        assert named == explain(rg.window(64), 4096, dtype=torch.bfloat16, device="cuda")
    assert explain(torch.ones(16, 16, dtype=torch.bool), 16).reason.startswith("tiles cannot: a bool tensor")
    assert explain(rg.causal(), 10**17).backend == "sdpa"


def test_the_numbers_of_many_heads_are_apart_from_their_pattern():
    text = str(rg.explain([rg.causal(), rg.window(1)] * 8, n=64, heads=16))
    assert "\n  heads 0, 2, 4, 6, 8, 10, … causal(): " in text, text
    assert "\n  heads 0, 2, 4, 6 causal(): " in str(rg.explain([rg.causal(), rg.window(1)] * 4, n=64))

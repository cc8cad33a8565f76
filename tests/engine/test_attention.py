"""`attention` against the formula, in float64: every pattern, every argument, outputs and gradients."""

from math import floor, inf, log2, nan, sqrt

import jaxtyping
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask
from torch.testing import assert_close

from pattern_strategies import offsets, patterns
from regard import reference
from regard.engine import reference_backend
from regard.engine.attention import attention, weights
from regard.engine.explain import explain
from regard.errors import BackendError, ShapeError, SpecError
from regard.pattern import (
    Pattern,
    blocks,
    causal,
    dilated,
    documents,
    every,
    full,
    lengths,
    prefix,
    rows,
    selected,
    sinks,
    strided,
    where,
    window,
)
from regard.position import ByDistance, alibi_slopes

B, H, H_KV, N, M, D_K, D_V = 2, 6, 3, 7, 11, 5, 3
f64 = torch.float64

WORDS = [
    full(),
    causal(),
    window(2),
    window(1, 0),
    dilated(2, 3),
    every(4),
    every(4, 3),
    strided(3),
    rows(3, 1),
    sinks(2),
    prefix(4),
    blocks(3),
    causal() & (window(2) | every(4)),
    ~window(1) - sinks(1),
]


def randn(*shape, seed=0, dtype=f64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=f64).to(dtype)


def qkv(b=B, h=H, h_kv=H_KV, n=N, m=M, d_k=D_K, d_v=D_V, dtype=f64):
    shapes = (b, h, n, d_k), (b, h_kv, m, d_k), (b, h_kv, m, d_v)
    return tuple(randn(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes))


def integers(*shape, seed=0):
    """Small whole numbers: scores tie often, and are exact."""
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).to(f64)


def query_positions(n, m, at):
    """The positions of the queries: (n, 1), or (b, 1, n, 1) for one offset a batch row."""
    start, step = at if isinstance(at, tuple) else (m - n if at is None else at, 1)
    if isinstance(at, torch.Tensor):
        return at[:, None, None, None] + torch.arange(n)[:, None]
    return start + step * torch.arange(n)[:, None]


def formula(q, k, v, pattern=None, *, at=None, lengths=None, bias=None, **rest):
    """What `attention` must give: every table dense, every head its own, by the reference."""
    (b, h, n, _), m = q.shape, k.shape[2]
    i, j = query_positions(n, m, at), torch.arange(m)
    allowed = torch.ones(b, h, n, m, dtype=torch.bool)
    if isinstance(pattern, Pattern):
        allowed = allowed & pattern.allows(i, j)
    elif pattern is not None:
        allowed = allowed & pattern
    if lengths is not None:
        allowed = allowed & (j < lengths[:, None, None, None])
    if isinstance(bias, ByDistance):
        distance = (j - i).expand(b, 1, n, m)
        total = torch.zeros(b, h, n, m, dtype=f64)
        if bias.table is not None:
            reach = bias.table.shape[1] // 2
            total = total + torch.stack(
                [row[distance[:, 0].clamp(-reach, reach) + reach] for row in bias.table], 1
            )
        if bias.slopes is not None:
            total = total - bias.slopes[:, None, None] * distance.abs()
        bias = total
    k, v = (x.repeat_interleave(h // x.shape[1], 1) for x in (k, v))
    return reference.attend(q, k, v, allowed, bias=bias, **rest)


def with_gradients(f, *inputs):
    """f of the inputs, and the gradients of a fixed random mix of its outputs; an output of −∞ counts as 0."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = f(*leaves)
    outs = (out,) if isinstance(out, torch.Tensor) else tuple(out)
    total = sum((x.masked_fill(x == -inf, 0) * randn(*x.shape, seed=97)).sum() for x in outs)
    return [*outs, *torch.autograd.grad(total, leaves)]


def agree(got, expected, t=1e-10):
    for mine, other in zip(got, expected, strict=True):
        assert_close(mine, other, rtol=0, atol=t)


def compare(pattern, inputs, by=(), **arguments):
    """`attention` and the formula, outputs and gradients; with the log-sum-exp, and without where it can be."""
    make = arguments.pop("make", lambda *extra: {})

    def attend(q, k, v, *extra):
        return attention(q, k, v, pattern, **arguments, **make(*extra))

    def both(q, k, v, *extra):
        return attention(q, k, v, pattern, **arguments, **make(*extra), return_lse=True)

    def expected(q, k, v, *extra):
        got = formula(q, k, v, pattern, **arguments, **make(*extra))
        return got.o, got.lse

    def output(*inputs):
        return expected(*inputs)[0]

    agree(with_gradients(attend, *inputs, *by), with_gradients(output, *inputs, *by))
    agree(with_gradients(both, *inputs, *by), with_gradients(expected, *inputs, *by))


sizes = st.fixed_dictionaries(
    {
        "b": st.sampled_from([1, 2]),
        "n": st.sampled_from([1, 2, 7]),
        "m": st.sampled_from([1, 3, 7, 11]),
        "d_v": st.sampled_from([D_K, D_V]),  # of one width with the keys PyTorch has a fused CPU kernel
    }
)
heads = st.sampled_from([(1, 1), (2, 2), (6, 2), (3, 1)])
planned = settings(max_examples=settings.default.max_examples // 3)  # each example makes a plan of its own


def sized(size, head, at=0):
    """q, k, v of these sizes; without `at` there are no more queries than keys."""
    assume(at is not None or size["n"] <= size["m"])
    return qkv(h=head[0], h_kv=head[1], **size)


# `attention` is the formula


@planned
@given(patterns, sizes, heads, offsets, st.sampled_from([None, None, 0.7, 0.0, -0.5]))
def test_any_pattern_is_the_formula(pattern, size, head, at, scale):
    compare(pattern, sized(size, head, at), at=at, scale=scale)


@pytest.mark.parametrize("backend", ["auto", "tiles", "sdpa", "reference"])
@pytest.mark.parametrize("pattern", WORDS, ids=repr)
def test_each_word_is_the_formula_by_every_backend(pattern, backend):
    inputs = qkv()
    got = with_gradients(lambda *x: attention(*x, pattern, backend=backend), *inputs)
    agree(got, with_gradients(lambda *x: formula(*x, pattern).o, *inputs))


@planned
@given(patterns, sizes, heads, offsets, st.booleans())
def test_any_pattern_is_the_formula_in_tiles(pattern, size, head, at, short):
    """By name: at such sizes `auto` takes a mask."""
    kept = torch.arange(size["b"]) * size["m"] // 2 if short else None  # row 0 has no key at all

    def attend(*x):
        return attention(*x, pattern, at=at, lengths=kept, backend="tiles", return_lse=True)

    def expected(*x):
        got = formula(*x, pattern, at=at, lengths=kept)
        return got.o, got.lse

    inputs = sized(size, head, at)
    agree(with_gradients(attend, *inputs), with_gradients(expected, *inputs))


MANY_TILES = [
    causal() & (window(20) | every(16)),
    dilated(4, 7),
    causal() & strided(13),
    blocks(64),
    prefix(150) | causal(),
    rows(50) | window(3),
]


@pytest.mark.parametrize("backend", ["auto", "tiles"])
@pytest.mark.parametrize("pattern", MANY_TILES, ids=repr)
def test_patterns_over_many_tiles_are_the_formula(pattern, backend):
    inputs = qkv(h=2, h_kv=1, n=211, m=307)
    for more in ({}, {"at": (3, 2), "lengths": torch.tensor([307, 130])}, {"at": -40}):

        def attend(*x, more=more):
            return attention(*x, pattern, **more, backend=backend, return_lse=True)

        def expected(*x, more=more):
            got = formula(*x, pattern, **more)
            return got.o, got.lse

        agree(with_gradients(attend, *inputs), with_gradients(expected, *inputs))


@pytest.mark.parametrize("d_v", [D_K, D_V])
@pytest.mark.parametrize("pattern", [full(), causal()], ids=repr)
def test_pytorchs_own_attention_is_taken_as_it_is(pattern, d_v):
    inputs = qkv(n=M, d_v=d_v)
    got = with_gradients(lambda *x: attention(*x, pattern, backend="sdpa"), *inputs)
    agree(got, with_gradients(lambda *x: formula(*x, pattern).o, *inputs))
    one = qkv(n=1, d_v=d_v)  # one query after a cache sees every key
    assert_close(attention(*one, pattern, backend="sdpa"), formula(*one, pattern).o, rtol=0, atol=1e-12)


@given(patterns, sizes, st.data())
def test_lengths_and_one_offset_a_row_are_the_formula(pattern, size, data):
    b, m = size["b"], size["m"]
    kept = torch.tensor(data.draw(st.lists(st.integers(0, m), min_size=b, max_size=b), label="lengths"))
    at = torch.tensor(data.draw(st.lists(st.integers(-3, m), min_size=b, max_size=b), label="at"))
    compare(pattern, sized(size, (6, 2)), lengths=kept, at=at)


@given(patterns, sizes, st.data())
def test_a_bias_of_any_shape_that_broadcasts_is_the_formula(pattern, size, data):
    whole = (size["b"], 6, size["n"], size["m"])
    shape = [data.draw(st.sampled_from([1, x])) for x in whole][data.draw(st.integers(0, 4), label="axes") :]
    compare(pattern, sized(size, (6, 2)), (randn(*shape, seed=8),), at=0, make=lambda bias: {"bias": bias})


@planned
@given(
    patterns,
    sizes,
    st.sampled_from([None, 0, -2, (1, 3), "rows"]),
    st.sampled_from(["slopes", "table", "both"]),
)
def test_a_bias_by_distance_is_the_formula(pattern, size, at, kind):
    at = torch.arange(size["b"]) - 1 if at == "rows" else at
    parts = {"slopes": alibi_slopes(6).to(f64), "table": randn(6, 2 * 3 + 1, seed=9)}
    parts = parts if kind == "both" else {kind: parts[kind]}
    inputs = sized(size, (6, 2), at)

    def make(*tensors):
        return {"bias": ByDistance(**dict(zip(parts, tensors)))}

    compare(pattern, inputs, tuple(parts.values()), at=at, make=make)


SHAPES = [
    (),
    (1,),
    (M,),
    (N, 1),
    (1, M),
    (N, M),
    (H, 1, 1),
    (H, N, M),
    (B, 1, 1, M),
    (B, 1, N, M),
    (B, H, N, M),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_a_bool_tensor_of_any_shape_that_broadcasts_is_a_pattern(shape, biased):
    table = randn(*shape, seed=4) > -0.3
    compare(table, qkv(), bias=randn(H, N, M, seed=8) if biased else None)


def test_documents_lengths_and_functions_are_patterns():
    ids = torch.tensor([0] * 4 + [1] * 5 + [2] * 2)
    both = torch.stack([ids, ids.flip(0)])
    kept = torch.tensor([4, M])
    near = where(lambda i, j: (i - j) ** 2 < 5)
    for pattern in (documents(ids), documents(both), lengths(kept), near):
        for whole in (pattern, causal() & pattern, causal() | pattern, ~pattern):
            compare(whole, qkv())
            compare(whole, qkv(), at=torch.tensor([0, 3]), lengths=torch.tensor([3, 8]))


def test_the_weights_are_those_the_values_are_mixed_with():
    q, k, v = qkv()
    bias, kept = ByDistance(slopes=alibi_slopes(H).to(f64)), torch.tensor([4, M])
    for scale in (None, 0.0, -0.5, inf):
        given = {"lengths": kept, "bias": bias, "scale": scale, "at": 1}
        got = weights(q, k, causal(), **given)
        assert got.shape == (B, H, N, M)
        assert_close(got, formula(q, k, v, causal(), **given).weights, rtol=0, atol=1e-12)
        assert_close(
            got @ v.repeat_interleave(2, 1), attention(q, k, v, causal(), **given), rtol=0, atol=1e-12
        )


def test_long_calls_are_computed_a_stretch_of_queries_at_a_time(monkeypatch):
    monkeypatch.setattr(reference_backend, "CHUNK", 2 * M)  # two queries at a time
    compare(causal() | every(3), qkv(), (randn(H, N, M, seed=8),), make=lambda bias: {"bias": bias})
    compare(randn(B, 1, 1, M) > 0, qkv(), bias=randn(M, seed=8))


# Scale


@pytest.mark.ledger("S4.1.1d.1")
@pytest.mark.parametrize("pattern", [full(), causal(), window(2)], ids=repr)
def test_a_scale_of_zero_is_the_mean_of_the_allowed_values(pattern):
    q, k, v = qkv(h_kv=H, n=M)
    allowed = pattern.allowed(M)
    mean = torch.stack([v[:, :, row].mean(2) for row in allowed], 2)
    assert_close(attention(q, k, v, pattern, scale=0), mean, rtol=0, atol=1e-12)
    bias = randn(M, M, seed=8)
    biased = bias.masked_fill(~allowed, -inf).softmax(-1) @ v  # with a bias it is the softmax of the bias
    assert_close(attention(q, k, v, pattern, scale=0, bias=bias), biased, rtol=0, atol=1e-12)
    assert (attention(q, k, v, pattern) - mean).abs().max() > 0.1  # control: another scale


@pytest.mark.parametrize("dtype", [f64, torch.float32])
@pytest.mark.parametrize("scale", [-2.0, -0.3, 0.0])
def test_a_negative_scale_prefers_the_smallest_product(scale, dtype):
    """PyTorch's causal CPU kernel gives NaN for a scale of 0 or less; `attention` does not."""
    q, k, v = qkv(h_kv=H, n=M, d_v=D_K, dtype=dtype)
    for pattern in (full(), causal()):
        got = with_gradients(lambda *x: attention(*x, pattern, scale=scale).double(), q, k, v)  # noqa: B023
        wide = [x.double() for x in (q, k, v)]
        expected = with_gradients(lambda *x: formula(*x, pattern, scale=scale).o, *wide)  # noqa: B023
        for mine, other in zip(got, expected):
            assert_close(mine.double(), other, rtol=0, atol=1e-10 if dtype is f64 else 1e-5)


@given(patterns, sizes, heads, st.sampled_from(["share", "first"]), st.booleans(), st.booleans())
def test_hard_attention_is_the_formula_with_both_rules_for_ties(pattern, size, head, ties, biased, short):
    (h, h_kv), b, n, m = head, size["b"], size["n"], size["m"]
    q, k = integers(b, h, n, 4), integers(b, h_kv, m, 4, seed=1)  # 1/√4 is exact
    v = randn(b, h_kv, m, size["d_v"], seed=2)
    bias = integers(h, n, m, seed=3) / 2 if biased else None
    kept = torch.arange(b) if short else None  # row 0 has no key at all
    given = {"at": 0, "ties": ties, "bias": bias, "lengths": kept, "scale": inf}
    got = with_gradients(lambda v: attention(q, k, v, pattern, **given), v)
    agree(got, with_gradients(lambda v: formula(q, k, v, pattern, **given).o, v), 1e-12)


def test_ties_share_or_go_to_the_first():
    q, k, v = torch.ones(1, 1, 1, 1), torch.tensor([1.0, 2.0, 2.0]).view(1, 1, 3, 1), torch.eye(3)[None, None]
    assert attention(q, k, v, scale=inf).flatten().tolist() == [0, 0.5, 0.5]
    assert attention(q, k, v, scale=inf, ties="first").flatten().tolist() == [0, 1, 0]
    nearly = attention(q, k, v, scale=1e4)
    assert_close(nearly, attention(q, k, v, scale=inf))  # its limit


@pytest.mark.ledger("S3.Q2a.0", "S4.1.1c.1")
def test_hard_attention_approximates_soft_attention_only_where_one_weight_dominates():
    """|o − v_best| ≤ (1 − p_max) · max_j |v_j − v_best|: an approximation as good as the largest weight."""
    q, k, v = qkv(h_kv=H)
    hard, errors = attention(q, k, v, scale=inf), []
    spread = (v[:, :, None] - hard[:, :, :, None]).norm(dim=-1).amax(-1)
    for scale in (0.1, 1.0, 10.0, 100.0):
        top = weights(q, k, scale=scale).amax(-1)
        error = (attention(q, k, v, scale=scale) - hard).norm(dim=-1)
        assert (error <= (1 - top) * spread + 1e-12).all()
        errors.append(error.mean())
    assert errors == sorted(errors, reverse=True) and errors[-1] < 0.05 < 0.5 < errors[0]


def test_the_gradient_of_hard_attention_reaches_the_values_alone():
    q, k, v = (x.requires_grad_() for x in qkv())
    o = attention(q, k, v, causal(), scale=inf)
    g_q, g_k, g_v = torch.autograd.grad(o.sum(), (q, k, v), allow_unused=True)
    assert not any(g is not None and g.any() for g in (g_q, g_k))
    assert g_v.abs().sum() == B * H * N * D_V


# The query offset


@pytest.mark.parametrize("pattern", [causal(), causal() & window(2), blocks(3), strided(2)], ids=repr)
def test_a_few_queries_after_a_cache_are_the_last_rows_of_the_whole(pattern):
    q, k, v = qkv(n=M)
    whole = attention(q, k, v, pattern)
    assert_close(attention(q[:, :, -3:], k, v, pattern), whole[:, :, -3:], rtol=0, atol=1e-12)
    assert_close(attention(q[:, :, 2:5], k, v, pattern, at=2), whole[:, :, 2:5], rtol=0, atol=1e-12)
    assert_close(attention(q[:, :, 1::4], k, v, pattern, at=(1, 4)), whole[:, :, 1::4], rtol=0, atol=1e-12)
    each = attention(torch.stack([q[0, :, 2:4], q[1, :, 5:7]]), k, v, pattern, at=torch.tensor([2, 5]))
    assert_close(each, torch.stack([whole[0, :, 2:4], whole[1, :, 5:7]]), rtol=0, atol=1e-12)


def test_more_queries_than_keys_need_a_place_where_positions_are_compared():
    q, k, v = qkv(n=M, m=N)
    for pattern in (None, full(), every(3), sinks(2)):
        assert_close(attention(q, k, v, pattern), formula(q, k, v, pattern).o, rtol=0, atol=1e-12)
    with pytest.raises(
        ShapeError,
        match=r"^11 queries over 7 keys: causal\(\) compares positions, and query 0 would be at -4; "
        r"give the query offset with at=, for example at=0$",
    ):
        attention(q, k, v, causal())
    with pytest.raises(
        ShapeError,
        match=r"^11 queries over 7 keys: a bias by distance compares positions, and query 0 would be at -4; "
        r"give the query offset with at=, for example at=0$",
    ):
        attention(q, k, v, bias=ByDistance(slopes=alibi_slopes(H)))
    compare(causal(), (q, k, v), at=0, bias=ByDistance(slopes=alibi_slopes(H).to(f64)))


# Queries with no allowed key, and keys that lengths hide

EMPTY = torch.ones(N, M, dtype=torch.bool).index_fill(0, torch.tensor([0, 4]), False)
SPARSE = window(1) & (every(5) | every(5, 1))
NOWHERE = {  # each leaves some query of some row nowhere to look
    "a bool tensor": {"pattern": EMPTY},
    "a pattern": {"pattern": SPARSE},
    "queries before the keys": {"pattern": causal(), "at": -3},
    "one offset a row": {"pattern": causal(), "at": torch.tensor([-2, 3])},
    "documents": {"pattern": documents(torch.arange(M) // 3) & ~causal()},
    "lengths of 0": {"lengths": torch.tensor([0, 8])},
    "causal and lengths of 0": {"pattern": causal(), "lengths": torch.tensor([0, 3])},
    "a bool tensor and a bias": {"pattern": EMPTY, "bias": randn(H, N, M, seed=8)},
    "an additive mask as bias": {"bias": torch.zeros(N, M, dtype=f64).masked_fill(~EMPTY, -inf)},
    "a bias by distance": {"pattern": SPARSE, "bias": ByDistance(slopes=alibi_slopes(H).to(f64))},
}
ASKED = {
    "alone": {},
    "with the log-sum-exp": {"return_lse": True},
    "with dropout": {"dropout_p": 0.4},
    "with dropout and the log-sum-exp": {"return_lse": True, "dropout_p": 0.4},
    "hard": {"scale": inf},
}


@pytest.mark.ledger("S0.Q1b.1", "S0.Q2b.9", "S0.Q2b.11")
@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
@pytest.mark.parametrize("nowhere", NOWHERE.values(), ids=NOWHERE)
@pytest.mark.parametrize("dtype", [f64, torch.bfloat16])
def test_a_query_that_no_key_is_allowed_for_gets_zeros_and_finite_gradients(nowhere, asked, dtype):
    inputs = [x.requires_grad_() for x in qkv(d_v=D_K, dtype=dtype)]
    torch.manual_seed(0)
    got = attention(*inputs, **nowhere, **asked)
    o, lse = got if isinstance(got, tuple) else (got, None)
    expected = formula(*(x.detach().double() for x in inputs), **nowhere)
    empty = expected.lse == -inf
    assert empty.any() and not empty.all()
    assert o.isfinite().all() and (o[empty] == 0).all() and (o[~empty] != 0).any()
    total = o.sum()
    if lse is not None:
        assert torch.equal(lse == -inf, empty)
        total = total + lse.masked_fill(empty, 0).sum()
    gradients = torch.autograd.grad(total, inputs, allow_unused=True)
    assert gradients[2].any()
    for g in gradients:
        assert g is None or g.isfinite().all()
    if "scale" not in asked:
        assert (gradients[0][empty] == 0).all() and gradients[0][~empty].any()


@pytest.mark.parametrize("nowhere", NOWHERE.values(), ids=NOWHERE)
def test_no_nan_arises_in_the_backward_pass_either(nowhere):
    """With PyTorch's anomaly mode on, a NaN that is masked away later would be an error."""
    inputs = [x.requires_grad_() for x in qkv()]
    with torch.autograd.set_detect_anomaly(True):
        o, lse = attention(*inputs, **nowhere, return_lse=True)
        alone = attention(*inputs, **nowhere)
        total = o.sum() + alone.sum() + lse.masked_fill(lse == -inf, 0).sum()
        assert all(g.isfinite().all() for g in torch.autograd.grad(total, inputs))


@pytest.mark.parametrize("backend", ["reference", "sdpa", "tiles", "auto"])
def test_the_one_query_without_a_key_gets_zeros(backend):
    q, k, v = (randn(2, 3, 13, 5, seed=seed) for seed in range(3))
    pattern = causal() - window(0)  # the first query has none, and all others have some
    o = attention(q, k, v, pattern, backend=backend)
    assert not o[:, :, 0].any() and (o[:, :, 1:] != 0).all()
    assert_close(o, formula(q, k, v, pattern).o)


def test_a_loss_on_the_log_sum_exp_of_an_empty_row_has_a_finite_gradient_too():
    inputs = [x.requires_grad_() for x in qkv()]
    o, lse = attention(*inputs, EMPTY, return_lse=True)
    for g in torch.autograd.grad(o.sum() + lse.exp().sum() + lse.sum(), inputs):
        assert g.isfinite().all()


@pytest.mark.ledger("S3.Q2b.0", "S0.Q2b.9")
@pytest.mark.parametrize("poison", [nan, -inf, 3e38, 1e12])
@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
@pytest.mark.parametrize("pattern", [None, causal(), window(2)], ids=repr)
def test_what_lengths_hide_reaches_neither_outputs_nor_gradients(pattern, asked, poison):
    kept = torch.tensor([4, 0])
    hidden = (torch.arange(M) >= kept[:, None])[:, None, :, None]
    q, k, v = qkv()
    runs = []
    for k_, v_ in ((k, v), (k.masked_fill(hidden, poison), v.masked_fill(hidden, poison))):
        leaves = [x.clone().requires_grad_() for x in (q, k_, v_)]
        torch.manual_seed(0)
        got = attention(*leaves, pattern, lengths=kept, **asked)
        outs = got if isinstance(got, tuple) else (got,)
        total = sum(x.masked_fill(x == -inf, 0).sum() for x in outs)
        runs.append([*outs, *torch.autograd.grad(total, leaves, materialize_grads=True)])
    for clean, poisoned in zip(*runs):
        assert torch.equal(clean, poisoned)
    for g in runs[1][-2:]:
        assert (g.masked_select(hidden) == 0).all() and g[0].any() == (
            g is runs[1][-1] or "scale" not in asked
        )


def test_control_a_mask_alone_lets_nan_through():
    q, k, v = qkv()
    hidden = torch.arange(M) >= 4
    poisoned = v.masked_fill(hidden[:, None], nan)
    assert attention(q, k, poisoned, ~hidden).isnan().any()
    assert attention(q, k, poisoned, lengths=torch.tensor([4, 4])).isfinite().all()


@pytest.mark.parametrize("pattern", [full(), causal(), causal() & window(2)], ids=repr)
def test_batch_rows_and_heads_are_independent(pattern):
    q, k, v = qkv(b=3, n=M)
    before = attention(q, k, v, pattern, lengths=torch.tensor([M, 5, 9]))
    for x in (q, k, v):
        x[1] *= -3
        x[2, 0] += 1
    after = attention(q, k, v, pattern, lengths=torch.tensor([M, 2, 9]))
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[2, 2:], after[2, 2:])  # query heads 0 and 1 share key head 0
    assert not torch.equal(before[1], after[1]) and not torch.equal(before[2, :2], after[2, :2])


# Precision


def ulp(x):
    """The step of this dtype at the largest absolute value of x."""
    return torch.finfo(x.dtype).eps * 2.0 ** floor(log2(x.detach().abs().max().item()))


PRECISE = [("auto", False), ("auto", True), ("tiles", False)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("pattern", WORDS, ids=repr)
@pytest.mark.parametrize(("backend", "biased"), PRECISE)
def test_the_error_is_at_most_twice_that_of_plain_pytorch(pattern, dtype, backend, biased):
    """max|fast − ref| ≤ 2 · max|plain − ref| + 4 ulp of max|ref|, outputs and gradients."""
    n, inputs = 37, qkv(h=2, h_kv=2, n=37, m=37, d_k=16, d_v=16, dtype=dtype)
    bias, allowed = randn(2, n, n, seed=8, dtype=dtype) if biased else None, pattern.allowed(n)

    def plain(q, k, v):
        scores = q @ k.mT * 16**-0.5 if bias is None else q @ k.mT * 16**-0.5 + bias
        scores = scores.masked_fill(~allowed, -inf).masked_fill(~allowed.any(-1, keepdim=True), 0.0)
        return scores.softmax(-1).masked_fill(~allowed, 0.0) @ v

    fast = with_gradients(lambda *x: attention(*x, pattern, bias=bias, backend=backend), *inputs)
    same = with_gradients(plain, *inputs)
    wide = bias if bias is None else bias.double()
    ref = with_gradients(lambda *x: formula(*x, pattern, bias=wide).o, *(x.double() for x in inputs))
    for f, p, r in zip(fast, same, ref):
        assert f.dtype == dtype
        budget = 2 * (p.double() - r).abs().max() + 4 * ulp(r.to(dtype))
        assert (f.double() - r).abs().max() <= budget


@pytest.mark.parametrize("backend", ["auto", "tiles", "reference"])
def test_the_log_sum_exp_of_16_bit_inputs_is_float32_in_every_backend(backend):
    inputs = qkv(dtype=torch.bfloat16)
    expected = formula(*(x.double() for x in inputs), causal()).lse
    o, lse = attention(*inputs, causal(), return_lse=True, backend=backend)
    assert o.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert_close(lse.double(), expected, rtol=0, atol=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(attention(*inputs, causal(), return_lse=True, backend=backend)[1], lse)


@pytest.mark.parametrize(
    "asked", [*ASKED.values(), {"bias": randn(H, N, M, seed=8, dtype=torch.float32)}], ids=str
)
@pytest.mark.parametrize("pattern", [full(), causal(), window(2)], ids=repr)
def test_autocast_casts_at_the_entry_point(pattern, asked):
    q, k, v = (x.requires_grad_() for x in qkv(dtype=torch.float32))
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = attention(q, k, v, pattern, **asked)
    torch.manual_seed(0)
    direct = attention(*(x.bfloat16() for x in (q, k, v)), pattern, **asked)
    o, o_direct = (x[0] if isinstance(x, tuple) else x for x in (got, direct))
    assert o.dtype == torch.bfloat16
    assert_close(o, o_direct, rtol=2**-7, atol=2**-7)
    if not asked.get("dropout_p") and "scale" not in asked:
        full_precision = attention(q, k, v, pattern, **asked)
        full_precision = full_precision[0] if isinstance(full_precision, tuple) else full_precision
        assert_close(o.float(), full_precision, rtol=0, atol=0.03)
    (g,) = torch.autograd.grad(o.float().sum(), v)
    assert g.dtype == torch.float32 and g.isfinite().all()


def test_autocast_leaves_float64_alone():
    q, k, v = qkv()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = attention(q, k, v, window(2))
    assert torch.equal(got, attention(q, k, v, window(2)))


# Modes and memory layouts


@pytest.mark.parametrize("pattern", WORDS, ids=repr)
def test_without_gradients_the_result_is_the_same(pattern):
    inputs = qkv()
    with_grad = attention(*(x.clone().requires_grad_() for x in inputs), pattern).detach()
    assert_close(attention(*inputs, pattern), with_grad, rtol=0, atol=1e-14)
    with torch.no_grad():
        assert_close(attention(*inputs, pattern), with_grad, rtol=0, atol=1e-14)


def test_what_is_remembered_in_inference_or_on_fake_tensors_serves_training_too():
    pattern = causal() & dilated(2, 5)  # a table no other test has asked for
    inputs = [x.requires_grad_() for x in qkv()]
    with torch.inference_mode():
        attention(*(x.clone() for x in inputs), pattern)
    agree(
        with_gradients(lambda *x: attention(*x, pattern), *inputs),
        with_gradients(lambda *x: formula(*x, pattern).o, *inputs),
    )
    other = causal() & dilated(3, 5)
    with FakeTensorMode():
        fake = [torch.empty(x.shape, dtype=x.dtype) for x in inputs]
        assert attention(*fake, other).shape == (B, H, N, D_V)
    assert_close(attention(*inputs, other), formula(*inputs, other).o, rtol=0, atol=1e-12)


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
@pytest.mark.parametrize("pattern", [full(), causal(), causal() & (window(3) | every(64))], ids=repr)
def test_tensors_without_data_give_shapes_without_data(pattern, asked):
    q, k, v = (x.to("meta").requires_grad_() for x in qkv(n=300, m=300))
    got = attention(q, k, v, pattern, lengths=torch.ones(B, dtype=torch.long, device="meta"), **asked)
    o = got[0] if isinstance(got, tuple) else got
    assert o.shape == (B, H, 300, D_V) and o.is_meta
    assert torch.autograd.grad(o.sum(), v)[0].shape == v.shape


@pytest.mark.parametrize("pattern", [full(), causal(), window(2)], ids=repr)
def test_strides_do_not_matter(pattern):
    packed = randn(B, M, 3, H, D_K)  # as one projection to queries, keys and values gives them
    strided_views = [packed[:, :, i].transpose(1, 2) for i in range(3)]
    every_other = [randn(B, H, 2 * M, D_K, seed=s)[:, :, ::2] for s in range(3)]
    expanded = [randn(1, 1, M, D_K, seed=s).expand(B, H, M, D_K) for s in range(3)]
    for inputs in (strided_views, every_other, expanded):
        assert not any(x.is_contiguous() for x in inputs)
        dense = [x.contiguous() for x in inputs]
        got = with_gradients(lambda *x: attention(*x, pattern), *inputs)
        agree(got, with_gradients(lambda *x: attention(*x, pattern), *dense), 1e-12)


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
@pytest.mark.parametrize("pattern", [None, causal(), every(3)], ids=repr)
@pytest.mark.parametrize(("n", "m"), [(0, 5), (5, 0), (0, 0), (1, 1), (1, 5), (5, 1)])
def test_the_smallest_sizes(n, m, pattern, asked):
    inputs = [x.requires_grad_() for x in qkv(n=n, m=m)]
    got = attention(*inputs, pattern, at=0, **asked)
    o, lse = got if isinstance(got, tuple) else (got, None)
    assert o.shape == (B, H, n, D_V) and (lse is None or lse.shape == (B, H, n))
    for g in torch.autograd.grad(o.sum(), inputs, materialize_grads=True):
        assert g.isfinite().all()
    if m == 0:
        assert (o == 0).all()
    if not asked.get("dropout_p"):
        expected = formula(*inputs, pattern, at=0, scale=asked.get("scale")).o
        assert_close(o, expected, rtol=0, atol=1e-12)


# Dropout


@pytest.mark.parametrize("asked", [{}, {"return_lse": True}, {"scale": inf}], ids=str)
@pytest.mark.parametrize("pattern", [full(), causal(), window(2)], ids=repr)
def test_dropout_drops_weights_and_lifts_the_rest(pattern, asked):
    """With the identity as values the output is the weights: each is 0, or itself over 1 − p."""
    b, p = 2000, 0.3
    q, k, _ = (x.expand(b, -1, -1, -1) for x in qkv(b=1, h=1, h_kv=1, n=5, m=5))
    v = torch.eye(5, dtype=f64).expand(b, 1, 5, 5)
    torch.manual_seed(1)
    got = attention(q, k, v, pattern, dropout_p=p, **asked)
    exact = attention(q, k, v, pattern, **asked)
    if isinstance(got, tuple):
        assert_close(got[1], exact[1], rtol=0, atol=1e-12)  # the log-sum-exp is that of all weights
        got, exact = got[0], exact[0]
    kept, there = got != 0, exact > 0
    assert_close(got, torch.where(kept, exact / (1 - p), 0), rtol=1e-12, atol=0)
    share = kept[there].double().mean()
    assert abs(share - (1 - p)) < 5 * sqrt(p * (1 - p) / there.sum())
    standard_error = (exact[0] * sqrt(p / (1 - p) / b)).clamp(min=1e-15)
    assert ((got.mean(0) - exact[0]).abs() <= 5 * standard_error).all()  # the mean over draws is undropped


@pytest.mark.parametrize("pattern", [full(), causal(), window(2)], ids=repr)
def test_no_dropout_is_the_default_and_a_seed_repeats_it(pattern):
    inputs = qkv()
    assert torch.equal(attention(*inputs, pattern, dropout_p=0.0), attention(*inputs, pattern))
    draws = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        draws.append(attention(*inputs, pattern, dropout_p=0.5))
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


# Errors: what was asked, which numbers clash, what would work


@pytest.fixture
def without_the_shape_checker():
    """As users run it: the checker of the test run would speak before the message under test."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def changed(**changes):
    """The arguments of a good call, with some of them replaced."""
    return {**dict(zip("qkv", qkv())), **changes}


INT_MASK, FLOAT_MASK = torch.ones(N, M, dtype=torch.long), torch.zeros(N, M)
SAY_WHICH = (
    "mask as pattern: is 1 'may attend', or is it added to the scores? Say which: "
    "rg.allowed_from(zero_one=mask), rg.allowed_from(additive=mask), or bias=mask"
)
TO = "which does not broadcast to (batch, heads, queries, keys) = (2, 6, 7, 11)"
REFUSED = [
    (
        ShapeError,
        {"q": randn(D_K)},
        "q has shape (5,); (batch, heads, positions, width) is needed, where batch and heads may be missing",
    ),
    (
        ShapeError,
        {"v": randn(4, M, D_V)},
        "q is (2, 6, 7, 5), k (2, 3, 11, 5) and v (4, 11, 3); their batch axes, and the heads of k and v, need to be "
        "the same, or 1",
    ),
    (
        ShapeError,
        {"q": torch.empty(B, H, N, D_K, device="meta", dtype=f64)},
        "q is on meta, k on cpu, v on cpu; put all three on one device",
    ),
    (
        ShapeError,
        {"k": randn(B, H_KV, M, D_K, dtype=torch.float16)},
        "q is torch.float64, k torch.float16, v torch.float64; give all three one dtype",
    ),
    (ShapeError, {"k": randn(B, H_KV, M, 4)}, "queries are 5 wide and keys 4; q·k needs one width d_k"),
    (
        ShapeError,
        {"v": randn(B, H_KV, 10, D_V)},
        "k is (2, 3, 11, 5) and v (2, 3, 10, 3); they need the same batch, heads and positions",
    ),
    (
        ShapeError,
        {"q": randn(4, H, N, D_K)},
        "a batch of 4 queries over a batch of 2 keys; give both the same",
    ),
    (ShapeError, {"q": randn(B, 7, N, D_K)}, "3 key/value heads do not divide 7 query heads"),
    (
        ShapeError,
        {"k": randn(B, 0, M, D_K), "v": randn(B, 0, M, D_V)},
        "0 key/value heads do not divide 6 query heads",
    ),
    (
        ShapeError,
        {"lengths": torch.tensor([3])},
        "lengths has shape (1,); one per batch row is needed: (2,), or (2, 2) with the first visible key and the end",
    ),
    (
        ShapeError,
        {"at": torch.tensor([1, 2, 3])},
        "at has shape (3,); one offset per batch row is needed: (2,)",
    ),
    (SpecError, {"at": (3, 0)}, "at=(3, 0): the step between queries needs to be >= 1"),
    (ShapeError, {"pattern": torch.ones(M, N) > 0}, f"pattern has shape (11, 7), {TO}"),
    (ShapeError, {"bias": randn(3, N, M)}, f"bias has shape (3, 7, 11), {TO}"),
    (ShapeError, {"bias": randn(1, 1, 1, N, M)}, f"bias has shape (1, 1, 1, 7, 11), {TO}"),
    (
        ShapeError,
        {"pattern": documents(torch.zeros(3, M, dtype=torch.long))},
        "documents(<3×11 ids>) has data for 3 batch rows, and there are 2; give it for each, or for all",
    ),
    (
        ShapeError,
        {"pattern": selected(torch.zeros(B, H_KV, 3, 1, dtype=torch.long), 4)},
        "selected(<2×3×3×1 indices>, size=4) has data for 3 heads, and there are 6; give it for each: "
        "indices.repeat_interleave(2, 1)",
    ),
    (
        ShapeError,
        {"pattern": where(lambda i, j: torch.ones(3, 1, N, M) > 0)},
        f"where(<lambda>) gives a table of (3, 1, 7, 11), {TO}",
    ),
    (
        ShapeError,
        {"pattern": documents(torch.zeros(N, dtype=torch.long))},
        "documents(<7 ids>) over 11 keys: one id per key is needed, (11,) or (b, 11)",
    ),
    (
        ShapeError,
        {"bias": ByDistance(slopes=alibi_slopes(4))},
        "a bias by distance for 4 heads, and q has 6",
    ),
    (
        SpecError,
        {"bias": EMPTY},
        "a bool tensor as bias would add 0 and 1 to the scores; give it as pattern, True = may attend",
    ),
    (SpecError, {"pattern": FLOAT_MASK}, f"a torch.float32 {SAY_WHICH}"),
    (SpecError, {"pattern": INT_MASK}, f"a torch.int64 {SAY_WHICH}"),
    (
        SpecError,
        {"pattern": "causal"},
        "'causal' is not a pattern; use rg.causal(), rg.window(2), … or a bool tensor; of a text, "
        "rg.Pattern.from_text('causal')",
    ),
    (SpecError, {"pattern": causal}, "causal is not a pattern; write it with parentheses: rg.causal(…)"),
    (SpecError, {"pattern": lambda i, j: i >= j}, "a function is not a pattern; use rg.where(function)"),
    (
        SpecError,
        {"pattern": np.ones((3, 3), bool)},
        "an array of shape (3, 3) is not a pattern; use torch.as_tensor(mask)",
    ),
    (
        SpecError,
        {"pattern": create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, "cpu")},
        "a BlockMask of shape (1, 1, 128, 128) is not a pattern; declare it: rg.causal() & …; FlexAttention takes "
        "the pattern's block_mask(n)",
    ),
    (
        ShapeError,
        {"at": torch.tensor([1.5] * B)},
        "at is torch.float32; offsets are whole numbers: give at.long()",
    ),
    (
        ShapeError,
        {"at": torch.ones(B, dtype=torch.bool)},
        "at is torch.bool; offsets are whole numbers: give at.long()",
    ),
    (SpecError, {"scale": -inf}, "scale=-inf has no meaning; scale=inf is hard attention"),
    (SpecError, {"scale": nan}, "scale=nan is not a number; use None for 1/√d_k"),
    (
        SpecError,
        {"scale": inf, "return_lse": True},
        "scale=inf has no log-sum-exp: ask for return_lse=True with a finite scale only",
    ),
    (SpecError, {"dropout_p": 1.0}, "dropout_p=1.0 is not in [0, 1)"),
    (SpecError, {"dropout_p": -0.1}, "dropout_p=-0.1 is not in [0, 1)"),
    (SpecError, {"ties": "last"}, "ties='last'; use 'share' (tied keys share equally) or 'first'"),
    (
        SpecError,
        {"backend": "mask"},
        "unknown backend 'mask'; known: auto, flash4, flex, reference, sdpa, tiles, triton",
    ),
    (
        BackendError,
        {"backend": "sdpa", "scale": inf},
        "backend='sdpa' cannot run this: scale=inf has no softmax; use backend='reference'",
    ),
    (
        BackendError,
        {"backend": "sdpa", "return_lse": True},
        "backend='sdpa' cannot run this: it gives no log-sum-exp; use backend='tiles'",
    ),
    (
        BackendError,
        {"backend": "tiles", "bias": randn(N, M)},
        "backend='tiles' cannot run this: a bias tensor is n × m already; use backend='sdpa'",
    ),
    (
        BackendError,
        {"backend": "tiles", "q": randn(B, H, 0, D_K)},
        "backend='tiles' cannot run this: there are no pairs; use backend='sdpa'",
    ),
    (
        BackendError,
        {"backend": "triton", "pattern": causal()},
        "backend='triton' cannot run this: it runs on CUDA, not on cpu; use backend='sdpa'",
    ),
]


@pytest.mark.usefixtures("without_the_shape_checker")
@pytest.mark.parametrize(("error", "changes", "text"), REFUSED, ids=[text[:40] for *_, text in REFUSED])
def test_a_call_that_cannot_be_is_refused_with_its_reason(error, changes, text):
    attention(**changed())  # the call without the change is good
    with pytest.raises(error) as refusal:
        attention(**changed(**changes))
    assert str(refusal.value) == text


def test_an_unknown_backend_far_from_any_name_lists_them_all():
    with pytest.raises(SpecError, match=r"^unknown backend 'xyzzy'; known: auto, flash4, flex, "):
        attention(*qkv(), backend="xyzzy")


def test_a_float_mask_is_an_additive_mask_when_it_is_called_a_bias():
    additive = torch.zeros(N, M, dtype=f64).masked_fill(~causal().allowed(N, M), -inf)
    got, expected = attention(*qkv(), bias=additive), attention(*qkv(), causal())
    assert_close(got, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", ["auto", "tiles", "sdpa"])
def test_offsets_per_row_may_have_more_queries_than_keys(backend):
    q, k = (torch.randn(2, 2, n, 8, generator=torch.Generator().manual_seed(n)) for n in (5, 3))
    at = torch.tensor([0, 1])
    o = attention(q, k, k, causal(), at=at, backend=backend)
    rows = [attention(q[r : r + 1], k[r : r + 1], k[r : r + 1], causal(), at=int(at[r])) for r in (0, 1)]
    assert_close(o, torch.cat(rows))
    assert explain(q, k, k, causal(), at=at, backend=backend).needed == 12

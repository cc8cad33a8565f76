"""Softcap, sink logits, a pattern per head, left padding and other axes, against the formula in float64."""

from math import inf, nan

import jaxtyping
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close

import regard as rg
from regard.engine.attention import attention, call_of, weights
from regard.engine.merge import by_heads
from regard.errors import BackendError, ShapeError, SpecError
from regard.pattern import parse_pattern

f64 = torch.float64
B, H, H_KV, N, M, D, D_V = 2, 6, 3, 9, 13, 4, 5


def randn(*shape, seed=0, dtype=f64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=f64).to(dtype)


def inputs(n=N, m=M, dtype=f64, grad=False):
    q, k, v = randn(B, H, n, D, seed=1), randn(B, H_KV, m, D, seed=2), randn(B, H_KV, m, D_V, seed=3)
    return tuple((3 * x).to(dtype).requires_grad_(grad) for x in (q, k, v))


def formula(q, k, v, allowed, softcap=None, sink=None, bias=0.0, scale=None):
    """o and lse, with a loop over nothing and no function of regard."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    e = (s + bias).exp() * allowed
    total = e.sum(-1)
    if sink is not None:
        total = total + sink.exp()[:, None]
    o = e @ v / torch.where(total > 0, total, 1.0)[..., None]
    return o, torch.where(total > 0, total, 1.0).log().masked_fill(total == 0, -inf)


PATTERNS = [rg.full(), rg.causal(), rg.causal() & (rg.window(2) | rg.every(4)), rg.causal() & ~rg.sinks(6)]


@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_softcap_and_sinks_are_their_formula(pattern, softcap, with_sink, backend):
    q, k, v = inputs(grad=True)
    sink = randn(H, seed=4).requires_grad_() if with_sink else None
    allowed = pattern.allowed(N, M)
    o, lse = attention(q, k, v, pattern, softcap=softcap, sink_logits=sink, return_lse=True, backend=backend)
    expected = formula(q, k, v, allowed, softcap, sink)
    assert_close((o, lse), expected)
    wrt = [q, k, v] + ([sink] if with_sink else [])
    do, dl = randn(*o.shape, seed=5), randn(*lse.shape, seed=6) * (lse > -inf)
    loss, formula_loss = (
        (x * do).sum() + torch.where(y > -inf, y, 0.0).mul(dl).sum() for x, y in ((o, lse), expected)
    )
    assert_close(torch.autograd.grad(loss, wrt), torch.autograd.grad(formula_loss, wrt))
    without_lse = attention(q, k, v, pattern, softcap=softcap, sink_logits=sink, backend=backend)
    assert_close(without_lse, o)
    rows = weights(q, k, pattern, softcap=softcap, sink_logits=sink)
    assert_close(rows @ v.repeat_interleave(2, 1), o)
    if with_sink:  # what is left of 1 is the weight of the sink
        assert_close(1 - rows.sum(-1), (sink[:, None] - lse).exp())


def test_limits_are_plain_attention():
    q, k, v = inputs()
    plain = attention(q, k, v, rg.causal())
    assert torch.equal(attention(q, k, v, rg.causal(), softcap=inf), plain)
    assert_close(attention(q, k, v, rg.causal(), softcap=1e8), plain)
    assert_close(attention(q, k, v, rg.causal(), sink_logits=torch.full((H,), -inf, dtype=f64)), plain)


def test_a_query_without_keys_gives_zeros_beside_any_sink():
    q, k, v = inputs(grad=True)
    sink = torch.tensor([-inf, 0.0, 1.0, 2.0, -1.0, 3.0], dtype=f64, requires_grad=True)
    o, lse = attention(q, k, v, rg.causal() & ~rg.sinks(M), sink_logits=sink, return_lse=True)
    assert torch.equal(o, torch.zeros_like(o))
    assert torch.equal(lse, sink.detach()[:, None].expand_as(lse))
    grads = torch.autograd.grad(o.sum(), (q, k, v, sink))
    assert all(torch.equal(g, torch.zeros_like(g)) for g in grads)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_half_types_keep_theirs(dtype):
    q, k, v = inputs(dtype=dtype)
    o, lse = attention(q, k, v, rg.causal(), sink_logits=randn(H), softcap=3.0, return_lse=True)
    assert o.dtype == dtype and lse.dtype == torch.float32


def test_softcap_comes_before_the_bias():
    q, k, v = inputs()
    bias = randn(H, N, M, seed=7)
    expected, _ = formula(q, k, v, torch.ones(N, M), 1.5, bias=bias)
    assert_close(attention(q, k, v, softcap=1.5, bias=bias), expected)
    hard = attention(q, k, v, softcap=1.5, scale=inf)
    assert_close(hard, attention(q, k, v, scale=inf))  # the cap changes no order


# A pattern per head.

HEADS = [rg.causal(), rg.window(1), rg.causal(), rg.causal() & rg.every(3), rg.window(1), rg.window(1)]


@pytest.mark.parametrize("given", [HEADS, rg.per_head(HEADS)], ids=["list", "value"])
def test_each_head_has_its_pattern(given):
    q, k, v = inputs(grad=True)
    allowed = torch.stack([pattern.allowed(N, M) for pattern in HEADS])
    sink = randn(H, seed=4)
    o, lse = attention(q, k, v, given, sink_logits=sink, return_lse=True)
    expected = formula(q, k, v, allowed, sink=sink)
    assert_close((o, lse), expected)
    do = randn(*o.shape, seed=5)
    found, right = (torch.autograd.grad((x * do).sum(), (q, k, v)) for x in (o, expected[0]))
    assert_close(found, right)


def test_the_numbers_of_heads_stay_on_the_host():
    """A tensor of them would be copied to the GPU by each call, and a CUDA graph could not capture it."""

    class NoTensorOfNumbers(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            assert func is not torch.tensor, args
            return func(*args, **(kwargs or {}))

    def keys_and_queries(part):
        return part.q + part.k.repeat_interleave(part.q.shape[1] // part.k.shape[1], 1)[:, :, :N], part.q[
            ..., 0
        ]

    q, k, v = inputs()
    call = call_of(q, k, v, rg.per_head(HEADS), sink_logits=randn(H, seed=4), bias=randn(H, N, M, seed=7))
    with NoTensorOfNumbers():
        o, lse = by_heads(call, keys_and_queries)
    assert torch.equal(o, q + k.repeat_interleave(2, 1)[:, :, :N]) and torch.equal(lse, q[..., 0])


def test_bias_and_table_of_each_head_follow_their_heads():
    q, k, v = inputs()
    bias = randn(H, N, M, seed=7)
    allowed = torch.stack([pattern.allowed(N, M) for pattern in HEADS])
    assert_close(attention(q, k, v, HEADS, bias=bias), formula(q, k, v, allowed, bias=bias)[0])
    slopes = torch.linspace(0.1, 1.0, H, dtype=f64)
    distance = (torch.arange(M) - (torch.arange(N)[:, None] + M - N)).abs()
    by_distance = attention(q, k, v, HEADS, bias=rg.ByDistance(slopes=slopes))
    assert_close(by_distance, formula(q, k, v, allowed, bias=-slopes[:, None, None] * distance)[0])


@pytest.mark.parametrize("hidden", [torch.finfo(torch.float32).min, -1e9, -1e6])
@pytest.mark.parametrize("how", ["called", "mapped", pytest.param("compiled", marks=pytest.mark.compiled)])
def test_a_bias_that_hides_a_whole_row_has_the_gradients_of_the_formula(hidden, how):
    """The fused CPU operation loses the number of keys in the log-sum-exp of such a row."""
    q, k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in inputs(dtype=torch.float32))
    v, do = v[..., :D], randn(B, H, N, D, seed=8, dtype=torch.float32)  # others are never fused by PyTorch
    bias = randn(N, M, seed=7, dtype=torch.float32)
    bias[2], bias[4, 3:], bias[5] = hidden, hidden, -inf

    def loss(q, k, v):
        return (attention(q, k, v, bias=bias) * do).sum()

    def by_formula(q, k, v):
        weights = torch.softmax((q @ k.mT * D**-0.5 + bias).masked_fill(bias == -inf, -inf), -1)
        return (weights.nan_to_num(0.0) @ v * do).sum()

    def gradients(function):
        given = [x.clone().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(function(*given), given)

    if how == "mapped":
        mapped = torch.func.vmap(torch.func.grad(loss, (0, 1, 2)))
        found = tuple(x[0] for x in mapped(q[None], k[None], v[None]))
    else:
        found = gradients(
            loss if how == "called" else torch.compile(loss, fullgraph=True, backend="aot_eager")
        )
    assert_close(found, gradients(by_formula), rtol=1e-5, atol=1e-5)


def test_equal_patterns_are_one_launch():
    text = str(rg.explain(rg.per_head(HEADS), n=64, heads=6, kv_heads=3))
    assert (
        "3 launches" not in text and "4 launches" in text
    )  # window(1): once alone in its group, once two of them
    assert "heads 0, 2      causal()" in text and "\n  head 1          window(1)" in text
    found = rg.explain(rg.per_head(HEADS), n=64, heads=6, kv_heads=6)
    assert found.variant == "3 launches"
    assert found.needed == sum(pattern.count(64) for pattern in HEADS)
    alike = rg.explain(*inputs(), [rg.causal()] * H)
    assert alike.pattern == rg.causal()


def test_heads_combine_one_by_one():
    both = rg.causal() & rg.per_head([rg.window(1), rg.every(2)])
    assert both == rg.per_head([rg.causal() & rg.window(1), rg.causal() & rg.every(2)])
    assert both - rg.sinks(1) == rg.per_head([pattern - rg.sinks(1) for pattern in both.patterns])
    assert (~both).count(8) == 2 * 64 - both.count(8)
    assert both.count(8) == sum(pattern.count(8) for pattern in both.patterns)
    assert rg.Pattern.from_json(both.json()) == both and both.text == both.json()
    assert parse_pattern(repr(both)) == both
    first, second = both.draw(3).split("\n\n")
    assert first == "head 0: causal() & window(1)\n■ · ·\n■ ■ ·\n· ■ ■"
    assert second == "head 1: causal() & every(2)\n■ · ·\n■ · ·\n■ · ■"


# Left padding.


@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_lengths_with_a_start_hide_what_is_before(pattern):
    q, k, v = inputs(n=M)
    spans = torch.tensor([[4, M], [0, 8]])
    j = torch.arange(M)
    visible = ((j >= spans[:, :1]) & (j < spans[:, 1:]))[:, None, None, :]
    expected, lse = formula(q, k, v, pattern.allowed(M) & visible)
    hidden = (~visible)[:, 0, 0, :, None]
    k, v = (x.masked_fill(hidden[:, None], nan) for x in (k, v))
    found = attention(q, k, v, pattern, lengths=spans, return_lse=True)
    assert_close(found, (expected, lse))
    assert_close(attention(q, k, v, pattern, lengths=spans), expected)


def test_a_start_of_zero_is_no_start():
    q, k, v = inputs()
    plain = attention(q, k, v, rg.causal(), lengths=torch.tensor([M, 5]))
    assert torch.equal(attention(q, k, v, rg.causal(), lengths=torch.tensor([[0, M], [0, 5]])), plain)
    unpadded = attention(q, k, v, rg.causal(), lengths=torch.tensor([[0, M], [0, M]]))
    assert torch.equal(unpadded, attention(q, k, v, rg.causal()))


# Other axes, as PyTorch's attention takes them.

SHAPES = [
    ((N, D), (M, D), (M, D_V)),
    ((H, N, D), (H, M, D), (H, M, D_V)),
    ((H, N, D), (1, M, D), (M, D_V)),
    ((B, H, N, D), (1, H, M, D), (B, 1, M, D_V)),
    ((B, 1, N, D), (B, H, M, D), (B, H, M, D_V)),
    ((N, D), (B, H, M, D), (B, H, M, D_V)),
    ((3, B, H, N, D), (3, B, H, M, D), (3, B, H, M, D_V)),
    ((3, 1, H, N, D), (B, H, M, D), (1, B, H, M, D_V)),
    ((B, H, N, 0), (B, H, M, 0), (B, H, M, D_V)),
]


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_axes_are_those_of_sdpa(shapes):
    q, k, v = (randn(*shape, seed=seed) for seed, shape in enumerate(shapes))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    o, lse = attention(q, k, v, return_lse=True)
    assert_close(o, expected)
    assert lse.shape == o.shape[:-1]
    assert weights(q, k).shape == (*torch.broadcast_shapes(q.shape[:-2], k.shape[:-2]), N, M)
    if q.shape[-1]:
        mask = randn(*expected.shape[:-1], M, seed=8) > 0
        mask[..., 0] = True
        right = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
        assert_close(attention(q, k, v, mask), right)


REFUSED = [
    (SpecError, {"softcap": 0}, "softcap=0 is not above 0; use None for scores without a cap"),
    (SpecError, {"softcap": -2.0}, "softcap=-2.0 is not above 0; use None for scores without a cap"),
    (SpecError, {"softcap": nan}, "softcap=nan is not above 0; use None for scores without a cap"),
    (
        ShapeError,
        {"sink_logits": torch.zeros(5, dtype=f64)},
        "sink_logits has shape (5,); one per query head is needed: (6,)",
    ),
    (
        SpecError,
        {"sink_logits": torch.zeros(6, dtype=f64), "scale": inf},
        "scale=inf is hard attention, which has no softmax for sink_logits to join",
    ),
    (
        ShapeError,
        {"pattern": [rg.causal()] * 4},
        "per_head has 4 patterns for 6 query heads; give one for each head",
    ),
    (SpecError, {"pattern": []}, "per_head([]) has no head; give one pattern for each query head"),
    (
        SpecError,
        {"pattern": [rg.causal(), 3]},
        "per_head: head 1: 3 is not a pattern; use rg.causal(), rg.window(2), …",
    ),
    (
        BackendError,
        {"softcap": 2.0, "backend": "sdpa"},
        "backend='sdpa' cannot run this: it has no softcap; use backend=",
    ),
]


@pytest.fixture
def as_users_run_it():
    """The shape checker of the test run would speak before the message under test."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize(("error", "changes", "text"), REFUSED, ids=[text[:40] for *_, text in REFUSED])
def test_terms_that_cannot_be_are_refused_with_their_reason(error, changes, text):
    q, k, v = inputs()
    with pytest.raises(error) as refusal:
        attention(q, k, v, **changes)
    assert str(refusal.value).startswith(text)


# In declarations.


def test_a_declared_attention_has_both_terms():
    declared = rg.Attention(
        12, heads=6, kv_heads=3, d_k=D, d_v=D_V, softcap=2.0, sink_logits=True, pattern=rg.causal()
    )
    assert rg.spec.from_json(declared.json()) == declared
    layer = declared.build().double()
    layer.sink_logits.data = randn(6, seed=9)
    x = randn(B, N, 12, seed=10)
    q, k, v = layer._queries(x), layer._keys(x), layer._values(x)
    o, _ = formula(q, k, v, rg.causal().allowed(N), 2.0, layer.sink_logits)
    assert_close(layer(x), layer.w_o(o.transpose(1, 2).flatten(2)))
    plain = rg.cost(rg.Attention(12, heads=6, kv_heads=3, d_k=D, d_v=D_V, pattern=rg.causal()), n=N)
    cost = rg.cost(declared, n=N)
    assert cost.parameters == plain.parameters + 6 == sum(p.numel() for p in layer.parameters())
    assert cost.total.elementwise_flops == plain.total.elementwise_flops + 6 * (
        3 * rg.causal().count(N) + 4 * N
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"softcap": -1}, "softcap=-1 is not above 0; leave it out for scores without a cap"),
        (
            {"softcap": 2.0, "score": "additive"},
            "softcap=2.0 caps q·k, which score='additive' does not have; use score='dot'",
        ),
        (
            {"pattern": rg.per_head([rg.causal()] * 4)},
            "pattern has 4 patterns for heads=6; give one for each query head",
        ),
        (
            {"sink_logits": True, "scale": inf},
            "sink_logits=True joins a softmax, which hard attention does not have; use a finite scale",
        ),
    ],
)
def test_a_declaration_that_cannot_be_is_refused(options, text):
    with pytest.raises(SpecError) as refusal:
        rg.Attention(12, heads=6, **options)
    assert str(refusal.value) == text


def test_a_layer_takes_a_pattern_per_head_in_the_call():
    layer = rg.Attention(12, heads=6, kv_heads=3, pattern=rg.causal()).build().double()
    x = randn(B, N, 12, seed=10)
    heads = [rg.window(1), rg.full(), rg.window(2)] * 2
    allowed = torch.stack([(rg.causal() & pattern).allowed(N) for pattern in heads])
    assert_close(layer(x, pattern=rg.per_head(heads)), layer(x, pattern=allowed))

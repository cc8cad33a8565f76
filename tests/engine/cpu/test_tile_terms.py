"""Softcap, left padding, query offsets per batch row and one query over a long cache, in the CPU tiles."""

from math import inf, nan

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import regard as rg
from long_cases import rows_in_long
from regard.engine.backends import PREPARED
from regard.engine.cpu import tiles
from regard.engine.cpu.strided_layout import layout
from regard.engine.explain import explain
from regard.pattern import one_query
from regard.pattern.one_query import keys_of_query
from tile_cases import MIXED, WORDS, assert_as_exact, small, tensors, with_gradients

f32, f64 = torch.float32, torch.float64
SPARSE = rg.causal() & (rg.window(9) | rg.every(8))


def formula(q, k, v, allowed, scale, softcap=None):
    """o and lse in plain operations; allowed broadcasts to (b, h, n, m)."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    s = q @ k.mT * scale
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    empty = ~allowed.any(-1, keepdim=True)
    s = s.masked_fill(~(allowed | empty), -inf)
    lse = s.logsumexp(-1).masked_fill(empty.squeeze(-1), -inf)
    return s.softmax(-1).masked_fill(empty, 0.0) @ v, lse


def check(run, allowed, inputs, scale=0.4, softcap=None):
    """The error rule for o, lse and all gradients."""
    fast = with_gradients(run, *inputs)
    plain = with_gradients(lambda *x: formula(*x, allowed, scale, softcap), *inputs)
    ref = with_gradients(lambda *x: formula(*x, allowed, scale, softcap), *(x.double() for x in inputs))
    assert_as_exact(fast, plain, ref)


def run_tiles(**options):
    return lambda q, k, v: rg.attention(q, k, v, return_lse=True, backend="tiles", scale=0.4, **options)


# Softcap


@pytest.mark.parametrize("softcap, dtype", [(0.7, f64), (20.0, f32), *rows_in_long((0.7, f32), (20.0, f64))])
@pytest.mark.parametrize("pattern", [*WORDS, *MIXED], ids=repr)
def test_softcap_in_any_layout_is_the_formula(pattern, softcap, dtype):
    laid, inputs = small(pattern, 53), tensors(n=53, h=4, dtype=dtype)
    call = tiles.TileAttention((laid,), 0.4, softcap=softcap)
    check(lambda *x: tiles.attend(*x, call), pattern.allowed(53), inputs, softcap=softcap)


def test_softcap_has_gradients_of_any_order_and_the_same_bits_twice():
    inputs = tensors(b=1, h=2, h_kv=1, n=11, d_k=3, d_v=2)
    run = run_tiles(pattern=SPARSE, softcap=1.3)
    assert gradcheck(run, inputs, fast_mode=True) and gradgradcheck(run, inputs, fast_mode=True)
    long = tensors(b=1, n=1009, d_k=16, d_v=16, dtype=f32)
    runs = [with_gradients(run_tiles(pattern=SPARSE, softcap=1.3), *long) for _ in range(2)]
    assert all(map(torch.equal, *runs))


def test_softcap_comes_before_a_bias_by_distance():
    q, k, v = tensors(n=53)
    bias = rg.ByDistance(slopes=torch.tensor([0.1, 0.3], dtype=f64))
    call = tiles.TileAttention((small(SPARSE, 53),), 0.4, softcap=1.3)
    o, lse = tiles.attend(q, k, v, call, bias)
    distances = torch.arange(53) - torch.arange(53)[:, None]
    s = 1.3 * torch.tanh(q @ k.mT * 0.4 / 1.3) + bias.at(distances)
    s = s.masked_fill(~SPARSE.allowed(53), -inf)
    torch.testing.assert_close((o, lse), (s.softmax(-1) @ v, s.logsumexp(-1)))
    grads = [torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (o, s.softmax(-1) @ v)]
    torch.testing.assert_close(*grads)


def test_softcap_and_left_padding_of_packed_documents():
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor([5, 30, 2, 16]))
    options = {"softcap": 1.3, "lengths": torch.tensor([[0, 53], [7, 50]]), "return_lse": True}
    runs = [
        with_gradients(
            lambda *x, b=b: rg.attention(*x, rg.documents(ids) & rg.causal(), backend=b, **options), *qkv
        )
        for qkv in [tensors(n=53)]
        for b in ("tiles", "reference")
    ]
    torch.testing.assert_close(*runs)


# Left padding, and one query offset per batch row

LIMITS = torch.tensor([[0, 53], [7, 50], [30, 31], [20, 20]])


@pytest.mark.parametrize("pattern", [*WORDS, *MIXED], ids=repr)
def test_left_padding_is_the_formula(pattern):
    j = torch.arange(53)
    visible = (j >= LIMITS[:, :1]) & (j < LIMITS[:, 1:])
    allowed = pattern.allowed(53) & visible[:, None, None]
    check(run_tiles(pattern=pattern, lengths=LIMITS), allowed, tensors(b=4, n=53, dtype=f32))


@pytest.mark.parametrize("n", [1, 5, 40])
@pytest.mark.parametrize("limits", [None, LIMITS])
@pytest.mark.parametrize("pattern", [SPARSE, rg.causal(), rg.window(5), rg.strided(6), MIXED[2]], ids=repr)
def test_an_offset_per_batch_row_is_the_formula(pattern, limits, n):
    at, j = torch.tensor([13, 0, 40, 29]), torch.arange(53)
    allowed = torch.stack([pattern.allowed(n, 53, int(start)) for start in at])[:, None]
    if limits is not None:
        allowed = allowed & ((j >= limits[:, :1]) & (j < limits[:, 1:]))[:, None, None]
    inputs = tensors(b=4, h=4, n=n, m=53, dtype=f32)
    check(run_tiles(pattern=pattern, at=at, lengths=limits), allowed, inputs)
    assert explain(*inputs, pattern, at=at, backend="tiles").backend == "tiles"


def test_offsets_per_row_and_left_padding_have_second_gradients():
    inputs = tensors(b=2, h=2, h_kv=1, n=5, m=11, d_k=3, d_v=2)
    options = {"at": torch.tensor([6, 3]), "lengths": torch.tensor([[5, 11], [0, 8]]), "softcap": 2.0}
    run = lambda *x: rg.attention(*x, rg.window(4), backend="tiles", **options)  # noqa: E731
    assert gradcheck(run, inputs, fast_mode=True) and gradgradcheck(run, inputs, fast_mode=True)
    first, with_graph = (
        torch.autograd.grad(run(*inputs).sum(), inputs, create_graph=x) for x in (False, True)
    )
    torch.testing.assert_close(first, with_graph)


@pytest.mark.parametrize("poison", [nan, inf])
@pytest.mark.parametrize("n", [1, 9])
def test_what_left_padding_hides_is_never_read(n, poison):
    q, k, v = tensors(b=2, n=n, m=53)
    limits = torch.tensor([[11, 53], [4, 40]])
    run = run_tiles(pattern=SPARSE, lengths=limits)
    clean, j = with_gradients(run, q, k, v), torch.arange(53)
    hidden = ((j < limits[:, :1]) | (j >= limits[:, 1:]))[:, None, :, None]
    dirty = with_gradients(run, q, *(x.detach().masked_fill(hidden, poison) for x in (k, v)))
    assert all(map(torch.equal, clean, dirty))


# One query


@pytest.mark.parametrize("position", [0, 1, 52, 63, 64, 200])
@pytest.mark.parametrize("pattern", [*WORDS, *MIXED, rg.window(20) - rg.every(3)], ids=repr)
def test_the_progressions_of_one_query_hold_its_keys_once(pattern, position):
    seen = torch.zeros(300, dtype=torch.int)
    for first, step, count, full in keys_of_query(pattern, position):
        j = torch.arange(first, min(first + step * count, 300), step)
        seen[j] += 1 if full else torch.as_tensor(pattern.allows(position, j)).int()
    assert torch.equal(seen, pattern.allowed(1, 300, position)[0].int())


@pytest.mark.parametrize("dtype", [f32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 1.3])
@pytest.mark.parametrize("pattern", [*WORDS, *MIXED, rg.window(20) - rg.every(3)], ids=repr)
def test_one_query_is_the_formula(pattern, softcap, dtype):
    inputs = tensors(b=2, h=6, n=1, m=101, d_k=16, d_v=16, dtype=dtype)
    check(run_tiles(pattern=pattern, softcap=softcap), pattern.allowed(1, 101), inputs, softcap=softcap)


@pytest.mark.parametrize("learns", ["none", "q", "k", "v"])
@pytest.mark.parametrize("softcap", [None, 1.3])
def test_one_query_is_the_formula_whatever_learns(softcap, learns):
    """The fused op has neither a softcap nor gradients, so it runs where there is nothing of both."""
    inputs = [x.detach() for x in tensors(b=2, h=6, n=1, m=101)]
    q, k, v = (x.requires_grad_(name == learns) for name, x in zip("qkv", inputs))
    lengths = torch.tensor([101, 60])
    options = {"lengths": lengths, "scale": 0.4, "softcap": softcap}
    mine, right = (rg.attention(q, k, v, SPARSE, backend=x, **options) for x in ("tiles", "reference"))
    torch.testing.assert_close(mine, right)
    if learns != "none":
        (x,) = (x for x in (q, k, v) if x.requires_grad)
        gradients = (torch.autograd.grad(o.square().sum(), x)[0] for o in (mine, right))
        torch.testing.assert_close(*gradients)


def test_one_query_with_a_bias_and_with_dropout():
    torch.manual_seed(0)
    q, k, v = tensors(h=4, n=1, m=101)
    bias = rg.ByDistance(table=torch.randn(4, 9, dtype=f64), slopes=torch.rand(4, dtype=f64))
    mine, right = (rg.attention(q, k, v, SPARSE, bias=bias, backend=x) for x in ("tiles", "reference"))
    torch.testing.assert_close(mine, right)
    ones = torch.ones(2, 2, 101, 3, dtype=f64)
    sums = torch.stack([rg.attention(q, k, ones, SPARSE, dropout_p=0.5, backend="tiles") for _ in range(300)])
    assert (
        sums.std(0).min() > 0.1 and (sums.mean(0) - 1).abs().max() < 0.15
    )  # weights of 0 or twice their value


def test_a_query_without_keys_gives_zeros_and_gradients_of_zero():
    q, k, v = tensors(n=1, m=101)
    o, lse = rg.attention(q, k, v, rg.sinks(0), backend="tiles", return_lse=True)
    assert not o.any() and (lse == -inf).all()
    assert all(not g.any() for g in torch.autograd.grad(o.sum(), (q, k, v)))


def test_decoding_reads_the_keys_of_the_pattern_and_no_others():
    """However long the cache is: the other keys hold NaN, and the number of computed pairs is the count."""
    pattern, m = rg.causal() & (rg.window(100) | rg.sinks(4) | rg.every(512)), 100_000
    q, k, v = torch.randn(1, 2, 1, 16), torch.full((1, 2, m, 16), nan), torch.full((1, 2, m, 16), nan)
    keys = pattern.allowed(1, m)[0].nonzero()[:, 0]
    k[:, :, keys], v[:, :, keys] = torch.randn(2, 1, 2, len(keys), 16)
    result = explain(q, k, v, pattern)
    assert (result.backend, result.variant, result.computed) == ("tiles", "one query", pattern.count(1, m))
    right = formula(q, k[:, :, keys], v[:, :, keys], torch.tensor(True).expand(1, len(keys)), 0.25)[0]
    torch.testing.assert_close(rg.attention(q, k, v, pattern), right)


@pytest.mark.parametrize("pattern", [SPARSE, rg.window(20) - rg.every(3), rg.sinks(0)], ids=repr)
def test_one_query_is_prepared_once_and_then_gives_the_same_bits(pattern):
    q, k, v = (x.detach() for x in tensors(h=4, n=1, m=101))
    first, second = (rg.attention(q, k, v, pattern, backend="tiles") for _ in range(2))
    assert torch.equal(first, second)
    torch.testing.assert_close(first, rg.attention(q, k, v, pattern, backend="reference"))
    names = [getattr(made, "__qualname__", "") for made in PREPARED.values()]
    assert any(name.startswith("_one_query") for name in names)


def test_a_step_of_decoding_makes_no_new_plan(monkeypatch):
    """The keys of 64 positions are found at once, whatever the length of the cache."""
    q, k, v = torch.randn(1, 2, 1, 16), *torch.randn(2, 1, 2, 5000, 16)
    pattern = rg.causal() & (rg.window(70) | rg.every(31))
    rg.attention(q, k[:, :, :4801], v[:, :, :4801], pattern)
    layout.cache_clear()
    before = one_query._keys_of_queries.cache_info().misses
    for m in range(4802, 4865):
        rg.attention(q, k[:, :, :m], v[:, :, :m], pattern)
    assert one_query._keys_of_queries.cache_info().misses == before and layout.cache_info().misses == 0

"""Bias by distance and dropout in tiles: the formula, gradients by diagonals, memory that stays small."""

from math import inf

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pattern_strategies import offsets, patterns
from regard.engine.attention import attention
from regard.engine.cpu import layout as layouts
from regard.engine.cpu import tiles
from regard.engine.cpu.strided_layout import layout
from regard.engine.plan import NoPlan
from regard.pattern import causal, dilated, every, full, query_offset, rows, window
from regard.position import ByDistance
from tile_cases import MIXED, WORDS, assert_as_exact, small, tensors, with_gradients


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Tiles of a few rows, so that n = 101 has several of each kind."""
    small_pieces(monkeypatch, 300)


def small_pieces(monkeypatch, scores):
    layout.cache_clear()  # a layout caches how it was cut
    monkeypatch.setattr(layouts, "MAX_SPLIT", (scores, scores))
    monkeypatch.setattr(layouts, "MIN_SPLIT_ROWS", 2)


def attend(q, k, v, laid, bias=None, *, scale, lengths=None, dropout_p=0.0):
    call = tiles.TileAttention((laid,), scale, lengths=lengths, dropout_p=dropout_p)
    return tiles.attend(q, k, v, call, bias)


def biases(h=2, reach=9, seed=3, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    table = torch.randn(h, 2 * reach + 1, generator=g, dtype=torch.float64).to(dtype)
    slopes = torch.rand(h, generator=g, dtype=torch.float64).to(dtype)
    return {
        "table": ByDistance(table=table),
        "slopes": ByDistance(slopes=slopes / 10),
        "both": ByDistance(table=table, slopes=slopes / 10),
    }


def formula(q, k, v, allowed, bias, at, scale, weigh=None):
    """softmax over the allowed pairs with the bias added; weigh: what dropout multiplies the weights with."""
    n, m, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    start, step = at
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    empty = ~allowed.any(-1, keepdim=True)
    distances = torch.arange(m) - (start + step * torch.arange(n))[:, None]
    scores = q @ k.mT * scale + bias.at(distances).to(q.dtype)
    scores = scores.masked_fill(~(allowed | empty), -inf)
    weights = scores.softmax(-1).masked_fill(empty, 0.0)
    wide = scores if scores.dtype == torch.float64 else scores.float()
    lse = wide.logsumexp(-1).masked_fill(empty.squeeze(-1), -inf)
    return (weights if weigh is None else weights * weigh) @ v, lse


def check(laid, allowed, bias, at, q, k, v, scale=0.4, lengths=None):
    parts = [x for x in (bias.table, bias.slopes) if x is not None]

    def of(x):
        names = [name for name in ("table", "slopes") if getattr(bias, name) is not None]
        return ByDistance(**dict(zip(names, x)))

    fast = with_gradients(
        lambda q, k, v, *x: attend(q, k, v, laid, of(x), scale=scale, lengths=lengths),
        q,
        k,
        v,
        *parts,
    )
    dense = lambda q, k, v, *x: formula(q, k, v, allowed, of(x), at, scale)  # noqa: E731
    plain = with_gradients(dense, q, k, v, *parts)
    ref = with_gradients(dense, *(x.double() for x in (q, k, v, *parts)))
    assert_as_exact(fast, plain, ref)


@pytest.mark.parametrize("kind", ["table", "slopes", "both"])
@pytest.mark.parametrize("pattern", WORDS + MIXED, ids=repr)
def test_every_word_with_a_bias_gives_the_formula_and_its_gradients(pattern, kind):
    check(small(pattern, 53), pattern.allowed(53), biases()[kind], (0, 1), *tensors(n=53))


@pytest.mark.parametrize("reach", [0, 1, 52, 200])
def test_a_table_shorter_or_longer_than_the_sequence(reach):
    check(small(full(), 53), full().allowed(53), biases(reach=reach)["table"], (0, 1), *tensors(n=53))


@given(patterns, st.integers(1, 40), st.integers(1, 40), offsets, st.integers(0, 99))
def test_any_composition_with_a_bias_gives_the_formula_and_its_gradients(pattern, n, m, at, seed):
    if at is None and n > m:
        n, m = m, n
    try:
        laid = small(pattern, n, m, at)
    except NoPlan:
        return
    q, k, v = tensors(b=1, n=n, m=m, seed=seed)
    check(laid, pattern.allowed(n, m, at), biases()["both"], query_offset(pattern, n, m, at), q, k, v)


@pytest.mark.parametrize("pattern", [full(), causal(), window(30) | every(16), dilated(5, 8)], ids=repr)
def test_float32_is_as_exact_as_plain_pytorch(pattern):
    q, k, v = tensors(n=101, d_k=16, d_v=16, dtype=torch.float32)
    check(
        small(pattern, 101), pattern.allowed(101), biases(dtype=torch.float32)["both"], (0, 1), q, k, v, 0.25
    )


def test_queries_and_keys_with_steps_that_do_not_divide_one_another():
    pattern = every(2)
    check(
        small(pattern, 11, 37, (3, 3)),
        pattern.allowed(11, 37, (3, 3)),
        biases()["both"],
        (3, 3),
        *tensors(n=11, m=37),
    )


@pytest.mark.parametrize("h_kv", [1, 2, 6])
def test_grouped_heads_have_a_bias_of_their_own(h_kv):
    pattern = causal() & (window(9) | every(8))
    check(
        small(pattern, 53), pattern.allowed(53), biases(h=6)["both"], (0, 1), *tensors(h=6, h_kv=h_kv, n=53)
    )


@pytest.mark.parametrize("pattern", [full(), window(6) | every(9), causal()], ids=repr)
def test_lengths_hide_keys_whatever_they_contain(pattern):
    n, lengths = 53, torch.tensor([53, 0, 20])
    q, k, v = tensors(b=3, n=n)
    hidden = torch.arange(n) >= lengths[:, None, None, None]
    check(small(pattern, n), pattern.allowed(n) & ~hidden, biases()["both"], (0, 1), q, k, v, lengths=lengths)
    poisoned = [x.detach().masked_fill(hidden.mT, float("nan")).requires_grad_() for x in (k, v)]
    both = [
        with_gradients(
            lambda *x: attend(*x, small(pattern, n), biases()["both"], scale=1.0, lengths=lengths),
            q,
            *kv,
        )
        for kv in ((k, v), poisoned)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*both))


def test_a_query_that_sees_nothing_gets_zeros_and_finite_gradients():
    pattern = every(7) & ~(window(200) & rows(3))
    o, lse, *grads = with_gradients(
        lambda *x: attend(*x, small(pattern, 53), biases()["both"], scale=1.0), *tensors(n=53)
    )
    assert not o[:, :, ::3].any() and (lse[:, :, ::3] == -inf).all() and o[:, :, 1].all()
    assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("n, m", [(0, 7), (7, 0), (1, 1), (1, 9)])
def test_no_queries_no_keys_or_one(n, m):
    q, k, v = tensors(n=n, m=m)
    laid = layout(full(), n, m, m - n, 1)
    check(laid, full().allowed(n, m, m - n), biases()["both"], (m - n, 1), q, k, v)


def test_gradients_hold_to_second_differences():
    q, k, v = tensors(b=1, h=2, h_kv=1, n=13, d_k=3, d_v=2)
    table = torch.randn(2, 9, dtype=torch.float64, requires_grad=True)
    slopes = torch.rand(2, dtype=torch.float64, requires_grad=True)
    for pattern in (full(), window(2) | every(6)):
        laid = small(pattern, 13)

        def both(q, k, v, table, slopes, laid=laid):
            return attend(q, k, v, laid, ByDistance(table, slopes), scale=0.6)

        assert torch.autograd.gradcheck(both, (q, k, v, table, slopes), fast_mode=True)


def test_two_runs_agree_bit_for_bit(monkeypatch):
    small_pieces(monkeypatch, 1 << 13)
    n = 301
    q, k, v = tensors(n=n, d_k=16, d_v=16, dtype=torch.float32)
    table = biases(reach=300, dtype=torch.float32)["table"].table
    runs = []
    for _ in range(3):
        torch.manual_seed(0)
        runs.append(
            with_gradients(
                lambda q, k, v, t: attend(
                    q, k, v, small(full(), n), ByDistance(t), scale=0.25, dropout_p=0.2
                ),
                q, k, v, table,
            )
        )  # fmt: skip
    assert all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other))


@given(st.integers(0, 12), st.integers(-30, 30), st.integers(0, 40))
def test_the_bias_along_a_line_is_the_bias_at_each_distance(reach, low, span):
    bias = biases(reach=reach)["both"]
    torch.testing.assert_close(bias.along(low, low + span), bias.at(torch.arange(low, low + span + 1)))


# Dropout


def weights_of(laid, q, k, v, p, seed=5):
    """The weights after dropout, read off with one value a key."""
    torch.manual_seed(seed)
    eye = torch.eye(k.shape[2], dtype=v.dtype).expand(*v.shape[:2], -1, -1).contiguous()
    return attend(q, k, eye, laid, scale=0.4, dropout_p=p)[0].detach()


@pytest.mark.parametrize("pattern", [full(), window(9) | every(8), causal()], ids=repr)
def test_dropout_keeps_or_takes_away_each_weight_and_scales_what_stays(pattern):
    laid, (q, k, v) = small(pattern, 53), tensors(n=53)
    with_all = weights_of(laid, q, k, v, 0.0)
    dropped = weights_of(laid, q, k, v, 0.25)
    kept = dropped != 0
    torch.testing.assert_close(dropped, torch.where(kept, with_all / 0.75, 0.0))
    allowed = pattern.allowed(53).expand_as(kept)
    assert abs(kept[allowed].double().mean() - 0.75) < 0.02
    assert not torch.equal(kept, weights_of(laid, q, k, v, 0.25, seed=6) != 0)


def test_the_gradients_know_which_weights_were_dropped():
    pattern, at = window(9) | every(8), (0, 1)
    laid, (q, k, v) = small(pattern, 53), tensors(n=53)
    kept = (weights_of(laid, q, k, v, 0.25) != 0) / 0.75
    bias = ByDistance(slopes=torch.zeros(2, dtype=torch.float64))

    def dropped(*x):
        torch.manual_seed(5)
        return attend(*x, laid, scale=0.4, dropout_p=0.25)

    fast = with_gradients(dropped, q, k, v)
    ref = with_gradients(lambda *x: formula(*x, pattern.allowed(53), bias, at, 0.4, kept), q, k, v)
    torch.testing.assert_close(fast, ref)


# Memory


def test_nothing_of_size_n_times_m_is_held(monkeypatch):
    """n = 8192: one head's table of scores would be 256 MiB in float32, its bias as much again."""
    small_pieces(monkeypatch, 1 << 18)
    n = 8192
    q, k, v = tensors(b=1, h=1, h_kv=1, n=n, d_k=16, d_v=16, dtype=torch.float32)
    table = torch.zeros(1, 2 * n - 1, requires_grad=True)
    laid = layout(full(), n, n, 0, 1)
    largest = 0

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, tuple | list) else [out]:
                if isinstance(x, torch.Tensor):
                    largest = max(largest, x.untyped_storage().nbytes())
            return out

    with Largest():
        o, _ = attend(q, k, v, laid, ByDistance(table), scale=0.25)
        torch.autograd.grad(o.sum(), (q, k, v, table))
    assert largest <= 4 << 20


@pytest.mark.parametrize("backend", ["auto", "tiles", "sdpa", "reference"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_slopes_of_16_bits_count_long_distances(backend, dtype):
    """The visible keys are far away, where 16 bits do not tell one distance from the next."""
    n, at, end, slopes = 67, 4101, 30, torch.tensor([1.0, 0.25])
    q, k, v = (torch.randn(1, 2, n, 8, generator=torch.Generator().manual_seed(s)).half() for s in range(3))
    distance = torch.arange(end) - (torch.arange(n) + at)[:, None]
    scores = q.double() @ k[..., :end, :].double().mT / 8**0.5 - slopes[:, None, None] * distance.abs()
    expected = scores.softmax(-1) @ v[..., :end, :].double()
    o = attention(
        q, k, v, bias=ByDistance(slopes=slopes.to(dtype)), lengths=torch.tensor([end]), at=at, backend=backend
    )
    torch.testing.assert_close(o.double(), expected, rtol=0, atol=4e-3)


@pytest.mark.parametrize("backend", ["sdpa", "reference", "tiles"])
def test_the_gradient_of_a_table_of_16_bits_is_summed_in_float32(backend):
    n, reach = 509, 2
    q, k, v, do = (
        torch.randn(1, 1, n, 8, generator=torch.Generator().manual_seed(s)).bfloat16() for s in range(4)
    )
    table = torch.randn(1, 2 * reach + 1, generator=torch.Generator().manual_seed(4)).bfloat16()
    grads = []
    for kind in (torch.float64, torch.bfloat16):
        given = table.to(kind).requires_grad_()
        name = "reference" if kind == torch.float64 else backend
        o = attention(*(x.to(kind) for x in (q, k, v)), bias=ByDistance(given), backend=name)
        grads.append(torch.autograd.grad(o, given, do.to(kind))[0].double())
    assert (grads[1] - grads[0]).abs().max() < 0.02 * grads[0].abs().max()


@pytest.mark.parametrize("backend", ["auto", "sdpa", "reference", "tiles"])
def test_the_gradient_of_slopes_of_16_bits_does_not_depend_on_how_far_all_keys_are(backend):
    """One query far from most keys: of distances up to 1,022, the weights depend on differences alone."""
    m = 1023
    q, k, v, do = (
        torch.randn(1, 2, n, 8, generator=torch.Generator().manual_seed(n + s)).bfloat16()
        for s, n in enumerate((1, m, m, 1))
    )
    grads = []
    for kind in (torch.float64, torch.bfloat16):
        slopes = torch.tensor([0.01, 0.5], dtype=torch.bfloat16).to(kind).requires_grad_()
        name, lengths = "reference" if kind == torch.float64 else backend, torch.tensor([m // 2])
        more = {"bias": ByDistance(slopes=slopes), "lengths": lengths, "backend": name}
        o = attention(*(x.to(kind) for x in (q, k, v)), **more)
        grads.append(torch.autograd.grad(o, slopes, do.to(kind))[0].double())
    assert (grads[1] - grads[0]).abs().max() < 0.02 * grads[0].abs().max()

"""The keys of a tile side by side: the formula and its gradients, however the rows are cut and whatever is kept."""

from math import inf, nan
from threading import Thread

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

from long_cases import in_long
from pattern_strategies import offsets, patterns
from regard.engine.attention import attention
from regard.engine.backends import PREPARED, choose
from regard.engine.call import CallFacts
from regard.engine.cpu import kernels, layout, strided_layout, tiles
from regard.engine.cpu.backend import CONCATENATED, MERGED, variants
from regard.engine.explain import explain
from regard.pattern import blocks, causal, dilated, every, full, prefix, query_offset, sinks, strided, window
from tile_cases import MIXED, WORDS, assert_as_exact, formula, tensors

f32, f64 = torch.float32, torch.float64
BANDS = [
    window(5),
    window(9, 2),
    window(8) | every(8),
    window(8) | every(16),  # two masks in turn
    window(3) | every(40),  # five
    window(11) | every(8, 3),  # a band that is no multiple of a tile
    window(30),  # edges in several parts
    causal() & window(16),
    causal() & (window(9) | sinks(2)),
    window(6) | sinks(2),
    blocks(8) | every(8),
    blocks(8),  # no mask at all
]
PRIME, SHARED = {"n": 101}, {"n": 103, "h": 4, "dtype": f32, "d_v": 5}
ALL = 1 << 30


@pytest.fixture(autouse=True)
def nothing_known():
    PREPARED.clear()
    yield
    PREPARED.clear()


def layouts(pattern, n, m=None, at=None, tile=8):
    """Fresh ones, with tiles so small that n = 101 has many of them."""
    m = n if m is None else m
    return strided_layout.concatenated_layouts.__wrapped__(
        pattern, n, m, *query_offset(pattern, n, m, at), tile, tile
    )


def calls(pattern, inputs, grad=True, scale=0.4, tile=8):
    q, k, _ = inputs
    n, m = q.shape[2], k.shape[2]
    return [
        tiles.TileAttention((one,), scale, (pattern, (m - n, 1)), grad=grad)
        for one in layouts(pattern, n, m, None, tile)
    ]


def grown(f, inputs):
    """o, and the gradients of Σ c·o."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    o = f(*inputs)
    c = torch.randn(o.shape, generator=torch.Generator().manual_seed(9), dtype=f64).to(o.dtype)
    return [o, *torch.autograd.grad(o, inputs, c)]


def check(pattern, inputs, allowed):
    plain = grown(lambda *x: formula(*x, allowed, 0.4)[0], inputs)
    ref = grown(lambda *x: formula(*x, allowed, 0.4)[0], [x.double() for x in inputs])
    found = calls(pattern, inputs)
    for call in found:
        assert_as_exact(grown(call, inputs), plain, ref)
    for call in calls(pattern, inputs, grad=False):
        with torch.no_grad():
            assert_as_exact([call(*inputs)], plain[:1], ref[:1])
    return len(found)


@pytest.mark.parametrize("pattern", BANDS, ids=repr)
@pytest.mark.parametrize(
    "near, fewest, given",
    [(1, 2, PRIME), (300, 2, SHARED), (1 << 20, 99, PRIME), (1 << 20, 2, SHARED)],
    ids=["a tile", "some tiles", "a tile of all lanes", "all tiles"],
)
def test_however_the_rows_are_cut_it_is_the_formula(pattern, near, fewest, given, monkeypatch):
    """One tile at a time and all of them, of one lane and of several."""
    monkeypatch.setattr(layout, "MIN_TILES", fewest)
    inputs = tensors(**given)
    laid = layouts(pattern, given["n"])
    monkeypatch.setattr(layout, "MAX_CONCATENATED", near)  # a band of more scores than that would not be laid
    monkeypatch.setattr(strided_layout.concatenated_layouts, "__wrapped__", lambda *x: laid)
    assert check(pattern, inputs, pattern.allowed(given["n"])) > 0


@pytest.mark.parametrize("pattern", [p for p in WORDS + MIXED if p not in BANDS], ids=repr)
def test_a_pattern_with_such_a_layout_is_the_formula(pattern):
    laid = check(pattern, tensors(), pattern.allowed(101))
    assert not laid or pattern not in (full(), dilated(3, 4), strided(6), sinks(0), causal() & strided(8))


@given(patterns, st.integers(1, 70), st.integers(1, 70), offsets, st.sampled_from([4, 8, 24]))
@example(window(4) - every(5), 70, 70, None, 4)
@example(causal() & (window(9) | sinks(20)), 70, 70, None, 4)
@example((causal() | prefix(12)) & blocks(4), 24, 24, None, 4)  # a fixed end between two tiles
@settings(deadline=None)
def test_the_layout_holds_each_allowed_pair_once_and_no_other(pattern, n, m, at, tile):
    if n > m and at is None:
        at = 0
    for one in layouts(pattern, n, m, at, tile):
        seen = torch.zeros(n, m, dtype=torch.int)
        for piece in one.pieces(1):
            masks = piece.mask(f64)
            row = piece.rows_of(torch.arange(n, dtype=f64).view(1, n, 1))
            j = torch.arange(m, dtype=f64).view(1, m, 1)
            keys = piece.load_keys(j, "k", kernels.Buffers(j))
            key, *shared = (x.long() for x in keys)
            for t, rows in enumerate(row.long().squeeze(-1)):
                mask = torch.zeros(1) if masks is None else masks[t % len(masks)]
                seen[rows[:, None], key[t, :, 0]] += (mask == 0).int()
                for part in shared:
                    seen[rows[:, None], part[0, :, 0]] += 1
        assert (
            torch.equal(seen.bool(), pattern.allowed(n, m, query_offset(pattern, n, m, at)))
            and seen.max() <= 1
        )
        assert one.computed >= int(seen.sum())


@pytest.mark.parametrize("most", [0, 3000, ALL])
@pytest.mark.parametrize("dtype", [f32, f64])
def test_weights_that_are_not_kept_are_made_again(most, dtype, monkeypatch):
    monkeypatch.setattr(kernels, "max_saved", lambda numbers: most)
    monkeypatch.setattr(layout, "MAX_CONCATENATED", 700)
    monkeypatch.setattr(layout, "MIN_TILES", 2)
    pattern, inputs, saved = window(8) | every(8), tensors(dtype=dtype), []
    check(pattern, inputs, pattern.allowed(101))
    (call,) = calls(pattern, inputs)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        call(*inputs)
    kept = sum(saved) - sum(x.numel() for x in inputs)
    everything = 4 * call.layouts[0].computed
    assert kept == {0: 0, ALL: everything}.get(most, kept) and (most != 3000 or 0 < kept <= 3000 < everything)


def test_as_much_is_kept_as_q_k_v_and_o_hold_together_within_8_and_64_mib(monkeypatch):
    assert [kernels.max_saved(x) for x in (0, 3 << 20, 1 << 30)] == [1 << 21, 3 << 20, 1 << 24]
    given, inputs = [], tensors(h=4, d_k=5, d_v=3)
    monkeypatch.setattr(kernels, "max_saved", lambda numbers: given.append(numbers) or 0)
    calls(window(8) | every(8), inputs)[0](*inputs)
    assert given == [sum(x.numel() for x in (*inputs, inputs[0][..., :3]))]


def test_a_graph_that_is_kept_gives_the_same_gradients_again():
    """Other calls, and a hook that puts other memory in place of the saved weights, change nothing."""
    pattern, inputs = window(8) | every(8), tensors(dtype=f32)
    (call,) = calls(pattern, inputs)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x.clone()):
        hooked = call(*inputs)
    o, other = call(*inputs), [x.detach().clone().mul_(3).requires_grad_() for x in inputs]
    first = torch.autograd.grad(o.square().sum(), inputs, retain_graph=True)
    torch.autograd.grad(call(*other).sum(), other)
    second = torch.autograd.grad(o.square().sum(), inputs)
    third = torch.autograd.grad(hooked.square().sum(), inputs)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(first, second, third))


def test_a_row_that_sees_nothing_is_left_to_others():
    nothing = window(1) - window(0) - every(2)  # for a query at an odd place
    assert layouts(nothing | window(0), 101) and not layouts(nothing, 101)


def test_the_same_bits_twice():
    pattern, inputs = window(8) | every(16), tensors(dtype=f32, d_k=16, d_v=16)
    (call,) = calls(pattern, inputs)
    first, second = (grown(call, inputs) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_two_threads_do_not_meet():
    pattern = window(8) | every(8)
    both = [tensors(seed=seed, dtype=f32) for seed in (1, 2)]
    (call,) = calls(pattern, both[0])
    wanted, wrong = [grown(call, inputs) for inputs in both], []

    def run(which):
        for _ in range(20):
            found = grown(call, both[which])
            if not all(torch.equal(a, b) for a, b in zip(found, wanted[which])):
                wrong.append(which)

    threads = [Thread(target=run, args=(which,)) for which in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("pattern", [window(2) | every(2), causal() & (window(3) | sinks(1))], ids=repr)
def test_gradients_and_their_gradients(pattern):
    inputs = tensors(b=1, h=2, h_kv=1, n=5, d_k=3, d_v=2)
    (call,) = calls(pattern, inputs, tile=2)
    assert gradcheck(call, inputs, fast_mode=True)
    assert gradgradcheck(call, inputs, atol=1e-6, fast_mode=True)


def test_a_head_reads_no_other():
    """NaN in one, infinity in another: the first and last tiles of all heads are computed together."""
    pattern, (q, k, v) = window(8) | every(8), tensors(b=1, h=3, h_kv=3)
    (call,) = calls(pattern, (q, k, v))
    wanted = grown(call, (q, k, v))
    with torch.no_grad():
        k[:, 0], v[:, 2] = nan, inf
    found = grown(call, (q, k, v))
    assert all(torch.equal(a[:, 1], b[:, 1]) for a, b in zip(found, wanted))


def test_scores_of_any_size_have_a_softmax():
    pattern, (q, k, v) = window(8) | every(8), tensors(dtype=f32)
    (call,) = calls(pattern, (q, k, v))
    with torch.no_grad():
        q.mul_(1e4)
    assert all(x.isfinite().all() for x in grown(call, (q, k, v)))


def test_what_ran_in_inference_trains_later():
    kernels._pool.clear()
    pattern, inputs = window(8) | every(8), tensors(dtype=f32)
    (call,) = calls(pattern, inputs)
    with torch.inference_mode():
        kernels.with_buffers(call.forward, *inputs)
    wanted = grown(lambda *x: formula(*x, pattern.allowed(101), 0.4)[0], inputs)
    for a, b in zip(grown(call, inputs), wanted):
        torch.testing.assert_close(a, b)


# When it is taken


def facts(pattern, n, heads=8, dtype=f32, **more):
    return CallFacts(pattern, n, n, heads=heads, kv_heads=heads, dtype=dtype, **more)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("pattern", [window(64) | every(64), window(64), window(50) | every(128)], ids=repr)
def test_it_is_taken_where_it_is_faster(pattern, grad):
    for n in (2048, 4096, 16384):
        f = facts(pattern, n, grad=grad)
        times = {v.variant: v.seconds for v in variants(f)}
        assert (choose(f).variant == CONCATENATED) == (times[CONCATENATED] < times[MERGED])
        assert choose(f).variant == CONCATENATED or n == 16384
    others = {"dtype": torch.bfloat16}, {"return_lse": True}, {"lengths": True}, {"at": 3}, {"bias": "tensor"}
    assert all(choose(facts(pattern, 4096, **other)).variant != CONCATENATED for other in others)
    assert choose(facts(pattern, 4096), "sdpa").variant == "masked"
    assert choose(facts(dilated(8, 8), 4096)).variant != CONCATENATED


@pytest.mark.parametrize("backend", ["auto", *in_long("tiles")])
@pytest.mark.parametrize("more", [{}, {"return_lse": True}, {"lengths": torch.tensor([1200])}], ids=str)
def test_a_call_takes_it_from_the_first_on(backend, more, monkeypatch):
    ran, real = [], tiles.TileAttention.forward
    monkeypatch.setattr(
        tiles.TileAttention, "forward", lambda self, *x: ran.append(self.one_softmax) or real(self, *x)
    )
    inputs = tensors(b=1, h=8, h_kv=8, n=1201, d_k=64, d_v=64, dtype=f32)
    pattern = window(64) | every(64)
    runs = [attention(*inputs, pattern, backend=backend, **more) for _ in range(2)]
    o, again = (x[0] if isinstance(x, tuple) else x for x in runs)
    assert sum(ran) == (0 if more else 2) and torch.equal(o, again)
    hidden = torch.arange(1201) < 1200 if "lengths" in more else torch.ones(1201, dtype=torch.bool)
    wanted = formula(*inputs, pattern.allowed(1201) & hidden, 0.125)[0]
    torch.testing.assert_close(o, wanted)


def test_it_says_that_it_is_taken_and_how_many_pairs_it_computes():
    explained = explain(window(64) | every(64), 4096, grad=True)
    edges = 2 * 64 * (128 + 64)  # of the window a half, and the comb
    assert (explained.backend, explained.variant) == ("tiles", CONCATENATED)
    assert explained.computed == 62 * 64 * 256 + edges
    assert explained.reason.endswith("; tiles of 64 queries, all keys of a tile in one softmax")
    assert "one softmax" not in explain(dilated(8, 8), 4096).reason


def test_its_tables_are_on_the_cpu_whatever_the_default_device():
    inputs = tensors(b=1, h=8, h_kv=8, n=1201, d_k=64, d_v=64, dtype=f32)
    strided_layout.concatenated_layouts.cache_clear()
    with torch.device("meta"):
        o = attention(*inputs, window(64))
    assert explain(*inputs, window(64)).variant == CONCATENATED
    assert o.device.type == "cpu" and torch.equal(o, attention(*inputs, window(64)))

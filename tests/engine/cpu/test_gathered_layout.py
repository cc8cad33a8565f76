"""Short sequences by products over gathered keys: the formula and its gradients, however they are cut."""

from threading import Thread

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import regard as rg
from long_cases import rows_in_long
from regard.engine.attention import attention
from regard.engine.backends import PREPARED, choose
from regard.engine.call import CallFacts
from regard.engine.cpu import gathered_layout, kernels, tiles
from regard.engine.cpu.backend import GATHERED
from regard.engine.explain import explain
from regard.pattern import causal, dilated, every, prefix, rows, strided, window
from tile_cases import MIXED, WORDS, formula, tensors

f32, f64 = torch.float32, torch.float64
PATTERNS = [
    *WORDS,
    *MIXED,
    causal() - window(5),
    strided(200),
    rows(3) & window(9),
    prefix(4) | dilated(2, 2),
]


@pytest.fixture(autouse=True)
def nothing_known():
    PREPARED.clear()
    yield
    PREPARED.clear()


@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_a_shape_has_the_keys_of_its_fullest_tile(pattern):
    n, m = 131, 151
    table = pattern.allowed(n, m)
    for row_step, count, r, l in gathered_layout.shapes(pattern, n, m, m - n, 1):
        of_classes = [range(c, n, row_step) for c in range(row_step)]
        order = [i for each in of_classes for i in each]
        order += order[-1:] * (count * r - n)
        fullest = max(int(table[order[t * r : (t + 1) * r]].any(0).sum()) for t in range(count))
        assert l == min(max(-(-fullest // 16), 1) * 16, m)


def calls(pattern, inputs, grad=True, scale=5**-0.5):
    """One for each division of the queries into tiles."""
    q, k, v = inputs
    n, m = q.shape[2], k.shape[2]
    for shape in gathered_layout.shapes(pattern, n, m, m - n, 1):
        gathering = gathered_layout.gathered((pattern, n, m, m - n, 1), shape)
        laid = gathered_layout.GatheredLayout([gathering], q, k, v)
        yield tiles.TileAttention((laid,), scale, (pattern, (m - n, 1)), grad=grad)


def close(fast, plain, ref, dtype):
    """The error rule: twice the error of the formula in the same dtype, and 4 ulp; in float64 that is unknown."""
    for f, p, r in zip(fast, plain, ref, strict=True):
        error = 1e-13 if dtype == f64 else (p - r).abs().max()
        bound = 2 * error + 4 * torch.finfo(dtype).eps * r.abs().max()
        assert (f - r).abs().max() <= bound


PRIME, SHARED = {"n": 67}, {"n": 96, "h": 4, "h_kv": 2, "d_v": 5, "dtype": f32}
CUTS = [(1, 1 << 21, PRIME), (1 << 13, 0, SHARED)]
OTHER_CUTS = [
    (1, 1 << 21, SHARED),
    (1 << 13, 0, PRIME),
    (1 << 18, 1 << 21, PRIME),
    (1 << 18, 1 << 21, SHARED),
]


@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
@pytest.mark.parametrize(("near", "kept", "given"), [*CUTS, *rows_in_long(*OTHER_CUTS)])
def test_however_the_queries_are_cut_it_is_the_formula(pattern, near, kept, given, monkeypatch):
    """Tiles that the last of a head fills up, of one residue, of all queries; one head at a time and all."""
    monkeypatch.setattr(gathered_layout, "MAX_SCORES", near)
    monkeypatch.setattr(kernels, "SAVED_WEIGHTS", (kept, kept))
    inputs = tensors(**given)
    allowed = pattern.allowed(inputs[0].shape[2])
    empty, dtype = ~allowed.any(-1, keepdim=True), inputs[0].dtype
    plain, ref = (formula(*(x.to(d) for x in inputs), allowed, 5**-0.5)[0] for d in (dtype, f64))
    c = torch.randn(ref.shape, generator=torch.Generator().manual_seed(4), dtype=f64)
    wanted = [[x, *torch.autograd.grad(x, inputs, c.to(x.dtype))] for x in (plain, ref)]
    for call in calls(pattern, inputs):
        o = call(*inputs).masked_fill(empty, 0.0)
        close([o, *torch.autograd.grad(o, inputs, c.to(dtype))], *wanted, dtype)
    for call in calls(pattern, inputs, grad=False):
        with torch.no_grad():
            close([call(*inputs).masked_fill(empty, 0.0)], *(x[:1] for x in wanted), dtype)


@pytest.mark.parametrize("kept", [0, 1 << 21])
def test_many_weights_are_made_again_instead_of_kept(kept, monkeypatch):
    monkeypatch.setattr(kernels, "SAVED_WEIGHTS", (kept, kept))
    inputs, saved = tensors(n=67), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        (call, *_) = calls(window(9), inputs)
        call(*inputs)
    assert sum(saved) == sum(x.numel() for x in inputs) + (4 * 67 * 67 if kept else 0)


def test_fewer_queries_than_keys_are_at_the_end():
    q, k, v = tensors(n=67)
    q = q[:, :, :64].detach().requires_grad_()
    wanted = formula(q, k, v, window(3).allowed(64, 67), 5**-0.5)[0]
    found = [call(q, k, v) for call in calls(window(3), (q, k, v))]
    assert len(found) == 2
    for o in found:
        torch.testing.assert_close(o, wanted)


def test_queries_of_one_residue_share_a_tile():
    assert {shape.row_step for shape in gathered_layout.shapes(dilated(8, 8), 256, 256, 0, 1)} == {1, 8}
    note = "8 × 32 queries, each time over the 32 keys gathered for them"
    assert choose(facts(dilated(8, 8), 256, grad=True)).note == note
    assert {shape.row_step for shape in gathered_layout.shapes(strided(6), 64, 64, 0, 4)} == {
        1,
        3,
    }  # every fourth position
    assert {shape.row_step for shape in gathered_layout.shapes(strided(1 << 41), 64, 64, 0, 1)} == {1}
    for shape in gathered_layout.shapes(window(8) | every(32), 500, 500, 0, 1):
        assert (
            shape.tiles * shape.rows >= 500
            and shape.rows >= gathered_layout.MIN_ROWS
            and shape.keys % gathered_layout.KEY_MULTIPLE in (0, 4)
        )


def facts(pattern, n, heads=8, dtype=f32, **more):
    return CallFacts(pattern, n, n, heads=heads, kv_heads=heads, dtype=dtype, **more)


def gathers(f):
    return choose(f).variant == GATHERED


def test_it_is_taken_where_it_is_faster():
    p = causal() & (window(16) | every(32))
    for n in (128, 512, 1024):
        for grad in (True, False):
            assert gathers(facts(p, n, grad=grad))
    assert not gathers(facts(p, 8))  # one call of the fused op
    assert not gathers(facts(causal() - window(5), 512))  # nearly every key in every tile
    assert not gathers(facts(p, 4096))
    others = {"dtype": torch.bfloat16}, {"return_lse": True}, {"dropout_p": 0.1}, {"table": True}, {"at": 3}
    for other in others:
        assert not gathers(facts(p, 128, **other))
    assert not gathers(facts(causal(), 128)) and not gathers(facts(p, 128, heads=0))


@pytest.mark.parametrize(
    ("given", "taken"),
    [({}, True), ({"h": 4, "h_kv": 2}, True), ({"dtype": torch.bfloat16}, False), ({"n": 7}, False)],
    ids=["short", "shared heads", "a half type", "very short"],
)
def test_a_call_takes_it_from_the_first_on(given, taken, monkeypatch):
    ran, real = [], tiles.TileAttention.forward

    def forward(call, *x):
        ran.append(isinstance(call.layouts[0], gathered_layout.GatheredLayout))
        return real(call, *x)

    monkeypatch.setattr(tiles.TileAttention, "forward", forward)
    inputs = tensors(**{"n": 131, "d_k": 16, "d_v": 16, "dtype": f32, "h": 8, "h_kv": 8} | given)
    runs = [attention(*inputs, window(3)) for _ in range(3)]
    assert sum(ran) == 3 * taken and all(torch.equal(runs[0], o) for o in runs)


def test_it_says_how_it_is_cut_and_how_many_pairs_it_computes():
    result = explain(window(8) | every(32), 256)
    assert (result.backend, result.variant) == ("tiles", GATHERED)
    shapes = [s for s in gathered_layout.shapes(window(8) | every(32), 256, 256, 0, 1) if s.tiles > 1]
    shape = min(shapes, key=lambda s: gathered_layout.nanoseconds(s, 256, 8, 64, torch.float32, grad=False))
    assert result.computed == shape.pairs == shape.tiles * shape.rows * shape.keys < 256 * 256 / 2
    text = f"{shape.tiles} × {shape.rows} queries, each time over the {shape.keys} keys gathered for them"
    assert result.reason.endswith(f"; {text}") and result.passes == ()
    assert explain(window(8) | every(32), 256, backend="sdpa").computed == 256 * 256


def test_any_layout_of_inputs_and_gradient_is_taken():
    inputs = [x.transpose(1, 2).contiguous().transpose(1, 2).detach().requires_grad_() for x in tensors(n=67)]
    wanted = formula(*inputs, window(3).allowed(67), 5**-0.5)[0]
    for call in calls(window(3), inputs):
        got = torch.autograd.grad(call(*inputs).sum(), inputs)  # an expanded gradient
        for a, b in zip(got, torch.autograd.grad(wanted.sum(), inputs, retain_graph=True)):
            torch.testing.assert_close(a, b)


def test_its_gradients_have_gradients():
    inputs = tensors(b=1, n=5, d_k=3, d_v=2)
    (call,) = calls(window(1), inputs)
    assert gradcheck(call, inputs) and gradgradcheck(call, inputs)


def test_the_same_bits_twice_whatever_ran_between():
    inputs = tensors(n=97, d_k=16, d_v=16, dtype=f32)
    call = list(calls(window(9), inputs))[-1]
    other = list(calls(causal(), tensors(n=131)))[-1]
    runs = []
    for _ in range(3):
        o = call(*inputs)
        between = tensors(n=131)
        torch.autograd.grad(other(*between).sum(), between)
        runs.append([o, *torch.autograd.grad(o.square().sum(), inputs)])
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run))


def test_threads_do_not_write_to_the_same_room():
    inputs = [tensors(n=97, d_k=16, d_v=16, dtype=f32) for _ in range(2)]
    inputs[1] = tuple((2 * x).detach().requires_grad_() for x in inputs[1])
    call = list(calls(window(9), inputs[0]))[-1]
    wanted = [call(*x) for x in inputs]
    wrong = []

    def run(which):
        for _ in range(50):
            if not torch.equal(call(*inputs[which]), wanted[which]):
                wrong.append(which)

    threads = [Thread(target=run, args=(which,)) for which in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_what_ran_in_inference_trains_later():
    kernels._pool.clear()
    inputs = tensors(n=97, d_k=16, d_v=16, dtype=f32)
    call = list(calls(dilated(3, 2), inputs))[-1]
    with torch.inference_mode():
        list(calls(dilated(3, 2), inputs, grad=False))[-1](*inputs)
        kernels.with_buffers(call.forward, *inputs)
    o = call(*inputs)
    wanted = formula(*inputs, dilated(3, 2).allowed(97), 5**-0.5)[0]
    grads = (torch.autograd.grad(x.square().sum(), inputs) for x in (o, wanted))
    torch.testing.assert_close(o, wanted)
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b)


def test_tables_are_on_the_cpu_whatever_the_default_device():
    inputs = tensors(n=131, h=8, h_kv=8, d_k=16, d_v=16, dtype=f32)
    with torch.device("meta"):
        o = attention(*inputs, dilated(3, 2))
    assert o.device.type == "cpu" and torch.equal(o, attention(*inputs, dilated(3, 2)))


def test_long_grids_and_lists_need_no_table_of_all_pairs(monkeypatch):
    """Only pairs of blocks that may hold some are evaluated; beyond 2²⁸ pairs, every call made a table of all."""
    (height, width), largest = (128, 129), 0
    n = height * width
    chosen = torch.randint(0, n // 64, (1, n // 64, 3), generator=torch.Generator().manual_seed(0))
    for word in (rg.neighborhood, rg.selected):
        allows = word.allows

        def seen(self, i, j, allows=allows):
            nonlocal largest
            table = allows(self, i, j)
            largest = max(largest, table.numel())
            return table

        monkeypatch.setattr(word, "allows", seen)
    q, k, v = (torch.randn(1, 1, n, 4, generator=torch.Generator().manual_seed(s)) for s in range(3))
    for pattern in (rg.neighborhood((height, width), 5), rg.causal() & rg.selected(chosen, 64)):
        o, few = rg.attention(q, k, v, pattern), torch.tensor([0, 5, 4095, 16_383, n - 1])
        assert 0 < largest < n * n / 100
        table = torch.stack([pattern.allowed(1, n, at=int(i)).reshape(n) for i in few])
        expected = rg.attention(q[:, :, few], k, v, table, backend="reference")
        torch.testing.assert_close(o[:, :, few], expected, rtol=1e-4, atol=1e-5)

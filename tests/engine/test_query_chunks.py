"""Calls that hold a number for each pair run a chunk of queries at a time, with the same results and gradients."""

from functools import partial
from math import inf

import pytest
import torch

import regard as rg
from regard.engine import query_chunks

F64 = {"dtype": torch.float64}
PATTERN = rg.causal() & (rg.window(3) | rg.every(5))


def leaf(*shape, seed):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), **F64)
    return x.requires_grad_()


def leaves(n=20, m=24):
    return [leaf(2, 4, n, 8, seed=1), leaf(2, 2, m, 8, seed=2), leaf(2, 2, m, 6, seed=3)]


def in_chunks(monkeypatch):
    """From now on a chunk has 3 queries; returns the sizes of all chunks, in order."""
    sizes = []
    plain = query_chunks._chunk

    def counted(call, rows):
        chunk = plain(call, rows)
        sizes.append(chunk.n)
        return chunk

    monkeypatch.setattr(query_chunks, "PAIRS", 1)
    monkeypatch.setattr(query_chunks, "SCORES", 1)
    monkeypatch.setattr(query_chunks, "MIN_QUERIES", 3)
    monkeypatch.setattr(query_chunks, "_chunk", counted)
    return sizes


def weighted(tensors, low):
    """A sum of all numbers with different weights; −∞ counts as 0."""
    finite = [x.masked_fill(x == -inf, 0.0) for x in tensors]
    return sum((x * torch.linspace(low, 1, x.numel(), **F64).view_as(x)).sum() for x in finite)


def derivatives(attend, inputs, order):
    """The results and their derivatives up to this order."""
    found = attend()
    results = list(found if isinstance(found, tuple) else (found,))
    values = results
    for nth in range(order):
        options = {"create_graph": nth + 1 < order, "materialize_grads": True}
        values = torch.autograd.grad(weighted([x.sin() for x in values], -nth), inputs, **options)
        results += values
    return [x.detach() for x in results]


LENGTHS = torch.tensor([[1, 20], [0, 24]])
SINK = leaf(4, seed=4)
TABLE, SLOPES = leaf(4, 9, seed=5), leaf(4, seed=6)
CALLS = {
    "pattern": {"at": 3},
    "steps": {"at": (1, 2)},
    "more queries than keys": {"at": 0, "sizes": (40, 24)},
    "an offset per row": {"at": torch.tensor([2, 4])},
    "lengths": {"lengths": LENGTHS, "at": 4},
    "table": {"pattern": torch.rand(2, 1, 20, 24, generator=torch.Generator().manual_seed(7)) > 0.3},
    "table of keys": {"pattern": torch.rand(2, 1, 1, 24, generator=torch.Generator().manual_seed(7)) > 0.3},
    "bias": {"bias": leaf(4, 20, 24, seed=8).detach(), "at": 4},
    "bias of keys": {"bias": leaf(24, seed=8).detach(), "at": 4},
    "bias by distance": {"bias": rg.ByDistance(TABLE, SLOPES), "at": 4},
}
OF_THE_FORMULA = {
    "softcap": {"softcap": 2.0},
    "lse": {"return_lse": True},
    "sink": {"sink_logits": SINK, "return_lse": True},
    "hard": {"scale": inf},
    "every pair": {"pattern": rg.full()},
}


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
@pytest.mark.parametrize("name", CALLS)
def test_chunks_change_no_result_and_no_derivative(name, backend, monkeypatch):
    options = {"pattern": PATTERN, **CALLS[name]}
    inputs = leaves(*options.pop("sizes", (20, 24)))
    learned = [TABLE, SLOPES] if name == "bias by distance" else []
    _compare(monkeypatch, inputs, learned, 3, backend=backend, **options)


@pytest.mark.parametrize("name", OF_THE_FORMULA)
def test_chunks_of_the_formula_change_nothing(name, monkeypatch):
    options = {"pattern": PATTERN, **OF_THE_FORMULA[name]}
    _compare(monkeypatch, leaves(), [SINK] if name == "sink" else [], 3, backend="reference", **options)


def _compare(monkeypatch, inputs, learned, order, **options):
    def attend():
        return rg.attention(*inputs, **options)

    want = [derivatives(attend, [*inputs, *learned], nth) for nth in (0, 1, order)]
    sizes = in_chunks(monkeypatch)
    for wanted, nth in zip(want, (0, 1, order)):
        got = derivatives(attend, [*inputs, *learned], nth)
        assert len(got) == len(wanted)
        for x, y in zip(got, wanted):
            torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)
    assert 3 in sizes


@pytest.mark.parametrize("backend", ["tiles", "sdpa"])
def test_gradients_of_fused_kernels_are_differentiated_in_chunks(backend, monkeypatch):
    """Their own backward pass cannot be differentiated: the gradients come from the formula, in chunks."""
    inputs = leaves(24, 24)
    pattern = rg.causal() if backend == "sdpa" else PATTERN

    def attend():
        return rg.attention(*inputs, pattern, backend=backend)

    want = derivatives(attend, inputs, 2)
    sizes = in_chunks(monkeypatch)
    for x, y in zip(derivatives(attend, inputs, 2), want):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)
    assert sizes == [3] * 8 * 2  # the gradients, and those of them


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16])
def test_offsets_of_few_bits_count_the_rows_of_later_chunks(dtype, monkeypatch):
    """4 + 297 does not fit into 8 bits, and 32,700 + 297 not into 16."""
    offsets = torch.tensor([2, 4]) + (32_700 if dtype == torch.int16 else 0)
    q, k, v = leaves(n=300, m=310)
    pattern = rg.causal() & rg.strided(7) - rg.window(5)
    whole = rg.attention(q, k, v, pattern, at=offsets, backend="reference")
    sizes = in_chunks(monkeypatch)
    torch.testing.assert_close(
        rg.attention(q, k, v, pattern, at=offsets.to(dtype), backend="reference"), whole
    )
    assert sizes == [3] * 100


def test_a_chunk_has_a_share_of_the_pairs(monkeypatch):
    def queries(holds_scores=False, pattern=PATTERN, **options):
        options = {"at": 4} | options
        call = rg.engine.attention.call_of(*(x.detach() for x in leaves()), pattern, **options)
        return query_chunks.queries_at_a_time(call, holds_scores)

    monkeypatch.setattr(query_chunks, "PAIRS", 24 * 18)
    monkeypatch.setattr(query_chunks, "SCORES", 24 * 8 * 7)
    monkeypatch.setattr(query_chunks, "MIN_QUERIES", 2)
    assert queries() == 18
    assert queries(lengths=LENGTHS) == queries(at=torch.tensor([2, 4])) == 9  # a mask for each batch row
    assert queries(pattern=rg.documents(torch.arange(48).view(2, 24) // 6)) == 9
    assert queries(pattern=rg.documents(torch.arange(24) // 6)) == 18  # of all
    assert queries(bias=rg.ByDistance(TABLE.detach(), None)) == 4  # a bias for each head
    assert queries(pattern=rg.full(), bias=rg.ByDistance(TABLE.detach(), None)) == 4
    of_keys = torch.zeros(1, 24)
    assert queries(bias=of_keys) == queries(bias=of_keys[0]) == 18  # added to a mask of pairs
    assert queries(bias=of_keys.expand(4, 1, 24)) == 4  # for each head
    assert queries(bias=of_keys.expand(4, 1, 24), lengths=LENGTHS) == 2  # for each head of each batch row
    assert queries(holds_scores=True) == 7
    assert queries(pattern=rg.full(), lengths=LENGTHS) == 20  # a mask of keys
    assert queries(pattern=torch.ones(20, 24).tril(2).bool()) == 20  # which was given
    monkeypatch.setattr(query_chunks, "PAIRS", 1)
    assert queries() == 2


def test_long_calls_are_cut_to_67_million_pairs_or_16_queries():
    def queries(n, holds_scores):
        call = rg.engine.attention.call_of(
            *(torch.empty(1, 4, n, 8, device="meta") for _ in range(3)), PATTERN
        )
        return query_chunks.queries_at_a_time(call, holds_scores)

    assert queries(1 << 13, False) >= 1 << 13
    assert (queries(1 << 16, False), queries(1 << 16, True)) == (1024, 256)
    assert (queries(1 << 24, False), queries(1 << 24, True)) == (16, 16)


@pytest.mark.parametrize("backend", ["reference", "sdpa", "tiles", "auto"])
@pytest.mark.parametrize("name", ["float64", "lengths", "hard", "at"])
def test_no_batch_rows_and_no_heads_give_empty_results(backend, name):
    for b, h in ((0, 2), (2, 0), (0, 0)):
        inputs = [torch.zeros(b, h, n, 4, **F64, requires_grad=True) for n in (3, 5, 5)]
        rows = {name: torch.zeros(b, dtype=torch.long)} if name in ("lengths", "at") else {}
        if backend in ("sdpa", "tiles") and name == "hard":
            continue  # they refuse this
        o = rg.attention(*inputs, PATTERN, backend=backend, scale=inf if name == "hard" else None, **rows)
        assert o.shape == (b, h, 3, 4)
        for create_graph in (False, True):
            options = {"create_graph": create_graph, "retain_graph": True, "allow_unused": True}
            grads = torch.autograd.grad(o.sin().sum(), inputs, **options)
            assert all(dx is None or dx.shape == x.shape for dx, x in zip(grads, inputs))


def test_what_cannot_be_computed_twice_is_not_cut(monkeypatch):
    sizes = in_chunks(monkeypatch)
    q, k, v = leaves()
    ids = torch.arange(24) // 6
    rg.attention(q, k, v, PATTERN, at=4, dropout_p=0.5, backend="sdpa")  # drawn at random
    # The ids may change before the backward pass.
    for learned in (q, k, v):
        tensors = [x if x is learned else x.detach() for x in (q, k, v)]
        rg.attention(*tensors, rg.documents(ids), at=4, backend="sdpa")
    fixed = [x.detach() for x in (q, k, v)]
    # The gradient of this bias has n × m numbers.
    rg.attention(q, k, v, PATTERN, at=4, bias=leaf(4, 20, 24, seed=9), backend="sdpa")
    assert not sizes
    # The rules of torch.func are those of PyTorch's operations.
    gradient = torch.func.grad(lambda q: rg.attention(q, *fixed[1:], PATTERN, at=4).sin().sum())(fixed[0])
    assert not sizes
    with torch.no_grad():
        rg.attention(q, k, v, rg.documents(ids), at=4, backend="sdpa")
    assert sizes
    o = rg.attention(q, *fixed[1:], PATTERN, at=4, backend="reference")
    torch.testing.assert_close(gradient, torch.autograd.grad(o.sin().sum(), q)[0])


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # of torch._decomp
def test_a_forward_mode_derivative_is_not_cut(monkeypatch):
    sizes = in_chunks(monkeypatch)
    q, k, v = (x.detach() for x in leaves())
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, q.cos())
        o = rg.attention(dual, k, v, PATTERN)
        found = torch.autograd.forward_ad.unpack_dual(o).tangent
    assert not sizes
    step = 1e-6
    ahead, behind = (rg.attention(q + x * q.cos(), k, v, PATTERN) for x in (step, -step))
    torch.testing.assert_close(found, (ahead - behind) / (2 * step), rtol=1e-7, atol=1e-8)


def test_a_backward_pass_within_autocast_is_as_exact_as_outside(monkeypatch):
    in_chunks(monkeypatch)
    inputs = [x.detach().float().requires_grad_() for x in leaves()]
    o = rg.attention(*inputs, PATTERN, backend="reference")
    want = torch.autograd.grad(o, inputs, o.detach().cos(), retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        got = torch.autograd.grad(o, inputs, o.detach().cos())
    assert all(map(torch.equal, got, want))


def test_values_have_a_gradient_of_zero_through_the_log_sum_exp(monkeypatch):
    in_chunks(monkeypatch)
    q, k, v = leaves()
    _, lse = rg.attention(q, k, v, PATTERN, at=4, return_lse=True, backend="reference")
    assert torch.equal(torch.autograd.grad(lse.sum(), v)[0], torch.zeros_like(v))


def test_changes_between_forward_and_backward(monkeypatch):
    """Lengths and offsets may be overwritten; a table of pairs, which would have to be copied, may not."""
    in_chunks(monkeypatch)
    q, k, v = leaves()
    lengths, at = torch.tensor([20, 24]), torch.tensor([2, 4])
    options = {"pattern": PATTERN, "backend": "reference"}
    want = torch.autograd.grad(
        rg.attention(q, k, v, lengths=lengths, at=at, **options).sin().sum(), [q, k, v]
    )
    o = rg.attention(q, k, v, lengths=lengths, at=at, **options)
    lengths -= 3
    at += 1
    for x, y in zip(torch.autograd.grad(o.sin().sum(), [q, k, v]), want):
        torch.testing.assert_close(x, y)
    table = torch.ones(20, 24).tril(4).bool()
    o = rg.attention(q, k, v, table, backend="reference")
    table[:] = True
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_sums_over_chunks_are_not_rounded_to_16_bits(monkeypatch):
    """The gradient of v is a sum over all chunks, here of positive numbers. In bfloat16, the sum of 64 is off by
    several per cent; in float32 by at most 2⁻⁸, the rounding of each, and 2⁻⁸, that of the sum."""
    q, k, v = (torch.randn(1, 1, 192, 16, generator=torch.Generator().manual_seed(x)) for x in range(3))
    q, k, v = (x.bfloat16().requires_grad_() for x in (q, k, v))
    upstream = torch.rand(1, 1, 192, 16, generator=torch.Generator().manual_seed(4)).bfloat16()
    exact = v.detach().double().requires_grad_()
    o = rg.attention(q.double(), k.double(), exact, backend="reference")
    (want,) = torch.autograd.grad(o, exact, upstream.double())
    sizes = in_chunks(monkeypatch)
    (got,) = torch.autograd.grad(rg.attention(q, k, v, backend="reference"), v, upstream)
    assert got.dtype == torch.bfloat16 and len(sizes) == 128
    torch.testing.assert_close(got.double(), want, rtol=2**-7, atol=0.0)


@pytest.mark.parametrize("backend", ["tiles", "sdpa", "reference", "auto"])
@pytest.mark.parametrize("chunks", [False, True])
def test_derivatives_of_tensors_that_depend_on_one_another(backend, chunks, monkeypatch):
    """Queries, keys and values may be one tensor, or computed from one another. The gradients under create_graph=True
    are partial derivatives: until 0.2 those of attention(x, x, x) were three times as large."""
    if chunks:
        in_chunks(monkeypatch)
    x = leaf(1, 2, 24, 8, seed=1)
    allowed = PATTERN.allowed(24)

    def expected(q, k, v):
        scores = (q @ k.mT / 8**0.5).masked_fill(~allowed, -inf)
        return scores.softmax(-1) @ v

    def of_attention(q, k, v):
        return rg.attention(q, k, v, PATTERN, backend=backend)

    def of_one(f):
        return f(x, x, x)

    def of_several(f):
        return f(x, 2 * x, x.sin())

    def of_upstream(f):
        q = 2 * x
        return torch.autograd.grad(f(q, x.cos(), x.sin()), q, x, create_graph=True)[0]

    for composed in (of_one, of_several, of_upstream):
        got, want = (derivatives(partial(composed, f), [x], 3) for f in (of_attention, expected))
        for a, b in zip(got, want):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (0, 2)], ids=str)
@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_double_backward_computes_the_gradients_of_inputs_that_need_one(needed, backend, monkeypatch):
    q, k, v = leaves()
    wanted = [x for i, x in enumerate((q, k, v)) if i in needed]
    expected = derivatives(lambda: rg.attention(q, k, v, PATTERN, backend=backend), wanted, 2)
    in_chunks(monkeypatch)
    asked, plain = set(), query_chunks.differentiate

    def noted(outputs, inputs, *more, **options):
        asked.add(frozenset(i for i, x in enumerate(inputs[-query_chunks.LEARNED :]) if x is not None))
        return plain(outputs, inputs, *more, **options)

    monkeypatch.setattr(query_chunks, "differentiate", noted)
    for i, x in enumerate((q, k, v)):
        x.requires_grad_(i in needed)
    found = derivatives(lambda: rg.attention(q, k, v, PATTERN, backend=backend), wanted, 2)
    assert asked == {frozenset(needed)}
    for x, y in zip(found, expected):
        torch.testing.assert_close(x, y)

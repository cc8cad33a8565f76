"""Gradients of gradients: every way of running a call gives them, and they are right."""

from math import inf, nan

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from regard.engine import query_chunks, reference_backend
from regard.engine.attention import attention
from regard.pattern import causal, documents, every, where, window
from regard.position import ByDistance

f64 = torch.float64
IDS = torch.tensor([0, 0, 1, 1, 1])
TABLE = torch.randn(2, 5, generator=torch.Generator().manual_seed(5), dtype=f64)
SHORT = {"lengths": torch.tensor([3])}
WAYS = [  # backend, pattern, more
    ("sdpa", None, {}),
    ("sdpa", causal(), {}),
    ("sdpa", window(1), {}),
    ("sdpa", where(lambda i, j: (i + j) % 2 == 0) & documents(IDS), {}),
    ("sdpa", causal(), {"lengths": torch.tensor([0])}),
    ("tiles", causal() & (window(1) | every(3)), {}),
    ("tiles", window(1), SHORT),
    ("tiles", documents(IDS) & causal(), {}),
    ("tiles", documents(IDS), SHORT),
    ("reference", window(1), SHORT),
    ("tiles", causal(), {"bias": ByDistance(table=TABLE)}),
]


def qkv(h_kv=1):
    g = torch.Generator().manual_seed(1)
    shapes = (1, 2, 5, 3), (1, h_kv, 5, 3), (1, h_kv, 5, 3)
    return [torch.randn(s, generator=g, dtype=f64, requires_grad=True) for s in shapes]


@pytest.mark.parametrize(("backend", "pattern", "more"), WAYS, ids=[f"{b} {p!r}" for b, p, _ in WAYS])
@pytest.mark.parametrize("lse", [False, True])
def test_every_backend_can_be_differentiated_twice(backend, pattern, more, lse):
    if lse and backend == "sdpa":
        pytest.skip("it gives no log-sum-exp")

    def f(q, k, v):
        out = attention(q, k, v, pattern, backend=backend, return_lse=lse, **more)
        return out[0].square().sum() + out[1][out[1] > -inf].sum() if lse else out

    assert gradcheck(f, qkv(), fast_mode=True) and gradgradcheck(f, qkv(), fast_mode=True)


@pytest.mark.parametrize("of_o", [False, True])
def test_gradients_under_create_graph_where_the_log_sum_exp_depends_on_nothing_that_learns(of_o):
    q, k, v = (x.requires_grad_(nth == 2) for nth, x in enumerate(qkv()))
    o, lse = attention(q, k, v, window(1), backend="tiles", return_lse=True)
    total = o.sum() + lse.sum() if of_o else lse.sum()
    plain, graphed = (
        torch.autograd.grad(total, v, create_graph=x, retain_graph=True)[0] for x in (False, True)
    )
    torch.testing.assert_close(graphed, plain)
    assert bool(plain.any()) == of_o


@pytest.mark.parametrize("pattern", [None, causal(), window(1)], ids=repr)
def test_what_auto_recalls_can_be_differentiated_twice(pattern):
    for _ in range(2):  # the second call is the one recalled
        assert gradgradcheck(lambda *x: attention(*x, pattern), qkv(h_kv=2), fast_mode=True)


def test_a_learned_bias_can_be_differentiated_twice():
    def f(q, table, slopes):
        return attention(q, q, q, causal(), bias=ByDistance(table, slopes), backend="tiles")

    slopes = torch.tensor([0.5, 0.25], dtype=f64, requires_grad=True)
    assert gradgradcheck(f, (qkv()[0], TABLE.clone().requires_grad_(), slopes), fast_mode=True)


DROPPED = [  # n, m, pattern, more
    (5, 5, causal(), {}),
    (5, 7, window(1) | every(3), {"lengths": torch.tensor([6])}),
    (5, 5, causal(), {"bias": "learned"}),
    (200, 240, causal() & (window(8) | every(5)), {"softcap": 3.0}),  # a comb and a band, which overlap
    (701, 701, causal(), {}),  # tiles that are cut by rows
]


@pytest.mark.parametrize(("n", "m", "pattern", "more"), DROPPED, ids=[f"{n} {p!r}" for n, _, p, _ in DROPPED])
def test_dropout_in_tiles_drops_the_same_weights_in_a_gradient_of_the_gradient(n, m, pattern, more):
    g = torch.Generator().manual_seed(3)
    shapes = (1, 4, n, 3), (1, 2, m, 3), (1, 2, m, 3)
    table = torch.randn(4, 5, generator=g, dtype=f64, requires_grad=True)
    more = {**more, "bias": ByDistance(table=table)} if "bias" in more else more
    q, k, v = (torch.randn(s, generator=g, dtype=f64, requires_grad=True) for s in shapes)
    learned = [q, k, v, *([table] if "bias" in more else [])]

    def f(q, k, v, *_):
        torch.manual_seed(7)
        return attention(q, k, v, pattern, backend="tiles", dropout_p=0.25, **more)

    o = f(*learned)
    towards = torch.randn(o.shape, generator=g, dtype=f64)
    once = torch.autograd.grad(o, learned, towards, retain_graph=True)
    twice = torch.autograd.grad(o, learned, towards, create_graph=True)
    for a, b in zip(once, twice):
        torch.testing.assert_close(a, b)
        assert b.requires_grad and bool(a.any())
    if n == 5:
        assert gradgradcheck(f, learned, fast_mode=True)


def test_dropped_weights_are_those_of_their_queries_where_the_formula_takes_a_few_at_a_time(monkeypatch):
    g = torch.Generator().manual_seed(6)
    q, k, v = (torch.randn(1, 2, 37, 5, generator=g, dtype=f64, requires_grad=True) for _ in range(3))
    o = attention(q, k, v, window(7), backend="tiles", dropout_p=0.25)
    towards = torch.randn(o.shape, generator=g, dtype=f64)
    once = torch.autograd.grad(o, (q, k, v), towards, retain_graph=True)
    monkeypatch.setattr(reference_backend, "CHUNK", 11 * 37)
    for name, few in {"PAIRS": 1, "SCORES": 1, "MIN_QUERIES": 5}.items():
        monkeypatch.setattr(query_chunks, name, few)  # chunks know no dropped weights
    for a, b in zip(once, torch.autograd.grad(o, (q, k, v), towards, create_graph=True)):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
@pytest.mark.parametrize("backend", ["sdpa", "tiles"])
def test_hidden_keys_that_are_no_numbers_reach_no_gradient_of_a_gradient(backend, dropout_p):
    g = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(2, 2, 13, 5, generator=g, dtype=f64) for _ in range(3))
    lengths = torch.tensor([11, 13])
    for x in (k, v):
        x[0, :, 11:] = nan
    learned = [x.requires_grad_() for x in (q, k, v)]
    o = attention(*learned, window(3), lengths=lengths, backend=backend, dropout_p=dropout_p)
    first = torch.autograd.grad(o, learned, torch.randn(o.shape, generator=g, dtype=f64), create_graph=True)
    second = torch.autograd.grad(sum(x.square().sum() for x in first), learned)
    for x in (*first, *second):
        assert bool(x.isfinite().all() and x.any())


@pytest.mark.parametrize("n", [37, 65, 320])
@pytest.mark.parametrize(
    ("backend", "pattern"),
    [("auto", causal()), ("tiles", causal()), ("tiles", window(1) | every(7))],
    ids=repr,
)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_many_gradients_at_once_are_those_of_one_after_another(backend, pattern, n):
    g = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(2, h, n, 32, generator=g, dtype=f64, requires_grad=True) for h in (8, 4, 4))
    o = attention(q, k, v, pattern, backend=backend)
    towards = torch.randn(3, *o.shape, generator=g, dtype=f64)
    for learned in ((q, k, v), (k,)):
        together = torch.autograd.grad(o, learned, towards, is_grads_batched=True, retain_graph=True)
        for i in range(3):
            alone = torch.autograd.grad(o, learned, towards[i], retain_graph=True)
            for a, b in zip(together, alone):
                torch.testing.assert_close(a[i], b)
        assert not any(x.requires_grad for x in together)


@pytest.mark.parametrize("of_o", [False, True])
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_many_gradients_of_the_log_sum_exp_at_once_are_those_of_one_after_another(of_o):
    g = torch.Generator().manual_seed(8)
    q, k, v = (torch.randn(1, 2, 37, 5, generator=g, dtype=f64, requires_grad=True) for _ in range(3))
    outs = attention(q, k, v, window(7), backend="tiles", return_lse=True)[0 if of_o else 1 :]
    towards = [torch.randn(3, *x.shape, generator=g, dtype=f64) for x in outs]
    together = torch.autograd.grad(outs, (q, k), towards, is_grads_batched=True, retain_graph=True)
    for i in range(3):
        alone = torch.autograd.grad(outs, (q, k), [x[i] for x in towards], retain_graph=True)
        for a, b in zip(together, alone):
            torch.testing.assert_close(a[i], b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_gradients_are_those_of_pytorch_bit_for_bit(dtype):
    g = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, 4, 37, 16, generator=g).to(dtype).requires_grad_() for _ in range(3))
    towards = torch.randn(2, 4, 37, 16, generator=g).to(dtype)
    for mine, is_causal in ((None, False), (causal(), True)):
        theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        o = attention(q, k, v, mine)
        assert torch.equal(o, theirs)
        for a, b in zip(
            torch.autograd.grad(o, (q, k, v), towards), torch.autograd.grad(theirs, (q, k, v), towards)
        ):
            assert torch.equal(a, b)

"""The optional backend `flash4`: what it refuses, when it is chosen, and how a call is handed to its kernels.

Its kernels need a GPU. Here their function is replaced by the formula with the same arguments and the same alignment:
the last query has the last key, and a window counts from there.
"""

import random
import sys
import weakref
from functools import partial
from itertools import pairwise
from math import inf

import pytest
import torch

import regard as rg
from long_cases import in_long
from regard import compat
from regard.engine import flash4
from regard.engine.backends import TABLE, choose
from regard.engine.call import Call, CallFacts
from regard.engine.cuda import documents
from regard.errors import BackendError

BF16 = {"device": "cuda", "dtype": torch.bfloat16, "d_k": 128, "d_v": 128, "heads": 16, "kv_heads": 16}
LOCAL = rg.causal() & rg.window(256)


@pytest.fixture
def installed(monkeypatch):
    """As if flash-attn-4 were installed beside a Hopper GPU; only the choice can be seen, nothing runs."""
    monkeypatch.setattr(flash4, "version", lambda: "4.0.0b36")
    monkeypatch.setattr(flash4, "capability", lambda device: 9)


def facts(pattern, n=16384, m=None, **more):
    return CallFacts(pattern, n, n if m is None else m, **BF16 | more)


def refusal(pattern=LOCAL, *sizes, **more):
    return TABLE["flash4"].refuses(facts(pattern, *sizes, **more))


REFUSED = [
    ({"device": "cpu"}, "it runs on CUDA, not on cpu"),
    ({"dtype": torch.float32}, "its kernels take float16 or bfloat16, not float32"),
    ({"d_k": 100, "d_v": 100}, "heads 100 wide; a multiple of 8 up to 256 is needed"),
    ({"d_k": 320, "d_v": 320}, "heads 320 wide; a multiple of 8 up to 256 is needed"),
    (
        {"d_k": 80, "d_v": 80, "grad": True},
        "its gradients were compared for heads 32, 64, 96, 128, 192, 256 wide only, here 80",
    ),
    ({"d_v": 64}, "queries 128 and values 64 wide: its kernels for two widths are for other shapes"),
    ({"scale": inf}, "scale=inf has no softmax"),
    ({"bias": "distance"}, "a bias is added to the scores"),
    ({"softcap": 30.0}, "its softcap is computed with an approximate tanh (11 bits)"),
    ({"table": True}, "a bool tensor is not a pattern; declare one"),
    ({"lengths": True}, "keys that are hidden per batch row (lengths) are not supported here"),
    (
        {"lengths": True, "left_padding": True},
        "keys that are hidden per batch row (lengths) are not supported here",
    ),
    ({"row_offsets": True}, "per-row query offsets (`at` as a tensor) are not supported"),
    ({"dropout_p": 0.1}, "it has no dropout"),
    ({"at": (0, 2)}, "queries 2 positions apart are not supported"),
    ({"observed": True}, "a compiler or transform must see PyTorch's operations, which its kernels are not"),
    ({"batch": 0}, "there are no pairs"),
]


@pytest.mark.parametrize("more, message", REFUSED, ids=[m[:40] for _, m in REFUSED])
def test_what_it_cannot_do_exactly_it_refuses(installed, more, message):
    assert refusal(**more) == message
    assert refusal() is None


def test_it_takes_bands_of_which_no_query_is_empty(installed):
    for band in (rg.full(), rg.causal(), rg.window(7), rg.window(3, 9), LOCAL, rg.causal() & rg.full()):
        assert refusal(band) is None and refusal(band, 100, 300) is None and refusal(band, at=0) is None
    assert refusal(rg.causal() | rg.prefix(8)) is None
    for other in (LOCAL | rg.sinks(4), rg.every(4), rg.blocks(64)):
        assert (
            refusal(other)
            == f"{other!r} is neither a band of i − j (every pair, causal, a window) nor a few of them"
        )
    assert (
        refusal(rg.causal(), 8, 4, at=-2)
        == refusal(rg.window(1), 8, 4, at=0)
        == ("some queries have no allowed key")
    )
    assert refusal(rg.full(), 8, 4) is None  # more queries than keys


def test_heads_whose_gradients_were_not_compared_run_forward_only(installed):
    for d in range(8, 257, 8):
        compared = d in (32, 64, 96, 128, 192, 256)
        assert refusal(d_k=d, d_v=d) is None and (refusal(d_k=d, d_v=d, grad=True) is None) == compared
    assert choose(facts(rg.causal(), 16387, d_k=80, d_v=80), "auto").backend == "flash4"
    assert choose(facts(rg.causal(), 16387, d_k=80, d_v=80, grad=True), "auto").backend != "flash4"


def test_gpus_without_a_backward_pass_in_a_fixed_order_are_refused(installed, monkeypatch):
    monkeypatch.setattr(flash4, "capability", lambda device: 12)
    assert refusal() == "its backward pass has a fixed order on GPUs of capability 9 and 10 only, here 12"


def test_by_name_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(flash4, "version", lambda: None)
    with pytest.raises(BackendError) as error:
        choose(facts(rg.causal(), 77), "flash4")
    assert str(error.value) == (
        "backend='flash4' cannot run this: the package flash-attn-4 is not installed; "
        "pip install 'regard[flash]' brings it; use backend='sdpa'"
    )
    assert "flash" not in choose(facts(rg.causal(), 78)).reason  # it was not requested


def test_auto_takes_it_where_it_is_faster(installed):
    def on_gpu(*given, **more):
        return choose(facts(*given, **more), "auto")

    dense = on_gpu(rg.causal(), 16385, grad=True)
    assert dense.backend == "flash4"
    assert dense.variant == "flash-attn-4 4.0.0b36, causal"
    for unmeasured in ({"d_k": 112, "d_v": 112}, {"m": 16390}, {"at": 5}):  # by name only
        assert on_gpu(rg.causal(), 16385, **unmeasured).backend != "flash4"
    for grad, d in ((False, 64), (True, 64), (False, 128), (True, 128)):  # as measured
        more = {"grad": grad, "d_k": d, "d_v": d}
        assert {on_gpu(x, 32769, **more).backend for x in (LOCAL, rg.window(256))} == {"triton"}
        assert {on_gpu(x, 16385, **more).backend for x in (rg.causal(), rg.causal() | rg.prefix(2048))} == {
            "flash4"
        }
    assert on_gpu(LOCAL | rg.sinks(4), 16385).backend == "triton"
    assert on_gpu(rg.causal(), 131).backend == "sdpa"  # the CPU takes longer than the GPU
    assert on_gpu(rg.causal(), 16385, dtype=torch.float32).backend == "triton"


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(documents, "_is_hopper", lambda device: True)


def packed(*lengths):
    return rg.documents(torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)))


def test_auto_takes_it_for_few_long_documents(installed, hopper):
    def on_gpu(*lengths, **more):
        return choose(facts(packed(*lengths) & rg.causal(), sum(lengths), **more), "auto").backend

    long, short = (4096,) * 4, (512,) * 32
    for d in (64, 128):  # as measured (bench/gpu_peers.py, auto_choice.py --documents)
        assert on_gpu(*short, d_k=d, d_v=d) == on_gpu(*short, d_k=d, d_v=d, grad=True) == "triton"
        assert on_gpu(*long, d_k=d, d_v=d, grad=True) == "flash4"
    assert on_gpu(1024, 1024) == "triton"  # the CPU takes longer than the GPU
    # Batch rows have to be brought one behind the other.
    assert on_gpu(4096, 4096, grad=True) == "flash4" and on_gpu(4096, 4096, grad=True, batch=4) == "triton"


def test_the_estimate_of_two_calls_counts_both_and_what_joins_them(installed):
    def estimate(*given):
        return TABLE["flash4"].estimate(facts(*given))

    short, short_of_two = estimate(rg.causal(), 256), estimate(rg.causal() | rg.prefix(64), 256)
    assert short == flash4.CALL and short_of_two == 2 * flash4.CALL  # the CPU takes longer than the GPU
    joined = estimate(rg.causal() | rg.prefix(128)) / estimate(rg.causal())  # as many pairs
    assert flash4.PARTS - 0.01 < joined < flash4.PARTS + 0.01


def test_looking_for_it_imports_nothing(installed):
    choose(facts(rg.causal(), 16386))
    assert "flash_attn" not in sys.modules


# The kernels' function, by the formula.


class Kernel(torch.autograd.Function):
    @classmethod
    def forward(cls, ctx, q, k, v, documents, left, right, scale, sink):
        ctx.save_for_backward(q, k, v, *([] if sink is None else [sink]))
        ctx.options, ctx.of = (documents, left, right, scale), cls
        ctx.set_materialize_grads(False)
        return cls.formula(q, k, v, sink, documents, left, right, scale)

    @staticmethod
    def formula(q, k, v, sink, documents, left, right, scale):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        n, m = q.shape[2], k.shape[2]
        behind = torch.arange(m - n, m)[:, None] - torch.arange(m)
        allowed = torch.ones(n, m, dtype=torch.bool)
        allowed &= True if left is None else behind <= left
        allowed &= True if right is None else -behind <= right
        k, v = (rg.reference.repeat_heads(x, q.shape[1]) for x in (k, v))
        found = rg.reference.attend(q, k, v, allowed, scale=scale, sink_logits=sink)
        return found.o.transpose(1, 2).contiguous(), found.lse

    @staticmethod
    def backward(ctx, *grads):
        with torch.enable_grad():  # without a graph of its own, as that of the kernels
            inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            outputs = ctx.of.formula(*inputs, *([] if len(inputs) == 4 else [None]), *ctx.options)
        given = [(y, dy) for y, dy in zip(outputs, grads) if dy is not None]
        given_grads = [dy.detach() for _, dy in given]
        found = torch.autograd.grad([y for y, _ in given], inputs, given_grads, materialize_grads=True)
        found = [x.detach() for x in found]
        return *found[:3], None, None, None, None, found[3] if len(inputs) == 4 else None


class KernelOfDocuments(Kernel):
    """Sequences one behind the other, without an axis for the batch; the log-sum-exp has the heads first."""

    @staticmethod
    def formula(q, k, v, sink, documents, left, right, scale):
        assert set(documents) == {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"}
        ends = documents["cu_seqlens_q"].tolist()
        assert documents["cu_seqlens_q"].dtype == torch.int32 and documents["cu_seqlens_k"].tolist() == ends
        lengths = [b - a for a, b in pairwise(ends)]
        assert documents["max_seqlen_q"] == documents["max_seqlen_k"] == max(lengths) and min(lengths) > 0
        assert ends[-1] == len(q) == len(k)
        sequences = zip(*(x[None].split(lengths, 1) for x in (q, k, v)))
        found = [Kernel.formula(*x, sink, None, left, right, scale) for x in sequences]
        return torch.cat([o[0] for o, _ in found]), torch.cat([lse[0] for _, lse in found], 1)


def kernel(
    q, k, v, *, softmax_scale, window_size, deterministic, return_lse, learnable_sink=None, **documents
):
    assert deterministic == torch.are_deterministic_algorithms_enabled() and q.stride(-1) == 1
    function = KernelOfDocuments if documents else Kernel
    return function.apply(q, k, v, documents or None, *window_size, softmax_scale, learnable_sink)


def by_flash4(q, k, v, pattern, at=None, scale=None, sink=None):
    (batch, heads, n, d), (m, d_v) = q.shape, v.shape[2:]
    sizes = {"batch": batch, "heads": heads, "kv_heads": k.shape[1]}
    f = CallFacts(pattern, n, m, d, d_v, at=at, scale=scale, return_lse=True, **sizes)
    return flash4.attend(kernel, flash4.options_of(f), q, k, v, sink)


def case(seed):
    r = random.Random(seed)
    m = r.randint(1, 23)
    n = r.randint(1, m)
    pattern = r.choice([rg.full(), rg.causal(), rg.window(r.randint(0, 9), r.randint(0, 9))])
    pattern = pattern & rg.causal() if r.random() < 0.4 else pattern
    pattern = pattern | rg.prefix(r.randint(1, m)) if r.random() < 0.4 else pattern
    pattern = pattern & rg.sinks(r.randint(1, m)) if r.random() < 0.1 else pattern
    at = r.choice([None, 0, r.randint(0, m - n), r.randint(0, m - 1)])
    return pattern, n, m, at, r.choice([None, 0.3])


@pytest.mark.parametrize("part", [0, *in_long(1, 2, 3)])
def test_any_band_at_any_offset_is_handed_over_exactly(part):
    tried = 0
    for seed in range(100 * part, 100 * part + 100):
        pattern, n, m, at, scale = case(seed)
        g = torch.Generator().manual_seed(seed)
        q = torch.randn(2, 4, n, 3, dtype=torch.float64, generator=g, requires_grad=True)
        k, v = (
            torch.randn(2, 2, m, 3, dtype=torch.float64, generator=g, requires_grad=True) for _ in range(2)
        )
        offset = m - n if at is None else at
        if not (pattern.row_counts(n, m, at) > 0).all() or not flash4.parts_of(pattern, n, m, offset):
            continue
        tried += 1
        o, lse = by_flash4(q, k, v, pattern, at, scale)
        terms = {"at": at, "scale": scale, "return_lse": True, "backend": "reference"}
        exact = rg.attention(q, k, v, pattern, **terms)
        where = f"{pattern!r}, n={n}, m={m}, at={at}"
        torch.testing.assert_close((o, lse), exact, msg=lambda m, where=where: f"{where}: {m}")
        mine, theirs = (torch.autograd.grad([*y], (q, k, v), [*map(torch.cos, y)]) for y in ((o, lse), exact))
        torch.testing.assert_close(mine, theirs, msg=lambda m, where=where: f"{where}: {m}")
    assert tried > 60


def test_gradients_can_be_differentiated_again():
    g = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, 1, 4, 2, dtype=torch.float64, generator=g, requires_grad=True) for _ in range(3)
    )
    for pattern, at in ((rg.window(1), 0), (rg.causal() | rg.prefix(2), None)):
        attend = lambda *x, p=pattern, at=at: by_flash4(*x, p, at)  # noqa: E731
        assert torch.autograd.gradgradcheck(attend, (q, k, v))
        only_lse = lambda *x, p=pattern, at=at: by_flash4(*x, p, at)[1]  # noqa: E731
        assert torch.autograd.gradgradcheck(only_lse, (q, k, v))


def test_after_the_backward_pass_a_graph_that_is_kept_holds_no_inputs(monkeypatch):
    for node, freed in ((compat.current_node, True), (None, False)):  # a fallback without PyTorch's function
        monkeypatch.setattr(compat, "current_node", node)
        leaves = [torch.randn(1, 1, 4, 2, requires_grad=True) for _ in range(3)]
        inputs = [x.sin() for x in leaves]
        o, _ = by_flash4(*inputs, rg.causal())
        kept = [weakref.ref(x) for x in inputs]
        del inputs
        gradients = torch.autograd.grad(o.sum(), leaves, retain_graph=True, create_graph=True)
        assert all(x.requires_grad for x in gradients)
        del gradients
        torch.autograd.grad(o.sum(), leaves)
        assert [x() is None for x in kept] == [freed] * 3


@pytest.mark.parametrize("pattern, at", [(rg.window(1), 0), (rg.causal() | rg.prefix(2), None)])
def test_sinks_are_handed_to_its_kernels_and_differentiated_twice(installed, monkeypatch, pattern, at):
    g = torch.Generator().manual_seed(1)
    random = partial(torch.randn, dtype=torch.float32, generator=g, requires_grad=True)
    q, k, v, sink = random(2, 4, 5, 3), random(2, 2, 5, 3), random(2, 2, 5, 3), random(4)
    o, lse = by_flash4(q, k, v, pattern, at, sink=sink)
    options = {"at": at, "sink_logits": sink, "return_lse": True, "backend": "reference"}
    exact = rg.attention(q, k, v, pattern, **options)
    torch.testing.assert_close((o, lse), exact)
    inputs = q, k, v, sink
    for learned in (inputs, inputs[:3], inputs[3:]):
        mine, theirs = (
            torch.autograd.grad([*y], learned, [*map(torch.cos, y)], create_graph=True)
            for y in ((o, lse), exact)
        )
        torch.testing.assert_close(mine, theirs)
        again = [
            torch.autograd.grad([x.square().sum() for x in y], inputs, retain_graph=True)
            for y in (mine, theirs)
        ]
        torch.testing.assert_close(*again, rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(flash4, "_kernel", kernel)
    sizes = {"d_k": 3, "d_v": 3, "batch": 2, "heads": 4, "kv_heads": 2, "dtype": torch.float32}
    prepared = TABLE["flash4"].prepare(facts(pattern, 5, **sizes, sink_logits=True, at=at))
    assert prepared.joins_sink and (prepared.build is None) == (at is not None)
    called = Call(q, k, v, pattern, sink_logits=sink, at=at)
    torch.testing.assert_close(prepared(called)[0], rg.attention(q, k, v, pattern, at=at, sink_logits=sink))


@pytest.mark.parametrize(
    "pattern, n, m, start, parts",
    [
        (rg.causal(), 7, 7, 0, [(7, 0, 7, None, 0)]),
        (rg.causal(), 1, 7, 6, [(1, 0, 7, None, None)]),
        (rg.causal(), 3, 11, 2, [(3, 0, 5, None, 0)]),  # keys past position 4 are left out
        (rg.full(), 3, 11, 8, [(3, 0, 11, None, None)]),
        (rg.window(2, 1), 7, 7, 0, [(7, 0, 7, 2, 1)]),
        (rg.causal() & rg.window(2), 3, 11, 5, [(3, 3, 8, 2, 0)]),  # and those before position 3
        (rg.window(20), 7, 7, 0, [(7, 0, 7, None, None)]),
        (rg.causal() | rg.prefix(3), 9, 9, 0, [(3, 0, 3, None, None), (6, 0, 9, None, 0)]),
        (rg.causal() | rg.prefix(3), 4, 9, 5, [(4, 0, 9, None, 0)]),
        (rg.causal() & rg.sinks(3), 6, 6, 0, [(6, 0, 3, None, 3)]),
        (rg.causal() & rg.sinks(3) | rg.prefix(2), 6, 6, 0, [(2, 0, 2, None, None), (4, 0, 3, None, None)]),
        (LOCAL | rg.sinks(4), 2000, 2000, 0, []),  # two intervals
        (rg.blocks(4), 32, 32, 0, []),
        (~rg.causal(), 9, 9, 0, []),
    ],
)  # fmt: skip
def test_windows_count_from_the_last_key(pattern, n, m, start, parts):
    assert list(flash4.parts_of(pattern, n, m, start)) == parts


RANGES = {
    "overlapping": ((0, 7), (3, 11)),
    "nested": ((2, 9), (0, 11), (4, 5)),
    "equal": ((1, 5), (1, 5)),
    "apart": ((7, 11), (0, 3)),
    "some empty": ((4, 4), (2, 9), (0, 0)),
    "all empty": ((4, 4), (11, 11)),
    "one": ((2, 9),),
    "whole": ((0, 11),),
}


@pytest.mark.parametrize("name", RANGES)
def test_gradients_of_ranges_of_rows_are_those_of_slices(name):
    g = torch.Generator().manual_seed(11)
    x = torch.randn(2, 11, 3, 5, dtype=torch.float64, generator=g, requires_grad=True)
    parts = flash4._Ranges.apply(x, RANGES[name])
    slices = [x[:, first:end] for first, end in RANGES[name]]
    assert all(map(torch.equal, parts, slices)) and len(parts) == len(slices)

    def first_and_second(parts):
        total = sum(((1 + nth) * part.sin()).sum() for nth, part in enumerate(parts))
        (plain,) = torch.autograd.grad(total, x, retain_graph=True)
        (graphed,) = torch.autograd.grad(total, x, create_graph=True)
        (second,) = torch.autograd.grad(graphed.square().sum(), x)
        return plain, graphed, second

    for found, expected in zip(first_and_second(parts), first_and_second(slices)):
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)


# Packed documents: each is a sequence of its own.


def ids_of(r, batch, m):
    """Contiguous ids, of each batch row or of all; labels need not be in order."""
    rows = []
    for _ in range(batch if r.random() < 0.5 else 1):
        labels = r.sample(range(m), m)
        cuts = sorted(r.sample(range(1, m), r.randint(0, m - 1)))
        ends = torch.bucketize(torch.arange(m), torch.tensor(cuts), right=True)
        rows.append(torch.tensor(labels)[ends])
    return torch.stack(rows) if len(rows) > 1 or r.random() < 0.5 else rows[0]


@pytest.mark.parametrize("seed", range(12))
def test_documents_of_any_batch_row_are_handed_over_exactly(seed):
    r, g = random.Random(seed), torch.Generator().manual_seed(seed)
    batch, m = r.choice([1, 2, 3]), r.randint(2, 19)
    band = r.choice(
        [rg.full(), rg.causal(), rg.window(r.randint(0, 5), r.randint(0, 5)), rg.causal() & rg.window(3)]
    )
    pattern = rg.documents(ids_of(r, batch, m)) & band
    drawn = partial(torch.randn, dtype=torch.float64, generator=g, requires_grad=True)
    q, k, v = drawn(batch, 4, m, 3), drawn(batch, 2, m, 3), drawn(batch, 2, m, 3)
    sink = r.choice([None, torch.randn(4, generator=g, requires_grad=True)])
    inputs = [q, k, v] if sink is None else [q, k, v, sink]
    found = by_flash4(q, k, v, pattern, scale=0.7, sink=sink)
    terms = {"scale": 0.7, "sink_logits": sink, "return_lse": True, "backend": "reference"}
    exact = rg.attention(q, k, v, pattern, **terms)
    torch.testing.assert_close(found, exact)
    mine, theirs = (
        torch.autograd.grad([*y], inputs, [*map(torch.cos, y)], create_graph=True) for y in (found, exact)
    )
    torch.testing.assert_close(mine, theirs)
    again = [torch.autograd.grad([x.square().sum() for x in y], inputs) for y in (mine, theirs)]
    torch.testing.assert_close(*again, rtol=1e-5, atol=1e-6)


def test_without_a_log_sum_exp_documents_give_none():
    pattern = rg.documents(torch.tensor([0, 0, 1])) & rg.causal()
    x = torch.randn(2, 1, 3, 4)
    f = CallFacts(pattern, 3, 3, 4, 4, batch=2)
    o, lse = flash4.attend(kernel, flash4.options_of(f), x, x, x)
    assert lse is None
    torch.testing.assert_close(o, rg.attention(x, x, x, pattern))


def test_of_documents_it_takes_one_band_of_as_many_queries_as_keys(installed):
    ids = torch.arange(64) // 9
    pattern = rg.documents(ids)
    for band in (rg.full(), rg.causal(), rg.window(7), rg.causal() & rg.window(5)):
        assert refusal(pattern & band, 64) is None
    for other in (rg.causal() | rg.prefix(8), rg.causal() & rg.sinks(8)):
        assert refusal(pattern & other, 64).endswith(
            "beside documents, its kernels take one band of i − j (causal, a window, or both)"
        )
    assert refusal(pattern & rg.every(4), 64).endswith(
        "beside documents, kernels take a band of i − j (causal, a window, or both)"
    )
    cached = "documents need as many queries as keys, both from position 0 on"
    assert refusal(pattern & rg.causal(), 8, 64) == refusal(pattern & rg.causal(), 64, at=3) == cached
    assert refusal(rg.documents(ids % 3), 64).endswith("ids that are not contiguous")
    assert refusal(rg.where(lambda i, j: i >= j), 64).endswith("carries data, which no progression describes")


def test_the_work_of_documents_is_counted_in_tiles(installed):
    lengths = [1, 128, 129, 700]
    pattern = packed(*lengths) & rg.causal()
    f = facts(pattern, sum(lengths), batch=3)
    tiles = [1, 1, 2, 6]
    computed = sum(
        sum(128 * (128 * (t + 1)) for t in range(x)) for x in tiles
    )  # whole tiles up to the diagonal
    assert flash4._work(f) == (3 * sum(tiles), 3 * computed)
    assert TABLE["flash4"].prepare(f).computed() == computed
    assert TABLE["flash4"].prepare(f).variant == "flash-attn-4 4.0.0b36, causal, documents"


def test_its_backward_pass_adds_up_in_a_fixed_order_where_pytorch_is_told_to():
    orders, x = [], torch.randn(1, 1, 4, 2)

    def spy(*tensors, deterministic, **options):
        orders.append(deterministic)
        return kernel(*tensors, deterministic=deterministic, **options)

    options = flash4.options_of(CallFacts(rg.causal(), 4, 4, 2, 2))
    try:
        for fixed in (False, True, False):
            torch.use_deterministic_algorithms(fixed)
            flash4.attend(spy, options, x, x, x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert orders == [False, True, False]


def test_a_few_queries_compute_no_more_pairs_than_they_have_keys():
    """Eight queries from position 512 on, with 28 keys between them: less than the tiles of a long band."""
    (part,) = flash4.parts_of(rg.window(10), 8, 1024, 512)
    assert part.computed == 8 * 28

"""Which way a call runs, and why: by name it never falls back, `auto` chooses and can say why."""

from functools import reduce
from math import inf
from operator import or_

import pytest
import torch

import regard as rg
from regard.engine import choose
from regard.engine.cpu.batches import program
from regard.engine.plan.planner import NoPlan
from regard.errors import BackendError
from regard.position import ByDistance

f32 = torch.float32
SPARSE = rg.causal() & (rg.window(64) | rg.every(64))


def facts(pattern, n=4096, m=None, **more):
    return choose.Facts(pattern, n, n if m is None else m, 64, 64, 8, f32, "cpu", **more)


def way(*given, **more):
    return choose.choose(facts(*given, **more)).backend


def test_auto_takes_the_way_that_fits():
    assert way(rg.full()) == way(rg.causal()) == way(rg.causal(), 1, 4096) == "dense"
    assert way(SPARSE) == way(SPARSE, grad=True) == way(rg.dilated(8, 16)) == "progressions"
    assert way(rg.window(2) | rg.every(4), 16) == "masked"  # too small to gain
    assert way(SPARSE, table=True) == way(SPARSE, at_each_row=True) == way(SPARSE, bias="tensor") == "masked"
    assert way(SPARSE, bias="distance", bias_grad=True) == "tiled"
    for fixed in (rg.full(), rg.causal(), SPARSE):  # forward from 32,768 pairs a head, backward from 262,144
        kinds = {"bias": "distance"}
        assert [way(fixed, n, **kinds) for n in (181, 182)] == ["masked", "tiled"]
        assert [way(fixed, n, grad=True, **kinds) for n in (511, 512)] == ["masked", "tiled"]
        assert way(fixed, 16, lse=True, **kinds) == "tiled"
    assert way(rg.causal(), 1, 4096, bias="distance") == "masked"  # one word after the other
    assert way(SPARSE, dropout=True) == "tiled" and way(rg.full(), dropout=True) == "dense"
    assert way(SPARSE, hard=True) == "plain"
    assert way(rg.causal(), lse=True) == way(SPARSE, lse=True) == "progressions"
    assert way(SPARSE, lse=True, bias="tensor") == "plain"
    assert way(SPARSE & rg.documents(torch.zeros(4096, dtype=torch.long))) == "masked"


def test_too_many_progressions_are_masked_and_it_says_so():
    combs = rg.every(64, 0)
    for o in (3, 7, 12, 18, 25, 33, 42, 52, 63):
        combs = combs | rg.every(64, o)
    choice = choose.choose(facts(combs))
    assert choice.backend == "masked"
    assert choice.reason == "10 progressions a tile; past 8 a mask is quicker"


REFUSED = [
    ("dense", rg.window(2), {}, "window(2) over 7 queries and 7 keys is neither full nor square causal"),
    (
        "dense",
        rg.full(),
        {"lengths": torch.tensor([3, 7])},
        "a bool tensor, lengths or a bias needs a mask; use backend='masked'",
    ),
    ("dense", rg.full(), {"return_lse": True}, "it gives no log-sum-exp; use backend='progressions'"),
    ("masked", rg.full(), {"return_lse": True}, "it gives no log-sum-exp; use backend='plain'"),
    ("masked", rg.full(), {"scale": inf}, "scale=inf has no softmax; use backend='plain'"),
    (
        "progressions",
        rg.full(),
        {"dropout_p": 0.5},
        "it has no dropout; use backend='tiled' (CPU) or 'masked'",
    ),
    (
        "progressions",
        rg.full(),
        {"bias": torch.zeros(7, 7)},
        "a bias is added to the scores; use backend='tiled' (by distance, CPU) or 'masked'",
    ),
    (
        "progressions",
        rg.where(torch.ge),
        {},
        "where(ge) carries data, which no progression describes; use backend='masked'",
    ),
    (
        "progressions",
        torch.ones(7, 7, dtype=torch.bool),
        {},
        "a bool tensor is no pattern; declare one, or use backend='masked'",
    ),
    (
        "progressions",
        rg.causal(),
        {"at": torch.tensor([0, 1])},
        "each batch row stands elsewhere; use backend='masked'",
    ),
    ("tiled", rg.full(), {"bias": torch.zeros(7, 7)}, "a bias tensor is n × m already; use backend='masked'"),
]


@pytest.mark.parametrize(
    "backend, pattern, more, message", REFUSED, ids=[f"{b}-{m[:30]}" for b, _, _, m in REFUSED]
)
def test_a_way_asked_for_by_name_refuses_what_it_cannot(backend, pattern, more, message):
    q, k, v = torch.randn(3, 2, 2, 7, 8).unbind()
    with pytest.raises(BackendError) as e:
        rg.attention(q, k, v, pattern, backend=backend, **more)
    assert str(e.value) == f"backend={backend!r} cannot run this: {message}"


def test_what_a_gpu_cannot_hold_is_named():
    wide = choose.Facts(SPARSE, 4096, 4096, 320, 64, 8, torch.bfloat16, "cuda")
    assert (
        choose.cannot(wide, "progressions") == "heads 320 wide do not fit the Triton kernels, which hold 256"
    )
    double = choose.Facts(SPARSE, 4096, 4096, 64, 64, 8, torch.float64, "cuda")
    assert choose.cannot(double, "progressions") == (
        "the Triton kernels take float32, float16 or bfloat16, not float64; use backend='masked'"
    )
    elsewhere = choose.Facts(SPARSE, 4096, 4096, 64, 64, 8, f32, "mps")
    assert choose.cannot(elsewhere, "progressions") == "it runs on the CPU and on CUDA, not on mps"
    assert choose.cannot(elsewhere, "tiled") == "it runs on the CPU, not on mps"


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("n", [128, 509, 1024, 2048])
def test_short_calls_on_a_gpu_are_walked_unless_there_is_little_to_skip(n, grad):
    def on_gpu(pattern, heads=16):
        return choose.choose(
            choose.Facts(pattern, n, n, 64, 64, heads, torch.bfloat16, "cuda", grad=grad)
        ).backend

    assert on_gpu(SPARSE) == on_gpu(rg.dilated(8, 4)) == "progressions"
    assert on_gpu(~rg.every(64), 256) == ("masked" if n > 1000 and grad else "progressions")


@pytest.mark.parametrize("backend", ["progressions", "tiled", "masked", "plain"])
def test_every_way_gives_the_same(backend):
    p, n = rg.causal() & (rg.window(3) | rg.every(5)), 53
    q, k, v = torch.randn(
        3, 2, 4, n, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).unbind()
    k, v = k[:, :2], v[:, :2]
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    lengths = torch.tensor([n, 20])
    expected = rg.attention(*inputs, p, lengths=lengths, backend="plain")
    got = rg.attention(*inputs, p, lengths=lengths, backend=backend)
    assert torch.allclose(got, expected, atol=1e-12)
    for a, b in zip(
        torch.autograd.grad(got.square().sum(), inputs), torch.autograd.grad(expected.square().sum(), inputs)
    ):
        assert torch.allclose(a, b, atol=1e-11)


@pytest.mark.parametrize("grad", [False, True])
def test_a_fixed_bias_by_distance_gives_the_same_in_tiles_as_in_a_mask(grad):
    n, g = 520, torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 8, n, 4, dtype=torch.float64, generator=g, requires_grad=grad) for _ in range(3)]
    slopes = ByDistance(slopes=torch.rand(8, dtype=torch.float64, generator=g))
    ways = [
        rg.attention(*inputs, SPARSE, bias=slopes, backend=backend) for backend in ("auto", "tiled", "masked")
    ]
    assert torch.equal(ways[0], ways[1]) and torch.allclose(ways[0], ways[2], atol=1e-12)
    if grad:
        found = [torch.autograd.grad(o.square().sum(), inputs) for o in ways]
        assert all(map(torch.equal, *found[:2]))
        assert all(torch.allclose(a, b, atol=1e-11) for a, b in zip(found[0], found[2]))


def test_a_learning_bias_by_distance_runs_tiled_and_learns_the_same():
    n = 29
    q, k, v = torch.randn(
        3, 2, 3, n, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).unbind()
    table = torch.randn(
        3, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    ).requires_grad_()
    grads = []
    for backend in ("auto", "tiled", "masked"):
        o = rg.attention(q, k, v, rg.causal(), bias=ByDistance(table=table), backend=backend)
        grads.append(torch.autograd.grad(o.square().sum(), table)[0])
    assert torch.allclose(grads[0], grads[2], atol=1e-12) and torch.equal(grads[0], grads[1])


def test_explain_tells_pairs_and_reason():
    told = rg.explain(rg.window(64) | rg.every(64), n=4096, grad=True)
    assert told.backend == "progressions" and told.needed == (rg.window(64) | rg.every(64)).count(4096)
    assert told.needed <= told.computed < 2 * told.needed
    assert "pairs needed" in str(told) and f"{told.needed:,}" in str(told) and told.reason in str(told)
    full = rg.explain(rg.full(), n=128)
    assert (full.backend, full.computed, full.waste) == ("dense", 128 * 128, 1.0)
    masked = rg.explain(rg.window(1), n=16)
    assert (masked.backend, masked.computed, masked.needed) == ("masked", 256, 46)
    assert rg.explain(rg.causal(), n=100).computed == 5050
    named = rg.explain(rg.window(1), n=16, backend="progressions")
    assert named.backend == "progressions" and named.reason == "asked for by name"


@pytest.mark.compiled
def test_a_compiled_graph_masks_what_no_progressions_describe():
    """It chooses before it knows the sizes; where the planner gives up, every pair is computed and masked."""
    p = reduce(
        or_, map(rg.every, (5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61)), rg.window(1)
    )
    with pytest.raises(NoPlan):
        program(p, 70, 70, 0, 1)
    q, k, v = torch.randn(3, 1, 2, 70, 8, generator=torch.Generator().manual_seed(0)).unbind()
    torch._dynamo.reset()
    got = torch.compile(lambda *x: rg.attention(*x, p), fullgraph=True, backend="aot_eager")(q, k, v)
    assert torch.allclose(got, rg.attention(q, k, v, p, backend="masked"), atol=1e-6)

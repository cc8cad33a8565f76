"""Which backend runs a call, and why: by name it never falls back, `auto` chooses and can say why."""

from dataclasses import replace
from functools import partial, reduce
from math import inf
from operator import or_

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import regard as rg
from regard.engine import gpu_estimates, sdpa
from regard.engine import plan as planner
from regard.engine.backends import PREPARED, PREPARED_BY_DATA, TABLE, choose
from regard.engine.call import CallFacts, Prepared
from regard.engine.cpu import backend as cpu_backend
from regard.engine.cuda import backend as triton_backend
from regard.engine.plan import NoPlan, plan
from regard.errors import BackendError
from regard.pattern.algebra import Both
from regard.position import ByDistance

SPARSE = rg.causal() & (rg.window(64) | rg.every(64))


def facts(pattern, n=4096, m=None, **more):
    return CallFacts(pattern, n, n if m is None else m, **more)


def chosen(*given, **more):
    return choose(facts(*given, **more)).backend


def test_auto_takes_the_backend_that_fits():
    assert chosen(rg.full()) == chosen(rg.causal()) == chosen(rg.causal(), 1, 4096) == "sdpa"
    for short in (chosen(rg.full(), 512), chosen(rg.causal(), 16), chosen(rg.causal(), 64, dropout_p=0.1)):
        assert short == "sdpa"
    assert chosen(SPARSE) == chosen(SPARSE, grad=True) == chosen(rg.dilated(8, 16)) == "tiles"
    assert chosen(rg.window(2) | rg.every(4), 16) == "sdpa"  # too small to gain
    assert (
        chosen(SPARSE, table=True)
        == chosen(SPARSE, row_offsets=True, bias="distance")
        == chosen(SPARSE, bias="tensor")
        == "sdpa"
    )
    assert chosen(SPARSE, bias="distance", bias_grad=True) == "tiles"
    for biased in (rg.full(), rg.causal(), SPARSE):  # the mask of a bias is gathered in each call
        kinds = {"bias": "distance"}
        assert [chosen(biased, n, **kinds) for n in (16, 181)] == ["sdpa", "tiles"]
        assert [chosen(biased, n, grad=True, **kinds) for n in (64, 512)] == ["sdpa", "tiles"]
        assert [chosen(biased, n, grad=True, bias_grad=True, **kinds) for n in (16, 256)] == ["sdpa", "tiles"]
        assert chosen(biased, 16, return_lse=True, **kinds) == "tiles"
    assert chosen(SPARSE, 16, 4096, bias="distance", d_k=16, d_v=16) == "tiles"  # few pairs of many
    assert chosen(rg.causal(), 1, 4096, bias="distance") == "tiles"  # it reads k and v where they are
    # With dropout PyTorch computes its formula, which holds tables of all pairs.
    assert chosen(SPARSE, dropout_p=0.1) == chosen(rg.causal(), dropout_p=0.1, grad=True) == "tiles"
    assert chosen(rg.causal(), 64, dropout_p=0.1, grad=True) == "sdpa"
    assert chosen(SPARSE, scale=inf) == "reference"
    assert chosen(rg.causal(), return_lse=True) == chosen(SPARSE, return_lse=True) == "tiles"
    assert chosen(SPARSE, return_lse=True, bias="tensor") == "reference"
    assert chosen(SPARSE & rg.documents(torch.zeros(4096, dtype=torch.long))) == "tiles"  # gathered keys


def test_short_causal_calls_run_in_tiles_because_sdpa_computes_their_hidden_pairs_too():
    def variant(n, **more):
        chosen = choose(facts(rg.causal(), n, **more))
        return chosen.backend, chosen.variant

    short = [variant(n, grad=grad) for n in (384, 512) for grad in (False, True)]
    assert set(short) == {("tiles", "concatenated keys")} and variant(2048) == ("sdpa", "dense")
    assert variant(512, d_k=16, d_v=16) == ("sdpa", "dense")  # what is between the products counts more there
    f = facts(rg.causal(), 500)
    assert TABLE["tiles"].estimate(f) == TABLE["tiles"].prepare(f).seconds  # it is planned
    assert variant(512, m=600)[0] == "tiles" and variant(512, dtype=torch.bfloat16) == ("sdpa", "dense")


def test_a_few_queries_at_a_new_position_are_planned_once():
    def plans(*given, **more):
        before = planner._cached.cache_info().misses
        choose(facts(*given, **more))
        return planner._cached.cache_info().misses - before

    both = rg.causal() & (rg.window(131) | rg.every(61))
    assert plans(both, 13, 4099, at=3001) == plans(both, 64, 4099, at=3001) == 1  # one tile of queries
    assert plans(both, 13, 4099, at=3001) == 0 and plans(both, 65, 4099, at=3001) > 1


def test_offsets_by_batch_row_count_their_masks_and_their_plans():
    def one_query(m, batch=8):
        return chosen(SPARSE, 1, m, batch=batch, kv_heads=2, row_offsets=True)

    # SDPA reads all keys and makes a mask of each row; one query needs no plan, several need one for each row.
    assert one_query(2048) == one_query(2048, batch=2) == one_query(2048, batch=32) == "tiles"
    assert chosen(SPARSE, 16, 2048, batch=8, row_offsets=True) == "sdpa"
    assert chosen(SPARSE, 16, 2048, batch=8) == "tiles"
    assert chosen(SPARSE, 256, 4096, batch=4, row_offsets=True) == "tiles"
    masked = {"n": 256, "m": 2048, "batch": 8, "kv_heads": 1}
    for heads, least in ((1, 3), (8, 1.3)):  # the heads of a row share its mask
        of_rows, of_all = (facts(SPARSE, heads=heads, row_offsets=rows, **masked) for rows in (True, False))
        assert least < TABLE["sdpa"].estimate(of_rows) / TABLE["sdpa"].estimate(of_all) < 2 * least


def test_a_plan_is_made_where_it_can_gain_and_full_attention_forward_stays_with_sdpa():
    for f in (facts(rg.causal(), 200, heads=2, kv_heads=2), facts(rg.causal(), 61, grad=True)):
        best = min(v.seconds for v in cpu_backend.variants(f))
        assert best < TABLE["tiles"].estimate(f) > TABLE["sdpa"].estimate(f)  # without a plan
        assert TABLE["sdpa"].estimate(f) < 1.1 * best  # which would gain little
    for n in (50, 100, 128, 190):  # tiles of these take 1.0 to 1.5 times as long by their own estimate
        assert (
            chosen(rg.full(), n, batch=32) == chosen(rg.full(), n, batch=32, dtype=torch.bfloat16) == "sdpa"
        )
        f = facts(rg.causal(), n, batch=32)
        merged = cpu_backend._merged(f)
        assert merged.seconds > min(v.seconds for v in cpu_backend.variants(f))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_with_dropout_the_choice_is_the_same_without_gradients(device):
    for pattern in (rg.full(), rg.causal(), SPARSE, rg.causal() | rg.prefix(20)):
        for n in (64, 128, 256, 320, 512, 1024):
            for more in ({}, {"bias": "distance"}, {"lengths": True}):
                options = {**more, "dropout_p": 0.2, "batch": 2, "device": device}
                learned = {"bias_grad": True} if "bias" in more else {}
                kinds = [{}, {"grad": True}, learned, {"grad": True, **learned}]
                assert len({chosen(pattern, n, **options, **kind) for kind in kinds}) == 1


@pytest.mark.parametrize("n", [256, 320])
def test_a_checkpoint_that_runs_forward_without_gradients_drops_the_same_weights(n):
    q, k, v = torch.randn(3, 2, 8, n, 32, generator=torch.Generator().manual_seed(0)).unbind()
    for pattern in (rg.full(), rg.causal()):
        results = []
        for use_reentrant in (True, False):
            inputs = [x.clone().requires_grad_() for x in (q, k, v)]
            torch.manual_seed(5)
            run = partial(rg.attention, pattern=pattern, dropout_p=0.2)
            o = checkpoint(run, *inputs, use_reentrant=use_reentrant)
            o.sin().sum().backward()
            results.append((o, *(x.grad for x in inputs)))
        for a, b in zip(*results):
            assert torch.equal(a, b)


def test_one_query_of_rows_with_lengths_reads_its_keys_where_they_are():
    rows = {"batch": 4, "heads": 12, "kv_heads": 12, "d_k": 32, "d_v": 32}
    assert chosen(rg.causal(), 1, 512, lengths=True, **rows) == "tiles"

    def seconds(**more):
        return TABLE["tiles"].estimate(facts(SPARSE, 1, 512, **rows, **more))

    assert seconds() < seconds(lengths=True) < seconds(lengths=True, softcap=30.0)
    assert seconds(lengths=True) < seconds(lengths=True, grad=True) and seconds(return_lse=True) < 1e-4


def test_estimates_on_a_cpu_know_width_dtype_lengths_and_groups():
    def seconds(name, *given, **more):
        return TABLE[name].estimate(facts(*given, **more))

    masked = rg.causal() | rg.prefix(16)
    for name, case in (("sdpa", (masked, 1024)), ("sdpa", (rg.full(), 1024)), ("tiles", (SPARSE,))):
        times = [seconds(name, *case, d_k=d, d_v=d) for d in (16, 64, 128)]
        # Narrow heads take more than their share: exp takes as long.
        assert 0.35 < times[0] / times[1] < 0.6 and 1.6 < times[2] / times[1] < 1.9
        assert 1.8 < seconds(name, *case, dtype=torch.float64) / times[1] < 2.2
        assert 3 < seconds(name, *case, grad=True) / times[1] < 5
    assert seconds("tiles", masked, 512, lengths=True) < seconds("sdpa", masked, 512, lengths=True)
    assert chosen(rg.full(), 1, 1000, heads=8, kv_heads=8) == "sdpa"
    assert chosen(rg.full(), 1, 1000, heads=8, kv_heads=1) == "tiles"  # which reads the keys of a group once


def test_estimates_on_a_cpu_count_what_is_made_once_and_what_is_made_for_each_batch_row():
    masked = rg.causal() | rg.prefix(16)

    def seconds(n, **more):
        return TABLE["sdpa"].estimate(facts(masked, n, **more))

    for n in (61, 509):  # the table of a bias by distance has the heads of one batch row
        of_one, of_many = (
            seconds(n, batch=b, bias="distance") - seconds(n, batch=b, lengths=True) for b in (1, 7)
        )
        assert of_one == pytest.approx(of_many) and of_one > 8 * n * n * 1e-9
    assert seconds(61, lengths=True) - seconds(61) == pytest.approx(sdpa.MASK_CALL[0])
    assert seconds(1, lengths=True) > seconds(1) + sdpa.MASK_CALL[0] / 2
    dropped = {"bias": "distance", "grad": True, "dropout_p": 0.2}  # one table less, and a gradient more
    assert seconds(509, **dropped, bias_grad=True) == pytest.approx(seconds(509, **dropped), rel=0.1)
    of_rows, of_all = (cpu_backend._merged(facts(masked, 509, batch=7, row_offsets=x)) for x in (True, False))
    assert of_rows.seconds - 7 * cpu_backend.ROW_PLAN == pytest.approx(of_all.seconds, rel=0.2)


@pytest.mark.parametrize("variant", ["_gathered", "_concatenated", "_merged"])
def test_every_variant_takes_longer_in_wider_heads_and_in_64_bits(variant):
    def seconds(**more):
        return getattr(cpu_backend, variant)(facts(rg.causal() & rg.window(61), 1021, **more)).seconds

    for grad in (False, True):
        narrow, plain, wide = (seconds(d_k=d, d_v=d, grad=grad) for d in (16, 64, 128))
        assert 0.3 < narrow / plain < 0.7 and 1.4 < wide / plain < 2
        assert seconds(d_k=17, d_v=111, grad=grad) == pytest.approx(plain, rel=0.05)
        assert 1.6 < seconds(dtype=torch.float64, grad=grad) / plain < 2.3
        if variant == "_merged":
            assert 0.8 < seconds(dtype=torch.bfloat16, grad=grad) / plain < 1.05
            assert 1.8 < seconds(dropout_p=0.2, grad=grad) / plain < 2.8


def test_one_query_takes_the_time_to_read_its_keys():
    def seconds(dtype, **more):
        return TABLE["tiles"].estimate(facts(rg.full(), 1, 100_003, dtype=dtype, heads=8, **more))

    assert seconds(torch.float64) == pytest.approx(2 * seconds(torch.float32), rel=0.05)
    of_rows = {
        dtype: seconds(dtype, lengths=True) for dtype in (torch.bfloat16, torch.float32, torch.float64)
    }
    assert of_rows[torch.float64] == pytest.approx(2 * of_rows[torch.float32], rel=0.05)
    with_terms = seconds(
        torch.float32, lengths=True, softcap=30.0
    )  # by the operations that 16 bits take, too
    assert of_rows[torch.bfloat16] == pytest.approx(with_terms / 2, rel=0.05)


def test_a_masked_call_in_float32_on_a_gpu_takes_twice_as_long_in_heads_twice_as_wide():
    narrow, wide = (
        TABLE["sdpa"].estimate(facts(rg.causal() | rg.prefix(16), 8191, device="cuda", d_k=d))
        for d in (64, 128)
    )
    assert wide == pytest.approx(2 * narrow, rel=0.05)


def test_a_masked_call_on_a_gpu_knows_lengths_and_wide_heads():
    def seconds(n=8191, **more):
        return TABLE["sdpa"].estimate(facts(rg.causal() | rg.prefix(16), n, device="cuda", **more))

    assert seconds(61, lengths=True) - seconds(61) == pytest.approx(sdpa.GPU_LENGTHS)
    plan = gpu_estimates.CUDNN_PLAN / gpu_estimates.REUSED  # without gradients, in 16 bits
    for grad, slower in ((False, 1.3), (True, 1.9)):
        wide, narrow = (seconds(d_k=d, dtype=torch.bfloat16, grad=grad) for d in (192, 128))
        share = 0.0 if grad else plan
        assert (wide - share) / (narrow - share) == pytest.approx(slower, rel=0.05)


def test_a_variant_is_named():
    def variant(*given, **more):
        return choose(facts(*given, **more)).variant

    assert variant(rg.causal()) == "dense" and variant(SPARSE, table=True) == "masked"
    assert variant(SPARSE, 128, grad=True) == "short sequence: gathered keys"
    assert variant(rg.window(64) | rg.every(64)) == "concatenated keys"
    assert variant(SPARSE, return_lse=True) == "merged tiles"
    assert (
        variant(SPARSE, bias="distance") == "bias by distance" and variant(SPARSE, dropout_p=0.1) == "dropout"
    )
    ids = torch.arange(4096, device="cpu") // 64
    assert variant(rg.documents(ids)) == "packed documents" and variant(SPARSE, scale=inf) == "formula"


def test_a_pattern_with_data_runs_by_the_faster_of_packed_documents_and_gathered_keys(monkeypatch):
    from regard.engine.cpu import backend

    of_documents = facts(rg.documents(torch.arange(4096, device="cpu") // 64))

    def variant(listed, packed, contiguous=True):
        by_list = (
            listed if isinstance(listed, str) else Prepared("tiles", backend.LISTED, int, seconds=listed)
        )
        merged = Prepared("tiles", backend.PACKED, int, seconds=packed)
        monkeypatch.setattr(backend, "_listed", lambda f, split: by_list)
        monkeypatch.setattr(backend, "_merged", lambda f, layouts: merged)
        monkeypatch.setattr(backend.documents, "layouts", lambda *place: () if contiguous else None)
        return TABLE["tiles"].prepare(of_documents).variant

    assert variant(listed=1.0, packed=2.0) == backend.LISTED and variant(2.0, 1.0) == backend.PACKED
    assert variant(1.0, 0.9) == backend.LISTED  # the estimate of packed documents has a margin
    assert variant("no", 1.0) == backend.PACKED and variant(2.0, 1.0, contiguous=False) == backend.LISTED


def test_too_many_progressions_are_masked_and_it_says_so():
    combs = rg.every(64, 0)
    for o in (3, 7, 12, 18, 25, 33, 42, 52, 63):
        combs = combs | rg.every(64, o)
    choice = choose(facts(combs))
    assert choice.backend == "sdpa"
    assert choice.reason == "tiles cannot: 10 progressions per tile; past 8 a mask is faster"


REFUSED = [
    (
        "sdpa",
        rg.full(),
        {"return_lse": True},
        "it gives no log-sum-exp; use backend='tiles'",
    ),
    (
        "sdpa",
        rg.where(torch.ge),
        {"return_lse": True},
        "it gives no log-sum-exp; use backend='reference'",
    ),
    ("sdpa", rg.full(), {"scale": inf}, "scale=inf has no softmax; use backend='reference'"),
    ("tiles", rg.full(), {"scale": inf}, "scale=inf has no softmax; use backend='reference'"),
    (
        "tiles",
        rg.full(),
        {"bias": torch.zeros(7, 7)},
        "a bias tensor is n × m already; use backend='sdpa'",
    ),
    (
        "tiles",
        rg.where(torch.ge),
        {},
        "a function decides where(ge), which may give something else at the next call; use backend='sdpa'",
    ),
    (
        "tiles",
        torch.eye(7, dtype=torch.bool),
        {},
        "a bool tensor is not a pattern; declare one; use backend='sdpa'",
    ),
    (
        "tiles",
        rg.causal(),
        {"at": torch.tensor([0, 1]), "bias": ByDistance(slopes=torch.ones(2))},
        "per-row query offsets (`at` as a tensor) need a pattern without data, no bias and no compiler; "
        "use backend='sdpa'",
    ),
    ("triton", rg.causal(), {}, "it runs on CUDA, not on cpu; use backend='sdpa'"),
]


@pytest.mark.parametrize(
    "backend, pattern, more, message", REFUSED, ids=[f"{b}-{m[:30]}" for b, _, _, m in REFUSED]
)
def test_a_backend_requested_by_name_refuses_what_it_cannot_and_names_one_that_can(
    backend, pattern, more, message
):
    q, k, v = torch.randn(3, 2, 2, 7, 8).unbind()
    with pytest.raises(BackendError) as e:
        rg.attention(q, k, v, pattern, backend=backend, **more)
    assert str(e.value) == f"backend={backend!r} cannot run this: {message}"
    rg.attention(q, k, v, pattern, backend=message.split("'")[-2], **more)


def test_what_a_gpu_cannot_hold_is_named():
    def refusal(backend="triton", **more):
        return TABLE[backend].refuses(facts(SPARSE, **{"device": "cuda", "dtype": torch.bfloat16} | more))

    assert refusal(d_k=320) == "heads 320 wide do not fit the Triton kernels, which hold 256"
    assert refusal(dtype=torch.float64) == (
        "the Triton kernels take float32, float16 or bfloat16, not float64"
    )
    assert refusal(device="mps") == "it runs on CUDA, not on mps"
    assert refusal("tiles", device="mps") == "it runs on the CPU, not on mps"


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("n", [128, 509, 1024, 2048])
def test_short_calls_on_a_gpu_are_sparse_unless_there_is_nothing_to_skip(n, grad):
    def on_gpu(pattern, heads=16):
        return chosen(pattern, n, heads=heads, dtype=torch.bfloat16, device="cuda", grad=grad)

    assert on_gpu(SPARSE) == on_gpu(rg.dilated(8, 4)) == "triton"
    assert on_gpu(~rg.every(64), 256) == "triton"  # a mask of 16-bit SDPA costs more than its few pairs
    # A new shape would take a plan of cuDNN, or twice the time by PyTorch's other kernel.
    assert on_gpu(rg.causal(), 256) == ("sdpa" if grad or n < 2048 else "triton")
    assert on_gpu(rg.full(), 256) == ("sdpa" if grad or n < 1024 else "triton")


@pytest.mark.parametrize("pattern", [None, rg.causal(), rg.causal() & rg.window(3)], ids=repr)
@pytest.mark.parametrize("lengths", [None, torch.tensor([9, 4])], ids=["whole", "padded"])
def test_key_heads_of_groups_are_copied_where_sdpa_would_store_all_scores(monkeypatch, pattern, lengths):
    assert sdpa._repeats("cuda", torch.float32, False) and not sdpa._repeats("cuda", torch.float32, True)
    assert not sdpa._repeats("cuda", torch.bfloat16, False) and not sdpa._repeats("cpu", torch.float32, False)
    PREPARED.clear()
    seen, plain = [], sdpa._sdpa

    def watched(q, k, v, *rest, enable_gqa, **more):
        seen.append((k.shape[1], v.shape[1], enable_gqa))
        return plain(q, k, v, *rest, enable_gqa=enable_gqa, **more)

    monkeypatch.setattr(sdpa, "_sdpa", watched)
    monkeypatch.setattr(sdpa, "_repeats", lambda device_type, dtype, trains_with_mask: not trains_with_mask)
    monkeypatch.setattr(sdpa, "needs_grad", lambda *x: False)  # as on CUDA: PyTorch's own node
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, 9, 8, generator=g, requires_grad=True) for h in (6, 2, 2))
    exact = rg.attention(q, k, v, pattern, lengths=lengths, backend="reference")
    for grad in (True, False, True):
        with torch.set_grad_enabled(grad):
            o = rg.attention(q, k, v, pattern, lengths=lengths, backend="sdpa")
        torch.testing.assert_close(o, exact)
    copied, formula = (6, 6, False), (2, 2, True)
    prepared_mask = lengths is None and isinstance(pattern, Both)
    assert seen == ([formula, copied, formula] if prepared_mask else [copied] * 3)
    mine, theirs = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (o, exact))
    torch.testing.assert_close(mine, theirs)
    PREPARED.clear()


def test_one_query_of_grouped_heads_reads_shared_keys_once():
    def on_cpu(pattern, kv_heads):
        return chosen(pattern, 1, 4096, heads=8, kv_heads=kv_heads)

    assert on_cpu(rg.causal(), 2) == "tiles"  # 0.26 ms, SDPA 0.43 (batch 4, m = 1024; bench/auto_choice.py)
    assert on_cpu(rg.causal(), 8) == "sdpa"


@pytest.mark.parametrize("grad", [False, True])
def test_few_queries_of_few_heads_leave_most_of_sdpas_gpu_idle(grad):
    def on_gpu(n, m, heads, dtype=torch.bfloat16, **more):
        sizes = {"heads": heads, "kv_heads": heads, "d_k": 128, "d_v": 128}
        return chosen(rg.full(), n, m, dtype=dtype, device="cuda", **sizes | more)

    if grad:
        assert on_gpu(197, 16384, 12, grad=True) == "triton"
    else:  # 0.062 ms, cuDNN 0.192 (bench/auto_choice.py); FlashAttention-2, which divides the keys, builds no plan
        assert on_gpu(197, 16384, 12) == "sdpa" and on_gpu(197, 16384, 48) == "triton"
    assert on_gpu(197, 16384, 192, grad=grad) == ("sdpa" if grad else "triton")  # cuDNN would build a plan
    assert on_gpu(4096, 4096, 12, grad=grad) == ("sdpa" if grad else "triton")


# By bench/auto_choice.py on one H200, milliseconds of `sdpa` and `triton`; of both passes, of float32 and of cuDNN.
# Where it builds a plan for each new shape, which takes 40 ms, of FlashAttention-2 (bench/gpu_sdpa_kernels.py).
DENSE = [
    ("float32", 64, 1, 16384, 32, 8, False, "triton"),  # 2.030, 0.044: one query is a tile of SDPA's
    ("float32", 128, 1, 4096, 256, 64, False, "triton"),  # 1.485, 0.113
    ("float32", 64, 4096, 4096, 16, 16, False, "triton"),  # 1.331, 0.699
    ("float32", 128, 4096, 4096, 32, 32, False, "triton"),  # 3.274, 2.430
    ("float32", 128, 4096, 4096, 16, 16, True, "sdpa"),  # 7.034, 9.073
    ("float32", 256, 4096, 4096, 16, 16, False, "sdpa"),  # 3.685, 7.502
    ("float32", 256, 4096, 4096, 16, 16, True, "sdpa"),  # 14.47, 45.83
    ("bfloat16", 128, 64, 4096, 16, 16, False, "sdpa"),  # 0.025, 0.022, and 1.6 ms for the first of them
    ("bfloat16", 128, 1, 16384, 32, 8, False, "triton"),  # 0.049, 0.048 (32,000 keys)
    ("bfloat16", 64, 512, 512, 16, 16, False, "sdpa"),  # 0.026, 0.016, and 4 ms for the first of them
    ("bfloat16", 128, 4096, 4096, 16, 16, False, "triton"),  # 0.317, 0.130
    ("bfloat16", 128, 16384, 16384, 16, 16, False, "triton"),  # 1.795 by cuDNN, whose plan takes 40 ms; 1.833
    ("bfloat16", 256, 8192, 8192, 32, 32, True, "sdpa"),  # 9.115, 11.42
    ("bfloat16", (192, 128), 4096, 4096, 32, 32, True, "sdpa"),  # 1.456, 4.127
]


@pytest.mark.parametrize("case", DENSE, ids=lambda case: " ".join(map(str, case)))
def test_dense_calls_on_a_gpu_run_by_the_faster_backend(case, monkeypatch):
    dtype, width, n, m, heads, kv_heads, grad, backend = case
    d_k, d_v = width if isinstance(width, tuple) else (width, width)
    sizes = {"heads": heads, "kv_heads": kv_heads, "d_k": d_k, "d_v": d_v, "grad": grad}
    pattern = rg.causal() if n == m else rg.full()
    call = facts(pattern, n, m, dtype=getattr(torch, dtype), device="cuda", **sizes)
    PREPARED.clear()
    assert choose(call).backend == backend
    PREPARED.clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    monkeypatch.setattr(triton_backend, "_hopper_passes", lambda f: ())
    # Where other kernels than the measured ones run, long calls stay with PyTorch's attention.
    assert choose(call).backend == ("triton" if n == 1 and dtype == "float32" else "sdpa")
    PREPARED.clear()


def test_wide_documents_in_float32_are_masked():
    """FlexAttention takes 31 ms for heads of 256, SDPA with a mask 11; with heads of 64 it is the faster one."""
    documents = rg.documents(torch.arange(4096) // 273)
    sizes = {"dtype": torch.float32, "device": "cuda", "batch": 2, "heads": 12, "kv_heads": 12}
    for width, backend in ((64, "flex"), (256, "sdpa")):
        assert chosen(documents, d_k=width, d_v=width, **sizes) == backend


def test_a_new_length_that_has_to_be_prepared_is_counted():
    """So that prompts of many lengths, of 16 bits, are not slowed down by what is prepared for each."""

    def times(n, dtype, grad=False):
        call = facts(rg.causal(), n, dtype=dtype, device="cuda", heads=16, kv_heads=16, grad=grad)
        return [1e6 * TABLE[name].estimate(call) for name in ("sdpa", "triton")]

    for n in (200, 1000, 4096):
        assert times(n, torch.bfloat16)[1] > 20 + 2500 / gpu_estimates.REUSED
        assert times(n, torch.bfloat16, True)[1] == inf  # training stays with PyTorch's kernels
        for more in ({"return_lse": True}, {"sink_logits": True}):  # which they do not take
            sizes = {"dtype": torch.bfloat16, "device": "cuda", "grad": True}
            assert (
                chosen(rg.causal(), n, **sizes, **more) == chosen(rg.full(), n, **sizes, **more) == "triton"
            )
    sdpa_time, triton_time = times(4096, torch.float32)
    assert (
        1200 < sdpa_time < 1500 and 600 < triton_time < 950
    )  # measured: 1331 and 699, without what is prepared


@pytest.mark.parametrize("backend", ["tiles", "sdpa", "reference"])
def test_every_backend_gives_the_same(backend):
    p, n = rg.causal() & (rg.window(3) | rg.every(5)), 53
    q, k, v = torch.randn(
        3, 2, 4, n, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).unbind()
    k, v = k[:, :2], v[:, :2]
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    lengths = torch.tensor([n, 20])
    expected = rg.attention(*inputs, p, lengths=lengths, backend="reference")
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
        rg.attention(*inputs, SPARSE, bias=slopes, backend=backend) for backend in ("auto", "tiles", "sdpa")
    ]
    assert torch.equal(ways[0], ways[1]) and torch.allclose(ways[0], ways[2], atol=1e-12)
    if grad:
        found = [torch.autograd.grad(o.square().sum(), inputs) for o in ways]
        assert all(map(torch.equal, *found[:2]))
        assert all(torch.allclose(a, b, atol=1e-11) for a, b in zip(found[0], found[2]))


def test_a_learned_bias_by_distance_runs_in_tiles_and_learns_the_same():
    n = 131  # for fewer queries sdpa takes less time
    q, k, v = torch.randn(
        3, 2, 3, n, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).unbind()
    table = torch.randn(
        3, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    ).requires_grad_()
    grads = []
    for backend in ("auto", "tiles", "sdpa"):
        o = rg.attention(q, k, v, rg.causal(), bias=ByDistance(table=table), backend=backend)
        grads.append(torch.autograd.grad(o.square().sum(), table)[0])
    assert torch.allclose(grads[0], grads[2], rtol=1e-11, atol=1e-12) and torch.equal(grads[0], grads[1])


def test_explain_gives_pairs_and_reason():
    result = rg.explain(rg.window(64) | rg.every(64), n=4096, grad=True)
    assert result.backend == "tiles" and result.needed == (rg.window(64) | rg.every(64)).count(4096)
    assert result.needed <= result.computed < 2 * result.needed
    text = str(result)
    assert "pairs needed" in text and f"{result.needed:,}" in text
    assert f"tiles, {result.variant}: {result.reason}" in text and "× faster than sdpa" in result.reason
    full = rg.explain(rg.full(), n=128)
    assert (full.backend, full.variant, full.computed, full.waste) == ("sdpa", "dense", 128 * 128, 1.0)
    masked = rg.explain(rg.window(1), n=16)
    assert (masked.backend, masked.variant, masked.computed, masked.needed) == ("sdpa", "masked", 256, 46)
    assert rg.explain(rg.causal(), n=2000).computed == 2001000
    named = rg.explain(rg.window(1), n=16, backend="tiles")
    assert named.backend == "tiles" and named.reason.startswith("requested by name; tiles of ")


def test_explain_refuses_what_it_does_not_know():
    with pytest.raises(rg.SpecError, match=r"^explain\(\) has no argument 'head'; did you mean heads\?$"):
        rg.explain(rg.window(1), 16, head=3)


@pytest.mark.compiled
def test_a_compiled_graph_masks_what_no_progressions_describe():
    """It chooses before it knows the sizes; where the planner gives up, every pair is computed and masked."""
    p = reduce(
        or_, map(rg.every, (5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61)), rg.window(1)
    )
    with pytest.raises(NoPlan):
        plan(p, 70, 70, 0, 1)
    q, k, v = torch.randn(3, 1, 2, 70, 8, generator=torch.Generator().manual_seed(0)).unbind()
    torch._dynamo.reset()
    got = torch.compile(lambda *x: rg.attention(*x, p), fullgraph=True, backend="aot_eager")(q, k, v)
    assert torch.allclose(got, rg.attention(q, k, v, p, backend="sdpa"), atol=1e-6)


def test_the_estimate_of_one_query_grows_with_the_bytes_of_its_cache():
    def seconds(**more):
        given = {"device": "cuda", "dtype": torch.bfloat16, "heads": 8, "kv_heads": 2, "batch": 3} | more
        return gpu_estimates.sdpa_dense(facts(rg.causal(), 1, 1 << 16, d_k=128, **{"d_v": 64} | given))

    cache = 3 * 2 * (1 << 16) * (128 + 64) * 2
    plan = gpu_estimates.CUDNN_PLAN / gpu_estimates.LAYERS
    assert seconds() - plan == pytest.approx(cache * gpu_estimates.READ_SDPA)
    assert seconds(d_v=128) == pytest.approx(4 / 3 * cache * gpu_estimates.READ_FLASH)
    assert 4.8e12 / 2 < cache / (seconds() - plan) < 4.8e12  # bytes per second of an H200's memory


def test_past_one_launch_a_prepared_call_is_not_masked():
    """SDPA's mask of so many pairs is made anew in each call: 560 to 680 µs with backward on an H200, triton's 130 to
    210 (bench/results/gpu_experiments-2026-11-17.json)."""
    sparse = {
        "device": "cuda",
        "heads": 4,
        "kv_heads": 4,
        "grad": True,
        "dtype": torch.bfloat16,
        "d_k": 64,
        "d_v": 64,
    }
    facts = CallFacts(rg.causal() & (rg.window(128) | rg.every(64)), 2304, 2304, **sparse)
    assert choose(facts, "auto").backend == "triton"


def test_auto_leaves_out_a_kernel_that_rounds_gradients():
    def chosen(**more):
        facts = CallFacts(
            rg.causal(), 520, 520, device="cuda", heads=1, kv_heads=1, lengths=True, left_padding=True, **more
        )
        return choose(facts, "auto")

    assert "rounds" not in chosen(grad=True, dtype=torch.bfloat16).reason
    found = chosen(grad=True)
    assert found.backend == "triton"
    assert "sdpa's kernel for masks rounds gradients in float32 more than the formula does" in found.reason
    only = chosen(grad=True, bias="tensor")
    assert only.backend == "sdpa"  # nothing else adds it
    assert "more than the formula does: backend='reference' is more exact, and slower" in only.reason
    assert (
        "sdpa's" not in chosen(grad=True, return_lse=True).reason
    )  # it cannot run that, so it was not left out
    assert "rounds" not in chosen().reason  # nor without gradients
    dense = choose(CallFacts(rg.causal(), 520, 520, device="cuda", grad=True), "auto")
    assert "rounds" not in dense.reason  # without a mask another kernel runs


def test_calls_with_data_on_a_gpu_are_prepared_once_until_their_data_change():
    ids = torch.arange(4096) // 100
    on_gpu = facts(rg.causal() & rg.documents(ids), 4096, device="cuda", dtype=torch.bfloat16)
    first = choose(on_gpu)
    again = replace(
        on_gpu, pattern=rg.causal() & rg.documents(ids)
    )  # composed anew, as each layer of a model does
    assert choose(on_gpu) is choose(again) is first
    others = [
        replace(on_gpu, pattern=rg.window(9) & rg.documents(ids)),
        replace(on_gpu, pattern=rg.causal() & rg.documents(ids.clone())),
        replace(on_gpu, grad=True),
    ]
    assert all(choose(other) is not first for other in others)
    assert choose(on_gpu, "flex") is not first
    ids[0] = 7
    assert choose(on_gpu) is not first
    on_cpu = replace(on_gpu, device="cpu")  # NumPy may change its data unnoticed
    assert choose(on_cpu) is not choose(on_cpu)


def test_few_calls_with_data_are_kept():
    for seed in range(PREPARED_BY_DATA.limit + 5):
        pattern = rg.documents(torch.arange(4096) // (seed + 1))
        choose(facts(pattern, 4096, device="cuda", dtype=torch.bfloat16))
    assert len(PREPARED_BY_DATA) == PREPARED_BY_DATA.limit


def test_auto_makes_no_table_on_a_gpu_where_a_kernel_needs_none():
    """In float32 with wide heads SDPA is estimated to be faster. Its mask is made a chunk of queries at a time, but
    with dropout it would have n × m entries."""

    def chosen(pattern, n=8192, **more):
        return choose(CallFacts(pattern, n, n, 256, 256, device="cuda", **more), "auto")

    found = chosen(~rg.window(5), dropout_p=0.1)
    assert found.backend == "triton" and "sdpa would hold a table of all pairs" in found.reason
    for terms in ({}, {"bias": "distance"}, {"lengths": True}):
        assert chosen(~rg.window(5), **terms).backend == "sdpa"
    # With dropout the choice is that of a call with gradients, which sdpa rounds in float32.
    dropped = {"dropout_p": 0.1, "dtype": torch.float64}
    assert chosen(~rg.window(5), n=512, **dropped).backend == "sdpa"  # a small one
    assert chosen(rg.full(), lengths=True, **dropped).backend == "sdpa"  # m entries for each batch row
    assert chosen(rg.causal(), bias="tensor", dropout_p=0.1).backend == "sdpa"  # which is n × m already


def test_positions_by_batch_row_run_in_the_kernels():
    """Any number of queries, with gradients and terms; where keys are no formulas of a position, with a mask."""
    recent = rg.causal() & (rg.window(1024) | rg.sinks(4))

    def variant(pattern, n, **more):
        options = {"device": "cuda", "dtype": torch.bfloat16, "row_offsets": True, "heads": 32, "kv_heads": 8}
        found = choose(facts(pattern, n, 32768, d_k=128, d_v=128, batch=8, **(options | more)))
        return f"{found.backend}, {found.variant}"

    terms = {"softcap": 30.0, "lengths": True, "left_padding": True, "sink_logits": True, "return_lse": True}
    for n, name in ((1, "triton, one query"), (4, "triton, few queries"), (512, "triton, few queries")):
        assert variant(recent, n) == variant(recent, n, grad=True) == name
        assert variant(recent, n, **terms, grad=True) == name
    for more in ({"bias": "distance"}, {"dtype": torch.float64}, {"observed": True}):
        assert variant(recent, 4, **more) == "sdpa, masked"
    many = rg.causal() & (rg.every(5) | rg.every(7) | rg.every(9) | rg.every(11) | rg.window(3))
    assert variant(many, 4) == "sdpa, masked"


def test_few_queries_after_many_keys_need_no_plan(monkeypatch):
    def planned(*arguments):
        raise AssertionError("a plan was made")

    monkeypatch.setattr(triton_backend, "plan", planned)
    monkeypatch.setattr(triton_backend, "why_masked", planned)
    pattern = rg.causal() & (rg.window(1000) | rg.sinks(3))
    options = {"heads": 32, "kv_heads": 8, "device": "cuda", "dtype": torch.bfloat16}
    found = choose(facts(pattern, 8, 30000, **options))
    assert (found.backend, found.variant, found.computed()) == ("triton", "few queries", 8 * (1001 + 3))
    for n, m in (
        (17, 30000),
        (8, 60),
    ):  # more rows than a tile has; so few keys that a plan is worth its time
        with pytest.raises(AssertionError, match="a plan was made"):
            choose(facts(pattern, n, m, **options))

"""Packed documents on the Hopper kernels, without a GPU: their launches by the model of launches, which calls run so
and which do not, and what is kept of ids."""

import gc
import random
import sys
import weakref
from collections.abc import Callable
from unittest import mock

import jaxtyping
import numpy as np
import pytest
import torch

pytest.importorskip("triton.experimental.gluon")  # the kernels are written in it
from launch_model import LaunchError, check_backward, check_forward
from modeled_gpu import Case, counting_gpu, modeled_gpu
from regard.engine import backends
from regard.engine.attention import attention, call_of
from regard.engine.backends import PREPARED_BY_DATA
from regard.engine.call import CallFacts, Options
from regard.engine.cuda import call as cuda_call
from regard.engine.cuda import documents as packed_documents
from regard.engine.cuda import host, prepared
from regard.engine.cuda.backend import Triton
from regard.engine.cuda.call import CallLayout, Config, contiguous, task
from regard.engine.cuda.documents import Packed, read
from regard.engine.cuda.hopper import launches as hopper
from regard.engine.cuda.prepared import PREPARED, Launch, Program
from regard.engine.cuda.schedule import BEGINS, TESTED, device_passes
from regard.engine.cuda.tile_lists import one_launch_tables, with_masks
from regard.engine.cuda.work_split import WorkSplit, split_work
from regard.engine.explain import explain
from regard.errors import BackendError
from regard.pattern import Pattern, causal, documents, every, full, prefix, sinks, where, window

BF16 = torch.bfloat16


@pytest.fixture
def on_hopper():
    """As if there were a Hopper GPU; nothing is launched."""
    with mock.patch.object(packed_documents, "_is_hopper", lambda device: True):
        yield


def facts(pattern: Pattern, n: int = 512, m: int | None = None, **more) -> CallFacts:
    return CallFacts(
        pattern, n, m or n, **{"dtype": BF16, "device": "cuda", "heads": 4, "kv_heads": 4} | more
    )


def packed(ids: torch.Tensor, band: Pattern) -> Packed:
    with mock.patch.object(packed_documents, "_is_hopper", lambda device: True):
        found = read(facts(documents(ids) & band, ids.shape[-1]))
    assert isinstance(found, Packed)
    return found


def ids_of(*lengths: int) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


# Launches


def random_lengths(rng: random.Random, m: int) -> list[int]:
    """Of documents that fill m positions: many short ones, some of hundreds, multiples of 64 or one of everything."""
    kinds = [
        lambda: rng.randint(1, 10),
        lambda: rng.randint(1, 130),
        lambda: rng.randint(100, 600),
        lambda: 64 * rng.randint(1, 5),
        lambda: rng.choice([1, 63, 64, 65, 128, 129]),
        lambda: m,
    ]
    some = rng.sample(kinds, rng.choice([1, 1, 2, 3]))
    found: list[int] = []
    while sum(found) < m:
        found.append(min(rng.choice(some)(), m - sum(found)))
    return found


def random_band(rng: random.Random) -> Pattern:
    far = rng.choice([0, 3, 40, 64, 100, 128, 200])
    bands = full(), causal(), window(far), causal() & window(far), window(far, 0), window(3, far)
    return rng.choice([*bands, causal() | window(far), causal() | prefix(100)])


def random_case(seed: int, most_pairs: int) -> Case:
    rng = random.Random(seed)
    while True:
        h, b = rng.choice([1, 2, 2, 3, 4]), rng.choice([1, 1, 2, 3])
        h_kv = rng.choice([x for x in range(1, h + 1) if h % x == 0])
        n = m = rng.choice([65, 128, 200, 320, 500, 512, 640, 1000, 1024])
        start = 0
        if rng.random() < 0.3:
            m = rng.choice([64, 100, 256, 512, 700, 1024])
            start = rng.choice([0, m - n, -70, 5, 100, m - 1])
        if b * h * n * b * h_kv * m <= most_pairs:
            break
    rows = [ids_of(*random_lengths(rng, m)) for _ in range(rng.choice([1, b]))]
    labels = torch.randperm(m, generator=torch.Generator().manual_seed(seed))  # in no order
    ids = labels[torch.stack(rows)]
    d, programs = rng.choice([64, 96, 128, 256]), rng.choice([1, 2, 8, 24, 66, 132, 396])
    pattern = packed(ids if rng.random() < 0.5 or len(rows) > 1 else ids[0], random_band(rng))
    return Case(pattern, n, m, d, b, h, h_kv, start, 1, programs, heads_inside=rng.random() < 0.4)


def check(case: Case) -> None:
    assert check_forward(case) in (
        ["forward"],
        ["forward SPLIT", "merge"],
        [],
    )  # none: no query is in a document
    by_keys = " ".join(check_backward(case)).removeprefix("dq").removeprefix(" SPLIT sum").lstrip()
    assert by_keys in ("dkv", "dkv SPLIT sum", "")


@pytest.mark.parametrize("seed", range(15))
def test_random_documents_count_every_pair_once(seed):
    check(random_case(seed, 1_000_000))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(40_000, 40_250))
def test_many_random_documents_count_every_pair_once(seed):
    check(random_case(seed, 4_000_000))


MIXED = ids_of(3, 100, 64, 7, 7, 200, 1, 1, 1, 116)  # 500
# The last documents of the first row and the first one of the second would fit into one tile.
ROWS = torch.stack([torch.arange(500) // 7, MIXED, torch.zeros(500, dtype=torch.long)])


@pytest.mark.parametrize("band", [full(), causal(), window(40), causal() & window(70)], ids=repr)
def test_each_band_counts_every_pair_once(band):
    check(Case(packed(MIXED, band), 500, h=2, programs=24))
    check(Case(packed(ROWS, band), 500, b=3, h=2, h_kv=1, programs=24, heads_inside=True))


def test_rows_that_share_their_ids_share_their_tables():
    pattern = packed(MIXED.expand(3, 500), causal())
    assert pattern.rows == 1 and pattern.data_shape == (3, 1)
    check(Case(pattern, 500, b=3, h=2, programs=24))


def test_a_row_without_an_allowed_pair_has_empty_programs_only():
    """In the first row, no query is in a document with one of the first 8 keys."""
    pattern = packed(torch.stack([torch.arange(320) // 20, torch.arange(320) // 160]), sinks(8))
    allowed = pattern.allowed(200, 320, 100)
    assert not allowed[0].any() and allowed[1].any()
    check(Case(pattern, 200, 320, b=2, h=2, start=100, programs=24))


def test_short_documents_share_a_tile_and_none_is_cut():
    work, covers = packed(ids_of(20, 30, 14, 1, 63, 64, 65, 40, 40), full()).schedule(337, 0, False)
    first = np.cumsum(work.sizes) - work.sizes
    words = work.blocks.numpy()
    assert covers and words[first, 10].tolist() == [0, 64, 128, 192, 256, 257, 297]
    assert (words[first, 9] >> 8).tolist() == [64, 64, 64, 64, 1, 40, 40]
    assert np.add.reduceat(words[:, 8] & 255, first).tolist() == [64, 64, 64, 65, 65, 40, 40]


def cut_of(pattern: Packed, n: int, heads: int, programs: int, by_keys: bool = False, **how) -> WorkSplit:
    place = pattern, n, n, 0, 1
    (step,) = pattern.passes(place, by_keys, torch.device("cpu"), heads, programs).steps
    return split_work(step.work, heads, programs, **how)


def test_tiles_of_one_shape_share_their_masks():
    """Of 32 causal documents of 512, all blocks on the diagonal have one mask, and the others need none."""
    pattern = packed(torch.arange(16384) // 512, causal())
    for by_keys in (False, True):
        cut = cut_of(pattern, 16384, 16, 132, by_keys)
        assert len(cut.masks) == 2 and len(cut.blocks) == 32 * 8 * 9 // 2
        assert int((cut.blocks[:, 9] & TESTED).sum()) == 32 * 8
    pattern = packed(torch.arange(16400) // 100, causal())
    assert (
        len(cut_of(pattern, 16400, 16, 132).masks) == 3
    )  # the first allows nothing; of 64 queries, of the last 36


def test_programs_of_a_batch_row_are_by_its_share_of_the_work():
    """One document of 1024 has 136 blocks, 16 of 64 have 16."""
    pattern = packed(torch.stack([torch.zeros(1024, dtype=torch.long), torch.arange(1024) // 64]), causal())
    cut = cut_of(pattern, 1024, 4, 64)
    begin, end = cut.chunks[:, 0].view(2, -1), cut.chunks[:, 1].view(2, -1)
    is_empty = begin == len(cut.blocks) - 1
    assert cut.programs == 16 and (~is_empty).sum(1).tolist() == [16, 3]
    assert (end > begin).all() and cut.rows == 2


def test_many_heads_have_several_programs_each_so_that_all_multiprocessors_have_work():
    pattern = packed(torch.arange(4096) // 512, causal())
    assert (
        cut_of(pattern, 4096, 256, 396).programs == 9
    )  # 2304 in 6 turns of 396; one each would leave 140 idle
    assert cut_of(pattern, 4096, 16, 396).programs == 24  # in one turn


# One long document and few heads: programs share tiles


def work_of(cut: WorkSplit) -> torch.Tensor:
    """Blocks of each program of a head, where writing the results of a tile or a part of it counts as one."""
    runs = [cut.blocks[a:b, 9] for a, b in cut.chunks[:, :2].tolist()]
    return torch.tensor([len(marks) + int((marks & BEGINS > 0).sum()) for marks in runs])


LONG = {  # documents, heads, programs at a time
    "n = 4096, 1 head": ([4096], 1, 396),
    "n = 4096, 3 heads": ([4096], 3, 264),
    "n = 16384, 1 head": ([16384], 1, 396),
    "n = 16384, 2 heads": ([16384], 2, 396),
    "one long document of many": ([3000] + [64] * 200, 3, 264),
    "documents of several lengths": ([8192, 4096, 2048, 1024, 512, 512], 2, 396),
}


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("band", [full(), causal()], ids=repr)
@pytest.mark.parametrize("by_keys", [False, True])
def test_one_long_document_keeps_all_programs_of_few_heads_busy(name, band, by_keys):
    lengths, heads, programs = LONG[name]
    pattern, n = packed(ids_of(*lengths), band), sum(lengths)
    cut = cut_of(pattern, n, heads, programs, by_keys)
    work, _ = pattern.schedule(n, 0, by_keys)
    balanced = (len(work.blocks) + len(work.sizes)) / (programs // heads)
    assert (
        work_of(cut).max() <= 1.3 * balanced + 2
    )  # a piece is of whole blocks, and shorter ones than 2 are not made
    assert cut.programs <= programs // heads


def test_tiles_are_shared_only_where_merging_pays():
    long = packed(ids_of(4096), causal())
    assert cut_of(long, 4096, 1, 396).slots and cut_of(long, 4096, 8, 396).slots
    assert not cut_of(long, 4096, 16, 396).slots  # 64 blocks of the longest tile, 87 of each program
    assert not cut_of(
        packed(ids_of(512), causal()), 512, 1, 396
    ).slots  # 8 blocks take no longer than merging
    assert not cut_of(packed(torch.arange(4096) // 512, causal()), 4096, 1, 396).slots


@pytest.mark.parametrize("by_rows", [False, True])
def test_shared_tiles_count_every_pair_once(by_rows):
    ids = ids_of(2, 1500, 98)
    case = Case(packed(ids, causal()), 1600, h=2, h_kv=1, programs=132, heads_inside=by_rows)
    assert check_forward(case) == ["forward SPLIT", "merge"]
    assert check_backward(case) == ["dq SPLIT", "sum", "dkv SPLIT", "sum"]


# The model reports faults of these tables


def changed_rows(change):
    def split(*given, **more):
        cut = split_work(*given, **more)
        change(cut)
        return cut

    return mock.patch.object(hopper, "split_work", split)


def test_an_empty_program_that_had_a_member_is_reported():
    def fill(cut):
        cut.blocks[-1, 9] |= 256
        cut.chunks[cut.chunks[:, 0] == len(cut.blocks) - 1, 13] |= 256

    with changed_rows(fill), pytest.raises(LaunchError, match="hopper_forward writes a row of o"):
        check(Case(packed(ROWS, causal()), 500, b=3, h=2, programs=24))


def test_chunks_of_another_row_are_reported():
    def swap(cut):
        cut.chunks.copy_(cut.chunks.view(3, -1, 16).flip(0).reshape(-1, 16))

    with changed_rows(swap), pytest.raises(LaunchError, match=r"o: [0-9]+ pairs are missing"):
        check(Case(packed(ROWS, causal()), 500, b=3, h=2, programs=24))


# Which calls


@pytest.mark.usefixtures("on_hopper")
def test_explain_names_the_kernels_and_counts_the_pairs_of_their_tiles():
    ids, of_512, of_1024 = torch.arange(4096) // 512, 64 * 64 * (8 * 9 // 2), 64 * 64 * (16 * 17 // 2)
    how = {"dtype": BF16, "device": "cuda", "heads": 16, "d_k": 128}
    found = explain(documents(ids) & causal(), 4096, grad=True, **how)
    assert (found.backend, found.variant) == ("triton", "Hopper")
    assert found.computed == 8 * of_512 and found.needed == 8 * 512 * 513 // 2
    assert "faster than sdpa" in found.reason and not found.passes
    found = explain(documents(torch.stack([ids, ids // 2])) & causal(), 4096, batch=2, **how)
    assert found.backend == "triton" and found.rows == 2
    assert found.computed == 8 * of_512 + 4 * of_1024
    found = explain(documents(ids.expand(2, 4096)) & causal(), 4096, batch=2, **how)
    assert found.computed == 2 * 8 * of_512


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("n", [256, 1024, 2048, 16384, 65536])
@pytest.mark.parametrize("heads", [1, 16])
def test_documents_on_hopper_are_faster_than_any_other_backend(n, heads, grad):
    """One document of all positions, too, which FlexAttention computes in 1.4 to 1.7 times the time."""
    for length in (n, 400):
        pattern = documents(torch.arange(n) // length) & causal()
        call = facts(pattern, heads=heads, kv_heads=heads, n=n, grad=grad)
        assert backends.choose(call).backend == "triton", length


OTHERS = {  # what the kernels do not run, and why
    "a compiler or a transform": ({"observed": True}, documents(MIXED)),
    "on meta": ({}, documents(torch.zeros(500, dtype=torch.long, device="meta"))),
    "documents with a bias are not supported": ({"bias": "distance"}, documents(MIXED)),
    "documents with a softcap above 1024.0 are not supported": ({"softcap": 2000.0}, documents(MIXED)),
    "documents with dropout are not supported": ({"dropout_p": 0.1}, documents(MIXED)),
    "documents take float16 or bfloat16, not float32": ({"dtype": torch.float32}, documents(MIXED)),
    "documents take float16 or bfloat16, not float64": ({"dtype": torch.float64}, documents(MIXED)),
    "heads 64 and 32 wide: one width from 33 to 256 is needed": ({"d_v": 32}, documents(MIXED)),
    "heads 32 and 32 wide: one width from 33 to 256 is needed": ({"d_k": 32, "d_v": 32}, documents(MIXED)),
    "heads 512 and 512 wide: one width": ({"d_k": 512, "d_v": 512}, documents(MIXED)),
    "documents need two queries or more, and keys": ({"n": 1}, documents(MIXED)),
    "documents with queries 2 positions apart": ({"at": (0, 2)}, documents(MIXED)),
    "documents with 2³¹ numbers in a batch row": ({"heads": 1 << 17, "kv_heads": 1}, documents(MIXED)),
    "a document is in several places of its batch row: ids that are not contiguous": (
        {}, documents(torch.arange(500) % 7) & causal(),
    ),
    "beside documents, kernels take a band of i − j (causal, a window, or both)": (
        {}, documents(MIXED) & (window(4) | every(8)),
    ),
    "documents(<500 ids>) & every(8): beside documents, kernels": ({}, documents(MIXED) & every(8)),
    "& prefix(100): beside documents, kernels": ({}, documents(MIXED) & prefix(100)),  # then, no keys at all
    "& where(ge) carries data, which no progression describes": ({}, documents(MIXED) & where(torch.ge)),
    "causal() | documents(<500 ids>) carries data": ({}, causal() | documents(MIXED)),
    "documents(<500 ids>) & documents(<500 ids>) carries": ({}, documents(MIXED) & documents(MIXED // 2)),
    "per-row query offsets": ({"row_offsets": True}, documents(MIXED)),
    "it runs on CUDA, not on cpu": ({"device": "cpu"}, documents(MIXED)),
}  # fmt: skip


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("reason", OTHERS)
def test_other_calls_are_refused_in_words(reason):
    more, pattern = OTHERS[reason]
    assert reason in str(Triton().refuses(facts(pattern, **{"n": 500, "m": 500} | more)))


@pytest.mark.usefixtures("on_hopper")
def test_a_named_backend_says_why_it_cannot_run():
    with pytest.raises(
        BackendError, match="cannot run this: a document is in several places of its batch row"
    ):
        backends.choose(facts(documents(torch.arange(4096) % 7), 4096), "triton")


@pytest.mark.usefixtures("on_hopper")
def test_what_is_one_interval_of_keys_runs():
    bands = (
        full(),
        causal(),
        window(8),
        causal() & window(8),
        window(3, 9),
        causal() | prefix(8),
        causal() & sinks(500),
    )
    for band in bands:
        assert Triton().refuses(facts(documents(MIXED) & band, 500)) is None, band
    assert Triton().refuses(facts(documents(MIXED) & causal(), 100, 500, at=250)) is None
    assert (
        Triton().refuses(facts(documents(MIXED) & causal() & sinks(8), 500)) is None
    )  # ends that stay the same


@pytest.mark.usefixtures("on_hopper")
def test_a_band_within_documents_runs_as_beside_them_and_positions_within_do_not():
    beside, within = documents(MIXED) & causal() & window(8), documents(MIXED, causal()) & window(8)
    of_beside, of_within = (
        read(facts(pattern, 500)).schedule(500, 0, False)[0] for pattern in (beside, within)
    )
    assert torch.equal(of_beside.blocks, of_within.blocks)
    assert torch.equal(of_beside.masks.words, of_within.masks.words)
    counted = documents(MIXED, causal() & (window(8) | sinks(4)))
    assert Triton().refuses(facts(counted, 500)) == (
        f"{counted!r}: positions within documents are not supported by these kernels"
    )
    long = documents(torch.arange(4096) // 512, counted.within)
    assert backends.choose(facts(long, 4096, grad=True)).backend == "flex"


def test_without_a_hopper_gpu_flex_runs_documents():
    pattern = documents(torch.arange(4096) // 512) & causal()
    with mock.patch.object(packed_documents, "_is_hopper", lambda device: False):
        assert Triton().refuses(facts(pattern, 4096)) == "documents need a Hopper GPU (compute capability 9)"
        assert backends.choose(facts(pattern, 4096)).backend == "flex"
    if not torch.cuda.is_available():
        assert not packed_documents._is_hopper("cuda")


# What is kept


@pytest.fixture
def empty_caches():
    for cache in (packed_documents._by_tensor, packed_documents._by_contents):
        cache.clear()
    yield
    for cache in (packed_documents._by_tensor, packed_documents._by_contents):
        cache.clear()


def reads():
    """A mock that counts how often ids are turned into tables."""
    return mock.patch.object(packed_documents, "_packed", wraps=packed_documents._packed)


@pytest.mark.usefixtures("on_hopper", "empty_caches")
def test_ids_are_read_once_and_again_after_they_were_changed_in_place():
    ids = torch.arange(512) // 100
    with reads() as made:
        first = read(facts(documents(ids) & causal()))
        assert read(facts(documents(ids) & causal())) is first and made.call_count == 1
        ids[0] = 77
        second = read(facts(documents(ids) & causal()))
        assert second is not first and made.call_count == 2
        assert read(facts(documents(ids) & causal(), grad=True)) is second and made.call_count == 2
        ids[50] = 77  # twice in a row
        assert str(read(facts(documents(ids) & causal()))).endswith("not contiguous") and made.call_count == 3
        assert str(read(facts(documents(ids) & causal()))).endswith("not contiguous") and made.call_count == 3
    assert isinstance(first, Packed) and isinstance(second, Packed)
    assert first.first[0, 99] == 0 and second.first[0, 99] == 1  # what was read stays as it was
    assert torch.equal(first.left.ids, torch.arange(512) // 100)


@pytest.mark.usefixtures("on_hopper", "empty_caches")
def test_equal_ids_in_another_tensor_share_the_tables_and_other_bands_do_not():
    ids = torch.arange(512) // 100
    first = read(facts(documents(ids) & causal()))
    assert read(facts(documents(ids.clone()) & causal())) is first
    assert read(facts(documents(ids) & window(8))) is not first
    with torch.inference_mode():  # where changes are not counted
        fresh = ids.clone()
        assert read(facts(documents(fresh) & causal())) is first
        fresh[:100] = 9
        assert read(facts(documents(fresh) & causal())) is not first


@pytest.mark.usefixtures("on_hopper", "empty_caches")
def test_ids_are_not_read_while_a_graph_is_captured_unless_they_were_before():
    known = torch.arange(512) // 100
    found = read(facts(documents(known)))
    with (
        mock.patch.object(torch.Tensor, "is_cuda", True),
        mock.patch.object(packed_documents.compat, "stream_is_capturing", lambda: True),
    ):
        assert read(facts(documents(known))) is found
        reason = read(facts(documents(known.clone())))
    assert reason == "the ids of documents cannot be read while a CUDA graph is captured; call it once before"


def launches_of(call: CallFacts) -> Packed:
    """Prepare forward and backward of a call, as `attention` would."""
    found = read(call)
    assert isinstance(found, Packed)
    q, _, v = call.like()
    like = contiguous(call.batch, call.heads, call.n, call.d_k)
    made = task(q, v, Options(found, *call.offset, call.factor))
    with modeled_gpu(24):
        host.prepared_forward(CallLayout(made, (like,) * 3, BF16, torch.device("cpu")))
        host.prepared_backward(CallLayout(made, (like,) * 5, BF16, torch.device("cpu")))
    return found


@pytest.fixture
def unchecked():
    """Without checks of shapes, which keep the objects that they have checked."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    gc.enable()
    jaxtyping.config.update("jaxtyping_disable", before)


@pytest.mark.usefixtures("on_hopper", "empty_caches", "unchecked")
def test_new_ids_at_each_call_fill_no_cache_and_are_dropped():
    caches = device_passes, with_masks, one_launch_tables, cuda_call._task
    before = len(PREPARED), [cache.cache_info().currsize for cache in caches]
    found = []
    gc.disable()
    for seed in range(2 * packed_documents.MAX_CACHED_IDS):
        ids = torch.arange(512) // (seed + 5)
        found.append(weakref.ref(launches_of(facts(documents(ids) & causal()))))
    assert (len(PREPARED), [cache.cache_info().currsize for cache in caches]) == before
    assert (
        sum(x() is not None for x in found) == packed_documents.MAX_CACHED_IDS
    )  # at once: they are in no cycle
    assert (
        len(packed_documents._by_tensor)
        == len(packed_documents._by_contents)
        == packed_documents.MAX_CACHED_IDS
    )


@pytest.mark.usefixtures("on_hopper", "empty_caches")
def test_a_second_call_with_the_same_ids_prepares_nothing():
    call = facts(documents(torch.arange(512) // 100) & causal())
    kept = len(launches_of(call).cache)
    with mock.patch.object(packed_documents, "_schedule", side_effect=AssertionError):
        assert len(launches_of(call).cache) == kept


# Repeated calls


def calls_of(run) -> int:
    """How many Python functions a call runs."""
    count = 0

    def seen(frame, event, arg):
        nonlocal count
        count += event == "call"

    sys.setprofile(seen)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def layers(pattern: Callable[[], Pattern], backward: bool) -> int:
    """Python calls of the second layer of a model, as one GPU sees them; the first one prepares the launches."""
    q, k, v = (torch.zeros(1, 4, 512, 64, dtype=BF16, requires_grad=backward) for _ in range(3))

    def layer():
        o = attention(q, k, v, pattern())
        return torch.autograd.grad(o, (q, k, v), torch.zeros_like(q)) if backward else o

    with counting_gpu():
        layer()
        layer()
        return calls_of(layer)


@pytest.mark.usefixtures("on_hopper", "empty_caches", "unchecked")
@pytest.mark.parametrize("backward", [False, True])
def test_a_repeated_call_takes_the_direct_path_of_calls_without_data(backward):
    ids, plain = torch.arange(512) // 100, causal() & window(256)
    known = documents(ids) & causal()
    without_data = layers(lambda: plain, backward)
    assert layers(lambda: known, backward) <= 1.3 * without_data
    composed = calls_of(lambda: documents(ids) & causal())  # as each layer of a model may do
    assert layers(lambda: documents(ids) & causal(), backward) - composed <= 1.3 * without_data


@pytest.mark.usefixtures("on_hopper", "empty_caches", "unchecked")
def test_a_repeated_call_reads_ids_again_that_were_written():
    ids = torch.arange(512) // 100
    pattern, q = documents(ids) & causal(), torch.zeros(1, 4, 512, 64, dtype=BF16)
    with counting_gpu() as programs, reads() as made:
        attention(q, q, q, pattern)
        attention(q, q, q, pattern)
        assert (len(programs), made.call_count) == (1, 1)
        ids[:] = torch.arange(512) // 50
        attention(q, q, q, pattern)
        attention(q, q, q, documents(ids) & causal())
        assert (len(programs), made.call_count) == (2, 2)


@pytest.mark.usefixtures("on_hopper", "empty_caches", "unchecked")
def test_tables_that_a_cuda_graph_replays_stay_when_their_ids_are_dropped():
    q = torch.zeros(1, 4, 512, 64, dtype=BF16)

    def call(length: int) -> weakref.ref[Program]:
        attention(q, q, q, documents(torch.arange(512) // length) & causal())
        return weakref.ref(programs[-1])

    with counting_gpu() as programs, mock.patch.object(prepared, "REPLAYED", set()):
        dropped = call(100)
        call(101)
        with mock.patch.object(prepared, "_is_capturing", lambda: True):
            replayed = call(101)
        programs.clear()
        for cache in (packed_documents._by_tensor, packed_documents._by_contents, PREPARED_BY_DATA):
            cache.clear()
        assert dropped() is None and replayed() is not None


class Kernel:
    """In place of a kernel of Triton: what it is compiled for, and how often it was launched."""

    arg_names = "X", "TABLE", "n", "S"

    def __init__(self):
        self.compiled, self.launched = 0, 0

    def __getitem__(self, grid):
        def run(*given, **options):
            self.compiled += bool(options)
            self.launched += 1
            return self if options else None

        return run

    run, function, packed_metadata = None, None, None


def test_launches_with_other_tables_share_a_compiled_kernel():
    kernel, config = Kernel(), Config(64, 64, 4, 1)
    x, tables = torch.zeros(8), (torch.zeros(4, dtype=torch.int32), torch.zeros(12, dtype=torch.int32))

    def launch(programs, *given, n=5, S=1):
        Launch(kernel, programs, config, n, S=S)(*given)
        return kernel.compiled

    with mock.patch.object(prepared, "current_device", lambda: 0):
        assert launch(3, x, tables[0]) == launch(9, x, tables[1]) == 1
        others = [{"n": 6}, {"S": 2}]
        assert [launch(3, x, tables[0], **more) for more in others] == [2, 3]
        assert launch(3, x.double(), tables[0]) == 4 and launch(3, x[1:], tables[0]) == 5
        assert launch(3, x, tables[1]) == 5 and kernel.launched == 7


@pytest.mark.usefixtures("on_hopper")
def test_a_call_computes_with_the_ids_that_were_read():
    """What `attention` passes on: the pattern with a copy of the ids, in a task of its own."""
    ids = torch.arange(512) // 100
    made = Triton().prepare(facts(documents(ids) & causal()))
    given = []
    q = torch.randn(1, 4, 512, 64)
    call = call_of(q, q, q, documents(ids) & causal(), return_lse=True)
    with (
        mock.patch("regard.engine.cuda.backend.task", lambda q, v, options, extras: given.append(options)),
        mock.patch.object(host, "forward", lambda q, k, v, task, extras: (q, q[..., 0].float())),
    ):
        o, lse = made.run(call)
    assert isinstance(given[0].pattern, Packed) and o.shape == q.shape and lse.shape == q.shape[:3]
    assert made.joins_sink
    assert np.array_equal(
        given[0].pattern.allowed(512).numpy(), (documents(ids) & causal()).allowed(512).numpy()
    )

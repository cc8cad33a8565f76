"""What data or a function decide, by FlexAttention: its blocks, what it refuses, and its forward on the CPU."""

import inspect
import shutil
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import regard as rg
from regard import pattern as words
from regard.engine import flex
from regard.engine.attention import attention
from regard.engine.backends import TABLE, choose
from regard.engine.call import CallFacts
from regard.engine.explain import explain
from regard.errors import BackendError
from regard.pattern import (
    BlockGrid,
    causal,
    classification,
    documents,
    every,
    full,
    lengths,
    positions,
    prefix,
    selected,
    sinks,
    strided,
    where,
    window,
)

IDS = torch.tensor([0] * 5 + [1] * 9 + [2] * 3 + [1] * 2)
M = len(IDS)
EACH = torch.stack([IDS, IDS.flip(0)])


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(classification, "BLOCK", 4)
    monkeypatch.setattr(classification, "CHUNK_PAIRS", 2 * M * 4)  # in chunks of rows


def by_blocks(table, n, m, size=4):
    """any and all of each block of a dense table; a block that ends outside is never whole."""
    table = table if table.dim() == 4 else table[None, None]
    x, y = -(-n // size), -(-m // size)
    some = torch.zeros(len(table), x, y, dtype=torch.bool)
    whole = some.clone()
    for i in range(x):
        for j in range(y):
            cell = table[:, 0, i * size : (i + 1) * size, j * size : (j + 1) * size]
            some[:, i, j] = cell.flatten(1).any(1)
            whole[:, i, j] = cell.flatten(1).all(1) & (cell.shape[1:] == (size, size))
    return some, whole


WORDS = [
    full(),
    causal(),
    window(3, 1),
    window(6),
    sinks(6),
    prefix(7),
    words.blocks(5),
    every(3),
    strided(4),
    where(lambda i, j: (i * j) % 7 < 3),
    lengths(torch.tensor([M, 6])),
    documents(IDS),
    documents(EACH),
]
COUNTED = [
    documents(IDS, causal() & every(2)),
    documents(EACH, sinks(5) | window(2)),
    documents(EACH, prefix(4)),
]
some_words = st.sampled_from([*WORDS, *COUNTED])
pairs = st.tuples(some_words, some_words, st.sampled_from("&|-"))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(pairs, st.integers(1, M), st.sampled_from([None, 0, -3, 7]))
def test_no_block_with_a_pair_is_skipped_and_none_with_a_gap_is_whole(small_blocks, pair, n, at):
    a, b, sign = pair
    pattern = a & b if sign == "&" else a | b if sign == "|" else a - b
    i = positions(pattern, n, M, at)
    found = BlockGrid(i[None], M).classify(pattern)
    some, whole = by_blocks(pattern.allowed(n, M, at), n, M)
    assert not (some & found.none).any(), "a block with a pair is skipped"
    assert not (found.all & ~whole).any(), "a block with a gap is left unmasked"


@pytest.mark.parametrize("word", WORDS, ids=repr)
def test_blocks_of_one_word_are_exact(small_blocks, word):
    found = BlockGrid(positions(word, M, M)[None], M).classify(word)
    some, whole = by_blocks(word.allowed(M), M, M)
    contiguous = not isinstance(word, documents)  # ids that come back are judged by their range
    assert torch.equal(found.all.expand(whole.shape), whole)
    assert not contiguous or torch.equal(~found.none.expand(some.shape), some)


def test_offsets_and_lengths_of_each_row_are_read(small_blocks):
    at, kept = torch.tensor([0, 9]), torch.tensor([M, 6])
    i = positions(causal(), 7, M, at)
    found = BlockGrid(i, M).classify(causal() & lengths(kept))
    some, whole = by_blocks((causal() & lengths(kept)).allowed(7, M, at), 7, M)
    assert torch.equal(~found.none, some) and torch.equal(found.all, whole)


def test_contiguous_documents_skip_the_pairs_between_documents():
    ids = torch.arange(4096) // 512
    assert flex.visited(documents(ids), 4096, 4096, 0, 1) == 8 * 512**2
    assert flex.visited(documents(ids) & causal(), 4096, 4096, 0, 1) == 8 * (4 * 5 // 2) * 128**2
    with torch.device("meta"):  # blocks are counted where the ids are, not on another device
        assert flex.visited(documents(ids), 4096, 4096, 0, 1) == 8 * 512**2


REFUSED = [
    ({"bias": torch.zeros(3, 3)}, "a bias is added to the scores; use backend='sdpa'"),
    ({"dropout_p": 0.5}, "it has no dropout; use backend='sdpa'"),
    ({"return_lse": True}, "on the CPU FlexAttention gives no log-sum-exp; use backend='reference'"),
    ({"scale": float("inf")}, "scale=inf has no softmax; use backend='reference'"),
]


@pytest.mark.parametrize(("more", "text"), REFUSED, ids=[text[:30] for _, text in REFUSED])
def test_flex_by_name_refuses_what_it_cannot(more, text):
    q = torch.randn(1, 1, 3, 16)
    with pytest.raises(BackendError) as e:
        attention(q, q, q, where(torch.ge), backend="flex", **more)
    assert str(e.value) == f"backend='flex' cannot run this: {text}"


def test_flex_on_the_cpu_says_that_it_does_not_train_and_what_does():
    q = torch.randn(1, 1, 3, 16, requires_grad=True)
    with pytest.raises(BackendError) as e:
        attention(q, q, q, where(torch.ge), backend="flex")
    assert str(e.value) == (
        "backend='flex' cannot run this: on the CPU FlexAttention has no backward, "
        "which torch.no_grad() avoids; use backend='sdpa'"
    )


def facts(pattern, n=4096, device="cuda", dtype=torch.bfloat16, **more):
    return CallFacts(pattern, n, n, heads=16, kv_heads=16, dtype=dtype, device=device, **more)


def test_auto_takes_flex_on_cuda_for_data_and_functions_that_are_long():
    fn, ids = where(torch.ge), documents(torch.arange(4096) // 512)
    for pattern in (fn, ids, ids & causal(), fn | window(3)):
        choice = choose(facts(pattern, grad=True))
        assert (choice.backend, choice.variant) == ("flex", "blocks of 128 × 128")
    assert choose(facts(fn, return_lse=True)).backend == "flex"
    assert choose(facts(fn, n=512)).backend == "sdpa"
    assert choose(facts(fn, device="cpu", dtype=torch.float32)).backend == "sdpa"
    assert choose(facts(fn, dtype=torch.float64)).backend == "sdpa"
    assert TABLE["flex"].refuses(facts(fn, n=77)) == (
        "FlexAttention has no kernel for every n below 128, here 77"
    )
    assert TABLE["flex"].refuses(facts(fn, dtype=torch.float64)) == (
        "FlexAttention takes float32, float16 or bfloat16, not float64"
    )
    assert (
        TABLE["flex"].refuses(facts(fn, device="mps"))
        == "FlexAttention runs on CUDA and on the CPU, not on mps"
    )
    explained = explain(ids, 4096, device="cuda", dtype=torch.bfloat16)
    assert (explained.backend, explained.computed) == ("flex", 8 * 512**2)


def test_auto_takes_flex_for_lists_by_batch_row_and_a_mask_for_lists_by_head():
    by_row = selected(torch.zeros(2, 32, 1, dtype=torch.long), 128)
    by_head = selected(torch.zeros(2, 16, 32, 1, dtype=torch.long), 128)
    assert choose(facts(causal() & by_row, batch=2)).backend == "flex"
    assert choose(facts(causal() & by_row, batch=2)).computed() == 2 * 4096 * 128
    assert choose(facts(causal() & by_head, batch=2)).backend == "sdpa"
    assert TABLE["flex"].refuses(facts(by_head, batch=2)) == "the data of the pattern differ by head"


def test_a_mask_is_created_anew_when_its_data_have_changed():
    reach = torch.tensor(2)

    def near(i, j):
        return abs(i - j) <= reach

    pattern = where(near)
    before = pattern.state()
    assert before == where(near).state() != (pattern & causal()).state()
    reach += 1
    assert pattern.state() != before
    held = {"reach": 3}
    unnoticed = where(lambda i, j: abs(i - j) <= held["reach"]), where(torch.ge)  # changes of these
    assert all(x.state() is None for x in unnoticed)


def test_grids_are_left_to_the_kernels_that_read_their_lines():
    more = {"device": "cuda", "dtype": torch.bfloat16}
    found = rg.explain(rg.neighborhood((64, 64), 31), 4096, **more)
    assert found.backend == "triton" and found.computed < 31 * 64 * 4096 * 1.5
    assert rg.explain(rg.neighborhood((64, 64), 31) | rg.sinks(4), 4096, **more).backend == "flex"


def test_grids_in_float32_are_estimated_in_float32_by_both():
    grid = rg.neighborhood((32, 128), (15, 31), border="shifted")
    more = {"dtype": torch.float32, "device": "cuda", "heads": 2, "kv_heads": 1, "d_k": 40, "d_v": 40}
    assert choose(CallFacts(grid, 4096, 4096, **more)).backend == "triton"


compiled = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "c++"))), reason="inductor needs a C compiler on the CPU"
)


@compiled
@pytest.mark.compiled
def test_flex_on_the_cpu_gives_what_a_mask_gives():
    """Grouped heads, narrow ones, an empty row, lengths over NaN, ids that come back; a second call remembers.

    Ids and lengths are columns of tables: Inductor does not compile a captured vector whose stride is not 1.
    """
    g = torch.Generator().manual_seed(0)
    ids = torch.cat([torch.zeros(130), torch.ones(9), torch.full((60,), 2), torch.ones(5)]).long()
    m, ids = len(ids), torch.stack([ids, ids], 1)[:, 0]
    q, k, v = (torch.randn(2, h, m, d, generator=g) for h, d in ((4, 5), (2, 5), (2, 3)))
    pattern = documents(ids) & where(lambda i, j: i != 140) & ~window(0)
    kept = torch.tensor([[0, m], [0, 150]])  # visible from key 0 on: only the column of ends is read
    k[1, :, 150:], v[1, :, 150:] = torch.nan, torch.nan
    expected = attention(q, k, v, pattern, lengths=kept, backend="sdpa")
    for _ in range(2):
        got = attention(q, k, v, pattern, lengths=kept, backend="flex")
        assert torch.allclose(got, expected, atol=1e-5)
    assert not got[:, :, 140].any()


@compiled
@pytest.mark.compiled
@pytest.mark.long
def test_flex_on_the_cpu_has_a_softcap_of_its_own_in_each_call():
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 140, 16, generator=g) for _ in range(3))
    pattern = documents(torch.arange(140) // 60)
    for softcap in (0.5, 2.0):
        got, expected = (
            attention(q, k, v, pattern, softcap=softcap, backend=name) for name in ("flex", "reference")
        )
        assert torch.allclose(got, expected, atol=1e-5)


@compiled
@pytest.mark.compiled
@pytest.mark.long
@pytest.mark.parametrize("each", [False, True])
def test_flex_on_the_cpu_after_a_cache_and_from_an_offset_a_row(each):
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, n, 16, generator=g) for n in (37, 150, 150))
    pattern = where(lambda i, j: (i + j) % 3 != 0) & (
        causal() | documents(torch.stack([torch.arange(150) // 40] * 2))
    )
    at = torch.tensor([5, 90]) if each else None
    got = attention(q, k, v, pattern, at=at, backend="flex")
    assert torch.allclose(got, attention(q, k, v, pattern, at=at, backend="sdpa"), atol=1e-5)


@compiled
@pytest.mark.compiled
@pytest.mark.long
@pytest.mark.parametrize("b", [1, 2])
def test_flex_on_the_cpu_reads_ids_and_lengths_that_are_columns_of_a_table(b):
    """Inductor does not compile a captured vector whose stride is not 1, even if it holds one number."""
    g = torch.Generator().manual_seed(0)
    q = torch.randn(b, 2, 7, 16, generator=g).bfloat16()
    pattern = documents((torch.arange(14) // 6)[::2]) | words.lengths(torch.tensor([[0, 4], [0, 6]])[:b, 1])
    rows = torch.tensor([[0, 3], [0, 5]])[:b]  # visible from key 0 on: only the column of ends is read
    got, expected = (
        attention(q, q, q, pattern, lengths=rows, backend=name) for name in ("flex", "reference")
    )
    assert torch.allclose(got, expected, atol=0.03)


@pytest.mark.compiled
@pytest.mark.parametrize("parts", [(0, 0, 0), (0, 1, 1), (0, 1, 2)], ids=str)
@pytest.mark.parametrize(
    "outer", [lambda f: f, partial(torch.compile, dynamic=False)], ids=["eager", "compiled"]
)
def test_flex_on_the_cpu_takes_q_k_and_v_that_share_memory(outer, parts):
    rows = torch.randn(3, 1, 2, 7, 16, generator=torch.Generator().manual_seed(0))
    pattern = where(torch.ge)

    def run(rows, backend):
        rows = rows.unbind()
        q, k, v = (rows[i] for i in parts)
        return attention(q, k, v, pattern, backend=backend)

    with torch.no_grad():
        got, expected = outer(run)(rows, "flex"), run(rows, "reference")
    assert torch.allclose(got, expected, atol=1e-6)


def test_what_pytorch_does_not_compile_is_an_error_that_names_the_backend(monkeypatch):
    from torch._dynamo.exc import BackendCompilerFailed

    def fail(*_, **__):
        raise BackendCompilerFailed(compile, AssertionError("all the buffers"), inspect.currentframe())

    monkeypatch.setattr(flex, "_compiled", lambda kind: fail)
    q = torch.randn(1, 1, 3, 16)
    with pytest.raises(BackendError) as e:
        attention(q, q, q, where(torch.ge), backend="flex")
    assert str(e.value) == (
        "backend='flex' cannot run this: PyTorch's compiler fails (backend='compile' raised: AssertionError: all the "
        "buffers); use backend='auto'"
    )
    assert isinstance(e.value.__cause__, BackendCompilerFailed)
    monkeypatch.setattr(flex, "_compiled", lambda kind: lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # an error of another kind stays what it is
        attention(q, q, q, where(torch.ge), backend="flex")

"""Packed documents on the CPU: the formula and its gradients, Σ length² pairs, nothing stale, nothing hidden read."""

from math import inf, nan

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from regard.engine.attention import attention
from regard.engine.cpu import documents as packed
from regard.engine.explain import explain
from regard.errors import BackendError, ShapeError
from regard.pattern import (
    blocks,
    causal,
    data,
    dilated,
    documents,
    every,
    full,
    prefix,
    rows,
    sinks,
    strided,
    tree,
    where,
    window,
)

B, H, H_KV, D_K, D_V = 2, 4, 2, 5, 3
f64 = torch.float64
RESTS = (full(), causal(), window(3), causal() & window(9), causal() & (dilated(2, 3) | strided(4)))


def ids_of(*counts: int) -> torch.Tensor:
    """Documents of these lengths, one behind the other; their ids go down, as ids may."""
    return torch.cat([torch.full((c,), -3 * i) for i, c in enumerate(counts)])


def qkv(n: int, m: int, seed: int = 0, dtype: torch.dtype = f64) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = (B, H, n, D_K), (B, H_KV, m, D_K), (B, H_KV, m, D_V)
    return [torch.randn(s, generator=g, dtype=f64).to(dtype).requires_grad_() for s in shapes]


def outputs_and_gradients(backend: str, inputs, pattern, **more):
    o, lse = attention(*inputs, pattern, backend=backend, return_lse=True, **more)
    seen = lse > -inf
    g = torch.Generator().manual_seed(9)
    towards = torch.randn(o.shape, generator=g, dtype=f64), torch.randn(lse.shape, generator=g, dtype=f64)
    total = (o * towards[0]).sum() + (lse.masked_fill(~seen, 0.0) * towards[1]).sum()
    return [o, lse, *torch.autograd.grad(total, inputs)]


def assert_same(mine, theirs, atol=1e-11):
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a == -inf, b == -inf)
        assert torch.allclose(a.nan_to_num(neginf=0.0), b.nan_to_num(neginf=0.0), rtol=0, atol=atol)


counts = st.lists(st.sampled_from([1, 2, 3, 7, 7, 7, 20, 60, 150]), min_size=1, max_size=9)


@settings(max_examples=25)
@given(counts, st.sampled_from(RESTS), st.booleans(), st.booleans(), st.data())
def test_documents_of_any_lengths_give_the_formula_and_its_gradients(lengths, rest, each_row, hides, data):
    ids = ids_of(*lengths)
    ids = torch.stack([ids, ids_of(*data.draw(st.permutations(lengths)))]) if each_row else ids
    m = ids.shape[-1]
    n = data.draw(st.integers(1, m))
    more = {"lengths": torch.tensor([m, data.draw(st.integers(0, m))])} if hides else {}
    pattern = documents(ids) & rest
    inputs = qkv(n, m)
    mine = outputs_and_gradients("tiles", inputs, pattern, **more)
    assert_same(mine, outputs_and_gradients("reference", inputs, pattern, **more))


COUNTED = (  # patterns that name positions
    sinks(2),
    causal() & (window(2) | sinks(1)),
    causal() & (window(3) | every(4, 1)),
    causal() | prefix(5),
    blocks(8),
    (rows(3, 1) | window(1)) - every(5),
    causal() & (dilated(2, 3) | sinks(1) | every(16)),
)


def each_alone(row_ids: torch.Tensor, within) -> torch.Tensor:
    """A table with the pattern of each document by itself on its diagonal."""
    _, lengths = row_ids.unique_consecutive(return_counts=True)
    return torch.block_diag(*(within.allowed(length) for length in lengths.tolist())).bool()


@settings(max_examples=40)
@given(counts, st.sampled_from(COUNTED), st.sampled_from(RESTS), st.booleans(), st.booleans(), st.data())
def test_positions_within_count_from_the_beginning_of_each_document(
    lengths, within, rest, each_row, hides, data
):
    ids = ids_of(*lengths)
    ids = torch.stack([ids, ids_of(*data.draw(st.permutations(lengths)))]) if each_row else ids
    m = ids.shape[-1]
    n = data.draw(st.integers(1, m))
    at = data.draw(st.integers(0, m - n))
    terms = (
        {"softcap": 2.0, "sink_logits": torch.linspace(-1, 1, H, dtype=f64)}
        if data.draw(st.booleans())
        else {}
    )
    more = {"at": at, "lengths": torch.tensor([m, data.draw(st.integers(0, m))])} if hides else {"at": at}
    table = torch.stack([each_alone(row, within) for row in ids.view(-1, m)])[:, None, at : at + n]
    inputs, tile = qkv(n, m), data.draw(st.sampled_from([packed.MAX_TILE, 24]))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(packed, "MAX_TILE", tile)  # longer documents are planned
        packed._layouts.cache_clear()
        pattern = rest & documents(ids, within)
        assert torch.equal(
            pattern.allowed(n, m, at).view(-1, n, m), (table & rest.allowed(n, m, at)).view(-1, n, m)
        )
        mine = outputs_and_gradients("tiles", inputs, pattern, **more, **terms)
        packed._layouts.cache_clear()
    table = table & rest.allowed(n, m, at)
    assert_same(mine, outputs_and_gradients("reference", inputs, table, **more, **terms))


def test_a_long_document_computes_the_keys_of_its_pattern():
    ids = ids_of(1500, 3, 1500, 900)
    within, m = causal() & (window(32) | sinks(4)), len(ids)
    explained = explain(documents(ids, within), m)
    assert (explained.backend, explained.variant) == ("tiles", "packed documents")
    assert explained.needed == 2 * within.count(1500) + within.count(3) + within.count(900)
    assert explained.computed < 5 * explained.needed < m * m / 10
    assert (
        explain(documents(ids % 2, within), m).backend == "sdpa"
    )  # a document in several places: by a table


WITH_POSITIONS = documents(ids_of(40, 40, 7), causal() & (window(2) | sinks(1)))


def total(inputs, of, backend):
    return lambda q: attention(q, *inputs[1:], of, backend=backend).square().sum()


def test_every_kind_of_derivative_of_documents_with_positions():
    pattern, inputs = WITH_POSITIONS, qkv(87, 87)
    table = pattern.allowed(87)

    def penalty(of, backend):
        (g,) = torch.autograd.grad(total(inputs, of, backend)(inputs[0]), inputs[0], create_graph=True)
        return torch.autograd.grad(g.square().sum(), inputs)

    assert_same(penalty(pattern, "tiles"), penalty(table, "reference"))
    q, by_tiles = inputs[0].detach(), torch.func.grad(total(inputs, pattern, "tiles"))
    first = by_tiles(q)
    assert_same([first], [torch.func.grad(total(inputs, table, "reference"))(q)])
    assert_same([by_tiles(q)], [first], atol=0)  # nothing of a transform was kept


@pytest.mark.compiled
@pytest.mark.parametrize("backend", ["auto", "tiles"])
def test_documents_with_positions_run_compiled(backend):
    inputs = qkv(87, 87)
    q, exact = inputs[0].detach(), total(inputs, WITH_POSITIONS.allowed(87), "reference")
    torch.compiler.reset()
    compiled = torch.compile(total(inputs, WITH_POSITIONS, backend), backend="aot_eager", fullgraph=True)
    assert_same([compiled(q)], [exact(q)])


TWO_CHAINS = tree(torch.tensor([*range(-1, 89), -1, *range(90, 179)]))
TWO_DOCUMENTS = documents(ids_of(90, 90))


@pytest.mark.parametrize(
    "pattern",
    [TWO_DOCUMENTS & causal(), TWO_DOCUMENTS & window(20), TWO_CHAINS],
    ids=["causal", "window", "tree"],
)
def test_queries_from_inside_a_document_into_the_next(pattern):
    """Of each document there are 45 queries and 90 keys: the last queries of the first, the first of the second."""
    inputs = qkv(90, 180)
    mine = outputs_and_gradients("tiles", inputs, pattern, at=45)
    assert_same(mine, outputs_and_gradients("reference", inputs, pattern, at=45))


@pytest.mark.parametrize("rest", [causal(), causal() & window(20)], ids=repr)
def test_a_long_document_has_the_layout_that_it_would_have_alone(rest, monkeypatch):
    monkeypatch.setattr(packed, "MAX_TILE", 64)
    ids = ids_of(300, 3, 270)
    pattern, m = documents(ids) & rest, len(ids)
    assert packed.layouts(pattern, m, m)[0].computed < 300**2 + 270**2
    inputs = qkv(m, m)
    assert_same(
        outputs_and_gradients("tiles", inputs, pattern), outputs_and_gradients("reference", inputs, pattern)
    )


def test_a_causal_document_of_middle_length_is_two_triangles_and_a_square():
    pattern = documents(ids_of(389, 389, 3)) & causal()
    (laid,) = packed.layouts(pattern, 781, 781)
    shapes = [(group.tiles, group.rows, group.keys, group.triangle) for group in laid.groups[:3]]
    assert shapes == [(2, 194, 194, True), (2, 195, 195, True), (2, 195, 194, False)]
    inputs = qkv(781, 781)
    assert_same(
        outputs_and_gradients("tiles", inputs, pattern), outputs_and_gradients("reference", inputs, pattern)
    )


def test_n_positions_cost_the_sum_of_squares_and_few_calls():
    ids = ids_of(*[128] * 12)
    explained = explain(documents(ids), len(ids))
    assert (explained.backend, explained.computed, explained.needed) == ("tiles", 12 * 128**2, 12 * 128**2)
    assert explained.variant == "packed documents" and "× faster than sdpa" in explained.reason
    (laid,) = packed.layouts(documents(ids), len(ids), len(ids))
    assert len(laid.groups) == 1  # all of one length: one batch of tiles
    (short,) = packed.layouts(documents(ids_of(*[3, 5] * 16)), 128, 128)
    assert len(short.groups) == 1  # 32 short ones share a tile
    rows = torch.stack([ids, ids.flip(0)])
    assert explain(documents(rows), len(ids)).needed == 2 * 12 * 128**2  # pairs of all batch rows


def test_auto_packs_what_follows_one_another_and_masks_what_does_not():
    ids = ids_of(*[128] * 16)
    assert explain(documents(ids) & causal(), 2048).backend == "tiles"
    assert explain(documents(ids % 5), 2048).backend == "sdpa"
    by_tables = explain(documents(ids) & every(4), 2048)  # every() reads where a document begins
    assert (by_tables.backend, by_tables.variant) == ("tiles", "gathered keys")
    assert explain(documents(ids_of(3, 4)), 7).backend == "sdpa"  # too short to gain


@settings(max_examples=25)
@given(counts, st.booleans(), st.booleans(), st.data())
def test_trees_run_chain_by_chain(chains, each_row, hides, data):
    def drawn():
        parents = list(range(-1, sum(chains) - 1))
        for end in range(1, len(chains)):
            begin = sum(chains[:end])
            parents[begin] = data.draw(st.integers(-1, begin - 1))
        return parents

    m = sum(chains)
    pattern = tree(torch.tensor([drawn(), drawn()] if each_row else drawn()))
    n = data.draw(st.integers(1, m))
    more = (
        {"lengths": torch.tensor([[0, m], sorted(data.draw(st.integers(0, m)) for _ in "ab")])}
        if hides
        else {}
    )
    inputs = qkv(n, m)
    assert explain(*inputs, pattern, return_lse=True, **more).variant == "packed documents"
    mine = outputs_and_gradients("tiles", inputs, pattern, **more)
    assert_same(mine, outputs_and_gradients("reference", inputs, pattern, **more))
    assert_same(mine, outputs_and_gradients("tiles", inputs, causal() & pattern, **more), atol=0)


def test_a_prompt_is_read_once_by_all_its_answers():
    parents = torch.arange(-1, 1023)
    parents[256::96] = 255
    (layout,) = packed.layouts(tree(parents), 1024, 1024)
    shapes = [(g.tiles, g.row, g.rows, g.key, g.keys, g.triangle) for g in layout.groups]
    assert shapes == [
        (1, 0, 352, 0, 352, True),  # the first answer continues the prompt
        (7, 352, 96, 352, 96, True),
        (1, 352, 672, 0, 256, False),
    ]
    comb = torch.tensor(
        [-1] + [(i - 1) // 2 * 2 for i in range(1, 1024)]
    )  # a side branch at every second node
    assert packed.layouts(tree(comb), 1024, 1024) is None


def test_only_chains_with_queries_are_followed_and_not_past_the_limit(monkeypatch):
    """Followed to the root, every chain of a comb took a time quadratic in its keys, for eight queries."""
    followed = []
    search = data.bisect_right
    monkeypatch.setattr(data, "bisect_right", lambda *x: followed.append(x) or search(*x))
    comb = torch.tensor([-1] + [(i - 1) // 2 * 2 for i in range(1, 2048)])
    assert packed.layouts(tree(comb), 8, 2048) is None
    assert len(followed) <= packed.MAX_RECTANGLES + 1
    followed.clear()
    assert packed.layouts(tree(comb), 8, 2048, at=0) is not None  # a few chains, near the root
    assert len(followed) <= 8 * 8


REFUSED = [
    (
        documents(torch.tensor([0, 1, 0])),
        {},
        "the ids of a document do not follow one another, or queries skip some; use backend='sdpa'",
    ),
    (
        documents(ids_of(3)) & every(2),
        {},
        "documents(<3 ids>) & every(2) is not documents(ids, …), or that and words that read i − j; "
        "use backend='sdpa'",
    ),
    (
        tree(torch.arange(-1, 2)),
        {"at": (0, 2)},
        "the tree has many branches, or queries skip some; use backend='sdpa'",
    ),
    (documents(ids_of(3)), {"dropout_p": 0.5}, "it has no dropout with documents; use backend='sdpa'"),
    (
        documents(ids_of(3)),
        {"bias": torch.zeros(3, 3)},
        "a bias tensor is n × m already; use backend='sdpa'",
    ),
    (
        documents(ids_of(3)),
        {"at": torch.tensor([0, 1])},
        "per-row query offsets (`at` as a tensor) need a pattern without data, no bias and no compiler; "
        "use backend='sdpa'",
    ),
    (
        torch.eye(3, dtype=torch.bool),
        {},
        "a bool tensor is not a pattern; declare one; use backend='sdpa'",
    ),
]


@pytest.mark.parametrize(("pattern", "more", "text"), REFUSED, ids=[text[:30] for *_, text in REFUSED])
def test_packed_by_name_refuses_what_it_cannot(pattern, more, text):
    q, k, v = (x.detach() for x in qkv(3, 3))
    with pytest.raises(BackendError) as e:
        attention(q, k, v, pattern, backend="tiles", **more)
    assert str(e.value) == f"backend='tiles' cannot run this: {text}"


def test_ids_changed_in_place_are_read_again():
    ids = ids_of(4, 4)
    pattern, inputs = documents(ids), qkv(8, 8)
    before = attention(*inputs, pattern, backend="tiles")
    ids[3] = -3
    after = attention(*inputs, pattern, backend="tiles")
    assert not torch.equal(before, after)
    assert torch.allclose(after, attention(*inputs, pattern, backend="reference"), atol=1e-12)


@pytest.mark.parametrize("backend", ["auto", "reference", "sdpa", "tiles"])
@pytest.mark.parametrize("rows", [B + 1, 2 * B])
def test_data_of_another_number_of_batch_rows_are_refused(rows, backend):
    """Rows without ids were not written at all; ids without a row were ignored."""
    ids, parents = ids_of(40, 40).expand(rows, -1), (torch.arange(80) - 1).expand(rows, -1)
    few, many = qkv(80, 80), [torch.cat([x] * rows) for x in qkv(80, 80)]
    for word in (documents(ids), tree(parents)):
        for b, inputs in ((B, few), (B * rows, many)):
            with pytest.raises(ShapeError) as error:
                attention(*inputs, causal() & word, backend=backend)
            assert str(error.value) == (
                f"{word!r} has data for {rows} batch rows, and there are {b}; give it for each, or for all"
            )


def test_equal_ids_share_a_layout_and_few_layouts_are_cached():
    assert packed.layouts(documents(ids_of(4, 4)), 8, 8) is packed.layouts(documents(ids_of(4, 4)), 8, 8)
    for m in range(2, packed.MAX_CACHED + 9):
        packed.layouts(documents(ids_of(1, m)), m + 1, m + 1)
    assert packed._layouts.cache_info().currsize == packed.MAX_CACHED


@pytest.mark.parametrize("poison", [nan, inf])
def test_what_lengths_hide_is_never_read(poison):
    ids = ids_of(5, 6)
    q, k, v = qkv(11, 11)
    kept = torch.tensor([11, 7])
    clean = outputs_and_gradients("tiles", (q, k, v), documents(ids), lengths=kept)
    dirty_k, dirty_v = k.detach().clone(), v.detach().clone()
    dirty_k[1, :, 7:], dirty_v[1, :, 7:] = poison, poison
    inputs = q, dirty_k.requires_grad_(), dirty_v.requires_grad_()
    dirty = outputs_and_gradients("tiles", inputs, documents(ids), lengths=kept)
    for a, b in zip(clean, dirty):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("n", "m"), [(0, 4), (4, 0), (0, 0), (1, 1), (1, 4), (4, 4)])
def test_the_smallest_sizes(n, m):
    pattern = documents(torch.zeros(m, dtype=torch.long))
    inputs = qkv(n, m)
    at = {"at": 0} if n > m else {}
    o = attention(*inputs, pattern, **at)
    assert o.shape == (B, H, n, D_V)
    grads = torch.autograd.grad(o.sum(), inputs)
    assert all(g.isfinite().all() for g in grads)
    assert torch.allclose(o, attention(*inputs, pattern, backend="reference", **at), atol=1e-12)


def test_half_types_and_inference():
    ids = ids_of(30, 40)
    inputs = qkv(70, 70, dtype=torch.bfloat16)
    o, lse = attention(*inputs, documents(ids), backend="tiles", return_lse=True)
    assert (o.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    with torch.inference_mode():
        made_there = documents(ids_of(30, 40))
        assert torch.equal(attention(*inputs, made_there, backend="tiles"), o)


def test_a_function_is_no_document():
    assert packed.split(where(torch.ge) & documents(ids_of(3))) is None
    assert packed.split(documents(ids_of(3)) | causal()) is None
    assert packed.split(causal() & documents(ids_of(3)) & window(2)) is not None


def test_a_tree_beside_more_than_causal_is_not_run_chain_by_chain():
    """Chains have every pair of an ancestor, so a window beside them would be lost."""
    parents = tree(torch.arange(-1, 39))
    inputs = qkv(40, 40)
    mine = outputs_and_gradients("auto", inputs, parents & window(3))
    assert_same(mine, outputs_and_gradients("reference", inputs, parents & window(3)))
    assert_same(mine, outputs_and_gradients("tiles", inputs, causal() & window(3)))


def test_a_tree_whose_parents_cannot_be_read_says_so():
    """Under a transform a call is one operation, which takes ids of documents and no parents."""
    parents, (q, k, v) = tree(torch.arange(-1, 2)), (x.detach() for x in qkv(3, 3))
    with pytest.raises(BackendError) as e:
        torch.func.grad(lambda q: attention(q, k, v, parents, backend="tiles").sum())(q)
    assert str(e.value) == (
        "backend='tiles' cannot run this: a compiler, a transform or a mode observes the call, and the data of the "
        "pattern must be read; use backend='sdpa'"
    )
    with FlopCounterMode(display=False):
        found = explain(q, k, v, parents)
    assert (found.backend, found.reason) == (
        "sdpa",
        "tiles cannot: a compiler, a transform or a mode observes the call, and the data of the pattern must be read",
    )

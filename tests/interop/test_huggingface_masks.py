"""Masks of transformers become patterns, exactly; what is not recognized becomes a table and says so."""

from dataclasses import replace

import pytest
import torch
from transformers import masking_utils as theirs

import regard as rg
from regard.interop.huggingface import masks
from regard.interop.huggingface.attention import attend
from regard.interop.huggingface.problems import allowed, problems_of

BATCH, N = 3, 23
LEFT = torch.tensor([[0] * 5 + [1] * 18, [1] * 23, [0] * 2 + [1] * 21]).bool()
PACKED = torch.tensor([[0] * 7 + [1] * 16, [0] * 23, [0] * 3 + [1] * 9 + [2] * 11])
BLOCKS = torch.tensor([[-1] * 4 + [0] * 6 + [-1] * 13, [-1] * 23, [0] * 8 + [1] * 8 + [-1] * 7])


def both(*parts):
    return theirs.and_masks(*parts)


FUNCTIONS = {
    "causal": (theirs.causal_mask_function, "causal()"),
    "bidirectional": (theirs.bidirectional_mask_function, "full()"),
    "sliding": (theirs.sliding_window_causal_mask_function(4), "causal() & window(3, after=0)"),
    "sliding wider than the input": (theirs.sliding_window_causal_mask_function(64), "causal()"),
    "sliding on both sides": (theirs.sliding_window_bidirectional_mask_function(3), "window(3)"),
    "chunked": (theirs.chunked_causal_mask_function(5, torch.zeros(BATCH).long()), "causal() & blocks(5)"),
    "chunked after left padding": (
        theirs.chunked_causal_mask_function(5, torch.tensor([5, 0, 2])),
        "causal() & documents(<3×23 ids>)",
    ),
    "packed": (
        both(theirs.causal_mask_function, theirs.packed_sequence_mask_function(PACKED)),
        "causal() & documents(<3×23 ids>)",
    ),
    "blockwise": (
        theirs.or_masks(theirs.causal_mask_function, theirs.blockwise_overlay(BLOCKS)),
        "causal() | documents(<3×23 ids>)",
    ),
}


def made(function, n=N, m=N, q_offset=0, kv_offset=0, padding=None, **rest):
    given = (BATCH, n, m, q_offset, kv_offset, function, padding)
    return masks.mask(*given, **rest), theirs.sdpa_mask(*given, allow_is_causal_skip=False)


@pytest.mark.parametrize("padding", [None, LEFT, LEFT.flip(-1)], ids=["no padding", "left", "right"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_known_mask_function_becomes_its_pattern(name, padding):
    function, expected = FUNCTIONS[name]
    lazy, table = made(function, padding=padding)
    assert repr(lazy.mask.pattern) == expected
    assert lazy.mask.dense is None
    assert torch.equal(allowed(lazy.mask, None).expand(table.shape), table)


@pytest.mark.parametrize(
    "n, m, q_offset, kv_offset",
    [(1, 23, 22, 0), (4, 23, 19, 0), (6, 23, 0, 0), (1, 9, 22, 14), (5, 13, 22, 14)],
    ids=["decoding", "continued", "static cache", "sliding cache", "sliding cache, several queries"],
)
@pytest.mark.parametrize("name", ["causal", "sliding", "chunked"])
def test_offsets_of_caches_move_the_pattern(name, n, m, q_offset, kv_offset):
    lazy, table = made(FUNCTIONS[name][0], n, m, q_offset, kv_offset)
    assert lazy.mask.dense is None
    assert torch.equal(allowed(lazy.mask, None).expand(table.shape), table)


def test_prefix_masks_of_one_block_are_recognized():
    prefix = torch.tensor([[0] * 6 + [-1] * 17]).expand(BATCH, -1)  # as PaliGemma says it
    lazy, table = made(theirs.or_masks(theirs.causal_mask_function, theirs.blockwise_overlay(prefix)))
    assert lazy.mask.dense is None
    assert torch.equal(lazy.mask.table(), table)
    assert torch.equal(table[0, 0], (rg.causal() | rg.prefix(6)).allowed(N))


def test_an_unknown_function_becomes_a_table_and_says_so():
    lazy, table = made(lambda b, h, i, j: (i + j) % 3 != 1)
    assert torch.equal(lazy.mask.dense, table)
    assert "is not known" in lazy.mask.note
    [problem] = problems_of(lazy.mask, None, table.device)
    assert torch.equal(problem.pattern, table)


def test_a_table_over_a_sliding_cache_keeps_the_positions_of_the_users_pattern():
    n, m, q_offset, kv_offset = 5, 13, 22, 14
    lazy, table = made(lambda b, h, i, j: (i + j) % 3 != 1, n, m, q_offset, kv_offset)
    i, j = torch.arange(n)[:, None] + q_offset, torch.arange(m) + kv_offset
    user = rg.window(1) | rg.every(4)
    assert torch.equal(allowed(lazy.mask, user), table & user.allows(i, j))


@pytest.mark.parametrize("name", ["causal", "bidirectional", "sliding", "sliding on both sides"])
def test_a_mask_that_reads_no_tensor_is_understood_without_the_device(name, monkeypatch):
    """A decoder has another size at each step: comparing on a GPU would wait for all that it still computes."""
    monkeypatch.setattr(masks, "_agreed", set())
    given = (BATCH, 1, N, N - 1, 0, FUNCTIONS[name][0], None)
    lazy = masks.mask(*given, device=torch.device("meta"))  # whose numbers cannot be read
    assert repr(lazy.mask.pattern) == FUNCTIONS[name][1] and lazy.mask.dense is None
    read = masks._mask_of
    monkeypatch.setattr(masks, "_mask_of", lambda *given: replace(read(*given), pattern=rg.window(1)))
    wrong = masks.mask(*given, device=torch.device("meta"))
    assert wrong.mask.dense.is_meta and "differs from it on sampled rows" in wrong.mask.note


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_that_read_tensors_are_known(name):
    without = {"causal", "bidirectional", *(x for x in FUNCTIONS if x.startswith("sliding"))}
    assert masks._reads_no_tensor(FUNCTIONS[name][0]) == (name in without)
    padded = both(FUNCTIONS[name][0], theirs.padding_mask_function(LEFT))
    assert not masks._reads_no_tensor(padded) and not masks._reads_no_tensor(object())


@pytest.mark.parametrize("name", ["causal", "sliding", "chunked"])
def test_a_mask_that_reads_a_tensor_is_compared_on_its_device_and_for_each_row(name, monkeypatch):
    seen, given = [], torch.device("cpu", 0)

    def evaluate(function, batch, *rest, own=masks._evaluate):
        seen.append((batch, rest[-1]))
        return own(function, batch, *rest)

    monkeypatch.setattr(masks, "_agreed", set())
    monkeypatch.setattr(masks, "_evaluate", evaluate)
    masks.mask(BATCH, 1, N, N - 1, 0, FUNCTIONS[name][0], None, device=given)
    assert seen == [(BATCH, given) if name == "chunked" else (1, torch.device("cpu"))]


def test_a_function_with_other_numbers_is_compared_again(monkeypatch):
    """Both are read as the pattern of the first one."""
    monkeypatch.setattr(masks, "_agreed", set())
    narrow, wide = (theirs.sliding_window_causal_mask_function(size) for size in (4, 5))
    read = masks.read(narrow, masks.Frame(BATCH, N, N, 0, 0))
    monkeypatch.setattr(masks, "read", lambda function, frame: read)
    assert made(narrow)[0].mask.dense is None
    lazy, table = made(wide)
    assert torch.equal(lazy.mask.dense, table)


def test_layers_share_the_calls_of_a_mask_and_their_own_pattern(monkeypatch):
    lazy, table = made(theirs.causal_mask_function)
    cpu = torch.device("cpu")
    for user in (None, rg.window(3), rg.every(4)):
        [problem] = problems_of(lazy.mask, user, cpu)
        expected = table[0, 0] if user is None else table[0, 0] & user.allowed(N)
        assert torch.equal(problem.pattern.allowed(N), expected) and problem.at is None
        assert problems_of(lazy.mask, user, cpu)[0] is problem
    for ids in (torch.arange(N) // 5, torch.arange(N) // 3):  # no text says what these are
        [problem] = problems_of(lazy.mask, rg.documents(ids), cpu)
        assert torch.equal(problem.pattern.allowed(N), table[0, 0] & rg.documents(ids).allowed(N))
    one, _ = made(theirs.causal_mask_function, 1, N, N - 1)
    assert problems_of(one.mask, rg.documents(torch.zeros(N).long()), cpu)[0].pattern is None
    [problem] = problems_of(one.mask, rg.documents(torch.arange(N) // 5), cpu)
    assert problem.index.tolist() == [20, 21, 22]
    known = set(lazy.mask.memo)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    problems_of(lazy.mask, rg.window(5), cpu)
    assert set(lazy.mask.memo) == known  # a graph would be guarded by what the memo holds


def test_tables_are_not_kept_until_the_forward_ends():
    """One of each pattern would stay; and where a layer is recomputed, an operation would be missing."""
    holes = LEFT.clone()
    holes[0, 10] = holes[1, 3] = False
    cpu, patterns = torch.device("cpu"), [rg.window(size) for size in range(3, 9)]
    packed, counted = FUNCTIONS["packed"][0], FUNCTIONS["chunked after left padding"][0]
    for function, padding in (
        (theirs.causal_mask_function, holes),
        (packed, None),
        (packed, LEFT),
        (counted, LEFT),
    ):
        lazy, _ = made(function, padding=padding)
        for user in patterns:
            first, second = (problems_of(lazy.mask, user, cpu) for _ in range(2))
            assert all(x is not y for x, y in zip(first, second))
        assert not lazy.mask.memo


def test_one_query_gathers_keys_on_the_device_of_its_layer():
    lazy, _ = made(theirs.causal_mask_function, 1, N, N - 1)
    for device in ("cpu", "meta"):
        allowed_on = allowed(lazy.mask, rg.window(2), torch.device(device))
        assert allowed_on.device.type == device
    [problem] = problems_of(lazy.mask, rg.window(2), torch.device("cpu"))
    assert problem.index.tolist() == [N - 3, N - 2, N - 1]
    with pytest.raises(
        RuntimeError, match="cannot be called on meta tensors"
    ):  # its own table has no numbers
        problems_of(lazy.mask, rg.window(2), torch.device("meta"))


def test_more_queries_than_keys_name_their_offset():
    """The default offset would be negative, which the engine refuses."""
    layer = torch.nn.Linear(1, 1)
    layer.__dict__["regard_pattern"] = rg.window(2)
    generator = torch.Generator().manual_seed(3)
    q, k = torch.randn(1, 2, 5, 8, generator=generator), torch.randn(1, 2, 3, 8, generator=generator)
    table = rg.window(2).allowed(5, 3, -2)
    o, _ = attend(layer, q, k, k, torch.zeros(1, 1, 5, 3))
    expected = rg.attention(q, k, k, table, backend="reference").transpose(1, 2)
    assert (o - expected).abs().max() < 1e-6
    o, _ = attend(torch.nn.Linear(1, 1), q, k, k, None, is_causal=True)
    expected = rg.attention(q, k, k, rg.causal(), at=0, backend="reference").transpose(1, 2)
    assert (o - expected).abs().max() < 1e-6


@pytest.mark.parametrize("n, m, q_offset", [(1, 23, 22), (4, 23, 19), (4, 23, 11), (6, 23, 0)])
def test_a_problem_names_the_offset_where_it_is_not_the_default(n, m, q_offset):
    lazy, table = made(theirs.sliding_window_causal_mask_function(4), n, m, q_offset)
    [problem] = problems_of(lazy.mask, rg.window(2), torch.device("cpu"))
    first, last = problem.keys or (0, m)
    assert (problem.at is None) == (q_offset == m - n) or n == 1
    if problem.index is None and not isinstance(problem.pattern, torch.Tensor):
        there = problem.pattern.allowed(n, last - first, problem.at)
        assert torch.equal(there, (table[0, 0] & (rg.window(2).allowed(n, m, q_offset)))[:, first:last])


def test_a_pattern_that_was_read_wrongly_is_noticed_on_sampled_rows(monkeypatch):
    monkeypatch.setattr(masks, "_behind", lambda pattern: rg.window(pattern.before + 1, after=0))
    lazy, table = made(theirs.sliding_window_causal_mask_function(6))
    assert torch.equal(lazy.mask.dense, table)
    assert "differs from it on sampled rows" in lazy.mask.note


def test_model_code_that_computes_with_a_mask_gets_the_table_of_eager():
    lazy, table = made(theirs.causal_mask_function, padding=LEFT)
    lowest = torch.finfo(torch.float32).min
    added = torch.where(table, 0.0, lowest)
    more = torch.zeros(BATCH, 1, N, 2)
    assert (lazy.shape, lazy.dtype, lazy.dim()) == (table.shape, torch.float32, 4)
    for change in (
        lambda x: x.bool(),
        lambda x: x[:, :, 2:9, :4],
        lambda x: torch.where(x == 0, 0.0, -1.0),
        lambda x: more[..., :1] + x,
        lambda x: torch.cat([x, more.to(x.dtype)], -1),
        lambda x: torch.nn.functional.pad(x, (0, 3), value=0.0),
    ):
        changed = change(lazy)
        assert type(changed) is torch.Tensor
        assert torch.equal(changed, change(added))
    for same in (lazy[:, :, :, :N], lazy.to(torch.float32), lazy.detach(), lazy.to(device="cpu")):
        assert isinstance(same, masks.LazyMask)
        assert same.mask is lazy.mask


def test_padding_and_packing_need_no_table():
    packed = FUNCTIONS["packed"][0]
    for function, padding in ((theirs.causal_mask_function, LEFT), (packed, None), (packed, LEFT.flip(-1))):
        lazy, _ = made(function, padding=padding)
        object.__setattr__(lazy.mask, "build", lambda: pytest.fail("a table was built"))
        for problem in problems_of(lazy.mask, None, torch.device("cpu")):
            assert isinstance(problem.pattern, rg.Pattern)


def test_a_bidirectional_mask_without_padding_is_none():
    given = {"allow_is_bidirectional_skip": True}
    assert made(theirs.bidirectional_mask_function, **given)[0] is None
    lazy, _ = made(theirs.bidirectional_mask_function, padding=LEFT, **given)
    assert torch.equal(lazy.mask.keys, LEFT)

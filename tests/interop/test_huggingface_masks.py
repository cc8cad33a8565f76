"""Masks of transformers become patterns, exactly; what is not recognized becomes a table and says so."""

from dataclasses import replace

import pytest
import torch
from transformers import masking_utils as theirs

import regard as rg
from regard.interop.huggingface import masks
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


def test_layers_share_the_calls_of_a_mask_and_their_own_pattern():
    lazy, table = made(theirs.causal_mask_function)
    cpu, patterns = torch.device("cpu"), (None, rg.window(3), rg.every(4))
    for user in patterns:
        [problem] = problems_of(lazy.mask, user, cpu)
        expected = table[0, 0] if user is None else table[0, 0] & user.allowed(N)
        assert torch.equal(problem.pattern.allowed(N), expected) and problem.at is None
        assert problems_of(lazy.mask, user, cpu)[0] is problem
    assert problems_of(lazy.mask, None, torch.device("meta"))[0] is not problems_of(lazy.mask, None, cpu)[0]


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

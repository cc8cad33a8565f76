"""Layouts: which pairs the groups of tiles hold, and how they are cut into pieces."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from long_cases import rows_in_long
from pattern_strategies import offsets, patterns
from regard.engine.cpu import layout as layouts
from regard.engine.cpu import strided_layout
from regard.engine.cpu.layout import TileGroup
from regard.engine.cpu.strided_layout import from_plans, layout, merged_layouts
from regard.engine.plan import plan
from regard.pattern import blocks, causal, dilated, every, full, prefix, rows, sinks, strided, window
from regard.pattern.parts import NoPlan
from tile_cases import MIXED, WORDS, check, small, tensors


def covered(laid):
    """How often each pair is visited and allowed."""
    seen = torch.zeros(laid.n, laid.m, dtype=torch.int)
    for group in laid.groups:
        for t in range(group.tiles):
            row = group.row + group.row_shift * t + group.row_step * torch.arange(group.rows)
            key = group.key + group.key_shift * t + group.key_step * torch.arange(group.keys)
            seen[row[:, None], key] += 1 if group.masked_by is None else group.allowed()[0].int()
    return seen


# Which pairs

tiles = st.sampled_from([4, 5, 8, 24])


@given(patterns, st.integers(1, 70), st.integers(1, 70), offsets, tiles)
@example(window(4) - every(5), 70, 70, None, 4)  # masks that repeat with every fifth tile
@example(causal() & (window(9) | sinks(20)), 70, 70, None, 4)  # a fixed end within some tiles
@example(window(3) & ~prefix(30), 70, 70, None, 4)
@example((causal() & prefix(16) | dilated(3, 2)) & blocks(4), 40, 40, None, 4)  # and between two tiles
@example(every(3) & (blocks(6) | rows(5)), 70, 70, None, 5)  # shared keys, masks that differ
@example(causal() & every(3), 70, 70, None, 4)
def test_groups_hold_each_allowed_pair_once_and_no_other(pattern, n, m, at, tile):
    if at is None and n > m:
        n, m = m, n
    try:
        laid = small(pattern, n, m, at, tile)
    except NoPlan:
        return
    assert torch.equal(covered(laid), pattern.allowed(n, m, at).int())
    assert laid.computed >= pattern.count(n, m, at)
    for group in laid.groups:  # what a call writes to, it writes once
        rows = [
            group.row + group.row_shift * t + group.row_step * r
            for t in range(group.tiles)
            for r in range(group.rows)
        ]
        assert len(set(rows)) == len(rows)


@given(patterns, st.integers(1, 70), st.integers(-3, 70), st.integers(0, 70), tiles)
@example(window(3), 70, 0, 41, 4)
@example(window(3), 70, 0, 42, 4)
@example(window(3) | every(9), 70, 5, 37, 4)
@example(every(3), 70, 50, 20, 4)  # nothing is left
def test_limits_hide_the_keys_outside_them_and_no_other(pattern, n, first, length, tile):
    try:
        laid = small(pattern, n, tile=tile)
    except NoPlan:
        return
    expected = pattern.allowed(n).int()
    expected[:, length:] = 0
    expected[:, : max(first, 0)] = 0
    left = laid.within(first, length)
    assert torch.equal(covered(left), expected[:, : left.m])
    assert left.m == min(length, n)


def test_a_long_pattern_of_many_shapes_has_only_layouts_with_a_comb_apart(monkeypatch):
    """Tiles that each see another number of teeth make as many batches; the comb beside the rest makes a few."""
    pattern, n = window(16) | every(8), 60_000
    strided_layout.merged_layouts.cache_clear()
    short, long = (strided_layout.merged_layouts(pattern, size, size, 0, 1, 64, 64) for size in (4_000, n))
    assert [len(found) for found in (short, long)] == [2, 1]
    assert long[0][0].pattern == pattern - every(8) and len(long[0][1].groups) < 10
    quick = strided_layout.layout(pattern, n, n, 0, 1)
    monkeypatch.setattr(strided_layout, "MAX_GROUPS", 10**9)
    strided_layout.merged_layouts.cache_clear()
    strided_layout.layout.cache_clear()
    other = strided_layout.layout(pattern, n, n, 0, 1)  # what was left out was not the quickest
    assert (other.computed, other.nanoseconds()) == (quick.computed, quick.nanoseconds())
    strided_layout.merged_layouts.cache_clear()
    strided_layout.layout.cache_clear()


def test_tiles_of_equal_shape_run_together():
    pattern = window(64) | every(64)
    for tile, waste in ((64, 1.35), (192, 2.0)):
        laid = layout(pattern, 4096, 4096, 0, 1, narrow=tile, wide=tile)
        assert len(laid.groups) <= 5
        assert laid.computed <= waste * pattern.count(4096)


def test_tiles_that_share_a_key_are_never_added_at_once():
    """Along a band, and interleaved: first keys 2 apart, step 3."""
    for hop, step, keys in ((4, 1, 9), (2, 3, 5), (3, 3, 1), (6, 4, 7), (1, 16, 4)):
        group = TileGroup(12, 0, 1, 1, 1, 0, hop, step, keys, None, 0, 1)
        for phase in range(group.phases):
            visited = [hop * t + step * l for t in range(phase, 12, group.phases) for l in range(keys)]
            assert len(set(visited)) == len(visited)
        m = hop * 11 + step * (keys - 1) + 1
        part = torch.randn(2, 12, keys, 3, dtype=torch.float64)
        got, expected = torch.zeros(2, m, 3, dtype=torch.float64), torch.zeros(2, m, 3, dtype=torch.float64)
        group.add_to_keys(got, part)
        for t in range(12):
            for l in range(keys):
                expected[:, hop * t + step * l] += part[:, t, l]
        torch.testing.assert_close(got, expected)


def fresh(pattern, n, tile=8):
    """A layout that no other test has run, as it caches how it was cut."""
    merged_layouts.cache_clear()
    return layout.__wrapped__(pattern, n, n, 0, 1, tile, tile)


# How a group is cut


@pytest.mark.parametrize(
    "scores, one_head", [(1, 1), (300, 1 << 17), (1 << 19, 1 << 17), *rows_in_long((130, 1), (1 << 19, 1))]
)
@pytest.mark.parametrize(
    "pattern", [window(8) | every(16), causal() & strided(8), MIXED[1], every(7)], ids=repr
)
def test_however_a_batch_is_cut_it_gives_the_formula(pattern, scores, one_head, monkeypatch):
    """One tile a piece and one row, several, a head by itself, several heads; the fused op for none of them."""
    monkeypatch.setattr(layouts, "MAX_SCORES", scores)
    monkeypatch.setattr(layouts, "ONE_HEAD_SCORES", one_head)
    monkeypatch.setattr(TileGroup, "fused", False)
    check(fresh(pattern, 101), pattern.allowed(101), *tensors(h=4, h_kv=2))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("pattern", WORDS + MIXED, ids=repr)
def test_products_and_the_fused_op_give_the_formula(pattern, fused, monkeypatch):
    monkeypatch.setattr(TileGroup, "fused", fused)
    check(fresh(pattern, 101), pattern.allowed(101), *tensors(dtype=torch.float32), scale=0.25)


@pytest.mark.parametrize("pattern", WORDS + MIXED, ids=repr)
def test_a_step_knows_whether_others_share_its_rows(pattern):
    seen, laid = torch.zeros(101, dtype=torch.int), fresh(pattern, 101)
    for group, is_fresh, _ in laid.steps:
        rows = torch.from_numpy(group.row_numbers)
        assert is_fresh == (not seen[rows].any())
        seen[rows] += 1
    for group, _, alone in laid.steps:
        assert alone == bool((seen[torch.from_numpy(group.row_numbers)] == 1).all())


@pytest.mark.parametrize("n", [101, 1024])
@pytest.mark.parametrize("pattern", [window(32) | every(32), causal() & (window(9) | sinks(20))], ids=repr)
def test_what_is_written_first_is_run_first(pattern, n):
    """Pieces of several heads run before those of one, whatever the order of the plan."""
    seen, laid = torch.zeros(n, dtype=torch.int), fresh(pattern, n, 64)
    is_fresh = {group: was for group, was, _ in laid.steps}
    run = dict.fromkeys([*laid.fused, *(piece.group for piece in laid.pieces(8))])
    for group in run:
        rows = torch.from_numpy(group.row_numbers)
        assert is_fresh[group] == (not seen[rows].any())
        seen[rows] += 1
    assert all(piece.fresh == is_fresh[piece.group] for piece in laid.pieces(8))
    assert len(run) == len(laid.steps)


def test_zeros_are_written_where_some_row_is_not_written_first_by_products():
    def of(*row_numbers):
        groups = (TileGroup(1, row, 0, 1, 4, 3 * k, 0, 1, 3, None, 0, 1) for k, row in enumerate(row_numbers))
        return layouts.Layout(8, 12, 0, 1, tuple(groups))

    assert of(0, 4).overwrites and of(0, 4, 0).overwrites
    assert not of(0).overwrites and not of(0, 0).overwrites  # as many rows as there are, but not each of them
    fused = TileGroup(1, 0, 0, 1, 4096, 0, 0, 1, 4096, causal(), 0, 1)
    assert fused.fused and not layouts.Layout(4096, 4096, 0, 1, (fused,)).overwrites


def test_every_piece_of_every_head_runs_once(monkeypatch):
    monkeypatch.setattr(layouts, "MAX_SCORES", 200)
    laid = fresh(window(8) | every(16), 101)
    for heads in (1, 3, 8):
        every_row, run = torch.arange(heads * 101.0).view(heads, 101), 0
        for group in {group for group, _, _ in laid.steps}:
            pieces = [piece for piece in laid.pieces(heads) if piece.group is group]
            if not group.fused:
                rows = torch.cat([piece.rows_of(every_row).flatten() for piece in pieces])
                assert len(rows) == heads * len(group.row_numbers) == len(rows.unique())
            for piece in pieces:  # the piece and its view agree
                own = piece.subgroup.rows_of(every_row[piece.heads]).flatten(0, 1)
                assert torch.equal(piece.rows_of(every_row), own) and len(own) == piece.score_shape[0]
            run += len(pieces)
        assert run == len(laid.pieces(heads)) > 0


def test_a_narrow_band_is_run_by_products_and_a_large_triangle_by_the_fused_op():
    """So that no more than MAX_SCORES scores are held, and half of a triangle is skipped."""
    assert not layout(window(64) | every(64), 4096, 4096, 0, 1).fused
    triangle = TileGroup(1, 0, 0, 1, 4096, 0, 0, 1, 4096, causal(), 0, 1)
    assert triangle.fused and triangle.triangle
    tall = TileGroup(1, 0, 0, 1, 4096, 0, 0, 1, 4096, window(7), 0, 1)
    assert tall.fused and not TileGroup(1, 0, 0, 1, 4096, 0, 0, 64, 64, None, 0, 1).fused


def test_rows_without_a_mask_are_cut_so_that_few_scores_are_held(monkeypatch):
    monkeypatch.setattr(TileGroup, "fused", False)
    laid = fresh(full(), 3000, 3000)
    assert len(laid.steps) == 1
    assert max(piece.score_shape[1] for piece in laid.pieces(2)) * 3000 <= layouts.MAX_SCORES


def test_plans_of_disjoint_pairs_make_one_layout():
    n, a, b = 53, window(4), every(8) - window(4)
    laid = from_plans(plan(a, n, n, 0, 1, 16), plan(b, n, n, 0, 1, 16))
    assert torch.equal(covered(laid), (a | b).allowed(n).int())

"""What the Hopper kernels visit: every allowed pair once, in runs of blocks that balance the load of programs."""

import importlib.util
import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from block_words import counted_pairs
from regard.engine.cuda import work_split
from regard.pattern import blocks as blocks_of
from regard.pattern import causal, dilated, every, full, neighborhood, prefix, rows, sinks, strided, window

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

PATTERNS = [
    full(),
    causal(),
    causal() & (window(40) | every(16)),
    window(40) | every(16),
    dilated(5, 7),
]
OTHERS = [window(40) | every(32, 8), causal() & (window(40) | sinks(3)), window(40) | every(24)]
UNSHIFTED = [
    prefix(70) | window(5),
    causal() & (blocks_of(50) | strided(16)),
]  # heads differ by their positions
LONGNET = causal() & (window(64) | dilated(64, 8) | dilated(64, 64))
CPU = torch.device("cpu")


def steps(pattern, n, by_keys):
    """Passes with small tiles and blocks, and a table of masks that nothing reads."""
    from regard.engine.cuda.mask import Masks
    from regard.engine.cuda.schedule import HopperSchedule

    def without_masks(work):
        none = Masks(torch.zeros((1, 128), dtype=torch.int32))
        sizes = np.diff(np.flatnonzero(work.blocks[:, 9].numpy() & 8), append=len(work.blocks))
        return HopperSchedule(work.blocks, sizes, none, work.segments, work.ragged, work.split)

    return tuple(replace(step, work=without_masks(step.work)) for step in general_steps(pattern, n, by_keys))


def general_steps(pattern, n, by_keys):
    from regard.engine.cuda.call import Config
    from regard.engine.cuda.schedule import device_passes

    return device_passes((pattern, n, n, 0, 1), Config(32, 16, 1, 1), by_keys, CPU).steps


def masked(pattern, n, by_keys=False, place=(0, 1)):
    """The passes of the Hopper kernels, with their masks."""
    from regard.engine.cuda.tile_lists import with_masks

    return with_masks((pattern, n, n, *place), by_keys, CPU)


def split(work, programs, group=1, multiple=1, **how):
    from regard.engine.cuda.work_split import split_work

    return split_work(work, 2, programs, group, multiple, **how)


def members(row):
    """The members at the places of one block, as the kernels read its twelve words."""
    a, b, c1, a1, b1, c2, a2, b2, end = (int(x) for x in row[:9])
    c = np.arange(end & 255)
    return np.where(c < c1, a + b * c, np.where(c < c2, a1 + b1 * c, a2 + b2 * c))


def tile(row):
    return int(row[10]) + int(row[11]) * np.arange(int(row[9]) >> 8 & 255)


def visited(step, row, masks=None):
    """The members of a block's tile that count, those of its columns, and which pairs of both get a weight."""
    own, there = tile(row), members(row)
    masks = step.work.masks.words if masks is None else masks
    pairs = counted_pairs(row, masks.numpy())[: len(own), : len(there)]
    counts = np.ones(len(own), dtype=bool) if step.keep is None else step.keep.allows(own, own)
    return own[counts], there, pairs[counts]


@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("pattern", PATTERNS + OTHERS, ids=repr)
def test_every_allowed_pair_is_visited_once_by_each_head_of_a_group(pattern, group, by_keys):
    n = 700 if every(16) in pattern.leaves() else 203  # so that a tile has several blocks of each word
    seen = np.zeros((group, n, n), dtype=int)
    for step in masked(pattern, n, by_keys).steps:
        for row in split(step.work, 10, group, 2).blocks.numpy():
            own, there, pairs = visited(step, row)
            seen[row[9] >> 16][np.ix_(own, there)] += pairs
    allowed = pattern.allowed(n).numpy()
    allowed = allowed.T if by_keys else allowed
    assert (seen == allowed).all()


@pytest.mark.parametrize(
    ("pattern", "masked"),
    [(causal(), 2), (window(40), 4), (causal() & (window(40) | every(16)), 4)],
    ids=repr,
)
def test_a_window_is_cut_from_its_first_key_on_and_no_block_mixes_progressions(pattern, masked):
    from regard.engine.cuda.call import Config
    from regard.engine.cuda.schedule import device_passes

    (step,) = device_passes((pattern, 704, 704, 0, 1), Config(16, 8, 1, 1), False, CPU).steps
    assert step.work.segments == 1
    blocks = step.work.blocks.numpy()
    tests = blocks[(blocks[:, 1] == 1) & (blocks[:, 9] & 1 > 0)]  # of neighboring keys, those a bound cuts
    assert all((tests[:, 10] == first).sum() == masked for first in range(80, 640, 16))


def route_of_heads(pattern, n, by_keys, b=2, h=3, step=1, strides=None):
    from regard.engine.cuda.call import Layout
    from regard.engine.cuda.call import contiguous as dense
    from regard.engine.cuda.work_split import flatten_heads

    layout = dense(b, h, n, 8) if strides is None else Layout((b, h, n, 8), strides, True)
    flat = [flatten_heads(one, step, (layout, layout)) for one in masked(pattern, n, by_keys).steps]
    return [one for one, _ in flat], flat[-1][1]


@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize("pattern", [*PATTERNS, *OTHERS[:2], *UNSHIFTED], ids=repr)
def test_flattened_heads_each_visit_every_allowed_pair_of_their_own(pattern, by_keys):
    n, heads = 224, 6
    route, long = route_of_heads(pattern, n, by_keys)
    assert long[0].shape == (1, 1, heads * n, 8)
    seen = np.zeros((heads * n, heads * n), dtype=int)
    for step in route:
        for row in split(step.work, 20, multiple=2).blocks.numpy():
            own, there, pairs = visited(step, row)
            seen[np.ix_(own, there)] += pairs
    allowed = pattern.allowed(n).numpy()
    assert (seen == np.kron(np.eye(heads, dtype=int), allowed.T if by_keys else allowed)).all()


def test_with_flattened_heads_every_program_has_work_and_none_much_more_than_its_share():
    pattern = causal() & (window(40) | every(16))
    apart, _ = route_of_heads(pattern, 1040, False, b=1, h=1)
    flattened, _ = route_of_heads(pattern, 1040, False)
    runs = [
        np.diff(split(work, programs).chunks.numpy()[:, :2]).ravel()
        for work, programs in ((apart[0].work, 2 * (20 // 6)), (flattened[0].work, 2 * 20))
    ]
    assert len(runs[1]) == 20 and runs[1].max() <= 1.06 * runs[1].mean()
    assert runs[1].max() < runs[0].max()


@pytest.mark.parametrize(
    "case",
    [
        # Every 64th key, or row, is computed by another pass; 64 divides neither 4128 nor three times that.
        {"pattern": window(64) | every(64), "n": 4128, "by_keys": True},
        {"pattern": window(64) | rows(64) | every(64), "n": 4128, "step": 3},
        # The last position of the last head is 6 · 4095 · 90000, which 32 bits do not hold.
        {"pattern": window(64) | rows(63) | every(63), "n": 4095, "step": 90000},
        {"pattern": window(40), "strides": (3 * 208 * 8, 8, 3 * 8, 1)},  # heads behind positions
        {"pattern": window(40), "b": 1, "h": 1},
    ],
    ids=repr,
)
def test_heads_are_not_flattened_where_members_or_memory_forbid_it(case):
    case = {"n": 208, "by_keys": False} | case
    _, layouts = route_of_heads(**case)
    assert layouts[0].shape[2] == case["n"]


@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_runs_are_adjacent_begin_a_tile_and_differ_by_little(pattern):
    for by_keys in (False, True):
        for step in steps(pattern, 515, by_keys):
            cut = split(step.work, 10, multiple=2)
            begin, end = cut.chunks.numpy()[:, :2].T
            assert torch.equal(cut.chunks[:, 4:], cut.blocks[begin])
            assert begin[0] == 0 and (begin[1:] == end[:-1]).all() and end[-1] == len(cut.blocks)
            assert ((end - begin) % 2 == 0).all() and (cut.blocks[begin, 9] & 8 != 0).all()
            if step.work.split:
                # none has more than its share, made even; all together wait as long as if each had 2 less
                runs = end - begin
                assert runs.max() <= 2 * -(-len(step.work.blocks) // 10)
                assert len(runs) * runs.max() - runs.sum() <= 2 * (len(runs) - 1)


def test_pieces_of_tiles_are_cut_at_the_same_rows_so_that_programs_read_them_at_the_same_time():
    (step,) = (s for s in steps(causal() & (window(40) | every(16)), 2048, True) if s.work.split)
    cut = split(step.work, 16)
    begin, end = cut.chunks.numpy()[:, :2].T
    rows = cut.blocks.numpy()[:, 0]
    read = [[rows[b + t] for b, e in zip(begin, end) if b + t < e] for t in range((end - begin).max())]
    assert len(begin) == 8 and (end - begin == 40).all()
    # of 320 blocks that four tiles read, those read by several at one time count once; 287 in equal runs of all
    assert sum(len(set(now)) for now in read) <= 200


def distance_between_programs(program_of, size, programs):
    """How many tiles are between the first and the last that run at the same time, in the median."""
    tiles = [np.flatnonzero(program_of == p) for p in range(programs)]
    begun = [np.cumsum(size[x] + 1) - (size[x] + 1) for x in tiles]
    times = range(int(max(x[-1] for x in begun)))
    running = [[x[np.searchsorted(b, t, side="right") - 1] for x, b in zip(tiles, begun)] for t in times]
    return np.median([max(now) - min(now) for now in running])


def test_programs_compute_neighboring_tiles_at_the_same_time():
    size = np.tile(np.arange(1, 9), 32)  # causal documents of 512
    longest_first = work_split._in_turn(np.argsort(-size, kind="stable"), size, 24, 0.1, 1)
    near = work_split._balanced(size, 24, 0.1, 1)
    assert distance_between_programs(longest_first, size, 24) > 100  # of 256
    assert distance_between_programs(near, size, 24) < 50
    most = [np.bincount(x, size + 1).max() for x in (near, longest_first)]
    assert most[0] <= 1.08 * most[1]


@pytest.mark.parametrize("size", [[1] * 100 + [60], [*range(1, 129)], [3] * 50, [1] * 7, [65, *[1] * 40]])
def test_where_neighbors_first_would_leave_one_program_with_most_of_the_work_the_longest_are_first(size):
    size = np.array(size)
    longest_first = work_split._in_turn(np.argsort(-size, kind="stable"), size, 8, 0.1, 1)
    assert (work_split._balanced(size, 8, 0.1, 1) == longest_first).all()


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_the_dynamic_share_is_programs_of_one_tile_each(share):
    (step,) = steps(causal() & (window(40) | every(16)), 2080, False)
    cut, whole = split(step.work, 10, dynamic_share=share), split(step.work, 10)
    begin, end = cut.chunks.numpy()[:, :2].T
    blocks = cut.blocks.numpy()
    tiles = np.add.reduceat(blocks[:, 9] & 8 > 0, begin)
    runs, last = end - begin, np.flatnonzero(tiles > 1).max(initial=4) + 1
    assert last == 5 and (tiles[5:] == 1).all()
    assert share > 0.1 or (np.diff(runs[5:]) <= 0).all()  # of tiles that are sorted at a time
    left = (runs[5:] + 1).sum() / (runs + tiles).sum()
    assert abs(left - min(share, 1 - (runs[:5] + tiles[:5]).sum() / (runs + tiles).sum())) < 0.05
    assert sorted(map(bytes, blocks)) == sorted(map(bytes, whole.blocks.numpy()))


def test_dynamic_programs_of_runs_of_an_even_length_have_two_tiles_each():
    (step,) = steps(window(40), 2080, True)
    cut = split(step.work, 10, multiple=2, dynamic_share=0.3)
    tiles = np.add.reduceat(cut.blocks.numpy()[:, 9] & 8 > 0, cut.chunks.numpy()[:, 0])
    assert len(tiles) > 6 and (tiles[:5] > 2).all() and (tiles[5:-1] == 2).all() and 0 < tiles[-1] <= 2


def test_each_program_runs_its_tiles_in_order_or_backwards():
    (step,) = steps(causal() & (window(40) | every(16)), 2080, False)
    order = {}
    for backwards in (False, True):
        cut = split(step.work, 10, backwards=backwards)
        words = cut.blocks.numpy()
        order[backwards] = [
            [int(row[10]) for row in words[a:b] if row[9] & 8] for a, b in cut.chunks.numpy()[:, :2]
        ]
    assert len(order[False]) == 5 and all(x == sorted(x) and len(x) > 9 for x in order[False])
    assert order[True] == [x[::-1] for x in order[False]]


@pytest.mark.parametrize("group", [1, 3])
def test_the_slots_of_a_split_tile_are_adjacent_and_a_whole_tile_has_none(group):
    (step,) = steps(causal(), 515, True)
    cut = split(step.work, 10, group, 2)
    blocks, slot = cut.blocks.numpy(), cut.slot.numpy()
    joins = {int(first): (int(at), int(pieces)) for first, _, _, at, pieces, *_ in cut.joins.numpy()}
    assert joins and len(slot) == len(blocks) and set(slot) - {-1} == set(range(cut.slots))
    for first in np.unique(blocks[:, 10]):
        used = set(slot[blocks[:, 10] == first])
        at, pieces = joins.get(int(first), (-1, 1))
        assert used == set(range(at, at + pieces))
    assert (np.diff(slot)[blocks[1:, 9] & 8 == 0] == 0).all()  # a slot changes only where a share begins


def test_the_blocks_that_fill_a_run_are_empty_and_begin_no_tile():
    (step,) = steps(causal(), 203, True)
    cut = split(step.work, 10, multiple=2)
    empty = cut.blocks[cut.blocks[:, 8] == 0]
    assert len(empty) and (empty[:, 9] & 15 == 1).all()


@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize(
    ("pattern", "n", "numbers"),
    [
        (full(), 4096, [1]),
        (causal(), 4096, [2]),  # none allowed, and the diagonal
        (causal() & window(256), 8192, [3]),  # either end of the window
        (causal() & (window(128) | sinks(64)), 4096, [3]),  # positions matter, but the masks are the same
        (LONGNET, 16384, [3, 3, 3]),
    ],
    ids=repr,
)
def test_blocks_share_their_masks_where_a_pattern_repeats_itself(pattern, n, numbers, by_keys):
    assert [len(step.work.masks.words) for step in masked(pattern, n, by_keys).steps] == numbers


def test_masks_are_computed_whatever_the_default_device_is():
    from regard.engine.cuda.tile_lists import with_masks

    given = (causal() & window(70), 200, 200, 0, 1), False, CPU
    (expected,) = with_masks.__wrapped__(*given).steps
    with torch.device("meta"):
        (step,) = with_masks.__wrapped__(*given).steps
    assert torch.equal(step.work.masks.words, expected.work.masks.words)


@pytest.mark.parametrize("numbers_are_distinct", [True, False])
@pytest.mark.parametrize("count", [0, 1, 500])
def test_equal_blocks_are_found_by_a_number_for_each_and_by_their_words_where_those_are_equal(
    monkeypatch, count, numbers_are_distinct
):
    from regard.engine.cuda import mask

    rows = np.random.default_rng(count).integers(-(1 << 31), 1 << 31, size=(40, 12))
    rows = rows[np.random.default_rng(1).integers(40, size=count)]
    if not numbers_are_distinct:
        monkeypatch.setattr(mask, "_random_factors", lambda: np.zeros(mask.MASK_WORDS, dtype=np.int64))
    found, which = mask.distinct_rows(rows)
    assert len(found) == len({tuple(x) for x in rows.tolist()}) and np.array_equal(found[which], rows)


def test_no_rows_are_sorted_to_find_equal_blocks(monkeypatch):
    """With two million blocks that takes eight seconds of the first call; sorting numbers takes one."""
    from regard.engine.cuda.tile_lists import with_masks

    (step,) = masked(causal() & window(70), 700).steps
    for module, name in ((torch, "dim"), (np, "axis")):
        monkeypatch.setattr(module, "unique", partial(unique_numbers, module.unique, name))
    (again,) = with_masks.__wrapped__((causal() & window(70), 700, 700, 0, 1), False, CPU).steps
    made = again.work
    assert torch.equal(made.blocks, step.work.blocks) and torch.equal(made.masks.words, step.work.masks.words)


def unique_numbers(unique, axis, x, **how):
    assert how.get(axis) is None, "rows are sorted"
    return unique(x, **how)


@pytest.mark.parametrize("by_keys", [False, True])
def test_many_masks_are_computed_in_parts(monkeypatch, by_keys):
    from regard.engine.cuda import tile_lists

    pattern = causal() & blocks_of(100) | prefix(7)
    whole = masked(pattern, 1000, by_keys).steps
    monkeypatch.setattr(tile_lists, "ON_HOST", 3)
    tile_lists.with_masks.cache_clear()
    parts = masked(pattern, 1000, by_keys).steps
    tile_lists.with_masks.cache_clear()
    assert all(torch.equal(x.work.masks.words, y.work.masks.words) for x, y in zip(whole, parts, strict=True))
    assert all(torch.equal(x.work.blocks, y.work.blocks) for x, y in zip(whole, parts, strict=True))


@pytest.mark.parametrize("backwards", [False, True])
def test_tiles_of_one_residue_class_run_at_the_same_time_on_programs_with_equal_work(backwards):
    (step,) = steps(causal() & strided(32), 2048, by_keys=False)
    cut = split(step.work, 2 * 8, backwards=backwards)
    per_tile = step.work.sizes
    assert len(per_tile) == 64 and per_tile.max() > per_tile.min()  # two tiles of a class, one longer
    loads = np.diff(cut.chunks[:, :2].numpy(), axis=1).ravel()
    assert loads.max() - loads.min() <= per_tile.max()
    firsts = [
        [int(row[10]) for row in cut.blocks[lo:hi].tolist() if row[9] & 8]
        for lo, hi in cut.chunks[:, :2].tolist()
    ]
    for round_ in zip(*firsts, strict=True):  # the n-th tiles of all programs: four whole classes
        assert len({first % 32 for first in round_}) == 4


DISTANCES = [
    causal(),
    window(9),
    window(3, 12),
    window(20),
    strided(8),
    strided(5),
    dilated(4, 3),
    every(7),
    full(),
]


@pytest.mark.parametrize("seed", range(60))
def test_a_narrowed_pattern_is_the_same_pattern(seed):
    from regard.pattern.clauses import narrowed

    r = random.Random(seed)
    pattern = r.choice(DISTANCES)
    for _ in range(r.randint(1, 3)):
        other = r.choice(DISTANCES)
        pattern = r.choice([pattern & other, pattern - other, pattern - other])
    assert torch.equal(narrowed(pattern).allowed(50), pattern.allowed(50))


def test_a_pass_without_what_an_earlier_one_computed_tests_one_relation():
    sparse, dilations = causal() & (window(31) | strided(32)), window(31) | dilated(31, 8) | dilated(31, 64)
    for pattern, n, count in ((sparse, 1024, 2), (causal() & dilations, 4096, 3)):
        for by_keys in (False, True):
            passes = general_steps(pattern, n, by_keys)
            tested = [x for one in passes[1:] for x in one.work.pattern.leaves() if x != full()]
            assert len(passes) == count and len(tested) == count - 1
            assert [one.accumulates and one.covered for one in passes] == [False, *[True] * (count - 1)]


CHAINED = [
    (LONGNET, 2085),
    (causal() & (window(127) | strided(128)), 2048),
    (causal() & (blocks_of(100) | strided(64)), 2000),
]


def chained(pattern, n, by_keys, place=(0, 1), layouts=None):
    from regard.engine.cuda.call import contiguous
    from regard.engine.cuda.work_split import chain_passes

    route = masked(pattern, n, by_keys, place)
    return chain_passes(route, (contiguous(1, 2, n, 128),) * 3 if layouts is None else layouts, 396)


@pytest.mark.parametrize(("by_keys", "programs"), [(False, 3), (True, 50)])
@pytest.mark.parametrize(("pattern", "n"), CHAINED, ids=repr)
def test_chained_passes_visit_every_pair_once_and_no_tile_waits_for_ever(pattern, n, programs, by_keys):
    from regard.engine.cuda.work_split import split_work

    step, long, counters = chained(pattern, n, by_keys)
    cut = split_work(step.work, 1, programs, multiple=2)
    assert long[0].shape[2] == 2 * n
    blocks, (at, end) = cut.blocks.numpy(), cut.chunks.numpy()[:, :2].T.copy()
    seen, count = np.zeros((2 * n, 2 * n), dtype=np.int8), np.zeros(counters, dtype=int)
    touched = np.zeros(2 * n, dtype=bool)
    while (at < end).any():
        before = at.copy()
        for program in np.flatnonzero(at < end):
            stop = at[program] + 1
            while stop < end[program] and not blocks[stop, 9] & 8:
                stop += 1
            last = blocks[stop - 1]
            if count[last[4]] < last[5]:
                continue  # it waits
            assert touched[tile(last)].any() == (last[5] > 0)  # it goes on from what is there, and only then
            touched[tile(last)] = True
            for row in blocks[at[program] : stop]:
                there = row[0] + row[1] * np.arange(row[8] & 255)
                pairs = counted_pairs(row, cut.masks.numpy())[: len(tile(row)), : len(there)]
                seen[np.ix_(tile(row), there)] += pairs
            count[last[4]] += last[6]
            at[program] = stop
        assert (at > before).any(), "every program waits"
    allowed = pattern.allowed(n).numpy()
    allowed = allowed.T if by_keys else allowed
    assert (seen[:n, :n] == allowed).all() and (seen[n:, n:] == allowed).all()
    assert not seen[:n, n:].any() and not seen[n:, :n].any()


@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize(("pattern", "n"), CHAINED, ids=repr)
def test_a_chained_tile_waits_for_all_tiles_of_earlier_passes_of_its_section(pattern, n, by_keys):
    step, _, counters = chained(pattern, n, by_keys)
    first = step.work.blocks.numpy()[np.cumsum(step.work.sizes) - step.work.sizes]
    waits = 0
    for counter in range(counters):
        of_stretch = first[first[:, 4] == counter]
        for awaited in np.unique(of_stretch[:, 5]):
            earlier = of_stretch[of_stretch[:, 5] < awaited]
            assert len(earlier) == awaited and earlier[:, 6].all()  # each of them is counted
            waits += awaited > 0
    assert waits >= counters - 2  # the last stretch of a head may be a short one


def test_passes_are_chained_only_if_their_tiles_are_short_and_their_rows_fit_into_the_cache():
    from regard.engine.cuda.call import Layout, contiguous

    assert chained(LONGNET, 2048, False) is not None
    assert chained(causal() & window(64), 1024, False) is None  # one pass
    assert chained(window(64) | rows(64) | every(64), 1024, False) is None  # no pass goes on from another
    assert (
        chained(causal() & (window(127) | strided(128)), 65536, False) is None
    )  # a tile reads every stretch
    assert (
        chained(causal() & (window(64) | dilated(64, 256)), 65536, False) is None
    )  # more than the cache holds
    assert chained(window(64) | strided(64), 4096, False) is not None
    assert chained(window(256) | strided(64), 4096, False) is None  # tiles of 9 blocks
    behind = Layout((1, 2, 2048, 128), (2 * 2048 * 128, 128, 2 * 128, 1), True)
    assert chained(LONGNET, 2048, False, layouts=(behind,) * 3) is None  # heads behind positions
    fewer = contiguous(1, 1, 2048, 128)
    assert chained(LONGNET, 2048, False, layouts=(contiguous(1, 2, 2048, 128), fewer, fewer)) is None


def forward_route(pattern, n, heads):
    """The passes of the Hopper forward kernel, and the layouts of contiguous q, k and v."""
    from regard.engine.cuda.call import contiguous
    from regard.engine.cuda.work_split import by_size

    return by_size(masked(pattern, n), 12), (contiguous(1, heads, n, 128),) * 3


LONGFORMER = window(64) | rows(64) | every(64)


# 4096: one tile of global rows, in 8 pieces of 8 blocks; 4160: two tiles, in 8 pieces of 8 blocks and one of 1 each
@pytest.mark.parametrize("n", [4096, 4160])
def test_global_rows_run_in_pieces_beside_the_other_tiles_in_the_order_of_their_keys(n):
    from regard.engine.cuda.work_split import interleave

    pattern, heads = LONGFORMER, 2
    route, layouts = forward_route(pattern, n, heads)
    pieces, flat, long, cut = interleave(route, layouts, 1, 24, 0.1)
    assert long[0].shape[2] == heads * n and pieces.keep is None and flat.keep == ~rows(64)
    seen, parts = np.zeros((heads * n, heads * n), dtype=np.int8), np.zeros(heads * cut.slots, dtype=int)
    blocks, slots = cut.blocks.numpy(), cut.slot.numpy()
    for row, slot in zip(blocks, slots):
        words = np.where(np.arange(12) == 5, np.iinfo(np.int32).max, row)  # there is no third segment
        own, there, pairs = visited(flat if slot < 0 else pieces, words, cut.masks)
        seen[np.ix_(own, there)] += pairs
        parts[max(slot, 0)] += (slot >= 0) * (row[9] & 8 > 0)
    allowed = pattern.allowed(n).numpy()
    assert (
        (seen[:n, :n] == allowed).all()
        and (seen[n:, n:] == allowed).all()
        and seen.sum() == 2 * allowed.sum()
    )
    assert (parts == 1).all()  # each piece is one run of blocks, of one tile and head
    first = np.flatnonzero(blocks[:, 9] & 8)
    for t in first[slots[first] >= 0]:
        slot, head = divmod(int(slots[t]), heads)
        of, *_ = (x for x in cut.joins.numpy() if x[3] <= slot < x[3] + x[4])
        assert blocks[t, 10] == of[0] + head * n and blocks[t, 11] == of[1] == 64
        assert blocks[t, 9] >> 8 & 255 == of[2]  # as many rows
    begin = cut.chunks.numpy()[:, 0]
    assert (np.diff(blocks[begin[:24], 0]) >= -640).all()  # programs begin in the order of rows
    assert cut.joins[:, 4].sum() == cut.slots  # all pieces are added up
    assert len(cut.chunks) > 24  # the dynamic share, for programs that finish early


@pytest.mark.parametrize(
    "pattern, n, step",
    [
        (causal() & window(64), 4096, 1),  # one pass
        (window(64) | rows(32) | every(32), 4128, 1),  # the last block of keys is short: a piece needs a test
        (LONGFORMER | window(300), 4096, 1),  # blocks of the other tiles have three progressions
    ],
)
def test_global_rows_run_apart_where_one_launch_cannot_hold_them(pattern, n, step):
    from regard.engine.cuda.work_split import interleave

    assert interleave(*forward_route(pattern, n, 2), step, 24, 0.1) is None


GRIDS = [
    neighborhood((16, 24), (7, 5)),
    neighborhood((32, 32), 5, step=2, border="shifted"),
    neighborhood((4, 8, 8), 3, border="shifted", causal=(True, False, False)),
    neighborhood((13, 37), 5),  # no box divides it: the last one of an axis begins earlier
    neighborhood((29, 23), 5, step=(2, 1)),
    neighborhood((40, 13), (7, 3), step=(3, 1), border="shifted"),  # boxes of queries with one residue
    neighborhood((28, 28), 5, step=4, border="shifted"),  # boxes of 7 × 7 queries
    neighborhood((6, 11, 13), (3, 5, 5)),
    neighborhood((30, 46), (18, 24), border="shifted"),  # many blocks whose pairs are all allowed
]


def passes_of_grid(pattern, by_keys=False):
    from regard.engine.cuda.tile_lists import in_boxes

    n = getattr(pattern, "size", 4096)
    return in_boxes((pattern, n, n, 0, 1), by_keys, CPU) or masked(pattern, n, by_keys)


@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize("grid", GRIDS, ids=repr)
def test_tiles_that_are_boxes_visit_every_pair_of_each_head_once(grid, by_keys):
    from regard.engine.cuda.call import contiguous
    from regard.engine.cuda.work_split import flatten_heads, split_work

    n, heads = grid.size, 2
    (step,) = passes_of_grid(grid, by_keys).steps
    flat, long = flatten_heads(step, 1, (contiguous(1, heads, n, 64),))
    assert long[0].shape[2] == heads * n and flat.work.sizes.all()
    cut, a = split_work(flat.work, 1, 5, multiple=2), np.arange(64)
    seen, masks = np.zeros((heads * n, heads * n), dtype=int), flat.work.masks
    assert torch.equal(cut.masks, masks.words)
    for row in cut.blocks.numpy():
        allowed, count = counted_pairs(row, cut.masks.numpy()), row[8] & 255
        assert not (allowed[:, count:].any() and row[9] & 1)
        of_member = {"a": a, "hop": row[11]}
        members = row[10] + eval(masks.spread, of_member)
        owned = a < (row[9] >> 8 & 255)
        if masks.owned is not None:
            owned &= eval(masks.owned, of_member)
        keys = row[0] + cut.masks.numpy()[row[1] : row[1] + count]
        seen[np.ix_(members[owned], keys)] += allowed[owned, :count]
    pairs = grid.allowed(n).numpy()
    assert (seen == np.kron(np.eye(heads, dtype=int), pairs.T if by_keys else pairs)).all()


def test_boxes_have_the_fewest_blocks_and_share_their_lists():
    (step,) = passes_of_grid(neighborhood((64, 64), 7)).steps
    assert len(step.work.blocks) == 220  # 436 for lines of 64, which meet 7 lines
    assert len(step.work.masks.words) <= 28 * (
        128 + 64
    )  # of 28 blocks in the corners, at the edges and inside


@pytest.mark.parametrize("by_keys", [False, True])
def test_blocks_of_boxes_whose_pairs_are_all_allowed_are_not_tested(by_keys):
    grid = neighborhood((15, 24, 40), (9, 12, 12), border="shifted")
    (step,) = passes_of_grid(grid, by_keys).steps
    lines = masked(grid, grid.size, by_keys).steps
    blocks = step.work.blocks.numpy()
    assert len(blocks) < 0.6 * sum(len(x.work.blocks) for x in lines)
    assert 0.1 < (blocks[:, 9] & 1 == 0).mean() < 0.9
    assert step.work.masks.words.numel() < 64 * len(blocks)  # a mask and a list have 192 words


@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize(
    ("pattern", "boxes"),
    [
        (neighborhood((64, 64), 7), True),
        (neighborhood((60, 64), 7), True),
        (neighborhood((61, 53), 7), True),  # the last box of an axis begins earlier
        (neighborhood((3, 5, 4), 3), False),  # it is smaller than any box of 64
        (neighborhood((64, 64), 7, step=3), True),  # boxes of every third query
        (neighborhood((64, 64), (1, 9)), False),  # they would have as many blocks as lines
        (window(64), False),
    ],
    ids=repr,
)
def test_a_grid_runs_in_boxes_where_they_have_fewer_blocks_than_lines(pattern, boxes, by_keys):
    (step,) = passes_of_grid(pattern, by_keys).steps
    assert (step.work.masks.spread is not None) == boxes


def test_explain_counts_the_pairs_of_boxes(monkeypatch):
    from regard.engine.backends import TABLE
    from regard.engine.call import CallFacts
    from regard.engine.cuda import backend

    grid, half = neighborhood((64, 64), 7), {"dtype": torch.bfloat16, "d_k": 64, "d_v": 64}
    facts = CallFacts(grid, 4096, 4096, device="cuda", **half)
    lines = TABLE["triton"].prepare(facts).computed()
    monkeypatch.setattr(backend, "_hopper_passes", lambda f: passes_of_grid(grid).steps)
    # 16 × 4 boxes of 4 × 16 queries: at an edge they meet 7 lines and 19 columns, elsewhere 10 and 22
    assert TABLE["triton"].prepare(facts).computed() == 64 * (2 * 7 + 14 * 10) * (2 * 19 + 2 * 22) < lines / 2


LONG_AND_SHORT = [
    sinks(16) | window(40),  # one tile of keys that all queries may attend to, next to short ones
    window(40) | rows(64, 3),
    causal() & (every(64) | window(5) | sinks(40)),
    causal() & strided(32) | rows(100, 7),
]


@pytest.mark.parametrize("programs", [1, 3, 16, 200])
@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize("pattern", [*PATTERNS, *LONG_AND_SHORT], ids=repr)
def test_only_tiles_longer_than_a_programs_share_are_split_and_each_tile_is_in_one_pass(
    pattern, by_keys, programs
):
    from regard.engine.cuda.schedule import MIN_SPLIT, DevicePasses
    from regard.engine.cuda.work_split import MIN_EXCESS, by_size

    def sizes(works):
        return sorted(
            (int(begin[10]), int(begin[11]), int(size), begin[:9].tolist())
            for work in works
            for size, begin in zip(work.sizes, work.blocks[np.cumsum(work.sizes) - work.sizes].numpy())
        )

    before = steps(pattern, 1000, by_keys)
    after = by_size(DevicePasses(before, True), programs).steps
    assert sizes([x.work for x in before]) == sizes([x.work for x in after])
    assert sum(len(x.work.blocks) for x in after) == sum(len(x.work.blocks) for x in before)
    assert [x.work.blocks.unique(dim=0).shape for x in after] == [x.work.blocks.shape for x in after]
    for one in before:
        mine = [x for x in after if x.work.masks is one.work.masks]
        assert all((x.accumulates, x.covered) == (one.accumulates, one.covered) for x in mine)
        parted, whole = ([x for x in mine if x.work.split == split] for split in (True, False))
        assert len(parted) <= 1 and len(whole) <= 1
        left = np.concatenate([x.work.sizes for x in whole] or [np.zeros(1, dtype=int)])
        assert left.max() <= max(left.sum() / programs + MIN_EXCESS, MIN_SPLIT)
        for x in parted:
            least = x.work.sizes.min()
            assert least > max((left.sum() + least) / programs + MIN_EXCESS, MIN_SPLIT)


def test_tiles_of_equal_length_are_not_split_however_long_they_are():
    from regard.engine.cuda.schedule import DevicePasses
    from regard.engine.cuda.work_split import by_size

    (step,) = steps(window(512), 2048, False)
    assert step.work.split and step.work.sizes[1:].min() > 30  # the general kernels split them
    (whole,) = by_size(DevicePasses((step,), True), 16).steps
    assert not whole.work.split and whole.work.blocks is step.work.blocks
    (apart,) = by_size(DevicePasses((step,), True), 1000).steps  # more programs than tiles
    assert apart.work.split


def test_one_long_tile_does_not_cut_the_others():
    from regard.engine.cuda.schedule import DevicePasses
    from regard.engine.cuda.work_split import by_size, split_work

    (step,) = steps(sinks(16) | window(40), 1000, True)
    long, rest = by_size(DevicePasses((step,), True), 8).steps
    assert len(long.work.sizes) == 1 and long.work.split and not rest.work.split
    assert split_work(long.work, 2, 16).slots > 1
    cut = split_work(rest.work, 2, 16)
    assert cut.slots == 0 and len(cut.joins) == 0
    assert split_work(step.work, 2, 16).slots > 8  # without that


@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize(
    ("grid", "in_boxes"), [(neighborhood((32, 32), 15), True), (neighborhood((30, 30), 29), False)], ids=repr
)
def test_boxes_of_a_grid_are_not_split_and_its_lines_may_be(monkeypatch, grid, in_boxes, by_keys):
    """What adds up the parts of a tile expects that its rows have one step; those of a box have not."""
    from regard.engine.cuda import work_split
    from regard.engine.cuda.call import CallLayout, Task, contiguous, default
    from regard.engine.cuda.hopper import launches as hopper

    monkeypatch.setattr(hopper, "programs_at_a_time", lambda config, device: 396)
    monkeypatch.setattr(work_split, "MIN_SPLIT", 2)  # as if these tiles were long
    configs = default(64, 64, torch.bfloat16)
    task = Task(grid, 0, 1, 0.125, 0.0, None, configs)
    call = CallLayout(task, (contiguous(1, 1, grid.size, 64),) * 5, torch.bfloat16, CPU)
    config = configs.hopper_dkv if by_keys else configs.hopper_forward
    steps = hopper.hopper_passes(call, config, by_keys).steps
    assert all((x.work.masks.spread is not None) == in_boxes for x in steps)
    assert any(x.work.split for x in steps) == (not in_boxes)


@pytest.mark.parametrize(
    ("n", "heads", "expected"),
    [
        (2048, 16, 16),  # 16 MB: the rows of all heads fit into the cache
        (16384, 16, 4),  # 134 MB; of one head 32,896 blocks, of which 396 programs have 83
        (16384, 3, 3),  # 3 heads have one divisor below: too few blocks
        (65536, 16, 1),
    ],
)
def test_heads_whose_rows_exceed_the_cache_run_one_after_the_other_if_programs_stay_busy(n, heads, expected):
    from regard.engine.cuda.call import contiguous
    from regard.engine.cuda.work_split import heads_at_a_time

    (step,) = masked(causal(), n).steps
    assert heads_at_a_time(step.work, heads, contiguous(1, heads, n, 128), 396) == expected


def test_heads_of_split_tiles_run_at_the_same_time():
    from regard.engine.cuda.call import contiguous
    from regard.engine.cuda.work_split import heads_at_a_time

    (step,) = masked(causal(), 65536).steps
    work = replace(step.work, split=True)
    assert heads_at_a_time(work, 16, contiguous(1, 16, 65536, 128), 396) == 16

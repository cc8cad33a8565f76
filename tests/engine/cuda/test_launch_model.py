"""The launches of the Hopper kernels, by a model on the CPU: every allowed pair is counted once, nothing is read
before it is written, and no launch starts too early. (Numbers are the subject of other tests.)"""

import math
import random
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from unittest import mock

import pytest

from long_cases import in_long, rows_in_long

pytest.importorskip("triton.experimental.gluon")  # the kernels are written in it
from launch_model import LaunchError, check_backward, check_forward
from modeled_gpu import Case, modeled_gpu
from regard.engine.cuda import launches, work_split
from regard.engine.cuda.hopper import launches as hopper
from regard.engine.cuda.hopper.launches import forward as forward_launches
from regard.engine.cuda.hopper.launches import hopper_passes
from regard.engine.cuda.prepared import Launch
from regard.engine.cuda.schedule import TESTED, device_passes
from regard.engine.cuda.tile_lists import in_boxes, with_masks
from regard.engine.cuda.work_split import by_size, chain_passes, split_work
from regard.pattern import (
    Pattern,
    blocks,
    causal,
    dilated,
    every,
    full,
    neighborhood,
    prefix,
    rows,
    sinks,
    strided,
    window,
)

# Random calls


def random_word(rng: random.Random) -> Pattern:
    at = rng.random()
    period = rng.choice([7, 16, 24, 32, 50, 64, 100, 128])
    offset = rng.randrange(period) if at < 0.4 else 0
    return rng.choice(
        [
            causal,
            lambda: window(rng.choice([2, 5, 16, 40, 64, 100, 128, 200])),
            lambda: every(period, offset),
            lambda: rows(period, offset),
            lambda: sinks(rng.choice([0, 1, 3, 16, 64, 70, 100])),
            lambda: strided(rng.choice([4, 8, 13, 32, 64, 128])),
            lambda: dilated(rng.choice([3, 8, 32, 64]), rng.choice([2, 5, 8, 16, 64])),
            lambda: prefix(rng.choice([13, 64, 100, 300])),
            lambda: blocks(rng.choice([7, 32, 64, 100, 128])),
        ]
    )()


def random_pattern(rng: random.Random) -> Pattern:
    pattern = random_word(rng)
    for _ in range(rng.choice([0, 1, 1, 2, 2, 3])):
        other, at = random_word(rng), rng.random()
        pattern = pattern | other if at < 0.7 else pattern & other if at < 0.85 else pattern - other
    return causal() & pattern if rng.random() < 0.5 else pattern


def random_case(seed: int, most_pairs: int) -> Case:
    """A call of at most so many pairs of rows, of all heads."""
    rng = random.Random(seed)
    while True:
        h, b = rng.choice([1, 1, 2, 2, 3, 4]), rng.choice([1, 1, 2])
        h_kv = rng.choice([x for x in range(1, h + 1) if h % x == 0])
        n = m = rng.choice([65, 128, 192, 256, 320, 500, 512, 640, 768, 1000, 1024, 1280, 1536, 2048])
        start, step = 0, 1
        if rng.random() < 0.25:
            m = rng.choice([64, 100, 256, 512, 700, 1024])
            start, step = rng.choice([0, m - n, -70, 5, 100]), rng.choice([1, 1, 1, 2, 3])
        pattern, d = random_pattern(rng), rng.choice([64, 96, 128, 160, 256])
        programs = rng.choice([1, 2, 4, 8, 16, 24, 66, 132, 264, 396])
        if b * h * n * b * h_kv * m <= most_pairs:
            return Case(pattern, n, m, d, b, h, h_kv, start, step, programs, heads_inside=rng.random() < 0.2)


def check(case: Case) -> list[list[str]]:
    return [check_forward(case), check_backward(case)]


FEW, MANY = 1_000_000, 4_000_000


@pytest.mark.parametrize("seed", [*range(12), *in_long(*range(12, 40))])
def test_random_calls_count_every_pair_once(seed):
    check(random_case(seed, FEW))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10_000, 10_400))
def test_many_random_calls_count_every_pair_once(seed):
    check(random_case(seed, MANY))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(60))
def test_random_global_rows_count_every_pair_once(seed):
    """Many of these are mixed: tiles of global rows and others in one launch."""
    rng = random.Random(seed)
    some = rng.choice([every(2), ~every(2), strided(2), prefix(640), ~prefix(64)])
    few = rows(rng.choice([64, 128]), rng.choice([0, 0, 5]))
    others = rng.choice([window(40), strided(64), dilated(8, 8), window(32) | every(64), blocks(64)])
    pattern = (few & some if rng.random() < 0.3 else few) | others
    check(Case(pattern, 1280, d=rng.choice([64, 256]), h=2, programs=rng.choice([8, 24, 132, 264])))


# Score terms


TERM_PATTERNS = {
    "one pass": (causal() & window(64), True),
    "passes that continue": (causal() & (window(64) | dilated(64, 8) | dilated(64, 64)), False),
    "global rows": (window(64) | rows(64), False),
}


@pytest.mark.parametrize("name", TERM_PATTERNS)
def test_with_lengths_heads_stay_apart_and_a_sink_joins_in_one_pass_alone(name):
    """A program reads the lengths of one batch row; a sink is added once to every row."""
    pattern, joins = TERM_PATTERNS[name]
    case = Case(pattern, 8192, d=128, b=2, h=2, programs=24)
    for terms, apart in (({}, False), ({"lengths": 1}, True), ({"lengths": 2}, True)):
        call = case.call._replace(has_sink=True, **terms)
        with modeled_gpu(case.programs):
            route, forward, _ = forward_launches(call._replace(tensors=call.tensors[:3]))
            both = [*forward, *hopper.dq(call)[1], *hopper.dkv(call)[1]]
            assert launches.joins_sink(call, route) is joins
        tiled = [
            launch for launch, _ in both if launch.kernel.__name__.startswith("hopper") and launch.grid[0]
        ]
        numbers = [dict(zip(reversed(x.kernel.arg_names[:-1]), reversed(x.numbers))) for x in tiled]
        if apart:
            assert {x["all_heads"] for x in numbers} == {4} and not any(x.sizes["S"].CHAINED for x in tiled)
        else:
            assert 1 in {x["all_heads"] for x in numbers}
        assert {x.sizes["S"].LENGTHS for x in tiled} == {terms.get("lengths", 0)}
        assert {x.sizes["S"].SINKS for x in tiled[:1]} == {joins}


def test_no_sink_joins_where_programs_share_tiles():
    """Each of them would add it to its part."""
    case = Case(full(), 4096, d=128, programs=396)
    call = case.call._replace(has_sink=True)
    with modeled_gpu(case.programs):
        route, made, _ = forward_launches(call._replace(tensors=call.tensors[:3]))
        assert len(route.steps) == 1 and route.steps[0].work.split
        assert not launches.joins_sink(call, route) and not made[0][0].sizes["S"].SINKS


# Calls that need one thing each

WIDE = Case(causal(), 1280, d=256, programs=396)
CONTINUED = Case(
    causal() & (sinks(100) | rows(128, 81)), 1536, d=96, h=2, h_kv=1, programs=24, heads_inside=True
)
KEYS_CONTINUED = Case(
    every(32, 13) | causal() | window(100) | strided(4), 1536, 100, 160, start=-1436, programs=24
)
APART = Case(causal() & (window(5) | rows(32) | dilated(32, 2)), 1280, 64, 160, b=2, start=100, programs=4)
ADDED = Case(causal() & every(16) & (strided(13) | window(64)), 1280, d=256, programs=8)
KEYS_ADDED = Case(every(32, 22) | every(50) | window(200), 1536, d=160, h=2, h_kv=1, programs=396)
CLEARED = Case(rows(50), 320)
EVERY_SECOND = Case(window(64) | every(64), 1312, h=2, step=2)  # 64 divides 2 · 1312, and not 1312
GROUPED = Case(causal() & (window(64) | every(64)), 512, h=4, h_kv=2, programs=264)
CHAINED = Case(causal() & (window(64) | dilated(64, 8)), 1024, d=64, programs=66)
WIDE_CHAINED = replace(CHAINED, d=256)
MIXED = Case(rows(128) | window(64), 1280, h=2, programs=264)
BOXES = Case(neighborhood((40, 40), 31), 1600)  # of up to 23 blocks: tiles of more than 16 can be split
ODD_BOXES = Case(neighborhood((13, 37), 5), 481, h=4, h_kv=2)  # which no box divides
NAMED = {
    "heads of 256, split tiles": (
        WIDE, ["forward SPLIT", "forward WAITS_AT_END", "merge"],
        ["dq SPLIT", "dq WAITS_AT_END", "dkv SPLIT", "dkv ADDS", "sum"],
    ),
    "split tiles that continue": (
        CONTINUED, ["forward", "forward SPLIT ACCUMULATES", "merge ACCUMULATES"],
        ["dq", "dq SPLIT ACCUMULATES", "sum ACCUMULATES", "dkv SPLIT", "dkv ADDS"],
    ),
    "split tiles of keys that continue": (
        KEYS_CONTINUED, ["forward"],
        ["dq", "dkv", "dkv ACCUMULATES", "dkv SPLIT ACCUMULATES", "sum ACCUMULATES"],
    ),
    "passes of different rows": (APART, ["forward", "forward WAITS_AT_END"], ["dq", "dq WAITS_AT_END", "dkv"]),
    "parts that the next launch adds up": (ADDED, ["forward"], ["dq", "dkv SPLIT", "dkv ADDS"]),
    "every second position": (EVERY_SECOND, ["forward"], ["dq", "dkv SPLIT", "dkv ADDS"]),
    "grouped heads": (GROUPED, ["forward"], ["dq", "dkv", "dkv"]),
    "chained passes": (
        CHAINED, ["forward", "forward ACCUMULATES"], ["dq ACCUMULATES CHAINED", "dkv ACCUMULATES CHAINED"]
    ),
    "chained passes, forward too": (
        WIDE_CHAINED, ["forward ACCUMULATES CHAINED"], ["dq ACCUMULATES CHAINED", "dkv ACCUMULATES CHAINED"]
    ),
    "chained passes, many tiles of a program": (
        replace(WIDE_CHAINED, programs=4), ["forward ACCUMULATES CHAINED"],
        ["dq ACCUMULATES CHAINED", "dkv ACCUMULATES CHAINED"],
    ),
    "global rows and others in one launch": (
        MIXED, ["forward SPLIT", "merge"], ["dq SPLIT", "dq WAITS_AT_END", "dkv", "sum"]
    ),
    "boxes": (BOXES, ["forward BOXES"], ["dq BOXES", "dkv BOXES"]),
    "boxes that share members": (ODD_BOXES, ["forward BOXES"], ["dq BOXES", "dkv BOXES"]),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_named_calls_count_every_pair_once(name):
    case, *expected = NAMED[name]
    assert check(case) == expected


def test_forward_passes_whose_rows_fit_into_the_cache_are_not_chained():
    call = WIDE_CHAINED.call
    with modeled_gpu(WIDE_CHAINED.programs), mock.patch.object(hopper, "CACHE", 4 * 2 * 1024 * 256):
        _, program = launches.forward(call._replace(tensors=call.tensors[:3]))
    assert len(program.launches) == 2 and program.workspace["counters"] == 0 and not program.zeroed


SHARED_RUNS = Case(causal(), 512, b=2, h=4, h_kv=2, programs=12)
SPLIT_RUNS = Case(window(64) | rows(64), 512, b=3, h=2, programs=40)  # of which a pass has split tiles


@pytest.mark.parametrize(
    ("case", "min_run"),
    [
        (SHARED_RUNS, 1),
        (SPLIT_RUNS, 1),
        (SPLIT_RUNS, 10_000),
        (replace(ODD_BOXES, b=3), 1),
        *rows_in_long(*product((SHARED_RUNS, SPLIT_RUNS, replace(ODD_BOXES, b=3)), (20,))),
        *rows_in_long((SHARED_RUNS, 10_000), (replace(ODD_BOXES, b=3), 10_000)),
    ],
)
def test_heads_that_run_one_after_the_other_count_every_pair_once(case, min_run):
    with mock.patch.object(work_split, "CACHE", 0), mock.patch.object(work_split, "MIN_RUN", min_run):
        check(case)


@pytest.mark.long
@pytest.mark.parametrize("border", ["clipped", "shifted"])
@pytest.mark.parametrize("shape", [(16, 16), (8, 8, 16), (32, 32), (24, 32), (256,), (23, 37), (6, 11, 13)])
def test_grids_count_every_pair_once(shape, border):
    for size in range(3, min(*shape, 12), 2):
        for step in (1, 2) if size * 2 < min(shape) else (1,):
            pattern = neighborhood(shape, size, step=step, border=border)
            check(Case(pattern, math.prod(shape), h=2, programs=1))


def random_grid(rng):
    """Any lengths and kernels, dilation, border and causal axes; at most 1,000 positions."""
    while True:
        shape = [
            rng.randint(2, {1: 900, 2: 40, 3: 13}[axes])
            for axes in [rng.choice([1, 2, 3])]
            for _ in range(axes)
        ]
        if 64 < math.prod(shape) <= 1000:
            break
    step, border = [rng.choice([1, 1, 2, 3]) for _ in shape], rng.choice(["clipped", "shifted"])
    kernel = [rng.randint(1, max(length // by, 1)) for length, by in zip(shape, step)]
    step = [by if length >= by * size else 1 for length, by, size in zip(shape, step, kernel)]
    return neighborhood(shape, kernel, step, border, [rng.random() < 0.2 for _ in shape])


@pytest.mark.parametrize("seed", [*range(6), *in_long(*range(6, 10))])
def test_random_grids_count_every_pair_once(seed):
    grid = random_grid(random.Random(seed))
    check(Case(grid, grid.size, h=2, h_kv=1 + seed % 2, programs=(1, 66, 396)[seed % 3]))


def test_forward_and_dq_share_their_tables_and_none_is_kept_twice():
    device_passes.cache_clear()
    with_masks.cache_clear()
    check(CHAINED)
    assert with_masks.cache_info().currsize == 2  # by queries, by keys
    assert device_passes.cache_info().currsize == 0


# The model itself: each fault of the launches is reported


def changed(kernel, **how):
    """`Launch`, with other constants for the kernel of this name: its own, or fields of S."""

    def launch(of, *arguments, **given):
        if of.__name__ == kernel and "S" in given:
            given["S"] = given["S"]._replace(**how)
        elif of.__name__ == kernel:
            given |= how
        return Launch(of, *arguments, **given)

    return [(hopper, "Launch", launch), (launches, "Launch", launch)]


def changed_split(change):
    """`split_work`, whose result is changed in place."""

    def split(*arguments, **how):
        cut = split_work(*arguments, **how)
        change(cut)
        return cut

    return [(hopper, "split_work", split)]


def boxes_by_size(call, config, by_keys):
    route = in_boxes(call.place, by_keys, call.device)
    return by_size(route, hopper.programs_at_a_time(config, call.device))


def adds_to_any(before, step):
    """Without `before.accumulates`."""
    return before.work.split and not (step.work.split or step.accumulates)


def merged_first(call):
    route, made, parts = forward_launches(call)
    return route, sorted(made, key=lambda x: x[0].kernel is not hopper.merge_kernel), parts


def all_covered(call, config, by_keys):
    return replace(hopper_passes(call, config, by_keys), covers=True)


def drop_blocks(cut):
    cut.chunks[(cut.chunks[:, 1] - cut.chunks[:, 0]).argmax(), 1] -= 2


def join_fewer(cut):
    cut.joins[:, 2] -= 1


def join_fewer_parts(cut):
    cut.joins[:, 4] -= 1


def repeat_tile(cut):
    cut.chunks[0] = cut.chunks[-1]


def unmark_empty(cut):
    cut.blocks[cut.blocks[:, 8] & 255 < 64, 9] &= ~TESTED


def changed_chain(change):
    """`chain_passes`, where tiles wait for another number of tiles."""

    def chain_of(*arguments):
        made = chain_passes(*arguments)
        if made is not None:
            change(made[0].work.blocks[:, 5])
        return made

    return [(hopper, "chain_passes", chain_of)]


def launch_without_cooperation(*arguments, **given):
    return Launch(*arguments, **given | {"cooperative": False})


FAULTS = {
    "boxes are split": (
        BOXES, [(hopper, "hopper_passes", boxes_by_size)],
        "merge_kernel writes a row of o twice",
    ),
    "a query belongs to two boxes": (
        ODD_BOXES, changed("hopper_forward", owned=None),
        "hopper_forward writes a row of o that is written",
    ),
    "a key belongs to two boxes": (
        ODD_BOXES, changed("hopper_dkv", owned=None),
        "hopper_dkv writes a row of dk or dv that is written",
    ),
    "a sum forgets earlier results": (
        KEYS_CONTINUED, changed("sum_kernel", ACCUMULATES=False),
        "sum_kernel writes a row of dk or dv that is written",
    ),
    "a merge forgets earlier results": (
        CONTINUED, changed("merge_kernel", ACCUMULATES=False),
        "merge_kernel writes a row of o that is written",
    ),
    "parts are added to no earlier result": (
        KEYS_ADDED, [(hopper, "_adds", adds_to_any)],
        "hopper_dkv writes a row of dk or dv that is written",
    ),
    "a merge before its parts": (
        WIDE, [(hopper, "forward", merged_first)],
        "merge_kernel reads part_o before it is written",
    ),
    "a block is dropped": (GROUPED, changed_split(drop_blocks), "o: [0-9]+ pairs are missing, 0 are"),
    "a program runs twice": (
        GROUPED, changed_split(repeat_tile),
        "hopper_forward writes a row of o that is written",
    ),
    "empty columns are not tested": (
        replace(GROUPED, n=500), changed_split(unmark_empty),
        "hopper_forward: an empty column is counted",
    ),
    "a join has fewer rows": (WIDE, changed_split(join_fewer), "o: [0-9]+ rows are never written"),
    "a join has fewer parts": (WIDE, changed_split(join_fewer_parts), "o: [0-9]+ pairs are missing, 0 are"),
    "dk and dv do not wait for dq": (
        GROUPED, changed("hopper_dkv", WAITS=False),
        "hopper_dkv may start too early to read lse2 and delta",
    ),
    "a merge does not wait": (
        WIDE, changed("merge_kernel", EARLY=False),
        "merge_kernel may end before the launch before it",
    ),
    "a late pass ends early": (
        APART, changed("hopper_forward", WAITS_AT_END=False),
        "hopper_forward may end before the launch before it",
    ),
    "dq does not wait for its inputs": (
        CONTINUED, changed("hopper_dq", WAITS_AT_END=True),
        "hopper_dq may start too early to read its inputs",
    ),
    "lse2 is taken for computed": (
        GROUPED, changed("hopper_dq", COVERED=True),
        "hopper_dq reads lse2 and delta before it is written",
    ),
    "rows without a key are not cleared": (
        CLEARED, [(hopper, "hopper_passes", all_covered)],
        "o: [0-9]+ rows are never written",
    ),
    "chained tiles do not wait": (
        CHAINED, changed_chain(lambda x: x.zero_()),
        "hopper_dq writes a row of dq that is written",
    ),
    "chained tiles wait for too many": (
        CHAINED, changed_chain(lambda x: x.add_(1)),
        "hopper_dq: programs wait for one another forever",
    ),
    "chained tiles of queries do not wait": (
        WIDE_CHAINED, changed_chain(lambda x: x.zero_()),
        "hopper_forward writes a row of o that is written",
    ),
    "chained tiles of queries wait for too many": (
        WIDE_CHAINED, changed_chain(lambda x: x.add_(1)),
        "hopper_forward: programs wait for one another forever",
    ),
    "chained programs wait for idle ones": (
        WIDE_CHAINED, [(hopper, "Launch", launch_without_cooperation)],
        "hopper_forward: programs wait for idle ones",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_reported(name):
    case, patches, message = FAULTS[name]
    with ExitStack() as stack:
        for holder, attribute, value in patches:
            stack.enter_context(mock.patch.object(holder, attribute, value))
        with pytest.raises(LaunchError, match=message):
            check(case)


# What the model has found

PREFIX_CHAINED = Case(causal() & (prefix(64) & dilated(3, 2) | strided(64)), 1280, d=160, programs=1)
ONLY_BY_KEYS = Case(
    causal() & (rows(100) | strided(13) - causal()) & window(128), 65, 1024, d=128, start=-70, step=3
)


def test_a_chained_block_that_a_prefix_ends_counts_no_more_rows():
    check(PREFIX_CHAINED)


def test_a_call_with_passes_by_keys_alone_waits_for_its_inputs():
    check(ONLY_BY_KEYS)


def test_global_rows_with_blocks_of_two_progressions_are_not_mixed_with_blocks_of_one():
    some = rows(128) & (sinks(1248) | ~sinks(1312))  # 19 blocks and a half on either side
    check(Case(some | window(16) - rows(128), 2560, h=2, programs=24))

"""What the streaming kernels are told to visit: every allowed pair once, in runs that programs share fairly."""

import importlib.util

import numpy as np
import pytest
import torch

from regard.pattern import causal, dilated, every, full, window

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

PATTERNS = [
    full(),
    causal(),
    causal() & (window(40) | every(16)),
    window(40) | every(16),
    dilated(5, 7),
]
CPU = torch.device("cpu")


def steps(pattern, n, by_keys):
    from regard.engine.kernels.configs import Config
    from regard.engine.kernels.route import route

    return route(pattern, n, n, 0, 1, Config(32, 16, 1, 1), by_keys, CPU).steps


def dealt(work, programs, group=1, rest=(0, 1)):
    from regard.engine.kernels.schedule import shares

    return shares(work, 2, programs, group, rest)


def members(row):
    """The members at the places of one block, as the kernels read its twelve words."""
    a, b, c1, a1, b1, c2, a2, b2, end = (int(x) for x in row[:9])
    c = np.arange(end)
    return np.where(c < c1, a + b * c, np.where(c < c2, a1 + b1 * c, a2 + b2 * c))


def tile(row):
    return int(row[10]) + int(row[11]) * np.arange(int(row[9]) >> 8 & 255)


@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_every_allowed_pair_is_visited_once_by_each_head_of_a_group(pattern, group, by_keys):
    n = 203
    seen = np.zeros((group, n, n), dtype=int)
    for step in steps(pattern, n, by_keys):
        for row in dealt(step.work, 10, group, (0, 2)).blocks.numpy():
            own = tile(row)
            if step.kept is not None:
                own = own[step.kept.allows(own, own)]
            there = members(row)
            i, j = (there[None], own[:, None]) if by_keys else (own[:, None], there[None])
            tested = (
                step.work.pattern.allows(i, j) if row[9] & 7 else True
            )  # a block without marks is taken whole
            seen[row[9] >> 16][np.ix_(own, there)] += tested
    allowed = pattern.allowed(n).numpy()
    allowed = allowed.T if by_keys else allowed
    assert (seen == allowed).all()


@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_runs_follow_one_another_begin_a_tile_and_differ_by_little(pattern):
    for by_keys in (False, True):
        for step in steps(pattern, 515, by_keys):
            cut = dealt(step.work, 10, rest=(0, 2))
            begin, end = cut.chunks.numpy().T
            assert begin[0] == 0 and (begin[1:] == end[:-1]).all() and end[-1] == len(cut.blocks)
            assert ((end - begin) % 2 == 0).all() and (cut.blocks[begin, 9] & 8 != 0).all()
            if step.work.slots:
                assert np.ptp(end - begin) <= 2


@pytest.mark.parametrize("group", [1, 3])
def test_the_slots_of_a_split_tile_stand_side_by_side_and_a_whole_tile_has_none(group):
    (step,) = steps(causal(), 515, True)
    cut = dealt(step.work, 10, group, (0, 2))
    blocks, slot = cut.blocks.numpy(), cut.slot.numpy()
    joins = {int(first): (int(at), int(pieces)) for first, _, _, at, pieces, *_ in cut.joins.numpy()}
    assert joins and len(slot) == len(blocks) and set(slot) - {-1} == set(range(cut.slots))
    for first in np.unique(blocks[:, 10]):
        used = set(slot[blocks[:, 10] == first])
        at, pieces = joins.get(int(first), (-1, 1))
        assert used == set(range(at, at + pieces))
    assert (np.diff(slot)[blocks[1:, 9] & 8 == 0] == 0).all()  # a slot changes only where a share begins


def test_what_fills_a_run_holds_nobody_and_begins_nothing():
    (step,) = steps(causal(), 203, True)
    cut = dealt(step.work, 10, rest=(0, 2))
    empty = cut.blocks[cut.blocks[:, 8] == 0]
    assert len(empty) and (empty[:, 9] & 15 == 1).all()

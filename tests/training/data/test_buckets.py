"""Batches of few shapes: every row once, no token lost, and padding that changes nothing."""

import pytest
import torch

import regard as rg
from regard.errors import SpecError
from regard.schedule import constant
from regard.training.data.batches import by_tokens
from regard.training.data.buckets import bucket_shape, bucket_size, pad_to_bucket
from regard.training.data.ragged import Ragged
from regard.training.data.rows import Pairs
from regard.training.loop.settings import Settings
from regard.training.recipes import recipe


def pairs(rows: int = 400) -> Pairs:
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 61, (rows, 2), generator=random).tolist()
    return Pairs(*(Ragged.of([[4 + i % 7] * n[side] for i, n in enumerate(lengths)]) for side in (0, 1)))


def test_sizes_are_multiples_of_four_and_at_most_an_eighth_of_a_power_of_two_too_long():
    for n in range(1, 500):
        size = bucket_size(n)
        assert size % 4 == 0 and n <= size < n + max(4, 2 ** (n - 1).bit_length() / 8)
        assert bucket_size(size) == size


def test_every_row_is_in_one_batch_that_fits():
    data, tokens = pairs(), 700
    plan = by_tokens(data.sizes, tokens, bucketed=True, seed=3)
    assert sorted(plan.rows.tolist()) == list(range(len(data)))
    shapes = [bucket_shape(data.sizes[plan[i]].amax(0).tolist(), tokens) for i in range(len(plan))]
    for i, (rows, *sides) in enumerate(shapes):
        assert len(plan[i]) <= rows and rows * sum(sides) <= tokens
    assert plan.padded == sum(rows * sum(sides) for rows, *sides in shapes)


def test_there_are_far_fewer_shapes_than_batches_and_little_padding():
    """Sorted rows would give about as many shapes as batches."""
    data = pairs(20_000)
    plan = by_tokens(data.sizes, 4000, bucketed=True)
    shapes = {bucket_shape(data.sizes[plan[i]].amax(0).tolist(), 4000) for i in range(len(plan))}
    assert len(shapes) < len(plan) / 2 and plan.padding_share < 0.2


def test_the_order_depends_on_the_epoch():
    sizes = pairs().sizes
    one, again, other = (by_tokens(sizes, 700, bucketed=True, epoch=e) for e in (0, 0, 1))
    assert torch.equal(one.rows, again.rows) and one.cuts == again.cuts
    assert not torch.equal(one.rows, other.rows)


def test_a_padded_batch_has_the_same_loss():
    data = pairs()
    plain = data.batch(torch.tensor([3, 8, 21]))
    padded = pad_to_bucket(plain, 7)
    assert [t.shape[0] for t in padded.inputs.values()] == [7] * 4
    assert padded.inputs["source"].shape[1] == bucket_size(plain.inputs["source"].shape[1])
    assert padded.predicted == plain.predicted
    chosen = recipe("translate", d_model=32, layers=1, heads=2)
    task = chosen.task(chosen.model.build().double()).eval()
    with torch.no_grad():
        assert float(task(**padded.inputs)[1]) == pytest.approx(float(task(**plain.inputs)[1]), rel=1e-12)


def test_packed_and_bucketed_exclude_each_other():
    with pytest.raises(SpecError, match="packed=True and bucketed=True cannot be combined"):
        Settings(1, 100, constant(1e-3), packed=True, bucketed=True)


def test_consistency_is_for_translators():
    with pytest.raises(
        SpecError, match=r"consistency=1\.0 is for translators; ContinuousText has no such loss"
    ):
        chosen = recipe("language-model")
        rg.training.Recipe("x", chosen.model, chosen.data, chosen.settings, consistency=1.0)

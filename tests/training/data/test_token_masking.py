"""What is drawn anew for each batch: how much, of what, and the same again from the same random state."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import regard as rg
from regard.training.data.image_augmentation import random_affine
from regard.training.data.ragged import Ragged
from regard.training.data.rows import IGNORED, Labeled
from regard.training.data.token_masking import MaskedSentences
from regard.training.data.tokens import PAD

MASK = 103
rows = st.lists(st.lists(st.integers(4, MASK - 1), min_size=1, max_size=40), min_size=1, max_size=12)


@given(rows, st.sampled_from([0.15, 0.4, 1.0]), st.integers(0, 99))
def test_a_share_of_each_row_is_hidden_and_at_least_one(made, share, seed):
    torch.manual_seed(seed)
    batch = MaskedSentences(Ragged.of(made), MASK, share).batch(torch.arange(len(made)))
    wanted, tokens = batch.inputs["targets"], batch.inputs["tokens"]
    hidden = wanted != IGNORED
    for i, row in enumerate(made):
        here = hidden[i, : len(row)]
        assert int(here.sum()) == max(1, round(share * len(row)))
        shown = torch.where(here, wanted[i, : len(row)], tokens[i, : len(row)])
        assert shown.tolist() == row  # what is asked and what is shown make the sentence
        assert not hidden[i, len(row) :].any() and set(tokens[i, len(row) :].tolist()) <= {PAD}
    assert batch.predicted == int(hidden.sum())


def test_of_ten_hidden_tokens_eight_are_masks_one_another_one_itself():
    torch.manual_seed(0)
    data = MaskedSentences(Ragged.of([[7] * 100] * 400), MASK)
    given = data.batch(torch.arange(400)).inputs
    shown = given["tokens"][given["targets"] != IGNORED]
    assert len(shown) == 400 * 15
    masks, itself = float((shown == MASK).float().mean()), float((shown == 7).float().mean())
    assert masks == pytest.approx(0.8, abs=0.02) and itself == pytest.approx(0.1, abs=0.015)
    others = shown[(shown != MASK) & (shown != 7)]
    assert int(others.min()) >= 4 and int(others.max()) < MASK and len(others.unique()) > 80


def test_hidden_anew_each_time_and_alike_from_one_random_state():
    data = MaskedSentences(Ragged.of([list(range(4, 44))] * 7), MASK)
    state = torch.get_rng_state()
    one, two = (data.batch(torch.arange(7)).inputs["targets"] for _ in range(2))
    assert not torch.equal(one, two)
    torch.set_rng_state(state)
    assert torch.equal(data.batch(torch.arange(7)).inputs["targets"], one)


def test_what_is_validated_is_hidden_once_however_it_is_batched():
    data = MaskedSentences(Ragged.of([list(range(4, 4 + n)) for n in (3, 11, 7, 20)]), MASK)
    state = torch.get_rng_state()
    held, again = data.fixed(5), data.fixed(5)
    assert torch.equal(torch.get_rng_state(), state)  # the run's own draws are not touched
    whole = held.batch(torch.arange(4)).inputs
    for i, n in enumerate((3, 11, 7, 20)):
        alone = again.batch(torch.tensor([i])).inputs
        for name in ("tokens", "targets"):
            assert torch.equal(alone[name][0], whole[name][i, :n])
    assert not torch.equal(data.fixed(6).batch(torch.arange(4)).inputs["targets"], whole["targets"])
    assert held.sizes.tolist() == [[3], [11], [7], [20]] and len(held) == 4


@pytest.mark.parametrize("share", [0, 1.5])
def test_no_share_and_more_than_all_are_refused(share):
    with pytest.raises(
        rg.SpecError, match=rf"^share={share} of the tokens masked; it needs to be above 0 and at most 1$"
    ):
        MaskedSentences(Ragged.of([[4]]), MASK, share)


def test_images_move_as_far_as_declared():
    torch.manual_seed(0)
    dot = torch.zeros(500, 1, 9, 9)
    dot[:, :, 4, 4] = 1.0
    assert torch.equal(random_affine(0, 0, 0)(dot), dot)
    along = torch.arange(9.0) - 4
    shifted = random_affine(1.5, 0, 0)(dot)
    for axis in (-1, -2):
        center = (shifted.sum(dim=(1, -3 - axis)) * along).sum(-1) / shifted.sum(dim=(1, 2, 3))
        assert 1.3 < float(center.abs().max()) <= 1.5 + 1e-4 and float(center.abs().min()) < 0.2
    # a turn about the middle leaves it there, and moves what is far from it: 4 · sin 20° = 1.37 pixels
    assert torch.allclose(random_affine(0, 20, 0)(dot)[:, 0, 4, 4], torch.tensor(1.0))
    edge = torch.zeros(500, 1, 9, 9)
    edge[:, :, 4, 8] = 1.0
    down = (random_affine(0, 20, 0)(edge).sum(dim=(1, 3)) * along).sum(-1) / random_affine(0, 0, 0)(edge).sum(
        dim=(1, 2, 3)
    )
    assert 1.0 < float(down.abs().max()) < 2.0


def test_moved_rows_keep_their_labels_and_are_drawn_anew():
    torch.manual_seed(0)
    images = torch.rand(5, 1, 8, 8)
    data = Labeled(images, torch.arange(5), random_affine())
    one, two = (data.batch(torch.tensor([3, 1])) for _ in range(2))
    assert one.inputs["labels"].tolist() == [3, 1] and one.predicted == 2
    assert one.inputs["images"].shape == (2, 1, 8, 8)
    assert not torch.equal(one.inputs["images"], two.inputs["images"])
    assert data.sizes.tolist() == [[1]] * 5 and len(data) == 5
    with pytest.raises(rg.SpecError, match=r"^random_affine\(shift=-1, .*\): no amount can be below 0$"):
        random_affine(-1)

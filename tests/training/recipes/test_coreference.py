"""What "it" refers to: the sentences, and a trained model whose attention from "it" finds the noun."""

import pytest
import torch

from regard.lens import figures
from regard.training.data.coreference import OF_ANIMALS, OF_NEITHER, sentences
from regard.training.recipes.coreference import Coreference


@pytest.fixture(scope="module")
def task():
    return Coreference(seed=0)


@pytest.fixture(scope="module")
def model(task):
    """300 updates: about 3 s, three times as many with checked shapes."""
    torch.manual_seed(0)
    model = task.model()
    adam = torch.optim.AdamW(model.parameters(), 5e-3, betas=(0.9, 0.98))
    steps = 300
    schedule = torch.optim.lr_scheduler.OneCycleLR(adam, 5e-3, steps, pct_start=0.1)
    for _ in range(steps):
        adam.zero_grad()
        task.loss(model).backward()
        adam.step()
        schedule.step()
    return model.eval()


def test_the_last_word_decides_what_it_is(task):
    every = sentences()
    assert len(every) == len(set(every)) == 2000 and every[:2] == list(task.pair)
    for s in every:
        nouns = {s.words[1], s.words[5]}
        assert s.words[s.pronoun] == "it"
        if s.words[-1] in OF_NEITHER:
            assert s.referent == s.pronoun
        else:
            assert {s.words[s.referent], s.words[s.other]} == nouns
            assert (s.referent == 1) == (s.words[-1] in OF_ANIMALS)
    held = task.is_held_out
    assert bool(held[:2].all()) and 0.15 < float(held.float().mean()) < 0.25
    assert not set(task._train.tolist()) & set(held.nonzero()[:, 0].tolist())
    tired, soft = task.pair
    assert " ".join(tired.words) == "the cat sat on the mat because it was tired"
    assert (tired.words[tired.referent], soft.words[soft.referent]) == ("cat", "mat")


@pytest.mark.long
@pytest.mark.ledger("S2.1.1.1")
def test_the_attention_from_it_falls_on_the_cat_and_in_the_control_on_the_mat(task, model):
    view = task.view(model)
    tired, soft = (view.row(1, 0, "it", b) for b in (0, 1))
    assert tired["cat"] > 0.8 > 0.1 > tired["mat"]
    assert soft["mat"] > 0.8 > 0.1 > soft["cat"]
    shares = task.shares(model)
    assert shares.referent > 0.6 > 0.1 > shares.other
    assert task.accuracy(model) > 0.99 and shares.accuracy > 0.99
    assert shares.accuracy_without < 0.6  # the answer comes through this attention
    kind = view.kinds[1][0]
    assert kind.name == "coreference" and kind.confidence > 0.8
    drawn = figures.attention_rows(view, 1, 0, "it")
    assert [ax.get_title().split(" on ")[1] for ax in drawn.axes] == ["cat", "mat"]


@pytest.mark.ledger("S2.1.1.1")
def test_an_untrained_model_has_no_such_attention(task):
    torch.manual_seed(0)
    fresh = task.model().eval()
    shares = task.shares(fresh)
    assert max(shares.referent, shares.other) < 0.3 and shares.accuracy < 0.2
    assert task.view(fresh).kinds[1][0].name != "coreference"

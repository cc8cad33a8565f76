"""Packed batches: several texts in a row leave little padding, and teach what a padded batch teaches."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import regard as rg
from regard.nn.stack import document_positions
from regard.training import recipes
from regard.training.data.batches import Stream, by_tokens, packed_width
from regard.training.data.packing import pack, unpack
from regard.training.data.ragged import Ragged
from regard.training.data.rows import Batch, Labeled, Pairs
from regard.training.data.token_masking import MaskedSentences
from regard.training.data.tokens import PAD
from regard.training.recipes import preflight
from regard.training.recipes.run import Run
from regard.training.recipes.tasks import Classification, MaskedLanguageModeling
from training_run_case import regard

VOCAB, LONGEST = 23, 11
POSITIONS = {
    "learned": {"position": rg.learned(LONGEST)},
    "sinusoidal": {"position": rg.sinusoidal()},
    "rope": {"within": rg.rope()},
    "alibi": {"within": rg.alibi()},
    "t5": {"shared": rg.t5_buckets()},
    "none": {},
}
HEADS = {
    "hidden": rg.MaskedHead(),
    "mean": rg.ClassifierHead(3),
    "first": rg.ClassifierHead(3, pool="first"),
    "last": rg.ClassifierHead(3, pool="last"),
    "max": rg.ClassifierHead(3, pool="max"),
}


def model(head, position=None, within=None, shared=None):
    torch.manual_seed(1)
    attention = rg.Attention(12, heads=2, position=within)
    block = rg.Block(attention, rg.FeedForward(8), norm_at="pre")
    embedding = rg.Embedding(VOCAB, 12, position=position)
    return rg.Encoder(block, 2, embedding=embedding, position=shared, head=head).build().double()


def texts(lengths, seed=0) -> Ragged:
    noise = torch.Generator().manual_seed(seed)
    return Ragged.of([torch.randint(4, VOCAB, (n,), generator=noise).tolist() for n in lengths])


def learned_from(task, batch):
    task.zero_grad()
    loss, plain = task(**batch.inputs)
    loss.backward()
    return loss.detach(), plain, {name: p.grad for name, p in task.named_parameters()}


def same_lesson(task, batch):
    """Loss and every gradient, packed against padded, in float64."""
    padded, packed = learned_from(task, batch), learned_from(task, pack(batch, LONGEST + 2))
    for a, b in zip(padded[:2], packed[:2], strict=True):
        assert abs(float(a - b)) < 1e-10 * max(1.0, abs(float(a)))
    for name, grad in padded[2].items():
        if grad is None:
            assert packed[2][name] is None
        else:
            assert (grad - packed[2][name]).abs().max() < 1e-10, name


sizes = st.lists(st.integers(1, LONGEST), min_size=1, max_size=9)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("position", POSITIONS)
def test_a_packed_batch_teaches_what_a_padded_one_does(head, position):
    rows = texts([7, 1, 11, 3, 3, 5])
    torch.manual_seed(2)
    if head == "hidden":
        batch = MaskedSentences(rows, VOCAB - 1, 0.4).batch(torch.arange(6))
        same_lesson(MaskedLanguageModeling(model(HEADS[head], **POSITIONS[position]), smoothing=0.1), batch)
    else:
        batch = Labeled(rows, torch.tensor([0, 2, 1, 1, 0, 2])).batch(torch.arange(6))
        same_lesson(Classification(model(HEADS[head], **POSITIONS[position]), smoothing=0.1), batch)


TASK = MaskedLanguageModeling(model(HEADS["hidden"], rg.learned(LONGEST)))


@given(sizes, st.integers(0, 9))
@example([1, 1, LONGEST, 1], 0)  # what is left of the last row is longer than any text
def test_whatever_their_lengths_packed_texts_teach_the_same(lengths, seed):
    torch.manual_seed(seed)
    same_lesson(TASK, MaskedSentences(texts(lengths, seed), VOCAB - 1, 0.3).batch(torch.arange(len(lengths))))


@given(sizes, st.integers(LONGEST, 30))
def test_a_packed_batch_says_which_text_each_token_belongs_to(lengths, wide):
    rows = texts(lengths)
    batch = pack(Labeled(rows, torch.zeros(len(rows)).long()).batch(torch.arange(len(rows))), wide)
    assert set(batch.inputs) == {"tokens", "texts", "labels"} and batch.inputs["labels"].shape == (len(rows),)
    tokens, which = batch.inputs["tokens"], batch.inputs["texts"]
    assert tokens.shape == which.shape and tokens.shape[1] <= wide
    rest = which >= len(rows)
    assert tokens[~rest].tolist() == rows.ids.tolist() and set(tokens[rest].tolist()) <= {PAD}
    assert which[~rest].tolist() == [i for i, n in enumerate(lengths) for _ in range(n)]
    assert document_positions(which)[~rest].tolist() == [k for n in lengths for k in range(n)]
    states, counted = unpack(tokens[..., None].double(), which, len(rows))
    assert counted.tolist() == lengths
    assert [s[:n, 0].tolist() for s, n in zip(states, lengths, strict=True)] == [
        rows.ids[a : a + n].tolist() for a, n in zip(rows.starts.tolist(), lengths, strict=True)
    ]


@given(
    st.lists(st.integers(1, LONGEST), min_size=1, max_size=60), st.integers(LONGEST, 60), st.integers(0, 3)
)
def test_packed_batches_hold_every_text_once_within_the_budget(lengths, most, epoch):
    data = Labeled(texts(lengths), torch.zeros(len(lengths)).long())
    plan = by_tokens(data.sizes, most, packed=True, epoch=epoch)
    parts = [plan[i] for i in range(len(plan))]
    assert sorted(torch.cat(parts).tolist()) == list(range(len(lengths)))
    wide = packed_width(data.sizes, most)
    padded = [pack(data.batch(p), wide).inputs["tokens"].numel() for p in parts]
    assert max(padded) <= most and sum(padded) <= plan.padded and plan.real == sum(lengths)
    again = by_tokens(data.sizes, most, packed=True, epoch=epoch)
    assert torch.equal(plan.rows, again.rows) and plan.cuts == again.cuts


def test_few_texts_of_uneven_length_are_a_fifth_padding_unless_packed():
    noise = torch.Generator().manual_seed(0)
    lengths = (0.8 * torch.randn(500, generator=noise) + 4.3).exp().round().clamp(1, 256).long()[:, None]
    padded, packed = (by_tokens(lengths, 16_000, packed=p) for p in (False, True))
    assert padded.padding_share > 0.2 and packed.padding_share < 0.02
    one, two = (Stream(lengths, 16_000, packed=True, epoch=e).next() for e in (0, 1))
    assert not torch.equal(one, two)


def test_rows_that_are_no_texts_are_not_packed():
    pairs = Pairs(texts([3, 2]), texts([2, 2])).batch(torch.arange(2))
    with pytest.raises(
        rg.SpecError,
        match=r"^packed=True needs rows of tokens with lengths, and these rows have source and source_lengths and "
        r"target and targets; it is for classification and masked language models$",
    ):
        pack(pairs, 9)
    with pytest.raises(rg.SpecError, match=r"these rows have images and labels; it is for classification"):
        pack(Batch({"images": torch.zeros(2, 1, 8, 8), "labels": torch.zeros(2)}, 2), 9)


def test_a_cache_and_documents_do_not_go_together():
    built = model(rg.LanguageHead())
    with pytest.raises(
        rg.ShapeError,
        match=r"^documents and a cache cannot be combined; give each text a row of its own$",
    ):
        built(torch.ones(1, 4).long(), documents=torch.tensor([[0, 0, 1, 1]]), cache=built.cache())


def test_documents_join_a_pattern_or_a_mask_that_is_given():
    built, ids = model(None), torch.tensor([[0, 0, 0, 1, 1]])
    tokens = torch.arange(4, 9)[None]
    alone = torch.cat(
        [built(tokens[:, :3], pattern=rg.causal()), built(tokens[:, 3:], pattern=rg.causal())], 1
    )
    for seen in (rg.causal(), rg.causal().allowed(5, 5)):
        assert (built(tokens, documents=ids, pattern=seen) - alone).abs().max() < 1e-12


def test_a_run_of_packed_texts_learns_as_a_padded_one_and_logs_the_waste(tmp_path):
    rows = [
        ("b" if n % 3 else "a", " ".join(["one", "two", "cat"][: n % 3 + 1] * (n % 7 + 1))) for n in range(60)
    ]
    file = tmp_path / "a.tsv"
    file.write_text("".join(f"{label}\t{text}\n" for label, text in rows))
    dials = {"steps": 12, "d_model": 16, "layers": 1, "heads": 2, "tokens": 300, "packed": True}
    made = recipes.classify(str(file), str(file), **dials)
    made = replace(made, settings=replace(made.settings, log_every=1))
    assert recipes.Recipe.from_json(made.json()) == made
    run, seen = Run(made, tmp_path / "out", "cpu"), []
    run.train(seen.append)
    train = [e for e in seen if e["event"] == "train"]
    waste = preflight.mean_batch(run.data.train, 300, packed=True).padding_share
    assert 0 < waste < 0.1
    assert len(train) == 12 and {e["padding_share"] for e in train} == {waste}
    assert train[-1]["loss"] < train[0]["loss"]
    again, curve = Run(made, tmp_path / "again", "cpu"), []
    again.trainer.run(lambda e: curve.append(e["loss"]) if e["event"] == "train" else None)
    assert curve == [e["loss"] for e in train]
    # The same weights judge the held-out rows alike, packed or not.
    padded = replace(made, settings=replace(made.settings, packed=False))
    other = Run(padded, tmp_path / "out", "cpu")
    other.trainer.resume()
    run.trainer.resume()
    losses = [one.trainer._validate()["loss"] for one in (run, other)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    (tmp_path / "mine.json").write_text(made.json())
    plain = json.loads(regard("train", str(tmp_path / "mine.json"), "--dry-run", "--json"))
    assert plain["batch"]["padding_share"] == waste

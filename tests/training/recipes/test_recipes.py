"""Recipes and their sources: what each reads, refuses and begins to learn."""

import gzip
import json
from dataclasses import replace

import pytest
import torch

import regard as rg
from regard.training import recipes
from regard.training.data.datasets import ContinuousText, Digits, LabeledText, MaskedText, SentencePairs
from regard.training.data.tokens import UNKNOWN
from regard.training.loop.trainer import Trainer
from regard.training.recipes import RECIPES, Recipe, recipe
from regard.training.recipes.run import Run

VERSES = [f"the {a} {b} sat on the {c}" for a in ("red", "old", "big") for b in ("cat", "dog") for c in "xyz"]


def write(path, rows, *fields) -> str:
    """As TSV or text, or as JSONL; zipped where the name says so."""
    if ".jsonl" in path.name:
        lines = [json.dumps(dict(zip(fields, row, strict=True))) for row in rows]
    else:
        lines = ["\t".join(row) for row in rows]
    raw = ("\n".join(lines) + "\n").encode()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return str(path)


KINDS = ["tsv", "tsv.gz", "jsonl", "jsonl.gz"]


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_come_from_tables_and_records_alike(tmp_path, kind):
    file = write(tmp_path / f"a.{kind}", [(v, v[::-1]) for v in VERSES], "source", "target")
    made = SentencePairs(train=file, valid=file, vocab=300).load(tmp_path / "out")
    assert len(made.train) == len(VERSES) and made.texts[0] == (VERSES[0], VERSES[0][::-1])


@pytest.mark.parametrize("kind", KINDS)
def test_classes_come_from_tables_and_records_alike(tmp_path, kind):
    rows = [("b" if i % 3 else "a", v) for i, v in enumerate(VERSES)]
    file = write(tmp_path / f"a.{kind}", rows, "label", "text")
    made = LabeledText(file, file, vocab=300).load(tmp_path / "out")
    assert made.train.labels.tolist() == [int(i % 3 > 0) for i in range(len(VERSES))]
    assert json.loads((tmp_path / "out" / "labels.json").read_text()) == ["a", "b"]


@pytest.mark.parametrize("kind", ["txt", "txt.gz", "jsonl", "jsonl.gz"])
def test_texts_come_from_lines_and_records_alike(tmp_path, kind):
    file = write(tmp_path / f"a.{kind}", [(v,) for v in VERSES], "text")
    assert ContinuousText(file=file).text() == "\n".join(VERSES) + "\n"
    made = MaskedText(train=file, valid=file, vocab=300).load(tmp_path / "out")
    assert len(made.train) == len(made.valid) == len(VERSES) and made.train.mask == 299


REFUSED = {
    "empty": (b"", r"a\.tsv is empty"),
    "no label": (
        b"a\tx\n \ty\n",
        r"a\.tsv, line 2: the label before the tab is empty; needed: label<TAB>text",
    ),
    "no tab": (b"a\tx\nb y\n", r"a\.tsv, line 2: 0 tabs where one is needed, label<TAB>text$"),
    "two tabs": (b"a\tx\ty\n", r"a\.tsv, line 1: 2 tabs where one is needed, label<TAB>text$"),
    "not UTF-8": (b"a\tx\nb\t\xe9\n", r"a\.tsv, line 2: byte 3 is not UTF-8 \(.*\); convert the file first"),
    "another number of labels": (
        b"a\tx\nb\ty\nc\tz\n",
        r"a\.tsv has 3 labels \('a', 'b', 'c'\); the model has 2 classes; use classes=3$",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_classifier_refuses_bad_files_by_line(tmp_path, name):
    raw, message = REFUSED[name]
    (tmp_path / "a.tsv").write_bytes(raw)
    file = str(tmp_path / "a.tsv")
    with pytest.raises(rg.FormatError, match=message):
        LabeledText(file, file, classes=2).load(tmp_path / "out")


def test_a_classifier_has_as_many_classes_as_there_are_labels(tmp_path):
    file = write(tmp_path / "a.tsv", [("c", "x"), ("a", "y"), ("b", "z"), ("a", "w")])
    made = recipes.classify(file, file)
    assert made.model.head.classes == made.data.classes == 3
    assert Recipe.from_json(made.json()) == made


def test_texts_longer_than_the_limit_are_cut_and_counted(tmp_path):
    file = write(tmp_path / "a.tsv", [("a", VERSES[0]), ("b", "x " * 400), ("b", "")])
    made = LabeledText(file, file, vocab=300).load(tmp_path / "out")
    assert made.train.inputs.lengths.max() == 256 and made.truncated == 1
    assert made.train.batch(torch.tensor([2])).inputs["tokens"].tolist() == [[UNKNOWN]]  # an empty text
    lines = write(tmp_path / "b.txt", [(VERSES[0],), ("x " * 400,), ("",)])
    hidden = MaskedText(train=lines, valid=lines, vocab=300).load(tmp_path / "lines")
    assert hidden.train.tokens.lengths.max() == 64 and hidden.truncated == 1 and len(hidden.train) == 2


def test_lines_that_cannot_be_used_are_refused(tmp_path):
    with pytest.raises(rg.SpecError, match=r"^valid='a.txt' needs train= "):
        MaskedText(valid="a.txt")
    empty = write(tmp_path / "a.txt", [("",), ("",)])
    with pytest.raises(rg.FormatError, match=r"a\.txt has only empty lines$"):
        MaskedText(train=empty, valid=empty, vocab=300).load(tmp_path / "out")
    file = write(tmp_path / "b.txt", [(v,) for v in VERSES])
    MaskedText(train=file, valid=file, vocab=290).load(tmp_path / "other")
    with pytest.raises(rg.FormatError, match=r"tokens\.json in .* has \d+ tokens; the model has 270$"):
        MaskedText(train=file, valid=file, vocab=270).load(tmp_path / "other")
    with pytest.raises(rg.SpecError, match=r"^fold=5: it needs to be 0 to 4$"):
        Digits(5)


def test_a_language_model_reads_a_file_by_characters_or_byte_pairs(tmp_path):
    file = write(tmp_path / "a.txt", [(v,) for v in VERSES * 30])
    by_character = recipes.language_model(file=file, context=16)
    assert by_character.model.embedding.vocab == 4 + len({c for v in VERSES for c in v} | {"\n"})
    ready = by_character.data.load(tmp_path / "one")
    assert len(ready.tokens) == by_character.model.embedding.vocab and ready.train.context == 16
    by_pairs = recipes.language_model(file=file, vocab=300)
    ready = by_pairs.data.load(tmp_path / "two")
    assert by_pairs.model.embedding.vocab == 300 and len(ready.tokens) <= 300
    assert len(ready.train.ids) < len(by_character.data.load(tmp_path / "one").train.ids) / 3
    assert ready.tokens.decode([ready.train.ids[:40].tolist()])[0].startswith(VERSES[0])


def test_the_language_model_is_as_large_as_nanogpts():
    model = recipes.language_model().model
    assert (model.layers, model.block.attention.heads, model.d_model) == (4, 4, 128)
    built = model.build()
    weights = sum(p.numel() for p in built.blocks.parameters())
    assert weights == pytest.approx(4 * 12 * 128**2, rel=0.02)  # what 4 layers of nanoGPT hold
    assert recipes.language_model().settings.tokens == 12 * 64


def test_hidden_words_are_learned_and_the_curve_is_the_seeds(tmp_path):
    file = write(tmp_path / "a.txt", [(v,) for v in VERSES * 4])
    dials = {
        "steps": 30,
        "train": file,
        "valid": file,
        "vocab": 300,
        "d_model": 32,
        "layers": 1,
        "tokens": 400,
    }
    made = recipes.masked_language_model(**dials, rate=0.01)
    made = replace(made, settings=replace(made.settings, log_every=1))
    curves = []
    for out in ("one", "two"):
        seen = []
        one = Run(made, tmp_path / out, "cpu")
        one.trainer.run(lambda e, seen=seen: seen.append(e["loss"]) if e["event"] == "train" else None)
        curves.append(seen)
    assert curves[0] == curves[1] and len(curves[0]) == 30
    assert sum(curves[0][-5:]) / 5 < 0.6 * curves[0][0]


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_a_value_that_builds(name, tmp_path):
    files = {}
    if name == "classify":
        file = write(tmp_path / "a.tsv", [("a", "x"), ("b", "y")])
        files = {"train": file, "valid": file}
    made = recipe(name, **files)
    assert made.name == name and Recipe.from_json(made.json()) == made
    assert made.task(made.model.build()).model is not None


def test_recipes_are_listed_with_their_dials():
    from typer.testing import CliRunner

    from regard.cli.main import app

    listed = CliRunner().invoke(app, ["train", "--list"]).stdout
    for name, made in RECIPES.items():
        assert f"{name}: {made.__doc__.splitlines()[0]}" in listed
    assert "vocab" in listed and "fold=0" in listed


@pytest.mark.parametrize("vocab, size", [(300, 300), (None, 4 + 15)], ids=["subwords", "characters"])
def test_a_long_context_model_has_a_row_for_every_token(tmp_path, vocab, size):
    """15 characters, those of the text with the newline, and 4 special tokens."""
    (tmp_path / "text").write_text("a quick brown fox\n" * 400)
    chosen = recipe("long-context", file=str(tmp_path / "text"), context=64, vocab=vocab)
    assert chosen.model.embedding.vocab == size >= len(chosen.data.load(tmp_path).tokens)


def test_a_long_context_model_reads_its_neighborhood_and_every_16th_token(tmp_path):
    (tmp_path / "text").write_text("a quick brown fox\n" * 400)
    size = {"context": 640, "vocab": None, "d_model": 16, "layers": 1, "rows": 1}
    chosen = recipe("long-context", file=str(tmp_path / "text"), **size)
    torch.manual_seed(0)
    model, ids = chosen.model.build().eval(), torch.randint(4, 19, (1, 640))

    def last(position: int) -> torch.Tensor:
        changed = ids.clone()
        changed[0, position] = 3
        return model(changed)[0, -1]

    attention = model.blocks[0].attention
    far, turned = (torch.ones(1, 1, 1, 16), attention.position.along(torch.ones(1, 1, 1, 16), 5000, 1))
    assert (far != turned)[0, 0, 0].tolist() == [True] * 8 + [
        False
    ] * 8  # contents are compared at any distance
    usual = model(ids)[0, -1]
    moved = [p for p in (0, 1, 60, 112, 126, 127, 128, 400, 639) if not torch.equal(last(p), usual)]
    assert moved == [0, 112, 127, 128, 400, 639]  # 639 - 512 = 127 is in the window, 126 is not
    data = chosen.data.load(tmp_path)
    settings = replace(chosen.settings, autocast=None)
    trainer = Trainer(chosen.task(model), data.train, data.valid, settings, tmp_path)
    losses = [float(total / predicted) for total, predicted, _ in (trainer._update() for _ in range(3))]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    "wrong", [{"steps": 0}, {"steps": -3}, {"rate": -1.0}, {"rate": float("inf")}, {"tokens": 0}]
)
def test_a_number_of_updates_or_a_rate_that_is_not_positive_is_named_as_it_was_given(wrong):
    ((key, given),) = wrong.items()
    text = f"recipe 'translate': {key}={given}; it needs to be more than 0 and finite"
    with pytest.raises(rg.SpecError) as refused:
        recipe("translate", **wrong)
    assert str(refused.value) == text


@pytest.mark.parametrize("name", ["translate", "translate-h200"])
def test_a_number_of_updates_takes_the_place_of_the_default_time(name):
    """`--set steps=6` trained for six minutes: 24,000 updates of a small model."""
    lengths = {
        str(given): (made.settings.minutes, made.settings.steps)
        for given in ({}, {"steps": 7}, {"steps": 7, "minutes": 2}, {"minutes": None}, {"minutes": 3})
        for made in [recipe(name, **given)]
    }
    usual = RECIPES[name]().settings.steps
    assert list(lengths.values()) == [(6, usual), (None, 7), (2, 7), (None, usual), (3, usual)]


def test_a_file_may_be_a_path(tmp_path):
    (tmp_path / "text").write_text("a quick brown fox\n")
    assert recipe("language-model", file=tmp_path / "text").data.file == str(tmp_path / "text")


@pytest.mark.parametrize("smoothing", [-0.1, 1, float("nan")])
def test_smoothing_is_a_share(smoothing):
    """A negative one was trained with: a loss that has no minimum."""
    with pytest.raises(rg.SpecError, match=rf"^smoothing={smoothing} is not in \[0, 1\)$"):
        replace(recipe("translate"), smoothing=smoothing)


GPT = rg.preset("tiny-gpt")
UNFIT = {
    "SentencePairs is for an EncoderDecoder with embeddings and a LanguageHead, which this Encoder is not": (
        SentencePairs(),
        GPT,
    ),
    "SentencePairs is for an EncoderDecoder with embeddings and a LanguageHead, which this Recurrent is not": (
        SentencePairs(),
        rg.Recurrent(8000, 8),
    ),
    "ContinuousText is for an Encoder with an Embedding and a LanguageHead, which this Encoder is not": (
        ContinuousText(),
        replace(GPT, head=None),
    ),
    "ContinuousText is for an Encoder with an Embedding and a LanguageHead, which this Decoder is not": (
        ContinuousText(),
        rg.preset("tiny").decoder,  # it needs a context
    ),
    "MaskedText is for an Encoder with an Embedding and a MaskedHead, which this Encoder is not": (
        MaskedText(),
        replace(GPT, head=rg.ClassifierHead(2)),
    ),
    "LabeledText is for an Encoder with an Embedding and a ClassifierHead, which this Encoder is not": (
        LabeledText("a.tsv"),
        GPT,
    ),
    "Digits is for a Vision model with a ClassifierHead, which this Convolutional is not": (
        Digits(),
        rg.Convolutional(8),
    ),
}


@pytest.mark.parametrize("message", UNFIT)
def test_a_model_that_the_data_cannot_train_is_refused_when_it_is_declared(message):
    """They were an AttributeError or an empty AssertionError, after the data had been read."""
    data, model = UNFIT[message]
    with pytest.raises(rg.SpecError) as refused:
        Recipe("mine", model, data, recipe("image").settings)
    assert str(refused.value) == message


@pytest.mark.parametrize("data", [ContinuousText(), MaskedText()], ids=["next token", "masked token"])
def test_a_model_with_a_language_head_predicts_next_and_masked_tokens(data):
    assert Recipe("mine", GPT, data, recipe("image").settings).model == GPT


def test_a_decoder_without_cross_attention_is_a_language_model():
    block = replace(GPT.block, attention=replace(GPT.block.attention, pattern=rg.causal()))
    decoder = rg.Decoder(block, 1, embedding=GPT.embedding, head=rg.LanguageHead())
    assert Recipe("mine", decoder, ContinuousText(), recipe("image").settings).model == decoder


def too_small(made: Recipe, tmp_path) -> str:
    with pytest.raises(rg.SpecError) as refused:
        Run(made, tmp_path / "run", device="cpu")
    return str(refused.value)


def test_a_vocabulary_that_is_smaller_than_the_data_s_is_refused(tmp_path):
    """It was an IndexError in the first update."""
    small = {"d_model": 16, "layers": 1, "heads": 2}
    verses = write(tmp_path / "a.txt", [(v,) for v in VERSES])
    made = recipe("language-model", file=verses, context=8, **small)
    words = "the data have {} tokens and the model vocab={}; declare Embedding({}, …)"
    size = made.model.embedding.vocab
    one_less = replace(made, model=replace(made.model, embedding=rg.Embedding(size - 1, 16)))
    assert too_small(one_less, tmp_path) == words.format(size, size - 1, size)
    made = recipe("masked-language-model", train=verses, valid=verses, vocab=300, **small)
    one_less = replace(
        made.model, embedding=replace(made.model.embedding, vocab=299)
    )  # without the mask token
    assert too_small(replace(made, model=one_less), tmp_path / "masked") == words.format(300, 299, 300)
    pairs = write(tmp_path / "a.tsv", [(v, v[::-1]) for v in VERSES])
    made = recipe("translate", data=SentencePairs(train=pairs, valid=pairs, vocab=300), **small)
    for side in ("encoder", "decoder"):
        stack = getattr(made.model, side)
        less = replace(stack, embedding=replace(stack.embedding, vocab=9))
        model = replace(made.model, share_embedding=False, **{side: less})
        assert too_small(replace(made, model=model), tmp_path / side).endswith(
            "the model vocab=9; declare Embedding(300, …)"
        )


def test_fewer_classes_than_the_data_have_are_refused(tmp_path):
    file = write(tmp_path / "a.tsv", [("abc"[i % 3], v) for i, v in enumerate(VERSES)])
    made = recipe("classify", train=file, valid=file, d_model=16, layers=1, heads=2)
    model = replace(made.model, head=rg.ClassifierHead(2))
    text = "the data have 3 classes and the model 2; declare ClassifierHead(3)"
    assert too_small(replace(made, model=model), tmp_path) == text


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("1,1", r"recipe 'translate-h200': layers needs to be a list such as \(4, 3\), not '1,1'"),
        (1, r"recipe 'translate-h200': layers needs to be a list such as \(4, 3\), not 1"),
        ((1,), r"layers=\(1,\): two numbers are needed, of the encoder and of the decoder"),
        ((1, 2, 3), r"layers=\(1, 2, 3\): two numbers are needed, of the encoder and of the decoder"),
    ],
)
def test_the_two_numbers_of_layers_are_named(given, text):
    with pytest.raises(rg.SpecError, match=f"^{text}$"):
        recipe("translate-h200", layers=given)


def test_a_recipe_takes_a_pattern_for_each_head():
    heads = [rg.causal(), rg.causal() & rg.window(2)]
    made = [
        recipe("long-context", pattern=given, d_model=128, vocab=None)
        for given in (heads, rg.per_head(heads))
    ]
    assert made[0].model == made[1].model and made[0].model.block.attention.pattern == rg.per_head(heads)
    with pytest.raises(
        rg.SpecError, match="pattern has 2 patterns for heads=4; give one for each query head"
    ):
        recipe("long-context", pattern=heads, d_model=256, vocab=None)

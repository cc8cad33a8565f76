"""Recipes, runs and the commands, end to end on sixty sentences."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import regard as rg
from regard.training import recipes
from regard.training.data import text
from regard.training.data.datasets import ContinuousText, Digits, LabeledText, SentencePairs
from regard.training.data.rows import Windows
from regard.training.recipes import RECIPES, Recipe, recipe
from regard.training.recipes.run import Run, open_run, read_recipe
from regard.training.recipes.translation import scores, translate
from training_run_case import regard, small, write_pairs


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    one = Run(small(folder), folder / "out", "cpu")
    one.train()
    return one


@pytest.mark.parametrize("name", [n for n in RECIPES if n != "classify"])
def test_recipes_are_values_that_go_through_json(name):
    made = recipe(name)
    assert Recipe.from_json(made.json()) == made and made.name == name


def test_an_unknown_recipe_names_the_nearest():
    with pytest.raises(rg.SpecError, match=r"^no recipe 'transalte'; did you mean translate\?$"):
        recipe("transalte")


def test_long_pairs_are_left_out_and_counted(run):
    assert run.data.dropped == 1 and len(run.data.train) == 50


def test_the_saved_model_is_the_averaged_one_and_translates(run):
    model, tokens, made = open_run(run.folder)
    assert made == run.recipe
    with run.trainer.averaged():
        for ours, theirs in zip(run.model.parameters(), model.parameters(), strict=True):
            assert torch.equal(ours, theirs)
    texts = ["one cat", "", "dog", "two red dog cat one"]
    said = translate(model, tokens, texts, rows=2)
    assert said[1] == "" and said == [translate(model, tokens, [t])[0] for t in texts]


def test_a_run_goes_on_in_its_folder_and_no_other_recipe_may(run):
    again = Run(run.recipe, run.folder, "cpu")
    again.train()
    assert again.trainer.step == 12
    other = replace(
        run.recipe, model=recipes.translate(None, d_model=32, heads=2, data=run.recipe.data).model
    )
    before = run.recipe.model.encoder.block.attention.d_model
    with pytest.raises(
        rg.FormatError,
        match=rf"another recipe \(translate\): its model\.encoder\..*d_model is {before}, not 32; use",
    ):
        Run(other, run.folder, "cpu")


def test_a_run_whose_data_cannot_be_read_leaves_its_folder_to_other_data(run, tmp_path):
    one = tmp_path / "one.tsv"
    one.write_text("cat\tgato\n")
    made, out = replace(run.recipe, data=SentencePairs(train=str(one), vocab=300)), tmp_path / "out"
    with pytest.raises(rg.FormatError, match=r"one\.tsv has 1 row; training and validation need at least 2$"):
        Run(made, out, "cpu")
    Run(run.recipe, out, "cpu")
    with pytest.raises(
        rg.FormatError, match=r"another recipe \(translate\): its data\.train is .*, not .*one\.tsv"
    ):
        Run(made, out, "cpu")
    assert read_recipe(out) == run.recipe


def test_a_run_whose_data_are_gone_keeps_its_recipe(run, tmp_path):
    made, out = small(tmp_path), tmp_path / "out"
    Run(made, out, "cpu")
    Path(made.data.train).unlink()
    with pytest.raises(rg.FormatError, match=r"^there is no file .*train\.tsv$"):
        Run(made, out, "cpu")
    assert read_recipe(out) == made


@pytest.mark.parametrize("part", ["valid", "test"])
def test_rows_that_fit_no_batch_are_named_before_training(run, tmp_path, part):
    (tmp_path / "long.tsv").write_text("cat " * 20 + "\tgato\n")
    data = replace(run.recipe.data, **{part: str(tmp_path / "long.tsv")})
    made = replace(run.recipe, data=data, settings=replace(run.recipe.settings, tokens=20))
    with pytest.raises(rg.SpecError) as refused:
        Run(made, tmp_path / "out", "cpu")
    assert re.fullmatch(
        rf"the longest row of {part} has \d\d tokens and a batch tokens=20; raise tokens, or shorten it",
        str(refused.value),
    )


def test_a_damaged_file_of_a_run_is_named(run, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(run.folder, folder)
    tokens = (folder / "tokens.json").read_text()
    (folder / "tokens.json").write_text(tokens.replace("a", "b", 1))
    with pytest.raises(rg.FormatError, match=r"tokens\.json is damaged or was changed"):
        open_run(folder)
    (folder / "tokens.json").write_text(tokens)
    open_run(folder)
    (folder / "recipe.json").write_bytes(b"\xff")
    with pytest.raises(rg.FormatError, match=r"copy/recipe\.json cannot be read"):
        open_run(folder)


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(
        rg.FormatError, match=r"contains no recipe.json; train there first: regard train translate"
    ):
        open_run(tmp_path)


def test_tokens_that_do_not_fit_the_model_are_refused(run, tmp_path):
    (tmp_path / "tokens.json").write_text((run.folder / "tokens.json").read_text())
    tight = replace(run.recipe.data, vocab=280)
    with pytest.raises(rg.FormatError, match=r"^tokens.json in .* has 296 tokens; the model has 280$"):
        tight.load(tmp_path)


def test_sources_say_what_they_lack(tmp_path):
    with pytest.raises(
        rg.SpecError, match=r"^valid='a.tsv' needs train= \(on the command line --data\) as well$"
    ):
        SentencePairs(valid="a.tsv")
    with pytest.raises(rg.SpecError, match=r"^context=1: it needs to be at least 2$"):
        ContinuousText(context=1)
    (tmp_path / "a.txt").write_text("too short\n")
    with pytest.raises(rg.FormatError) as refused:
        ContinuousText(file=str(tmp_path / "a.txt")).load(tmp_path)
    assert str(refused.value) == (
        "10 tokens are too few for windows of 64, as the last tenth is for validation; give a longer text, or a "
        "smaller context"
    )
    (tmp_path / "a.tsv").write_text("good\tfine thing\nbad\tpoor thing\n")
    (tmp_path / "b.tsv").write_text("ugly\tother thing\n")
    with pytest.raises(rg.FormatError, match=r"b.tsv has the label 'ugly', which does not occur in .*a.tsv$"):
        LabeledText(str(tmp_path / "a.tsv"), str(tmp_path / "b.tsv")).load(tmp_path)
    write_pairs(tmp_path)
    tiny = SentencePairs(
        train=str(tmp_path / "train.tsv"), valid=str(tmp_path / "valid.tsv"), vocab=300, max_tokens=1
    )
    with pytest.raises(rg.FormatError, match=r"^every training pair is longer than max_tokens=1; raise it$"):
        tiny.load(tmp_path)


def test_a_classifier_trains_from_a_table(tmp_path):
    lines = [f"{'pos' if i % 2 else 'neg'}\t{'good' if i % 2 else 'bad'} word {i}" for i in range(40)]
    (tmp_path / "a.tsv").write_text("\n".join(lines) + "\n")
    file = str(tmp_path / "a.tsv")
    made = recipes.classify(file, file, classes=2, steps=20, d_model=16, layers=1, heads=2, rate=0.02)
    one = Run(made, tmp_path / "out", "cpu")
    model = one.train()
    batch = one.data.valid.batch(torch.arange(40)).inputs
    with torch.no_grad():
        right = model(batch["tokens"], lengths=batch["lengths"]).argmax(-1) == batch["labels"]
    assert float(right.float().mean()) == 1.0


@pytest.mark.parametrize(
    "made",
    [
        recipes.language_model(8, d_model=16, layers=1, heads=2, data=ContinuousText(context=16)),
        recipes.image(24, d_model=32, layers=1, heads=2, rate=0.01, data=Digits()),
    ],
    ids=lambda made: made.name,
)
def test_a_language_model_and_a_vision_model_begin_to_learn(made, tmp_path):
    if isinstance(made.data, ContinuousText):  # a part of the corpus suffices
        part = tmp_path / "part.txt"
        part.write_text(made.data.text()[:100_000])
        data = ContinuousText(file=str(part), context=16)
        made = recipes.language_model(8, d_model=16, layers=1, heads=2, data=data)
    seen = []
    made = replace(made, settings=replace(made.settings, log_every=1, average=None))
    one = Run(made, tmp_path, "cpu")
    one.trainer.valid = one.data.train if made.name == "image" else Windows(one.data.valid.ids[:99], 16)
    model = one.train(lambda e: seen.append(e["loss"]) if e["event"] == "train" else None)
    assert len(seen) == made.settings.steps and sum(seen[-3:]) < sum(seen[:3])
    one.data = replace(one.data, test=one.trainer.valid)
    evaluated = one.evaluate()
    if made.name == "image":
        rows = one.trainer.valid
        with torch.no_grad():
            right = (model(rows.inputs).argmax(-1) == rows.labels).double().mean()
        assert evaluated.scores["accuracy"] == pytest.approx(float(right)) and not evaluated.sample
    else:
        assert len(evaluated.sample) > 300 and evaluated.scores["loss"] < 5


def test_scores_are_sacrebleus_with_their_signature():
    evaluated = scores(["the cat sat on the mat"], ["the cat sat on the mat"])
    assert evaluated.bleu == pytest.approx(100) and evaluated.chrf == pytest.approx(100)
    assert "tok:13a" in evaluated.bleu_signature and "BLEU 100.00 (nrefs:1|" in str(evaluated)
    assert scores(["a b c d"], ["e f g h"]).bleu < 20


def test_the_command_trains_scores_shows_and_reports(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(small(tmp_path).json())
    said = regard("train", str(file), "--out", str(tmp_path / "o"), "--no-tensorboard")
    assert said.endswith(f"\nmodel   {tmp_path / 'o'}\nreport  {tmp_path / 'o' / 'report.html'}\n")
    assert said.startswith("9 test rows:\nBLEU ") and "(nrefs:1|case:mixed" in said and "\nchrF " in said
    assert "\nsource     Hello world\noutput " in said and "\nreference  dos gato\n" in said


def test_the_command_translates(tmp_path, run):
    write_pairs(tmp_path)
    model, tokens, _ = open_run(run.folder)
    one = regard("translate", "one cat", "--model", str(run.folder))
    assert one == translate(model, tokens, ["one cat"])[0] + "\n"
    lines = regard("translate", "--model", str(run.folder), "--beam", "2", "--json", given="red\ndog two\n")
    assert [json.loads(x)["source"] for x in lines.splitlines()] == ["red", "dog two"]
    by_file = regard("translate", "--file", str(tmp_path / "valid.tsv"), "--model", str(run.folder))
    assert len(by_file.split("\n")) == 10 and text.sentences(tmp_path / "valid.tsv")


def test_train_lists_shows_costs_and_refuses():
    listed = regard("train", "--list")
    assert all(f"{name}: " in listed for name in RECIPES) and "minutes=6" in listed
    shown = regard("train", "translate", "--set", "minutes=2", "--show")
    assert Recipe.from_json(shown) == recipe("translate", minutes=2)
    with pytest.raises(rg.SpecError, match=r"^no recipe or lesson given; `regard train --list` lists them$"):
        regard("train")
    with pytest.raises(
        rg.SpecError, match=r"^--set minuts=2: no parameter 'minuts'; did you mean minutes\?$"
    ):
        regard("train", "translate", "--set", "minuts=2")
    with pytest.raises(rg.SpecError, match=r"^--set minutes: write parameter=value$"):
        regard("train", "translate", "--set", "minutes")
    with pytest.raises(
        rg.SpecError, match=r"^--set a=1: parameters belong to recipes by name; change x.json instead$"
    ):
        regard("train", "x.json", "--set", "a=1")
    with pytest.raises(rg.FormatError, match=r"^file not found: x.json$"):
        regard("train", "x.json")

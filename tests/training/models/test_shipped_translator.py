"""The translator that is part of regard: complete, small, as good as its card says, and used by default."""

import json
import shutil

import pytest

import regard as rg
from regard.errors import FormatError
from regard.generation import beam, greedy
from regard.training import models
from regard.training.data import corpora, text
from regard.training.recipes import Recipe, recipe
from regard.training.recipes.translation import scores, translate
from regard.training.translator import open_translator
from training_run_case import regard

FOLDER = models.folder()


def test_its_files_have_their_checksums_and_fit_into_16_megabytes():
    assert models.damaged(FOLDER) == []
    files = [f for f in FOLDER.rglob("*") if f.is_file()]
    listed = {line.split("  ")[1] for line in (FOLDER / models.SUMS).read_text().splitlines()}
    assert {f.relative_to(FOLDER).as_posix() for f in files} == listed | {models.SUMS}
    assert sum(f.stat().st_size for f in files) <= 16_000_000


def test_a_changed_file_is_named(tmp_path):
    copy = shutil.copytree(FOLDER, tmp_path / "copy")
    (copy / "tokens.json").write_text("{}")
    assert models.damaged(copy) == ["tokens.json"]


def test_its_recipe_is_the_one_of_the_catalogue():
    assert Recipe.from_json((FOLDER / "recipe.json").read_text()) == recipe("translate-h200")


def test_it_translates_what_every_user_tries_first():
    assert rg.translate("Hello world") == "Hola mundo"
    assert rg.translate(["Where is the library?", ""]) == ["¿Dónde está la biblioteca?", ""]


def test_the_command_uses_it_without_any_training():
    assert regard("translate", "Where is the library?") == "¿Dónde está la biblioteca?\n"


def test_a_card_decides_how_to_decode(tmp_path):
    assert open_translator()[2] == beam(4, length_penalty=0.6)
    copy = shutil.copytree(FOLDER, tmp_path / "copy")
    (copy / models.CARD).unlink()
    assert open_translator(copy)[2] == greedy()
    (copy / models.CARD).write_text("{}")
    with pytest.raises(
        FormatError, match=r"card\.json is not a model card of regard: KeyError\('decoding'\)"
    ):
        open_translator(copy)


def test_the_card_states_scores_with_signatures():
    card = json.loads((FOLDER / models.CARD).read_text())
    assert card["scores"]["test, beam 4"]["BLEU"] >= 38
    assert all("version:" in signature for signature in card["signatures"].values())
    readme = (FOLDER / "README.md").read_text()
    assert f"{card['scores']['test, beam 4']['BLEU']:.1f}" in readme


def test_a_part_of_the_test_rows_scores_about_as_the_card_says():
    net, tokens, _ = open_translator()
    pairs = text.pairs(corpora.folder("en-es") / "test.tsv")[::40]
    result = scores(translate(net, tokens, [a for a, _ in pairs]), [b for _, b in pairs])
    assert result.bleu > 36


@pytest.mark.long
def test_all_test_rows_score_what_the_card_says():
    net, tokens, strategy = open_translator()
    pairs = text.pairs(corpora.folder("en-es") / "test.tsv")
    result = scores(translate(net, tokens, [a for a, _ in pairs], strategy), [b for _, b in pairs])
    assert result.bleu == pytest.approx(models.card(FOLDER).scores["test, beam 4"]["BLEU"], abs=0.2)

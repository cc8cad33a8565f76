"""`rg.train`: recipes by name, value and file; what it returns, writes and reports."""

import re
import sys
from dataclasses import replace

import pytest
import torch

import regard as rg
from long_cases import in_long
from regard.training.recipes.preflight import Preflight
from training_run_case import small, write_pairs


def options(folder):
    sizes = {"steps": 6, "d_model": 16, "layers": 1, "heads": 2, "tokens": 600}
    return {"minutes": None, "data": write_pairs(folder), **sizes}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("train")
    events = []
    settings = {"device": "cpu", "progress": events.append, "tensorboard": False}
    result = rg.train("translate", out=folder / "out", **settings, **options(folder))
    return result, events


def test_a_recipe_by_name_is_trained_evaluated_and_reported(trained):
    result, events = trained
    assert [e["event"] for e in events] == [
        *("data", "preflight", "train", "valid", "save", "done", "evaluating", "evaluated", "report")
    ]
    assert set(result.scores) == {"BLEU", "chrF", "loss", "perplexity"}
    assert result.losses[-1][0] == 6 and result.validation_losses[-1] == (6, events[3]["loss"])
    assert result.report == result.folder / "report.html" and not result.interrupted
    assert isinstance(result.load(), torch.nn.Module) and not result.load().training
    repr_form = (
        r"TrainingResult\(.*/out, 6 updates, loss \d\.\d{3} → \d\.\d{3}, BLEU [\d.]+, chrF [\d.]+, perp.*\)"
    )
    assert re.fullmatch(repr_form, repr(result))


@pytest.mark.parametrize("mode", [*in_long(torch.no_grad), torch.inference_mode])
def test_it_trains_where_the_caller_has_turned_gradients_off(trained, tmp_path, mode):
    with mode():
        result = rg.train(
            "translate", out=tmp_path, device="cpu", progress=False, tensorboard=False, **options(tmp_path)
        )
        assert torch.is_grad_enabled() is False
    assert result.losses == trained[0].losses


def test_the_same_call_again_resumes(trained, tmp_path):
    result, _ = trained
    recipe = rg.training.Recipe.from_json((result.folder / "recipe.json").read_text())
    longer = replace(recipe, settings=replace(recipe.settings, steps=8))
    events = []
    settings = {"device": "cpu", "progress": events.append, "tensorboard": False}
    file = tmp_path / "longer.json"
    file.write_text(longer.json())
    again = rg.train(file, out=result.folder, **settings)
    resumed = [e for e in events if e["event"] == "resume"]
    assert [e["step"] for e in resumed] == [6] and again.losses[-1][0] == 8


def test_a_dry_run_returns_its_estimates_and_writes_nothing(tmp_path):
    checks = rg.train(small(tmp_path), out=tmp_path / "out", device="cpu", dry_run=True)
    assert isinstance(checks, Preflight) and checks.updates == 12 and not (tmp_path / "out").exists()


def test_without_the_library_of_the_scores_nothing_is_trained(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    made, out = small(tmp_path), tmp_path / "out"
    with pytest.raises(
        rg.RegardError, match=r"^BLEU and chrF need sacrebleu: pip install 'regard\[train\]'$"
    ):
        rg.train(made, out=out, device="cpu", progress=False)
    assert not out.exists() and rg.train(made, out=out, device="cpu", dry_run=True).updates == 12


def test_a_progress_bar_and_messages_go_to_stderr(tmp_path, capsys):
    rg.train(small(tmp_path), out=tmp_path / "out", device="cpu", tensorboard=False)
    printed = capsys.readouterr()
    assert printed.out == "" and "validation loss" in printed.err
    assert "1 training rows are too long and were dropped" in printed.err


def test_what_cannot_be_trained_is_named(tmp_path):
    with pytest.raises(rg.SpecError, match=r"^no recipe 'translat'; did you mean translate\?$"):
        rg.train("translat")
    with pytest.raises(
        rg.SpecError, match=r"^recipe 'translate' has no parameter 'step'; did you mean steps\?$"
    ):
        rg.train("translate", step=3)
    wrong = r"^steps=: parameters belong to recipes by name; change a Recipe instead$"
    with pytest.raises(rg.SpecError, match=wrong):
        rg.train(small(tmp_path), steps=3)
    with pytest.raises(rg.FormatError, match=r"^file not found: mine\.json$"):
        rg.train("mine.json")


def test_the_public_names_exist():
    for module in (rg.training, rg.nn):
        assert all(getattr(module, name) is not None for name in module.__all__)


@pytest.mark.parametrize("given", [None, rg.preset("tiny-gpt"), torch.nn.Linear(2, 2)], ids=repr)
def test_what_is_no_recipe_is_refused_with_what_would_be_one(given):
    with pytest.raises(rg.SpecError) as refused:
        rg.train(given)
    assert str(refused.value) == (
        f"rg.train takes a recipe, not {type(given).__name__}: a name such as 'translate', the path of its "
        "JSON, or for a model of your own dataclasses.replace(regard.training.recipe('language-model'), model=spec)"
    )


def test_an_empty_folder_name_is_not_the_default_folder():
    with pytest.raises(
        rg.SpecError, match=r"^out='' is no folder; leave it out for runs/<name>, or use '.'$"
    ):
        rg.train("translate", out="", dry_run=True)

"""A lesson from the command line and from Python: its files, its page, its options and what it refuses."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file

import regard as rg
from regard.training.lessons.run import choose
from regard.training.report import lesson_page
from training_run_case import regard, small


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Lesson T5 as `regard train T5 --out …` runs it."""
    out = tmp_path_factory.mktemp("lesson") / "T5"
    printed = regard("train", "T5", "--out", str(out), "--set", "steps=60")
    assert "T5 passed: without positions" in printed and f"report  {out / 'report.html'}" in printed
    return out


def test_the_folder_has_models_curves_numbers_and_a_page(folder):
    stored = json.loads((folder / "lesson.json").read_text())
    assert stored["passed"] and stored["settings"] == {"seed": 0, "steps": 60}
    curves = rg.Recorder.load(folder / "curves.json")
    assert {name: len(points) for name, points in curves.losses.items()} == dict.fromkeys(
        stored["models"], 60
    )
    assert curves.floors["without positions"] == pytest.approx(0.6931, abs=1e-4)
    for name, positions in (("with positions", True), ("without positions", False)):
        model = rg.load(folder / stored["models"][name])
        assert (model.spec.embedding.position is not None) == positions
    assert not [f for f in folder.rglob("*") if f.suffix in (".pt", ".pth", ".pkl", ".bin")]


def test_the_saved_models_have_the_measured_accuracy(folder):
    result = rg.training.LessonResult(folder)
    sentences, labels = torch.tensor([[0, 1, 2], [2, 1, 0]]), torch.tensor([0, 1])
    with torch.no_grad():
        right = {n: (result.load(n)(sentences).argmax(-1) == labels).float().mean() for n in result.models}
    assert right == {"without positions": 0.5, "with positions": 1.0}
    assert result.measured["with positions: accuracy"] == 1.0 and result.passed and result.number == "T5"
    with pytest.raises(
        rg.SpecError, match=r"^lesson T5 has no model 'with position'; did you mean with positions\?$"
    ):
        result.load("with position")


def test_the_page_has_the_claim_the_numbers_the_pictures_and_what_to_try(folder):
    page = (folder / "report.html").read_text()
    stored = json.loads((folder / "lesson.json").read_text())
    text = re.sub(r"<[^>]+>", " ", re.sub(r"<script.*?</script>|<style.*?</style>", "", page, flags=re.S))
    assert "cannot tell &quot;cat chased dog&quot; from" in text and "✓ passed" in text
    for c in stored["checks"]:
        assert c["name"].replace("'", "&#x27;") in text and c["expected"] in text
    assert page.count("<img ") == page.count("<source ") == 4
    assert "regard train T5 --set steps=1" in text and "What was done" in text and "1,000" not in text
    sources = re.findall(r'(?:src|srcset|href)="([^"]{0,30})', page)
    assert sources and all(s.startswith("data:image/svg+xml;base64,") for s in sources) and "url(" not in page
    maps = json.loads(re.search(r'<script id="data"[^>]*>(.*?)</script>', page, re.S)[1])["maps"]
    assert maps[0]["source"] == "without positions: cat chased dog" and len(maps) == 4
    assert maps[0]["queries"] == ["cat", "chased", "dog"] and len(maps[0]["layers"]) == 2


def test_the_page_fits_a_phone_and_a_projector(folder, browser):
    for width, scheme in ((390, "dark"), (1920, "light")):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page, problems = context.new_page(), []
        page.on("pageerror", lambda e, problems=problems: problems.append(str(e)))
        page.on("console", lambda m, problems=problems: problems.append(m.text))
        page.goto((folder / "report.html").as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") == width and not problems
        drawn = page.evaluate(
            "[...document.images].map(i => [i.complete, i.naturalWidth, i.currentSrc.length])"
        )
        assert len(drawn) == 4 and all(complete and size > 0 for complete, size, _ in drawn)
        assert page.locator("#map rect").count() == 9
        page.select_option("#sentence", "3")
        assert page.locator("#map text").first.text_content() == "dog"
        context.close()


def test_a_notebook_shows_the_same_page(folder):
    shown = rg.training.LessonResult(folder)._repr_html_()
    assert shown.startswith('<iframe srcdoc="') and 'sandbox="allow-scripts"' in shown
    assert "cannot tell &amp;quot;cat chased dog" in shown


def test_python_runs_a_lesson_and_reports_its_progress(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lesson_page, "_pictures", lambda pictures: "")
    events = []
    result = rg.train("T5", steps=4, seed=2, progress=events.append)
    assert result.folder.as_posix() == "runs/T5" and result.report.is_file()
    assert repr(result).startswith("LessonResult(T5 failed, runs/T5, 2 models, ")
    kinds = [(e["event"], e.get("model"), e.get("step")) for e in events]
    assert kinds[-2:] == [("drawing", None, None), ("lesson", None, None)]
    assert ("train", "without positions", 4) in kinds and ("train", "with positions", 4) in kinds
    assert str(result).startswith("T5 failed: without positions") and "✗ failed" in result.report.read_text()


def test_events_are_json_lines_and_a_failed_claim_is_exit_code_1(tmp_path, monkeypatch):
    monkeypatch.setattr(lesson_page, "_pictures", lambda pictures: "")
    words = ("train", "t5", "--out", str(tmp_path / "out"), "--set", "steps=1", "--json")
    events = [json.loads(line) for line in regard(*words, code=1).splitlines()]
    assert events[-1]["event"] == "lesson" and events[-1]["passed"] is False
    assert events[-1]["settings"] == {"seed": 0, "steps": 1}
    assert events[-1]["report"] == str(tmp_path / "out" / "report.html")


def test_shown_settings_can_be_edited_and_run(tmp_path, monkeypatch):
    monkeypatch.setattr(lesson_page, "_pictures", lambda pictures: "")
    shown = regard("train", "T5", "--show", "--set", "steps=7")
    assert json.loads(shown) == {"lesson": "T5", "settings": {"seed": 0, "steps": 7}}
    file = tmp_path / "mine.json"
    file.write_text(shown.replace("7", "2"))
    regard("train", str(file), "--out", str(tmp_path / "out"), code=1)
    assert json.loads((tmp_path / "out" / "lesson.json").read_text())["settings"]["steps"] == 2
    with pytest.raises(
        rg.SpecError, match=r"^steps=: settings belong to lessons by number; change .*mine\.json"
    ):
        rg.train(file, steps=3)
    file.write_text('{"lesson": "T5", "steps": 3}')
    with pytest.raises(rg.FormatError, match=r'mine\.json: a lesson is {"lesson": "T5", "settings": {…}}$'):
        rg.train(file)


def test_a_dry_run_names_the_models_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed = regard("train", "T5", "--dry-run", "--set", "steps=200", "--threads", "1")
    assert re.search(
        r"without positions: 17,314 parameters, 200 updates, about [\d.]+ s \(1 thread\)", printed
    )
    plain = json.loads(regard("train", "T5", "--dry-run", "--json"))
    assert plain["lesson"] == "T5" and [t["updates"] for t in plain["trainings"]] == [120, 120]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"step": 3}, "lesson T5 has no setting 'step'; did you mean steps?; it has seed, steps"),
        ({"width": 3}, "lesson T5 has no setting 'width'; it has seed, steps"),
        ({"steps": 0}, "lesson T5: steps=0; it needs a whole number of at least 1, such as steps=120"),
        (
            {"steps": "many"},
            "lesson T5: steps='many'; it needs a whole number of at least 1, such as steps=120",
        ),
        ({"steps": True}, "lesson T5: steps=True; it needs a whole number of at least 1, such as steps=120"),
        ({"seed": -1}, "lesson T5: seed=-1; it needs a whole number of at least 0, such as seed=0"),
    ],
)
def test_unknown_and_wrong_settings_are_errors_that_name_the_known_ones(settings, message):
    with pytest.raises(rg.SpecError, match=f"^{re.escape(message)}$"):
        rg.train("T5", **settings)


def test_settings_of_several_numbers():
    assert choose("T12", sizes=[32, 64]).settings["sizes"] == (32, 64)
    message = r"^lesson T12: sizes=\[\]; it needs whole numbers of at least 1, such as sizes=\[64, 512\]$"
    with pytest.raises(rg.SpecError, match=message):
        choose("T12", sizes=[])


def test_options_that_a_lesson_does_not_have_are_refused():
    with pytest.raises(
        rg.SpecError, match=r"^heads_every=5: lesson T5 records its own statistics; leave it out$"
    ):
        regard("train", "T5", "--heads-every", "5")
    with pytest.raises(rg.SpecError, match=r"^tensorboard=True: lesson T5 records its own"):
        regard("train", "T5", "--tensorboard")
    with pytest.raises(
        rg.SpecError, match=r"^no lesson 'T14'; the lessons are T1 to T13: regard train --list$"
    ):
        regard("train", "T14")
    with pytest.raises(rg.SpecError, match=r"^--set steps: write parameter=value$"):
        regard("train", "T5", "--set", "steps")


def test_a_folder_of_something_else_is_not_overwritten(folder, tmp_path):
    with pytest.raises(rg.FormatError, match=r"T5 contains lesson T5; use another folder: --out runs/T11$"):
        rg.train("T11", out=folder, steps=1)
    (tmp_path / "recipe.json").write_text(small(tmp_path).json())
    with pytest.raises(
        rg.FormatError, match=r"contains the run of a recipe; use another folder: --out runs/T5$"
    ):
        rg.train("T5", out=tmp_path)
    (tmp_path / "recipe.json").unlink()
    with pytest.raises(rg.FormatError, match=r"contains no recipe\.json"):
        rg.training.write_report(folder)


def test_models_without_a_declaration_keep_their_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(lesson_page, "_pictures", lambda pictures: "")
    result = rg.train("T13", out=tmp_path / "out", steps=1, progress=False)
    weights = load_file(tmp_path / "out" / "models" / "what-it-stands-for" / "model.safetensors")
    assert "words.weight" in weights
    with pytest.raises(
        rg.FormatError, match=r"its weights are safetensors\.torch\.load_file\('.*model\.safetensors'\)$"
    ):
        result.load("what it stands for")
    assert isinstance(result.load("is or are"), torch.nn.Module)


def test_every_lesson_is_listed_with_its_settings():
    listed = regard("train", "--list")
    assert (
        "T9: on random tokens a causal model learns nothing, an unmasked one reads the answer.\n    seed=0, steps=400"
        in listed
    )
    assert (
        all(f"\nT{i}: " in listed for i in range(1, 14))
        and "run" not in listed.split("\nT1: ")[1].split("\n")[1]
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [("[1]", "expected a JSON object, not list"), ('{"lesson": "T5", "claim": ""}', "it has no passed")],
)
def test_a_folder_with_another_lesson_json_is_refused_in_words(tmp_path, text, words):
    (tmp_path / "lesson.json").write_text(text)
    with pytest.raises(rg.FormatError, match=words):
        _ = rg.training.LessonResult(tmp_path).number

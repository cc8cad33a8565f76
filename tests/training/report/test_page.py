"""The report of a run: one file, everything in it, nothing asked from anywhere."""

import base64
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

import accessibility
import regard as rg
from regard import files
from regard.training import recipes
from regard.training.data.datasets import Dataset
from regard.training.data.ragged import Ragged
from regard.training.data.rows import IGNORED, Batch
from regard.training.data.tokens import START, characters
from regard.training.loop import log
from regard.training.recipes import evaluation, preflight
from regard.training.recipes.evaluation import Evaluation, Example
from regard.training.recipes.run import open_run
from regard.training.report import page
from regard.training.report.charts import Line, chart, decades, ticks
from regard.training.report.expectations import expectations
from training_run_case import regard, small


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """The events of `regard train`, and the folder it leaves."""
    folder = tmp_path_factory.mktemp("page")
    file = folder / "mine.json"
    file.write_text(small(folder).json())
    words = (
        "train",
        str(file),
        "--out",
        str(folder / "out"),
        "--json",
        "--heads-every",
        "4",
        "--no-tensorboard",
    )
    events = [json.loads(line) for line in regard(*words).splitlines()]
    return events, folder / "out"


def test_the_last_events_are_the_scores_and_the_report(finished_run):
    events, folder = finished_run
    assert [e["event"] for e in events][-3:] == ["done", "evaluated", "report"]
    assert events[-1]["path"] == str(folder / "report.html")
    scored = evaluation.stored(folder)
    assert {name: events[-2][name] for name in scored.scores} == scored.scores
    assert log.read(folder)[-1] == events[-2]
    assert [e.source for e in scored.examples] == ["Hello world", *(t for t, _ in _texts(folder))]
    assert [e.reference for e in scored.examples][1:] == [t for _, t in _texts(folder)]
    assert Evaluation.from_json(scored.json()) == scored


def _texts(folder):
    lines = (folder.parent / "valid.tsv").read_text().splitlines()
    return [tuple(line.split("\t")) for line in lines]


def test_the_report_is_one_small_file_that_requests_no_other(finished_run):
    whole = (finished_run[1] / "report.html").read_text()
    assert len(whole.encode()) < 2_000_000 and "{{" not in whole.replace("{{", "", 0)[:200]
    assert not re.findall(r"(?:src|href)\s*=", whole) and "@import" not in whole and "url(" not in whole
    assert "default-src 'none'" in whole


class Text(HTMLParser):
    """The headings and the words of a page, and whether its tags close."""

    def __init__(self, page: str):
        super().__init__()
        self.open, self.headings, self.words = [], [], []
        self.feed(page)
        assert not self.open, self.open

    def handle_starttag(self, tag, attributes):
        if tag not in ("meta", "br", "link", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)


def test_the_report_has_every_part(finished_run):
    parsed = Text((finished_run[1] / "report.html").read_text())
    assert parsed.headings == [
        "The numbers that decide",
        "Curves",
        "Translations",
        "Cross-attention while translating",
        "Heads",
        "Cost",
        "Laws",
        "Try next",
        "Machine",
    ]
    words = " ".join(parsed.words)
    scored, first = evaluation.stored(finished_run[1]), preflight.stored(finished_run[1])
    for text in (
        scored.signatures["BLEU"],
        scored.signatures["chrF"],
        "1 + 1 layers, d_model 16, 2 heads, vocabulary 300; 12 updates of 600 tokens",
        f"{first.parameters:,}",
        "Estimated from 3 updates of a copy on real batches",
        "dos gato",
        "cached decoding",
        str(torch.__version__),
    ):
        assert text in words, text
    assert words.count("holds") == 7  # L29, 31, 32, 33, 48, 52, 56
    assert "a Transformer learns to translate sentences that it has never seen" in words
    assert f"regard train translate --out {finished_run[1]}-longer --set steps=36" in words


def test_a_recipe_is_judged_by_a_uniform_guess_and_by_its_laws(tmp_path):
    recipe = small(tmp_path)
    law = preflight.LawResult("L29", "causality", "", "holds", "", 2)
    good, bad = (Evaluation(5, {"BLEU": 1.0, "loss": loss}, {}, ()) for loss in (5.0, 5.8))
    assert [c.passed for c in expectations(recipe, good, (law,))] == [True, True]
    assert [c.passed for c in expectations(recipe, bad, (replace(law, status="broken"),))] == [False, False]
    assert expectations(recipe, good, (law,))[0].expected == "below 5.704, a uniform guess among 300"
    image = recipes.recipe("image")
    guessed = expectations(image, Evaluation(5, {"accuracy": 0.1, "loss": 1.0}, {}, ()), ())
    assert [(c.name, c.passed) for c in guessed] == [
        ("loss on test rows", True),
        ("accuracy on test rows", False),
    ]


def test_the_maps_are_the_models_own_weights(finished_run):
    folder = finished_run[1]
    found = json.loads(
        re.search(r'application/json">(.*?)</script>', (folder / "report.html").read_text())[1]
    )
    one = next(m for m in found["maps"] if m["source"] == "one cat")
    model, tokens, _ = open_run(folder)
    example = next(e for e in evaluation.stored(folder).examples if e.source == "one cat")
    source, ours = tokens.encode([example.source, example.output])
    assert one["keys"] == tokens.words(source) and one["queries"] == [*tokens.words(ours), "</s>"]
    with torch.no_grad():
        _, weights = model(torch.tensor([source]), torch.tensor([[START, *ours]]), return_weights=True)
    cross = weights["decoder"][-1]["cross"][0]
    for map_, wanted in zip(one["layers"][-1]["maps"], [cross.mean(0), *cross], strict=True):
        raw = torch.frombuffer(bytearray(base64.b64decode(map_["bytes"])), dtype=torch.uint8)
        got = raw.reshape(wanted.shape) / 255 * map_["top"]
        torch.testing.assert_close(got, wanted, atol=1 / 255, rtol=0)


def test_texts_are_text_in_the_page(finished_run, monkeypatch):
    monkeypatch.setattr(preflight, "check_laws", lambda model, laws: ())  # they are in the report above
    folder, evil = finished_run[1], "</script><script>alert(1)</script> {{js}} {{data}}"
    kept = (folder / evaluation.FILE).read_text()
    scored = evaluation.stored(folder)
    try:
        more = (Example("one cat", evil, evil), *scored.examples)
        files.write_checked(folder, evaluation.FILE, replace(scored, examples=more).json())
        whole = Path(page.report(folder)).read_text()
    finally:
        files.write_checked(folder, evaluation.FILE, kept)
    assert "<script>alert" not in whole and "&lt;script&gt;alert(1)" in whole
    assert whole.count("</script>") == 2 and whole.count("{{js}} {{data}}") == 2  # in the table, as text


def test_a_title_that_names_a_part_of_the_template_stays_a_title():
    whole = page.fill_page("{{body}} {{js}}", "<p>the body</p>", {})
    assert whole.count("the body") == 1 and "{{body}} {{js}}" in whole


def test_the_command_writes_it_anew_and_refuses_an_empty_folder(finished_run, tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "check_laws", lambda model, laws: ())
    (finished_run[1] / "report.html").unlink()
    assert regard("report", str(finished_run[1])) == f"{finished_run[1] / 'report.html'}\n"
    assert (finished_run[1] / "report.html").is_file()
    with pytest.raises(
        rg.FormatError, match=r"contains no recipe.json; a report needs a run that `regard train`"
    ):
        page.report(tmp_path)


def test_a_damaged_evaluation_is_named():
    with pytest.raises(rg.FormatError, match=r"^evaluation.json is not an evaluation of regard: "):
        Evaluation.from_json('{"rows": 1}')


def test_a_chart_draws_what_is_finite_and_names_it():
    drawn = chart("a <b>", [Line("x", [(1, 2.0), (2, float("nan")), (3, 4.0)]), Line("none", [])])
    assert "a &lt;b&gt;" in drawn and drawn.count("<path") == 1 and "from 2 to 4" in drawn
    assert "none" not in drawn and "nan" not in drawn
    assert chart("empty", [Line("x", [(1, float("inf"))])]) == ""
    many = chart("many", [Line("x", [(i, i % 7) for i in range(5000)])])
    assert len(many) < 20_000


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.013, 0.017), (-3, 12_345), (5, 5)])
def test_ticks_are_few_and_inside(low, high):
    found = ticks(low, high)
    assert 1 <= len(found) <= 6 and all(low - 1e-9 <= t <= high + 1e-9 for t in found)
    assert decades(-0.1, 0.1) and len(decades(-6, 6)) == 13


def test_a_browser_shows_it_and_heads_can_be_chosen(finished_run, browser):
    problems, at = [], browser.new_page(viewport={"width": 900, "height": 800})
    at.on("console", lambda m: problems.append(m.text) if m.type in ("error", "warning") else None)
    at.on("pageerror", lambda e: problems.append(str(e)))
    at.on("request", lambda r: None if r.url.startswith(("file:", "data:")) else problems.append(r.url))
    at.goto((finished_run[1] / "report.html").as_uri())
    assert at.locator("#heads button").count() == 3  # both heads and their mean
    at.locator("#sentence").select_option(label="one cat")
    cells = at.locator("#map rect").count()
    found = json.loads(at.locator("#data").text_content())["maps"]
    one = next(m for m in found if m["source"] == "one cat")
    assert cells == len(one["keys"]) * len(one["queries"])
    before_it = at.locator("#map").inner_html()
    at.locator("#heads button").nth(2).click()
    assert at.locator("#heads button").nth(2).get_attribute("aria-pressed") == "true"
    assert at.locator("#map").inner_html() != before_it
    at.locator("#map rect").first.hover()
    assert re.fullmatch(
        r"“.*” attends to “one” with \d+\.\d % of this head", at.locator("#reading").text_content()
    )
    assert at.evaluate("document.documentElement.scrollWidth <= 900") and not problems
    at.close()


class Holes:
    """Three sentences of which the second token is hidden."""

    def __init__(self, tokens):
        self.rows = [tokens.encode([text])[0] for text in ("abcd", "dcb", "bbaa")]
        self.sizes = torch.tensor([[len(r)] for r in self.rows])

    def __len__(self):
        return len(self.rows)

    def batch(self, rows):
        ids, lengths = Ragged.of(self.rows).pad(rows, 0)
        wanted = torch.full_like(ids, IGNORED)
        wanted[:, 1] = ids[:, 1]
        shown = ids.clone()
        shown[:, 1] = 4
        return Batch({"tokens": shown, "lengths": lengths, "targets": wanted}, len(rows))


def test_hidden_tokens_are_guessed_and_shown_in_their_sentences():
    torch.manual_seed(0)
    tokens = characters(["abcd"])
    block = rg.Block(rg.Attention(8, heads=2), rg.FeedForward(8))
    model = rg.Encoder(block, 1, embedding=rg.Embedding(len(tokens), 8), head=rg.MaskedHead()).build().eval()
    rows = Holes(tokens)
    ready = Dataset(rows, rows, rows, tokens)
    evaluated = evaluation._evaluate_masked(Evaluation(3, {}), model, ready, examples=3)
    given = rows.batch(torch.arange(3)).inputs
    with torch.no_grad():
        guess = model(given["tokens"], lengths=given["lengths"]).argmax(-1)[:, 1].tolist()
    right = sum(g == row[1] for g, row in zip(guess, rows.rows, strict=True))
    assert evaluated.scores["accuracy"] == pytest.approx(right / 3)
    assert [e.source for e in evaluated.examples] == ["a ___ cd", "d ___ b", "b ___ aa"]
    assert [e.reference for e in evaluated.examples] == ["abcd", "dcb", "bbaa"]
    said = tokens.decode([[row[0], g, *row[2:]] for g, row in zip(guess, rows.rows, strict=True)])
    assert [e.output for e in evaluated.examples] == said


@pytest.mark.long
def test_the_report_fits_a_phone_and_has_no_serious_accessibility_violation(finished_run, browser):
    assert accessibility.problems(browser, finished_run[1] / "report.html") == []

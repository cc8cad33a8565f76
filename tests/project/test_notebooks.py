"""The notebooks of examples/: their cells run, the stored ones have these cells, and results have a rich form."""

import importlib.util
import json
from pathlib import Path

import pytest

import regard as rg
from regard.lens.text_table import Table

EXAMPLES = Path(__file__).parents[2] / "examples"


def notebooks():
    located = importlib.util.spec_from_file_location("notebooks", EXAMPLES / "notebooks.py")
    module = importlib.util.module_from_spec(located)
    located.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", notebooks().NAMES)
def test_the_stored_notebook_has_the_cells_of_its_script_and_was_run_without_an_error(name):
    book = json.loads((EXAMPLES / f"{name}.ipynb").read_text("utf-8"))
    stored = [(cell["cell_type"], "".join(cell["source"])) for cell in book["cells"]]
    assert stored == notebooks().cells(name) and len(stored) > 6
    code = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    assert all(cell["execution_count"] for cell in code) and any(cell["outputs"] for cell in code)
    assert not [out for cell in code for out in cell["outputs"] if out["output_type"] == "error"]


@pytest.mark.long
@pytest.mark.parametrize("name", notebooks().NAMES)
def test_the_cells_of_a_notebook_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    space = {"__name__": "notebook"}
    for kind, text in notebooks().cells(name):
        if kind == "code":
            exec(compile(text, name, "exec"), space)


def test_a_pattern_is_a_picture_in_a_notebook():
    p = rg.causal() & rg.window(1)
    shown = p._repr_html_()
    assert shown.count("<rect") == p.count(24) == 47
    assert (
        "<code>causal() &amp; window(1)</code>" in shown and "1,999 of 1,000,000 pairs at n = 1,000" in shown
    )
    assert (
        rg.documents(__import__("torch").zeros(1, 5, dtype=int))._repr_html_() is None
    )  # for five keys only


def test_explanations_and_declarations_have_a_rich_form():
    table = rg.explain(rg.causal() & rg.window(9), n=512)._repr_html_()
    assert (
        "<th>pairs needed</th><td>5,075 of 262,144 (1.94%)</td>" in table
        and "causal() &amp; window(9)" in table
    )
    folded = rg.preset("tiny-gpt")._repr_html_()
    assert folded.count("<details") == 2 and "<b>attention: Attention</b>" in folded and "heads=4" in folded


def test_heads_are_a_table_and_a_verdict_has_a_short_repr():
    table = Table([{"layer": 0, "head": 1, "kind": "<self>", "entropy": 0.5}])
    assert "<td>&lt;self&gt;</td><td>0.500</td>" in table._repr_html_()
    verdict = rg.check(rg.attention, ["L01"], 1)
    assert repr(verdict).startswith("<Verdict on ") and len(repr(verdict)) < 120
    assert "rows sum to one" in verdict._repr_html_()

"""docs/laws.md is what bench/laws_matrix.py writes from the stored results; its marks say what was found."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from regard.laws import LAWS

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture(scope="module")
def matrix():
    sys.path.insert(0, str(BENCH))
    try:
        spec = importlib.util.spec_from_file_location("laws_matrix", BENCH / "laws_matrix.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(BENCH))


@pytest.fixture(scope="module")
def stored(matrix):
    return json.loads(matrix.STORED.read_text("utf-8"))


def test_the_page_is_written_from_the_stored_results(matrix, stored):
    facts = (stored["versions"], stored["date"], stored["machine"], stored["cases"])
    assert matrix.PAGE.read_text("utf-8") == matrix.written(stored["results"], *facts)


def test_every_target_was_tried_and_ours_breaks_nothing(matrix, stored):
    assert list(stored["results"]) == list(matrix.TARGETS)
    numbers = {one.number for one in LAWS}
    for column, told in stored["results"].items():
        assert set(told["laws"]) == numbers, column
        if column.startswith(("regard", "reference")):
            assert told["exit_code"] == 0, column


def test_what_is_known_to_be_broken_is_in_the_matrix(matrix, stored):
    def shown(column, number):
        return matrix.mark(stored["results"][column]["laws"][number])

    assert shown("Llama", "L47") == shown("Llama eager", "L47") == "✗"
    assert shown("MHA", "P03") == shown("Encoder pre", "P03") == shown("finfo.min", "P03") == "○"
    assert shown("SDPA", "P01") == "○" and shown("SDPA", "P03") == "◌"
    assert shown("SDPA", "P10") == "" and shown("SDPA", "L29") == "✓"


def test_each_mark_has_its_meaning(matrix):
    said = lambda status, text="": {"status": status, "said": text}  # noqa: E731
    assert matrix.mark(None) == matrix.mark(said("not applicable")) == ""
    assert matrix.mark(said("raised")) == matrix.mark(said("broken")) == "✗"
    assert matrix.mark(said("not promised", "observed: holds in 3 cases")) == "◌"
    assert matrix.mark(said("not promised", "observed: NaN")) == "○"
    assert matrix.mark(said("too slow")) == "…"

"""Every row a test names exists; the list of rows is the ledger's."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

from ledger_rows import (
    VERBS,
    Marker,
    Row,
    markers,
    markers_in,
    mutation,
    newest_mutants,
    row_lines,
    rows,
    summary,
)

# The ledger's own totals (its section 21).
ROWS = [20, 5, 13, 12, 24, 23, 13, 6, 33, 22, 13, 30, 7, 15]
OFFERED = {"run": 113, "cost": 71, "check": 120, "train": 31, "look": 89}


def test_there_are_236_rows_without_duplicates():
    assert len(rows()) == 236 == len({r.id for r in rows()})


def test_sections_and_verbs_add_up_to_the_ledgers_totals():
    assert list(Counter(r.section for r in rows()).values()) == ROWS
    assert Counter(v for r in rows() for v in r.verbs) == OFFERED
    assert tuple(OFFERED) == VERBS


def test_every_marker_names_a_row_that_exists():
    known = {r.id for r in rows()}
    wrong = [
        f"{m.place}: {m.row or 'write the row out as a string'}" for m in markers() if m.row not in known
    ]
    assert not wrong, "\n".join(["no such row of the ledger:", *wrong])


def test_markers_are_found_in_every_position():
    source = """
pytestmark = pytest.mark.ledger("A.1")

@pytest.mark.ledger("B.1", "B.2")
@pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.ledger("C.1"))])
def test_x(x): ...

@pytest.mark.ledger(*NAMES)
def test_y(): ...
"""
    found = sorted(markers_in(source, "t.py"), key=lambda m: m.place)
    assert found == [
        Marker("A.1", "t.py:2"),
        Marker("B.1", "t.py:4"),
        Marker("B.2", "t.py:4"),
        Marker("C.1", "t.py:5"),
        Marker(None, "t.py:8"),
    ]


def test_the_summary_counts_by_section_and_by_verb():
    three = [Row("A.1", "a", ("run", "cost")), Row("A.2", "a", ("run",)), Row("B.1", "b", ())]
    found = summary(three, {"A.1", "B.1"})
    assert found["all"] == [2, 3]
    assert found["sections"] == {"a": [1, 2], "b": [1, 1]}
    assert found["verbs"]["run"] == [1, 2] and found["verbs"]["look"] == [0, 0]
    assert (found["tested"], found["untested"]) == (["A.1", "B.1"], ["A.2"])


def test_each_row_names_its_tests_and_whether_its_mutants_are_caught(tmp_path):
    stored = [
        {"rows": ["A.1", "A.2"], "outcome": "caught"},
        {"rows": ["A.1"], "outcome": "survived"},
        {"rows": ["B.1"], "outcome": "stale"},
    ]
    (tmp_path / "mutants-2026-01-01.json").write_text(json.dumps({"mutants": []}))
    (tmp_path / "mutants-2026-01-02.json").write_text(json.dumps({"mutants": stored}))
    outcomes = newest_mutants(tmp_path)
    assert [mutation(r, outcomes) for r in ("A.1", "A.2", "B.1")] == [
        "caught 1 of 2",
        "caught 1 of 1",
        "not mutated",
    ]
    marked = [Marker("A.1", "t.py:3"), Marker("A.1", "u.py:9")]
    lines = row_lines([Row("A.1", "a", ()), Row("B.1", "b", ())], marked, outcomes)
    assert lines[0].split() == ["A.1", "caught", "1", "of", "2", "2", "tests", "t.py:3"]
    assert lines[1].split() == ["B.1", "not", "mutated", "0", "tests", "none"]
    assert newest_mutants(tmp_path / "nothing") == []


def test_the_stored_mutants_are_many_and_at_most_one_in_twenty_survives():
    outcomes = [o["outcome"] for o in newest_mutants()]
    assert len(outcomes) >= 150
    assert outcomes.count("survived") <= 0.05 * len(outcomes)


def test_every_mutant_changes_todays_source_and_has_a_test():
    script = Path(__file__).parents[2] / "bench" / "mutants.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and not done.stderr, done.stderr

"""Every row a test names exists; the list of rows is the ledger's."""

from collections import Counter

from ledger_rows import VERBS, Marker, Row, markers, markers_in, rows, summary

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

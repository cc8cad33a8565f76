"""For each row of the ledger: the test that claims it, and whether a wrong product is noticed.

    python tests/helpers/ledger_rows.py [--json] [--short]

A test names its rows: @pytest.mark.ledger("S1.Q4a.1", "S1.Q4c.1"). Files are parsed, not imported. Wrong products are
the mutants of bench/mutants.toml; bench/mutants.py ran them, and its newest result in bench/results/ is read here.
"""

import ast
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parents[1]
RESULTS = TESTS.parent / "bench" / "results"
VERBS = ("run", "cost", "check", "train", "look")


@dataclass(frozen=True)
class Row:
    """One row of sections 1 to 14: its id and the verbs it is to be offered by."""

    id: str
    section: str
    verbs: tuple[str, ...]


@dataclass(frozen=True)
class Marker:
    """One argument of a ledger marker; row is None where it is not written out as a string."""

    row: str | None
    place: str


def rows(path: Path = TESTS / "helpers" / "data" / "ledger_rows.txt") -> list[Row]:
    found, section = [], ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            section = line[2:]
        elif line.strip():
            id, *verbs = line.split()
            found.append(Row(id, section, tuple(verbs)))
    return found


def markers_in(source: str, name: str) -> Iterator[Marker]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("mark.ledger"):
            for argument in node.args:
                given = argument.value if isinstance(argument, ast.Constant) else None
                yield Marker(given if isinstance(given, str) else None, f"{name}:{argument.lineno}")


def markers(folder: Path = TESTS) -> list[Marker]:
    files = sorted(folder.rglob("test_*.py"))
    return [m for file in files for m in markers_in(file.read_text(encoding="utf-8"), file.name)]


def summary(all_rows: list[Row], tested: set[str]) -> dict:
    """Counts as [tested, all], a section and a verb at a time, and the rows on either side."""

    def share(some: list[Row]) -> list[int]:
        return [sum(r.id in tested for r in some), len(some)]

    sections = list(dict.fromkeys(r.section for r in all_rows))
    return {
        "all": share(all_rows),
        "sections": {s: share([r for r in all_rows if r.section == s]) for s in sections},
        "verbs": {v: share([r for r in all_rows if v in r.verbs]) for v in VERBS},
        "tested": [r.id for r in all_rows if r.id in tested],
        "untested": [r.id for r in all_rows if r.id not in tested],
    }


def newest_mutants(folder: Path = RESULTS) -> list[dict]:
    """The outcomes of the last mutation run; none if there was none."""
    files = sorted(folder.glob("mutants-*.json"))
    return json.loads(files[-1].read_text(encoding="utf-8"))["mutants"] if files else []


def mutation(row: str, outcomes: list[dict]) -> str:
    """How many mutants of what this row says a test noticed ("caught 2 of 2"), or "not mutated"."""
    own = [
        o["outcome"]
        for o in outcomes
        if row in o["rows"] and o["outcome"] in ("caught", "timeout", "survived")
    ]
    return f"caught {len(own) - own.count('survived')} of {len(own)}" if own else "not mutated"


def row_lines(all_rows: list[Row], marked: list[Marker], outcomes: list[dict]) -> list[str]:
    """One line per row: its id, its mutants, the number of its tests and where the first of them is."""
    tests: dict[str, list[str]] = {}
    for m in marked:
        if m.row:
            tests.setdefault(m.row, []).append(m.place)
    return [
        f"{r.id:11} {mutation(r.id, outcomes):14} {len(tests.get(r.id, [])):3} tests  {tests.get(r.id, ['none'])[0]}"
        for r in all_rows
    ]


def main() -> None:
    all_rows, marked, outcomes = rows(), markers(), newest_mutants()
    found = summary(all_rows, {m.row for m in marked if m.row})
    mutated = {r.id: mutation(r.id, outcomes) for r in all_rows}
    if "--json" in sys.argv[1:]:
        print(json.dumps(found | {"mutants": mutated}, indent=2))
        return
    if "--short" not in sys.argv[1:]:
        print("\n".join(row_lines(all_rows, marked, outcomes)), end="\n\n")
    for title in ("sections", "verbs"):
        for name, (tested, of) in found[title].items():
            print(f"{tested:4} of {of:3}  {name}")
        print()
    for section in found["sections"]:
        missing = [r.id for r in all_rows if r.section == section and r.id in found["untested"]]
        if missing:
            print(f"without a test in {section}: {', '.join(missing)}")
    print("{} of {} rows have a test".format(*found["all"]))
    tried = [text for text in mutated.values() if text != "not mutated"]
    noticed = [text for text in tried if text.split()[1] != "0"]
    print(f"{len(noticed)} of {len(tried)} rows with a mutant have one that is caught")
    print(f"{len(all_rows) - len(tried)} rows are not mutated")


if __name__ == "__main__":
    main()

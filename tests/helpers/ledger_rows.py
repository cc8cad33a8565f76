"""Which rows of the ledger have a test: the rows of data/ledger_rows.txt against the markers in tests/*/test_*.py.

    python tests/helpers/ledger_rows.py [--json]

A test names its rows: @pytest.mark.ledger("S1.Q4a.1", "S1.Q4c.1"). Files are parsed, not imported.
"""

import ast
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parents[1]
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


def main() -> None:
    all_rows = rows()
    found = summary(all_rows, {m.row for m in markers() if m.row})
    if "--json" in sys.argv[1:]:
        print(json.dumps(found, indent=2))
        return
    for title in ("sections", "verbs"):
        for name, (tested, of) in found[title].items():
            print(f"{tested:4} of {of:3}  {name}")
        print()
    for section in found["sections"]:
        missing = [r.id for r in all_rows if r.section == section and r.id in found["untested"]]
        if missing:
            print(f"without a test in {section}: {', '.join(missing)}")
    print("{} of {} rows have a test".format(*found["all"]))


if __name__ == "__main__":
    main()

"""Do the tests notice faults? Each mutant of bench/mutants.toml against the tests that cover its ledger rows.

    python bench/mutants.py                     run all, store bench/results/mutants-DATE.json and .md
    python bench/mutants.py --only schedule.py  those whose file or description contains this text
    python bench/mutants.py --check             only compare the texts with the source; 1 if one of them is stale

The source files are not modified. torch is imported once; for each mutant a child process is forked, in which the
import of the one file gives the changed text, and pytest runs the tests that cover the mutant's rows, up to the first
failure. A mutant is caught if a test fails that passes without it; so are those of its rows that this test covers.
"""

import argparse
import ast
import importlib.machinery
import json
import os
import resource
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]
SRC, TESTS, RESULTS = ROOT / "src" / "regard", ROOT / "tests", ROOT / "bench" / "results"
SECONDS = 100  # CPU time of one mutant's tests; a mutant that takes longer counts as caught, by its time
MARKS = "not compiled and not long"
PYTEST = [
    "--assert=plain",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:xdist",
    "-p",
    "no:anyio",
]  # what costs time per child


@dataclass(frozen=True)
class Mutant:
    """One fault: `old` is replaced by `new` in a file of src/regard; `add` is appended to the file."""

    file: str
    what: str
    old: str
    new: str
    rows: tuple[str, ...]
    tests: tuple[str, ...] = ()  # instead of all tests that claim the rows; "file::" is a whole file
    add: str = ""
    long: bool = False  # also the tests marked long

    def source(self) -> str:
        """The changed text of the file; an error where `old` is not there exactly once."""
        text = (SRC / self.file).read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file}: {self.what}: `old` occurs {text.count(self.old)} times")
        return text.replace(self.old, self.new) + self.add


@dataclass(frozen=True)
class Outcome:
    """What happened to a mutant: caught, survived, timeout, stale (its text is gone) or broken (no test ran)."""

    file: str
    what: str
    rows: list[str]
    outcome: str
    caught_rows: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    tests: int = 0
    seconds: float = 0.0


def mutants(path: Path = ROOT / "bench" / "mutants.toml") -> list[Mutant]:
    """Each entry is one mutant; with `each`, it is run once more for each of these rows, against its tests alone."""
    listed = tomllib.loads(path.read_text(encoding="utf-8"))
    found = []
    for file, entries in listed.items():
        for m in entries:
            rest = {"tests": tuple(m.get("tests", ())), "add": m.get("add", ""), "long": m.get("long", False)}
            if m["rows"]:
                found.append(Mutant(file, m["what"], m["old"], m["new"], tuple(m["rows"]), **rest))
            for row in m.get("each", ()):
                found.append(Mutant(file, f"{m['what']} ({row})", m["old"], m["new"], (row,), **rest))
    return found


def claims() -> dict[str, set[str]]:
    """For each ledger row the test functions that claim it, as "tests/folder/test_x.py::test_name"."""
    found: dict[str, set[str]] = {}
    for file in sorted(TESTS.rglob("test_*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            for row in _rows_of(node):
                name = f"{file.relative_to(ROOT)}::{node.name}" if isinstance(node, ast.FunctionDef) else None
                if name is not None:
                    found.setdefault(row, set()).add(name)
    return found


def _rows_of(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Call) and ast.unparse(part.func).endswith("mark.ledger"):
            yield from (
                a.value for a in part.args if isinstance(a, ast.Constant) and isinstance(a.value, str)
            )


def tests_of(mutant: Mutant, claimed: dict[str, set[str]]) -> list[str]:
    if mutant.tests:
        return [t.removesuffix("::") for t in mutant.tests]
    return sorted({t for row in mutant.rows for t in claimed.get(row, ())}, key=_slowness)


# Folders by the time of their tests, quick ones first: the run ends at the first failure.
QUICK_FIRST = ("schedule", "spec", "pattern", "reference", "costs", "nn", "position", "generation", "lens",
               "convolution", "interop", "laws", "engine", "web", "cli", "project", "training")  # fmt: skip


def _slowness(test: str) -> tuple[int, int, str]:
    """Folders in the order above; tests of a folder before those of its subfolders."""
    return QUICK_FIRST.index(test.split("/")[1]), test.count("/"), test


class Failures:
    """A pytest plugin: the functions whose tests failed, and how many tests ran. Failing examples are not shrunk."""

    def __init__(self) -> None:
        self.failed: set[str] = set()
        self.count = 0

    def pytest_configure(self, config) -> None:
        from hypothesis import Phase, settings

        current = settings.get_profile("regard")
        settings.register_profile("mutants", current, phases=(Phase.explicit, Phase.generate))
        settings.load_profile("mutants")

    def pytest_runtest_logreport(self, report) -> None:
        self.count += report.when == "call"
        if report.failed:
            self.failed.add(report.nodeid.split("[")[0])


def import_changed(file: Path, text: str) -> None:
    """From now on in this process: importing `file` executes `text`."""
    loader = importlib.machinery.SourceFileLoader
    original = loader.get_code

    def get_code(self, name):
        if self.path == str(file):
            return compile(text, self.path, "exec", dont_inherit=True)
        return original(self, name)

    loader.get_code = get_code  # type: ignore[method-assign]


def preload() -> None:
    """The packages that all tests import: each child inherits them. regard itself is imported by the child."""
    os.environ["ONEDNN_MAX_CPU_ISA"] = (
        "AVX512_CORE_BF16"  # as tests/conftest.py sets it before torch is imported
    )
    os.environ["REGARD_EXAMPLES"] = "20"  # of each law: a mutant breaks nearly every example
    import einops  # noqa: F401
    import hypothesis.strategies  # noqa: F401
    import jaxtyping  # noqa: F401
    import matplotlib.backends.backend_agg
    import matplotlib.backends.backend_svg
    import matplotlib.figure  # noqa: F401
    import numpy  # noqa: F401
    import pytest  # noqa: F401
    import sympy  # noqa: F401
    import torch
    import typer.testing  # noqa: F401

    torch.set_num_threads(1)
    assert not any(name.split(".")[0] == "regard" for name in sys.modules)


def run_tests(tests: list[str], marks: str, changed: tuple[Path, str] | None) -> tuple[str, set[str], int]:
    """(outcome, failed functions, number of tests) of a forked process that runs these tests."""
    with tempfile.NamedTemporaryFile("r") as answer:
        child = os.fork()
        if child == 0:
            _child(tests, marks, changed, Path(answer.name))
        status = os.waitpid(child, 0)[1]
        text = answer.read()
    if os.WIFSIGNALED(status):
        return ("timeout" if os.WTERMSIG(status) == signal.SIGXCPU else "broken"), set(), 0
    result = json.loads(text) if text else {"code": 3, "failed": [], "count": 0}
    if not result["count"] and not result["failed"]:
        return "broken", set(), 0
    return "ran", set(result["failed"]), result["count"]


def _child(tests: list[str], marks: str, changed: tuple[Path, str] | None, answer: Path) -> None:
    import pytest

    code, plugin = 3, Failures()
    try:
        limit = SECONDS if changed else 20 * SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
        os.chdir(ROOT)
        silent = os.open(os.environ.get("MUTANTS_LOG", os.devnull), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        sys.path.insert(0, str(ROOT / "src"))
        if changed is not None:
            import_changed(*changed)
        first = ["-x"] if changed is not None else []
        code = pytest.main(["-q", *first, *PYTEST, "-m", marks, *tests], plugins=[plugin])
        answer.write_text(
            json.dumps({"code": int(code), "failed": sorted(plugin.failed), "count": plugin.count})
        )
    except BaseException as e:  # the parent reads no answer, and calls the mutant broken
        print(f"{type(e).__name__}: {e}", file=sys.stderr)
    finally:
        os._exit(0)


class Controls:
    """Tests are run once without any mutant; a test that already fails there does not count."""

    def __init__(self) -> None:
        self.passing: set[str] = set()
        self.failing: set[str] = set()

    def genuine(self, failed: set[str], marks: str) -> set[str]:
        unknown = failed - self.passing - self.failing
        if unknown:
            now = run_tests(sorted(unknown), marks, None)[1]
            self.failing |= now
            self.passing |= unknown - now
        return failed & self.passing


def judge(mutant: Mutant, claimed: dict[str, set[str]], controls: Controls) -> Outcome:
    tests, start = tests_of(mutant, claimed), time.perf_counter()
    rows = list(mutant.rows)
    try:
        changed = (SRC / mutant.file, mutant.source())
    except (ValueError, FileNotFoundError):
        return Outcome(mutant.file, mutant.what, rows, "stale")
    marks = "not compiled" if mutant.long else MARKS
    outcome, failed, count = run_tests(tests, marks, changed)
    failed = controls.genuine(failed, marks)
    if outcome == "ran":
        outcome = "caught" if failed else "survived"
    caught = [row for row in rows if outcome == "timeout" or failed & claimed.get(row, set())]
    seconds = round(time.perf_counter() - start, 1)
    return Outcome(mutant.file, mutant.what, rows, outcome, caught, sorted(failed), count, seconds)


def table(outcomes: list[Outcome]) -> str:
    counts: dict[str, int] = {}
    for o in outcomes:
        counts[o.outcome] = counts.get(o.outcome, 0) + 1
    summary = ", ".join(f"{n} {name}" for name, n in sorted(counts.items()))
    lines = [f"# Mutants of src/regard: {len(outcomes)}, of which {summary}", ""]
    lines += ["| file | what is wrong | rows | outcome | first test that fails |", "|---|---|---|---|---|"]
    for o in outcomes:
        first = o.failed[0].split("::")[1] if o.failed else ""
        lines.append(f"| {o.file} | {o.what} | {', '.join(o.rows)} | {o.outcome} | {first} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--only", default="", help="a part of the file's name or of the description")
    options.add_argument("--check", action="store_true", help="only compare the texts with the source")
    options.add_argument(
        "--again", action="store_true", help="only what the stored result does not call caught"
    )
    options.add_argument("--out", type=Path, default=RESULTS / f"mutants-{date.today()}.json")
    given = options.parse_args()
    chosen = [m for m in mutants() if given.only in f"{m.file} {m.what}"]
    complaints, claimed = [], claims()
    for m in chosen:
        try:
            ast.parse(m.source())
        except (ValueError, FileNotFoundError, SyntaxError) as e:
            complaints.append(f"stale  {e}")
    complaints += [f"no test  {m.file}: {m.what}" for m in chosen if not tests_of(m, claimed)]
    print(*complaints, sep="\n", end="\n" if complaints else "", file=sys.stderr)
    if given.check:
        sys.exit(1 if complaints else 0)
    stored = {}
    if given.out.exists():
        stored = {(o["file"], o["what"]): Outcome(**o) for o in json.loads(given.out.read_text())["mutants"]}
    if given.again:
        chosen = [
            m for m in chosen if (m.file, m.what) not in stored or stored[m.file, m.what].outcome != "caught"
        ]
    preload()
    controls, known = Controls(), {(m.file, m.what) for m in mutants()}
    for m in chosen:
        stored[m.file, m.what] = outcome = judge(m, claimed, controls)
        print(f"{outcome.outcome:8} {outcome.seconds:6.1f} s  {m.file}: {m.what}", flush=True)
        kept = [o for key, o in stored.items() if key in known]
        given.out.write_text(
            json.dumps({"mutants": [asdict(o) for o in kept]}, indent=1, ensure_ascii=False) + "\n"
        )
        given.out.with_suffix(".md").write_text(table(kept), encoding="utf-8")


if __name__ == "__main__":
    main()

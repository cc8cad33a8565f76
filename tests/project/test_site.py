"""The documentation site: every public name is in the API reference, every link leads somewhere, it can be built."""

import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import regard as rg
from regard.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def reference():
    located = importlib.util.spec_from_file_location("site_reference", ROOT / "docs" / "_reference.py")
    module = importlib.util.module_from_spec(located)
    located.loader.exec_module(module)
    return module


def test_every_public_name_is_in_the_reference_once():
    found = [name for group in reference().names().values() for name, _ in group]
    assert sorted(found) == sorted(rg.__all__)


@pytest.mark.parametrize("name", rg.__all__)
def test_every_public_name_has_a_docstring_of_its_own(name):
    value = getattr(rg, name)
    text = inspect.getdoc(value) or ""
    signature = f"{name}("  # what a dataclass has where it is given no docstring
    assert len(text.split()) >= 2 and not (inspect.isclass(value) and text.startswith(signature)), name


def test_the_paths_of_the_reference_lead_to_the_names():
    for group in reference().names().values():
        for name, path in group:
            module, _, last = path.rpartition(".")
            assert getattr(sys.modules[module], last) is getattr(rg, name)


def test_every_command_is_in_the_reference():
    listed = {command.split()[0] for command in reference().COMMANDS}
    assert listed == {"presets", "show", "explain", *COMMANDS}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_link_of_a_page_leads_to_a_file(page):
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.S)
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'<img src="([^"]+)"', text)
    for target in targets:
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        file = (page.parent / path) if path else page
        assert file.exists(), target
        if anchor and file.suffix == ".md":
            titles = re.findall(r"^#+ (.*)$", file.read_text("utf-8"), flags=re.M)
            slugs = {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", t.lower()).strip()) for t in titles}
            assert anchor in slugs, target


def test_every_page_is_in_the_navigation():
    text = (ROOT / "mkdocs.yml").read_text("utf-8")
    for page in PAGES[1:]:
        assert str(page.relative_to(ROOT / "docs")) in text, page


@pytest.mark.long
def test_the_site_is_built_without_a_warning_and_needs_no_network(tmp_path):
    pytest.importorskip("mkdocstrings")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    pages = {p.name: p.read_text("utf-8") for p in (tmp_path / "site").rglob("*.html")}
    for name in ("attention.html", "patterns.html", "verbs.html"):
        assert "doc-heading" in pages[name]
    for text in pages.values():
        assert not re.search(r'<(?:script|link|img)[^>]+(?:src|href)="https?://', text)

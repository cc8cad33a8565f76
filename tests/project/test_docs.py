"""What the pages say is run: every Python block of README.md and docs/, and every doctest of regard."""

import doctest
import importlib
from pathlib import Path

import pytest

from doc_pages import blocks, run_page

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"
README = ROOT / "README.md"
PAGES = [page for page in [README, *sorted((ROOT / "docs").rglob("*.md"))] if page.exists()]


@pytest.mark.parametrize(
    "page", [p for p in PAGES if blocks(p.read_text("utf-8"))], ids=lambda p: str(p.relative_to(ROOT))
)
def test_every_block_of_the_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # what a page saves goes there
    run_page(page.read_text("utf-8"), str(page))


def test_a_readme_that_imports_regard_shows_it_in_a_block_that_is_run():
    text = README.read_text("utf-8")
    if "import regard" in text:
        assert any("import regard" in source for _, source in blocks(text))


def test_blocks_share_a_namespace_and_keep_their_lines():
    page = (
        "```python\nx = 2\n```\n\n```pycon\n>>> x + 1\n3\n```\n\n- a\n\n  ```python\n  assert x == 2\n  ```\n"
    )
    assert [language for language, _ in blocks(page)] == ["python", "pycon", "python"]
    run_page(page, "p")
    with pytest.raises(ZeroDivisionError) as e:
        run_page("# Title\n\n```python\nx = 1\n1 / 0\n```\n", "page.md")
    last = e.value.__traceback__
    while last.tb_next:
        last = last.tb_next
    assert (last.tb_frame.f_code.co_filename, last.tb_lineno) == ("page.md", 5)
    with pytest.raises(AssertionError, match=r"Expected:\s+4\s+Got:\s+3"):
        run_page("```pycon\n>>> 1 + 2\n4\n```\n", "p")
    assert blocks("```text\nx\n```\n```bash\ny\n```\n") == []


def modules() -> list[str]:
    """All but the kernels, which need Triton, and __main__, which runs."""
    files = [f.relative_to(SRC).with_suffix("") for f in sorted((SRC / "regard").rglob("*.py"))]
    names = [".".join(f.parts).removesuffix(".__init__") for f in files if f.name != "__main__"]
    return [n for n in names if not n.startswith("regard.engine.cuda")]


@pytest.mark.parametrize("name", modules())
def test_the_doctests_of_the_module_hold(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as e:
        if (e.name or "").startswith("regard"):
            raise
        pytest.skip(f"{name} needs {e.name}, an extra that is not here")
    if ">>>" in Path(module.__file__).read_text("utf-8"):  # most have none, and looking for them takes time
        assert doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE).failed == 0


def test_doctests_are_found():
    assert doctest.testmod(importlib.import_module("regard.errors")).attempted >= 2
    assert doctest.testmod(importlib.import_module("regard.pattern")).attempted >= 1

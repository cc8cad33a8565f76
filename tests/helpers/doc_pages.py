"""The code blocks of a page of the documentation, found and run."""

import doctest
import re

BLOCK = re.compile(r"^( *)```(python|pycon)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)


def blocks(text: str) -> list[tuple[str, str]]:
    """(language, source) of each block, after as many empty lines as there are lines before it on the page."""
    found = []
    for block in BLOCK.finditer(text):
        lines = text[: block.start(3)].count("\n")
        body = re.sub(rf"^{block[1]}", "", block[3], flags=re.MULTILINE)
        found.append((block[2], "\n" * lines + body))
    return found


def run_page(text: str, name: str) -> None:
    """Each block in order, in one namespace; a `pycon` block is a doctest."""
    space: dict = {"__name__": "page"}
    for language, source in blocks(text):
        if language == "python":
            exec(compile(source, name, "exec"), space)
        else:
            session = doctest.DocTestParser().get_doctest(source, space, name, name, 0)
            runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
            report: list[str] = []
            runner.run(session, out=report.append, clear_globs=False)
            assert not runner.failures, "".join(report)
            space.update(session.globs)

"""The API reference of the documentation site, generated while it is built: a page for each group of public names.

A hook of mkdocs. Every public name of `regard` is in exactly one group; a test compares them.
"""

import re
import subprocess
import sys
from pathlib import PurePosixPath
from posixpath import normpath
from typing import Any

GROUPS = {
    "attention": ("Attention", ("engine", "reference")),
    "patterns": ("Patterns", ("pattern",)),
    "models": ("Declarations and modules", ("spec", "position", "nn")),
    "verbs": ("Cost, check, look", ("costs", "laws", "lens")),
    "training": ("Training and generation", ("training", "generation")),
    "interop": ("Other libraries", ("interop", "convolution")),
    "errors": ("Errors", ("errors",)),
}
COMMANDS = (
    "presets",
    "show",
    "explain",
    "cost",
    "plan",
    "check",
    "look",
    "train",
    "report",
    "translate",
    "export",
)
COMMANDS += ("bench machine", "serve")


def names() -> dict[str, list[tuple[str, str]]]:
    """For each group the public names, with the path of each."""
    import regard

    found: dict[str, list[tuple[str, str]]] = {group: [] for group in GROUPS}
    for name in regard.__all__:
        module = getattr(regard, name).__module__
        package = module.split(".")[1]
        group = next(g for g, (_, packages) in GROUPS.items() if package in packages)
        found[group].append((name, f"{module}.{name}"))
    return found


def pages() -> dict[str, str]:
    """The text of each page, by its path."""
    listed = names()
    made = {}
    for group, (title, _) in GROUPS.items():
        body = "\n\n".join(f"::: {path}" for _, path in listed[group])
        made[f"reference/{group}.md"] = f"# {title}\n\n{body}\n"
    lines = [
        f"- [{GROUPS[group][0]}]({group}.md): " + ", ".join(f"`{name}`" for name, _ in found)
        for group, found in listed.items()
    ]
    intro = "Every name of `import regard as rg`; more is in the modules that the pages name."
    made["reference/index.md"] = f"# API reference\n\n{intro}\n\n" + "\n".join(lines) + "\n"
    made["reference/command_line.md"] = command_line()
    return made


def command_line() -> str:
    """The help text of each command."""
    parts = ["# The command line\n"]
    for command in COMMANDS:
        words = [sys.executable, "-m", "regard", *command.split(), "--help"]
        text = subprocess.run(words, capture_output=True, text=True, check=True, env=_plain()).stdout
        parts.append(f"## regard {command}\n\n```text\n{text.strip()}\n```\n")
    return "\n".join(parts)


def _plain() -> dict[str, str]:
    import os

    return {**os.environ, "NO_COLOR": "1", "COLUMNS": "100", "TERM": "dumb"}


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """A link to a file of the repository outside docs/ becomes its path: the site is read on its own."""
    folder = PurePosixPath("docs") / PurePosixPath(page.file.src_uri).parent

    def without_link(match: re.Match[str]) -> str:
        target = normpath(folder / match[2])
        return match[0] if target.startswith("docs/") else f"{match[1]} (`{target}`)"

    return re.sub(r"(?<!!)\[([^\]]*)\]\((\.\./[^)]*)\)", without_link, markdown)

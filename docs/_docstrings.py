"""Docstrings as Markdown, for the API reference: examples become code blocks, parameters a list.

An extension of Griffe, which reads the source while the site is built.
"""

import re
from typing import Any

import griffe


class Docstrings(griffe.Extension):
    """Rewrites every docstring before it is rendered."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value, parameters(obj))


def parameters(obj: Any) -> list[str]:
    """The names of a function's parameters, or of a class's fields."""
    if obj.is_function:
        return [p.name.lstrip("*") for p in obj.parameters]
    if obj.is_class:
        own = obj.members.get("__init__")
        return [
            *(name for name, m in obj.members.items() if m.is_attribute),
            *(parameters(own) if own else ()),
        ]
    return []


def as_markdown(text: str, names: list[str]) -> str:
    """Each paragraph of a docstring: an example, a list of parameters, or prose as it is."""
    return "\n\n".join(_paragraph(p, names) for p in re.split(r"\n\s*\n", text))


def _paragraph(text: str, names: list[str]) -> str:
    if text.lstrip().startswith(">>>"):
        lines = [re.sub(r"\s*# doctest:.*$", "", line) for line in text.splitlines()]
        return "```pycon\n" + "\n".join(lines) + "\n```"
    if text.startswith((" ", "- ", "```")) or not names:
        return text
    one = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    several = rf"(?:{one})(?:(?:, | and )(?:{one}))*"
    begins = rf"(?:^|(?<=[.;] )|(?<=[.;]\n))({several}):\s"
    if not re.search(begins, text):
        return text
    return re.sub(begins, lambda match: f"\n- `{match[1]}`: ", text).strip().replace("; \n- ", "\n- ")

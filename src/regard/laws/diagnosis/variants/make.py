"""A faulty variant from the steps of the formula that it changes."""

from typing import Any

from ..formula import Variant


def variant(name: str, family: str, fix: str, **changes: Any) -> Variant:
    return Variant(name, family, fix, changes)

"""The texts that come with regard: en-es (sentence pairs) and shakespeare; each folder says whose they are."""

from importlib.resources import files
from importlib.resources.abc import Traversable


def folder(name: str) -> Traversable:
    """The folder of a text, `en-es` or `shakespeare`."""
    return files(__name__) / name

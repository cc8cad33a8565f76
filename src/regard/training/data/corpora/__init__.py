"""The texts that come with regard: en-es (sentence pairs) and shakespeare; each folder says whose they are."""

from pathlib import Path


def folder(name: str) -> Path:
    """The folder of a text, `en-es` or `shakespeare`."""
    return Path(__file__).parent / name

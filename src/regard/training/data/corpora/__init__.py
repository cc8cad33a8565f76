"""The corpora included in regard: en-es (sentence pairs) and shakespeare; each folder names their sources."""

from pathlib import Path


def folder(name: str) -> Path:
    """The folder of a corpus, `en-es` or `shakespeare`."""
    return Path(__file__).parent / name

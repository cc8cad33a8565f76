"""The corpora included in regard: en-es (sentence pairs) and shakespeare; each folder names their sources."""

from pathlib import Path

from ....errors import SpecError

CORPORA = ("en-es", "shakespeare")


def folder(name: str) -> Path:
    """The folder of a corpus, `en-es` or `shakespeare`."""
    if name not in CORPORA:
        raise SpecError(f"no corpus {name!r}; the corpora are {', '.join(CORPORA)}")
    return Path(__file__).parent / name

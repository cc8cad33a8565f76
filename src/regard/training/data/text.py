"""Reading TSV, JSONL and plain text, also gzipped. Errors name the file and the line."""

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

from ...errors import FormatError


def lines(path: str | Path) -> Iterator[tuple[int, str]]:
    """The lines of a UTF-8 file with their numbers from 1, without their ends and without a byte order mark."""
    path = Path(path)
    try:
        with _open(path) as file:
            for number, raw in enumerate(file, 1):
                try:
                    yield number, without_mark(raw, number).decode("utf-8").rstrip("\r\n")
                except UnicodeDecodeError as e:
                    raise FormatError(
                        f"{path}, line {number}: byte {e.start + 1} is not UTF-8 ({e.reason}); convert the file first"
                    ) from e
    except FileNotFoundError as e:
        raise FormatError(f"there is no file {path}") from e
    except (IsADirectoryError, PermissionError) as e:
        raise FormatError(f"cannot read {path}: {e.strerror}") from e
    except (gzip.BadGzipFile, zlib.error, EOFError) as e:
        raise FormatError(f"{path} is not a complete gzip file: {e}") from e


def without_mark(raw: bytes, number: int) -> bytes:
    """A line of a file without the byte order mark that editors on Windows put before the first one."""
    return raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw


def pairs(path: str | Path, fields: tuple[str, str] = ("source", "target")) -> list[tuple[str, str]]:
    """Two texts per line, separated by a tab. `fields` are their names, for error messages."""
    rows = []
    for number, line in lines(path):
        parts = line.split("\t")
        if len(parts) != 2:
            tabs, expected = len(parts) - 1, "<TAB>".join(fields)
            raise FormatError(f"{path}, line {number}: {tabs} tabs where one is needed, {expected}")
        rows.append((parts[0], parts[1]))
    return _not_empty(rows, path)


def records(path: str | Path, *fields: str) -> list[tuple[str, ...]]:
    """The named fields of each line of a JSONL file."""
    rows = []
    for number, line in lines(path):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as e:
            raise FormatError(f"{path}, line {number}: not JSON: {e.msg} at column {e.colno}") from e
        if not isinstance(record, dict) or (missing := [f for f in fields if f not in record]):
            what = "not an object" if not isinstance(record, dict) else f"no field {missing[0]!r}"
            raise FormatError(f"{path}, line {number}: {what}; needed: {', '.join(fields)}")
        kinds = {list: "a list", dict: "an object", type(None): "null"}
        if wrong := [(f, kinds[type(record[f])]) for f in fields if type(record[f]) in kinds]:
            name, kind = wrong[0]
            raise FormatError(f"{path}, line {number}: the field {name!r} is {kind}, not a text")
        rows.append(tuple(str(record[f]) for f in fields))
    return _not_empty(rows, path)


def sentences(path: str | Path) -> list[str]:
    """One text per line."""
    return _not_empty([line for _, line in lines(path)], path)


def content(path: str | Path) -> str:
    """The complete text, line ends as \\n."""
    return "\n".join(_not_empty([line for _, line in lines(path)], path)) + "\n"


def pieces(whole: str, size: int = 1 << 20) -> list[str]:
    """A long text in pieces of about `size` characters, to be tokenized in parallel.

    A piece begins at the space before a word, where byte-pair encoding splits anyway: so the tokens of the pieces are
    those of the text.

    >>> pieces("one two  three four", 5)
    ['one two ', ' three', ' four']
    """
    found, start, before_word = [], 0, re.compile(r" (?=\S)")
    while match := before_word.search(whole, start + size):
        found.append(whole[start : match.start()])
        start = match.start()
    return [*found, whole[start:]]


def _not_empty(rows: list, path: str | Path) -> list:
    if not rows:
        raise FormatError(f"{path} is empty")
    return rows


def _open(path: Path) -> gzip.GzipFile | BufferedReader:
    return gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb")

"""The files of models and runs: written atomically, with a manifest of checksums that is verified when they are read.

A manifest is a JSON file in the same folder with the SHA-256 of each file that it covers. A folder without a manifest
is read as it is: version 0.1 wrote none, and a folder may be assembled by hand. The files of a run change one by one
(`write_checked`): while one is being replaced the manifest does not name it, so a process may be killed at any time.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .errors import FormatError, RegardError

MANIFEST = "manifest.json"


def write_text(path: Path, text: str) -> None:
    """Replace a file in one step: after a crash or on a full disk the old content is there, or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        flush(temporary)
        temporary.replace(path)
    except OSError as e:
        temporary.unlink(missing_ok=True)
        raise RegardError(f"cannot write {path}: {e.strerror or e}") from e


def make_folder(folder: Path) -> None:
    """Make a folder and its parents; a RegardError names the reason if it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as e:
        raise RegardError(f"{folder} is a file, and a folder is needed; choose another folder") from e
    except OSError as e:
        raise RegardError(f"cannot create {folder}: {e.strerror or e}; choose another folder") from e


def read_text(path: Path) -> str:
    """The text of a file; a FormatError names the file if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as e:
        raise FormatError(f"file not found: {path}") from e
    except OSError as e:
        raise FormatError(f"cannot read {path}: {e.strerror or e}") from e
    except UnicodeDecodeError as e:
        raise FormatError(f"{path} is not UTF-8 text: {e.reason} at byte {e.start}") from e


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; a FormatError names the file if there is none."""
    try:
        data = json.loads(read_text(path))
    except json.JSONDecodeError as e:
        raise FormatError(f"{path} is not JSON: {e.msg} at line {e.lineno}, column {e.colno}") from e
    except RecursionError as e:
        raise FormatError(f"{path} is nested too deeply") from e
    if not isinstance(data, dict):
        raise FormatError(f"{path}: expected a JSON object, not {type(data).__name__}")
    return data


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(folder: Path, names: Iterable[str]) -> None:
    """Store the checksums of these files of a folder, and keep those of other files in its manifest."""
    path = folder / MANIFEST
    sums = _sums(path) if path.is_file() else {}
    sums |= {name: checksum(folder / name) for name in names}
    write_text(path, json.dumps({"format": 1, "sha256": sums}, indent=1) + "\n")


def write_checked(folder: Path, name: str, text: str) -> None:
    """Replace a text file of a run and its checksum."""
    _remove_checksum(folder, name)
    write_text(folder / name, text)
    write_manifest(folder, (name,))


def remove_checked(folder: Path, name: str) -> None:
    """Remove a file of a run and its checksum."""
    _remove_checksum(folder, name)
    (folder / name).unlink()


def _remove_checksum(folder: Path, name: str) -> None:
    path = folder / MANIFEST
    sums = _sums(path) if path.is_file() else {}
    if name in sums:
        del sums[name]
        write_text(path, json.dumps({"format": 1, "sha256": sums}, indent=1) + "\n")


def read_checked(folder: Path, name: str) -> str:
    """The text of a file of a run, after its checksum was verified, where the manifest has one."""
    path = folder / MANIFEST
    if path.is_file():
        sums = _sums(path)
        if missing := sorted(n for n in sums if not (folder / n).is_file()):
            raise FormatError(
                f"{path} names {missing[0]}, and {folder} has no such file: one of them is damaged. Restore "
                f"the folder from a copy, or delete {path}"
            )
        if name in sums:
            verify(folder, (name,))
    return read_text(folder / name)


def _sums(path: Path) -> dict[str, Any]:
    sums = read_json(path).get("sha256")
    if not isinstance(sums, dict):
        raise FormatError(f"{path} has no checksums; it is damaged. Restore the folder from a copy")
    return sums


def verify(folder: Path, names: Iterable[str]) -> None:
    """Refuse a file whose checksum is not the one in the manifest of its folder."""
    path = folder / MANIFEST
    if not path.is_file():
        return
    sums = _sums(path)
    for name in names:
        if name not in sums:
            raise FormatError(
                f"{path} has no checksum of {name}; it is damaged. Restore the folder from a copy"
            )
        if checksum(folder / name) != sums[name]:
            raise FormatError(
                f"{folder / name} is damaged or was changed: its checksum is not the one in {MANIFEST}. Restore it "
                f"from a copy; if the change is meant, delete {path}"
            )


def flush(path: Path) -> None:
    """Flush a file or folder to disk. Windows cannot open folders; there the rename has to suffice."""
    if os.name == "nt" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

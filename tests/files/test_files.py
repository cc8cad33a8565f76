"""Files of a run: replaced in one step, verified when they are read, and a sentence where the disk is full."""

import json
import os
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import regard as rg
from regard import files
from regard.training.loop import checkpoints
from regard.training.loop.log import Log, read

FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="/dev/full is not there to write to")


def test_a_file_of_a_run_is_verified_where_the_manifest_names_it(tmp_path):
    files.write_checked(tmp_path, "a.json", "1")
    files.write_checked(tmp_path, "b.json", "2")
    assert files.read_checked(tmp_path, "a.json") == "1"
    (tmp_path / "a.json").write_text("3")
    with pytest.raises(rg.FormatError, match=r"a\.json is damaged or was changed.*delete"):
        files.read_checked(tmp_path, "a.json")
    assert files.read_checked(tmp_path, "b.json") == "2"
    files.write_checked(tmp_path, "a.json", "4")
    assert files.read_checked(tmp_path, "a.json") == "4"


def test_a_file_that_no_manifest_names_is_read_as_it_is(tmp_path):
    (tmp_path / "old.json").write_text("1")
    assert files.read_checked(tmp_path, "old.json") == "1"
    files.write_checked(tmp_path, "new.json", "2")
    assert files.read_checked(tmp_path, "old.json") == "1"


@pytest.mark.parametrize(
    "change",
    [lambda t: t.replace("a.json", "c.json"), lambda t: t.replace("sha256", "sha257"), lambda t: t[:-9]],
)
def test_a_damaged_manifest_is_refused(tmp_path, change):
    files.write_checked(tmp_path, "a.json", "1")
    path = tmp_path / files.MANIFEST
    path.write_text(change(path.read_text()))
    with pytest.raises(rg.FormatError, match=r"manifest\.json"):
        files.read_checked(tmp_path, "a.json")


def test_a_process_that_is_killed_between_a_file_and_its_checksum_leaves_a_folder_that_can_be_read(
    tmp_path, monkeypatch
):
    files.write_checked(tmp_path, "a.json", "1")

    def killed(folder, names):
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "write_manifest", killed)
    with pytest.raises(KeyboardInterrupt):
        files.write_checked(tmp_path, "a.json", "2")
    assert files.read_checked(tmp_path, "a.json") == "2"


@needs_full
def test_a_log_on_a_full_disk_ends_in_a_sentence(tmp_path):
    (tmp_path / "log.jsonl").symlink_to(FULL)
    log = Log(tmp_path)
    with pytest.raises(rg.RegardError, match=r"cannot write .*log\.jsonl: No space left on device; the"):
        log.write("train", 1, loss=1.0)
    log.close()


@contextmanager
def small_files():
    """Files of this process may have 1,000 bytes: what is written past them fails as on a full disk.

    Not a fixture: pytest writes its progress before it ends those, and that may go to a longer file.
    """
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.fixture
def saved(tmp_path):
    return rg.save(rg.preset("tiny-gpt").build(), tmp_path / "model")


def test_a_model_that_cannot_be_written_ends_in_a_sentence_and_the_old_one_stays(saved):
    before = (saved / "model.safetensors").read_bytes()
    with pytest.raises(rg.RegardError, match=r"cannot save a model in .*model"), small_files():
        rg.save(rg.preset("tiny-gpt").build(), saved)
    assert (saved / "model.safetensors").read_bytes() == before
    assert isinstance(rg.load(saved), torch.nn.Module)


def test_damaged_lines_of_a_log_are_skipped(tmp_path):
    log = Log(tmp_path)
    for step in (1, 2, 3):
        log.write("train", step, loss=step / 2)
    log.close()
    lines = (tmp_path / "log.jsonl").read_bytes().splitlines(keepends=True)
    lines[1] = lines[1].replace(b"train", b"tr\xffin")
    lines.insert(0, b"[1, 2]\n" + json.dumps({"step": 1}).encode() + b"\n")
    (tmp_path / "log.jsonl").write_bytes(b"".join(lines))
    assert [e["step"] for e in read(tmp_path)] == [1, 3]


def test_foreign_files_among_the_checkpoints_are_left_alone(tmp_path):
    weights = {"w": torch.ones(2)}
    checkpoints.write(tmp_path, 4, weights, {}, {})
    home = tmp_path / "checkpoints"
    for name in (".DS_Store", "._00000004", "Thumbs.db"):
        (home / name).write_bytes(b"\0" * os.sysconf("SC_PAGE_SIZE"))
    checkpoints.write(tmp_path, 5, weights, {}, {})
    assert checkpoints.steps(tmp_path) == [4, 5] and checkpoints.read(tmp_path).state["step"] == 5
    assert (home / ".DS_Store").is_file()

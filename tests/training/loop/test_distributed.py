"""Two ranks on the CPU, started by torchrun: the same run as one process, and checkpoints that any number reads."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import regard as rg
from regard.training.loop import checkpoints
from regard.training.loop.log import read
from regard.training.loop.ranks import ALONE, Ranks
from training_ranks import LAST, of_one_shape, trained

HERE = Path(__file__).parents[2] / "helpers"
QUICK = ("replicate", "shard", "shard-on", "shard-half", "few", "interrupted", "full", "locked", "damaged")
SLOW = ("uneven", "replicate-half", "replicate-on", "shard-after-replicate", "last", "timed")
COMPILED = ("compiled", "compiled-shard")


def launch(folder: Path, *cases: str, ranks: int = 2) -> None:
    """torchrun's own module, two ranks; or one process without it."""
    words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    path = os.pathsep.join([str(HERE), str(HERE.parents[1] / "src")])
    done = subprocess.run(
        [sys.executable, *words, str(HERE / "training_ranks.py"), str(folder), *cases],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def results(folder: Path, case: str) -> tuple[dict, dict]:
    """What the two ranks said."""
    first, second = (json.loads((folder / f"{case}-{rank}.json").read_text()) for rank in (0, 1))
    return first, second


def curve(folder: Path) -> list[float]:
    return [e["loss"] for e in read(folder, "train")]


def half(folder: Path) -> None:
    trained(folder, 6)


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A run of one process, another that stops half-way, and what two ranks do beside and after them."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "alone.json").write_text(json.dumps(trained(folder / "alone")))
    half(folder / "shard-on")
    shutil.copytree(folder / "shard-on", folder / "damaged")
    file = folder / "damaged" / "checkpoints" / "00000006" / "weights.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    launch(folder, *QUICK)
    return folder


@pytest.fixture(scope="module")
def slow(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("slow")
    (folder / "alone.json").write_text(json.dumps(trained(folder / "alone")))
    half(folder / "replicate-on")
    launch(folder, *SLOW)
    return folder


def need_the_same_run(folder: Path, case: str) -> None:
    """Loss by loss, and the model it ends with."""
    alone = json.loads((folder / "alone.json").read_text())
    for one in results(folder, case):
        assert one["step"] == alone["step"] == 12 and len(one["curve"]) == 12 and one["tied"]
        assert one["curve"] == pytest.approx(curve(folder / "alone"), abs=2e-6)
        assert one["best"] == pytest.approx(alone["best"], abs=2e-6)
        assert one["weights"] == pytest.approx(alone["weights"], abs=1e-5)


@pytest.mark.parametrize("case", ["replicate", "shard"])
def test_two_ranks_have_the_loss_curve_of_one_process(home, case):
    need_the_same_run(home, case)
    assert [e["step"] for e in read(home / case, "valid")] == [8, 12]


def test_a_run_of_one_process_goes_on_as_two_with_shards(home):
    need_the_same_run(home, "shard-on")
    assert [e["step"] for e in read(home / "shard-on", "resume")] == [6]


def test_a_run_of_two_with_shards_goes_on_as_one_process(home, tmp_path):
    shutil.copytree(home / "shard-half", tmp_path / "on")
    alone, on = json.loads((home / "alone.json").read_text()), trained(tmp_path / "on")
    assert on["tied"] and on["weights"] == pytest.approx(alone["weights"], abs=1e-5)
    assert curve(tmp_path / "on") == pytest.approx(curve(home / "alone"), abs=2e-6)


def test_ranks_write_safetensors_and_json_and_no_pickle(home):
    at = home / "shard" / "checkpoints"
    assert [p.name for p in sorted(at.iterdir())] == ["00000004", "00000008", "00000012"]
    shards = [f"shard-0000{i}-model-00001-of-00001.safetensors" for i in (1, 2)]
    for one in at.iterdir():
        assert sorted(p.name for p in one.iterdir()) == [*shards, "state.json"]
        state = json.loads((one / "state.json").read_text())
        assert sorted(state["sums"]) == shards and state["ranks"] == 2
    names = checkpoints.read(home / "shard").shapes()
    tables = [n for n in names if n.endswith("embedding.table")]
    assert tables == ["mean/model.encoder.embedding.table", "model.encoder.embedding.table"]  # tied: once
    assert names["model.encoder.embedding.table"] == (13, 16) and "random/cpu/1" in names


def test_a_shard_that_is_damaged_foreign_or_missing_is_refused(home, tmp_path):
    shutil.copytree(home / "shard" / "checkpoints", tmp_path / "checkpoints")
    at = tmp_path / "checkpoints" / "00000012"
    second = at / "shard-00002-model-00001-of-00001.safetensors"
    whole = second.read_bytes()
    for change, message in (
        (lambda: second.write_bytes(whole[:-3]), f"{second.name} is damaged: its checksum differs"),
        (lambda: second.write_bytes(bytes([whole[0] ^ 1]) + whole[1:]), f"{second.name} is damaged"),
        (lambda: second.unlink(), "[Errno 2] No such file or directory"),
        (
            lambda: (second.write_bytes(whole), (at / "a.safetensors").write_bytes(whole)),
            "a.safetensors is not one of its files",
        ),
    ):
        change()
        with pytest.raises(rg.FormatError) as refused:
            checkpoints.read(tmp_path)
        assert str(refused.value).startswith(f"checkpoint 12 of {tmp_path} cannot be read: {message}")
        assert str(refused.value).endswith(
            f"; to resume from the one before it, step 8, delete {tmp_path}/checkpoints/00000012"
        )


def test_what_one_rank_finds_damaged_no_rank_takes(home):
    first, second = results(home, "damaged")
    message = (
        f"checkpoint 6 of {home / 'damaged'} cannot be read: weights.safetensors is damaged: its checksum"
    )
    assert message in first["error"] and message in second["error"]
    assert "rank 1: " in first["error"] + second["error"]


def test_a_rank_without_rows_takes_part_and_counts_for_nothing(home, tmp_path):
    first, second = results(home, "few")
    trained(tmp_path, accumulate=1, tokens=17)
    assert first["small"] == 1 and first["best"] == second["best"]
    assert first["curve"] == pytest.approx(curve(tmp_path), abs=2e-6)


def test_a_signal_to_one_rank_ends_all_at_one_step(home):
    first, second = results(home, "interrupted")
    assert first["step"] == second["step"] == checkpoints.steps(home / "interrupted")[-1] <= 5
    assert [e["step"] for e in read(home / "interrupted", "interrupted")] == [first["step"]]


def test_a_full_disk_under_one_rank_is_everyones_error_and_the_last_checkpoint_stays(home):
    wanted = (
        f"checkpoint 3 could not be written to {home / 'full' / 'checkpoints'}: [Errno 28] No space left on device "
        "(rank 1); the last one written is step 2"
    )
    assert [one["error"] for one in results(home, "full")] == [wanted, wanted]
    assert [p.name for p in (home / "full" / "checkpoints").iterdir()] == ["00000002"]


def test_a_folder_in_use_is_refused_by_all_ranks(home):
    wanted = f"another process is training in {home / 'locked'}; give this run another folder"
    assert [one["error"] for one in results(home, "locked")] == [wanted, f"rank 0: {wanted}"]


def test_only_rank_0_logs(home):
    steps = [json.loads(line)["step"] for line in (home / "shard" / "log.jsonl").read_text().splitlines()]
    assert steps == sorted(steps) and len(curve(home / "shard")) == 12
    told_of = [json.loads(x)["event"] for x in (home / "shard" / "log.jsonl").read_text().splitlines()]
    assert told_of.count("train") == 12 and told_of.count("done") == 1


def test_without_torchrun_a_process_is_alone(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert Ranks.here() == ALONE == Ranks(0, 1, 0)
    assert ALONE.sum(2, 0.5) == [2, 0.5] and ALONE.gather("a") == ["a"] and ALONE.on_first(lambda: 3) == 3
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert str(ALONE.device("cpu")) == "cpu" and str(Ranks(3, 4, 1).device("cuda")) == "cuda:1"


@pytest.mark.long
@pytest.mark.parametrize("case", ["shard-after-replicate", "replicate-on"])
def test_a_run_changes_its_ranks_and_its_strategy_between_two_checkpoints(slow, case):
    need_the_same_run(slow, case)


@pytest.mark.long
def test_a_run_of_two_replicas_goes_on_as_one_process(slow):
    alone, on = json.loads((slow / "alone.json").read_text()), trained(slow / "replicate-half")
    assert on["weights"] == pytest.approx(alone["weights"], abs=1e-5)


@pytest.mark.long
def test_three_batches_of_two_ranks_are_one_each_and_half_of_the_third(slow, tmp_path):
    trained(tmp_path, accumulate=3)
    for one in results(slow, "uneven"):
        assert one["curve"] == pytest.approx(curve(tmp_path), abs=2e-6)


@pytest.mark.long
def test_the_last_checkpoints_are_averaged_from_shards(slow, tmp_path):
    alone = trained(tmp_path, **LAST)
    for one in results(slow, "last"):
        assert one["weights"] == pytest.approx(alone["weights"], abs=1e-5)
        assert one["best"] == pytest.approx(alone["best"], abs=2e-6)


@pytest.mark.long
def test_the_time_that_is_up_is_up_for_all(slow):
    first, second = results(slow, "timed")
    assert first["step"] == second["step"] and first["seconds"] == second["seconds"] >= 0.6


@pytest.mark.long
def test_compiled_ranks_have_the_curve_of_one_process_within_rounding(tmp_path):
    launch(tmp_path, *COMPILED)
    of_one_shape(tmp_path / "alone", compile=False)
    assert len(curve(tmp_path / "alone")) == 3
    for case in COMPILED:
        assert results(tmp_path, case)[0]["curve"] == pytest.approx(curve(tmp_path / "alone"), rel=1e-4)


@pytest.mark.long
def test_a_compiled_run_resumes_within_rounding(tmp_path):
    launch(tmp_path, "compiled-alone", ranks=1)
    through = json.loads((tmp_path / "compiled-alone-0.json").read_text())["curve"]
    shutil.rmtree(tmp_path / "compiled-alone" / "checkpoints" / "00000003")
    launch(tmp_path, "compiled-alone", ranks=1)
    assert [e["step"] for e in read(tmp_path / "compiled-alone", "resume")] == [2]
    of_one_shape(tmp_path / "eager", compile=False)
    again = curve(tmp_path / "compiled-alone")
    assert again == pytest.approx(through, rel=1e-6)
    assert again == pytest.approx(curve(tmp_path / "eager"), rel=1e-4)

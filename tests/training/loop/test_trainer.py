"""The loop: the same curve twice, the same end after any interruption, and what stops it."""

import gc
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

import regard as rg
from ledger_cases import cases
from long_cases import in_long
from regard.errors import BackendError, SpecError
from regard.schedule import constant, warmup_cosine
from regard.training.loop import checkpoints
from regard.training.loop.averaging import ema, last
from regard.training.loop.cuda_graphs import GraphedUpdates
from regard.training.loop.log import Log, read
from regard.training.loop.optimizer import AdamW
from regard.training.loop.ranks import ALONE
from regard.training.loop.settings import Settings
from regard.training.loop.trainer import Diverged, check_autocast
from regard.training.recipes.tasks import Translation
from training_case import SETTINGS, model, pairs, trainer

CASE = Path(__file__).parents[2] / "helpers" / "training_case.py"


def weights(trained) -> list[torch.Tensor]:
    return [p.detach().clone() for p in trained.task.parameters()] + [*trained.mean.state().values()]


def weights_of(trained) -> list[torch.Tensor]:
    return [p.detach().clone() for p in trained.task.parameters()]


def same(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    one = trainer(folder)
    one.run()
    return one


def curve(folder) -> list[float]:
    return [e["loss"] for e in read(folder, "train")]


def test_one_seed_gives_one_curve_bit_for_bit(whole, tmp_path):
    again = trainer(tmp_path)
    again.run()
    assert curve(tmp_path) == curve(whole.folder) and len(curve(tmp_path)) == 12
    assert same(weights(again), weights(whole))
    other = trainer(tmp_path / "other", seed=4)
    other.run()
    assert curve(tmp_path / "other") != curve(whole.folder)


def test_it_learns(whole):
    losses = curve(whole.folder)
    assert losses[-1] < 0.8 * losses[0]
    assert read(whole.folder, "valid")[-1]["loss"] < read(whole.folder, "valid")[0]["loss"]


@pytest.mark.ledger("S1.Q7b.1")
@pytest.mark.parametrize("c", cases("train.clip"), ids=lambda c: c["id"])
def test_gradients_are_clipped_by_their_norm_and_keep_their_direction(c, tmp_path):
    g, expected = torch.tensor(c["inputs"]["g"], dtype=torch.float32), c["expected"]
    one = trainer(tmp_path, clip=float(c["inputs"]["max_norm"]))
    first, second = list(one.task.parameters())[:2]
    for p, value in ((first, g[0]), (second, g[1])):  # the norm is that of all parameters together
        p.grad = torch.zeros_like(p)
        p.grad.view(-1)[0] = value
    assert float(one._clip()) == pytest.approx(expected["norm"])
    clipped = torch.stack([p.grad.view(-1)[0] for p in (first, second)])
    assert clipped.tolist() == pytest.approx(expected["clipped"], abs=1e-5)
    assert float(clipped.norm()) == pytest.approx(expected["new_norm"], abs=1e-5)


@pytest.mark.ledger("S1.Q7b.1")
def test_an_update_uses_the_clipped_gradient(tmp_path):
    """Plain gradient descent: the step is rate · min(1, clip/norm) · gradient."""
    moved = {}
    for clip in (None, 0.01):
        one = trainer(tmp_path / str(clip), clip=clip, schedule=constant(0.5), dropout=0.0, average=None)
        one.optimizer = torch.optim.SGD(one.task.parameters(), 1.0)
        before = weights_of(one)
        norm = float(one._update()[2])
        moved[clip] = torch.cat([(a - b).flatten() for a, b in zip(weights_of(one), before)])
        assert norm > 0.1 and float(moved[clip].norm()) == pytest.approx(
            0.5 * min(norm, clip or norm), rel=1e-3
        )
    assert torch.cosine_similarity(moved[None], moved[0.01], 0) > 0.999


@pytest.mark.ledger("S1.Q7a.1", "S1.Q7b.1")
def test_the_first_update_uses_step_1_and_the_norm_is_logged(whole):
    events = read(whole.folder, "train")
    rate = SETTINGS.schedule
    assert [e["rate"] for e in events] == [rate(e["step"]) for e in events]
    assert all(e["norm"] > 0 and e["tokens_per_second"] > 0 and 0 <= e["padding_share"] < 0.5 for e in events)


@pytest.mark.parametrize("stop", [4, *in_long(12), 20])
def test_a_run_that_is_resumed_ends_where_the_other_did(whole, tmp_path, stop):
    first = trainer(tmp_path)
    first.settings = replace(SETTINGS, steps=stop)
    first.run()
    second = trainer(tmp_path)
    second.run()
    assert second.step == 24 and same(weights(second), weights(whole))
    assert curve(tmp_path) == curve(whole.folder)
    assert [e["step"] for e in read(tmp_path, "resume")] == [stop]


def run_and_kill(folder: Path, chance: random.Random) -> int:
    """Start the case, kill it at a random moment, give back how many steps are safe."""
    env = {**os.environ, "PYTHONPATH": f"{CASE.parent}{os.pathsep}{CASE.parents[2] / 'src'}"}
    run = subprocess.Popen(
        [sys.executable, str(CASE), str(folder)], stdout=subprocess.PIPE, text=True, env=env
    )
    first = run.stdout.readline()
    assert first, "it ended before its first event"
    time.sleep(chance.uniform(0.0, 0.25))
    run.send_signal(signal.SIGKILL)
    run.wait()
    run.stdout.close()
    return (checkpoints.steps(folder) or [0])[-1]


def killed_often(folder: Path, whole, kills: int, seed: int) -> None:
    chance, safe = random.Random(seed), 0
    for _ in range(kills):
        now = run_and_kill(folder, chance)
        assert now >= safe, "a kill lost a checkpoint"
        safe = now
        if safe == 24:
            break
    last = trainer(folder)
    last.run()
    assert last.step == 24 and same(weights(last), weights(whole)) and curve(folder) == curve(whole.folder)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL here")
def test_kill_9_at_random_moments_loses_nothing_but_time(whole, tmp_path):
    killed_often(tmp_path, whole, kills=1, seed=0)  # thirty times by `make long`


@pytest.mark.long
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL here")
@pytest.mark.parametrize("seed", range(10))
def test_kill_9_thirty_times(whole, tmp_path, seed):
    killed_often(tmp_path, whole, kills=3, seed=seed)


def test_the_last_k_are_kept_and_nothing_temporary(whole):
    assert checkpoints.steps(whole.folder) == [16, 20, 24]
    assert sorted(p.name for p in (whole.folder / "checkpoints").iterdir()) == [
        "00000016",
        "00000020",
        "00000024",
    ]
    files = {p.name for p in (whole.folder / "checkpoints" / "00000024").iterdir()}
    assert files == {"weights.safetensors", "optimizer.safetensors", "state.json"}


def damaged(whole, tmp_path, change) -> str:
    for step in (20, 24):
        source = whole.folder / "checkpoints" / f"{step:08d}"
        target = tmp_path / "checkpoints" / f"{step:08d}"
        target.mkdir(parents=True)
        for file in source.iterdir():
            (target / file.name).write_bytes(file.read_bytes())
    change(tmp_path / "checkpoints" / "00000024")
    with pytest.raises(rg.FormatError) as refused:
        trainer(tmp_path).run()
    trainer(tmp_path).resume(20)
    return str(refused.value)


def flip(folder):
    file = folder / "weights.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)


def shorten(folder):
    file = folder / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def reformat(folder):
    (folder / "state.json").write_text(json.dumps({"format": 2}))


def advance(folder):
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(state | {"step": 23}))


DAMAGE = {
    advance: "state.json is damaged or was changed: its checksum differs from the stored one",
    flip: "weights.safetensors is damaged: its checksum differs from the stored one",
    shorten: "optimizer.safetensors is damaged: its checksum differs from the stored one",
    reformat: "its format is 2, not 1",
    lambda f: (f / "state.json").write_text("{"): "Expecting property name",
    lambda f: (f / "state.json").write_text("[1, 2]"): "state.json holds a list, where an object with the",
    lambda f: (f / "state.json").write_text("[" * 100_000): "maximum recursion depth exceeded",
    lambda f: (f / "weights.safetensors").unlink(): "[Errno 2] No such file or directory",
}


@pytest.mark.parametrize(
    "change",
    DAMAGE,
    ids=["another step", "flipped bit", "truncated", "foreign", "half JSON", "list", "nested", "missing"],
)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_is_offered(whole, tmp_path, change):
    message = damaged(whole, tmp_path, change)
    assert message.startswith(f"checkpoint 24 of {tmp_path} cannot be read: {DAMAGE[change]}")
    assert message.endswith(
        f"; to resume from the one before it, step 20, delete {tmp_path}/checkpoints/00000024"
    )


def test_a_checkpoint_under_the_name_of_another_step_is_refused(whole, tmp_path):
    message = damaged(whole, tmp_path, lambda folder: swap(folder, folder.parent / "00000020"))
    assert "state.json is of step 20, and the folder of step 24" in message


def swap(one, two):
    for file in one.iterdir():
        file.write_bytes((two / file.name).read_bytes())


def test_files_of_the_desktop_beside_checkpoints_do_not_stop_training(tmp_path):
    home = tmp_path / "checkpoints"
    home.mkdir()
    (home / ".DS_Store").write_bytes(b"x")
    (home / "²").mkdir()
    (home / ".00000002").mkdir()
    one = trainer(tmp_path)
    one.run()
    assert (home / ".DS_Store").is_file() and not (home / ".00000002").exists()
    assert checkpoints.steps(tmp_path)[-1] == one.step


def test_checkpoints_that_are_not_there_are_named(whole, tmp_path):
    with pytest.raises(rg.FormatError, match=r"contains no checkpoint; train there first$"):
        checkpoints.read(tmp_path)
    with pytest.raises(rg.FormatError, match=r"has no checkpoint 3; there are 16, 20, 24$"):
        checkpoints.read(whole.folder, 3)


def test_another_models_checkpoint_is_refused(whole):
    with pytest.raises(
        rg.FormatError, match=r"has shape \(13, 16\) in the checkpoint and \(17, 16\) in the model$"
    ):
        trainer(whole.folder, vocab=17).resume()


@pytest.mark.parametrize("rows", [59, 60, 61])
def test_a_run_does_not_go_on_with_other_rows(whole, tmp_path, rows):
    """Its epochs would be others, and its position in them may be past their end."""
    shutil.copytree(whole.folder, tmp_path / "copy")
    other = trainer(tmp_path / "copy")
    other.train = pairs(rows, seed=5)
    with pytest.raises(rg.FormatError) as refused:
        other.resume()
    assert str(refused.value) == (
        f"the training rows are not those that the run in {tmp_path / 'copy'} began with: its data has changed; "
        "restore it, or use another folder"
    )


def test_two_runs_in_one_folder_are_refused(tmp_path):
    with checkpoints.locked(tmp_path), pytest.raises(rg.RegardError) as refused:
        trainer(tmp_path).run()
    assert str(refused.value) == f"another process is training in {tmp_path}; give this run another folder"
    trainer(tmp_path, steps=2).run()


def test_a_disk_that_is_full_leaves_the_checkpoint_before(whole, tmp_path, monkeypatch):
    one = trainer(tmp_path, steps=4)
    one.run()

    def full(*given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "save_file", full)
    with pytest.raises(rg.RegardError) as refused:
        one.save()
    assert str(refused.value).endswith("[Errno 28] No space left on device; the last one written is step 4")
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["00000004"]


@pytest.mark.skipif(sys.platform == "win32", reason="no limit on files here")
def test_a_file_that_cannot_grow_leaves_the_checkpoint_before(tmp_path):
    """The system's own refusal, in the middle of a file."""
    import resource

    one = trainer(tmp_path, steps=4)
    one.run()
    one.step = 5
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(rg.RegardError) as refused:
            one.save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(refused.value).startswith(f"checkpoint 5 could not be written to {tmp_path / 'checkpoints'}: ")
    assert "File too large" in str(refused.value)
    assert str(refused.value).endswith("; the last one written is step 4")
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["00000004"]
    trainer(tmp_path).resume()


def test_a_gradient_that_is_not_finite_stops_and_names_the_step(tmp_path):
    one = trainer(tmp_path, steps=4)
    one.run()
    two = trainer(tmp_path)
    two.resume()
    with torch.no_grad():
        next(two.task.parameters())[5] = math.nan
    with pytest.raises(Diverged) as stopped:
        list(two._events(lambda: False))
    assert "the gradient is not finite at step 5" in str(stopped.value)
    assert "the last good checkpoint is step 4" in str(stopped.value)
    assert checkpoints.steps(tmp_path) == [4]


@pytest.mark.parametrize(
    "signals", [(signal.SIGTERM,), (signal.SIGINT, signal.SIGTERM), *in_long((signal.SIGINT,))], ids=str
)
def test_ctrl_c_and_sigterm_save_and_leave_and_the_run_goes_on(whole, tmp_path, signals):
    one = trainer(tmp_path)

    def at_step_6(event):
        if event["step"] == 6 and event["event"] == "train":
            for number in signals:
                os.kill(os.getpid(), number)

    one.run(at_step_6)
    assert checkpoints.steps(tmp_path)[-1] == one.step in (6, 7)
    assert [e["step"] for e in read(tmp_path, "interrupted")] == [one.step]
    two = trainer(tmp_path)
    two.run()
    assert same(weights(two), weights(whole))


def test_accumulated_batches_are_one_large_batch(tmp_path):
    """With every row in each: two halves added up are the whole."""
    data = pairs(40, 5)

    def after(tokens, accumulate):
        one = trainer(tmp_path / str(accumulate), accumulate=accumulate, average=None, smoothing=0.0)
        one.task.double().eval()
        one.optimizer = one.settings.optimizer.build(one.task)
        one.train, one.stream.lengths, one.stream.max_tokens = data, data.sizes, tokens
        one.task.train = lambda mode=True: one.task  # no dropout: the halves draw other numbers
        one._update()
        return [p.detach() for p in one.task.parameters()], one.stream

    total = int(data.sizes.amax(0).sum()) * 40
    (large, stream) = after(total, 1)
    assert len(stream.plan) == 1
    halves = (after(t, 2) for t in range(total // 2, total, 7))
    two = next(p for p, s in halves if len(s.plan) == 2)
    assert all(torch.allclose(a, b, atol=1e-9) for a, b in zip(large, two, strict=True))


def test_clipping_bounds_the_norm_and_below_it_changes_nothing(tmp_path):
    def moved(clip):
        one = trainer(tmp_path / str(clip), clip=clip, schedule=constant(1.0))
        one.optimizer = torch.optim.SGD(one.task.parameters(), lr=1.0)
        before = [p.detach().clone() for p in one.task.parameters()]
        norm = float(one._update()[2])
        return norm, math.sqrt(
            sum(((a - b) ** 2).sum().item() for a, b in zip(before, one.task.parameters(), strict=True))
        )

    norm, free = moved(None)
    assert abs(norm - free) < 1e-5 * norm
    assert moved(2 * norm)[1] == pytest.approx(free, rel=1e-6)
    assert moved(norm / 4)[1] == pytest.approx(norm / 4, rel=1e-3)


def test_minutes_end_a_run_and_stretch_the_schedule(tmp_path):
    one = trainer(tmp_path, minutes=0.02, steps=1000, schedule=warmup_cosine(0.01, 100, 1000))
    one.run()
    rates = [e["rate"] for e in read(tmp_path, "train")]
    assert 1.1 < one.seconds < 4 and one.step != 1000 and min(rates[-3:]) < 0.003 < max(rates)


def test_no_better_loss_for_a_while_ends_a_run(tmp_path):
    one = trainer(tmp_path, patience=1, valid_every=1, schedule=constant(1e-12), average=None)
    one.run()
    assert one.step <= 5


def test_early_stopping_gives_the_model_of_the_best_validation(tmp_path):
    """A rate that ruins the model after its first validation: the weights are those of the best one, also resumed."""
    one = trainer(
        tmp_path, patience=2, valid_every=2, steps=40, schedule=constant(0.3), average=None, clip=None
    )
    validated = []
    real = one._validate

    def validate():
        result = real()
        validated.append(
            (result["loss"], {n: p.detach().clone() for n, p in one.task.model.named_parameters()})
        )
        return result

    one._validate = validate
    one.run()
    losses = [loss for loss, _ in validated]
    best = losses.index(min(losses))
    assert one.step < 40 and best == len(losses) - 4  # three worse ones ended the run
    model = deepcopy(one.task.model)
    one.fill(model)
    assert all(torch.equal(p, validated[best][1][n]) for n, p in model.named_parameters())
    again = trainer(
        tmp_path, patience=2, valid_every=2, steps=40, schedule=constant(0.3), average=None, clip=None
    )
    again.resume()
    again.fill(model)
    assert all(torch.equal(p, validated[best][1][n]) for n, p in model.named_parameters())
    (tmp_path / "best.safetensors").write_bytes(b"cut")
    with pytest.raises(rg.FormatError, match="the weights of the best validation, cannot be read"):
        again.fill(model)


def test_a_gpu_without_bfloat16_is_refused_in_words(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    cuda = torch.device("cuda")
    with pytest.raises(rg.BackendError) as e:
        check_autocast("bfloat16", cuda)
    assert str(e.value) == "Tesla T4 has no bfloat16; use autocast='float16' or None, or device='cpu'"
    check_autocast("float16", cuda)
    check_autocast("bfloat16", torch.device("cpu"))


def test_a_driver_that_pytorch_cannot_use_is_explained_and_the_cpu_still_works(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(rg.BackendError) as e:
        ALONE.device("cuda")
    assert str(e.value) == (
        "device='cuda': PyTorch finds no usable GPU (is there one, and is its driver new enough? see nvidia-smi); "
        "use device='cpu'"
    )
    assert ALONE.device(None) == torch.device("cpu")


def test_autocast_trains(tmp_path):
    one = trainer(tmp_path, autocast="bfloat16", steps=6)
    one.run()
    assert all(p.dtype == torch.float32 for p in one.task.parameters()) and len(curve(tmp_path)) == 3


def test_float16_scales_its_loss_leaves_out_what_overflows_and_remembers_the_scale(tmp_path):
    one = trainer(tmp_path, autocast="float16", steps=4, average=None)
    one.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)  # too large for float16
    before = weights_of(one)
    one.run()
    assert one.scaler.get_scale() == 2.0**36 and same(weights_of(one), before)
    two = trainer(tmp_path, autocast="float16", steps=8, average=None)
    two.resume()
    assert two.scaler.get_scale() == 2.0**36
    two.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    two.run()
    assert two.scaler.get_scale() == 2.0**32 and two.step == 8  # the checkpoint's counts
    other = trainer(tmp_path / "other", autocast="float16", average=None)
    other.run()
    assert other.scaler.get_scale() == 2.0**16 and curve(other.folder)[-1] < 0.85 * curve(other.folder)[0]


def test_float16_that_no_scale_saves_has_diverged(tmp_path):
    one = trainer(tmp_path, autocast="float16", average=None)
    one.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with torch.no_grad():
        next(one.task.parameters())[5] = math.nan
    with pytest.raises(Diverged, match=r"the gradient is not finite at step 2 .*there is no checkpoint yet"):
        one.run()


def gradients(dropout: float, checkpoint: bool) -> tuple[list[torch.Tensor], int]:
    """Of one batch, and how many bytes the forward pass kept for the backward pass."""
    task = Translation(model(dropout=dropout, checkpoint=checkpoint), 0.1).train()
    kept = []
    torch.manual_seed(7)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes) or t, lambda t: t):
        task(**pairs(20, 5).batch(torch.arange(20)).inputs)[0].backward()
    return [p.grad for p in task.parameters()], sum(kept)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_recomputed_blocks_give_the_same_gradients_bit_for_bit_and_keep_less(dropout):
    """With dropout too: the dice fall again as they fell."""
    plain, whole_bytes = gradients(dropout, checkpoint=False)
    again, bytes_kept = gradients(dropout, checkpoint=True)
    assert same(plain, again) and bytes_kept < 0.7 * whole_bytes
    if dropout:
        assert not same(plain, gradients(0.0, checkpoint=False)[0])


def test_the_last_checkpoints_are_averaged(tmp_path):
    kept = {}

    def remember(event):
        if event["event"] == "save":
            kept[event["step"]] = weights_of(one)

    one = trainer(tmp_path, average=last(3), keep=3)
    one.run(remember)
    wanted = [sum(ws) / 3 for ws in zip(*(kept[s] for s in (16, 20, 24)), strict=True)]
    with one.averaged():
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(weights_of(one), wanted, strict=True))
        assert not same(weights_of(one), kept[24])
    assert same(weights_of(one), kept[24])
    made = model()
    one.fill(made)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(made.parameters(), wanted, strict=True))
    assert made.decoder.embedding.table is made.encoder.embedding.table


def test_a_run_that_averages_its_last_checkpoints_resumes_bit_for_bit_after_ctrl_c(tmp_path):
    """Ctrl-C's own checkpoint, between two others, is not averaged and takes no one's place."""
    through = trainer(tmp_path / "a", average=last(3), valid_every=3)
    through.run()
    first = trainer(tmp_path / "b", average=last(3), valid_every=3)
    first.run(lambda e: e["step"] == 10 and e["event"] == "train" and os.kill(os.getpid(), signal.SIGINT))
    assert checkpoints.steps(tmp_path / "b") == [4, 8, first.step] and first.step % 4
    second = trainer(tmp_path / "b", average=last(3), valid_every=3)
    second.run()
    losses = [[e["loss"] for e in read(tmp_path / name, "valid")] for name in "ab"]
    assert losses[0] == losses[1] and len(losses[0]) == 8
    with through.averaged(), second.averaged():
        assert same(weights_of(through), weights_of(second))


def test_the_mean_is_swapped_in_and_out(whole):
    live = [p.detach().clone() for p in whole.task.parameters()]
    with whole.averaged():
        assert not same(live, list(whole.task.parameters()))
        tied = whole.task.model
        assert tied.decoder.embedding.table is tied.encoder.embedding.table
    assert same(live, list(whole.task.parameters()))


def test_a_line_cut_by_a_kill_is_mended_and_nan_is_a_word(tmp_path):
    log = Log(tmp_path)
    log.write("train", 1, loss=2.0)
    log.close()
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"event": "tr')
    log = Log(tmp_path)
    log.write("train", 2, loss=math.nan)
    log.close()
    assert [(e["step"], e["loss"]) for e in read(tmp_path)] == [(1, 2.0), (2, "nan")]


REFUSED = {
    "steps=0: it needs to be at least 1": lambda: replace(SETTINGS, steps=0),
    "steps=2.5: a whole number is needed": lambda: replace(SETTINGS, steps=2.5),
    "accumulate=True: a whole number is needed": lambda: replace(SETTINGS, accumulate=True),
    "log_every='20': a whole number is needed": lambda: replace(SETTINGS, log_every="20"),
    "seed=0.5: a whole number is needed": lambda: replace(SETTINGS, seed=0.5),
    "patience=-1: it needs to be at least 0": lambda: replace(SETTINGS, patience=-1),
    "clip=-1: the norm needs to be more than 0; None does not clip": lambda: replace(SETTINGS, clip=-1),
    "clip=0: the norm needs to be more than 0; None does not clip": lambda: replace(SETTINGS, clip=0),
    "decay=-0.1: it needs to be at least 0 and finite": lambda: AdamW(decay=-0.1),
    "eps=inf: it needs to be at least 0 and finite": lambda: AdamW(eps=math.inf),
    "seed=99999999999999: it needs to be between -2^32 and 2^32": lambda: replace(
        SETTINGS, seed=99999999999999
    ),
    "minutes=-1: it needs to be more than 0": lambda: replace(SETTINGS, minutes=-1),
    "autocast='half'; use 'bfloat16', 'float16' or None": lambda: replace(SETTINGS, autocast="half"),
    "betas=(0.9, 1.0): both need to be in [0, 1)": lambda: AdamW(betas=(0.9, 1.0)),
    "ema(1): the decay needs to be in [0, 1)": lambda: ema(1),
    "last(0): at least 1 is needed": lambda: last(0),
    "last(k=5) averages more checkpoints than keep=3 stores; raise keep": lambda: replace(
        SETTINGS, average=last(5)
    ),
    "parallel='split'; use 'replicate' or 'shard'": lambda: replace(SETTINGS, parallel="split"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_settings_that_cannot_be_are_refused(message):
    assert isinstance(SETTINGS, Settings)
    with pytest.raises(rg.SpecError) as refused:
        REFUSED[message]()
    assert str(refused.value) == message


def test_betas_may_be_whole_numbers():
    """With betas of 0, an update is rate · g/|g|, up to eps."""
    model = torch.nn.Linear(3, 2, bias=False)
    before, grad = model.weight.detach().clone(), torch.tensor([[1.0, -2.0, 4.0], [-3.0, 5.0, 0.5]])
    optimizer = AdamW(betas=(0, 0)).build(model)
    optimizer.param_groups[0]["lr"], model.weight.grad = 0.25, grad
    optimizer.step()
    torch.testing.assert_close(before - model.weight.detach(), 0.25 * grad.sign())


def test_a_device_that_is_not_there_is_named():
    with pytest.raises(SpecError, match=r"^device='gpu' is unknown; use 'cpu', 'cuda' or 'cuda:1'$"):
        ALONE.device("gpu")
    if not torch.cuda.is_available():
        with pytest.raises(BackendError, match=r"^device='cuda': .*; use device='cpu'$"):
            ALONE.device("cuda")


def test_ends_are_not_fused_on_a_cpu(tmp_path):
    asked = []
    with mock.patch("regard.training.loop.trainer.fuse_branch_ends", lambda task, fuses: asked.append(fuses)):
        trainer(tmp_path, steps=1)
    assert asked == [False]


def test_no_garbage_is_collected_while_a_graph_is_captured(monkeypatch):
    """Collecting an older graph would end the capture. Without a GPU a capture is replaced by the update itself."""
    for name, fake in {
        "graph": lambda *_, **__: nullcontext(),
        "CUDAGraph": object,
        "graph_pool_handle": int,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    collects = []

    def work(inputs, divisor):
        collects.append(gc.isenabled())
        return inputs[0]["x"].sum(), divisor

    updates = GraphedUpdates(work, torch.device("cpu"))
    for _ in range(2):
        updates([{"x": torch.ones(3)}], 1.0)
    graph = updates._capture([{"x": torch.ones(3)}])
    assert graph is not None and collects == [True, True, False] and gc.isenabled()
    gc.disable()
    try:
        updates._capture([{"x": torch.ones(3)}])
        assert not gc.isenabled()  # who turned it off finds it so
    finally:
        gc.enable()
